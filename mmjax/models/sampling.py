"""The choice of the next token from logits whose vocabulary is split over tp.

Random numbers are a function of (seed, place in the answer, token of the vocabulary), so that results depend neither on
the layout nor on other rows.

Shapes: B rows, V vocabulary local to this rank.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from mmjax import jax_compat
from mmjax.mesh.spread import Axes
from mmjax.models.vocabulary import best_token, cross_entropy

_BITS = 32


class SamplingParams(NamedTuple):
    """Sampling parameters of the next token of each row.

    Attributes:
      last: index of the row's last token among the computed tokens.
      temperature: the divisor of logits; 0 selects the most likely token.
      top_p: nucleus sampling from the most likely tokens whose probabilities sum up to this; 1 is all tokens.
      seed: the seed of random numbers.
      number: the number of tokens that the answer has already.
    """

    last: Int[Array, " B"]
    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    seed: UInt[Array, " B"]
    number: Int[Array, " B"]


def next_token(
    logits_BV: Float[Array, "B V"], choice: SamplingParams, axes: Axes
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The next token of each row, and its log-probability under the model, without temperature and ``top_p``.

    To be called inside ``shard_map``; both results are equal on all tp ranks.

    Args:
      logits_BV: fp32 logits of this rank's part of the vocabulary, with padding entries of -1e30.
      choice: sampling parameters of each row, arrays ``[B]``: a temperature of 0 gives the most likely token. ``last``
        is not read.
      axes: mesh axes by role, such as ``Axes()``; the vocabulary is split over ``axes.tp``.
    """
    is_drawn_B = choice.temperature > 0

    def with_noise(logits_BV: Array) -> Array:
        scaled_BV = logits_BV / jnp.where(is_drawn_B, choice.temperature, 1.0)[:, None]
        likely_BV = jnp.where(_is_likely(scaled_BV, choice.top_p, axes), scaled_BV, jnp.float32(-1e30))
        # The largest of logits with Gumbel noise is a sample of their softmax.
        return jnp.where(is_drawn_B[:, None], likely_BV + _noise(choice, logits_BV.shape[1], axes), logits_BV)

    score_BV = lax.cond(jnp.any(is_drawn_B), with_noise, lambda logits_BV: logits_BV, logits_BV)
    token_B1 = best_token(score_BV[:, None], axes)
    return token_B1[:, 0], -cross_entropy(logits_BV[:, None], token_B1, axes)[:, 0]


def _noise(choice: SamplingParams, count: int, axes: Axes) -> Float[Array, "B V"]:
    """Gumbel noise of each token, independent of how the vocabulary is split."""
    index_V = lax.axis_index(axes.tp) * count + jnp.arange(count)

    def of_row(seed: Array, number: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), number)
        return jax.vmap(lambda index: jax.random.gumbel(jax.random.fold_in(key, index)))(index_V)

    return jax.vmap(of_row)(choice.seed, choice.number)


def _is_likely(logits_BV: Array, top_p_B: Array, axes: Axes) -> Array:
    """Whether each token is in the nucleus: the least set of tokens with a total probability of ``top_p``.

    Tokens with equal logits are all in it or all outside. The least logit in the nucleus is determined bit by bit, so
    that the vocabulary is neither sorted nor gathered.
    """
    top_B1 = lax.pmax(jnp.max(logits_BV, axis=1, keepdims=True), axes.tp)
    mass_BV = jnp.exp(logits_BV - top_B1)
    mass_BV = mass_BV / lax.psum(jnp.sum(mass_BV, axis=1, keepdims=True), axes.tp)
    uint_BV = _as_ordered_uint(logits_BV)

    def step(number: Array, threshold_B: Array) -> Array:
        candidate_B = threshold_B | (jnp.uint32(1) << (_BITS - 1 - number).astype(jnp.uint32))
        mass_B = lax.psum(jnp.sum(jnp.where(uint_BV >= candidate_B[:, None], mass_BV, 0.0), axis=1), axes.tp)
        return jnp.where(mass_B >= top_p_B, candidate_B, threshold_B)

    threshold_B = jax_compat.to_varying(jnp.zeros(len(top_p_B), jnp.uint32), sorted(jax_compat.varying_axes(top_p_B)))
    return uint_BV >= lax.fori_loop(0, _BITS, step, threshold_B)[:, None]


def _as_ordered_uint(x: Array) -> UInt[Array, ...]:
    """Unsigned integers with the same order as the floats."""
    bits, sign = lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32(1 << (_BITS - 1))
    return jnp.where(bits & sign, ~bits, bits | sign)
