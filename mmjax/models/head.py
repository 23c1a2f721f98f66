"""Losses of a language model's tokens by chunks of tokens, so that logits of all tokens never lie in memory at once.

Forward keeps one number a token, the logarithm of its softmax's denominator; backward makes the logits of a chunk
again, their gradient from these, and from that the chunk's share of the gradients. ADR 76 has the reasons.

Shapes: B rows, T tokens of a row, C chunks of N tokens each, D width, V vocabulary local to this rank. The head is
``[D, V]``, or ``[V, D]`` where it is a tied table.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.mesh.spread import Axes
from mmjax.models.handles import opened
from mmjax.models.layers import PADDED
from mmjax.models.shared import gathered
from mmjax.models.taps import Value

LEAST_TOKENS = 1024
"""Tokens of a chunk, at least. For each chunk backward reads the head twice and adds to its gradient in fp32: 12 bytes
a weight, against 6 FLOPs a weight and token. So with fewer than some 600 tokens an H100 would wait for its memory."""
LEAST_BYTES = 32 * 2**20
"""Bytes of a chunk's fp32 logits below which more tokens are taken: a small vocabulary needs no loop."""
TILE = 64
"""Tokens of larger chunks are a multiple of this, as matrix units like it."""
_LOG_SUM = "logarithm of this rank's part of the softmax's denominator"
_keep = jax.checkpoint_policies.save_only_these_names(_LOG_SUM)


class TokenLosses(NamedTuple):
    """What a language model's logits say of each token's target, in nats.

    Attributes:
      cross_entropy: negative log likelihood.
      log_sum: logarithm of the softmax's denominator.
    """

    cross_entropy: Float[Array, "B T"]
    log_sum: Float[Array, "B T"]


