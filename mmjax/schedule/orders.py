"""Orders of F, B and W of one stage, the building blocks of schedules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmjax.schedule.graph import StageGraph, StageNode
from mmjax.schedule.ops import Op


def backward_ops(stage: StageNode, microbatch: int) -> list[Op]:
    """The ops of one microbatch's backward: none for a stage without, else B, and W behind it if the stage is split."""
    return [Op(kind, stage.name, microbatch) for kind in "BW"[: stage.backward + stage.split]]


def gpipe_order(stage: StageNode, microbatches: Iterable[int]) -> list[Op]:
    """GPipe's order: all F, then all B, a W right behind its B."""
    span = list(microbatches)
    return [Op("F", stage.name, m) for m in span] + [op for m in span for op in backward_ops(stage, m)]


def one_f_one_b_order(stage: StageNode, microbatches: int | range, warmup: int) -> list[Op]:
    """1F1B's order: `warmup` F, then backward and F in turn, then the remaining backwards; a W is right behind its B.

    microbatches: their number, or a range of them, such as a window.
    """
    span = range(microbatches) if isinstance(microbatches, int) else microbatches
    forwards = [Op("F", stage.name, m) for m in span]
    order = forwards[:warmup]
    for i, microbatch in enumerate(span):
        order += [*backward_ops(stage, microbatch), *forwards[warmup + i : warmup + i + 1]]
    return order


def by_lane(graph: StageGraph, order: Sequence[Op]) -> list[list[Op]]:
    """The order of a stage's ops, cut into one order for each lane; an order of several stages' ops is not cut.

    Lanes are in the order of their first ops.
    """
    if len({op.stage for op in order}) > 1:
        return [list(order)]
    lanes: dict[int, list[Op]] = {}
    for op in order:
        lanes.setdefault(graph.stage(op.stage).lane(op.microbatch), []).append(op)
    return list(lanes.values())


def peak_in_flight(order: Sequence[Op], stage: StageNode) -> int:
    """The most microbatches of a stage with backward that are in flight after any op of `order`."""
    last_kind = "W" if stage.split else "B"
    live = peak = 0
    for op in order:
        if op.stage == stage.name:
            live += (op.kind == "F") - (op.kind == last_kind)
            peak = max(peak, live)
    return peak
