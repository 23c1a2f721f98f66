"""The systems that are compared: a schedule on the placement that is fastest, of those that fit into memory.

All train the same rows on the same 128 GPUs. A system may have a pipeline of another depth than the others; then it has
another number of replicas, each with more or fewer rows. One replica is simulated. That two replicas share their
experts, and so wait for one another in every layer, is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from benchmarks.nested.cluster import DEVICES, MOVE, RANKS, Memory, memory, timed
from benchmarks.nested.models import LLM, MMDIT, VIT, Row, Workload
from mmjax.schedule.placements import Placement, TimedModule, apart, in_lanes, in_pipeline, replicated
from mmjax.schedule.schedules import ONE_F_ONE_B, SCHEDULES, make_schedule
from mmjax.schedule.simulate import Costs, Timeline, simulate
from mmjax.schedule.validate import ScheduleReport, validate

DEPTH = 4
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
        """The microbatches in the order of what their encoders and generators take, the longest first."""

        def cost(microbatch: int) -> float:
            others = (one for one in (*self.encoders, *self.generators) if one.factors)
            return sum(one.layers * one.seconds * one.factors[microbatch] for one in others)

        return sorted(range(microbatches), key=cost, reverse=True)

    def ordered(self, order: Sequence[int]) -> Modules:
        """The same with microbatches in another order."""

        def one(module: TimedModule) -> TimedModule:
            return replace(module, factors=tuple(module.factors[m] for m in order)) if module.factors else module

        return Modules(tuple(map(one, self.encoders)), one(self.llm), tuple(map(one, self.generators)))


Choice = tuple[Placement, str]
"""A placement and the schedule on it."""
Depths = Sequence[int]
"""Ranks of a pipeline: where encoders and generators share them, and others that pipelines may have elsewhere."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A way to train.

    Attributes:
      name: shown in rows.
      choices: the placements that it may have, each with its schedule.
      inner: the LLM's own schedule where the schedule is nested.
      by_cost: whether microbatches of like cost are in one unit.
      generates: whether it can train generators.
    """

    name: str
    choices: Callable[[Modules, Depths], Iterable[Choice]]
    inner: str = ONE_F_ONE_B
    by_cost: bool = False
    generates: bool = True


def _lanes(schedule: str, chunks: int = 1) -> Callable[[Modules, Depths], Iterator[Choice]]:
    def choices(modules: Modules, depths: Depths) -> Iterator[Choice]:
        made = in_lanes(modules.encoders, modules.llm, depths[0], chunks=chunks, generators=modules.generators)
        yield made, schedule

    return choices


def _one_rank_each(modules: Modules, depths: Depths) -> Iterator[Choice]:
    """Encoder and generator are a stage of the pipeline each, on a rank as the LLM's stages are."""
    others = (*modules.encoders, *modules.generators)
    stages = {**{other.name: 1 for other in others}, modules.llm.name: depths[0] - len(others)}
    yield from _own_ranks(modules, stages)


def _any_ranks(modules: Modules, depths: Depths) -> Iterator[Choice]:
    """Every way to share out ranks, and one row of layers cut as evenly as can be."""
    names = [module.name for module in (*modules.encoders, modules.llm, *modules.generators)]
    for depth in depths:
        yield in_pipeline(modules.encoders, modules.llm, depth, generators=modules.generators), "1f1b"
        for split in itertools.product(range(1, depth), repeat=len(names)):
            if sum(split) == depth:
                yield from _own_ranks(modules, dict(zip(names, split, strict=True)))


def _own_ranks(modules: Modules, stages: Mapping[str, int]) -> Iterator[Choice]:
    yield apart(modules.encoders, modules.llm, stages, generators=modules.generators), "1f1b"
    if stages[modules.llm.name] > 1:
        made = apart(modules.encoders, modules.llm, stages, chunks=CHUNKS, generators=modules.generators)
        yield made, "interleaved"


def _replicated(modules: Modules, depths: Depths) -> Iterator[Choice]:
    yield replicated(modules.encoders, modules.llm, depths[0]), "1f1b"


