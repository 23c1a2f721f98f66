"""Bytes of a stage's devices: states, gradients, activations of microbatches in flight, temporaries of programs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mmjax.pipeline.config import OffloadConfig
from mmjax.schedule.graph import StageGraph

HOME = OffloadConfig()
"""Nothing is offloaded."""


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """Bytes of one device of a stage, each kind at its own peak.

    Attributes:
      weights: compute copies, masters and moments.
      gradients: sums and reduced shards.
      activations: residuals of microbatches in flight, activations between stages, and inputs.
      temporaries: temporaries of the stage's largest program.
      reduced: part of `gradients`: the shards that live from reduce to update; 0 where states are not sharded.
      inputs: part of `activations`: inputs that the host gives for a step.
      states_away: part of `weights`: masters and moments that are in host memory except when a step begins and ends.
      parameters_away: part of `weights`: compute parameters that are in host memory while other modules on the device
        run.
      activations_away: stashed residuals of microbatches in flight, in host memory; no part of `activations`.
    """

    weights: float
    gradients: float
    activations: float
    temporaries: float
    reduced: float = 0.0
    inputs: float = 0.0
    states_away: float = 0.0
    parameters_away: float = 0.0
    activations_away: float = 0.0

    @property
    def total(self) -> float:
        """The sum of weights, gradients, activations and temporaries."""
        return self.weights + self.gradients + self.activations + self.temporaries

    @property
    def host(self) -> float:
        """Bytes of pinned host memory for arrays that are offloaded or stashed at times."""
        return self.states_away + self.parameters_away + self.activations_away

    @property
    def ends(self) -> float:
        """Bytes when a step begins or ends: nothing is in host memory, and no microbatch in flight."""
        return self.weights + self.gradients + self.inputs

    @property
    def working(self) -> float:
        """Bytes while microbatches go through, without temporaries."""
        reduced = self.reduced if self.states_away else 0.0
        return self.weights - self.states_away + self.gradients - reduced + self.activations


def fullest_split(lanes: Iterable[Iterable[str]], *, residuals: float, deferred: float) -> tuple[int, int]:
    """Microbatches between F and B, and between B and W, when a stage holds most; during its B a microbatch is in both.

    `fullest_split([["F", "F", "B", "B"]], residuals=1.0, deferred=0.0)` is (2, 0).

    Args:
      lanes: for each of the stage's lanes, the kinds of its ops in order: "F", "B" or "W".
      residuals: bytes that a microbatch keeps from F to B.
      deferred: bytes that a microbatch keeps from B to W.
    """
    most, fullest = -1.0, (0, 0)
    for kinds in lanes:
        before_b, before_w = 0, 0
        for kind in kinds:
            before_b, before_w = before_b + (kind == "F"), before_w + (kind == "B")
            if (size := before_b * residuals + before_w * deferred) > most:
                most, fullest = size, (before_b, before_w)
            before_b, before_w = before_b - (kind == "B"), before_w - (kind == "W")
    return fullest


def bytes_by_rank(
    graph: StageGraph, by_stage: Mapping[str, DeviceBytes], phased: Collection[str] = ()
) -> dict[int, float]:
    """The most bytes that a device holds at once, by rank, for the first rank of each stage.

    Only one of the stages on a device has temporaries at a time. Ranks of a stage are neighbours, so the most stages
    overlap on the first rank of one of them.

    Args:
      graph: the stages with their ranks, such as `estimate.graph`.
      by_stage: bytes of a device of each stage, by stage name ("llm.0"), such as `estimate.device_bytes`.
      phased: names of the modules that do not run while other modules do, such as ("vision",).
    """
    totals: dict[int, float] = {}
    for rank in sorted({min(node.ranks) for node in graph.stages}):
        nodes = [node for node in graph.stages if node.ranks[0] <= rank <= node.ranks[-1]]
        totals[rank] = _fullest(
            [by_stage[node.name] for node in nodes if node.module in phased],
            [by_stage[node.name] for node in nodes if node.module not in phased],
        )
    return totals


def _fullest(phased: Sequence[DeviceBytes], unphased: Sequence[DeviceBytes]) -> float:
    """The most bytes that stages on one device hold at any moment.

    The moments are a step's ends, the phases of `phased` stages, and the time in which `unphased` stages run. Without
    offload it is the sum of all stages, with the largest temporaries: no moment has more.
    """
    stages = (*phased, *unphased)
    if not any(stage.host for stage in stages):
        return sum(stage.total - stage.temporaries for stage in stages) + max(stage.temporaries for stage in stages)
    moments = [sum(stage.ends for stage in stages)]
    if phased:  # other stages may have fetched their states for the update already
        states = sum(stage.working for stage in phased) + sum(stage.ends for stage in unphased)
        moments.append(states + max(stage.temporaries for stage in phased))
    if unphased:
        states = sum(stage.working - stage.parameters_away for stage in stages)
        moments.append(states + max(stage.temporaries for stage in unphased))
    return max(moments)
