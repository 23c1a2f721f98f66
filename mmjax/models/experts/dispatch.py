"""Dispatch of tokens to rows that are sorted by expert, and back.

Shapes: N tokens, k experts a token, M rows, D width, E experts, S values of which rows are taken.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax.models.experts.router import chosen_counts


class Dispatch(NamedTuple):
    """The rows of tokens, sorted by expert.

    Attributes:
      choices_M: the choice of each row: k times its token plus the number of the choice.
      rows_Nk: the row of each token and choice; M or more for a choice without a row.
      sizes_E: number of rows of each expert. Rows behind those of the last expert are of no choice.
    """

    choices_M: Int[Array, " M"]
    rows_Nk: Int[Array, "N k"]
    sizes_E: Int[Array, " E"]

    @property
    def tokens_M(self) -> Int[Array, " M"]:
        """The token of each row."""
        return self.choices_M // self.rows_Nk.shape[1]


class Rows(NamedTuple):
    """Rows in the order of experts: all values, or those of an index.

    Attributes:
      values_SD: the values.
      index_M: the value of each row; ``None`` for rows that are the values. Values are read by it, in kernels or block
        by block, so that no array has all rows.
    """

    values_SD: Float[Array, "S D"]
    index_M: Int[Array, " M"] | None = None

    @property
    def count(self) -> int:
        """The number of rows."""
        return (self.values_SD if self.index_M is None else self.index_M).shape[0]

    def block(self, start: Int[Array, ""], rows: int) -> Float[Array, "B D"]:
        """So many rows from ``start`` as an array."""
        if self.index_M is None:
            return lax.dynamic_slice_in_dim(self.values_SD, start, rows)
        index_B = lax.dynamic_slice_in_dim(self.index_M, start, rows)
        return self.values_SD.at[index_B].get(mode="promise_in_bounds")


class TokenRows(NamedTuple):
    """Tokens with a dispatch of their choices.

    Attributes:
      h_ND: features.
      weights_Nk: fp32 factors of the results of each token's experts.
      dispatch: rows of the choices.
    """

    h_ND: Float[Array, "N D"]
    weights_Nk: Float[Array, "N k"]
    dispatch: Dispatch

    @property
    def rows(self) -> Rows:
        """The features of each row's token."""
        return Rows(self.h_ND, self.dispatch.tokens_M)

    @property
    def weights_M(self) -> Float[Array, " M"]:
        """The weight of each row's choice. Rows of no choice have any weight."""
        return send_weights(self.weights_Nk, self.dispatch)


def sort_by_expert(experts_Nk: Int[Array, "N k"], experts: int, most: int) -> Dispatch:
    """Sorts the choices of all tokens by expert.

    Args:
      experts_Nk: the experts of each token; the number ``experts`` stands for none.
      experts: number of experts.
      most: number of rows. Where more choices are of an expert, those of the last experts have no row.
    """
    flat_M = experts_Nk.reshape(-1)
    order_M = jnp.argsort(flat_M, stable=True)
    rows_M = jnp.zeros_like(order_M).at[order_M].set(jnp.arange(order_M.size, dtype=order_M.dtype), unique_indices=True)
    ends_E = jnp.minimum(jnp.cumsum(chosen_counts(flat_M, experts)), most)
    return Dispatch(order_M[:most], rows_M.reshape(experts_Nk.shape), jnp.diff(ends_E, prepend=0))


@jax.custom_vjp
def send_rows(h_ND: Float[Array, "N D"], dispatch: Dispatch) -> Float[Array, "M D"]:
    """The features of each row's token. Backward adds the rows of a token, without a scatter."""
    return h_ND[dispatch.tokens_M]


@jax.custom_vjp
def add_rows(y_MD: Float[Array, "M D"], dispatch: Dispatch) -> Float[Array, "N D"]:
    """The sum of each token's rows, in fp32 and then rounded. Backward is ``send_rows``."""
    return sum_of_choices(y_MD, dispatch)


@jax.custom_vjp
def send_weights(weights_Nk: Float[Array, "N k"], dispatch: Dispatch) -> Float[Array, " M"]:
    """The weight of each row's choice. Rows of no choice have any weight."""
    return weights_Nk.reshape(-1)[dispatch.choices_M]


def sum_of_choices(y_MD: Float[Array, "M D"], dispatch: Dispatch) -> Float[Array, "N D"]:
    """The sum of each token's rows, in fp32 and then rounded."""
    by_choice = (values_of_choices(y_MD, rows_N).astype(jnp.float32) for rows_N in dispatch.rows_Nk.T)
    return sum(by_choice, start=jnp.zeros((), jnp.float32)).astype(y_MD.dtype)


def values_of_choices(x_M: Array, rows: Array) -> Array:
    """The values of rows; 0 for a choice without a row."""
    return x_M.at[rows].get(mode="fill", fill_value=0)


send_rows.defvjp(
    lambda h_ND, dispatch: (send_rows(h_ND, dispatch), dispatch),
    lambda dispatch, dx_MD: (sum_of_choices(dx_MD, dispatch), None),
)
add_rows.defvjp(
    lambda y_MD, dispatch: (add_rows(y_MD, dispatch), dispatch),
    lambda dispatch, dy_ND: (dy_ND[dispatch.tokens_M], None),
)
send_weights.defvjp(
    lambda weights_Nk, dispatch: (send_weights(weights_Nk, dispatch), dispatch),
    lambda dispatch, d_weights_M: (values_of_choices(d_weights_M, dispatch.rows_Nk), None),
)
