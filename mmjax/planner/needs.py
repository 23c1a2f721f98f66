"""Bytes of a stage's devices: states, gradients, activations of microbatches in flight, temporaries of programs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mmjax.pipeline.config import OffloadConfig
from mmjax.planner.work import ModuleWork, Part, Work
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import Schedule

MASTER, STATES = 4, 12
"""Bytes for a parameter: its float32 master; the master together with two moments."""
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
        """The sum of weights, gradients, activations and temporaries."""
        return self.weights + self.gradients + self.activations + self.temporaries

    @property
    def host(self) -> float:
        """Bytes of pinned host memory for what is away at times."""
        return self.states_away + self.parameters_away

    @property
    def ends(self) -> float:
        """Bytes when a step begins or ends: nothing is in host memory, and no microbatch in flight."""
        return self.weights + self.gradients + self.inputs

    @property
    def working(self) -> float:
        """Bytes while microbatches go through, without temporaries."""
        reduced = self.reduced if self.states_away else 0.0
        return self.weights - self.states_away + self.gradients - reduced + self.activations


def state_bytes(parameters: float, trained: float) -> float:
    """Bytes of masters and moments before sharding; a frozen parameter has a master and no moments."""
    return parameters * MASTER + trained * (STATES - MASTER)


def away_bytes(
    work: Work, module: ModuleWork, part: Part, offload: OffloadConfig, *, tp: int, shards: int
) -> tuple[float, float]:
    """Bytes of optimizer states, and of compute parameters, that a device of a stage has in host memory at times.

    Masters that serve as compute parameters count as compute parameters.
    """
    parameters, trained = module.parameters.of(part) / tp, module.trained.of(part) / tp
    serve = copy_bytes(work, shards) == 0
    masters, moments = parameters * MASTER / shards, trained * (STATES - MASTER) / shards
    states = moments + (0.0 if serve else masters)
    copies = masters if serve else parameters * work.item
    return states * offload.optimizer, copies * offload.parameters


def copy_bytes(work: Work, shards: int) -> int:
    """Bytes of a parameter's compute copy; 0 where the master itself is computed with."""
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
    """Bytes that each device of a stage needs.

    Args:
      work: the work of all modules.
      module: the work of the stage's module.
      part: the stage's part of the module.
      tp: tp of the stage's layout.
      shards: number of ranks among which masters and moments are sharded.
      rows: rows of a microbatch on a rank, counted in rows of the module's `width`.
      in_flight: microbatches that the stage keeps at once, from F to B.
      microbatches: microbatches of a step.
      backward: whether the stage has a backward.
      passing: bytes of activations, and of their gradients, that have arrived or are about to leave.
      temporaries: bytes of temporaries of the stage's largest program.
      deferred: microbatches that, at the same time, wait for the W of a split backward.
      offload: what the module keeps in host memory at times.
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
    """By stage, `fullest_split` of its ops in a schedule with split backwards.

    Args:
      work: the work of all modules.
      schedule: the schedule.
      parts: the part of its module, by stage.
      tps: tp by module.
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
    """Microbatches between F and B, and between B and W, when a stage holds most; during its B a microbatch is in both.

    Args:
      kinds: the stage's ops in order: "F", "B" or "W".
      kept: bytes that a microbatch keeps from F to B.
      deferred: bytes that a microbatch keeps from B to W.
    """
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
    """Lower bounds on the bytes of a device of a stage with these layers, whatever ends it has.

    Arguments are those of `stage_need`; phased: whether parameters can be offloaded.

    Returns:
      Three bounds: while microbatches go through, without offload; then, with all possible offload; when a step ends.
    """
    parameters, trained = module.parameters.of(layers) / tp, module.trained.of(layers) / tp
    copies, states = parameters * work.item * (work.item < 4), state_bytes(parameters, trained) / shards
    ends = copies + states + trained * work.gradient
    kept = module.held[tp].kept.of(layers) * rows * in_flight if module.has_backward else 0.0
    return ends + kept, ends + kept - states - copies * phased, ends


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
