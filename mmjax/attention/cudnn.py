"""Attention by cuDNN's fused kernels on NVIDIA's GPUs, forward and backward.

cuDNN takes rows of one segment, and on newer devices packed rows as a list of runs, whose length is static. Which of
the two a microbatch has is data: a program has both, and blockwise attention for rows of still more runs, and computes
one of the three. What is kept for backward is the same for all: queries, keys, values, output, and one number a token
and head for each run that a row may have.

Shapes: B rows, T tokens, H query heads, G key/value heads, K head width (local to this rank); N = B · ``RUNS``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.attention import blockwise
from mmjax.attention.by_hand import Known
from mmjax.attention.kernels import Asked, Kernel, Sequence, runs, starts

RUNS = 16
"""Runs of a row, on average over the rows of a rank, that packed rows may have, padding among them."""
_PACKED_ON = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "B300", "GB200", "GB300")
"""Devices whose cuDNN takes packed rows, by a word of their names: from compute capability 9.0."""


@dataclass(frozen=True)
class CuDNN(Kernel):
    """Attention among whole rows, forward and backward.

    Attributes:
      packed: whether the device takes packed rows.
    """

    packed: bool = False
    LIBRARY = "cudnn"
    DEVICES = ("NVIDIA",)

    @classmethod
    def of(cls, asked: Asked) -> CuDNN:
        """For calls without ``refusal``."""
        return replace(super().of(asked), packed=not asked.window and asked.named(*_PACKED_ON))

    @property
    def causal(self) -> bool:
        """Whether a token sees none behind itself."""
        return self.mask.kind == "causal"

    def forward(
        self, q: Array, k: Array, v: Array, asking: Known, asked: Known
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "N H T"]]:
        """The output, and the logarithm of each softmax's denominator by run; see ``ByHand``."""
        del asking  # the keys' own
        ways = (_whole_forward, *(_packed_forward,) * self.packed, _blockwise_forward)
        row, segments_BT, *given = self._in_rows(asked, q, k, v)
        out, stats = lax.switch(_way(self, segments_BT), [partial(way, self) for way in ways], *given, segments_BT)
        return row.back(out), stats

    def backward(
        self, q: Array, k: Array, v: Array, asking: Known, asked: Known, out: Array, stats: Array, d_out: Array
    ) -> tuple[Array, Array, Array]:
        """See ``ByHand``."""
        del asking
        ways = (_whole_backward, *(_packed_backward,) * self.packed, _blockwise_backward)
        row, segments_BT, q, k, v, out, d_out = self._in_rows(asked, q, k, v, out, d_out)
        given = (q, k, v, out, stats, d_out, segments_BT)
        dq, dk, dv = map(row.back, lax.switch(_way(self, segments_BT), [partial(way, self) for way in ways], *given))
        return dq, dk, dv

    def _in_rows(self, asked: Known, *given: Array) -> tuple[Any, ...]:
        """What puts tokens in the order of their rows, then segments and arrays that it has put so."""
        row = Sequence.of(asked, by_index=self.by_index)
        return row, *map(row.put, jax_compat.alike(asked["segments"], *given))


def _way(call: CuDNN, segments_BT: Int[Array, "B T"]) -> Int[Array, ""]:
    """The place of what is to run: for whole rows, for packed ones where cuDNN takes them, and blockwise."""
    starts_BT = starts(segments_BT)
    # Behind a row's first run there is padding alone. Under a causal mask tokens do not see it; a full mask shows it.
    other_BT = starts_BT[:, 1:] & (segments_BT[:, 1:] > 0) if call.causal else starts_BT[:, 1:]
    too_many = starts_BT.sum() > RUNS * len(segments_BT) if call.packed else False
    return other_BT.any().astype(jnp.int32) + (other_BT.any() & too_many)


# ---- rows of one segment ---------------------------------------------------------------------------------------------


def _whole_forward(call: CuDNN, q: Array, k: Array, v: Array, segments_BT: Array) -> tuple[Array, Array]:
    out, stats_BHT = jax_compat.cudnn_forward(q, k, v, causal=call.causal, window=call.mask.window)
    return out, _in_slots(stats_BHT)


def _whole_backward(
    call: CuDNN, q: Array, k: Array, v: Array, out: Array, stats_NHT: Array, d_out: Array, segments_BT: Array
) -> tuple[Array, ...]:
    stats_BHT = stats_NHT[: len(q)]
    return jax_compat.cudnn_backward(q, k, v, out, stats_BHT, d_out, causal=call.causal, window=call.mask.window)


def _in_slots(stats_BHT: Float[Array, "B H T"]) -> Float[Array, "N H T"]:
    """The numbers of rows in the first places of those of runs."""
    return jnp.pad(stats_BHT, [(0, (RUNS - 1) * len(stats_BHT)), (0, 0), (0, 0)])


# ---- packed rows -----------------------------------------------------------------------------------------------------


def _packed_forward(call: CuDNN, q: Array, k: Array, v: Array, segments_BT: Array) -> tuple[Array, Array]:
    found = runs(segments_BT, RUNS * len(segments_BT))
    return jax_compat.cudnn_forward(q, k, v, found, causal=call.causal)


def _packed_backward(
    call: CuDNN, q: Array, k: Array, v: Array, out: Array, stats_NHT: Array, d_out: Array, segments_BT: Array
) -> tuple[Array, ...]:
    found = runs(segments_BT, RUNS * len(segments_BT))
    return jax_compat.cudnn_backward(q, k, v, out, stats_NHT, d_out, found, causal=call.causal)


# ---- rows of many runs -----------------------------------------------------------------------------------------------


def _blockwise_forward(call: CuDNN, q: Array, k: Array, v: Array, segments_BT: Array) -> tuple[Array, Array]:
    tokens = {"segments": segments_BT}
    out, stats_BHT = blockwise.forward(call.mask, q, k, v, tokens, tokens)
    return out, _in_slots(stats_BHT)


def _blockwise_backward(
    call: CuDNN, q: Array, k: Array, v: Array, out: Array, stats_NHT: Array, d_out: Array, segments_BT: Array
) -> tuple[Array, ...]:
    tokens, stats_BHT = {"segments": segments_BT}, stats_NHT[: len(q)]
    gradients = blockwise.backward(call.mask, q, k, v, tokens, tokens, out, stats_BHT, d_out)
    return tuple(d.astype(x.dtype) for d, x in zip(gradients, (q, k, v), strict=True))
