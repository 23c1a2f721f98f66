"""Bytes of a stage's devices: states, gradients, what is kept for microbatches in flight, temporaries of programs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mmjax.pipeline.config import OffloadConfig
from mmjax.planner.work import ModuleWork, Part, Work
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import Schedule

MASTER, STATES = 4, 12
"""Bytes of a parameter: its float32 master, and that and two moments."""
HOME = OffloadConfig()
"""Nothing is offloaded."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes of one device of a stage, each kind at its own peak.

    Attributes:
      weights: compute copies, masters and moments. gradients: sums and reduced shards. activations: kept for the
        microbatches in flight, and what is on its way. temporaries: of its largest program.
      reduced: of the gradients, the shards that are there from reduce to update; none where states are whole.
      inputs: of the activations, what the host gives for a step.
      states_away: of the weights, masters and moments that are in host memory but when a step begins and ends.
      parameters_away: of the weights, compute parameters that are there while what shares the device runs.
    """

    weights: float
    gradients: float
    activations: float
    temporaries: float
    reduced: float = 0.0
    inputs: float = 0.0
    states_away: float = 0.0
    parameters_away: float = 0.0

    @property
    def total(self) -> float:
        """All kinds."""
        return self.weights + self.gradients + self.activations + self.temporaries

    @property
    def host(self) -> float:
        """Bytes of pinned host memory, which are no part of the total."""
        return self.states_away + self.parameters_away

    @property
    def ends(self) -> float:
        """When a step begins or ends: nothing is away, and no microbatch there."""
        return self.weights + self.gradients + self.inputs

    @property
    def working(self) -> float:
        """While microbatches go through, without temporaries."""
        reduced = self.reduced if self.states_away else 0.0
        return self.weights - self.states_away + self.gradients - reduced + self.activations


def state_bytes(parameters: float, trained: float) -> float:
    """Of masters and moments, before they are sharded; a frozen parameter has a master and no moments."""
    return parameters * MASTER + trained * (STATES - MASTER)


def away_bytes(
    work: Work, module: ModuleWork, part: Part, offload: OffloadConfig, *, tp: int, shards: int
) -> tuple[float, float]:
    """Masters and moments, and compute parameters, that a device of a stage has in host memory at times.

    Masters that serve as compute parameters are away as such.
    """
    parameters, trained = module.parameters.of(part) / tp, module.trained.of(part) / tp
    serve = copy_bytes(work, shards) == 0
    masters, moments = parameters * MASTER / shards, trained * (STATES - MASTER) / shards
    states = moments + (0.0 if serve else masters)
    copies = masters if serve else parameters * work.item
    return states * offload.optimizer, copies * offload.parameters


def copy_bytes(work: Work, shards: int) -> int:
    """Of a compute parameter; 0 where the master serves as it is."""
    return 0 if work.item == 4 and shards == 1 else work.item


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
    passing: float,
    temporaries: float,
    deferred: int = 0,
    offload: OffloadConfig = HOME,
) -> Need:
    """What each device of a stage needs.

    Args:
      work: of all modules. module, part: of the stage.
      tp: of its layout. shards: ranks among which masters and moments are sharded.
      rows: of a microbatch on a rank, in rows of the width that the work is for.
      in_flight: microbatches that the stage keeps at once from F to B. microbatches: of a step.
      backward: whether the stage has one.
      passing: bytes of activations, and of their gradients, that have arrived or are about to leave.
      temporaries: bytes of its largest program.
      deferred: microbatches that wait for the W of a split backward meanwhile.
      offload: what of it is in host memory at times.
    """
    parameters, trained = module.parameters.of(part) / tp, module.trained.of(part) / tp
    held = module.held[tp]
    kept = held.kept.of(part) * in_flight + held.deferred.of(part) * deferred if backward else 0.0
    inputs = rows * 2 * microbatches * held.inputs.of(part)
    states_away, parameters_away = away_bytes(work, module, part, offload, tp=tp, shards=shards)
    reduced = trained * work.gradient / shards if shards > 1 else 0.0  # whole ones take the memory of the sums
    return Need(
        weights=parameters * copy_bytes(work, shards) + state_bytes(parameters, trained) / shards,
        gradients=trained * work.gradient + reduced,
        activations=rows * kept + passing + inputs,
        temporaries=temporaries,
        reduced=reduced,
        inputs=inputs,
        states_away=states_away,
        parameters_away=parameters_away,
    )


def split_in_flight(
    work: Work, schedule: Schedule, parts: Mapping[str, Part], tps: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """By stage where it is fullest, microbatches from F to B and from B to W, of a schedule with split backwards.

    parts: by stage. tps: by module.
    """
    kinds: dict[str, list[str]] = {}
    for op in schedule.ops:
        if op.kind in "FBW":
            kinds.setdefault(op.stage, []).append(op.kind)
    found = {}
    for stage, own in kinds.items():
        module = schedule.graph.stage(stage).module
        held = work.modules[module].held[tps[module]]
        found[stage] = fullest_split(own, held.kept.of(parts[stage]), held.deferred.of(parts[stage]))
    return found


def fullest_split(kinds: Iterable[str], kept: float, deferred: float) -> tuple[int, int]:
    """Where a stage is fullest, microbatches from F to B and from B to W; a B has both of its own."""
    between, behind, most, found = 0, 0, -1.0, (0, 0)
    for kind in kinds:
        between, behind = between + (kind == "F"), behind + (kind == "B")
        if (size := between * kept + behind * deferred) > most:
            most, found = size, (between, behind)
        between, behind = between - (kind == "B"), behind - (kind == "W")
    return found


def least_bytes(
    work: Work,
    module: ModuleWork,
    layers: Part,
    *,
    tp: int,
    shards: int,
    rows: float,
    in_flight: int,
    phased: bool = False,
) -> tuple[float, float, float]:
    """No more than a device of a stage with these layers holds, whatever ends it has; arguments as `stage_need`.

    While microbatches go through, without offload and with all that there can be; and when a step ends. phased: whether
    parameters can be offloaded.
    """
    parameters, trained = module.parameters.of(layers) / tp, module.trained.of(layers) / tp
    copies, states = parameters * work.item * (work.item < 4), state_bytes(parameters, trained) / shards
    ends = copies + states + trained * work.gradient
    kept = module.held[tp].kept.of(layers) * rows * in_flight if module.has_backward else 0.0
    return ends + kept, ends + kept - states - copies * phased, ends


def held_by_rank(graph: StageGraph, needs: Mapping[str, Need], phased: Collection[str] = ()) -> dict[int, float]:
    """Bytes by rank, of the first rank of each stage; stages that share a device have temporaries in turns.

    Ranks of a stage are neighbours, so where most stages overlap is where one of them begins. phased: modules that do
    not run while others do.
    """
    held: dict[int, float] = {}
    for rank in sorted({min(node.ranks) for node in graph.stages}):
        here = [node for node in graph.stages if node.ranks[0] <= rank <= node.ranks[-1]]
        first = [needs[node.name] for node in here if node.module in phased]
        held[rank] = _fullest(first, [needs[node.name] for node in here if node.module not in phased])
    return held


def _fullest(phased: Sequence[Need], rest: Sequence[Need]) -> float:
    """The most that stages on one device hold at a time: at a step's ends, in phases of some, while the rest runs.

    Where nothing is ever away, the sum of all: no moment has more.
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
