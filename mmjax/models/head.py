"""Losses of a language model's tokens by chunks, so that the fp32 logits of all tokens are never in memory at once.

The residual of forward is one number a token, the logarithm of its softmax's denominator. Backward recomputes the
logits of a chunk, their gradient, and the chunk's contribution to the gradients. ADR 76 has the reasons. 16-bit logits
may be kept in place of it (ADR 113).

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
from mmjax.models.handles import opened, reducing
from mmjax.models.sequence_parallel import sp_gather
from mmjax.models.taps import HEAD, Summed, Value, with_mark
from mmjax.models.vocabulary import PADDED, capped
from mmjax.models.weight_gradients import computed_together

MIN_CHUNK_TOKENS = 1024
"""The minimal number of tokens of a chunk. For each chunk backward reads the head twice and adds to its gradient in
fp32: 12 bytes a weight, against 6 FLOPs a weight and token. With fewer than some 600 tokens an H100 waits for
memory."""
MIN_CHUNK_BYTES = 32 * 2**20
"""The minimal size of a chunk's fp32 logits in bytes: a small vocabulary needs no loop."""
TILE = 64
"""Larger chunks have a multiple of this many tokens, for matrix units."""
_LOG_SUM = "logarithm of this rank's part of the softmax's denominator"
_LOGITS = "logits of this rank's part of the vocabulary"
_keep = jax.checkpoint_policies.save_only_these_names(_LOG_SUM, _LOGITS)


class TokenLosses(NamedTuple):
    """Losses of each token's target, in nats.

    Attributes:
      cross_entropy: negative log likelihood.
      log_sum: logarithm of the softmax's denominator.
    """

    cross_entropy: Float[Array, "B T"]
    log_sum: Float[Array, "B T"]


