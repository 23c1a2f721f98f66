"""A callback for drawn configurations. Imports no JAX: data servers import it too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmjax.models.callbacks import reads

if TYPE_CHECKING:
    from jax import Array

    from mmjax.models.context import Context

FADE = "mmjax.bench.soak.marks:fade"


@reads("positions")
def fade(context: Context, x: Array) -> Array:
    """A callback: features ``x`` [B, T, D], scaled down with their position in the sample or medium."""
    positions = context.tokens.positions
    first_BT = positions[..., 0] if positions.ndim == 3 else positions
    together = first_BT.shape[1] // x.shape[1]
    return x / (1 + 0.1 * first_BT[:, ::together, None]).astype(x.dtype)
