"""Nested schedules: encoders and generators with lanes inside the LLM's own schedule.

They follow "BigMac: Breaking the Pareto Frontier of Compute and Memory in Multimodal LLM Training", §3.1. A stage with
lanes runs on all ranks of the LLM's pipeline, one microbatch on each lane. A *unit* is one microbatch for each lane.
The work of a unit is a *column*: all lanes do it between two ops of the LLM, at one time of the LLM's schedule. So a
column delays every rank by the same time, and the LLM has no more idle time than without it.

* The stages without lanes (the LLM, and stages beside it) keep on each rank the order of the inner schedule, which is
  made for these stages alone.
* Encoders run K units of F before all other ops. Then, as soon as the LLM's gradients of a unit have arrived, comes a
  column with the B of that unit and the F of the unit K later. K is the least number with which that F comes before its
  first use. In a second variant, ops fill idle time: the first units wait until they are used, and W (where backwards
  are split) wait for the F that replaces their unit in flight. The variant that is shorter by `costs` is used.
* Generators run a column with the F and B of a unit as soon as the LLM's outputs have arrived. For this the LLM's last
  stage must run a full unit of F before the unit's first B. So the inner schedule is made for a graph with further
  stages behind that stage, which take no time, and as few of them as suffice. Each stage of the LLM then keeps one
  microbatch less than a unit longer (with eager 1F1B, which keeps two for each hop, at most a unit). With fewer stages,
  a unit would need more than one column.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

from mmjax.schedule.graph import EdgeNode, StageGraph, StageNode, edge_name
from mmjax.schedule.list_scheduler import Maker, list_schedule
from mmjax.schedule.ops import Op, Schedule
from mmjax.schedule.orders import backward_ops
from mmjax.schedule.simulate import Costs, Timeline, simulate
from mmjax.schedule.stash import Waits, stashing
from mmjax.schedule.validate import ScheduleError

Orders = Mapping[str, Sequence[Op]]


def nest(graph: StageGraph, microbatches: int, costs: Costs, *, inner: Maker, lead: int = 1) -> Schedule:
    """The schedule in which the stages of `graph` with lanes are nested into the `inner` schedule of all other stages.

    graph: the stages and edges, such as `in_lanes([vision], llm, 4).graph`.
    microbatches: microbatches of a step.
    costs: seconds of each op, such as `Costs.nominal(graph)`.
    inner: makes a schedule from a graph without lanes, microbatches and costs, such as `one_f_one_b`.
    lead: microbatches that `inner` keeps in flight for each hop behind a stage: 1 for `one_f_one_b`.

    Encoders promise to have no more than K units in flight, generators one, for any number of microbatches. A graph
    without lanes has the order of `inner`. Raises ScheduleError where a stage with lanes lies between stages without,
    and where a stage other than an encoder with lanes stashes, since only the microbatches of such encoders wait.
    """
    groups = laned_groups(graph)
    waiting = {name for group in groups if not group.ins for name in group.names}
    if wrong := [node.name for node in graph.stages if node.stash and node.name not in waiting]:
        raise ScheduleError(f"nested: {wrong[0]!r} is no encoder with lanes, and keeps nothing long: set stash=False")
    flow = _flow(graph, groups, microbatches, costs, inner=inner, lead=lead)
    in_flight = dict(flow.in_flight)
    for group in groups:
        in_flight |= dict.fromkeys(group.names, group.units_in_flight(flow) * group.unit)
    timelines = []
    for fill in (False, True):
        columns = [column for group in groups for column in _columns(group, flow, fill=fill)]
        fillers = {op for column in columns if column.fills for op in column.ops}
        orders = _orders(graph, _merged(flow, columns), fillers)
        make = partial(_timeline, graph, microbatches, orders=orders, in_flight=in_flight)
        timelines.append(stashing(graph, microbatches, costs, make))
    return min(timelines, key=lambda timeline: timeline.makespan).schedule


def _timeline(
    graph: StageGraph, microbatches: int, costs: Costs, waits: Waits, *, orders: Orders, in_flight: Mapping[str, int]
) -> Timeline:
    return list_schedule(
        graph, microbatches, costs, orders=orders, in_flight=in_flight, name="nested", waits=dict(waits)
    )


def _orders(graph: StageGraph, ops: Sequence[Op], fillers: Collection[Op]) -> dict[str, list[Op]]:
    """The order of `ops` on each rank; `fillers` can run at any time before the op that follows them in `ops`.

    The fillers of one kind and stage keep their order.
    """
    representatives = {graph.stages_on(rank): rank for rank in graph.ranks}
    orders: dict[str, list[Op]] = {f"rank {rank}": [] for rank in representatives.values()}
    for rank in representatives.values():
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


# ---- stages with lanes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LanedGroup:
    """Stages with lanes that feed each other, or a single one, sources first.

    ins, outs: their edges from and to stages without lanes.
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
        """The number of microbatches of a unit: the least with which all lanes of each stage have equally many."""
        return math.lcm(*(node.lanes for node in self.stages))

    def ranks_of(self, microbatch: int) -> list[int]:
        """The ranks that run the ops of `microbatch`."""
        return sorted({rank for node in self.stages for rank in node.ranks_of(microbatch)})

    def forward(self, microbatch: int) -> list[Op]:
        """The F of `microbatch`, one for each stage, sources first."""
        return [Op("F", node.name, microbatch) for node in self.stages]

    def backward(self, microbatch: int) -> list[Op]:
        """The B of `microbatch`, without its W, one for each stage with a backward, sources last."""
        return [op for node in reversed(self.stages) for op in backward_ops(node, microbatch)[:1]]

    def weights(self, microbatch: int) -> list[Op]:
        """The W of `microbatch`, one for each split stage, sources last."""
        return [op for node in reversed(self.stages) for op in backward_ops(node, microbatch)[1:]]

    def inputs(self, microbatch: int) -> list[Op]:
        """The F of other stages whose results the F of `microbatch` read."""
        return [Op("F", edge.src, microbatch) for edge in self.ins]

    def releases(self, microbatch: int) -> list[Op]:
        """The ops of other stages after which the B of `microbatch` can run or, without B, it has left flight."""
        return [Op("B" if edge.gradient else "F", edge.dst, microbatch) for edge in self.outs]

    def readers(self, microbatch: int) -> list[Op]:
        """The ops of other stages that read the results of the F or B of `microbatch`."""
        return [
            *(Op("F", edge.dst, microbatch) for edge in self.outs),
            *(Op("B", edge.src, microbatch) for edge in self.ins if edge.gradient),
        ]

    def units_in_flight(self, flow: _Flow) -> int:
        """The fewest units in flight with which no stage behind the group waits: K of an encoder, 1 of a generator."""
        spans = self.units(flow.microbatches)
        if not self.outs:
            return 1
        freed = [max(flow.place[op] for m in span for op in self.releases(m)) for span in spans]
        used = [min(flow.place[op] for m in span for op in self.readers(m)) for span in spans]
        fits = (k for k in range(1, len(spans)) if all(f < u for f, u in zip(freed, used[k:], strict=False)))
        return next(fits, len(spans))

    def units(self, microbatches: int) -> list[range]:
        """The microbatches of a step in units, from 0; the last one may be smaller."""
        return [range(i, min(i + self.unit, microbatches)) for i in range(0, microbatches, self.unit)]


