"""The list scheduler makes one total order from nominal costs and the orders, bounds and waits of a schedule."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import (
    COPY_KINDS,
    ONCE,
    Op,
    Resource,
    Schedule,
    awaits,
    dependencies,
    occupied_resources,
    run_in_order,
    step_ops,
)
from mmjax.schedule.orders import by_lane
from mmjax.schedule.simulate import Costs, Timeline
from mmjax.schedule.validate import ScheduleError

Maker = Callable[[StageGraph, int, Costs], Schedule]
"""Makes a schedule of a graph's stages, for so many microbatches, from nominal costs."""
_SENDS = (0, 2, 3)
"""The classes of `_priority` for packs and moves."""


def list_schedule(
    graph: StageGraph,
    microbatches: int,
    costs: Costs,
    *,
    orders: Mapping[str, Sequence[Op]],
    in_flight: Mapping[str, int],
    name: str,
    window: int = 0,
    waits: Mapping[Op, tuple[Op, ...]] | None = None,
    skipped_gathers: frozenset[Op] = frozenset(),
) -> Timeline:
    """The schedule, called `name`, and its times: each op starts as early as it may, and the ops are in that order.

    Ranks are exclusive; of the ops that could start, the first by `_priority` does. The order of starting is a total
    order in which dependencies precede users even where ops take no time. Where senders wait for receivers, the shorter
    of two orders is taken: one in which ranks wait for a send whose other side is busy, and one in which they do not.

    Args:
      graph: the stages and edges, such as `apart([vision], llm, {"vision": 1, "llm": 2}).graph`.
      microbatches: microbatches of a step.
      costs: seconds of each op, such as `Costs.nominal(graph)`.
      orders: the wanted order of F, B and W, by stage or by any other name for ops that share an order, such as
        {"llm.0": [Op("F", "llm.0", 0), Op("B", "llm.0", 0)]}. Each lane of a stage keeps its stage's order.
      in_flight: by stage name, the most microbatches in flight, from F to the end of the backward, as in `Schedule`.
        A stage without backward waits for the stages that it feeds, so that it has no more.
      name: the schedule's name, such as "1f1b".
      window: microbatches of a window; 0 is the whole step.
      waits: by op, further ops that it waits for; None for none.
      skipped_gathers: gathers that are left out, as in `Schedule`.

    Raises:
      ScheduleError: the wanted orders cannot be kept.
    """
    costs, waits = costs.split_as(graph), dict(waits or {})
    ops = [op for op in step_ops(graph, microbatches, window) if op not in skipped_gathers]
    index = {op: i for i, op in enumerate(ops)}
    predecessors = [
        {*dependencies(graph, microbatches, op, window), *awaits(graph, in_flight, op), *waits.get(op, ())}
        - skipped_gathers
        for op in ops
    ]
    for order in orders.values():
        for lane in by_lane(graph, order):
            for before, after in pairwise(lane):
                predecessors[index[after]].add(before)
    users: list[list[int]] = [[] for _ in ops]
    for i, before in enumerate(predecessors):
        for op in before:
            users[index[op]].append(i)
    priority = _priority(graph)

    def run_with(*, reserving: bool) -> _Run:
        run = _Run(
            resources=[occupied_resources(graph, op) for op in ops],
            seconds=[costs.of(op) for op in ops],
            priority=[(*priority(op), i) for i, op in enumerate(ops)],
            missing=[len(before) for before in predecessors],
            users=users,
            reserving=reserving,
        )
        run.finish_all()
        return run

    run = run_with(reserving=True)
    if graph.waits:  # neither is shorter for all costs
        run = min(run, run_with(reserving=False), key=lambda run: (-len(run.started), max(run.ends)))
    if len(run.started) < len(ops):
        started = set(run.started)
        stuck = next(op for i, op in enumerate(ops) if i not in started)
        raise ScheduleError(f"{name}: {stuck} can never start: the wanted orders of the stages contradict each other")
    schedule = Schedule(
        graph=graph,
        microbatches=microbatches,
        ops=tuple(ops[i] for i in run.started),
        name=name,
        in_flight=dict(in_flight),
        window=window,
        waits=_without_implied(graph, waits),
        skipped_gathers=skipped_gathers,
    )
    return Timeline(
        schedule=schedule,
        starts=tuple(run.starts[i] for i in run.started),
        ends=tuple(run.ends[i] for i in run.started),
    )


