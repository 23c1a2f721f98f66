"""When copies to the host and back run of what stages keep from F to B (``StageNode.stash``).

Of the microbatches of a lane that wait between F and B, at most two are then on its devices: one that is computed, and
one that is copied or that is the next to be due. F waits for the copy to the host of the microbatch two before it on
its lane. The way back begins as late as the copy's time allows, but beside one op of these ranks at least, so that B
finds it there; and never before the lane has only one of its own ops left before that B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from mmjax.schedule.graph import StageGraph, StageNode
from mmjax.schedule.ops import MOST_UNSTASHED, Op, Schedule, touches
from mmjax.schedule.orders import by_lane
from mmjax.schedule.simulate import Costs, Timeline

Waits = Mapping[Op, tuple[Op, ...]]


def stashing(graph: StageGraph, microbatches: int, costs: Costs, make: Callable[[Costs, Waits], Timeline]) -> Timeline:
    """The timeline that `make` gives, with waits for the copies of stashing stages.

    make: gives the same order of F, B and W on every rank for all costs of copies and all waits. It is called twice:
    ways back are placed in a first timeline, in which they take no time.
    """
    nodes = [node for node in graph.stages if node.stashes]
    if not nodes:
        return make(costs, {})
    away = {op: (before,) for node in nodes for op, before in _away(node, microbatches)}
    at_once = {key: seconds for key, seconds in costs.seconds.items() if key[0] != "unstash"}
    first = make(replace(costs, seconds=at_once), away)
    back = {op: before for node in nodes for op, before in _back(first, node, costs)}
    return make(costs, {**away, **back})


def _away(node: StageNode, microbatches: int) -> Iterator[tuple[Op, Op]]:
    """Pairs of an F and the copy to the host that it waits for."""
    for m in range(MOST_UNSTASHED * node.lanes, microbatches):
        yield Op("F", node.name, m), Op("stash", node.name, m - MOST_UNSTASHED * node.lanes)


def _back(timeline: Timeline, node: StageNode, costs: Costs) -> Iterator[tuple[Op, tuple[Op, ...]]]:
    """Pairs of a copy back and the ops that it waits for, where its own way to the host does not keep it back."""
    schedule = timeline.schedule
    place = {op: i for i, op in enumerate(schedule.ops)}
    for own in by_lane(schedule.graph, [op for op in schedule.for_stage(node.name) if op.kind in ("F", "B")]):
        for before, op in ((own[max(0, i - 2)], op) for i, op in enumerate(own) if op.kind == "B"):
            back, forward = Op("unstash", node.name, op.microbatch), Op("F", node.name, op.microbatch)
            awaited = _awaited(timeline, _runs(schedule, place[before], place[op]), costs.of(back))
            left = (Op("stash", node.name, before.microbatch),) if before.kind == "F" and before != forward else ()
            if place[awaited] > place[forward]:
                yield back, (awaited, *left)


def _runs(schedule: Schedule, start: int, end: int) -> list[Op]:
    """The F, B and W from place `start` to place `end` of the order, both included, on ranks of the op at `end`."""
    ranks = set(touches(schedule.graph, schedule.ops[end]))
    runs = (op for op in schedule.ops[start : end + 1] if op.kind in ("F", "B", "W"))
    return [op for op in runs if not ranks.isdisjoint(touches(schedule.graph, op))]


def _awaited(timeline: Timeline, runs: Sequence[Op], seconds: float) -> Op:
    """The last op of `runs` after which a copy of so many seconds ends before the last of them starts, and begins no
    later than the one before that; the first op where all are too late."""
    first, *between, beside, need = runs if len(runs) > 2 else (runs[0], *runs)
    latest = min(timeline.span(beside)[0], timeline.span(need)[0] - seconds)
    early = ((timeline.span(op)[1], i, op) for i, op in enumerate(between) if timeline.span(op)[1] <= latest)
    return max(early, default=(0.0, 0, first))[-1]
