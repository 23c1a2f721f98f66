"""Attention by cuDNN's fused kernels on NVIDIA's GPUs, forward and backward.

cuDNN takes rows of one segment, and on newer devices packed rows as a list of runs, whose length is static. Which of
the two a microbatch has is data: a program has both, and blockwise attention for rows of still more runs, and computes
one of the three. What is kept for backward is the same for all: queries, keys, values, output, and one number a token
and head for each run that a row may have.

Shapes: B rows, T tokens, H query heads, G key/value heads, K head width (local to this rank); N = B · ``RUNS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.attention import blockwise, kernels
from mmjax.attention.by_hand import ByHand, Known
from mmjax.attention.kernels import Asked, Sequence, runs, starts
from mmjax.attention.mask import Mask
from mmjax.attention.settings import LIBRARIES

RUNS = 16
"""Runs of a row, on average over the rows of a rank, that packed rows may have, padding among them."""
_PACKED_ON = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "B300", "GB200", "GB300")
"""Devices whose cuDNN takes packed rows, by a word of their names: from compute capability 9.0."""


def refusal(asked: Asked) -> str:
    """Why cuDNN does not compute this; "" where it does."""
    return kernels.refusal(asked, LIBRARIES["cudnn"], "NVIDIA")


@dataclass(frozen=True)
class CuDNN(ByHand):
    """Attention among whole rows, forward and backward.

    Attributes:
      window: tokens that a token sees under a causal mask, itself included; 0 means all.
      packed: whether the device takes packed rows.
      by_index: whether tokens stand in the order of their rows.
    """

    window: int
    packed: bool
    by_index: bool = True

    @classmethod
    def of(cls, asked: Asked) -> CuDNN:
        """For calls without ``refusal``."""
        packed = not asked.window and asked.named(*_PACKED_ON)
        return cls(asked.mask, asked.window, packed, asked.by_index)

    @property
    def plain(self) -> Mask:
        """The mask of tokens in the order of their rows."""
        return Mask(self.mask.kind, self.window)

    @property
    def causal(self) -> bool:
        """Whether a token sees none behind itself."""
        return self.mask.kind == "causal"

    def forward(
        self, q_BTHK: Array, k_BSGK: Array, v_BSGK: Array, asking: Known, asked: Known
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "N H T"]]:
        """The output, and the logarithm of each softmax's denominator by run; see ``ByHand``."""
        del asking  # the keys' own
        ways = (_whole_forward, *(_packed_forward,) * self.packed, _blockwise_forward)
        segments_BT, (q, k, v), row = self._in_rows(asked, q_BTHK, k_BSGK, v_BSGK)
        out, stats = lax.switch(_way(self, segments_BT), [partial(way, self) for way in ways], q, k, v, segments_BT)
        return row.back(out) if row else out, stats

    def backward(
        self,
        q_BTHK: Array,
        k_BSGK: Array,
        v_BSGK: Array,
        asking: Known,
        asked: Known,
        out_BTHK: Array,
        stats: Float[Array, "N H T"],
        d_out_BTHK: Array,
    ) -> tuple[Array, Array, Array]:
        """See ``ByHand``."""
        del asking
        ways = (_whole_backward, *(_packed_backward,) * self.packed, _blockwise_backward)
        segments_BT, given, row = self._in_rows(asked, q_BTHK, k_BSGK, v_BSGK, out_BTHK, d_out_BTHK)
        *given, d_out = given
        gradients = lax.switch(
            _way(self, segments_BT), [partial(way, self) for way in ways], *given, stats, d_out, segments_BT
        )
        dq, dk, dv = (row.back(d) if row else d for d in gradients)
        return dq, dk, dv

    def _in_rows(self, asked: Known, *given: Array) -> tuple[Array, list[Array], Sequence | None]:
        """Segments and arrays in the order of rows, and what puts them back."""
        segments_BT, *rest = jax_compat.alike(asked["segments"], *given)
        if self.by_index:
            return segments_BT, rest, None
        row = Sequence.of(asked)
        return row.put(segments_BT), [row.put(x) for x in rest], row


def _way(call: CuDNN, segments_BT: Int[Array, "B T"]) -> Int[Array, ""]:
    """The place of what is to run: for whole rows, for packed ones where cuDNN takes them, and blockwise."""
    starts_BT = starts(segments_BT)
    # Behind a row's first run there is padding alone. Under a causal mask tokens do not see it; a full mask shows it.
    other_BT = starts_BT[:, 1:] & (segments_BT[:, 1:] > 0) if call.causal else starts_BT[:, 1:]
    too_many = starts_BT.sum() > RUNS * len(segments_BT) if call.packed else False
    return other_BT.any().astype(jnp.int32) + (other_BT.any() & too_many)


# ---- rows of one segment ---------------------------------------------------------------------------------------------


def _whole_forward(call: CuDNN, q: Array, k: Array, v: Array, segments_BT: Array) -> tuple[Array, Array]:
    out, stats_BHT = jax_compat.cudnn_forward(q, k, v, causal=call.causal, window=call.window)
    return out, _in_slots(stats_BHT)


def _whole_backward(
    call: CuDNN, q: Array, k: Array, v: Array, out: Array, stats_NHT: Array, d_out: Array, segments_BT: Array
) -> tuple[Array, ...]:
    stats_BHT = stats_NHT[: len(q)]
    return jax_compat.cudnn_backward(q, k, v, out, stats_BHT, d_out, causal=call.causal, window=call.window)


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
    out, stats_BHT = blockwise.forward(call.plain, q, k, v, tokens, tokens)
    return out, _in_slots(stats_BHT)


def _blockwise_backward(
    call: CuDNN, q: Array, k: Array, v: Array, out: Array, stats_NHT: Array, d_out: Array, segments_BT: Array
) -> tuple[Array, ...]:
    tokens, stats_BHT = {"segments": segments_BT}, stats_NHT[: len(q)]
    gradients = blockwise.backward(call.plain, q, k, v, tokens, tokens, out, stats_BHT, d_out)
    return tuple(d.astype(x.dtype) for d, x in zip(gradients, (q, k, v), strict=True))
