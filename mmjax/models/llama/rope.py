"""Rotary embedding of Llama-family language models, with scaled frequencies for longer contexts.

Shapes: B rows, T tokens, H heads, K width of the rotated part of a head. A frequency is in radians a position.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmjax.models.layers import apply_rotary, frequencies
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.runs import PROPORTIONAL


def rotate(c: DecoderConfig, x_BTHK: Float[Array, "B T H K"], positions: Int[Array, "B T *A"]) -> Array:
    """Rotary embedding of queries or keys, with the settings' frequencies and the factor ``magnitude``.

    Positions are ``[B, T]``; with ``Decoder.rope_sections`` ``[B, T, 3]``. Component ``i`` is paired with ``i + K/2``.
    In latent attention ``2 i`` is paired with ``2 i + 1``, and the result has the first components of all pairs before
    the second ones; scores do not depend on an order that queries and keys share. With ``Decoder.rope_share`` below 1
    only the first components are rotated, as a narrower head, or with 'proportional' frequencies the first pairs of the
    whole head; with ``Decoder.nope_every`` of 1 none are. The result has the shape and dtype of ``x_BTHK``.
    """
    if c.nope_every == 1:
        return x_BTHK
    if c.rotary_width < x_BTHK.shape[-1]:
        rotated, unrotated = jnp.split(x_BTHK, [c.rotary_width], axis=-1)
        return jnp.concatenate([rotate(c, rotated, positions), unrotated], axis=-1)
    if c.kv_rank:
        x_BTHK = jnp.concatenate([x_BTHK[..., 0::2], x_BTHK[..., 1::2]], axis=-1)
    frequency_K = frequencies(c.rotary_width, c.rope_theta)
    if c.rope_scaling == PROPORTIONAL:
        is_rotated_K = jnp.arange(len(frequency_K)) < c.rotated_pairs
        frequency_K = jnp.where(is_rotated_K, frequency_K / c.rope_factor, 0)
    elif c.rope_scaling != "none":
        unscaled_K = _unscaled_share(c, frequency_K)
        frequency_K = frequency_K * (unscaled_K + (1 - unscaled_K) / c.rope_factor)
    return apply_rotary(x_BTHK, positions, frequency_K, magnitude(c), c.axis_of_pair)


def magnitude(c: DecoderConfig) -> float:
    """The factor of rotated queries and keys: m(1) for YaRN, where m(x) is 1 + 0.1 x ln(``rope_factor``), else 1.

    In latent attention it is m(``rope_mscale``) / m(``rope_mscale_all``).
    """
    if c.rope_scaling != "yarn":
        return 1.0
    return _mscale(c, c.rope_mscale) / _mscale(c, c.rope_mscale_all) if c.kv_rank else _mscale(c, 1.0)


def score_factor(c: DecoderConfig) -> float:
    """The factor of scores of latent attention: m(``rope_mscale_all``)² for YaRN, else 1; see ``magnitude``."""
    return _mscale(c, c.rope_mscale_all) ** 2 if c.rope_scaling == "yarn" else 1.0


def _mscale(c: DecoderConfig, mscale: float) -> float:
    return 1 + 0.1 * mscale * math.log(c.rope_factor)


def _unscaled_share(c: DecoderConfig, frequency_K: Float[Array, " K/2"]) -> Float[Array, " K/2"]:
    """The share of each frequency that is not divided by ``rope_factor``."""
    if c.rope_scaling == "linear":
        return jnp.zeros_like(frequency_K)
    low_turns, high_turns = c.turns
    if c.rope_scaling == "llama3":  # linear in the turns of a frequency in the original context
        turns_K = c.rope_context * frequency_K / (2 * math.pi)
        return jnp.clip((turns_K - low_turns) / (high_turns - low_turns), 0, 1)
    # yarn: linear in the index of a frequency, between whole indices around those of ``high_turns`` and ``low_turns``
    first = max(math.floor(_index(c, high_turns)), 0)
    last = min(math.ceil(_index(c, low_turns)), c.rotary_width - 1)
    last += 1e-3 * (last == first)
    index_K = jnp.arange(len(frequency_K), dtype=jnp.float32)
    return jnp.clip((last - index_K) / (last - first), 0, 1)


def _index(c: DecoderConfig, turns: float) -> float:
    """The fractional index, from the highest, of the frequency with this number of turns in the original context."""
    return c.rotary_width / 2 * math.log(c.rope_context / (2 * math.pi * turns), c.rope_theta)
