"""Chooses the best way to place all modules, from their work, a clock and a number of devices.

Layouts of each mode are ranked in closed form: homogeneous and colocated ones by trying all, non-colocated ones by the
exact search over Eq. 1 and 2 (`search`). The first of each mode that fit into memory are simulated with the schedule
that a run would have, communication included, and the shortest simulated step is the plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.models.config import LLM
from mmjax.planner.candidates import (
    COLOCATED,
    HOMOGENEOUS,
    MODES,
    NESTED,
    NON_COLOCATED,
    SAMPLES,
    Candidate,
    apart,
    colocated,
    depths,
    homogeneous,
    nested,
)
from mmjax.planner.clock import Clock
from mmjax.planner.estimate import Estimate
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.fleet import Fleet, Kind
from mmjax.planner.problem import MixedProblem, ModuleCosts, Problem
from mmjax.planner.search import best_plans
from mmjax.planner.variants import (
    balanced,
    everything_offloaded,
    exchanged,
    instanced,
    interleaved,
    offloaded,
    rescheduled,
    split_rows,
)
from mmjax.planner.work import ModuleWork, Part, Work

Rows = Mapping[str, tuple[float, int]]
RowsOf = Callable[[Candidate], Rows]
SHARED = {HOMOGENEOUS: homogeneous, COLOCATED: colocated, NESTED: nested}
"""The modes in which modules share devices, by what makes their candidates."""
FINALISTS = 4
"""How many candidates of a mode are simulated."""
STAGES = (1, 2, 4, 8, 16, 32, 64)
"""Bounds on the LLM's stages that are tried where encoders keep activations for each of them."""
VARIED = 1
"""How many of a mode's finalists are also simulated interleaved, and with layers cut by time."""
RELIEVED = 1
"""How many further candidates of a mode are simulated since they would be faster but fit only with offload."""
FEW = 400
"""With more layouts whose lower bound on memory is too large, these are not tried with offload if another one fits."""
ALIKE = 2
"""The most finalists with the same layouts, which differ only in microbatches or windows."""
TIE = 0.005
"""Relative difference up to which steps count as equal; among equal ones, fewer kinds, then fewer devices win."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best candidates, by mode and of all.

    Attributes:
      devices: number of devices that there were.
      estimates: the simulated candidates, the shortest step first.
      misses: for each mode without a candidate that fits, the reason.
      kinds: number of devices by kind; empty where there was one kind.
    """

    devices: int
    estimates: Sequence[Estimate]
    misses: Mapping[str, str] = field(default_factory=dict, hash=False)
    kinds: Mapping[str, int] = field(default_factory=dict, hash=False)

    @cached_property
    def best(self) -> Estimate:
        """The plan: the shortest step; of equal ones (`TIE`) the one on fewest kinds, then on fewest devices."""
        alike = [one for one in self.estimates if one.seconds <= self.estimates[0].seconds * (1 + TIE)]
        return min(alike, key=lambda one: (len(one.candidate.used), one.candidate.devices, one.seconds))

    @cached_property
    def by_mode(self) -> dict[str, Estimate]:
        """The best candidate of each mode that has one; with several kinds, of each mode and kinds in use."""
        found: dict[str, Estimate] = {}
        for one in (self.best, *self.estimates):
            found.setdefault(one.candidate.label, one)
        return dict(sorted(found.items(), key=lambda item: MODES.index(item[1].candidate.mode)))

    def why(self) -> str:
        """One line: the mode, by how much it is better than the best of each other, and what sets its pace.

        Where there are several kinds of device, also by how much it is better than the best on others of them.
        """
        best, others = self.best, dict[object, Estimate]()
        for one in sorted(self.by_mode.values(), key=lambda one: one.seconds):
            if one.candidate.mode != best.candidate.mode:
                others.setdefault(one.candidate.mode, one)
            if one.candidate.used != best.candidate.used:
                others.setdefault(one.candidate.used, one)
        compared = [
            f"{longer(one.seconds, best.seconds)} in the best {one.candidate.mode} layout{one.candidate.on}"
            for one in dict.fromkeys(others.values())
        ]
        than = f"; a step takes {', '.join(compared)}" if compared else ""
        return f"{best.candidate.label}{than}; {best.bottleneck} sets the pace, {best.bubble:.0%} of the step is idle"


def longer(seconds: float, than: float) -> str:
    """By how much a time is longer, such as "+3.1%"; never "-0.0%"."""
    return f"{round(seconds / than - 1, 3) + 0.0:+.1%}"


