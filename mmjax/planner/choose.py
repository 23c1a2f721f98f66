"""Chooses the best way to place all modules, from their work, a clock and a number of devices.

Layouts of each mode are ranked in closed form: homogeneous, colocated and nested ones by trying all, non-colocated ones
by the exact search over Eq. 1 and 2 (`search`). The best of each mode that fit into memory are simulated with the
schedule that a run would have, communication included, and the shortest simulated step is the plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from mmjax.mesh.layout import Layout
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
from mmjax.planner.cost import Plan
from mmjax.planner.estimate import Estimate
from mmjax.planner.finalists import TIE, RowsOf, exact, finalists, proportional
from mmjax.planner.fit import DoesNotFit
from mmjax.planner.fleet import DeviceKind, Fleet
from mmjax.planner.problem import ANY, NEEDED, MixedProblem, ModuleCosts, Problem
from mmjax.planner.search import best_plans
from mmjax.planner.state_layouts import fully_sharded
from mmjax.planner.variants import balanced, exchanged, instanced, interleaved, rescheduled, split_rows
from mmjax.planner.work import ModuleWork, StagePart, Work

SHARED = {HOMOGENEOUS: homogeneous, COLOCATED: colocated, NESTED: nested}
"""The modes in which modules share devices, and the functions that make their candidates."""
STAGES = (1, 2, 4, 8, 16, 32, 64)
"""Bounds on the number of LLM stages to try if encoders keep activations for each stage."""
VARIED = 1
"""The number of finalists of a mode that are also simulated interleaved, and with layers cut by time."""


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """The best candidates, by mode and of all.

    Attributes:
      devices: number of devices that are available.
      estimates: the simulated candidates, the shortest step first.
      misses: for each mode without a candidate that fits, one line with the reason; on several kinds of device by mode
        and kinds, such as "nested on l20".
      kinds: number of devices by kind; empty where there is one kind.
    """

    devices: int
    estimates: Sequence[Estimate]
    misses: Mapping[str, str] = field(default_factory=dict, hash=False)
    kinds: Mapping[str, int] = field(default_factory=dict, hash=False)

    @cached_property
    def best(self) -> Estimate:
        """The plan: the shortest step; of equal ones (`TIE`) the one on fewest kinds, then on fewest devices."""
        shortest = self.estimates[0].seconds
        tied = [estimate for estimate in self.estimates if estimate.seconds <= shortest * (1 + TIE)]
        return min(tied, key=lambda e: (len(e.candidate.used_kinds), e.candidate.devices, e.seconds))

    @cached_property
    def by_mode(self) -> dict[str, Estimate]:
        """The best candidate of each mode that has one, by mode, in the order of `MODES`.

        With several kinds of device, the best of each mode and kinds in use, by `Candidate.label`: "nested on h100".
        """
        best: dict[str, Estimate] = {}
        for estimate in (self.best, *self.estimates):
            best.setdefault(estimate.candidate.label, estimate)
        return dict(sorted(best.items(), key=lambda item: MODES.index(item[1].candidate.mode)))

    def why(self) -> str:
        """One line with the plan's mode, its gain over the best layout of each other mode, and its slowest stage.

        If there are several kinds of device, also its gain over the best layout on each other set of kinds.
        """
        best, alternatives = self.best, dict[object, Estimate]()
        for estimate in sorted(self.by_mode.values(), key=lambda estimate: estimate.seconds):
            if estimate.candidate.mode != best.candidate.mode:
                alternatives.setdefault(estimate.candidate.mode, estimate)
            if estimate.candidate.used_kinds != best.candidate.used_kinds:
                alternatives.setdefault(estimate.candidate.used_kinds, estimate)
        gains = [
            f"{longer(e.seconds, best.seconds)} in the best {e.candidate.mode} layout{e.candidate.on_kinds}"
            for e in dict.fromkeys(alternatives.values())
        ]
        comparison = f"; a step takes {', '.join(gains)}" if gains else ""
        idle = f"{best.bubble:.0%} of the step is idle"
        return f"{best.candidate.label}{comparison}; {best.bottleneck} sets the pace, {idle}"


def longer(seconds: float, than: float) -> str:
    """The relative difference of `seconds` to a shorter time `than`, both above 0, such as "+3.1%"; never "-0.0%"."""
    return f"{round(seconds / than - 1, 3) + 0.0:+.1%}"


def choose(
    work: Work,
    clock: Clock,
    devices: int,
    *,
    memory: float = 0.0,
    rows_of: RowsOf | None = None,
    modes: Collection[str] = MODES,
    shards: str = NEEDED,
) -> PlanChoice:
    """Simulates the best candidates of every mode on devices of one kind; the plan is the `best` of the result.

    Args:
      work: `Work`, what the modules compute, as `read_work(recipe)` gives it.
      clock: the times, such as `AnalyticClock(work=work, accelerator=accelerator("h100"))`.
      devices, memory: their number, of which fewer may be used, and the bytes of each; 0 takes the clock's.
      rows_of: a candidate's rows, such as `rows_by_candidate(recipe, source)`; None takes `proportional(work)`.
      modes: the modes to try: "homogeneous", "colocated", "non-colocated", "nested".
      shards: when shards of sums and parameters are tried: "needed", if the fastest layout without offloads, or "any".

    Raises:
      DoesNotFit: no mode has a layout that fits; the message names modules and missing bytes.
    """
    kind = DeviceKind(clock=clock, devices=devices, memory=memory or clock.memory)
    return choose_on(work, Fleet(kinds={"": kind}), rows_of=rows_of, modes=modes, shards=shards)


def choose_on(
    work: Work,
    fleet: Fleet,
    *,
    rows_of: RowsOf | None = None,
    modes: Collection[str] = MODES,
    shards: str = NEEDED,
) -> PlanChoice:
    """Simulates candidates of every mode on each kind and on several together; the plan is the `best` of the result.

    Args:
      work: `Work`, what the modules compute, as `read_work(recipe)` gives it.
      fleet: the devices, such as `Fleet(kinds={"": DeviceKind(clock=clock, devices=16, memory=80e9)})`.
      rows_of: a candidate's rows, such as `rows_by_candidate(recipe, source)`; None takes `proportional(work)`.
      modes: the modes to try: "homogeneous", "colocated", "non-colocated", "nested".
      shards: when shards of sums and parameters are tried: "needed", if the fastest layout without offloads, or "any".

    Raises:
      ConfigError: there are too many kinds to try all assignments of modules.
      DoesNotFit: no mode has a layout that fits; the message names modules and missing bytes.
    """
    rows_of = rows_of or proportional(work)
    estimates, misses = list[Estimate](), dict[str, str]()
    candidates = dict(_candidates(work, fleet, modes))
    for relieved in (False, True):
        if estimates and not min(estimates, key=lambda estimate: estimate.seconds).candidate.offloads:
            break
        by_label = _by_label(work, fleet, candidates, rows_of, shards=relieved)
        for label, (accepted, reason) in by_label.items():
            estimates += accepted
            if accepted:
                misses.pop(label, None)
            elif all(estimate.candidate.label != label for estimate in estimates):
                misses.setdefault(label, reason)
    if not estimates:
        raise DoesNotFit("; ".join(f"{label}: {reason}" for label, reason in misses.items()))
    if shards == ANY:
        everywhere = {
            label: [s for c in of_label for s in fully_sharded(work, c)] for label, of_label in candidates.items()
        }
        for accepted, _ in _by_label(work, fleet, everywhere, rows_of, shards=False).values():
            estimates += accepted
    return ranked(fleet, [*estimates, *_further(work, fleet, estimates, rows_of)], misses)


def _by_label(
    work: Work, fleet: Fleet, candidates: Mapping[str, Iterable[Candidate]], rows_of: RowsOf, *, shards: bool
) -> dict[str, tuple[list[Estimate], str]]:
    """Estimates of the fastest candidates that fit, and of their variants, by label; or none and the reason.

    shards: as for `finalists`.
    """
    results: dict[str, tuple[list[Estimate], str]] = {}
    for label, candidates_of_label in candidates.items():
        try:
            fastest = finalists(work, fleet, candidates_of_label, shards=shards)
        except DoesNotFit as reason:
            results[label] = [], str(reason)
            continue
        accepted = list(_with_variants(work, fleet, fastest, rows_of))
        results[label] = accepted, "" if accepted else "no layout that fits on paper fits with whole rows"
    return results


def ranked(fleet: Fleet, estimates: Iterable[Estimate], misses: Mapping[str, str]) -> PlanChoice:
    """The choice with these estimates in ascending order of seconds; of equal ones, fewer devices first.

    fleet, estimates: the devices, and one or more estimates in any order, as `estimated` gives them.
    misses: for each mode without an estimate, a line with the reason: {"nested": "…"}; {} where there is none.
    """
    ordered = sorted(estimates, key=lambda estimate: (estimate.seconds, estimate.candidate.devices))
    kinds = {name: kind.devices for name, kind in fleet.kinds.items() if name}
    return PlanChoice(devices=fleet.devices, estimates=ordered, misses=misses, kinds=kinds)


def _with_variants(work: Work, fleet: Fleet, candidates: Sequence[Candidate], rows_of: RowsOf) -> Iterator[Estimate]:
    """Estimates of candidates with exact rows, and of variants of the first; those that do not fit are left out."""
    for index, candidate in enumerate(candidates):
        varied = index < VARIED
        for variant in (candidate, *(interleaved(work, candidate) if varied else ())):
            for estimate in exact(work, fleet, variant, rows_of):
                yield estimate
                recut = balanced(work, estimate.clock, estimate.rows, variant) if varied else None
                yield from exact(work, fleet, recut, rows_of) if recut else ()


def _further(work: Work, fleet: Fleet, estimates: Sequence[Estimate], rows_of: RowsOf) -> list[Estimate]:
    """Estimates of promising variants: each mode's best with other schedules, the best of all with other settings.

    The settings are cp methods and optimizer instances. Modes are compared with equal means, so each is tried with the
    schedules that leave less idle time.
    """
    variants: list[Estimate] = []
    best_by_mode: dict[str, float] = {}
    pipelined: dict[str, Estimate] = {}
    for estimate in sorted(estimates, key=lambda estimate: estimate.seconds):
        best_by_mode.setdefault(estimate.candidate.label, estimate.seconds)
        if estimate.candidate.is_pipelined_1f1b:
            pipelined.setdefault(estimate.candidate.label, estimate)
    for label, estimate in pipelined.items():
        for candidate in rescheduled(estimate, best_by_mode[label]):
            variants += exact(work, fleet, candidate, rows_of)
    best = min(estimates, key=lambda estimate: estimate.seconds)
    for variant in (exchanged, instanced):
        best = min((best, *variants), key=lambda estimate: estimate.seconds)
        if candidate := variant(best):
            variants += exact(work, fleet, candidate, rows_of)
    return variants


def _candidates(work: Work, fleet: Fleet, modes: Collection[str]) -> Iterator[tuple[str, list[Candidate]]]:
    """Candidates by label, of each mode on each kind of device, and non-colocated ones on several kinds."""
    for name, kind in fleet.kinds.items():
        kinds, on = dict.fromkeys(work.modules, name) if name else {}, f" on {name}" if name else ""
        for mode in (mode for mode in SHARED if mode in modes):
            candidates = SHARED[mode](work, kind.devices, kind.clock.node)
            yield mode + on, [replace(candidate, kinds=kinds) if kinds else candidate for candidate in candidates]
        if NON_COLOCATED in modes:
            yield NON_COLOCATED + on, list(_apart(work, fleet.alone[name]))
    if len(fleet.kinds) > 1 and NON_COLOCATED in modes:
        yield f"{NON_COLOCATED} on several kinds", list(_apart(work, fleet, least=2))


def _apart(work: Work, fleet: Fleet, least: int = 1) -> Iterator[Candidate]:
    """The plans of Eq. 1 and 2, and the same plans with cp, which the equations do not have.

    Plans with more recompute are those with a shorter step, which have what memory allows them. If there are none,
    they are the plans of modules whose replicas share all of their states.

    least: the least number of kinds of device in use.
    """
    best = math.inf
    for sharded, remat in itertools.product((False, True), work.remat_choices):
        if sharded and best < math.inf and remat == work.fastest_remat:
            return
        recomputing = work.with_remat(remat)
        clocks = fleet.computing(recomputing)
        relaxed = {name for name, value in remat.items() if value != work.fastest_remat[name]}
        of_kinds = partial(_shorter, recomputing, clocks, best, kinds=least, sharded=sharded)
        if relaxed and not any(of_kinds(free=relaxed)):
            continue
        plans = list(of_kinds())
        for plan in plans:
            candidate = replace(apart(recomputing, plan, fleet), remat=remat)
            yield candidate
            yield from split_rows(recomputing, candidate)
        best = min([best, *(plan.objective for plan in plans)])


def _shorter(
    work: Work, fleet: Fleet, best: float, *, kinds: int, sharded: bool, free: Collection[str] = ()
) -> Iterator[Plan]:
    """The best plans of Eq. 1 and 2 with steps shorter than `best` seconds.

    sharded: whether replicas share all states. free: names of modules whose activations take no memory, for a bound
    that needs no trace of them.
    """
    for problem in problems(work, fleet, free=free, sharded=sharded):
        yield from (plan for plan in best_plans(problem, kinds=kinds, below=best) if plan.objective < best)


def problems(work: Work, fleet: Fleet, *, free: Collection[str] = (), sharded: bool = False) -> Iterator[MixedProblem]:
    """The problem of Eq. 1 and 2 for each number of samples of a microbatch and each bound on the LLM's stages.

    Yields them for the `SAMPLES` that divide the global batch; their kinds have the names of the fleet's.

    In 1F1B an encoder keeps a microbatch for every stage behind it, which Eq. 1 and 2 do not consider; a tighter bound
    leaves encoders more memory.

    work, fleet: such as `read_work(recipe)` and `Fleet(kinds={"": kind})`.
    free: names of modules whose activations are taken to need no memory.
    sharded: whether replicas share parameters and sums of gradients too.
    """
    pps = depths(work.modules[LLM], max(kind.devices for kind in fleet.kinds.values()))
    keeps = any(work.modules[name].has_backward for name in work.encoders)
    most = sorted({max(pp for pp in pps if pp <= limit) for limit in STAGES}) if keeps else [pps[-1]]
    for samples in (size for size in SAMPLES if work.global_batch % size == 0):
        for stages in most:
            kinds = {
                name: as_problem(work, kind, samples=samples, stages=stages, free=free, sharded=sharded)
                for name, kind in fleet.kinds.items()
            }
            yield MixedProblem(names=tuple(work.modules), kinds=kinds)


def as_problem(
    work: Work, kind: DeviceKind, *, samples: int, stages: int, free: Collection[str] = (), sharded: bool = False
) -> Problem:
    """The problem of Eq. 1 and 2 (`mmjax.planner.cost`) on devices of one kind.

    Every dp divides the samples of a microbatch of all replicas. An encoder's activations count once for each stage
    that may be behind it. Replicas share experts, as with the most ep.

    work, kind: such as `read_work(recipe)` and `DeviceKind(clock=clock, devices=16, memory=80e9)`.
    samples, stages: samples of a microbatch of one LLM replica, and the most LLM stages.
    free: names of modules whose activations are taken to need no memory.
    sharded: whether replicas share parameters and sums of gradients too.
    """
    modules = {}
    for name, module in work.modules.items():
        in_flight = stages + len(work.generators) + 1 if name in work.encoders else 1
        pps = tuple(pp for pp in depths(module, kind.devices) if name != LLM or pp <= stages)
        in_flight = 0 if name in free else in_flight
        sizes = {"samples": samples, "in_flight": in_flight}
        modules[name] = _costs(work, module, kind.clock, **sizes, stages=pps, sharded=sharded)
    return Problem(
        devices=kind.devices,
        global_batch=work.global_batch,
        microbatch=samples,
        memory=kind.memory,
        modules=modules,
        dp_divides_samples=True,
    )


def _problem_bytes(work: Work, module: ModuleWork, *, sharded: bool) -> tuple[float, float]:
    """`ModuleCosts.param_bytes` and `ModuleCosts.optimizer_bytes` of a module: each replica's, and those they share.

    A replica has copies, sums and the gradients that a program adds to them, but for experts. All share states with
    reduced gradients.
    """
    states = work.states(module.name, module.whole, Layout())
    copies = module.parameters.of(module.whole) * work.item
    if sharded:
        return 0.0, copies + states.sums + states.optimizer
    of_replica = copies + states.sums + module.trained.of(module.whole) * work.item
    experts = module.experts.parameters * module.layers if module.experts else 0.0
    shared = of_replica * experts / module.parameters.of(module.whole) if experts else 0.0
    return of_replica - shared, states.optimizer + states.sums + shared


def _costs(
    work: Work,
    module: ModuleWork,
    clock: Clock,
    *,
    samples: int,
    in_flight: int,
    stages: tuple[int, ...],
    sharded: bool,
) -> ModuleCosts:
    """The costs of a module; with none in flight its activations and temporaries take no memory."""
    forward, backward, activations = {}, {}, {}
    rows = module.rows * samples
    for tp in module.memory:
        seconds = clock.stage(module.name, module.whole, rows=rows, width=module.width, tp=tp)
        forward[tp], backward[tp] = seconds.forward / samples, seconds.backward / samples
        activations[tp] = 0.0
        if not in_flight:
            continue
        residuals = module.memory[tp].residuals.of(module.whole) if module.has_backward else 0.0
        least = StagePart(layers=1, first=True, last=True)
        temporaries = clock.temporaries(module.name, least, rows=rows, width=module.width, tp=tp)
        activations[tp] = rows * residuals * in_flight + temporaries
    param_bytes, optimizer_bytes = _problem_bytes(work, module, sharded=sharded)
    return ModuleCosts(
        forward=forward,
        backward=backward,
        param_bytes=param_bytes,
        optimizer_bytes=optimizer_bytes,
        activation_bytes=0.0,
        layers=module.layers,
        stages=stages,
        activation_bytes_by_tp=activations,
    )
