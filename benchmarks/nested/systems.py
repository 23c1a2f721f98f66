"""The compared systems: each is a schedule on its fastest placement that fits into memory.

All train the same rows on the same 128 GPUs. A system may have a pipeline of another depth than the others; then it has
another number of replicas, each with more or fewer rows. One replica is simulated, as if the rows of all replicas in a
microbatch were alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from benchmarks.nested.cluster import DEVICES, RANKS, SHORTEST, Memory, memory, move_seconds, pull_seconds, timed
from benchmarks.nested.models import LLM, PAINTER, VISION, Row, Workload
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.placements import Placement, TimedModule, apart, in_lanes, in_pipeline, replicated
from mmjax.schedule.schedules import ONE_F_ONE_B, SCHEDULES, make_schedule
from mmjax.schedule.simulate import Costs, Timeline, simulate
from mmjax.schedule.validate import ScheduleReport, validate

DEPTH = SHORTEST
"""Ranks of a pipeline (pp of the LLM) where encoders and generators share them."""
DEPTHS = (DEPTH, 2 * DEPTH)
"""Ranks of a pipeline where modules have ranks of their own."""
CHUNKS = 2


@dataclass(frozen=True)
class Modules:
    """Timed modules by their place in the model."""

    encoders: tuple[TimedModule, ...]
    llm: TimedModule
    generators: tuple[TimedModule, ...] = ()

    def by_cost(self, microbatches: int) -> list[int]:
        """The microbatches by the time of their encoders and generators, the longest first."""

        def cost(microbatch: int) -> float:
            uneven = (module for module in (*self.encoders, *self.generators) if module.factors)
            return sum(module.layers * module.seconds * module.factors[microbatch] for module in uneven)

        return sorted(range(microbatches), key=cost, reverse=True)

    def ordered(self, order: Sequence[int]) -> Modules:
        """The modules with microbatches in another order."""

        def reordered(module: TimedModule) -> TimedModule:
            return replace(module, factors=tuple(module.factors[m] for m in order)) if module.factors else module

        return Modules(
            tuple(map(reordered, self.encoders)), reordered(self.llm), tuple(map(reordered, self.generators))
        )


Choice = tuple[Placement, str]
"""A placement and the schedule on it."""
Depths = Sequence[int]
"""Numbers of ranks of a pipeline: first for systems that share ranks among modules, then alternatives for others."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A way to train.

    Attributes:
      name: shown in rows.
      choices: the placements that it may have, each with its schedule.
      inner: the LLM's schedule if the schedule is nested.
      by_cost: whether microbatches of similar cost are in one unit.
      generates: whether it can train generators.
      laned: whether encoders and generators have a lane on each rank, and so pull their parameters.
    """

    name: str
    choices: Callable[[Modules, Depths], Iterable[Choice]]
    inner: str = ONE_F_ONE_B
    by_cost: bool = False
    generates: bool = True
    laned: bool = False

    @property
    def lanes(self) -> int:
        """Lanes of an encoder or generator; 1 where they have ranks of their own."""
        return DEPTH if self.laned else 1


def _lanes(schedule: str, chunks: int = 1) -> Callable[[Modules, Depths], Iterator[Choice]]:
    def choices(modules: Modules, depths: Depths) -> Iterator[Choice]:
        placement = in_lanes(modules.encoders, modules.llm, depths[0], chunks=chunks, generators=modules.generators)
        yield placement, schedule

    return choices


def _one_rank_each(modules: Modules, depths: Depths) -> Iterator[Choice]:
    """Encoder and generator are one stage each, on a rank of their own."""
    single_stages = (*modules.encoders, *modules.generators)
    stages = {**{module.name: 1 for module in single_stages}, modules.llm.name: depths[0] - len(single_stages)}
    yield from _own_ranks(modules, stages)


def _any_ranks(modules: Modules, depths: Depths) -> Iterator[Choice]:
    """Every split of the ranks among modules; and one pipeline of all layers, cut as evenly as possible."""
    names = [module.name for module in (*modules.encoders, modules.llm, *modules.generators)]
    for depth in depths:
        yield in_pipeline(modules.encoders, modules.llm, depth, generators=modules.generators), "1f1b"
        for split in itertools.product(range(1, depth), repeat=len(names)):
            if sum(split) == depth:
                yield from _own_ranks(modules, dict(zip(names, split, strict=True)))


def _own_ranks(modules: Modules, stages: Mapping[str, int]) -> Iterator[Choice]:
    yield apart(modules.encoders, modules.llm, stages, generators=modules.generators), "1f1b"
    if stages[modules.llm.name] > 1:
        placement = apart(modules.encoders, modules.llm, stages, chunks=CHUNKS, generators=modules.generators)
        yield placement, "interleaved"


def _replicated(modules: Modules, depths: Depths) -> Iterator[Choice]:
    yield replicated(modules.encoders, modules.llm, depths[0]), "1f1b"


NESTED = "nested, interleaved"
"""The paper's system, with which the others are compared."""
NESTED_1F1B, OPTIMUS, ONE_RANK, ANY_RANKS = "nested, 1f1b", "Optimus", "DistTrain, a rank each", "DistTrain, any ranks"
BY_COST = "nested, interleaved, by cost"
SYSTEMS = (
    System(name=NESTED, choices=_lanes("nested", CHUNKS), inner="interleaved", laned=True),
    System(name=BY_COST, choices=_lanes("nested", CHUNKS), inner="interleaved", by_cost=True, laned=True),
    System(name=NESTED_1F1B, choices=_lanes("nested"), inner="1f1b", laned=True),
    System(name="nested, zb-h1", choices=_lanes("nested"), inner="zb-h1", laned=True),
    System(name=OPTIMUS, choices=_lanes("encoders-first"), laned=True),
    System(name=ONE_RANK, choices=_one_rank_each),
    System(name=ANY_RANKS, choices=_any_ranks),
    System(name="encoders replicated", choices=_replicated, generates=False),
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One choice of a system for a step of `microbatches`.

    Attributes:
      system: the system.
      placement: the choice.
      name: the schedule's name.
      microbatches: microbatches of the step.
      move, once: as for `Placement.costs`.
      pulls: seconds in which a lane pulls the parameters of a module, by module; others have whole parameters.
    """

    system: System
    placement: Placement
    name: str
    microbatches: int
    move: float
    once: float
    pulls: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def bound(self) -> float:
        """Seconds that the busiest rank computes: no step is shorter."""
        return max(self.placement.work(self.microbatches).values())

    @cached_property
    def costs(self) -> Costs:
        """Seconds of every op."""
        split = SCHEDULES[self.system.inner].splits
        costs = self.placement.costs(self.microbatches, move=self.move, once=self.once, split=split)
        gathers = {
            ("gather", node.name, backward): self.pulls[node.module]
            for node in self.graph.stages
            if node.gather
            for backward in (False, True)
        }
        return replace(costs, seconds={**costs.seconds, **gathers})

    @cached_property
    def graph(self) -> StageGraph:
        """The stages, with those that pull."""
        graph = self.placement.graph
        return graph.with_gathers({node.name: "pull" for node in graph.stages if node.module in self.pulls})

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step."""
        schedule = make_schedule(self.name, self.graph, self.microbatches, self.costs, inner=self.system.inner)
        return simulate(schedule, self.costs)

    @property
    def layout(self) -> str:
        """Ranks of each module, and the schedule, such as "vision 1, llm 3: 1f1b"."""
        graph = self.placement.graph
        ranks = {m: {r for node in graph.stages if node.module == m for r in node.ranks} for m in graph.modules}
        return (
            f"{', '.join(f'{module} {len(ranks_of_module)}' for module, ranks_of_module in ranks.items())}: {self.name}"
        )


def trials(
    system: System,
    modules: Modules,
    microbatches: int,
    depths: Depths,
    *,
    move: float,
    once: float = 0.0,
    pulls: Mapping[str, float] | None = None,
) -> list[Trial]:
    """All choices of a system, by their lower bound on the step.

    `microbatches` is the number for a pipeline of `depths[0]` ranks. A pipeline that is n times as deep has n times as
    many microbatches, since there are fewer pipelines; modules need factors for the deepest one. For `move`, `once` and
    `pulls` see `Trial`.
    """
    all_trials = []
    for placement, name in system.choices(modules, depths):
        count = microbatches * len(placement.graph.ranks) // depths[0]
        shared = {"move": move, "once": once, "pulls": pulls or {}}
        all_trials.append(Trial(system=system, placement=placement, name=name, microbatches=count, **shared))
    return sorted(all_trials, key=lambda trial: trial.bound)


def fastest(trials_by_bound: Sequence[Trial], fits: Callable[[Trial], bool] = lambda _: True) -> Trial | None:
    """The trial with the shortest step among the trials that fit; None if none fits."""
    best = None
    for trial in trials_by_bound:
        if best and trial.bound >= best.timeline.makespan:
            break
        if (not best or trial.timeline.makespan < best.timeline.makespan) and fits(trial):
            best = trial
    return best


# ---- on 128 H800 -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A step of a system on 128 H800.

    Attributes:
      workload: the model and its data.
      batch: rows for each GPU.
      trial: the choice, and the simulated step.
      report: the report of `validate` on its schedule, with microbatches in flight.
      memory: bytes of the fullest device.
    """

    workload: Workload
    batch: int
    trial: Trial
    report: ScheduleReport
    memory: Memory

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.trial.timeline.makespan


@cache
def outcome(system: System, workload: Workload, batch: int, *, even: bool = False) -> Outcome:
    """The step of the system's fastest choice that fits, or of the choice with least memory if none fits.

    With `even` every row takes as long as the mean row.
    """
    rows, lanes = workload.rows(batch * DEVICES * DEPTH // RANKS), system.lanes
    if system.by_cost:
        order = modules_of(workload, rows, lanes=lanes, even=even).by_cost(len(rows))
        rows = tuple(rows[m] for m in order)
    every = [*rows] * (max(DEPTHS) // DEPTH)  # a deeper pipeline has the rows of several
    modules = modules_of(workload, every, lanes=lanes, even=even)
    move, pulls = move_seconds(workload), pull_seconds(workload, lanes) if system.laned else {}
    candidates = trials(system, modules, len(rows), DEPTHS, move=move, pulls=pulls)

    def memory_of(trial: Trial) -> Memory:
        return memory(
            trial.timeline.schedule, trial.placement, workload, every[: trial.microbatches], lanes=system.lanes
        )

    best = fastest(candidates, lambda trial: memory_of(trial).fits)
    best = best or min(candidates, key=lambda trial: memory_of(trial).total)
    report = validate(best.timeline.schedule)
    return Outcome(workload=workload, batch=batch, trial=best, report=report, memory=memory_of(best))


def modules_of(workload: Workload, rows: Sequence[Row], *, lanes: int, even: bool) -> Modules:
    """The modules of a workload with the time of each row, or their mean time if `even`; `lanes` as for `timed`."""

    def module(name: str) -> TimedModule:
        return timed(workload, name, rows, lanes=lanes, even=even)

    generators = (module(PAINTER),) if workload.generator else ()
    return Modules(encoders=(module(VISION),), llm=module(LLM), generators=generators)