def choose(
    work: Work,
    clock: Clock,
    devices: int,
    *,
    memory: float = 0.0,
    rows_of: RowsOf | None = None,
    modes: Collection[str] = MODES,
) -> Choice:
    """Simulates the best candidates of every mode on devices of one kind.

    Args:
      work: the work of the model on its data.
      clock: the times.
      devices: number of devices; fewer may be used.
      memory: bytes of a device; the clock's unless given.
      rows_of: gives the exact rows of a candidate's microbatches, and raises ConfigError where a run would not take the
        candidate; rows are proportional to samples unless it is given.
      modes: the modes to try, of `MODES`.

    Raises:
      DoesNotFit: no mode has a layout that fits; the message says what misses by how much.
    """
    kind = Kind(clock=clock, devices=devices, memory=memory or clock.memory)
    return choose_on(work, Fleet(kinds={"": kind}), rows_of=rows_of, modes=modes)


def choose_on(work: Work, fleet: Fleet, *, rows_of: RowsOf | None = None, modes: Collection[str] = MODES) -> Choice:
    """Simulates the best candidates of every mode, on devices of each kind and on several kinds together.

    Raises:
      ConfigError: there are too many kinds to try all ways.
      DoesNotFit: no mode has a layout that fits; the message says what misses by how much.
    """
    rows_of = rows_of or proportional(work)
    estimates: list[Estimate] = []
    misses: dict[str, str] = {}
    for label, candidates in _candidates(work, fleet, modes):
        try:
            found = finalists(work, fleet, candidates)
        except DoesNotFit as reason:
            misses[label] = str(reason)
            continue
        placed = list(_placed(work, fleet, found, rows_of))
        estimates += placed
        if not placed:
            misses[label] = "no layout that fits on paper fits with whole rows"
    if not estimates:
        raise DoesNotFit("; ".join(f"{label}: {reason}" for label, reason in misses.items()))
    return ranked(fleet, [*estimates, *_further(work, fleet, estimates, rows_of)], misses)


def ranked(fleet: Fleet, estimates: Iterable[Estimate], misses: Mapping[str, str]) -> Choice:
    """The choice among estimates, the shortest step first."""
    ordered = sorted(estimates, key=lambda one: (one.seconds, one.candidate.devices))
    kinds = {name: kind.devices for name, kind in fleet.kinds.items() if name}
    return Choice(devices=fleet.devices, estimates=ordered, misses=misses, kinds=kinds)


def _placed(work: Work, fleet: Fleet, found: Sequence[Candidate], rows_of: RowsOf) -> Iterator[Estimate]:
    """Estimates of candidates with exact rows, and of variants of the first, without those that do not fit."""
    for index, candidate in enumerate(found):
        varied = index < VARIED
        for one in (candidate, *(interleaved(work, candidate) if varied else ())):
            for estimate in exact(work, fleet, one, rows_of):
                yield estimate
                other = balanced(work, estimate.clock, estimate.rows, one) if varied else None
                yield from exact(work, fleet, other, rows_of) if other else ()


def _further(work: Work, fleet: Fleet, estimates: Sequence[Estimate], rows_of: RowsOf) -> list[Estimate]:
    """Estimates of promising variants of the best of all modes: other schedules, ways of cp, optimizer instances."""
    best = min(estimates, key=lambda one: one.seconds)
    plain = [one for one in estimates if one.candidate.plain]
    made: list[Estimate] = []
    if plain:
        for candidate in rescheduled(min(plain, key=lambda one: one.seconds), best.seconds):
            made += exact(work, fleet, candidate, rows_of)
    for variant in (exchanged, instanced):
        best = min((best, *made), key=lambda one: one.seconds)
        if candidate := variant(best):
            made += exact(work, fleet, candidate, rows_of)
    return made


def exact(work: Work, fleet: Fleet, candidate: Candidate, rows_of: RowsOf) -> list[Estimate]:
    """The estimate of a candidate with exact rows; empty where a run would not take it, or it does not fit."""
    try:
        estimate = estimated(work, fleet, candidate, rows_of)
    except ConfigError:
        return []
    return [estimate] if missing(fleet, estimate) <= 0 else []


def estimated(work: Work, fleet: Fleet, candidate: Candidate, rows_of: RowsOf) -> Estimate:
    """The estimate of a candidate with the times of its devices."""
    return Estimate(work=work, clock=fleet.clocks(candidate.kinds), candidate=candidate, rows=rows_of(candidate))


