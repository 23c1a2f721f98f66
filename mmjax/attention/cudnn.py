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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.attention import blockwise, kernels
from mmjax.attention.kernels import Asked, runs, starts
from mmjax.attention.mask import Mask
from mmjax.attention.settings import LIBRARIES
from mmjax.attention.tokens import Tokens

RUNS = 16
"""Runs of a row, on average over the rows of a rank, that packed rows may have, padding among them."""
_PACKED_ON = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "B300", "GB200", "GB300")
"""Devices whose cuDNN takes packed rows, by a word of their names: from compute capability 9.0."""


def refusal(asked: Asked) -> str:
    """Why cuDNN does not compute this; "" where it does."""
    return kernels.refusal(asked, LIBRARIES["cudnn"], "NVIDIA")


def attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGK: Float[Array, "B T G K"],
    tokens: Tokens,
    mask: Mask,
    keys: Tokens | None = None,
) -> Float[Array, "B T H K"]:
    """What ``blockwise.attention`` gives, for calls without ``refusal``."""
    del keys  # the queries' own
    asked = Asked.of(q_BTHK, k_BTGK, tokens, mask)
    packed = not asked.window and asked.named(*_PACKED_ON)
    call = Call(mask.kind == "causal", asked.window, packed)
    return _attend(call, *jax_compat.alike(q_BTHK, k_BTGK, v_BTGK, tokens.segments_BT))


@dataclass(frozen=True)
class Call:
    """What is static of a call.

    Attributes:
      causal: whether a token sees none behind itself.
      window: tokens that it sees, itself included; 0 means all.
      packed: whether the device takes packed rows.
    """

    causal: bool
    window: int
    packed: bool

    @property
    def mask(self) -> Mask:
        """The same for blockwise attention."""
        return Mask("causal" if self.causal else "full", self.window)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, q: Array, k: Array, v: Array, segments_BT: Array) -> Array:
    return _forward(call, q, k, v, segments_BT)[0]


def _forward(call: Call, q: Array, k: Array, v: Array, segments_BT: Array) -> tuple[Array, Any]:
    ways = (_whole_forward, *(_packed_forward,) * call.packed, _blockwise_forward)
    out, stats = lax.switch(_way(call, segments_BT), [partial(way, call) for way in ways], q, k, v, segments_BT)
    out, stats = checkpoint_name(out, blockwise.KEPT), checkpoint_name(stats, blockwise.KEPT)
    return out, (q, k, v, out, stats, segments_BT)


def _backward(call: Call, kept: Any, d_out: Array) -> tuple[Array | None, ...]:
    ways = (_whole_backward, *(_packed_backward,) * call.packed, _blockwise_backward)
    *kept, segments_BT = kept
    given = (*kept, d_out, segments_BT)
    return *lax.switch(_way(call, segments_BT), [partial(way, call) for way in ways], *given), None


_attend.defvjp(_forward, _backward)


def _way(call: Call, segments_BT: Int[Array, "B T"]) -> Int[Array, ""]:
    """The place of what is to run: for whole rows, for packed ones where cuDNN takes them, and blockwise."""
    starts_BT = starts(segments_BT)
    # Behind a row's first run there is padding alone. Under a causal mask tokens do not see it; a full mask shows it.
    other_BT = starts_BT[:, 1:] & (segments_BT[:, 1:] > 0) if call.causal else starts_BT[:, 1:]
    too_many = starts_BT.sum() > RUNS * len(segments_BT) if call.packed else False
    return other_BT.any().astype(jnp.int32) + (other_BT.any() & too_many)


# ---- rows of one segment ---------------------------------------------------------------------------------------------


def _whole_forward(call: Call, q: Array, k: Array, v: Array, segments_BT: Array) -> tuple[Array, Array]:
    out, stats_BHT = jax_compat.cudnn_forward(q, k, v, causal=call.causal, window=call.window)
    return out, _in_slots(stats_BHT)


def _whole_backward(
    call: Call, q: Array, k: Array, v: Array, out: Array, stats_NHT: Array, d_out: Array, segments_BT: Array
) -> tuple[Array, ...]:
    stats_BHT = stats_NHT[: len(q)]
    return jax_compat.cudnn_backward(q, k, v, out, stats_BHT, d_out, causal=call.causal, window=call.window)


def _in_slots(stats_BHT: Float[Array, "B H T"]) -> Float[Array, "N H T"]:
    """The numbers of rows in the first places of those of runs."""
    return jnp.pad(stats_BHT, [(0, (RUNS - 1) * len(stats_BHT)), (0, 0), (0, 0)])


# ---- packed rows -----------------------------------------------------------------------------------------------------


def _packed_forward(call: Call, q: Array, k: Array, v: Array, segments_BT: Array) -> tuple[Array, Array]:
    found = runs(segments_BT, RUNS * len(segments_BT))
    return jax_compat.cudnn_forward(q, k, v, found, causal=call.causal)


def _packed_backward(
    call: Call, q: Array, k: Array, v: Array, out: Array, stats_NHT: Array, d_out: Array, segments_BT: Array
) -> tuple[Array, ...]:
    found = runs(segments_BT, RUNS * len(segments_BT))
    return jax_compat.cudnn_backward(q, k, v, out, stats_NHT, d_out, found, causal=call.causal)


# ---- rows of many runs -----------------------------------------------------------------------------------------------


def _blockwise_forward(call: Call, q: Array, k: Array, v: Array, segments_BT: Array) -> tuple[Array, Array]:
    tokens = {"segments": segments_BT}
    out, stats_BHT = blockwise.forward(call.mask, q, k, v, tokens, tokens)
    return out, _in_slots(stats_BHT)


def _blockwise_backward(
    call: Call, q: Array, k: Array, v: Array, out: Array, stats_NHT: Array, d_out: Array, segments_BT: Array
) -> tuple[Array, ...]:
    tokens, stats_BHT = {"segments": segments_BT}, stats_NHT[: len(q)]
    gradients = blockwise.backward(call.mask, q, k, v, tokens, tokens, out, stats_BHT, d_out)
    return tuple(d.astype(x.dtype) for d, x in zip(gradients, (q, k, v), strict=True))
