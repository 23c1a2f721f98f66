"""Rotary positions of Llama-family language models, with frequencies changed for contexts longer than the first.

Shapes: B rows, T tokens, H heads, K head width. A frequency is in radians a position.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmjax.models.layers import frequencies, turned
from mmjax.models.llama.config import DecoderConfig


def turn(c: DecoderConfig, x_BTHK: Float[Array, "B T H K"], positions: Int[Array, "B T *A"]) -> Array:
    """Queries or keys rotated by their positions, three numbers each with ``Decoder.rope_sections``."""
    frequency_K = frequencies(c.head_width, c.rope_theta)
    if c.rope_scaling != "none":
        kept_K = _kept(c, frequency_K)
        frequency_K = frequency_K * (kept_K + (1 - kept_K) / c.rope_factor)
    return turned(x_BTHK, positions, frequency_K, magnitude(c), c.rope_sections)


def magnitude(c: DecoderConfig) -> float:
    """The factor of queries and keys. YaRN makes the softmax colder as the context grows."""
    return 1 + 0.1 * math.log(c.rope_factor) if c.rope_scaling == "yarn" else 1.0


def _kept(c: DecoderConfig, frequency_K: Float[Array, " K/2"]) -> Float[Array, " K/2"]:
    """The share of each frequency that is kept as it is; the rest of it is divided by ``rope_factor``."""
    if c.rope_scaling == "linear":
        return jnp.zeros_like(frequency_K)
    few, many = c.turns
    if c.rope_scaling == "llama3":  # linear in the turns that a frequency makes in the first context
        turns_K = c.rope_context * frequency_K / (2 * math.pi)
        return jnp.clip((turns_K - few) / (many - few), 0, 1)
    # yarn: linear in the index of a frequency, between whole indices around those of ``many`` and ``few`` turns
    first = max(math.floor(_index(c, many)), 0)
    last = min(math.ceil(_index(c, few)), c.head_width - 1)
    last += 1e-3 * (last == first)
    index_K = jnp.arange(len(frequency_K), dtype=jnp.float32)
    return jnp.clip((last - index_K) / (last - first), 0, 1)


def _index(c: DecoderConfig, turns: float) -> float:
    """The place, counted from the fastest, of a frequency that makes so many turns in the first context; a fraction."""
    return c.head_width / 2 * math.log(c.rope_context / (2 * math.pi * turns), c.rope_theta)
