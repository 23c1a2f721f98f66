"""Making schedules: GPipe and 1F1B over a stage graph, and the forward pass alone.

A schedule says three things: the order of each stage's own F and B, how many microbatches may be in flight, and a
priority among the ops that could run now. One list scheduler turns them, with nominal costs, into a total order.

1F1B on a graph (Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training", §3.3 and
appendix D): warm-up, steady state and drain of a stage follow from its distance to the sink and not from its place in a
chain, so unequal encoders join one LLM without special cases. Why no order of this kind deadlocks: a stage reaches its
i-th B after F up to i + distance, its consumers need no more than that for theirs because distance never grows
downstream, and an op holds its ranks only while it runs.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Mapping
from itertools import pairwise

from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import ONCE, Op, Schedule, awaits, dependencies, occupies, step_ops
from mmjax.schedule.simulate import Costs, Timeline


def gpipe(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """Every stage runs all its F, then all its B; all microbatches are in flight."""
    orders = {
        stage.name: [Op(kind, stage.name, m) for kind in _kinds(stage.backward) for m in range(microbatches)]
        for stage in graph.stages
    }
    in_flight = {stage.name: microbatches for stage in graph.stages}
    return list_schedule(graph, microbatches, costs, orders=orders, in_flight=in_flight, name="gpipe").schedule


def one_f_one_b(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """Every stage runs min(microbatches, distance + 1) F, then B and F in turn, then the B that are left.

    So a stage never has more than distance + 1 microbatches in flight. A stage without backward has no turn to take and
    keeps the same bound by awaiting its consumers.
    """
    orders = {
        stage.name: _turns(stage.name, microbatches, graph.distance(stage.name) + 1, stage.backward)
        for stage in graph.stages
    }
    in_flight = {stage.name: graph.distance(stage.name) + 1 for stage in graph.stages}
    return list_schedule(graph, microbatches, costs, orders=orders, in_flight=in_flight, name="1f1b").schedule


def forward_only(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """F alone, for evaluation, over `graph.forward_only()`; in flight as in 1F1B."""
    forward = one_f_one_b(graph.forward_only(), microbatches, costs)
    return Schedule(
        graph=forward.graph, microbatches=microbatches, ops=forward.ops, name="forward", in_flight=forward.in_flight
    )


SCHEDULES: dict[str, Callable[[StageGraph, int, Costs], Schedule]] = {"1f1b": one_f_one_b, "gpipe": gpipe}
"""The schedules that a training step can have, by the name in `Train.schedule`."""


def _kinds(backward: bool) -> str:
    return "FB" if backward else "F"


def _turns(stage: str, microbatches: int, warmup: int, backward: bool) -> list[Op]:
    """The order of one stage's F and B in 1F1B."""
    forwards = [Op("F", stage, m) for m in range(microbatches)]
    if not backward:
        return forwards
    order = forwards[:warmup]
    for microbatch in range(microbatches):
        order.append(Op("B", stage, microbatch))
        order += forwards[warmup + microbatch : warmup + microbatch + 1]
    return order


# ---- the list scheduler ----------------------------------------------------------------------------------------------

_SENDS = (0, 2, 3)
"""The classes of `_priority` that packs and moves are in."""


def list_schedule(
    graph: StageGraph,
    microbatches: int,
    costs: Costs,
    *,
    orders: Mapping[str, list[Op]],
    in_flight: Mapping[str, int],
    name: str,
) -> Timeline:
    """The step's ops, each at the first moment at which it may run, in the order in which they start.

    orders: by stage, its F and B in the order that is wanted. in_flight: the promise (see `Schedule`). Ranks are
    exclusive; of the ops that could start, the first by `_priority` does. The order of starting is a total order in
    which dependencies precede users even where ops take no time. Raises ValueError if the wanted orders cannot be kept.
    """
    ops = list(step_ops(graph, microbatches))
    index = {op: i for i, op in enumerate(ops)}
    needed = [{*dependencies(graph, microbatches, op), *awaits(graph, in_flight, op)} for op in ops]
    for order in orders.values():
        for before, after in pairwise(order):
            needed[index[after]].add(before)
    users: list[list[int]] = [[] for _ in ops]
    for i, before in enumerate(needed):
        for op in before:
            users[index[op]].append(i)
    priority = _priority(graph)
    run = _Run(
        ranks=[occupies(graph, op) for op in ops],
        seconds=[costs.of(op) for op in ops],
        priority=[(*priority(op), i) for i, op in enumerate(ops)],
        missing=[len(before) for before in needed],
        users=users,
    )
    run.finish_all()
    if len(run.started) < len(ops):
        started = set(run.started)
        stuck = next(op for i, op in enumerate(ops) if i not in started)
        raise ValueError(f"{name}: {stuck} can never start: the wanted orders of the stages contradict each other")
    ordered = tuple(ops[i] for i in run.started)
    schedule = Schedule(graph=graph, microbatches=microbatches, ops=ordered, name=name, in_flight=dict(in_flight))
    return Timeline(
        schedule=schedule,
        starts=tuple(run.starts[i] for i in run.started),
        ends=tuple(run.ends[i] for i in run.started),
    )


