"""Tokens of one module at their places among those of another: modality tokens into rows of text, and back.

Shapes: B rows, T tokens, D width; R rows of Tm tokens each of the other module.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmjax.models.layers import lookup


def merge_modality_tokens(
    x_BTD: Float[Array, "B T D"], tokens_RTD: Float[Array, "R Tm D"], index_BT: Int[Array, "B T"], cells: int
) -> Float[Array, "B T D"]:
    """Puts modality tokens at the placeholders; or, in reverse, hidden states of placeholders into rows of tokens.

    Args:
      x_BTD: text embeddings of this rank's rows.
      tokens_RTD: modality tokens of the same cells.
      index_BT: index into the flattened tokens of the row's cell, or -1 where there is no placeholder.
      cells: cells among these rows; both row dimensions are cell-major.
    """

    @jax.checkpoint  # else backward would keep the mask for every feature
    def merge(x_BTD: Array, tokens_RTD: Array, index_BT: Array) -> Array:
        flat_CND = tokens_RTD.reshape(cells, -1, x_BTD.shape[-1])
        picked_BTD = jax.vmap(lookup)(flat_CND, index_BT.reshape(cells, -1)).reshape(x_BTD.shape)
        return jnp.where((index_BT >= 0)[..., None], picked_BTD.astype(x_BTD.dtype), x_BTD)

    return merge(x_BTD, tokens_RTD, index_BT)
