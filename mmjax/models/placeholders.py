"""Tokens of one module at their places among those of another: modality tokens into rows of text, and back.

Shapes: B rows, T tokens, D width, K tokens that a place is a mean of; R rows of Tm tokens each of the other module;
C cells, N places of all lists of a cell, one list for each rank that reads tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmjax.data.tiles import NEWLINE
from mmjax.models.layers import lookup, repeated


def merge_modality_tokens(
    x_BTD: Float[Array, "B T D"],
    tokens_RTD: Float[Array, "R Tm D"],
    index: Int[Array, "B T"] | Int[Array, "B T K"],
    cells: int,
    shares_BTK: Float[Array, "B T K"] | None = None,
) -> Float[Array, "B T D"]:
    """Puts modality tokens at the placeholders; or, in reverse, hidden states of placeholders into rows of tokens.

    Args:
      x_BTD: text embeddings of this rank's rows.
      tokens_RTD: modality tokens of the same cells: all of them, or those that are listed for this rank.
      index: indices into the flattened tokens of the row's cell, negative where there is no placeholder.
      cells: cells among these rows; both row dimensions are cell-major.
      shares_BTK: the weights of the K tokens whose mean stands at a placeholder; ``None`` where it is one token.
    """

    @jax.checkpoint  # else backward would keep the mask for every feature
    def merge(x_BTD: Array, tokens_RTD: Array, index: Array, shares_BTK: Array | None) -> Array:
        flat_CND = tokens_RTD.reshape(cells, -1, x_BTD.shape[-1])

        def picked(index_BT: Array) -> Array:
            return jax.vmap(lookup)(flat_CND, index_BT.reshape(cells, -1)).reshape(x_BTD.shape)

        if shares_BTK is None:
            first_BT, picked_BTD = index, picked(index)
        else:
            first_BT, picked_BTD = index[..., 0], jnp.float32(0)
            for k in range(index.shape[-1]):
                picked_BTD = picked_BTD + shares_BTK[..., k, None] * picked(index[..., k])
        return jnp.where((first_BT >= 0)[..., None], picked_BTD.astype(x_BTD.dtype), x_BTD)

    return merge(x_BTD, tokens_RTD, index, shares_BTK)


def listed_tokens(tokens_RTD: Float[Array, "R Tm D"], lists_CN: Int[Array, "C N"]) -> Float[Array, "C N D"]:
    """The tokens that ranks of another module read, list by list.

    Args:
      tokens_RTD: tokens of the cells, R rows cell by cell.
      lists_CN: indices into the flattened tokens of the cell; -1, which gives zeros, where a list is shorter.
    """
    flat_CND = tokens_RTD.reshape(lists_CN.shape[0], -1, tokens_RTD.shape[-1])
    return jax.vmap(lookup)(flat_CND, lists_CN)


@jax.checkpoint  # likewise
def with_newlines(
    x_BTD: Float[Array, "B T D"], newline_D: Float[Array, " D"], index: Int[Array, "B T"] | Int[Array, "B T K"]
) -> Float[Array, "B T D"]:
    """Puts the newline at its places, where the indices of ``merge_modality_tokens`` say so."""
    is_newline_BT = (index if index.ndim == 2 else index[..., 0]) == NEWLINE
    return jnp.where(is_newline_BT[..., None], repeated(newline_D, x_BTD), x_BTD)