def laned_groups(graph: StageGraph) -> tuple[LanedGroup, ...]:
    """The stages with lanes, in groups of stages that feed each other; () where no stage has lanes.

    A group has its `stages`, and as `ins` and `outs` the edges from and to stages without lanes. graph: the stages and
    edges, such as `in_lanes([vision], llm, 4).graph`.

    Raises ScheduleError where a group lies between stages without lanes.
    """
    group = {node.name: {node.name} for node in graph.stages if node.lanes > 1}
    for edge in graph.edges:
        if edge.src in group and edge.dst in group:
            joined = group[edge.src] | group[edge.dst]
            group |= dict.fromkeys(joined, joined)
    groups = []
    for names in {min(joined): joined for joined in group.values()}.values():
        stages = tuple(node for node in graph.topological if node.name in names)
        ins = tuple(edge for edge in graph.edges if edge.dst in names and edge.src not in names)
        outs = tuple(edge for edge in graph.edges if edge.src in names and edge.dst not in names)
        if ins and outs:
            raise ScheduleError(
                f"nested: {stages[0].name!r} lies between {ins[0].src!r} and {outs[0].dst!r}, and a unit would hold up"
                f" both: set {stages[0].module}/Layout.lanes to 1"
            )
        groups.append(LanedGroup(stages, ins, outs))
    return tuple(groups)


# ---- the inner schedule ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Flow:
    """The F, B and W of all stages without lanes, in the inner schedule's order, with its times."""

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
        """The time at which the last of `ops` ends."""
        return max((self.spans[self.place[op]][1] for op in ops), default=0.0)

    def first_start(self, ops: Iterable[Op]) -> float:
        """The time at which the first of `ops` starts."""
        return min((self.spans[self.place[op]][0] for op in ops), default=0.0)

    def break_at(self, ranks: Sequence[int], after: Sequence[Op], seconds: float) -> int:
        """The place for a column on `ranks` that reads the results of `after` and need not start before `seconds`.

        It is before the op that a rank runs at that time if `after` has ended when that op starts, else behind it. The
        first such place of all ranks counts.
        """
        ready, least = self.ended(after), 1 + max((self.place[op] for op in after), default=-1)
        breaks = (self._break(rank, ready=ready, least=least, seconds=seconds) for rank in ranks)
        return min(breaks, default=len(self.ops))

    def _break(self, rank: int, *, ready: float, least: int, seconds: float) -> int:
        places, starts, ends = self._by_rank.get(rank, ((), (), ()))
        index = max(bisect_left(places, least), bisect_left(starts, ready), bisect_right(ends, seconds))
        return places[index] if index < len(places) else len(self.ops)

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
    graph: StageGraph, groups: Sequence[LanedGroup], microbatches: int, costs: Costs, *, inner: Maker, lead: int
) -> _Flow:
    unlaned = _without_lanes(graph, groups, lead)
    added = {node.name for node in unlaned.stages} - {node.name for node in graph.stages}
    free = {(kind, name, False): 0.0 for kind in "FB" for name in added}
    costs = replace(costs, seconds={**costs.seconds, **free})
    schedule = inner(unlaned, microbatches, costs)
    timed = [
        (op, span, schedule.graph.stage(op.stage).ranks)
        for op, span in simulate(schedule, costs).spans.items()
        if op.kind in ("F", "B", "W") and op.stage not in added
    ]
    ops, spans, ranks = zip(*timed, strict=True)
    in_flight = {stage: bound for stage, bound in schedule.in_flight.items() if stage not in added}
    return _Flow(microbatches=microbatches, ops=ops, spans=spans, ranks=ranks, in_flight=in_flight)


