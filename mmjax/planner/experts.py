"""Seconds by which expert parallelism delays a stage: its exchange of tokens, and the fullest rank.

Loads are uniform but for one declared factor, `ExpertWork.fullest`. A ring sends the tokens of a rank and their results
beside products, except the last results, which no product follows. In an all-to-all a rank of enough tokens sends one
half beside the products of the other; of fewer, nothing hides it. In a backward the tokens are sent again, as where no
layer keeps what it has received. See `mmjax.models.experts.exchange`.
"""

from __future__ import annotations

from mmjax.mesh.layout import Layout
from mmjax.models.experts.sizes import HALF_TOKENS
from mmjax.planner.clock import Clock, PassSeconds, group_exchange, group_ring
from mmjax.planner.work import ExpertWork, ModuleWork, StagePart


def expert_sums(module: ModuleWork, layout: Layout) -> float:
    """The share of the sums of a module's experts' gradients that a device reads and writes in a microbatch.

    With ep it has a part of the experts; in a ring it adds to their sums for each rank's tokens.
    """
    return module.experts.uses(layout) / layout.ep if module.experts else 1.0


def with_experts(
    compute: PassSeconds,
    module: ModuleWork,
    layout: Layout,
    clock: Clock,
    *,
    shape: tuple[float, int],
    part: StagePart,
    first: int,
    halves: bool,
) -> PassSeconds:
    """Seconds of a microbatch in a stage, with those of the exchange of ep and of waiting for the fullest rank.

    Args:
      compute: seconds of the stage if all ranks have equally many rows and exchange nothing.
      module: the work of the module, such as `read_work(recipe).modules["llm"]`.
      layout: its layout, such as `Layout(dp=8, ep=8)`.
      clock: its times, such as `AnalyticClock(work=work, accelerator=accelerator("h100"))`.
      shape: rows of a microbatch on a rank, and positions of a row, such as (2.0, 4096).
      part: the part of the module that the stage has, such as `StagePart(layers=16)`.
      first: number of the stage's first device, from 0, where a node starts.
      halves: whether an all-to-all may exchange two halves of the tokens one after the other: where gradients of
        weights are not left to W.
    """
    experts = module.experts
    if experts is None or layout.ep == 1:
        return compute
    forward, backward = _expert_seconds(compute, module, experts, part)
    rows, width = shape
    size = experts.features * rows * width / module.width
    products = forward / part.layers, backward / part.layers
    if layout.ep_way == "ring":
        waits = _ring_seconds(experts, layout, clock, size, products, first)
    else:
        hidden = products if halves and rows * width >= 2 * HALF_TOKENS else (0.0, 0.0)
        waits = _all_to_all_seconds(experts, layout, clock, size, hidden, first)
    return PassSeconds(
        forward=compute.forward + (experts.fullest - 1) * forward + part.layers * waits[0],
        backward=compute.backward + ((experts.fullest - 1) * backward + part.layers * waits[1])
        if compute.backward
        else 0.0,
    )


def _expert_seconds(
    compute: PassSeconds, module: ModuleWork, experts: ExpertWork, part: StagePart
) -> tuple[float, float]:
    """Seconds of experts' products in forward and backward, as their share of the FLOPs."""
    dense = module.dense
    forward, backward = module.forward.of(part), module.backward.of(part)
    shares = (
        experts.forward * part.layers / forward,
        1 - dense.backward.of(part) / backward if backward else 0.0,
    )
    return compute.forward * shares[0], compute.backward * shares[1]


def _ring_seconds(
    experts: ExpertWork, layout: Layout, clock: Clock, size: float, products: tuple[float, float], first: int
) -> tuple[float, float]:
    """Seconds of a layer's ring, in forward and backward, that products of so many seconds do not hide.

    size: bytes of a rank's tokens; their results have as many.
    """
    send = group_ring(clock, size, ranks=layout.ep, apart=layout.tp, first=first) / (layout.ep - 1)
    forward, backward = (
        send + max(0.0, (sends - 1) * send - experts.fullest * hidden)
        for sends, hidden in zip((2 * layout.ep - 1, 3 * layout.ep - 2), products, strict=True)
    )
    return forward, backward


def _all_to_all_seconds(
    experts: ExpertWork, layout: Layout, clock: Clock, size: float, products: tuple[float, float], first: int
) -> tuple[float, float]:
    """Seconds of a layer's all-to-alls that products of so many seconds do not hide.

    There are two in forward, and three in backward, which sends tokens again. In halves nothing lies beside half of
    each, but for the last of backward, which gradients of weights follow.
    """
    once = group_exchange(clock, size * experts.received_tokens(layout), ranks=layout.ep, apart=layout.tp, first=first)
    forward, backward = (experts.fullest * hidden for hidden in products)
    return 2 * once - min(once, forward), 3 * once - min(2 * once, backward)
