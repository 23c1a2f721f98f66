"""Attention whose gradient is written by hand: the one ``custom_vjp`` of all ways but the dense one.

A way says how forward and backward are computed. What is kept between them is queries, keys, values, what is known of
tokens, and what forward makes, under a name that checkpoint policies know.

Shapes: B rows, T tokens that ask, S tokens that are asked, H query heads, G key/value heads, K head width (all local to
this rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from mmjax import jax_compat
from mmjax.attention.mask import Mask
from mmjax.attention.tokens import Tokens

KEPT = "attention"
"""The name of what forward makes for backward, for checkpoint policies that keep products."""

Known = dict[str, Array]
"""Host inputs that describe tokens. Backward keeps these, and what a way has found out about them for all layers."""


def known(tokens: Tokens, mask: Mask) -> Known:
    """What a mask reads of tokens, of what is given.

    Raises:
      ValueError: it reads what is not known of them.
    """
    mask.columns(tokens)  # raises where something is missing
    names = (name for name in mask.reads if name in tokens.inputs)
    return {name: tokens.inputs[name] for name in names} | {"segments": tokens.segments_BT}


@dataclass(frozen=True)
class ByHand:
    """A way to compute attention, forward and backward.

    Attributes:
      mask: which tokens see which.
    """

    mask: Mask

    def forward(
        self, q_BTHK: Array, k_BSGK: Array, v_BSGK: Array, asking: Known, asked: Known
    ) -> tuple[Float[Array, "B T H K"], Any]:
        """The output, and what backward needs of the softmax.

        Args:
          q_BTHK, k_BSGK, v_BSGK: rotated queries, keys, and values; they vary over the same mesh axes.
          asking, asked: what is known of the queries' tokens and of the keys'.
        """
        raise NotImplementedError

    def backward(
        self,
        q_BTHK: Array,
        k_BSGK: Array,
        v_BSGK: Array,
        asking: Known,
        asked: Known,
        out_BTHK: Array,
        stats: Any,
        d_out_BTHK: Array,
    ) -> tuple[Array, Array, Array]:
        """Gradients of queries, keys and values, in fp32 or the dtype of these."""
        raise NotImplementedError


def attend(
    way: ByHand, q_BTHK: Array, k_BSGK: Array, v_BSGK: Array, asking: Known, asked: Known
) -> Float[Array, "B T H K"]:
    """Attention by a way; for arguments see ``ByHand.forward``."""
    q, k, v, *_ = jax_compat.alike(q_BTHK, k_BSGK, v_BSGK, *asking.values(), *asked.values())
    return _attend(way, q, k, v, asking, asked)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(way: ByHand, q: Array, k: Array, v: Array, asking: Known, asked: Known) -> Array:
    return way.forward(q, k, v, asking, asked)[0]


def _forward(way: ByHand, q: Array, k: Array, v: Array, asking: Known, asked: Known) -> tuple[Array, Any]:
    out, stats = jax.tree.map(lambda x: checkpoint_name(x, KEPT), way.forward(q, k, v, asking, asked))
    return out, (q, k, v, asking, asked, out, stats)


def _backward(way: ByHand, kept: Any, d_out: Array) -> tuple[Array | None, ...]:
    q, k, v, asking, asked, out, stats = kept
    gradients = way.backward(q, k, v, asking, asked, out, stats, d_out)
    return *(d.astype(x.dtype) for d, x in zip(gradients, (q, k, v), strict=True)), None, None


_attend.defvjp(_forward, _backward)