def _priority(graph: StageGraph) -> Callable[[Op], tuple[int, ...]]:
    """Smallest first: lent weights, prepare, sends, backward, forward, reductions; then downstream; then early."""
    place = {stage.name: -i for i, stage in enumerate(graph.topological)}
    distances = {stage.name: graph.distance(stage.name) for stage in graph.stages}

    def priority(op: Op) -> tuple[int, ...]:
        backward = op.backward or op.kind == "B"
        if op.kind == "prepare":
            rank = 1
        elif op.kind in ("pack", "move"):  # another submesh may be idle until it comes
            rank = 2 if backward else 3 if op.microbatch != ONCE else 0
        elif op.kind in ("F", "B", "unpack"):
            rank = 4 if backward else 5
        else:  # reduce, norm, update: after a backward of another stage on these ranks, which others may wait for
            rank = 6
        return (rank, distances.get(op.stage, 0), place.get(op.stage, 0), op.microbatch)

    return priority


class _Run:
    """The state of one run of the list scheduler; ops are indices here."""

    def __init__(self, *, ranks, seconds, priority, missing, users) -> None:
        self.ranks: list[tuple[int, ...]] = ranks
        self.seconds: list[float] = seconds
        self.priority: list[tuple[int, ...]] = priority
        self.missing: list[int] = missing
        self.users: list[list[int]] = users
        self.now = 0.0
        self.busy: set[int] = set()
        self.running: list[tuple[float, int]] = []
        self.ready = sorted(priority[i] for i, count in enumerate(missing) if count == 0)
        self.started: list[int] = []
        self.starts = [0.0] * len(ranks)
        self.ends = [0.0] * len(ranks)

    def finish_all(self) -> None:
        """Start what can start and jump to the next end, until nothing runs."""
        while True:
            while (op := self._next()) is not None:
                self._start(op)
            if not self.running:
                return
            self.now = self.running[0][0]
            while self.running and self.running[0][0] == self.now:
                self._end(heapq.heappop(self.running)[1])

    def _next(self) -> int | None:
        """The op to start now: the first ready one whose ranks are neither busy nor kept for one before it.

        A send that finds some of its ranks busy has the others kept for it: both sides of a rendezvous are seldom free
        at once by themselves (with random costs this shortens steps by up to 15 %). Keeping ranks for an F or B of a
        stage that spans others' submeshes makes steps longer instead.
        """
        kept: set[int] = set()
        for key in self.ready:
            ranks = self.ranks[key[-1]]
            if self.busy.isdisjoint(ranks) and kept.isdisjoint(ranks):
                return key[-1]
            if key[0] in _SENDS:
                kept.update(ranks)
        return None

    def _start(self, op: int) -> None:
        self.ready.remove(self.priority[op])
        self.started.append(op)
        self.starts[op] = self.now
        self.ends[op] = self.now + self.seconds[op]
        if self.ends[op] == self.now:  # takes no time: its users may start before anything else does
            self._end(op)
            return
        self.busy.update(self.ranks[op])
        heapq.heappush(self.running, (self.ends[op], op))

    def _end(self, op: int) -> None:
        self.busy.difference_update(self.ranks[op])
        for user in self.users[op]:
            self.missing[user] -= 1
            if self.missing[user] == 0:
                insort(self.ready, self.priority[user])
