"""Making schedules: GPipe and 1F1B over a stage graph, and the forward pass alone.

A schedule says three things: the order of each stage's own F and B, how many microbatches may be in flight, and a
priority among the ops that could run now. One list scheduler turns them, with nominal costs, into a total order.

1F1B on a graph (Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training", §3.3 and
appendix D): warm-up, steady state and drain of a stage follow from its distance to the furthest sink and not from its
place in a chain, so unequal encoders join one LLM, and generators leave it, without special cases. Why no order of this
kind deadlocks: a stage reaches its i-th B after F up to i + distance, its consumers need no more than that for theirs
because distance never grows downstream, and an op holds its ranks only while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mmjax.schedule.graph import StageGraph
from mmjax.schedule.interleaved import interleaved
from mmjax.schedule.list_scheduler import list_schedule
from mmjax.schedule.nested import nest
from mmjax.schedule.ops import Op, Schedule
from mmjax.schedule.orders import phases, turns
from mmjax.schedule.phased import encoders_first, three_phase
from mmjax.schedule.simulate import Costs
from mmjax.schedule.validate import ScheduleError


def gpipe(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """Every stage runs all its F, then all its B; all microbatches are in flight."""
    orders = {stage.name: phases(stage, range(microbatches)) for stage in graph.stages}
    in_flight = {stage.name: microbatches for stage in graph.stages}
    return list_schedule(graph, microbatches, costs, orders=orders, in_flight=in_flight, name="gpipe").schedule


def one_f_one_b(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """Every stage runs min(microbatches, distance + 1) F, then B and F in turn, then the B that are left.

    So a stage never has more than distance + 1 microbatches in flight. A stage without backward has no turn to take and
    keeps the same bound by awaiting its consumers.
    """
    orders = {stage.name: turns(stage, microbatches, graph.distance(stage.name) + 1) for stage in graph.stages}
    in_flight = {stage.name: graph.distance(stage.name) + 1 for stage in graph.stages}
    return list_schedule(graph, microbatches, costs, orders=orders, in_flight=in_flight, name="1f1b").schedule


def forward_only(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """F alone, for evaluation, over `graph.forward_only()`; in flight as in 1F1B."""
    forward = one_f_one_b(graph.forward_only(), microbatches, costs)
    return Schedule(
        graph=forward.graph, microbatches=microbatches, ops=forward.ops, name="forward", in_flight=forward.in_flight
    )


def eager_one_f_one_b(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """1F1B with a warm-up of 2 · distance + 1 F, and as many microbatches in flight.

    So a stage sends an activation a microbatch before its receiver asks for it, and a gradient has as long to come
    back: moves that occupy nobody are hidden behind compute (Zhuang et al., "On Optimizing the Communication of Model
    Parallelism", §4). Without moves that take time it gains nothing over 1F1B.
    """
    warmups = {stage.name: 2 * graph.distance(stage.name) + 1 for stage in graph.stages}
    orders = {stage.name: turns(stage, microbatches, warmups[stage.name]) for stage in graph.stages}
    return list_schedule(graph, microbatches, costs, orders=orders, in_flight=warmups, name="eager-1f1b").schedule


def zb_h1(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """Zero-bubble H1: 1F1B over `graph.with_split()`, where W fill what would be idle (Qi et al., "Zero Bubble Pipeline
    Parallelism", §2.3).

    Every stage may have as many microbatches in flight, until their W, as 1F1B lets the first stage of its module have:
    the module's memory is that of 1F1B. A stage that need not warm up so long puts its W off instead, and the gradients
    that others wait for go first. Of two ways to do so the one that `costs` make shorter: each W a fixed number of
    backwards late, or whenever nothing else can run.
    """
    graph = graph.with_split()
    bounds = {
        stage.name: 1 + max(graph.distance(other.name) for other in graph.stages if other.module == stage.module)
        for stage in graph.stages
    }
    in_flight = {
        stage.name: bounds[stage.name] if stage.split else graph.distance(stage.name) + 1 for stage in graph.stages
    }
    made = []
    for fixed in (True, False):
        orders: dict[str, list[Op]] = {}
        for stage in graph.stages:
            order = turns(stage, microbatches, graph.distance(stage.name) + 1)
            late = bounds[stage.name] - graph.distance(stage.name) - 1
            orders |= _late(order, late, stage.name) if fixed else _free(order, bounds[stage.name], stage.name)
        made.append(list_schedule(graph, microbatches, costs, orders=orders, in_flight=in_flight, name="zb-h1"))
    return min(made, key=lambda timeline: timeline.makespan).schedule


def _late(order: list[Op], late: int, stage: str) -> dict[str, list[Op]]:
    """An order with each W `late` backwards after its own B; those that are left come at the end."""
    weights = [op for op in order if op.kind == "W"]
    result: list[Op] = []
    for op in order:
        if op.kind != "W":
            result.append(op)
        elif op.microbatch >= late:
            result.append(weights[op.microbatch - late])
    return {stage: result + weights[max(0, len(weights) - late) :]}


def _free(order: list[Op], bound: int, stage: str) -> dict[str, list[Op]]:
    """F and B in their order; W among themselves, and only so early that no more than `bound` are in flight."""
    weights = [op for op in order if op.kind == "W"]
    result = {stage: [op for op in order if op.kind != "W"], f"{stage} W": weights}
    for op in weights:
        if op.microbatch + bound < len(weights):
            result[f"{op}"] = [op, Op("F", stage, op.microbatch + bound)]
    return result


def nested(graph: StageGraph, microbatches: int, costs: Costs, *, inner: str = "1f1b") -> Schedule:
    """Spread encoders and generators inside the `inner` schedule of all other stages, see `mmjax.schedule.nested`.

    inner: one of `INNER`. Where it splits backwards, those of spread stages are split too.
    """
    own = SCHEDULES[inner]
    split = graph.with_split() if own.splits else graph
    return nest(split, microbatches, costs, own.make, max(1, own.lead))


@dataclass(frozen=True, kw_only=True)
class Traits:
    """A schedule and what follows from its name.

    Attributes:
      make: makes it from a graph, microbatches and costs; where `windows`, also from a `window`.
      lead: microbatches in flight in a stage for each stage behind it, beside one of its own; 0 where the number does
        not follow from the distance alone.
      settles: after this many microbatches for each stage of the longest path, every further one adds the same time.
      phases: whether encoders have phases of their own, between which their parameters can be away.
      windows: whether it takes a window.
      stashes: whether encoders keep microbatches for so long that what they keep can be away.
      chunks: whether a module may have several stages on each submesh that take turns.
      splits: whether the backward of trained stages is two ops, B and W.
      lanes: whether stages may have lanes.
      nests: whether it is put around an inner schedule.
    """

    make: Callable[..., Schedule]
    lead: int = 0
    settles: int = 1
    phases: bool = False
    windows: bool = False
    stashes: bool = False
    chunks: bool = False
    splits: bool = False
    lanes: bool = False
    nests: bool = False


PLAIN = "1f1b"
"""The schedule that others are variants of."""
SCHEDULES: dict[str, Traits] = {
    PLAIN: Traits(make=one_f_one_b, lead=1),
    "gpipe": Traits(make=gpipe, lanes=True),
    "interleaved": Traits(make=interleaved, chunks=True),
    "eager-1f1b": Traits(make=eager_one_f_one_b, lead=2, settles=4),
    "zb-h1": Traits(make=zb_h1, splits=True),
    "three-phase": Traits(make=three_phase, lead=1, phases=True, windows=True, stashes=True, lanes=True),
    "encoders-first": Traits(make=encoders_first, lead=1, phases=True, stashes=True, lanes=True),
    "nested": Traits(make=nested, stashes=True, lanes=True, nests=True),
}
"""The schedules that a training step can have, by the name in `Train.schedule`."""
WINDOWED = tuple(name for name, own in SCHEDULES.items() if own.windows)
"""The schedules that take a window."""
INNER = (PLAIN, "interleaved", "eager-1f1b", "zb-h1")
"""The schedules that can be inside a nested one: the LLM's own."""
NESTING = tuple(name for name, own in SCHEDULES.items() if own.nests)
"""The schedules that are put around an inner one."""
STASHING = tuple(name for name, own in SCHEDULES.items() if own.stashes)
"""The schedules that leave a time in which what an encoder keeps for its backward can be away."""
LANED = tuple(name for name, own in SCHEDULES.items() if own.lanes)
"""The schedules for stages with lanes."""
OFFLOADING = tuple(name for name, own in SCHEDULES.items() if own.phases)
"""The schedules that leave a time in which an encoder's parameters can be away."""


def make_schedule(
    name: str, graph: StageGraph, microbatches: int, costs: Costs, *, window: int = 0, inner: str = PLAIN
) -> Schedule:
    """The schedule called `name` in `SCHEDULES`, in windows of `window` microbatches (0: all of them).

    inner: the schedule in `INNER` that a nested one is put around; others read none.

    Raises ScheduleError, with what to do, where the schedule does not fit the graph, takes no window or cannot offload,
    or where there is no such inner one.
    """
    traits = SCHEDULES[name]
    if window and not traits.windows:
        raise ScheduleError(f"{name} has no windows: use {', '.join(WINDOWED)}, or a window of 0")
    if not traits.phases and (away := [stage.name for stage in graph.stages if stage.offload]):
        raise ScheduleError(f"{name} leaves no time to offload {away[0]!r}: use {' or '.join(OFFLOADING)}")
    if not traits.stashes and (away := [stage.name for stage in graph.stages if stage.stash]):
        raise ScheduleError(f"{name} leaves no time to stash what {away[0]!r} keeps: use {' or '.join(STASHING)}")
    if not traits.lanes and (laned := [stage.name for stage in graph.stages if stage.lanes > 1]):
        raise ScheduleError(f"{name} has no place for the lanes of {laned[0]!r}: use {' or '.join(LANED)}")
    if inner != PLAIN and not traits.nests:
        raise ScheduleError(f"{name} has no inner schedule {inner!r}: use {PLAIN!r}, or nested")
    if inner not in INNER:
        raise ScheduleError(f"{name} around {inner!r}: use one of {', '.join(INNER)}")
    options = {"window": window} if window else {"inner": inner} if traits.nests else {}
    return traits.make(graph, microbatches, costs, **options)
