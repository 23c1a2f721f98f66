"""Dense attention, with scores of complete rows: the reference for the other backends.

Shapes: B rows, T queries, S keys, H query heads, G key/value heads, K width of queries and
keys, V of values (all local to this rank).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.attention.mask import Mask
from mmjax.attention.tokens import Tokens


def dense_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGV: Float[Array, "B S G V"],
    tokens: Tokens,
    mask: Mask,
    keys: Tokens | None = None,
    soft_cap: float = 0.0,
) -> Float[Array, "B T H V"]:
    """Grouped-query attention from an array of the scores of all pairs of tokens, in the dtype of ``v_BSGV``.

    Args:
      q_BTHK, k_BSGK, v_BSGV: queries and keys with rotary embedding, and values; H is a multiple of G.
      tokens: the queries' tokens, such as ``Tokens.of({"segments": segments_BT})``.
      mask: the attention mask, such as ``Mask("causal")``.
      keys: the keys' tokens; by default the queries' tokens.
      soft_cap: c > 0 makes a score s into c · tanh(s / c); 0 leaves it.

    Raises:
      ValueError: a host input of the mask is missing.
    """
    B, T, H, K = q_BTHK.shape
    G = k_BSGK.shape[2]
    q_BTGRK = q_BTHK.reshape(B, T, G, H // G, K)
    scores_BGRTS = jnp.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BSGK, preferred_element_type=jnp.float32) * K**-0.5
    if soft_cap:
        scores_BGRTS = soft_cap * jnp.tanh(scores_BGRTS / soft_cap)
    allowed_BTS = mask.allowed(mask.inputs(tokens), mask.inputs(keys or tokens))
    # A finite floor keeps rows without any allowed key free of NaN.
    scores_BGRTS = jnp.where(allowed_BTS[:, None, None], scores_BGRTS, jnp.float32(-1e30))
    weights_BGRTS = jax.nn.softmax(scores_BGRTS, axis=-1).astype(v_BSGV.dtype)
    return jnp.einsum("bgrts,bsgv->btgrv", weights_BGRTS, v_BSGV).reshape(B, T, H, v_BSGV.shape[-1])