def chunk_tokens(vocabulary: int) -> int:
    """The maximal number of tokens of a chunk, where a rank has ``vocabulary`` entries of the vocabulary.

    It is the larger of ``MIN_CHUNK_TOKENS``, 1024, and 2^23 // ``vocabulary``. Its fp32 logits have about
    ``MIN_CHUNK_BYTES`` for a small vocabulary; for others it has ``MIN_CHUNK_TOKENS``.
    """
    return max(MIN_CHUNK_TOKENS, MIN_CHUNK_BYTES // (4 * vocabulary))


def token_losses(
    x_BTD: Float[Array, "B T D"],
    head: Any,
    targets_BT: Int[Array, "B T"],
    axes: Axes,
    vocabulary: int,
    *,
    tied: bool = False,
    chunk: int = 0,
    keep_logits: bool = False,
    soft_cap: float = 0.0,
) -> TokenLosses:
    """Losses of tokens, with the vocabulary split over tp; padding entries have no probability and no gradient.

    The head's product is not one of ``taps``: a split backward would have to keep the gradient of the logits for W. The
    result is fp32 and equal on all tp ranks.

    Args:
      x_BTD: hidden states after the final norm, equal on all tp ranks; this rank's tokens under sequence parallelism.
      head: this rank's part of the head, an array ``[D, V]``, a handle, or a summed weight.
      targets_BT: targets of all tokens, as indices in the complete vocabulary.
      axes: mesh axes by role, such as ``Axes()``.
      vocabulary: the size of the complete vocabulary, without padding.
      tied: whether the head is an embedding table ``[V, D]``.
      chunk: the maximal number of tokens of a chunk; 0 stands for ``chunk_tokens``.
      keep_logits: whether backward reads the logits of forward; of fp32 hidden states it computes them again in any
        case. All tokens are one chunk then.
      soft_cap: c > 0 makes a logit x into c · tanh(x / c), in fp32; 0 leaves it.

    Returns:
      ``cross_entropy`` and ``log_sum``, the logarithm of the softmax's denominator, in nats, each ``[B, T]``.
    """

    weight, total = (head.weight, head.total) if isinstance(head, Summed) else (head, None)
    keep_logits = keep_logits and x_BTD.dtype.itemsize == 2

    @partial(jax.checkpoint, policy=_keep)  # the opened head and the gathered states are no residuals
    def losses(x_BTD: Array, weight: Any, total: Array | None, targets_BT: Array) -> TokenLosses:
        weight, x_BTD = opened(with_mark(weight, HEAD)), sp_gather(x_BTD, axes.sp)
        size = weight.shape[0 if tied else 1]
        start = lax.axis_index(axes.tp) * size
        max_tokens = targets_BT.size if keep_logits else chunk or chunk_tokens(size)
        x_CND, target_CN = _chunks(x_BTD, max_tokens), _chunks(targets_BT - start, max_tokens)
        alike = jax_compat.alike(x_CND, weight, target_CN, vocabulary - start)
        sums_and_logits: Any = _local_losses(_Head(tied, keep_logits, soft_cap), *alike, total)
        sums_BT, target_logit_BT = (
            y_CN.reshape(-1)[: targets_BT.size].reshape(targets_BT.shape) for y_CN in sums_and_logits
        )
        top_BT = lax.pmax(lax.stop_gradient(sums_BT), axes.tp)
        log_sum_BT = jnp.log(lax.psum(jnp.exp(sums_BT - top_BT), axes.tp)) + top_BT
        return TokenLosses(log_sum_BT - lax.psum(target_logit_BT, axes.tp), log_sum_BT)

    return losses(x_BTD, weight, total, targets_BT)


def _chunks(values: Array, max_tokens: int) -> Array:
    """Cuts ``[B, T, …]`` into the least number of equal chunks ``[C, N, …]``, padded with zeros at the end."""
    tokens = math.prod(values.shape[:2])
    count = -(-tokens // max_tokens)
    size = -(-tokens // count)
    if count > 1 and size > TILE:
        size = -(-size // TILE) * TILE
    flat = values.reshape(tokens, *values.shape[2:])
    if count * size > tokens:
        flat = jnp.pad(flat, [(0, count * size - tokens), *[(0, 0)] * (flat.ndim - 1)])
    return flat.reshape(count, size, *values.shape[2:])


class _Head(NamedTuple):
    """Whether the head is a table ``[V, D]`` and logits are kept, and their soft cap; see ``token_losses``."""

    tied: bool
    keep_logits: bool
    soft_cap: float


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _local_losses(
    kind: _Head, x_CND: Array, head: Array, target_CN: Array, valid: Array, total: Array | None
) -> tuple[Array, Array]:
    """For every token, the logarithm of this rank's part of the denominator, and its target's logit.

    The logit is 0 for targets in another rank's part of the vocabulary.

    Args:
      kind: the kind of head; logits that are kept are of one chunk.
      x_CND: hidden states.
      head: this rank's part of the head.
      target_CN: targets as indices in this rank's part of the vocabulary, out of range for targets of other ranks.
      valid: the number of entries of this part that are no padding.
      total: the sum of the head's gradients so far, fp32, to which backward adds; ``None`` where the head has a
        gradient of its own dtype.
    """

    def of_chunk(x_ND: Array, target_N: Array) -> tuple[Array, Array]:
        return _sum_and_target(kind, _logits(kind.tied, x_ND, head), target_N, valid)

    if len(x_CND) == 1:
        sums_N, target_logit_N = of_chunk(x_CND[0], target_CN[0])
        return sums_N[None], target_logit_N[None]
    return lax.map(lambda chunk: of_chunk(*chunk), (x_CND, target_CN))


def _forward(
    kind: _Head, x_CND: Array, head: Array, target_CN: Array, valid: Array, total: Array | None
) -> tuple[tuple[Array, Array], Any]:
    logits_NV: Any = None
    if kind.keep_logits:
        logits_NV = checkpoint_name(_logits(kind.tied, x_CND[0], head), _LOGITS)
        sums_CN, target_logit_CN = (y_N[None] for y_N in _sum_and_target(kind, logits_NV, target_CN[0], valid))
    else:
        sums_and_logits: Any = _local_losses(kind, x_CND, head, target_CN, valid, total)
        sums_CN, target_logit_CN = sums_and_logits
    sums_CN = checkpoint_name(sums_CN, _LOG_SUM)
    return (sums_CN, target_logit_CN), (x_CND, head, target_CN, valid, total, sums_CN, logits_NV)


def _backward(kind: _Head, residuals: tuple[Any, ...], cotangents: tuple[Array, Array]) -> Any:
    x_CND, head, target_CN, valid, total, sums_CN, kept_logits_NV = residuals

    def of_chunk(
        dtype: Any, x_ND: Array, target_N: Array, sums_N: Array, d_sums_N: Array, d_target_logit_N: Array
    ) -> Any:
        """Gradients of the chunk's hidden states and, in ``dtype``, of the head."""
        logits_NV = _capped(kind, kept_logits_NV if kind.keep_logits else _logits(kind.tied, x_ND, head))
        target_NV = jnp.arange(logits_NV.shape[1]) == target_N[:, None]
        d_logits_NV = jnp.exp(_masked(logits_NV, valid) - sums_N[:, None]) * d_sums_N[:, None]
        d_logits_NV += jnp.where(target_NV, d_target_logit_N[:, None], 0.0)
        if kind.soft_cap:
            d_logits_NV *= 1 - jnp.square(logits_NV / kind.soft_cap)
        d_logits_NV = d_logits_NV.astype(x_ND.dtype)
        a, b = (d_logits_NV, x_ND) if kind.tied else (x_ND, d_logits_NV)
        d_head = lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=dtype)
        return lax.dot_general(d_logits_NV, head, (((1,), (0 if kind.tied else 1,)), ((), ()))), d_head

    chunks = (x_CND, target_CN, sums_CN, *cotangents)
    if len(x_CND) == 1 and total is None:
        d_x_ND, d_head = of_chunk(head.dtype, *(value[0] for value in chunks))
        return d_x_ND[None], d_head, None, None, None

    def step(total: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        d_x_ND, d_head = of_chunk(jnp.float32, *chunk)
        return total + d_head, d_x_ND

    first = Value(head.shape, jnp.float32, jax_compat.varying_axes(head)).zeros() if total is None else total
    if len(x_CND) == 1:
        new_total, d_x_ND = step(first, tuple(value[0] for value in chunks))
        d_x_CND = d_x_ND[None]
    else:
        new_total, d_x_CND = lax.scan(step, first, chunks)
    if total is None:
        return d_x_CND, new_total.astype(head.dtype), None, None, None
    if reducing.value:  # else XLA would add to the sum, and reduce it, after all layers
        d_x_CND, new_total = computed_together([d_x_CND, new_total])
    return d_x_CND, None, None, None, new_total


_local_losses.defvjp(_forward, _backward)


def _logits(tied: bool, x_ND: Array, head: Array) -> Float[Array, "N V"]:
    """Logits of a chunk in the dtype of its hidden states."""
    return lax.dot_general(x_ND, head, (((1,), (1 if tied else 0,)), ((), ())))


def _capped(kind: _Head, logits_NV: Array) -> Array:
    """Logits in fp32, with the soft cap if there is one."""
    return capped(logits_NV.astype(jnp.float32), kind.soft_cap)


def _masked(logits_NV: Array, valid: Array) -> Float[Array, "N V"]:
    """fp32 logits, ``PADDED`` for padding entries of the vocabulary."""
    return jnp.where(jnp.arange(logits_NV.shape[1]) < valid, logits_NV, PADDED)


def _sum_and_target(kind: _Head, logits_NV: Array, target_N: Array, valid: Array) -> tuple[Array, Array]:
    """The logarithm of the denominator, and the target's logit or 0, of each token; see ``_local_losses``."""
    masked_NV, last = _masked(_capped(kind, logits_NV), valid), logits_NV.shape[1] - 1
    top_N = jnp.max(masked_NV, axis=-1)
    sums_N = jnp.log(jnp.sum(jnp.exp(masked_NV - top_N[:, None]), axis=-1)) + top_N
    target_logit_N = jnp.take_along_axis(logits_NV, jnp.clip(target_N, 0, last)[:, None], axis=1)[:, 0]
    is_here_N = (target_N >= 0) & (target_N <= last)
    return sums_N, jnp.where(is_here_N, _capped(kind, target_logit_N), 0.0)