NESTED = "nested, interleaved"
"""The system that the others are compared with: the one of the paper."""
NESTED_1F1B, OPTIMUS, ONE_RANK, ANY_RANKS = "nested, 1f1b", "Optimus", "DistTrain, a rank each", "DistTrain, any ranks"
SYSTEMS = (
    System(name=NESTED, choices=_lanes("nested", CHUNKS), inner="interleaved"),
    System(name="nested, interleaved, by cost", choices=_lanes("nested", CHUNKS), inner="interleaved", by_cost=True),
    System(name=NESTED_1F1B, choices=_lanes("nested"), inner="1f1b"),
    System(name="nested, zb-h1", choices=_lanes("nested"), inner="zb-h1"),
    System(name=OPTIMUS, choices=_lanes("encoders-first")),
    System(name=ONE_RANK, choices=_one_rank_each),
    System(name=ANY_RANKS, choices=_any_ranks),
    System(name="encoders replicated", choices=_replicated, generates=False),
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One of a system's choices for a step of so many microbatches; `move` and `once` are as of `Placement.costs`."""

    system: System
    placement: Placement
    name: str
    microbatches: int
    move: float
    once: float

    @cached_property
    def bound(self) -> float:
        """Seconds that the busiest rank computes: no step is shorter."""
        return max(self.placement.work(self.microbatches).values())

    @cached_property
    def costs(self) -> Costs:
        """Seconds of every op."""
        split = SCHEDULES[self.system.inner].splits
        return self.placement.costs(self.microbatches, move=self.move, once=self.once, split=split)

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step."""
        about = self.placement.graph, self.microbatches, self.costs
        made = make_schedule(self.name, *about, inner=self.system.inner)
        return simulate(made, self.costs)

    @property
    def layout(self) -> str:
        """Ranks of each module, and the schedule, such as "vision 1, llm 3: 1f1b"."""
        graph = self.placement.graph
        ranks = {m: {r for node in graph.stages if node.module == m for r in node.ranks} for m in graph.modules}
        return f"{', '.join(f'{module} {len(held)}' for module, held in ranks.items())}: {self.name}"


def trials(
    system: System, modules: Modules, microbatches: int, depths: Depths, *, move: float, once: float = 0.0
) -> list[Trial]:
    """All choices of a system, those first that may be fastest.

    microbatches: of a pipeline of `depths[0]` ranks. One that is n times as deep has n times as many, since there are
    fewer of them; the factors of modules have to be as many as the deepest one needs.
    """
    found = []
    for placement, name in system.choices(modules, depths):
        count = microbatches * len(placement.graph.ranks) // depths[0]
        about = {"system": system, "placement": placement, "name": name}
        found.append(Trial(**about, microbatches=count, move=move, once=once))
    return sorted(found, key=lambda one: one.bound)


def fastest(made: Sequence[Trial], fits: Callable[[Trial], bool] = lambda _: True) -> Trial | None:
    """The trial with the shortest step of those that fit, if any does."""
    best = None
    for trial in made:
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
      workload, batch: of what; `batch` is rows for each GPU.
      trial: the choice, and the simulated step.
      report: what `validate` says of its schedule, microbatches in flight among it.
      memory: of the fullest device.
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
    """The step of the system's fastest choice that fits; of the one that needs least memory where none does.

    even: every row takes as long as the mean row.
    """
    rows = workload.rows(batch * DEVICES * DEPTH // RANKS)
    if system.by_cost:
        order = modules_of(workload, rows, even=even).by_cost(len(rows))
        rows = tuple(rows[m] for m in order)
    every = [*rows] * (max(DEPTHS) // DEPTH)  # a deeper pipeline has the rows of several
    made = trials(system, modules_of(workload, every, even=even), len(rows), DEPTHS, move=MOVE)

    def held(trial: Trial) -> Memory:
        own = every[: trial.microbatches]
        return memory(trial.timeline.schedule, trial.placement, workload.stacks, own)

    best = fastest(made, lambda trial: held(trial).fits) or min(made, key=lambda trial: held(trial).total)
    report = validate(best.timeline.schedule)
    return Outcome(workload=workload, batch=batch, trial=best, report=report, memory=held(best))


def modules_of(workload: Workload, rows: Sequence[Row], *, even: bool) -> Modules:
    """The modules of a workload with the times of these rows, or of their mean where `even`."""
    vision, llm = (timed(stack, rows, even=even) for stack in (VIT, LLM))
    generators = (timed(MMDIT, rows, even=even),) if workload.generator else ()
    return Modules(encoders=(vision,), llm=llm, generators=generators)
