"""Logits of a vocabulary that is split over tp, their softmax and their largest; inside ``shard_map``.

Shapes: B rows, T tokens, D width, V vocabulary local to this rank.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax.mesh.spread import Axes
from mmjax.models.layers import column_parallel

PADDED = np.float32(-1e30)
"""The logit of padding entries of the vocabulary: a finite stand-in for minus infinity."""


def vocabulary_logits(
    x_BTD: Array, head_DV: Array, axes: Axes, vocab: int, soft_cap: float = 0.0
) -> Float[Array, "B T V"]:
    """fp32 logits of this rank's part of the vocabulary; padded entries are ``PADDED``, -1e30.

    Args:
      x_BTD: hidden states; under sequence parallelism those of this rank's tokens, and the logits are of all tp ranks'
        tokens.
      head_DV: this rank's columns of the head.
      axes: mesh axes by role, such as ``Axes()``.
      vocab: the size of the complete vocabulary, without padding.
      soft_cap: c > 0 makes a logit x into c · tanh(x / c), in fp32; 0 leaves it.
    """
    (logits,) = column_parallel(x_BTD, [(head_DV, None)], axes)
    index_V = lax.axis_index(axes.tp) * head_DV.shape[1] + jnp.arange(head_DV.shape[1])
    return jnp.where(index_V < vocab, capped(logits.astype(jnp.float32), soft_cap), PADDED)


def capped(logits: Array, soft_cap: float) -> Array:
    """``c · tanh(logits / c)`` for a soft cap c above 0, else the logits."""
    return soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits


def log_sum_exp(logits_BTV: Array, axes: Axes) -> Float[Array, "B T"]:
    """Logarithm of the softmax's denominator of each token, from fp32 logits of this rank's part of the vocabulary.

    The result is equal on all tp ranks; ``axes`` are such as ``Axes()``.
    """
    top_BT = lax.pmax(lax.stop_gradient(jnp.max(logits_BTV, axis=-1)), axes.tp)
    return jnp.log(lax.psum(jnp.sum(jnp.exp(logits_BTV - top_BT[..., None]), axis=-1), axes.tp)) + top_BT


def cross_entropy(logits_BTV: Array, targets_BT: Int[Array, "B T"], axes: Axes) -> Float[Array, "B T"]:
    """Negative log likelihood in nats, from fp32 logits of this rank's part of the vocabulary; no rank ever has all
    logits.

    ``targets_BT`` are indices in the complete vocabulary. The result is equal on all tp ranks.
    """
    log_sum_BT = log_sum_exp(logits_BTV, axes)
    local = targets_BT - lax.axis_index(axes.tp) * logits_BTV.shape[-1]
    is_local = (local >= 0) & (local < logits_BTV.shape[-1])
    target_logit = jnp.take_along_axis(logits_BTV, jnp.clip(local, 0, logits_BTV.shape[-1] - 1)[..., None], axis=-1)[
        ..., 0
    ]
    return log_sum_BT - lax.psum(jnp.where(is_local, target_logit, 0.0), axes.tp)


def best_token(logits_BTV: Array, axes: Axes) -> Int[Array, "B T"]:
    """Index of the largest logit over the complete vocabulary, int32; the lowest index among equals.

    ``logits_BTV`` are of this rank's part of the vocabulary. The result is equal on all tp ranks.
    """
    best = jnp.argmax(logits_BTV, axis=-1)
    value = jnp.take_along_axis(logits_BTV, best[..., None], axis=-1)[..., 0]
    top = lax.pmax(value, axes.tp)
    index = (best + lax.axis_index(axes.tp) * logits_BTV.shape[-1]).astype(jnp.int32)
    return lax.pmin(jnp.where(value == top, index, jnp.iinfo(jnp.int32).max), axes.tp)