def missing(fleet: Fleet, estimate: Estimate) -> float:
    """Bytes that the worst device lacks; zero or negative where all have enough."""
    rooms = {node.ranks[0]: _room(fleet, estimate, node.name) for node in estimate.graph.stages}
    return max(held - rooms[rank] for rank, held in estimate.memory.items())


def _room(fleet: Fleet, estimate: Estimate, stage: str) -> float:
    """Bytes of a device of a stage."""
    return fleet.kind(estimate.candidate.kinds, stage.rpartition(".")[0]).memory


def proportional(work: Work) -> RowsOf:
    """A `rows_of` with rows proportional to the samples of a microbatch."""

    def rows_of(candidate: Candidate) -> Rows:
        samples = work.global_batch // candidate.microbatches
        return {name: (module.rows * samples, module.width) for name, module in work.modules.items()}

    return rows_of


def finalists(work: Work, fleet: Fleet, candidates: Iterable[Candidate]) -> list[Candidate]:
    """The fastest few candidates, by closed form, that fit into memory, and a faster one that fits only with offload.

    If none fits without offload, these are the fastest few that fit with it.

    Raises:
      DoesNotFit: none fits; the message names a module of the candidate that lacks least.
    """
    rows_of = proportional(work)
    different = {(c.describe(), c.microbatches, c.schedule, c.window): c for c in candidates}
    estimates = [estimated(work, fleet, c, rows_of) for c in different.values()]
    roomy = max(kind.memory for kind in fleet.kinds.values())
    light = [one for one in estimates if one.least <= roomy]
    heavy = [one for one in estimates if one.least > roomy]
    found, tight = _first(fleet, light, FINALISTS)
    limit = found[0].quick * (1 + TIE) if found else math.inf
    lighter = _offloaded([*tight, *heavy] if len(heavy) <= FEW or not found else tight, roomy, limit)
    relieved, missed = _first(fleet, lighter, RELIEVED if found else FINALISTS)
    if found or relieved:
        less = [offloaded(one, lambda other: missing(fleet, other) <= 0) for one in relieved]
        return [*(one.candidate for one in found), *(candidate for candidate in less if candidate)]
    leanest = min((*tight, *missed), key=lambda one: missing(fleet, one), default=None)
    leanest = leanest or min(estimates, key=lambda one: one.least, default=None)
    if leanest is None:
        raise DoesNotFit("there is none on so many devices that divides the batch, the layers and all sizes")
    raise DoesNotFit(_misses(fleet, leanest))


def _first(fleet: Fleet, estimates: Iterable[Estimate], count: int) -> tuple[list[Estimate], list[Estimate]]:
    """The `count` fastest in closed form that fit into memory, and the faster ones that do not.

    At most `ALIKE` of those that fit have the same layouts.
    """
    found, missed = list[Estimate](), list[Estimate]()
    alike = Counter[str]()
    for one in sorted(estimates, key=_order):
        layouts = one.candidate.describe()
        if alike[layouts] == ALIKE:
            continue
        if missing(fleet, one) <= 0:
            found.append(one)
            alike[layouts] += 1
        else:
            missed.append(one)
        if len(found) == count:
            break
    return found, missed


def _order(one: Estimate) -> tuple[float, int, int, int]:
    """The fastest in closed form first; of those alike, fewer microbatches, fewer lanes and less cp."""
    lanes, contexts = (max(map(of, one.candidate.layouts.values())) for of in (attrgetter("lanes"), attrgetter("cp")))
    return float(f"{one.quick:.3g}"), one.candidate.microbatches, lanes, contexts


def _offloaded(estimates: Iterable[Estimate], memory: float, limit: float) -> list[Estimate]:
    """Estimates with all possible offload that may fit and take at most `limit` seconds in closed form."""
    everything = (everything_offloaded(one) for one in estimates if one.lightest <= memory)
    return [one for one in everything if one.candidate.offloads and one.quick <= limit]


def _misses(fleet: Fleet, estimate: Estimate) -> str:
    stage, need = max(estimate.needs.items(), key=lambda item: item[1].total - _room(fleet, estimate, item[0]))
    over, room = missing(fleet, estimate), _room(fleet, estimate, stage)
    return (
        f"{stage.rpartition('.')[0]} misses by {over / 1e9:.3g} GB a device: {stage} needs "
        f"{need.total / 1e9:.3g} GB (weights {need.weights / 1e9:.3g}, gradients {need.gradients / 1e9:.3g}, "
        f"activations {need.activations / 1e9:.3g}, temporaries {need.temporaries / 1e9:.3g}) in the leanest layout "
        f"({estimate.candidate.describe()}) and a device has {room / 1e9:.3g} GB; what would make it fit: more "
        f"devices, devices of {(over + room) / 1e9:.3g} GB, or remat='full'"
    )


