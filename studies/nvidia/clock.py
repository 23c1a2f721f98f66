"""Times of layers in Megatron-LM: products, attention and elementwise operations are timed separately.

Three shares of a datasheet's figures are free (`Reached`). Norms, biases, dropout, activations and sums take the time
that their bytes need at the datasheet's bandwidth of a device's own memory. Which of them share a kernel is taken from
the authors' public benchmark (`model`): LLMs have fused kernels and sequence parallelism, so that tp cuts all of
it; encoders have neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmjax.planner.clock import AnalyticClock, PassSeconds
from mmjax.planner.work import Shares, StagePart

NORM, DROPOUT, SUM, BIAS, GELU = (4, 6), (5, 5), (6, 6), (4, 2), (4, 6)
"""Bytes that an operation in bfloat16 reads and writes for each element, in forward and in backward: two or three
numbers for a norm and an activation; input, output and mask for dropout; a sum with the residual; a bias and its
gradient."""
FUSED = (7, 5)
"""The same bytes for bias, dropout and sum in one kernel; the backward's sum of gradients (`SUM`) is extra."""
HIDDEN = 4
"""Hidden units of a layer, in multiples of its width."""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Shares of the datasheet's figures that are reached.

    Attributes:
      products: share of the FLOPs per second in products with weights.
      attention: share of the FLOPs per second in attention.
      communication: share of the bandwidths between devices.
    """

    products: float
    attention: float
    communication: float


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Work of a module beside products, in forward and in backward.

    Attributes:
      attention: FLOPs of a row in a layer's attention.
      streamed: bytes that one device reads and writes for a row.
    """

    attention: tuple[float, float]
    streamed: tuple[Shares, Shares]


def streamed_apart(tokens: float, width: int, tp: int) -> tuple[float, float]:
    """Streamed bytes of a layer with a kernel for each operation, no sequence parallelism: tp cuts hidden units."""
    ahead, back = (
        2 * (NORM[way] + BIAS[way] + DROPOUT[way] + SUM[way]) + HIDDEN * (BIAS[way] + GELU[way]) / tp
        for way in (False, True)
    )
    return ahead * tokens * width, back * tokens * width


def streamed_fused(tokens: float, width: int, tp: int) -> tuple[float, float]:
    """Streamed bytes of a layer with fused kernels and sequence parallelism."""
    ahead = 2 * (NORM[0] + FUSED[0]) + HIDDEN * GELU[0]
    back = 2 * (NORM[1] + FUSED[1] + SUM[1]) + HIDDEN * GELU[1]
    return ahead * tokens * width / tp, back * tokens * width / tp


@dataclass(frozen=True, kw_only=True)
class MegatronClock(AnalyticClock):
    """`AnalyticClock` with the work `inside` modules; its `efficiency` is of products and of communication.

    Attributes:
      attention: share of the FLOPs per second that attention reaches.
      inside: work beside products, by module.
    """

    attention: float
    inside: Mapping[str, Inside] = field(hash=False)

    def stage(
        self, module: str, part: StagePart, *, rows: float, width: int, tp: int, expert_share: float = 1.0
    ) -> PassSeconds:
        """Seconds of a microbatch of `rows` rows of `width` on one dp replica of a stage."""
        took = super().stage(module, part, rows=rows, width=width, tp=tp, expert_share=expert_share)
        slow = self.attention_pass(module, part, rows=rows, width=width, tp=tp)
        quick = self.attention / self.efficiency.compute
        scale = rows * width / self.work.modules[module].width
        ahead, back = (shares.of(part) * scale / self.accelerator.bandwidth for shares in self.inside[module].streamed)
        return PassSeconds(
            forward=took.forward + slow.forward * (1 - quick) + ahead,
            backward=took.backward + slow.backward * (1 - quick) + back,
        )

    def attention_pass(self, module: str, part: StagePart, *, rows: float, width: int, tp: int) -> PassSeconds:
        """Seconds of attention in such a microbatch."""
        scale = rows * width / self.work.modules[module].width
        rate = tp * self.accelerator.flops * self.attention
        ahead, back = (flops * part.layers * scale / rate for flops in self.inside[module].attention)
        return PassSeconds(forward=ahead, backward=back)
