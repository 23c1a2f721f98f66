"""Merging tokens of one module into rows of another: modality tokens into rows of text, and back.

Shapes: B rows, T tokens, D width, K tokens that are averaged at a place; R rows of Tm tokens each of the other module;
C cells, N entries of all lists of a cell, one list for each rank that reads tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmjax.data.tiles import NEWLINE
from mmjax.models.layers import lookup
from mmjax.models.norms import repeated


def merge_modality_tokens(
    x_BTD: Float[Array, "B T D"],
    tokens_RTD: Float[Array, "R Tm D"],
    index: Int[Array, "B T"] | Int[Array, "B T K"],
    cells: int,
    shares_BTK: Float[Array, "B T K"] | None = None,
) -> Float[Array, "B T D"]:
    """A copy of ``x_BTD`` with modality tokens in place of placeholders; or, in reverse, hidden states in place of
    tokens.

    In reverse the rows are of a generator's tokens, and get the hidden states of their placeholders in the text.

    Args:
      x_BTD: text embeddings of this rank's rows.
      tokens_RTD: modality tokens of the same cells: all of them, or this rank's list.
      index: indices, from 0, into the tokens of the row's cell, ``[R / cells · Tm, D]``; negative where there is no
        placeholder.
      cells: the number of cells of these rows, each some samples with their rows of both modules. B and R are multiples
        of it, and a cell's rows are neighbours.
      shares_BTK: weights of the K tokens that are averaged at a placeholder; ``None`` for one token.
    """

    @jax.checkpoint  # otherwise the mask of every feature would be a residual
    def merge(x_BTD: Array, tokens_RTD: Array, index: Array, shares_BTK: Array | None) -> Array:
        flat_CND = tokens_RTD.reshape(cells, -1, x_BTD.shape[-1])

        def gather_index(index_BT: Array) -> Array:
            return jax.vmap(lookup)(flat_CND, index_BT.reshape(cells, -1)).reshape(x_BTD.shape)

        if shares_BTK is None:
            first_BT, merged_BTD = index, gather_index(index)
        else:
            first_BT, merged_BTD = index[..., 0], jnp.float32(0)
            for k in range(index.shape[-1]):
                merged_BTD = merged_BTD + shares_BTK[..., k, None] * gather_index(index[..., k])
        return jnp.where((first_BT >= 0)[..., None], merged_BTD.astype(x_BTD.dtype), x_BTD)

    return merge(x_BTD, tokens_RTD, index, shares_BTK)


def listed_tokens(tokens_RTD: Float[Array, "R Tm D"], lists_CN: Int[Array, "C N"]) -> Float[Array, "C N D"]:
    """The tokens that each rank of another module needs, cell by cell and list by list; zeros for the index -1.

    Args:
      tokens_RTD: tokens of C cells, R rows cell by cell; R is a multiple of C.
      lists_CN: indices, from 0, into the tokens of the cell, ``[R / C · Tm, D]``; -1 behind the end of a shorter list.
    """
    flat_CND = tokens_RTD.reshape(lists_CN.shape[0], -1, tokens_RTD.shape[-1])
    return jax.vmap(lookup)(flat_CND, lists_CN)


@jax.checkpoint  # otherwise the mask would be a residual
def with_newlines(
    x_BTD: Float[Array, "B T D"], newline_D: Float[Array, " D"], index: Int[Array, "B T"] | Int[Array, "B T K"]
) -> Float[Array, "B T D"]:
    """A copy of ``x_BTD`` with the newline embedding where ``index`` is ``NEWLINE``, -2.

    ``index`` has for each place the index of its token, or of the K tokens that are averaged there, of which the first
    counts.
    """
    is_newline_BT = (index if index.ndim == 2 else index[..., 0]) == NEWLINE
    return jnp.where(is_newline_BT[..., None], repeated(newline_D, x_BTD), x_BTD)
