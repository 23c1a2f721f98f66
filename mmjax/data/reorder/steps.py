"""The order of a training step's samples, from their metadata alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmjax.configurable import ConfigError
from mmjax.data.packing import Packer
from mmjax.data.reorder.pipeline import Order, Padded, Pipeline
from mmjax.data.types import SampleMeta
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import Schedule
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs, Timeline
from mmjax.schedule.validate import ScheduleError


@dataclass(frozen=True, kw_only=True)
class ModuleCost:
    """Costs of the stages of a module for the segments of a cell, in the unit of the schedule's costs.

    A segment is a medium (its length counts patches) or a sample (its length counts tokens).

    Attributes:
      forward: cost of a position in a forward, by stage.
      backward: cost of a position in a backward, by stage.
      pairs: cost of attention between two positions of a segment, relative to the cost of a position.
    """

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    pairs: float = 0.0

    def seconds(self, segments: Sequence[int]) -> tuple[float, float]:
        """Costs of forward and backward of segments of these lengths, summed over all stages."""
        positions = sum(n + self.pairs * n * n for n in segments)
        return positions * sum(self.forward.values()), positions * sum(self.backward.values())

    def shares(self) -> dict[str, tuple[float, float]]:
        """Each stage's shares of the module's forward and of its backward, by stage; each adds up to 1, or is 0."""
        forward, backward = sum(self.forward.values()), sum(self.backward.values())
        return {
            stage: (cost / forward if forward else 0.0, self.backward[stage] / backward if backward else 0.0)
            for stage, cost in self.forward.items()
        }


@dataclass(frozen=True, kw_only=True)
class Reordered:
    """The order of a step's samples.

    Attributes:
      order: the samples by microbatch, cell and row, as `Packer` takes them; a sample is its place in `metas`.
      figures: "imbalance_nominal" and "imbalance_given": nominal seconds of the largest cell of each microbatch (of
        each unit if stages have lanes) over the mean cell's, with and without reordering. "reorder_gain": the step's
        simulated time without reordering over its time with it.
    """

    order: tuple[int, ...]
    figures: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StepOrder:
    """Reorders the samples of steps. Plain data, free of any device: it is sent to workers and servers.

    Attributes:
      method: one of `METHODS`.
      graph, schedule, inner, microbatches, window: see `make_schedule`.
      costs: the schedule's costs, as (kind, stage or edge, whether backward, seconds).
      constant_scale: factor on the costs of F and B of the stages with constant costs.
      modules: the modules with varying costs: encoders and generators, and the LLM where its rows are packed.
      rows: samples of a microbatch, by cell.
    """

    method: str
    graph: StageGraph
    schedule: str
    inner: str
    microbatches: int
    window: int
    costs: tuple[tuple[str, str, bool, float], ...]
    constant_scale: float
    modules: Mapping[str, ModuleCost]
    rows: tuple[int, ...]

    def __call__(self, metas: Sequence[SampleMeta], packer: Packer | None = None) -> Reordered:
        """Reorders a step's samples by `method`; a microbatch takes the time of its buckets.

        Without a packer there are no buckets yet, and a microbatch takes the time of the samples in its fullest cell.
        """
        pipeline, seconds, padded = self._pipeline, self.seconds(metas), self._padded(metas, packer)
        original, reordered = (pipeline.reorder(seconds, method, padded) for method in ("none", self.method))
        before, after = (pipeline.makespan(seconds, order, padded) for order in (original, reordered))
        figures = {
            "imbalance_nominal": pipeline.imbalance(seconds, reordered),
            "imbalance_given": pipeline.imbalance(seconds, original),
            "reorder_gain": before / after,
        }
        return Reordered(order=tuple(_flat(reordered, self.microbatches)), figures=figures)

    def makespan(self, metas: Sequence[SampleMeta], packer: Packer) -> float:
        """Simulated time of a step with samples in the order of `metas`, in the unit of the costs."""
        pipeline, seconds, padded = self._pipeline, self.seconds(metas), self._padded(metas, packer)
        return pipeline.makespan(seconds, pipeline.reorder(seconds, "none"), padded)

    def timeline(self, metas: Sequence[SampleMeta], packer: Packer) -> Timeline:
        """The simulation of a step with samples in the order of `metas`, op by op."""
        pipeline, seconds, padded = self._pipeline, self.seconds(metas), self._padded(metas, packer)
        return pipeline.timeline(seconds, pipeline.reorder(seconds, "none"), padded)

    def seconds(self, metas: Sequence[SampleMeta]) -> dict[str, np.ndarray]:
        """Costs of forward and backward of each sample [S, 2], summed over stages, by module."""
        return {
            name: np.array([cost.seconds(meta.segments(name)) for meta in metas]) for name, cost in self.modules.items()
        }

    def _padded(self, metas: Sequence[SampleMeta], packer: Packer | None) -> Padded | None:
        """Costs of microbatches from their buckets, which may be partly filled; None without a packer."""
        if packer is None:
            return None
        of_bucket = {
            name: [cost.seconds([width] * rows) for rows, width in packer.buckets_of(name)]
            for name, cost in self.modules.items()
        }

        def padded(order: Order) -> dict[str, np.ndarray]:
            buckets = packer.buckets([metas[i] for i in _flat(order, self.microbatches)])
            return {name: np.array([costs[bucket[name]] for bucket in buckets]) for name, costs in of_bucket.items()}

        return padded

    @cached_property
    def _pipeline(self) -> Pipeline:
        """The pipeline. It is not pickled: each process makes another."""
        costs = Costs(seconds={(kind, name, backward): seconds for kind, name, backward, seconds in self.costs})
        scale = {"F": self.constant_scale, "B": self.constant_scale}
        scaled = {key: seconds * scale.get(key[0], 1.0) for key, seconds in costs.seconds.items()}
        shares = {name: cost.shares() for name, cost in self.modules.items()}
        schedule = train_schedule(
            self.schedule, self.graph, self.microbatches, costs, window=self.window, inner=self.inner
        )
        return Pipeline(schedule, Costs(seconds=scaled), shares, self.rows, together=True)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_pipeline"}


def train_schedule(name: str, graph: StageGraph, microbatches: int, costs: Costs, window: int, inner: str) -> Schedule:
    """The schedule `name`, the value of `Train.schedule`, such as "1f1b": the result of `make_schedule`.

    Args:
      name: a key of `SCHEDULES` of `mmjax.schedule.schedules`.
      graph: the stages and edges, such as `plan(recipe).placed.graph`.
      microbatches: microbatches of a step.
      costs: seconds of each op, such as `Costs.nominal(graph)`.
      window: microbatches of a window of "three-phase"; 0 for all, and for other schedules.
      inner: the schedule inside a "nested" one, such as "zb-h1"; "1f1b" for other schedules.

    Raises:
      ConfigError: the schedule does not fit the stages.
    """
    try:
        return make_schedule(name, graph, microbatches, costs, window=window, inner=inner)
    except ScheduleError as error:
        raise ConfigError(f"Train.schedule={name!r}: {error}") from None


def _flat(order: Order, microbatches: int) -> list[int]:
    return [sample for m in range(microbatches) for rank in order for sample in rank[m]]