def _without_lanes(graph: StageGraph, groups: Sequence[LanedGroup], lead: int) -> StageGraph:
    """The graph without its stages with lanes, and with further stages on ranks of their own in place of generators.

    A stage with `unit - 1` more hops behind it leads its own backward by a unit.
    """
    laned = {name for group in groups for name in group.names}
    stages = [node for node in graph.stages if node.name not in laned]
    edges = [edge for edge in graph.edges if not laned & {edge.src, edge.dst}]
    free = max(graph.ranks) + 1
    for group in groups:
        for edge in group.ins:
            names = [f"{edge.name} {hop}" for hop in range(-(-(group.unit - 1) // lead))]
            for name in names:
                stages.append(
                    StageNode(
                        name=name,
                        module=edge.name,
                        index=0,
                        ranks=(free,),
                        backward=edge.gradient,
                        trainable=False,
                    )
                )
                free += 1
            for src, dst in pairwise([edge.src, *names]):
                edges.append(EdgeNode(name=edge_name(src, dst), src=src, dst=dst, kind="async", gradient=edge.gradient))
    users = {edge.src for edge in edges}
    nodes = tuple(replace(node, loss=node.loss or node.name not in users) for node in stages)
    return StageGraph(stages=nodes, edges=tuple(edges), ties=graph.ties)


# ---- columns ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """Ops of one microbatch's lane that go before the op at `place` of the inner order.

    seconds: the time in the inner schedule from which its unit can run. fills: whether it may run earlier, where the
    lane is idle.
    """

    place: int
    seconds: float
    ops: Sequence[Op]
    fills: bool = False


def _columns(group: LanedGroup, flow: _Flow, *, fill: bool) -> Iterator[_Column]:
    """The columns of all units.

    fill: the first K units but one wait for their first use, and W for the F that replaces their unit in flight. Until
    then they fill idle time.
    """
    bound, count = group.units_in_flight(flow) * group.unit, flow.microbatches
    for place, seconds, kind, m in _places(group, flow, bound, fill=fill):
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


def _places(group: LanedGroup, flow: _Flow, bound: int, *, fill: bool) -> Iterator[_Place]:
    """The places of F and B of every microbatch; ops of one place run in the order in which they are yielded."""
    if group.ins:
        yield from _generator_places(group, flow)
        return
    for span in group.units(min(bound, flow.microbatches)):
        seconds = flow.first_start(op for m in span for op in group.readers(m)) if fill else 0.0
        for m in span:
            latest = (flow.place[op] for op in group.readers(m))
            yield (min(flow.break_at(group.ranks_of(m), (), seconds), *latest) if seconds else 0), seconds, "F", m
    for span in group.units(flow.microbatches):
        seconds = flow.ended(op for m in span for op in group.releases(m))
        for m in span:
            paired = [m + bound] if m + bound < flow.microbatches else []
            latest = (flow.place[op] for later in paired for op in group.readers(later))
            place = min(flow.break_at(group.ranks_of(m), group.releases(m), seconds), *latest, len(flow.ops))
            yield place, seconds, "B", m
            for later in paired:
                yield place, seconds, "F", later


def _generator_places(group: LanedGroup, flow: _Flow) -> Iterator[_Place]:
    for span in group.units(flow.microbatches):
        seconds = flow.ended(op for m in span for op in group.inputs(m))
        for m in span:
            latest = [flow.place[op] for op in (*group.readers(m), *_waiting(group, flow, m))]
            place = min(flow.break_at(group.ranks_of(m), group.inputs(m), seconds), *latest, len(flow.ops))
            yield place, seconds, "F", m
            yield place, seconds, "B", m


def _waiting(group: LanedGroup, flow: _Flow, microbatch: int) -> Iterator[Op]:
    """The F of sources without backward that wait until `microbatch` is no longer in flight there."""
    for edge in group.ins:
        later = Op("F", edge.src, microbatch + flow.in_flight[edge.src])
        if not edge.gradient and later in flow.place:
            yield later


def _merged(flow: _Flow, columns: Iterable[_Column]) -> list[Op]:
    """The ops of `flow` with each column before the op at its place."""
    merged, remaining = [], sorted(columns, key=lambda column: (column.place, column.seconds))[::-1]
    for place, op in enumerate((*flow.ops, None)):
        while remaining and remaining[-1].place <= place:
            merged += remaining.pop().ops
        merged += [op] if op else []
    return merged
