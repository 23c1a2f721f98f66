"""Attention in plain XLA, on any device.

Shapes: B rows, T tokens, H query heads, G key/value heads, K head width (all local to this rank).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MaskKind = Literal["causal", "full"]


def attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGK: Float[Array, "B T G K"],
    segments_BT: Int[Array, "B T"],
    kind: MaskKind,
) -> Float[Array, "B T H K"]:
    """Grouped-query attention among the tokens of one segment.

    Query head ``h`` reads key head ``h // (H/G)``. Scores and the softmax are fp32.

    Args:
      q_BTHK, k_BTGK, v_BTGK: rotated queries, keys, and values; H is a multiple of G.
      segments_BT: segment of each token; segment 0 is padding, whose outputs are finite and unused.
      kind: ``causal`` (a token sees itself and earlier tokens of its segment) or ``full``.
    """
    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    q_BTGRK = q_BTHK.reshape(B, T, G, H // G, K)
    scores_BGRTS = jnp.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BTGK, preferred_element_type=jnp.float32) * K**-0.5
    allowed_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    if kind == "causal":
        allowed_BTS &= jnp.tril(jnp.ones((T, T), bool))
    # A finite floor keeps rows without any allowed key free of NaN.
    scores_BGRTS = jnp.where(allowed_BTS[:, None, None], scores_BGRTS, jnp.float32(-1e30))
    weights_BGRTS = jax.nn.softmax(scores_BGRTS, axis=-1).astype(v_BTGK.dtype)
    return jnp.einsum("bgrts,bsgk->btgrk", weights_BGRTS, v_BTGK).reshape(B, T, H, K)
