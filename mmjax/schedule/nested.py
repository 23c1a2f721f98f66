"""Nested schedules: spread encoders and generators inside the LLM's own schedule.

After "BigMac: Breaking the Pareto Frontier of Compute and Memory in Multimodal LLM Training", §3.1. A spread stage runs
on all ranks of the LLM's pipeline, a microbatch on each of its lanes. A *unit* is as many microbatches as it has lanes,
and each unit's work is a *column*: all lanes do it between two ops of theirs, at one time of the LLM's schedule. So a
column delays every rank by the same time, and the LLM has no more idle time than on its own.

* Everything else (the LLM, and stages beside it) keeps, rank by rank, the order that the inner schedule gives it alone.
* Encoders: K units of F before all else; then, as soon as the LLM's gradients of a unit are there, a column of that
  unit's B and of the F of the unit K later. K is the least with which that F still comes before its first use. Or the
  first units wait for their use, and W (where backwards are split) for the F that takes their place in flight, and fill
  what would be idle: of the two ways the shorter by `costs`.
* Generators: a column of a unit's F and B, as soon as the LLM's outputs are there. So that they can be, the LLM's last
  stage must run a whole unit of F before the unit's first B. The inner schedule is made as if behind that stage there
  were further ones, which need no time: the fewest with which it does. Every stage of the LLM then keeps one microbatch
  less than a unit longer (eager 1F1B, which keeps two for a hop: at most a unit). With fewer, each unit would need
  more than one column.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

from mmjax.schedule.graph import EdgeNode, StageGraph, StageNode, edge_name
from mmjax.schedule.list_scheduler import list_schedule
from mmjax.schedule.ops import Op, Schedule
from mmjax.schedule.orders import backward_ops
from mmjax.schedule.simulate import Costs, Timeline, simulate
from mmjax.schedule.stash import Waits, stashing
from mmjax.schedule.validate import ScheduleError

Maker = Callable[[StageGraph, int, Costs], Schedule]
Orders = Mapping[str, Sequence[Op]]


def nest(graph: StageGraph, microbatches: int, costs: Costs, inner: Maker, lead: int = 1) -> Schedule:
    """The spread stages of `graph` nested into `inner` of all other stages.

    lead: microbatches that `inner` keeps in flight for each hop behind a stage.

    Encoders promise to have no more than K units in flight, generators one, however many microbatches there are. A
    graph without spread stages has the order of `inner`. Raises ScheduleError where a spread stage lies between stages
    that are not, and where a stage stashes whose microbatches do not wait: all but encoders with lanes.
    """
    groups = spread_groups(graph)
    waiting = {name for group in groups if not group.ins for name in group.names}
    if wrong := [node.name for node in graph.stages if node.stash and node.name not in waiting]:
        raise ScheduleError(f"nested: {wrong[0]!r} is no encoder with lanes, and keeps nothing long: set stash=False")
    flow = _flow(graph, groups, microbatches, costs, inner, lead)
    in_flight = dict(flow.in_flight)
    for group in groups:
        in_flight |= dict.fromkeys(group.names, group.ahead(flow) * group.unit)
    made = []
    for fill in (False, True):
        columns = [column for group in groups for column in _columns(group, flow, fill)]
        orders = _orders(graph, _merged(flow, columns), {op for one in columns if one.fills for op in one.ops})
        make = partial(_listed, graph, microbatches, orders, in_flight)
        made.append(stashing(graph, microbatches, costs, make))
    return min(made, key=lambda timeline: timeline.makespan).schedule


def _listed(
    graph: StageGraph, microbatches: int, orders: Orders, in_flight: Mapping[str, int], costs: Costs, waits: Waits
) -> Timeline:
    return list_schedule(
        graph, microbatches, costs, orders=orders, in_flight=in_flight, name="nested", waits=dict(waits)
    )


def _orders(graph: StageGraph, ops: Sequence[Op], fillers: Collection[Op]) -> dict[str, list[Op]]:
    """The order of `ops` on each rank, where `fillers` can also run at any time before the op that they stand before.

    Of fillers, those of a kind keep the order of their stage.
    """
    several = {graph.users(rank): rank for rank in graph.ranks}
    orders: dict[str, list[Op]] = {f"rank {rank}": [] for rank in several.values()}
    for rank in several.values():
        waiting: list[Op] = []
        for op in ops:
            if rank not in graph.stage(op.stage).ranks_of(op.microbatch):
                continue
            if op in fillers:
                waiting.append(op)
                continue
            orders[f"rank {rank}"].append(op)
            orders |= {f"{filler} on rank {rank}": [filler, op] for filler in waiting}
            waiting = []
    for kind, stage in sorted({(op.kind, op.stage) for op in fillers}):
        orders[f"{kind} {stage}"] = [op for op in ops if (op.kind, op.stage) == (kind, stage)]
    return orders


# ---- spread stages ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Spread stages that feed each other, or one alone, sources first.

    ins, outs: their edges from and to stages that are not spread.
    """

    stages: tuple[StageNode, ...]
    ins: tuple[EdgeNode, ...]
    outs: tuple[EdgeNode, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stages."""
        return tuple(node.name for node in self.stages)

    @property
    def unit(self) -> int:
        """Microbatches of a unit: with as many, all lanes of a stage have equally many."""
        return math.lcm(*(node.lanes for node in self.stages))

    def ranks_of(self, microbatch: int) -> list[int]:
        """The ranks that run the ops of `microbatch`."""
        return sorted({rank for node in self.stages for rank in node.ranks_of(microbatch)})

    def forward(self, microbatch: int) -> list[Op]:
        """The F of a microbatch."""
        return [Op("F", node.name, microbatch) for node in self.stages]

    def backward(self, microbatch: int) -> list[Op]:
        """The B of a microbatch; not its W."""
        return [op for node in reversed(self.stages) for op in backward_ops(node, microbatch)[:1]]

    def weights(self, microbatch: int) -> list[Op]:
        """The W of a microbatch, of the stages that have any."""
        return [op for node in reversed(self.stages) for op in backward_ops(node, microbatch)[1:]]

    def needed(self, microbatch: int) -> list[Op]:
        """The F of others that a microbatch's F read."""
        return [Op("F", edge.src, microbatch) for edge in self.ins]

    def released(self, microbatch: int) -> list[Op]:
        """The ops of others after which a microbatch's B can run or, without one, it is in flight no more."""
        return [Op("B" if edge.gradient else "F", edge.dst, microbatch) for edge in self.outs]

    def readers(self, microbatch: int) -> list[Op]:
        """The ops of others that read the results of a microbatch's F, or of its B."""
        return [
            *(Op("F", edge.dst, microbatch) for edge in self.outs),
            *(Op("B", edge.src, microbatch) for edge in self.ins if edge.gradient),
        ]

    def ahead(self, flow: _Flow) -> int:
        """The fewest units in flight that keep those fed that are behind it: K of an encoder, 1 of a generator."""
        spans = self.units(flow.microbatches)
        if not self.outs:
            return 1
        freed = [max(flow.place[op] for m in span for op in self.released(m)) for span in spans]
        used = [min(flow.place[op] for m in span for op in self.readers(m)) for span in spans]
        fits = (k for k in range(1, len(spans)) if all(f < u for f, u in zip(freed, used[k:], strict=False)))
        return next(fits, len(spans))

    def units(self, microbatches: int) -> list[range]:
        """The microbatches in units, the last one maybe smaller."""
        return [range(i, min(i + self.unit, microbatches)) for i in range(0, microbatches, self.unit)]


def spread_groups(graph: StageGraph) -> tuple[Group, ...]:
    """The spread stages of a graph in groups that feed each other. Raises ScheduleError as `nest`."""
    group = {node.name: {node.name} for node in graph.stages if node.lanes > 1}
    for edge in graph.edges:
        if edge.src in group and edge.dst in group:
            joined = group[edge.src] | group[edge.dst]
            group |= dict.fromkeys(joined, joined)
    found = []
    for names in {min(joined): joined for joined in group.values()}.values():
        stages = tuple(node for node in graph.topological if node.name in names)
        ins = tuple(edge for edge in graph.edges if edge.dst in names and edge.src not in names)
        outs = tuple(edge for edge in graph.edges if edge.src in names and edge.dst not in names)
        if ins and outs:
            raise ScheduleError(
                f"nested: {stages[0].name!r} lies between {ins[0].src!r} and {outs[0].dst!r}, and a unit would hold up"
                f" both: set {stages[0].module}/Layout.lanes to 1"
            )
        found.append(Group(stages, ins, outs))
    return tuple(found)


# ---- the inner schedule ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Flow:
    """The F, B and W of all stages that are not spread, in the inner schedule's order, with its times."""

    microbatches: int
    ops: tuple[Op, ...]
    spans: tuple[tuple[float, float], ...]
    ranks: tuple[tuple[int, ...], ...]
    in_flight: Mapping[str, int]

    @cached_property
    def place(self) -> dict[Op, int]:
        """The place of each op in the order."""
        return {op: i for i, op in enumerate(self.ops)}

    def ended(self, ops: Iterable[Op]) -> float:
        """When the last of these ops ends."""
        return max((self.spans[self.place[op]][1] for op in ops), default=0.0)

    def first_start(self, ops: Iterable[Op]) -> float:
        """When the first of these ops starts."""
        return min((self.spans[self.place[op]][0] for op in ops), default=0.0)

    def break_at(self, ranks: Sequence[int], after: Sequence[Op], seconds: float) -> int:
        """The first place after `after` where these ranks can put something in that need not start before `seconds`.

        It is before what they run at that time, if `after` has ended when that starts, and else behind it.
        """
        ready, least = self.ended(after), 1 + max((self.place[op] for op in after), default=-1)
        return min((self._break(rank, ready, least, seconds) for rank in ranks), default=len(self.ops))

    def _break(self, rank: int, ready: float, least: int, seconds: float) -> int:
        places, starts, ends = self._by_rank.get(rank, ((), (), ()))
        found = max(bisect_left(places, least), bisect_left(starts, ready), bisect_right(ends, seconds))
        return places[found] if found < len(places) else len(self.ops)

    @cached_property
    def _by_rank(self) -> dict[int, tuple[list[int], list[float], list[float]]]:
        """For each rank, the places, starts and ends of its ops."""
        table: dict[int, tuple[list[int], list[float], list[float]]] = {}
        for place, ((start, end), ranks) in enumerate(zip(self.spans, self.ranks, strict=True)):
            for rank in ranks:
                places, starts, ends = table.setdefault(rank, ([], [], []))
                places.append(place)
                starts.append(start)
                ends.append(end)
        return table


def _flow(
    graph: StageGraph, groups: Sequence[Group], microbatches: int, costs: Costs, inner: Maker, lead: int
) -> _Flow:
    alone = _alone(graph, groups, lead)
    added = {node.name for node in alone.stages} - {node.name for node in graph.stages}
    nothing = {(kind, name, False): 0.0 for kind in "FB" for name in added}
    costs = replace(costs, seconds={**costs.seconds, **nothing})
    schedule = inner(alone, microbatches, costs)
    kept = [
        (op, span, schedule.graph.stage(op.stage).ranks)
        for op, span in simulate(schedule, costs).spans.items()
        if op.kind in ("F", "B", "W") and op.stage not in added
    ]
    ops, spans, ranks = zip(*kept, strict=True)
    in_flight = {stage: bound for stage, bound in schedule.in_flight.items() if stage not in added}
    return _Flow(microbatches, ops, spans, ranks, in_flight)


def _alone(graph: StageGraph, groups: Sequence[Group], lead: int) -> StageGraph:
    """The graph without its spread stages, and with further stages, on ranks of their own, in the place of generators.

    With `unit - 1` hops more behind it a stage has a lead of a unit over its own backward.
    """
    spread = {name for group in groups for name in group.names}
    stages = [node for node in graph.stages if node.name not in spread]
    edges = [edge for edge in graph.edges if not spread & {edge.src, edge.dst}]
    free = max(graph.ranks) + 1
    for group in groups:
        for edge in group.ins:
            names = [f"{edge.name} {hop}" for hop in range(-(-(group.unit - 1) // lead))]
            both = {"backward": edge.gradient, "trainable": False}
            for name in names:
                stages.append(StageNode(name=name, module=edge.name, index=0, ranks=(free,), **both))
                free += 1
            for src, dst in pairwise([edge.src, *names]):
                edges.append(EdgeNode(name=edge_name(src, dst), src=src, dst=dst, kind="async", gradient=edge.gradient))
    users = {edge.src for edge in edges}
    nodes = tuple(replace(node, loss=node.loss or node.name not in users) for node in stages)
    return StageGraph(stages=nodes, edges=tuple(edges), ties=graph.ties)


# ---- columns ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """What the lane of a microbatch puts in at a place of the inner order.

    seconds: when the inner schedule is so far that its unit could run. fills: whether it may run earlier, where the
    lane has nothing else to do.
    """

    place: int
    seconds: float
    ops: Sequence[Op]
    fills: bool = False


def _columns(group: Group, flow: _Flow, fill: bool) -> Iterator[_Column]:
    """The columns of all units.

    fill: the first K units but one wait for their first use, and W for the F that takes their place in flight. Until
    then these fill what is idle.
    """
    bound, count = group.ahead(flow) * group.unit, flow.microbatches
    for place, seconds, kind, m in _places(group, flow, bound, fill):
        if kind == "B":
            yield _Column(place, seconds, group.backward(m) + ([] if fill else group.weights(m)))
            continue
        if fill and m >= bound:
            yield _Column(place, seconds, group.weights(m - bound), fills=True)
        yield _Column(place, seconds, group.forward(m), fills=fill and not group.ins and m < bound)
    for m in range(max(0, count - bound), count if fill else 0):
        yield _Column(len(flow.ops), math.inf, group.weights(m), fills=True)


_Place = tuple[int, float, str, int]
"""(place and seconds as of a column, "F" or "B", microbatch)."""


def _places(group: Group, flow: _Flow, bound: int, fill: bool) -> Iterator[_Place]:
    """Where F and B of every microbatch go, in the order in which those of one place run."""
    if group.ins:
        yield from _of_generators(group, flow)
        return
    for span in group.units(min(bound, flow.microbatches)):
        seconds = flow.first_start(op for m in span for op in group.readers(m)) if fill else 0.0
        for m in span:
            latest = (flow.place[op] for op in group.readers(m))
            yield (min(flow.break_at(group.ranks_of(m), (), seconds), *latest) if seconds else 0), seconds, "F", m
    for span in group.units(flow.microbatches):
        seconds = flow.ended(op for m in span for op in group.released(m))
        for m in span:
            paired = [m + bound] if m + bound < flow.microbatches else []
            latest = (flow.place[op] for later in paired for op in group.readers(later))
            place = min(flow.break_at(group.ranks_of(m), group.released(m), seconds), *latest, len(flow.ops))
            yield place, seconds, "B", m
            for later in paired:
                yield place, seconds, "F", later


def _of_generators(group: Group, flow: _Flow) -> Iterator[_Place]:
    for span in group.units(flow.microbatches):
        seconds = flow.ended(op for m in span for op in group.needed(m))
        for m in span:
            latest = [flow.place[op] for op in (*group.readers(m), *_waiting(group, flow, m))]
            place = min(flow.break_at(group.ranks_of(m), group.needed(m), seconds), *latest, len(flow.ops))
            yield place, seconds, "F", m
            yield place, seconds, "B", m


def _waiting(group: Group, flow: _Flow, microbatch: int) -> Iterator[Op]:
    """The F of sources without backward that wait until a microbatch is in flight there no more."""
    for edge in group.ins:
        later = Op("F", edge.src, microbatch + flow.in_flight[edge.src])
        if not edge.gradient and later in flow.place:
            yield later


def _merged(flow: _Flow, columns: Iterable[_Column]) -> list[Op]:
    """The ops of `flow` with each column before the op at its place."""
    merged, left = [], sorted(columns, key=lambda column: (column.place, column.seconds))[::-1]
    for place, op in enumerate((*flow.ops, None)):
        while left and left[-1].place <= place:
            merged += left.pop().ops
        merged += [op] if op else []
    return merged
