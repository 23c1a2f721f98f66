"""Attention in plain XLA, on any device.

Shapes: B rows, T tokens, H query heads, G key/value heads, K head width (all local to this rank).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.attention.tokens import Tokens

MaskKind = Literal["causal", "full"]


def attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGK: Float[Array, "B T G K"],
    tokens: Tokens,
    kind: MaskKind,
    window: int = 0,
    grid_window: int = 0,
) -> Float[Array, "B T H K"]:
    """Grouped-query attention among the tokens of one segment.

    Query head ``h`` reads key head ``h // (H/G)``. Scores and the softmax are fp32.

    Args:
      q_BTHK, k_BTGK, v_BTGK: rotated queries, keys, and values; H is a multiple of G.
      tokens: their segments and order; the outputs of padding are finite and unused.
      kind: ``causal`` (a token sees itself and the tokens of its segment that are before it in order) or ``full``.
      window: under ``causal``, a token sees only those that are less than this before it in order; 0 means all.
      grid_window: a token sees only those in its own window, where windows of this edge cut its segment along every
        axis of its positions; 0 means all.

    Raises:
      ValueError: there is a window and the mask is not causal, or one of a grid and the stage reads no positions.
    """
    if window and kind != "causal":
        raise ValueError(f"window={window}: a mask that is {kind!r} has none; use 'causal', or a window of 0")
    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    q_BTGRK = q_BTHK.reshape(B, T, G, H // G, K)
    scores_BGRTS = jnp.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BTGK, preferred_element_type=jnp.float32) * K**-0.5
    allowed_BTS = tokens.segments_BT[:, :, None] == tokens.segments_BT[:, None, :]
    if kind == "causal":
        before_BTS = tokens.order_BT[:, :, None] - tokens.order_BT[:, None, :]
        allowed_BTS &= (before_BTS >= 0) & (before_BTS < window) if window else before_BTS >= 0
    if grid_window:
        places_BTA = tokens.positions.reshape(B, T, -1) // grid_window
        for axis in range(places_BTA.shape[-1]):
            allowed_BTS &= places_BTA[:, :, None, axis] == places_BTA[:, None, :, axis]
    # A finite floor keeps rows without any allowed key free of NaN.
    scores_BGRTS = jnp.where(allowed_BTS[:, None, None], scores_BGRTS, jnp.float32(-1e30))
    weights_BGRTS = jax.nn.softmax(scores_BGRTS, axis=-1).astype(v_BTGK.dtype)
    return jnp.einsum("bgrts,bsgk->btgrk", weights_BGRTS, v_BTGK).reshape(B, T, H, K)