def _candidates(work: Work, fleet: Fleet, modes: Collection[str]) -> Iterator[tuple[str, list[Candidate]]]:
    """Candidates by label: those of each mode on each kind of device, and non-colocated ones on several kinds."""
    for name, kind in fleet.kinds.items():
        placed, on = dict.fromkeys(work.modules, name) if name else {}, f" on {name}" if name else ""
        for mode in (mode for mode in SHARED if mode in modes):
            candidates = SHARED[mode](work, kind.devices, kind.clock.node)
            yield mode + on, [replace(one, kinds=placed) if placed else one for one in candidates]
        if NON_COLOCATED in modes:
            yield NON_COLOCATED + on, list(_apart(work, fleet.alone[name]))
    if len(fleet.kinds) > 1 and NON_COLOCATED in modes:
        yield f"{NON_COLOCATED} on several kinds", list(_apart(work, fleet, least=2))


def _apart(work: Work, fleet: Fleet, least: int = 1) -> Iterator[Candidate]:
    """The plans of Eq. 1 and 2, and the same with cp, which these do not know.

    least: the least number of kinds of device in use.
    """
    for problem in problems(work, fleet):
        for plan in best_plans(problem, kinds=least):
            candidate = apart(work, plan, fleet)
            yield candidate
            yield from split_rows(work, candidate)


def problems(work: Work, fleet: Fleet) -> Iterator[MixedProblem]:
    """The problem of Eq. 1 and 2 for each number of samples and each bound on the LLM's stages.

    In 1F1B an encoder keeps a microbatch for every stage behind it, which Eq. 1 and 2 do not consider; a tighter bound
    leaves encoders more memory.
    """
    deep = depths(work.modules[LLM], max(kind.devices for kind in fleet.kinds.values()))
    keeps = any(work.modules[name].has_backward for name in work.encoders)
    most = sorted({max(one for one in deep if one <= limit) for limit in STAGES}) if keeps else [deep[-1]]
    for samples in (size for size in SAMPLES if work.global_batch % size == 0):
        for stages in most:
            kinds = {
                name: as_problem(work, kind.clock, kind.devices, kind.memory, samples, stages)
                for name, kind in fleet.kinds.items()
            }
            yield MixedProblem(names=tuple(work.modules), kinds=kinds)


def as_problem(work: Work, clock: Clock, devices: int, memory: float, samples: int, stages: int) -> Problem:
    """The problem of Eq. 1 and 2, with `samples` in a microbatch of an LLM replica and at most `stages` LLM stages."""
    modules = {}
    for name, module in work.modules.items():
        behind = stages + len(work.generators) + 1 if name in work.encoders else 1
        deep = tuple(pp for pp in depths(module, devices) if name != LLM or pp <= stages)
        modules[name] = _costs(work, module, clock, samples, behind, deep)
    return Problem(
        devices=devices, global_batch=work.global_batch, microbatch=samples, memory=memory, modules=modules, whole=True
    )


def _costs(
    work: Work, module: ModuleWork, clock: Clock, samples: int, in_flight: int, stages: tuple[int, ...]
) -> ModuleCosts:
    forward, backward, held = {}, {}, {}
    rows = module.rows * samples
    for tp, needs in module.held.items():
        shape: Any = {"rows": rows, "width": module.width, "tp": tp}
        took = clock.stage(module.name, module.whole, **shape)
        forward[tp], backward[tp] = took.forward / samples, took.backward / samples
        kept = needs.kept.of(module.whole) if module.has_backward else 0.0
        least = Part(layers=1, first=True, last=True)
        held[tp] = rows * kept * in_flight + clock.temporaries(module.name, least, **shape)
    parameters, trained = module.parameters.of(module.whole), module.trained.of(module.whole)
    states = work.states(module.name, module.whole, tp=1, shards=1)
    return ModuleCosts(
        forward=forward,
        backward=backward,
        # Copies, sums and what a program adds to them; then what is sharded, reduced gradients as well.
        param_bytes=parameters * work.item + (states.sums + trained * work.item),
        optimizer_bytes=states.optimizer + states.sums,
        activation_bytes=0.0,
        layers=module.layers,
        stages=stages,
        held=held,
    )
