"""Bytes of a stage's devices: states, gradients, what is kept for microbatches in flight, temporaries of programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmjax.planner.work import ModuleWork, Part, Work
from mmjax.schedule.graph import StageGraph

MASTER, STATES = 4, 12
"""Bytes of a parameter: its float32 master, and that and two moments."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes of one device of a stage, each kind at its own peak.

    Attributes:
      weights: compute copies, masters and moments. gradients: sums and the reduced shard. activations: kept for the
        microbatches in flight, and what is on its way. temporaries: of its largest program.
    """

    weights: float
    gradients: float
    activations: float
    temporaries: float

    @property
    def total(self) -> float:
        """All kinds."""
        return self.weights + self.gradients + self.activations + self.temporaries


def state_bytes(parameters: float, trained: float) -> float:
    """Of masters and moments, before they are sharded; a frozen parameter has a master and no moments."""
    return parameters * MASTER + trained * (STATES - MASTER)


def stage_need(
    work: Work,
    module: ModuleWork,
    part: Part,
    *,
    tp: int,
    shards: int,
    rows: float,
    in_flight: int,
    microbatches: int,
    backward: bool,
    temporaries: float,
) -> Need:
    """What each device of a stage needs.

    Args:
      work: of all modules. module, part: of the stage.
      tp: of its layout. shards: ranks among which masters and moments are sharded.
      rows: of a microbatch on a rank, in rows of the width that the work is for.
      in_flight: microbatches that the stage keeps at once. microbatches: of a step.
      backward: whether the stage has one.
      temporaries: bytes of its largest program.
    """
    parameters, trained = module.parameters.of(part) / tp, module.trained.of(part) / tp
    copies = 0 if work.item == 4 and shards == 1 else work.item
    held = module.held[tp]
    kept = held.kept.of(part) * in_flight if backward else 0.0
    passing = 2 * module.carried * in_flight
    return Need(
        weights=parameters * copies + state_bytes(parameters, trained) / shards,
        gradients=trained * work.gradient * (1 + 1 / shards),
        activations=rows * (kept + passing + 2 * microbatches * held.inputs.of(part)),
        temporaries=temporaries,
    )


def least_bytes(
    work: Work, module: ModuleWork, layers: Part, *, tp: int, shards: int, rows: float, in_flight: int
) -> float:
    """No more than a device of a stage with these layers holds, whatever ends it has; arguments as `stage_need`."""
    parameters, trained = module.parameters.of(layers) / tp, module.trained.of(layers) / tp
    size = parameters * work.item * (work.item < 4) + trained * work.gradient
    kept = module.held[tp].kept.of(layers) if module.has_backward else 0.0
    return size + state_bytes(parameters, trained) / shards + kept * rows * in_flight


def held_by_rank(graph: StageGraph, needs: Mapping[str, Need]) -> dict[int, float]:
    """Bytes by rank, of the first rank of each stage; stages that share a device have temporaries in turns.

    Ranks of a stage are neighbours, so where most stages overlap is where one of them begins.
    """
    held: dict[int, float] = {}
    for rank in sorted({min(node.ranks) for node in graph.stages}):
        here = [needs[node.name] for node in graph.stages if node.ranks[0] <= rank <= node.ranks[-1]]
        held[rank] = sum(need.total - need.temporaries for need in here) + max(need.temporaries for need in here)
    return held
