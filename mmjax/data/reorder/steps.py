"""The order of a training step's samples, from their metadata alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from mmjax.data.packing import Packer
from mmjax.data.reorder.pipeline import Order, Padded, Pipeline
from mmjax.data.types import SampleMeta
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import Schedule
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs


@dataclass(frozen=True, kw_only=True)
class EncoderCost:
    """What an encoder's stages cost for the media of a cell, in the unit of the schedule's costs.

    forward, backward: by stage, of one patch. pairs: what a pair of patches of one medium adds, in patches: attention.
    """

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    pairs: float = 0.0

    def seconds(self, media: Sequence[int]) -> tuple[float, float]:
        """Forward and backward of media of so many patches each, in all stages together."""
        patches = sum(n + self.pairs * n * n for n in media)
        return patches * sum(self.forward.values()), patches * sum(self.backward.values())

    def shares(self) -> dict[str, tuple[float, float]]:
        """By stage, its part of the forward and of the backward."""
        forward, backward = sum(self.forward.values()), sum(self.backward.values())
        return {
            stage: (own / forward if forward else 0.0, self.backward[stage] / backward if backward else 0.0)
            for stage, own in self.forward.items()
        }


@dataclass(frozen=True, kw_only=True)
class Reordered:
    """A step's samples in their order, by place: by microbatch, cell and row, as `Packer` takes them.

    figures: "imbalance" and "imbalance_given", seconds of encoders in the largest cell of each microbatch over those in
    the mean cell, with and without reordering; "reorder_gain", the step's simulated time without over that with it.
    """

    order: tuple[int, ...]
    figures: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StepOrder:
    """Reorders the samples of steps. Plain data, that workers and servers are sent; free of any device.

    method: one of `METHODS`. graph, schedule, microbatches, window, costs: what the schedule is made of, as by
    `make_schedule`; the costs as (kind, stage or edge, whether backward, seconds). others: seconds of F and B of the
    stages that are no encoder's over those in `costs`. encoders: by name. rows: of a microbatch, by cell.
    """

    method: str
    graph: StageGraph
    schedule: str
    microbatches: int
    window: int
    costs: tuple[tuple[str, str, bool, float], ...]
    others: float
    encoders: Mapping[str, EncoderCost]
    rows: tuple[int, ...]

    def __call__(self, metas: Sequence[SampleMeta], packer: Packer) -> Reordered:
        """A step's samples in the order of `method`, for microbatches that take the time of their buckets."""
        pipeline, seconds, padded = self._pipeline, self.seconds(metas), self._padded(metas, packer)
        given, order = (pipeline.reorder(seconds, method, padded) for method in ("none", self.method))
        spans = [pipeline.makespan(seconds, one, padded) for one in (given, order)]
        loads = [pipeline.loads(seconds, one) for one in (given, order)]
        before, after = (float(load_RM.max(axis=0).sum() / max(load_RM.mean(axis=0).sum(), 1e-30)) for load_RM in loads)
        figures = {"imbalance": after, "imbalance_given": before, "reorder_gain": spans[0] / spans[1]}
        return Reordered(order=tuple(_flat(order, self.microbatches)), figures=figures)

    def makespan(self, metas: Sequence[SampleMeta], packer: Packer) -> float:
        """Simulated time of a step whose samples come in this order, in the unit of the costs."""
        pipeline, seconds, padded = self._pipeline, self.seconds(metas), self._padded(metas, packer)
        return pipeline.makespan(seconds, pipeline.reorder(seconds, "none"), padded)

    def seconds(self, metas: Sequence[SampleMeta]) -> dict[str, np.ndarray]:
        """By encoder, forward and backward of each sample in all stages together [S, 2]."""
        return {
            name: np.array([cost.seconds([prod(grid) for grid in meta.grids.get(name, ())]) for meta in metas])
            for name, cost in self.encoders.items()
        }

    def _padded(self, metas: Sequence[SampleMeta], packer: Packer) -> Padded:
        """A cell of a microbatch costs what its bucket costs, however little of it is filled."""
        of_bucket = {
            name: [cost.seconds([width] * rows) for rows, width in packer.encoders[name].buckets]
            for name, cost in self.encoders.items()
        }

        def padded(order: Order) -> dict[str, np.ndarray]:
            buckets = packer.buckets([metas[i] for i in _flat(order, self.microbatches)])
            return {name: np.array([own[bucket[name]] for bucket in buckets]) for name, own in of_bucket.items()}

        return padded

    @cached_property
    def _pipeline(self) -> Pipeline:
        """Made where it is used, and only there."""
        costs = Costs(seconds={(kind, name, way): seconds for kind, name, way, seconds in self.costs})
        scaled = {key: own * (self.others if key[0] in ("F", "B") else 1.0) for key, own in costs.seconds.items()}
        shares = {name: cost.shares() for name, cost in self.encoders.items()}
        return Pipeline(self._make(costs), Costs(seconds=scaled), shares, self.rows, together=True)

    def _make(self, costs: Costs) -> Schedule:
        return make_schedule(self.schedule, self.graph, self.microbatches, costs, window=self.window)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_pipeline"}


def _flat(order: Order, microbatches: int) -> list[int]:
    return [sample for m in range(microbatches) for rank in order for sample in rank[m]]
