"""Seconds of what a microbatch sends: activations and gradients over the edges of a stage graph, and around cp rings.

Each lane of a stage has a way of its own to the stages behind and before it: on the same ranks nothing moves, and one
lane may be on the node of the other end while the next is not. So where an end has lanes, costs are by microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from mmjax.mesh.layout import Layout
from mmjax.planner.candidates import Candidate
from mmjax.planner.clock import Clock, Clocks, Pass
from mmjax.planner.stage_graph import are_apart
from mmjax.planner.work import ModuleWork, Part
from mmjax.schedule.graph import EdgeNode, StageGraph, StageNode
from mmjax.schedule.simulate import CostKey

Carried = tuple[dict[CostKey, float], dict[tuple[str, str, bool, int], float]]
"""Seconds by (kind, edge, backward), and by (kind, edge, backward, microbatch), as in `Costs`."""


def edge_costs(graph: StageGraph, candidate: Candidate, clock: Clocks, size_of: Callable[[EdgeNode], float]) -> Carried:
    """Seconds of each edge's move, or of its unpack where nothing moves; those of an edge with lanes are the longest.

    size_of: bytes of a microbatch's activation over an edge, for all dp ranks together.
    """
    seconds: dict[CostKey, float] = {}
    overrides: dict[tuple[str, str, bool, int], float] = {}
    for edge in graph.edges:
        pairs = math.lcm(graph.stage(edge.src).lanes, graph.stage(edge.dst).lanes)
        each = [_carried(graph, candidate, clock, edge, m, size_of(edge)) for m in range(pairs)]
        for way in (False, True):
            for kind, cost in sorted(each):
                seconds[kind, edge.name, way] = cost
            for microbatch in range(candidate.microbatches) if pairs > 1 else ():
                kind, cost = each[microbatch % pairs]
                overrides[kind, edge.name, way, microbatch] = cost
    return seconds, overrides


def ring_seconds(
    module: ModuleWork, layout: Layout, clock: Clock, shape: tuple[float, int], part: Part, took: Pass
) -> tuple[float, float]:
    """Seconds, in forward and backward, by which the cp ring of keys and values takes longer than attention.

    In a backward their gradients go round too (Liu et al., "Ring Attention", §3).

    Args:
      module: the work of the module.
      layout: its layout.
      clock: its times.
      shape: rows of a microbatch and their width.
      part: the part of the module that a stage has.
      took: seconds of the stage without the ring.
    """
    ranks, (rows, width) = module.context(layout), shape
    if ranks == 1:
        return 0.0, 0.0
    size = rows / layout.dp * width / module.width * module.ring * part.layers / layout.tp
    once = clock.gather(size, ranks, across=layout.replica_size > clock.node)
    share = module.attention * part.layers / module.forward.of(part)
    back = max(0.0, 2 * once - took.backward * share) if took.backward else 0.0
    return max(0.0, once - took.forward * share), back


def _carried(
    graph: StageGraph, candidate: Candidate, clock: Clocks, edge: EdgeNode, microbatch: int, size: float
) -> tuple[str, float]:
    """The op that carries a microbatch, and its seconds; the replicas of the side with less dp share the bytes."""
    local = graph.kind_of(edge, microbatch) == "local"
    kind = "unpack" if local else "move"
    ends = [_lane(graph.stage(name), microbatch) for name in (edge.src, edge.dst)]
    degrees = [candidate.layouts[node.module].dp for node in ends]
    if local and degrees[0] == degrees[1]:
        return kind, clock.op
    across = are_apart(candidate, clock, lambda clock: clock.node, *ends)
    size /= min(degrees)
    return kind, max(clock.of(node.module).move(size, across=across) for node in ends) + clock.op


def _lane(node: StageNode, microbatch: int) -> StageNode:
    """The stage on the ranks of the lane that a microbatch runs on."""
    return replace(node, ranks=node.ranks_of(microbatch), lanes=1)