def _without_implied(graph: StageGraph, waits: Mapping[Op, tuple[Op, ...]]) -> dict[Op, tuple[Op, ...]]:
    """`waits` without the waits that the order of ops on ranks and wires ensures."""
    explicit = {op: tuple(b for b in before if not run_in_order(graph, b, op)) for op, before in waits.items()}
    return {op: before for op, before in explicit.items() if before}


def _priority(graph: StageGraph) -> Callable[[Op], tuple[int, ...]]:
    """Sort key: lent weights, prepare, sends, backward, forward, W, reductions; then downstream; then early."""
    place = {stage.name: -i for i, stage in enumerate(graph.topological)}
    distances = {stage.name: graph.distance(stage.name) for stage in graph.stages}

    def priority(op: Op) -> tuple[int, ...]:
        backward = op.backward or op.kind == "B"
        if op.kind == "unstash":  # after the copies to the host, so that there is room
            rank = 8
        elif op.kind in ("prepare", "gather", *COPY_KINDS):  # a copy competes with copies alone
            rank = 1
        elif op.kind in ("pack", "move"):  # another submesh may be idle until the data arrives
            rank = 2 if backward else 3 if op.microbatch != ONCE else 0
        elif op.kind in ("F", "B", "unpack"):
            rank = 4 if backward else 5
        elif op.kind == "W":  # only the reduction waits for it, so it fills idle time
            rank = 6
        else:  # reduce, norm, update: after a backward of another stage on these ranks, which others may wait for
            rank = 7
        return (rank, distances.get(op.stage, 0), place.get(op.stage, 0), op.microbatch)

    return priority


class _Run:
    """The state of one run of the list scheduler; ops are indices here."""

    def __init__(self, *, resources, seconds, priority, missing, users, reserving: bool) -> None:
        self.resources: list[tuple[Resource, ...]] = resources
        self.seconds: list[float] = seconds
        self.priority: list[tuple[int, ...]] = priority
        self.missing: list[int] = list(missing)
        self.users: list[list[int]] = users
        self.reserving = reserving
        self.now = 0.0
        self.busy: set[Resource] = set()
        self.running: list[tuple[float, int]] = []
        self.ready = sorted(priority[i] for i, count in enumerate(missing) if count == 0)
        self.started: list[int] = []
        self.starts = [0.0] * len(resources)
        self.ends = [0.0] * len(resources)

    def finish_all(self) -> None:
        """Start all ops that can start and jump to the next end, until no op runs."""
        while True:
            while (op := self._next()) is not None:
                self._start(op)
            if not self.running:
                return
            self.now = self.running[0][0]
            while self.running and self.running[0][0] == self.now:
                self._end(heapq.heappop(self.running)[1])

    def _next(self) -> int | None:
        """The op to start now: the first ready op whose resources are neither busy nor reserved for an op before it.

        If some ranks of a send are busy, its other ranks are reserved for it if the run is `reserving`, because both
        sides of a rendezvous are seldom free at once by chance (with random costs this shortens steps by up to 15 %,
        and lengthens others by up to 8 %). Reserving ranks for an F or B of a stage that spans other stages' submeshes
        makes steps longer instead.
        """
        reserved: set[Resource] = set()
        for key in self.ready:
            resources = self.resources[key[-1]]
            if self.busy.isdisjoint(resources) and reserved.isdisjoint(resources):
                return key[-1]
            if self.reserving and key[0] in _SENDS:
                reserved.update(resources)
        return None

    def _start(self, op: int) -> None:
        self.ready.remove(self.priority[op])
        self.started.append(op)
        self.starts[op] = self.now
        self.ends[op] = self.now + self.seconds[op]
        if self.ends[op] == self.now:  # takes no time: its users may start before anything else does
            self._end(op)
            return
        self.busy.update(self.resources[op])
        heapq.heappush(self.running, (self.ends[op], op))

    def _end(self, op: int) -> None:
        self.busy.difference_update(self.resources[op])
        for user in self.users[op]:
            self.missing[user] -= 1
            if self.missing[user] == 0:
                insort(self.ready, self.priority[user])
