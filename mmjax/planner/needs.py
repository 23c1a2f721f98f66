"""Bytes of a stage's devices: states, gradients, activations of microbatches in flight, temporaries of programs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mmjax.pipeline.config import OffloadConfig
from mmjax.schedule.graph import StageGraph

HOME = OffloadConfig()
"""Nothing is offloaded."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes of one device of a stage, each kind at its own peak.

    Attributes:
      weights: compute copies, masters and moments.
      gradients: sums and reduced shards.
      activations: those kept for microbatches in flight, those on their way between stages, and inputs.
      temporaries: those of the stage's largest program.
      reduced: part of `gradients`: the shards that live from reduce to update; 0 where states are not sharded.
      inputs: part of `activations`: inputs that the host gives for a step.
      states_away: part of `weights`: masters and moments that are in host memory except when a step begins and ends.
      parameters_away: part of `weights`: compute parameters that are in host memory while other modules on the device
        run.
      activations_away: what microbatches in flight keep in host memory; no part of `activations`.
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
        """Bytes of pinned host memory for what is away at times."""
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


def fullest_split(lanes: Iterable[Iterable[str]], kept: float, deferred: float) -> tuple[int, int]:
    """Microbatches between F and B, and between B and W, when a stage holds most; during its B a microbatch is in both.

    Args:
      lanes: the ops of each of the stage's lanes in order: "F", "B" or "W".
      kept: bytes that a microbatch keeps from F to B.
      deferred: bytes that a microbatch keeps from B to W.
    """
    most, found = -1.0, (0, 0)
    for kinds in lanes:
        between, behind = 0, 0
        for kind in kinds:
            between, behind = between + (kind == "F"), behind + (kind == "B")
            if (size := between * kept + behind * deferred) > most:
                most, found = size, (between, behind)
            between, behind = between - (kind == "B"), behind - (kind == "W")
    return found


def held_by_rank(graph: StageGraph, needs: Mapping[str, Need], phased: Collection[str] = ()) -> dict[int, float]:
    """Bytes that a device holds, by rank, for the first rank of each stage.

    Only one of the stages on a device has temporaries at a time. Ranks of a stage are neighbours, so the most stages
    overlap where one of them begins. phased: modules that do not run while others do.
    """
    held: dict[int, float] = {}
    for rank in sorted({min(node.ranks) for node in graph.stages}):
        here = [node for node in graph.stages if node.ranks[0] <= rank <= node.ranks[-1]]
        first = [needs[node.name] for node in here if node.module in phased]
        held[rank] = _fullest(first, [needs[node.name] for node in here if node.module not in phased])
    return held


def _fullest(phased: Sequence[Need], rest: Sequence[Need]) -> float:
    """The most bytes that stages on one device hold at any moment.

    The moments are a step's ends, the phases of `phased` stages, and while the rest runs. Where nothing is offloaded it
    is the sum of all stages, with the largest temporaries: no moment has more.
    """
    every = (*phased, *rest)
    if not any(need.host for need in every):
        return sum(need.total - need.temporaries for need in every) + max(need.temporaries for need in every)
    moments = [sum(need.ends for need in every)]
    if phased:  # others may have fetched their states for the update already
        ahead = sum(need.working for need in phased) + sum(need.ends for need in rest)
        moments.append(ahead + max(need.temporaries for need in phased))
    if rest:
        behind = sum(need.working - need.parameters_away for need in every)
        moments.append(behind + max(need.temporaries for need in rest))
    return max(moments)
