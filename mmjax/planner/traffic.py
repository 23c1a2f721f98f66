"""Seconds of a microbatch's communication: activations and gradients over stage graph edges, and between cp ranks.

Each lane of a stage has its own cost to the stages before and behind it: on the same ranks no data moves, and one lane
may be on the node of the other stage while the next lane is not. So if a stage of an edge has lanes, costs are by
microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mmjax.attention.exchange import MAX_CHUNKS
from mmjax.mesh.layout import Layout
from mmjax.planner.candidates import Candidate
from mmjax.planner.clock import Clock, Clocks, PassSeconds
from mmjax.planner.stage_graph import are_apart
from mmjax.planner.work import ModuleWork, StagePart
from mmjax.schedule.graph import EdgeNode, StageGraph, StageNode
from mmjax.schedule.simulate import CostKey

EdgeCosts = tuple[dict[CostKey, float], dict[tuple[str, str, bool, int], float]]
"""Seconds by (kind, edge, backward), and by (kind, edge, backward, microbatch), as in `Costs`."""


def edge_costs(
    graph: StageGraph, candidate: Candidate, clock: Clocks, size_of: Callable[[EdgeNode], float]
) -> EdgeCosts:
    """Seconds of each edge's move, or of its unpack if the edge is local, in both directions, with the host's time.

    The result is two dicts. Keys of the first are (kind, edge, backward), such as ("move", "vision.0->llm.0", False) or
    ("unpack", …), those of the second have the microbatch, from 0, as a fourth entry. For an edge with lanes the first
    dict has its slowest pair of lanes, and the second each microbatch of a step. For other edges the second has
    nothing.

    Args:
      graph: the stage graph, such as `estimate.graph`.
      candidate: the layouts of its modules, `estimate.candidate`.
      clock: their times, `estimate.clock`.
      size_of: returns the bytes of a microbatch's activation over an edge, for all dp ranks together.
    """
    seconds: dict[CostKey, float] = {}
    overrides: dict[tuple[str, str, bool, int], float] = {}
    for edge in graph.edges:
        pairs = math.lcm(graph.stage(edge.src).lanes, graph.stage(edge.dst).lanes)
        by_pair = [_edge_cost(graph, candidate, clock, edge, microbatch=m, size=size_of(edge)) for m in range(pairs)]
        for backward in (False, True):
            for kind, cost in sorted(by_pair):
                seconds[kind, edge.name, backward] = cost
            for microbatch in range(candidate.microbatches) if pairs > 1 else ():
                kind, cost = by_pair[microbatch % pairs]
                overrides[kind, edge.name, backward, microbatch] = cost
    return seconds, overrides


def exchange_seconds(
    module: ModuleWork,
    layout: Layout,
    clock: Clock,
    *,
    shape: tuple[float, int],
    part: StagePart,
    compute: PassSeconds,
    gradient_ratio: float = 2.0,
) -> tuple[float, float]:
    """Seconds, in forward and backward of a microbatch, by which cp's exchange of keys and values delays a stage.

    Attention hides "ring", and "gather" after its first chunk of heads. Nothing hides that chunk, "need" or
    "all-to-all". Both times are 0 if cp ranks share no rows, or need nothing of each other since they have whole media;
    backward is 0 if the stage has none. Ranks have the same work, also in each round of a ring. A backward with
    recompute exchanges again. See `mmjax.attention.exchange`.

    Args:
      module: the work of the module, such as `read_work(recipe).modules["llm"]`.
      layout: its layout, such as `Layout(tp=2, cp=4)`.
      clock: its times, such as `AnalyticClock(work=work, accelerator=accelerator("h100"))`.
      shape: rows of a microbatch on all ranks together, and positions of a row, such as (8.0, 32768).
      part: the part of the module that a stage has, such as `StagePart(layers=16)`.
      compute: seconds of a microbatch in the stage without the exchange, such as `PassSeconds(0.1, 0.2)`.
      gradient_ratio: bytes of a number in sums of gradients over the bytes of a number in the computation.
    """
    ranks = module.context(layout)
    if ranks == 1 or _needs_nothing(module, layout, shape):
        return 0.0, 0.0
    size = _ring_bytes(module, layout, shape)
    share = module.attention / module.forward.of(part)
    attention = compute.forward * share, compute.backward * share
    gather = partial(clock.gather, ranks=ranks, across=layout.replica_size > clock.node)
    match layout.cp_way:
        case "gather":
            chunks = head_chunks(module, layout)
            seconds = _gather_seconds(gather, size, attention, chunks=chunks, gradient_ratio=gradient_ratio)
        case "need":
            seconds = _needed_blocks_seconds(gather, size, gradient_ratio=gradient_ratio)
        case "ring":
            seconds = _ring_seconds(gather, size, attention, gradient_ratio=gradient_ratio)
        case _:
            seconds = _all_to_all_seconds(module, layout, gather, size, gradient_ratio=gradient_ratio)
    forward, backward = (part.layers * layer for layer in seconds)
    return forward, (backward + forward * (module.recompute.layer > 0)) if compute.backward else 0.0


def _needs_nothing(module: ModuleWork, layout: Layout, shape: tuple[float, int]) -> bool:
    """Whether cp ranks exchange only the keys that they need, and need none: each has whole media."""
    return layout.cp_way == "need" and module.has_whole_media(layout, shape[1])


def _ring_bytes(module: ModuleWork, layout: Layout, shape: tuple[float, int]) -> float:
    """Bytes of a layer's keys and values of the heads of a tp rank, of all tokens of the rows of a dp rank."""
    rows, width = shape
    return rows / layout.dp * width / module.width * module.ring / min(layout.tp, module.heads[1])


