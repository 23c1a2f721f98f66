"""Making schedules: GPipe and 1F1B over a stage graph, and the forward pass alone.

A schedule consists of the order of F and B of each stage, a bound on the microbatches in flight, and a priority among
the ops that could run now. One list scheduler turns them, with nominal costs, into a total order.

1F1B on a graph (Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training", §3.3 and
appendix D): warm-up, steady state and drain of a stage follow from its distance to the furthest sink and not from its
place in a chain, so unequal encoders join one LLM, and generators leave it, without special cases. Why no order of this
kind deadlocks: a stage reaches its i-th B after F up to i + distance, its consumers need no more than that for theirs
because distance never grows downstream, and an op holds its ranks only while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mmjax.schedule import phased
from mmjax.schedule.gathering import with_gathers
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.interleaved import interleaved
from mmjax.schedule.list_scheduler import list_schedule
from mmjax.schedule.nested import nest
from mmjax.schedule.ops import Op, Schedule
from mmjax.schedule.orders import gpipe_order, one_f_one_b_order
from mmjax.schedule.phased import encoders_first
from mmjax.schedule.simulate import Costs
from mmjax.schedule.validate import ScheduleError


def gpipe(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """Every stage runs all its F (forwards), then all its B (backwards); all microbatches are in flight.

    Args:
      graph: the stages and edges, such as `plan(recipe).placed.graph`.
      microbatches: microbatches of a step.
      costs: seconds of each op, such as `Costs.nominal(graph)`; they decide only how the orders of the stages merge
        into the schedule's one order.

    Returns:
      `.ops`, the tuple of the step's `Op`s in order, such as Op("F", "llm.0", 0), the forward of microbatch 0 in stage
      "llm.0"; and `.in_flight`, the most microbatches in flight by stage.
    """
    orders = {stage.name: gpipe_order(stage, range(microbatches)) for stage in graph.stages}
    in_flight = {stage.name: microbatches for stage in graph.stages}
    return list_schedule(graph, microbatches, costs, orders=orders, in_flight=in_flight, name="gpipe").schedule


def one_f_one_b(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """Every stage runs min(microbatches, distance + 1) forwards F, then backwards B and F in turn, then the other B.

    Distance is `StageGraph.distance`, the largest number of hops to a sink. So a stage never has more than distance + 1
    microbatches in flight. A stage without backward keeps the same bound by awaiting its consumers.

    Args:
      graph: the stages and edges, such as `plan(recipe).placed.graph`.
      microbatches: microbatches of a step.
      costs: seconds of each op, such as `Costs.nominal(graph)`; they decide only how the orders of the stages merge
        into the schedule's one order.

    Returns:
      `.ops`, the tuple of the step's `Op`s in order, such as Op("F", "llm.0", 0), the forward of microbatch 0 in stage
      "llm.0"; and `.in_flight`, the most microbatches in flight by stage.
    """
    in_flight = {stage.name: graph.distance(stage.name) + 1 for stage in graph.stages}
    orders = {stage.name: one_f_one_b_order(stage, microbatches, in_flight[stage.name]) for stage in graph.stages}
    return list_schedule(graph, microbatches, costs, orders=orders, in_flight=in_flight, name="1f1b").schedule


def forward_only(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """The schedule "forward" for evaluation, without backward, over `graph.forward_only()`; in flight as in 1F1B.

    Args:
      graph: the stages and edges, such as `plan(recipe).placed.graph`.
      microbatches: microbatches to evaluate.
      costs: seconds of each op, such as `Costs.nominal(graph)`; they decide only how the orders of the stages merge
        into the schedule's one order.

    Returns:
      `.ops`, the tuple of its `Op`s in order, such as Op("F", "llm.0", 0), the forward of microbatch 0 in stage
      "llm.0"; and `.in_flight`, the most microbatches in flight by stage.
    """
    forward = one_f_one_b(graph.forward_only(), microbatches, costs)
    return Schedule(
        graph=forward.graph, microbatches=microbatches, ops=forward.ops, name="forward", in_flight=forward.in_flight
    )


def eager_one_f_one_b(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """1F1B with a warm-up of 2 · distance + 1 F, and as many microbatches in flight.

    So a stage sends an activation a microbatch before its receiver needs it, and a gradient has the same time to come
    back: asynchronous moves are hidden behind compute (Zhuang et al., "On Optimizing the Communication of Model
    Parallelism", §4). If moves take no time, it gains nothing over 1F1B.

    Args:
      graph: the stages and edges, such as `plan(recipe).placed.graph`; distance is `graph.distance("llm.0")`.
      microbatches: microbatches of a step.
      costs: seconds of each op, such as `Costs.nominal(graph)`; they decide only how the orders of the stages merge
        into the schedule's one order.

    Returns:
      `.ops`, the tuple of the step's `Op`s in order, such as Op("F", "llm.0", 0), the forward of microbatch 0 in stage
      "llm.0"; and `.in_flight`, the most microbatches in flight by stage.
    """
    warmups = {stage.name: 2 * graph.distance(stage.name) + 1 for stage in graph.stages}
    orders = {stage.name: one_f_one_b_order(stage, microbatches, warmups[stage.name]) for stage in graph.stages}
    return list_schedule(graph, microbatches, costs, orders=orders, in_flight=warmups, name="eager-1f1b").schedule


def zb_h1(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """Zero-bubble H1: 1F1B over `graph.with_split()`, where W fill idle time (Qi et al., "Zero Bubble Pipeline
    Parallelism", §2.3).

    Every stage may have as many microbatches in flight, until their W, as 1F1B allows the first stage of its module: so
    the module needs the same memory as with 1F1B. A stage with a shorter warm-up delays its W instead, and the
    gradients that other stages wait for go first. There are two variants, and the shorter one by `costs` is used: each
    W runs a fixed number of backwards late, or when nothing else can run.

    Args:
      graph: the stages and edges, such as `plan(recipe).placed.graph`; the result's graph is split.
      microbatches: microbatches of a step.
      costs: seconds of each op, such as `Costs.nominal(graph)`; where a split stage has none of W, B and W get half of
        B's each.

    Returns:
      `.ops`, the tuple of the step's `Op`s in order, such as Op("W", "llm.0", 0), the gradient of weights of microbatch
      0 in stage "llm.0"; and `.in_flight`, the most microbatches in flight by stage.
    """
    graph = graph.with_split()
    bounds = {
        stage.name: 1 + max(graph.distance(node.name) for node in graph.stages if node.module == stage.module)
        for stage in graph.stages
    }
    in_flight = {
        stage.name: bounds[stage.name] if stage.split else graph.distance(stage.name) + 1 for stage in graph.stages
    }
    timelines = []
    for fixed in (True, False):
        orders: dict[str, list[Op]] = {}
        for stage in graph.stages:
            order = one_f_one_b_order(stage, microbatches, graph.distance(stage.name) + 1)
            delay = bounds[stage.name] - graph.distance(stage.name) - 1
            orders |= _delayed(order, delay, stage.name) if fixed else _free(order, bounds[stage.name], stage.name)
        timelines.append(list_schedule(graph, microbatches, costs, orders=orders, in_flight=in_flight, name="zb-h1"))
    return min(timelines, key=lambda timeline: timeline.makespan).schedule


def _delayed(order: list[Op], delay: int, stage: str) -> dict[str, list[Op]]:
    """An order with each W `delay` backwards after its own B; the last W come at the end."""
    weights = [op for op in order if op.kind == "W"]
    result: list[Op] = []
    for op in order:
        if op.kind != "W":
            result.append(op)
        elif op.microbatch >= delay:
            result.append(weights[op.microbatch - delay])
    return {stage: result + weights[max(0, len(weights) - delay) :]}


def _free(order: list[Op], bound: int, stage: str) -> dict[str, list[Op]]:
    """An order for F and B, one for W, and each W before the F that would be one more than `bound` in flight."""
    weights = [op for op in order if op.kind == "W"]
    result = {stage: [op for op in order if op.kind != "W"], f"{stage} W": weights}
    for op in weights:
        if op.microbatch + bound < len(weights):
            result[f"{op}"] = [op, Op("F", stage, op.microbatch + bound)]
    return result


def three_phase(
    graph: StageGraph, microbatches: int, costs: Costs, *, window: int = 0, inner: str = "1f1b"
) -> Schedule:
    """Encoders' phases around the `inner` schedule of all other stages, see `mmjax.schedule.phased`.

    Args:
      graph: the stages and edges, such as `plan(recipe).placed.graph`.
      microbatches: microbatches of a step.
      costs: seconds of each op, such as `Costs.nominal(graph)`; where a split stage has none of W, B and W get half of
        B's each.
      window: microbatches between whose encoder F and B the other stages run; 0 is the whole step.
      inner: one of `INNER`. If it splits backwards ("zb-h1"), those of encoders stay whole, as nothing waits in their
        phase for W.

    Returns:
      `.ops`, the tuple of the step's `Op`s in order, such as Op("F", "llm.0", 0), the forward of microbatch 0 in stage
      "llm.0"; and `.in_flight`, the most microbatches in flight by stage.
    """
    maker = None if inner == ONE_F_ONE_B else SCHEDULES[inner].make
    graph = split_as("three-phase", inner, graph)
    return phased.three_phase(graph, microbatches, costs, window=window, inner=maker)


def nested(graph: StageGraph, microbatches: int, costs: Costs, *, inner: str = "1f1b") -> Schedule:
    """Encoders and generators with lanes inside the `inner` schedule of all other stages, see `mmjax.schedule.nested`.

    Args:
      graph: the stages and edges, some stages with lanes, such as `plan(recipe).placed.graph`.
      microbatches: microbatches of a step.
      costs: seconds of each op, such as `Costs.nominal(graph)`; where a split stage has none of W, B and W get half of
        B's each.
      inner: one of `INNER`: "1f1b", "interleaved", "eager-1f1b" or "zb-h1". If it splits backwards ("zb-h1"), the
        backwards of stages with lanes are split too.

    Returns:
      `.ops`, the tuple of the step's `Op`s in order, such as Op("F", "llm.0", 0), the forward of microbatch 0 in stage
      "llm.0"; and `.in_flight`, the most microbatches in flight by stage.
    """
    traits = SCHEDULES[inner]
    graph = split_as("nested", inner, graph)
    return nest(graph, microbatches, costs, inner=traits.make, lead=max(1, traits.lead))


@dataclass(frozen=True, kw_only=True)
class ScheduleTraits:
    """The function that makes a schedule, and the properties of its schedules.

    Attributes:
      make: makes it from a graph, microbatches and costs; with `windows` also from a `window`, with `surrounds` from
        an `inner` schedule.
      lead: microbatches in flight in a stage for each stage behind it, beside one of its own; 0 where the number does
        not follow from the distance alone.
      settles: after this many microbatches for each stage of the longest path, every further one adds the same time.
      phases: whether encoders have phases of their own, between which their parameters can be offloaded.
      windows: whether it takes a window.
      stashes: whether encoders keep microbatches for so long that their residuals can be stashed.
      chunks: whether a module may have several stages on each submesh that take turns.
      splits: whether the backward of trained stages is two ops, B and W.
      lanes: whether stages may have lanes.
      nests: whether modules in lanes are nested between the LLM's ops.
      surrounds: whether it is put around an inner schedule.
      inner: whether it may be such an inner schedule.
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
    surrounds: bool = False
    inner: bool = False


ONE_F_ONE_B = "1f1b"
"""The name of the default schedule; the other schedules are compared with it."""
SCHEDULES: dict[str, ScheduleTraits] = {
    ONE_F_ONE_B: ScheduleTraits(make=one_f_one_b, lead=1, inner=True),
    "gpipe": ScheduleTraits(make=gpipe, lanes=True),
    "interleaved": ScheduleTraits(make=interleaved, settles=4, chunks=True, inner=True),
    "eager-1f1b": ScheduleTraits(make=eager_one_f_one_b, lead=2, settles=4, inner=True),
    "zb-h1": ScheduleTraits(make=zb_h1, splits=True, inner=True),
    "three-phase": ScheduleTraits(
        make=three_phase, lead=1, phases=True, windows=True, stashes=True, lanes=True, surrounds=True
    ),
    "encoders-first": ScheduleTraits(make=encoders_first, lead=1, phases=True, stashes=True, lanes=True),
    "nested": ScheduleTraits(make=nested, stashes=True, lanes=True, nests=True, surrounds=True),
}
"""The schedules that a training step can have, by the name in `Train.schedule`."""
WINDOWED = tuple(name for name, traits in SCHEDULES.items() if traits.windows)
"""The schedules that take a window."""
INNER = tuple(name for name, traits in SCHEDULES.items() if traits.inner)
"""The schedules of the LLM that can be inside another one."""
NESTING = tuple(name for name, traits in SCHEDULES.items() if traits.nests)
"""The schedules that nest modules in lanes between the LLM's ops."""
SURROUNDING = tuple(name for name, traits in SCHEDULES.items() if traits.surrounds)
"""The schedules that are put around an inner one."""
STASHING = tuple(name for name, traits in SCHEDULES.items() if traits.stashes)
"""The schedules that leave time to stash the residuals of an encoder."""
LANED = tuple(name for name, traits in SCHEDULES.items() if traits.lanes)
"""The schedules for stages with lanes."""
OFFLOADING = tuple(name for name, traits in SCHEDULES.items() if traits.phases)
"""The schedules that leave time to offload the parameters of an encoder."""


def combined(name: str, inner: str) -> ScheduleTraits:
    """The traits of a schedule with those that it has from its inner one.

    name: a name in `SCHEDULES`. inner: a name in `INNER`, without effect where nothing is inside.
    """
    outer, within = SCHEDULES[name], SCHEDULES[inner]
    if not outer.surrounds:
        return outer
    lead, settles = within.lead * (outer.lead > 0), max(outer.settles, within.settles)
    return replace(outer, chunks=within.chunks, splits=within.splits, lead=lead, settles=settles)


def split_as(name: str, inner: str, graph: StageGraph) -> StageGraph:
    """The graph whose stages have the backwards, whole or split, that the schedule gives them.

    name: a name in `SCHEDULES`. inner: a name in `INNER`. graph: the stages and edges.
    """
    traits = combined(name, inner)
    if not traits.splits:
        return graph
    return graph.with_split(whole=phased.encoders(graph) if traits.phases else ())


def make_schedule(
    name: str, graph: StageGraph, microbatches: int, costs: Costs, *, window: int = 0, inner: str = ONE_F_ONE_B
) -> Schedule:
    """The schedule called `name` in `SCHEDULES`, such as "1f1b", in windows of `window` microbatches (0: all of them).

    Args:
      name: "1f1b", "gpipe", "interleaved", "eager-1f1b", "zb-h1", "three-phase", "encoders-first" or "nested".
      graph: the stages and edges, such as `plan(recipe).placed.graph`.
      microbatches: microbatches of a step.
      costs: seconds of each op, such as `Costs.nominal(graph)`.
      window: microbatches of a window of "three-phase"; the others have none.
      inner: the schedule in `INNER` inside one of `SURROUNDING`, such as "zb-h1"; the other schedules have none.

    Returns:
      `.ops`, the tuple of the step's `Op`s in order, such as Op("F", "llm.0", 0), the forward of microbatch 0 in stage
      "llm.0"; and `.in_flight`, the most microbatches in flight by stage.

    Raises KeyError for an unknown name; ScheduleError, with a remedy, where the schedule does not fit the graph, takes
    no window, cannot offload, or cannot have this inner schedule.
    """
    traits = SCHEDULES[name]
    if window and not traits.windows:
        raise ScheduleError(f"{name} has no windows: use {', '.join(WINDOWED)}, or a window of 0")
    if not traits.phases and (unsupported := [stage.name for stage in graph.stages if stage.offload]):
        raise ScheduleError(f"{name} leaves no time to offload {unsupported[0]!r}: use {' or '.join(OFFLOADING)}")
    if not traits.stashes and (unsupported := [stage.name for stage in graph.stages if stage.stash]):
        raise ScheduleError(f"{name} leaves no time to stash {unsupported[0]!r}: use {' or '.join(STASHING)}")
    if not traits.lanes and (unsupported := [stage.name for stage in graph.stages if stage.lanes > 1]):
        raise ScheduleError(f"{name} has no place for the lanes of {unsupported[0]!r}: use {' or '.join(LANED)}")
    if not traits.windows and (unsupported := [stage.name for stage in graph.stages if stage.microbatches > 1]):
        raise ScheduleError(f"{name} runs {unsupported[0]!r} microbatch by microbatch: use {' or '.join(WINDOWED)}")
    if inner != ONE_F_ONE_B and not traits.surrounds:
        remedy = f"use {ONE_F_ONE_B!r}, or {' or '.join(SURROUNDING)}"
        raise ScheduleError(f"{name} has no inner schedule {inner!r}: {remedy}")
    if inner not in INNER:
        raise ScheduleError(f"{name} around {inner!r}: use one of {', '.join(INNER)}")
    options: dict[str, int | str] = {"window": window} if traits.windows else {}
    options |= {"inner": inner} if traits.surrounds else {}
    schedule = traits.make(graph.with_gathers({}), microbatches, costs, **options)
    return with_gathers(schedule, {node.name: node.gather for node in graph.stages if node.gather}, costs)
