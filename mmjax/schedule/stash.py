"""Times of the copies of residuals to the host and back between F and B (``StageNode.stash``).

At most two microbatches of a lane that are between F and B have residuals on its devices: one that is computed, and one
that is copied or comes next. F waits for the copy to the host of the microbatch two before it on its lane. The copy
back begins as late as its time allows, but no later than the op before B on these ranks, so that it ends before B; and
not before the lane has a single op left before that B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from mmjax.schedule.graph import StageGraph, StageNode
from mmjax.schedule.ops import MOST_UNSTASHED, Op, Schedule, participating_ranks
from mmjax.schedule.orders import by_lane
from mmjax.schedule.simulate import Costs, Timeline

Waits = Mapping[Op, tuple[Op, ...]]


def stashing(graph: StageGraph, microbatches: int, costs: Costs, make: Callable[[Costs, Waits], Timeline]) -> Timeline:
    """The timeline of `make` with waits for the copies of stashing stages.

    Args:
      graph: the stages and edges; without stages that stash the result is `make(costs, {})`.
      microbatches: microbatches of a step.
      costs: seconds of each op, such as `Costs.nominal(graph)`.
      make: takes costs and waits, a dict from an op to the ops that it waits for; returns the same order of F, B and
        W on every rank for all costs of copies and all waits. It is called twice: copies back are placed in a first
        timeline, in which they take no time.
    """
    nodes = [node for node in graph.stages if node.stashes]
    if not nodes:
        return make(costs, {})
    to_host = {op: (before,) for node in nodes for op, before in _waits_to_host(node, microbatches)}
    instant = {key: seconds for key, seconds in costs.seconds.items() if key[0] != "unstash"}
    first = make(replace(costs, seconds=instant), to_host)
    back = {op: before for node in nodes for op, before in _waits_back(first, node, costs)}
    return make(costs, {**to_host, **back})


def _waits_to_host(node: StageNode, microbatches: int) -> Iterator[tuple[Op, Op]]:
    """Pairs of an F and the copy to the host that it waits for."""
    earlier = MOST_UNSTASHED * node.lanes * node.microbatches
    for m in range(earlier, microbatches, node.microbatches):
        yield Op("F", node.name, m), Op("stash", node.name, m - earlier)


def _waits_back(timeline: Timeline, node: StageNode, costs: Costs) -> Iterator[tuple[Op, tuple[Op, ...]]]:
    """Pairs of a copy back and the ops that it waits for; none for a copy back that need only wait for its stash."""
    schedule = timeline.schedule
    place = {op: i for i, op in enumerate(schedule.ops)}
    for lane in by_lane(schedule.graph, [op for op in schedule.for_stage(node.name) if op.kind in ("F", "B")]):
        for before, op in ((lane[max(0, i - 2)], op) for i, op in enumerate(lane) if op.kind == "B"):
            back, forward = Op("unstash", node.name, op.microbatch), Op("F", node.name, op.microbatch)
            awaited = _last_in_time(timeline, _ops_between(schedule, place[before], place[op]), costs.of(back))
            stash = (Op("stash", node.name, before.microbatch),) if before.kind == "F" and before != forward else ()
            if place[awaited] > place[forward]:
                yield back, (awaited, *stash)


def _ops_between(schedule: Schedule, start: int, end: int) -> list[Op]:
    """The F, B and W from place `start` to place `end` of the order, both included, on ranks of the op at `end`."""
    ranks = set(participating_ranks(schedule.graph, schedule.ops[end]))
    computing = (op for op in schedule.ops[start : end + 1] if op.kind in ("F", "B", "W"))
    return [op for op in computing if not ranks.isdisjoint(participating_ranks(schedule.graph, op))]


def _last_in_time(timeline: Timeline, ops: Sequence[Op], seconds: float) -> Op:
    """The last op of `ops` after which a copy of `seconds` is in time for the last op of `ops`, the reader.

    The copy then ends before the reader starts, and begins no later than the op before the reader. If all ops end too
    late for that, it is the first op.
    """
    first, *between, previous, reader = ops if len(ops) > 2 else (ops[0], *ops)
    latest = min(timeline.span(previous)[0], timeline.span(reader)[0] - seconds)
    early = ((timeline.span(op)[1], i, op) for i, op in enumerate(between) if timeline.span(op)[1] <= latest)
    return max(early, default=(0.0, 0, first))[-1]
