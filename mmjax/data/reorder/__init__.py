"""Reordering inside a step's global batch, so that no dp rank and no microbatch keeps the others waiting. No JAX."""

from mmjax.data.reorder.partition import balanced, greedy, least_load
from mmjax.data.reorder.pipeline import METHODS, Order, Pipeline, rows_of_ranks
from mmjax.data.reorder.search import Effort
from mmjax.data.reorder.steps import ModuleCost, Reordered, StepOrder, train_schedule

__all__ = [
    "METHODS",
    "Effort",
    "ModuleCost",
    "Order",
    "Pipeline",
    "Reordered",
    "StepOrder",
    "balanced",
    "greedy",
    "least_load",
    "rows_of_ranks",
    "train_schedule",
]