def _heads_per_rank(heads: int, layout: Layout) -> int:
    """The heads of a tp rank; with fewer heads than ranks, ranks share a head."""
    return max(1, heads // layout.tp)


Gather = Callable[[float], float]
"""Seconds in which all cp ranks receive this number of bytes, in all, from each other."""


def head_chunks(module: ModuleWork, layout: Layout) -> int:
    """The number of chunks in which "gather" sends the key/value heads of a rank: at most `MAX_CHUNKS`, all equal.

    Args:
      module: the work of the module, such as `read_work(recipe).modules["llm"]`.
      layout: its layout, whose tp divides the heads.
    """
    groups = _heads_per_rank(module.heads[1], layout)
    return next(count for count in range(min(MAX_CHUNKS, groups), 0, -1) if groups % count == 0)


def _gather_seconds(
    gather: Gather, size: float, attention: tuple[float, float], *, chunks: int, gradient_ratio: float
) -> tuple[float, float]:
    """Seconds of "gather": a rank waits for the first chunk of heads, and each next one comes during attention.

    In a backward the chunks come again, and the sums of their gradients are scattered.
    """
    chunk = gather(size / chunks)
    forward, backward = (
        exchange + (chunks - 1) * max(0.0, exchange - hidden / chunks)
        for exchange, hidden in zip((chunk, chunk + gather(gradient_ratio * size / chunks)), attention, strict=True)
    )
    return forward, backward


def _needed_blocks_seconds(gather: Gather, size: float, *, gradient_ratio: float) -> tuple[float, float]:
    """An upper bound on the seconds of "need", as if all blocks were sent; a rank waits for all of them."""
    blocks = gather(size)
    return blocks, blocks + gather(gradient_ratio * size)


def _ring_seconds(
    gather: Gather, size: float, attention: tuple[float, float], *, gradient_ratio: float
) -> tuple[float, float]:
    """Seconds of "ring": keys and values go round; in a backward also gradients (Liu et al., "Ring Attention", §3)."""
    once = gather(size)
    return max(0.0, once - attention[0]), max(0.0, once + gradient_ratio * once - attention[1])


def _all_to_all_seconds(
    module: ModuleWork, layout: Layout, gather: Gather, size: float, *, gradient_ratio: float
) -> tuple[float, float]:
    """Seconds of "all-to-all": queries, keys, values and outputs are exchanged, and no computation hides this.

    A backward exchanges them again with the gradient of the outputs, and then the fp32 gradients.
    """
    heads, groups = (_heads_per_rank(count, layout) for count in module.heads)
    of_head = size / (2 * groups) / layout.cp  # bytes of a head of keys or values on a rank
    repeated = math.lcm(groups, layout.cp)  # so that every rank has whole heads of them
    forward = gather((2 * heads + 2 * repeated) * of_head)
    gradients = gather(gradient_ratio * (heads + 2 * repeated) * of_head)
    return forward, gather((3 * heads + 2 * repeated) * of_head) + gradients


def exchanged_bytes(module: ModuleWork, layout: Layout, shape: tuple[float, int], gradient_ratio: float = 2.0) -> float:
    """Bytes of keys and values of other cp ranks, and of their gradients, that a rank holds while a backward runs.

    They are those of one layer, and 0 without cp or where ranks need nothing of each other.

    Args:
      module: the work of the module, such as `read_work(recipe).modules["llm"]`.
      layout: its layout, such as `Layout(tp=2, cp=4)`.
      shape: rows of a microbatch on all ranks together, and positions of a row, such as (8.0, 32768).
      gradient_ratio: bytes of a number in sums of gradients over the bytes of a number in the computation.
    """
    ranks = module.context(layout)
    if ranks == 1 or _needs_nothing(module, layout, shape):
        return 0.0
    size = _ring_bytes(module, layout, shape)
    if layout.cp_way == "gather":  # a chunk of heads, the next chunk, and the gradients of the first
        chunks = head_chunks(module, layout)
        return size / chunks * (min(chunks, 2) + gradient_ratio)
    if layout.cp_way == "need":  # all heads at once
        return size * (1 + gradient_ratio)
    if layout.cp_way == "ring":  # the received part, and the part that is being received
        return 2 * size / ranks * (1 + gradient_ratio)
    heads, groups = module.heads
    return size / ranks * (3 + gradient_ratio) * (heads + 2 * groups) / (2 * groups)


def whole_rows_seconds(
    layout: Layout, clock: Clock, ranks: int, *, output_bytes: float = 0.0, input_bytes: float = 0.0
) -> tuple[float, float]:
    """Seconds, in forward and backward, of joining the parts of rows of cp ranks into whole rows between modules.

    Args:
      layout: the layout of a stage's module, such as `Layout(tp=2, cp=4)`.
      clock: its times, such as `AnalyticClock(work=work, accelerator=accelerator("h100"))`.
      ranks: number of ranks that have parts of a row.
      output_bytes: bytes of the rows that a dp rank of the stage sends to other modules.
      input_bytes: bytes of the rows of other modules whose gradients it sums.
    """
    gather = partial(clock.gather, ranks=ranks, across=layout.replica_size > clock.node)
    return gather(output_bytes) if output_bytes else 0.0, 2 * gather(input_bytes) if input_bytes else 0.0


def _edge_cost(
    graph: StageGraph, candidate: Candidate, clock: Clocks, edge: EdgeNode, *, microbatch: int, size: float
) -> tuple[str, float]:
    """The op that carries a microbatch over `edge`, and its seconds.

    The bytes are divided among the replicas of the side with less dp.
    """
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
    """The stage on the ranks of the lane that runs a microbatch."""
    return replace(node, ranks=node.ranks_of(microbatch), lanes=1)
