"""Making schedules: GPipe and 1F1B over a stage graph, and the forward pass alone.

A schedule says three things: the order of each stage's own F and B, how many microbatches may be in flight, and a
priority among the ops that could run now. One list scheduler turns them, with nominal costs, into a total order.

1F1B on a graph (Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training", §3.3 and
appendix D): warm-up, steady state and drain of a stage follow from its distance to the sink and not from its place in a
chain, so unequal encoders join one LLM without special cases. Why no order of this kind deadlocks: a stage reaches its
i-th B after F up to i + distance, its consumers need no more than that for theirs because distance never grows
downstream, and an op holds its ranks only while it runs.
"""

from __future__ import annotations

from collections.abc import Callable

from mmjax.schedule.graph import StageGraph, StageNode
from mmjax.schedule.list_scheduler import list_schedule
from mmjax.schedule.ops import Op, Schedule
from mmjax.schedule.simulate import Costs


def gpipe(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """Every stage runs all its F, then all its B; all microbatches are in flight."""
    orders = {stage.name: _phases(stage, microbatches) for stage in graph.stages}
    in_flight = {stage.name: microbatches for stage in graph.stages}
    return list_schedule(graph, microbatches, costs, orders=orders, in_flight=in_flight, name="gpipe").schedule


def one_f_one_b(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """Every stage runs min(microbatches, distance + 1) F, then B and F in turn, then the B that are left.

    So a stage never has more than distance + 1 microbatches in flight. A stage without backward has no turn to take and
    keeps the same bound by awaiting its consumers.
    """
    orders = {stage.name: _turns(stage, microbatches, graph.distance(stage.name) + 1) for stage in graph.stages}
    in_flight = {stage.name: graph.distance(stage.name) + 1 for stage in graph.stages}
    return list_schedule(graph, microbatches, costs, orders=orders, in_flight=in_flight, name="1f1b").schedule


def forward_only(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """F alone, for evaluation, over `graph.forward_only()`; in flight as in 1F1B."""
    forward = one_f_one_b(graph.forward_only(), microbatches, costs)
    return Schedule(
        graph=forward.graph, microbatches=microbatches, ops=forward.ops, name="forward", in_flight=forward.in_flight
    )


SCHEDULES: dict[str, Callable[[StageGraph, int, Costs], Schedule]] = {"1f1b": one_f_one_b, "gpipe": gpipe}
"""The schedules that a training step can have, by the name in `Train.schedule`."""


def _phases(stage: StageNode, microbatches: int) -> list[Op]:
    """The order of one stage's ops in GPipe: a W right behind its B."""
    order = [Op("F", stage.name, m) for m in range(microbatches)]
    return order + [op for m in range(microbatches) for op in _backward(stage, m)]


def _turns(stage: StageNode, microbatches: int, warmup: int) -> list[Op]:
    """The order of one stage's ops in 1F1B: `warmup` F, then backward and F in turn, a W right behind its B."""
    forwards = [Op("F", stage.name, m) for m in range(microbatches)]
    order = forwards[:warmup]
    for microbatch in range(microbatches):
        order += _backward(stage, microbatch)
        order += forwards[warmup + microbatch : warmup + microbatch + 1]
    return order


def _backward(stage: StageNode, microbatch: int) -> list[Op]:
    return [Op(kind, stage.name, microbatch) for kind in "BW"[: stage.backward + stage.split]]
