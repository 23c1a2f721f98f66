"""Products whose input and result are bounded, with bounds that training does not change (as in Gemma 4's tower).

A product's bounds are four numbers: the least and the most of its input, then of its result.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from mmjax.models.handles import opened

UNBOUNDED = float(np.finfo(np.float32).max)
"""The bound of a new product. It is finite, so that differences of bounds are numbers."""


def new_bounds() -> nnx.Param[Array]:
    """The parameter of a product's bounds ``[4]``, which bound nothing. They are fp32 in every dtype.

    Nothing decays a vector, and no gradient reaches it, so training keeps its bits.
    """
    return nnx.Param(jnp.array([-UNBOUNDED, UNBOUNDED] * 2, jnp.float32), dims=("bound",), in_fp32=True)


def clipped_input(x: Float[Array, "*B"], bounds_4: Any) -> Float[Array, "*B"]:
    """``x`` between the first two bounds, an array ``[4]`` or a handle; see ``clipped_output``."""
    return _clipped_input(x, bounds_4)


def clipped_output(x: Float[Array, "*B"], bounds_4: Any) -> Float[Array, "*B"]:
    """``x`` between the last two bounds, an array ``[4]`` or a handle.

    Gradients pass where a number is within its bounds or at them, as in torch's ``clamp``.
    """
    return _clipped_output(x, bounds_4)


@jax.checkpoint  # otherwise masks, and bounds that stop gradients, would be residuals
def _clipped_input(x: Array, bounds_4: Any) -> Array:
    return _between(x, lax.stop_gradient(opened(bounds_4))[:2])


@jax.checkpoint
def _clipped_output(x: Array, bounds_4: Any) -> Array:
    return _between(x, lax.stop_gradient(opened(bounds_4))[2:])


def _between(x: Array, bounds_2: Array) -> Array:
    low, high = bounds_2.astype(x.dtype)
    return jnp.where(x < low, low, jnp.where(x > high, high, x))
