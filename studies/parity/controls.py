"""Wrong routes on purpose, as callbacks behind the projector: the study has to notice all but one of them.

Each works on the rows of one rank; a row is an image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Array

    from mmjax.models.context import Context


def exchanged(context: Context, x: Array) -> Array:
    """The features of a rank's first two images go to each other's samples."""
    del context
    import jax.numpy as jnp

    return jnp.concatenate([x[1:2], x[:1], x[2:]])


def half_scaled(context: Context, x: Array) -> Array:
    """Gradients of the first half of a rank's images are doubled on their way back, as if two dp ranks added them."""
    del context
    import jax.numpy as jnp

    half = len(x) // 2
    return jnp.concatenate([_scaled(x[:half], 2.0), x[half:]])


def all_scaled(context: Context, x: Array) -> Array:
    """All gradients are doubled on their way back, which Adam's updates do not show."""
    del context
    return _scaled(x, 2.0)


def _scaled(x: Array, factor: float) -> Array:
    """``x``, whose gradient is multiplied."""
    import jax

    return x * factor - jax.lax.stop_gradient(x * (factor - 1.0))
