"""The choice of the next token from logits whose vocabulary is split over tp.

Random numbers belong to (seed, place in the answer, token of the vocabulary), so that a choice depends neither on the
layout nor on the rows beside.

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
from mmjax.models.layers import best_token, cross_entropy

_BITS = 32


class Choice(NamedTuple):
    """How the next token of each row is chosen.

    Attributes:
      last: place of the row's last token among the tokens that are computed.
      temperature: what logits are divided by; 0 takes the likeliest token.
      top_p: the likeliest tokens that make up this probability together are chosen among; 1 is all.
      seed: of the random numbers.
      number: tokens that the answer has already.
    """

    last: Int[Array, " B"]
    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    seed: UInt[Array, " B"]
    number: Int[Array, " B"]


def next_token(
    logits_BV: Float[Array, "B V"], choice: Choice, axes: Axes
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The next token of each row, and its log-probability under the model: whatever temperature and ``top_p`` are."""
    is_drawn_B = choice.temperature > 0

    def drawn(logits_BV: Array) -> Array:
        cold_BV = logits_BV / jnp.where(is_drawn_B, choice.temperature, 1.0)[:, None]
        kept_BV = jnp.where(_is_likely(cold_BV, choice.top_p, axes), cold_BV, jnp.float32(-1e30))
        # The largest of logits with Gumbel noise is a sample of their softmax.
        return jnp.where(is_drawn_B[:, None], kept_BV + _noise(choice, logits_BV.shape[1], axes), logits_BV)

    wanted_BV = lax.cond(jnp.any(is_drawn_B), drawn, lambda logits_BV: logits_BV, logits_BV)
    token_B1 = best_token(wanted_BV[:, None], axes)
    return token_B1[:, 0], -cross_entropy(logits_BV[:, None], token_B1, axes)[:, 0]


def _noise(choice: Choice, count: int, axes: Axes) -> Float[Array, "B V"]:
    """Gumbel noise of each token; that of a token is the same wherever the vocabulary is cut."""
    index_V = lax.axis_index(axes.tp) * count + jnp.arange(count)

    def of_row(seed: Array, number: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), number)
        return jax.vmap(lambda index: jax.random.gumbel(jax.random.fold_in(key, index)))(index_V)

    return jax.vmap(of_row)(choice.seed, choice.number)


def _is_likely(logits_BV: Array, top_p_B: Array, axes: Axes) -> Array:
    """Whether a token is among the fewest that make up ``top_p`` together; equal ones are in or out together.

    The least logit among them is found bit by bit, so that the vocabulary is neither sorted nor brought together.
    """
    top_B1 = lax.pmax(jnp.max(logits_BV, axis=1, keepdims=True), axes.tp)
    mass_BV = jnp.exp(logits_BV - top_B1)
    mass_BV = mass_BV / lax.psum(jnp.sum(mass_BV, axis=1, keepdims=True), axes.tp)
    ordered_BV = _ordered(logits_BV)

    def step(number: Array, least_B: Array) -> Array:
        tried_B = least_B | (jnp.uint32(1) << (_BITS - 1 - number).astype(jnp.uint32))
        mass_B = lax.psum(jnp.sum(jnp.where(ordered_BV >= tried_B[:, None], mass_BV, 0.0), axis=1), axes.tp)
        return jnp.where(mass_B >= top_p_B, tried_B, least_B)

    least_B = jax_compat.to_varying(jnp.zeros(len(top_p_B), jnp.uint32), sorted(jax_compat.varying_axes(top_p_B)))
    return ordered_BV >= lax.fori_loop(0, _BITS, step, least_B)[:, None]


def _ordered(x: Array) -> UInt[Array, ...]:
    """Unsigned integers in the order of floats."""
    bits, sign = lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32(1 << (_BITS - 1))
    return jnp.where(bits & sign, ~bits, bits | sign)
