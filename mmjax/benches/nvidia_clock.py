"""How long layers take in Megatron-LM: products, attention and elementwise operations told apart.

Three shares of a datasheet are free (`Reached`). Norms, biases, dropout, activations and sums take what their bytes
take at the bandwidth of a device's own memory, as its datasheet prints it. Which of them share a kernel is read off the
authors' public benchmark (`nvidia_model`): LLMs have fused kernels and sequence parallelism, so that tp cuts all of it;
encoders have neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmjax.planner.clock import AnalyticClock, Pass
from mmjax.planner.work import Part, Shares

NORM, DROPOUT, SUM, BIAS, GELU = (4, 6), (5, 5), (6, 6), (4, 2), (4, 6)
"""Bytes in bfloat16 that an operation reads and writes of each number, forward and backward: two or three numbers of a
norm and of an activation, a mask of dropout beside in and out, a sum with what goes past, a bias and its gradient."""
FUSED = (7, 5)
"""Of bias, dropout and sum in one kernel, with the sum of gradients (`SUM`) apart."""
HIDDEN = 4
"""Hidden units of a layer in its widths."""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What share of the datasheet's figures is reached.

    Attributes:
      products: of FLOPs in products with weights. attention: of FLOPs in attention. communication: of bandwidths
        between devices.
    """

    products: float
    attention: float
    communication: float


@dataclass(frozen=True, kw_only=True)
class Inside:
    """What is in the passes of a module beside products, forward and backward.

    Attributes:
      attention: FLOPs of a row in a layer. streamed: bytes of a row that one device reads and writes.
    """

    attention: tuple[float, float]
    streamed: tuple[Shares, Shares]


def streamed_apart(tokens: float, width: int, tp: int) -> tuple[float, float]:
    """Bytes of a layer with a kernel for each operation and no sequence parallelism: tp cuts the hidden units alone."""
    ahead, back = (
        2 * (NORM[way] + BIAS[way] + DROPOUT[way] + SUM[way]) + HIDDEN * (BIAS[way] + GELU[way]) / tp
        for way in (False, True)
    )
    return ahead * tokens * width, back * tokens * width


def streamed_fused(tokens: float, width: int, tp: int) -> tuple[float, float]:
    """Bytes of a layer with fused kernels and sequence parallelism."""
    ahead = 2 * (NORM[0] + FUSED[0]) + HIDDEN * GELU[0]
    back = 2 * (NORM[1] + FUSED[1] + SUM[1]) + HIDDEN * GELU[1]
    return ahead * tokens * width / tp, back * tokens * width / tp


@dataclass(frozen=True, kw_only=True)
class MegatronClock(AnalyticClock):
    """`AnalyticClock` with what is `inside` modules; its `efficiency` is that of products and of communication.

    attention: share of FLOPs that attention reaches.
    """

    attention: float
    inside: Mapping[str, Inside] = field(hash=False)

    def stage(self, module: str, part: Part, *, rows: float, width: int, tp: int) -> Pass:
        """A microbatch of `rows` rows of `width` on one dp replica of a stage."""
        took = super().stage(module, part, rows=rows, width=width, tp=tp)
        slow = self.attention_pass(module, part, rows=rows, width=width, tp=tp)
        quick = self.attention / self.efficiency.of(module)
        scale = rows * width / self.work.modules[module].width
        ahead, back = (one.of(part) * scale / self.accelerator.bandwidth for one in self.inside[module].streamed)
        return Pass(
            forward=took.forward + slow.forward * (1 - quick) + ahead,
            backward=took.backward + slow.backward * (1 - quick) + back,
        )

    def attention_pass(self, module: str, part: Part, *, rows: float, width: int, tp: int) -> Pass:
        """What attention takes of it."""
        scale = rows * width / self.work.modules[module].width
        rate = tp * self.accelerator.flops * self.attention
        ahead, back = (flops * part.layers * scale / rate for flops in self.inside[module].attention)
        return Pass(forward=ahead, backward=back)
