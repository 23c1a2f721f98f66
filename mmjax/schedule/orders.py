"""Orders of F, B and W of one stage, the building blocks of schedules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmjax.schedule.graph import StageGraph, StageNode
from mmjax.schedule.ops import Op


def backward_ops(stage: StageNode, microbatch: int) -> list[Op]:
    """The ops of one microbatch's backward: [] for a stage without, else B, and W behind it if the stage is split.

    Args:
      stage: the stage, such as `graph.stages[0]`.
      microbatch: the microbatch's number, from 0.
    """
    return [Op(kind, stage.name, microbatch) for kind in "BW"[: stage.backward + stage.split]]


def gpipe_order(stage: StageNode, microbatches: Iterable[int]) -> list[Op]:
    """GPipe's order of a stage's ops: all F, then all B, a W right behind its B.

    Args:
      stage: the stage, such as `graph.stages[0]`.
      microbatches: the microbatches' numbers, such as range(8).
    """
    span = [m for m in microbatches if m == stage.first_of(m)]
    return [Op("F", stage.name, m) for m in span] + [op for m in span for op in backward_ops(stage, m)]


def one_f_one_b_order(stage: StageNode, microbatches: int | range, warmup: int) -> list[Op]:
    """1F1B's order: `warmup` F, then backward and F in turn, then the remaining backwards; a W is right behind its B.

    For two microbatches and a warm-up of 1: F of 0, B of 0, F of 1, B of 1, each such as `Op("F", "llm.0", 0)`.

    Args:
      stage: the stage, such as `graph.stages[0]`; without backward all ops are F.
      microbatches: their number, or a range of them, such as a window.
      warmup: F before the first B, 1 or more.
    """
    span = range(microbatches) if isinstance(microbatches, int) else microbatches
    forwards = [Op("F", stage.name, m) for m in span]
    order = forwards[:warmup]
    for i, microbatch in enumerate(span):
        order += [*backward_ops(stage, microbatch), *forwards[warmup + i : warmup + i + 1]]
    return order


def by_lane(graph: StageGraph, order: Sequence[Op]) -> list[list[Op]]:
    """The order of a stage's ops, cut into one order for each lane; an order of several stages' ops is not cut.

    Lanes are in the order of their first ops. The result is [] for an empty order.

    Args:
      graph: the graph that has the stage.
      order: ops such as `Op("F", "vision.0", 0)`.
    """
    if len({op.stage for op in order}) > 1:
        return [list(order)]
    lanes: dict[int, list[Op]] = {}
    for op in order:
        lanes.setdefault(graph.stage(op.stage).lane(op.microbatch), []).append(op)
    return list(lanes.values())


def peak_in_flight(order: Sequence[Op], stage: StageNode) -> int:
    """The most microbatches of a stage that are in flight, from F to B, or W if it is split, after any op of `order`.

    Args:
      order: ops such as `Op("F", "llm.0", 0)`; those of other stages do not count.
      stage: the stage, such as `graph.stages[0]`, which has a backward.
    """
    last_kind = "W" if stage.split else "B"
    live = peak = 0
    for op in order:
        if op.stage == stage.name:
            live += (op.kind == "F") - (op.kind == last_kind)
            peak = max(peak, live)
    return peak
