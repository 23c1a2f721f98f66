"""Seconds of what a microbatch sends: activations and gradients over the edges of a stage graph, and between cp ranks.

Each lane of a stage has a way of its own to the stages behind and before it: on the same ranks nothing moves, and one
lane may be on the node of the other end while the next is not. So where an end has lanes, costs are by microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mmjax.attention.exchange import MOST_CHUNKS
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


def exchange_seconds(
    module: ModuleWork,
    layout: Layout,
    clock: Clock,
    shape: tuple[float, int],
    part: Part,
    took: Pass,
    wider: float = 2.0,
) -> tuple[float, float]:
    """Seconds, in forward and backward, by which the cp ranks' exchange of keys and values takes longer than attention.

    See `mmjax.attention.exchange` for the ways. Ranks have the same work, also in each round of a ring. A backward that
    computes its layers again exchanges again.

    Args:
      module: the work of the module.
      layout: its layout.
      clock: its times.
      shape: rows of a microbatch and their width.
      part: the part of the module that a stage has.
      took: seconds of the stage without the exchange.
      wider: bytes of a number in sums of gradients over those in the computation.
    """
    ranks = module.context(layout)
    if ranks == 1:
        return 0.0, 0.0
    size = _ring_bytes(module, layout, shape)
    share = module.attention / module.forward.of(part)
    hides = took.forward * share, took.backward * share
    sent = partial(clock.gather, ranks=ranks, across=layout.replica_size > clock.node)
    way = {"gather": _gathering, "need": _needing, "ring": _ringing, "all-to-all": _crossing}[layout.cp_way]
    ahead, back = (part.layers * seconds for seconds in way(module, layout, sent, size, hides, wider))
    return ahead, (back + ahead * (module.recompute.layer > 0)) if took.backward else 0.0


def _ring_bytes(module: ModuleWork, layout: Layout, shape: tuple[float, int]) -> float:
    """Bytes of a layer's keys and values of the heads of a tp rank, of all tokens of the rows of a dp rank."""
    rows, width = shape
    return rows / layout.dp * width / module.width * module.ring / min(layout.tp, module.heads[1])


def _own(heads: int, layout: Layout) -> int:
    """How many of some heads a tp rank has; ranks share one where there are fewer heads than ranks."""
    return max(1, heads // layout.tp)


Sent = Callable[[float], float]
"""Seconds in which all cp ranks get so many bytes in all from each other."""


def head_chunks(module: ModuleWork, layout: Layout) -> int:
    """Parts that the key/value heads of a rank are gathered in."""
    groups = _own(module.heads[1], layout)
    return next(count for count in range(min(MOST_CHUNKS, groups), 0, -1) if groups % count == 0)


def _gathering(
    module: ModuleWork, layout: Layout, sent: Sent, size: float, hides: tuple[float, float], wider: float
) -> tuple[float, float]:
    """Some heads after others: the first are waited for, the next come while these are used.

    In a backward they come again, and the sums of their gradients are scattered.
    """
    chunks = head_chunks(module, layout)
    once = sent(size / chunks)
    ahead, back = (
        own + (chunks - 1) * max(0.0, own - hidden / chunks)
        for own, hidden in zip((once, once + sent(wider * size / chunks)), hides, strict=True)
    )
    return ahead, back


def _needing(
    module: ModuleWork, layout: Layout, sent: Sent, size: float, hides: tuple[float, float], wider: float
) -> tuple[float, float]:
    """At most what *gather* sends; how much less depends on the rows. All of it is waited for."""
    once = sent(size)
    return once, once + sent(wider * size)


def _ringing(
    module: ModuleWork, layout: Layout, sent: Sent, size: float, hides: tuple[float, float], wider: float
) -> tuple[float, float]:
    """Keys and values go round; in a backward their gradients too (Liu et al., "Ring Attention", §3)."""
    once = sent(size)
    return max(0.0, once - hides[0]), max(0.0, once + wider * once - hides[1])


def _crossing(
    module: ModuleWork, layout: Layout, sent: Sent, size: float, hides: tuple[float, float], wider: float
) -> tuple[float, float]:
    """Queries, keys, values and outputs change places, and nothing hides that.

    In a backward those and the outputs' gradient do so again, then fp32 gradients.
    """
    heads, groups = (_own(count, layout) for count in module.heads)
    of_head = size / (2 * groups) / layout.cp  # bytes of a head of keys or values on a rank
    repeated = math.lcm(groups, layout.cp)  # so that every rank has whole heads of them
    ahead = sent((2 * heads + 2 * repeated) * of_head)
    return ahead, sent((3 * heads + 2 * repeated) * of_head) + sent(wider * (heads + 2 * repeated) * of_head)


def exchanged_bytes(module: ModuleWork, layout: Layout, shape: tuple[float, int], wider: float = 2.0) -> float:
    """Bytes of keys and values of other ranks, and of their gradients, that a rank holds while a backward runs."""
    ranks = module.context(layout)
    if ranks == 1:
        return 0.0
    size = _ring_bytes(module, layout, shape)
    if layout.cp_way == "gather":  # these heads, the next ones, and the gradients of these
        chunks = head_chunks(module, layout)
        return size / chunks * (min(chunks, 2) + wider)
    if layout.cp_way == "need":  # all heads at once
        return size * (1 + wider)
    if layout.cp_way == "ring":  # what came, and what comes
        return 2 * size / ranks * (1 + wider)
    heads, groups = module.heads
    return size / ranks * (3 + wider) * (heads + 2 * groups) / (2 * groups)


def whole_rows_seconds(
    layout: Layout, clock: Clock, ranks: int, *, given: float = 0.0, entered: float = 0.0
) -> tuple[float, float]:
    """Seconds, in forward and backward, of making whole rows between modules from the parts that cp ranks have.

    Args:
      layout: the layout of a stage's module.
      clock: its times.
      ranks: ranks that have parts of a row.
      given: bytes of the rows that the stage gives to other modules, of a dp rank.
      entered: bytes of the rows of other modules whose gradients it sums.
    """
    sent = partial(clock.gather, ranks=ranks, across=layout.replica_size > clock.node)
    return sent(given) if given else 0.0, 2 * sent(entered) if entered else 0.0


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