def chunk_tokens(vocabulary: int) -> int:
    """The most tokens of a chunk, for a rank's part of the vocabulary of this size."""
    return max(LEAST_TOKENS, LEAST_BYTES // (4 * vocabulary))


def token_losses(
    x_BTD: Float[Array, "B T D"],
    head: Any,
    targets_BT: Int[Array, "B T"],
    axes: Axes,
    vocabulary: int,
    *,
    tied: bool = False,
    chunk: int = 0,
) -> TokenLosses:
    """Losses of tokens, with the vocabulary split over tp; what pads it has no probability and no gradient.

    No product of ``taps``: a split backward leaves nothing of it to W, for which it would keep the logits' gradient.

    Args:
      x_BTD: hidden states after the final norm, equal on all tp ranks; or this rank's where they share the tokens.
      head: this rank's part of the head, an array or a handle.
      targets_BT: the targets of all of these tokens, in the whole vocabulary.
      axes: names of the mesh's axes.
      vocabulary: size of the whole vocabulary, without what pads it.
      tied: whether the head is a table ``[V, D]``.
      chunk: the most tokens of a chunk; 0 chooses (see ``chunk_tokens``).
    """

    @partial(jax.checkpoint, policy=_keep)  # a head that is opened, or spread over axes, and gathered states: not kept
    def found(x_BTD: Array, head: Any, targets_BT: Array) -> TokenLosses:
        head, x_BTD = opened(head), gathered(x_BTD, axes.sp)
        size = head.shape[0 if tied else 1]
        start = lax.axis_index(axes.tp) * size
        x_CND = _chunks(x_BTD, chunk or chunk_tokens(size))
        places_CN = _chunks(targets_BT - start, chunk or chunk_tokens(size))
        each: Any = _on_this_rank(tied, *jax_compat.alike(x_CND, head, places_CN, vocabulary - start))
        sums_BT, picked_BT = (y_CN.reshape(-1)[: targets_BT.size].reshape(targets_BT.shape) for y_CN in each)
        top_BT = lax.pmax(lax.stop_gradient(sums_BT), axes.tp)
        log_sum_BT = jnp.log(lax.psum(jnp.exp(sums_BT - top_BT), axes.tp)) + top_BT
        return TokenLosses(log_sum_BT - lax.psum(picked_BT, axes.tp), log_sum_BT)

    return found(x_BTD, head, targets_BT)


def _chunks(values: Array, most: int) -> Array:
    """Values of tokens ``[B, T, …]`` in as few chunks of equal size as there can be, zeros behind the last token."""
    tokens = math.prod(values.shape[:2])
    count = -(-tokens // most)
    each = -(-tokens // count)
    if count > 1 and each > TILE:
        each = -(-each // TILE) * TILE
    flat = values.reshape(tokens, *values.shape[2:])
    if count * each > tokens:
        flat = jnp.pad(flat, [(0, count * each - tokens), *[(0, 0)] * (flat.ndim - 1)])
    return flat.reshape(count, each, *values.shape[2:])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_this_rank(tied: bool, x_CND: Array, head: Array, places_CN: Array, real: Array) -> tuple[Array, Array]:
    """Of every token: the logarithm of this rank's part of the denominator, and the target's logit or 0.

    Args:
      tied: see ``token_losses``.
      x_CND: hidden states.
      head: this rank's part of the head.
      places_CN: places of the targets in this rank's part of the vocabulary; others are outside of it.
      real: how many entries of this part do not pad the vocabulary.
    """

    def of_chunk(x_ND: Array, places_N: Array) -> tuple[Array, Array]:
        logits_NV = _logits(tied, x_ND, head, real)
        top_N = jnp.max(logits_NV, axis=-1)
        sums_N = jnp.log(jnp.sum(jnp.exp(logits_NV - top_N[:, None]), axis=-1)) + top_N
        last = logits_NV.shape[1] - 1
        picked_N = jnp.take_along_axis(logits_NV, jnp.clip(places_N, 0, last)[:, None], axis=1)[:, 0]
        return sums_N, jnp.where((places_N >= 0) & (places_N <= last), picked_N, 0.0)

    if len(x_CND) == 1:
        sums_N, picked_N = of_chunk(x_CND[0], places_CN[0])
        return sums_N[None], picked_N[None]
    return lax.map(lambda given: of_chunk(*given), (x_CND, places_CN))


def _forward(tied: bool, x_CND: Array, head: Array, places_CN: Array, real: Array) -> tuple[tuple[Array, Array], Any]:
    each: Any = _on_this_rank(tied, x_CND, head, places_CN, real)
    sums_CN, picked_CN = checkpoint_name(each[0], _LOG_SUM), each[1]
    return (sums_CN, picked_CN), (x_CND, head, places_CN, real, sums_CN)


def _backward(tied: bool, kept: tuple[Array, ...], cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    x_CND, head, places_CN, real, sums_CN = kept

    def of_chunk(dtype: Any, x_ND: Array, places_N: Array, sums_N: Array, of_sums_N: Array, of_picked_N: Array) -> Any:
        """Gradients of the chunk's hidden states and, in ``dtype``, of the head."""
        logits_NV = _logits(tied, x_ND, head, real)
        target_NV = jnp.arange(logits_NV.shape[1]) == places_N[:, None]
        slope_NV = jnp.exp(logits_NV - sums_N[:, None]) * of_sums_N[:, None]
        slope_NV = (slope_NV + jnp.where(target_NV, of_picked_N[:, None], 0.0)).astype(x_ND.dtype)
        a, b = (slope_NV, x_ND) if tied else (x_ND, slope_NV)
        of_head = lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=dtype)
        return lax.dot_general(slope_NV, head, (((1,), (0 if tied else 1,)), ((), ()))), of_head

    given = (x_CND, places_CN, sums_CN, *cotangents)
    if len(x_CND) == 1:
        of_x_ND, of_head = of_chunk(head.dtype, *(value[0] for value in given))
        return of_x_ND[None], of_head, None, None

    def step(total: Array, given: tuple[Array, ...]) -> tuple[Array, Array]:
        of_x_ND, of_head = of_chunk(jnp.float32, *given)
        return total + of_head, of_x_ND

    zeros = Value(head.shape, jnp.float32, jax_compat.varying_axes(head)).zeros()
    total, of_x_CND = lax.scan(step, zeros, given)
    return of_x_CND, total.astype(head.dtype), None, None


_on_this_rank.defvjp(_forward, _backward)


def _logits(tied: bool, x_ND: Array, head: Array, real: Array) -> Float[Array, "N V"]:
    """fp32 logits of a chunk, ``PADDED`` where they pad the vocabulary."""
    logits_NV = lax.dot_general(x_ND, head, (((1,), (1 if tied else 0,)), ((), ())))
    return jnp.where(jnp.arange(logits_NV.shape[1]) < real, logits_NV.astype(jnp.float32), PADDED)
