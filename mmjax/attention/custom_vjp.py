"""The ``custom_vjp`` of all attention backends but the dense one.

An ``AttentionVjp`` computes forward and backward. The residuals are queries, keys, values, the host inputs of tokens,
and the results of forward; the latter have a name that checkpoint policies can save.

Shapes: B rows, T queries, S keys, H query heads, G key/value heads, K width of queries and keys, V of values (all
local to this rank).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from mmjax import jax_compat
from mmjax.attention.mask import Mask
from mmjax.attention.tokens import Tokens

RESIDUAL_NAME = "attention"
"""The checkpoint name of the residuals that forward computes, for policies that save results of products."""

TokenInfo = dict[str, Array]
"""Host inputs of tokens by name, and arrays that a backend precomputes from them for all layers; kept for backward."""


def token_info(tokens: Tokens, mask: Mask) -> TokenInfo:
    """The host inputs that the mask reads, by name, without "order" where it is the tokens' index.

    Always has "segments" ``[B, T]``; by the mask also "order", "positions", "is", "attends" and "items". Of
    ``tokens``, ``Tokens.of({"segments": segments_BT})`` is enough for masks without words and windows of a grid.

    Raises:
      ValueError: a host input is missing.
    """
    mask.inputs(tokens)  # raises where a host input is missing
    names = (name for name in mask.input_names if name in tokens.inputs)
    return {name: tokens.inputs[name] for name in names} | {"segments": tokens.segments_BT}


@dataclass(frozen=True)
class AttentionVjp:
    """Forward and backward of attention under a mask.

    Attributes:
      mask: the attention mask.
      soft_cap: c > 0 makes a score s into c · tanh(s / c) before the mask (Gemma Team, "Gemma 2", §2); 0 leaves it.
    """

    mask: Mask
    soft_cap: float = field(default=0.0, kw_only=True)

    def forward(
        self, q_BTHK: Array, k_BSGK: Array, v_BSGV: Array, query_tokens: TokenInfo, key_tokens: TokenInfo
    ) -> tuple[Float[Array, "B T H V"], Any]:
        """The output, and statistics of the softmax for backward: a tree of arrays whose structure depends on the
        class.

        Args:
          q_BTHK, k_BSGK, v_BSGV: queries and keys with rotary embedding, and values; they vary over the same mesh axes.
          query_tokens, key_tokens: results of ``token_info`` for the T queries and the S keys.
        """
        raise NotImplementedError

    def backward(
        self,
        q_BTHK: Array,
        k_BSGK: Array,
        v_BSGV: Array,
        query_tokens: TokenInfo,
        key_tokens: TokenInfo,
        out_BTHV: Array,
        stats: Any,
        d_out_BTHV: Array,
    ) -> tuple[Array, Array, Array]:
        """Gradients of queries, keys and values, in fp32 or in the dtypes of these.

        Args:
          q_BTHK, k_BSGK, v_BSGV, query_tokens, key_tokens: the arguments of ``forward``.
          out_BTHV, stats: the results of ``forward``.
          d_out_BTHV: the gradient of the output.
        """
        raise NotImplementedError


def attend(
    attention: AttentionVjp, q_BTHK: Array, k_BSGK: Array, v_BSGV: Array, query_tokens: TokenInfo, key_tokens: TokenInfo
) -> Float[Array, "B T H V"]:
    """Differentiable attention ``[B, T, H, V]``, by ``attention.forward`` and ``attention.backward``.

    Only queries, keys and values have gradients, in their dtypes.

    Args:
      attention: the backend with its mask, such as ``Blockwise(Mask("causal"))``.
      q_BTHK, k_BSGK, v_BSGV: queries and keys with rotary embedding, and values.
      query_tokens, key_tokens: results of ``token_info`` for the T queries and the S keys.
    """
    q, k, v, *_ = jax_compat.alike(q_BTHK, k_BSGK, v_BSGV, *query_tokens.values(), *key_tokens.values())
    return _attend(attention, q, k, v, query_tokens, key_tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    attention: AttentionVjp, q: Array, k: Array, v: Array, query_tokens: TokenInfo, key_tokens: TokenInfo
) -> Array:
    return attention.forward(q, k, v, query_tokens, key_tokens)[0]


def _forward(
    attention: AttentionVjp, q: Array, k: Array, v: Array, query_tokens: TokenInfo, key_tokens: TokenInfo
) -> tuple[Array, Any]:
    out, stats = jax.tree.map(
        lambda x: checkpoint_name(x, RESIDUAL_NAME), attention.forward(q, k, v, query_tokens, key_tokens)
    )
    return out, (q, k, v, query_tokens, key_tokens, out, stats)


def _backward(attention: AttentionVjp, residuals: Any, d_out: Array) -> tuple[Array | None, ...]:
    q, k, v, query_tokens, key_tokens, out, stats = residuals
    gradients = attention.backward(q, k, v, query_tokens, key_tokens, out, stats, d_out)
    return *(d.astype(x.dtype) for d, x in zip(gradients, (q, k, v), strict=True)), None, None


_attend.defvjp(_forward, _backward)
