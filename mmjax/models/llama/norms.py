"""The norms of the decoder, by its settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.models.llama.config import DecoderConfig
from mmjax.models.norms import rms_norm


def first_scale(c: DecoderConfig, width: int) -> Float[Array, " D"]:
    """The initial weight of a norm of ``width`` numbers: ones, or zeros with ``Decoder.norm_plus_one``."""
    return jnp.zeros(width) if c.norm_plus_one else jnp.ones(width)


def normed(c: DecoderConfig, x: Float[Array, "*B D"], scale: Any, over: Sequence[str] = ()) -> Float[Array, "*B D"]:
    """RMSNorm of ``x`` with a weight ``[D]``, an array or a handle, by the settings; ``over`` is as in ``rms_norm``."""
    return rms_norm(x, scale, c.norm_eps, plus=float(c.norm_plus_one), over=over)
