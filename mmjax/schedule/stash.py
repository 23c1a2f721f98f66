"""When copies to the host and back run of what stages keep from F to B (``StageNode.stash``).

On the devices of a lane are then at most two of the microbatches that wait between F and B: one that is computed, and
one that is copied or the next that is due. F waits for the copy to the host of the microbatch two before it on its
lane. The way back begins as late as the copy's time allows, but beside one op of these ranks at least, so that B finds
it there; and never before the lane has only one of its own ops left before that B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from mmjax.schedule.graph import StageGraph, StageNode
from mmjax.schedule.ops import AT_ONCE, Op, touches
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
    at_once = {key: 0.0 if key[0] == "unstash" else seconds for key, seconds in costs.seconds.items()}
    first = make(replace(costs, seconds=at_once), away)
    back = {op: (before,) for node in nodes for op, before in _back(first, node, costs)}
    return make(costs, {**away, **back})


def _away(node: StageNode, microbatches: int) -> Iterator[tuple[Op, Op]]:
    """Pairs of an F and the copy to the host that it waits for."""
    for m in range(AT_ONCE * node.lanes, microbatches):
        yield Op("F", node.name, m), Op("stash", node.name, m - AT_ONCE * node.lanes)


def _back(timeline: Timeline, node: StageNode, costs: Costs) -> Iterator[tuple[Op, Op]]:
    """Pairs of a copy back and the op that it waits for, of those that its way to the host does not keep back."""
    schedule, spans = timeline.schedule, timeline.spans
    place = {op: i for i, op in enumerate(schedule.ops)}
    own: dict[int, list[Op]] = {}
    for op in schedule.ops:
        if op.stage == node.name and op.kind in ("F", "B"):
            own.setdefault(node.lane(op.microbatch), []).append(op)
    for ops in own.values():
        for i, op in enumerate(ops):
            if op.kind != "B":
                continue
            back, guard = Op("unstash", node.name, op.microbatch), ops[max(0, i - 2)]
            ranks = set(node.ranks_of(op.microbatch))
            between = schedule.ops[place[guard] : place[op]]
            runs = [
                one
                for one in between
                if one.kind in ("F", "B", "W") and not ranks.isdisjoint(touches(schedule.graph, one))
            ]
            latest = min(spans[runs[-1]][0], spans[op][0] - costs.of(back))
            awaited = max(
                (one for one in runs[1:] if spans[one][1] <= latest), key=lambda one: spans[one][1], default=guard
            )
            if place[awaited] > place[Op("F", node.name, op.microbatch)]:
                yield back, awaited
