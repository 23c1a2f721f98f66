"""The tokens of packed rows: their segments, positions and order.

Shapes: B rows, T tokens, A axes of a position; N places of a row, M of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from mmjax import jax_compat


@dataclass(frozen=True)
class Tokens:
    """The tokens of a microbatch's rows on this rank.

    Attributes:
      segments_BT: the sample or medium that a token belongs to, from 1; 0 is padding.
      inputs: host inputs, of which the stage may read "positions" and "order"; and for masks of words "is", "attends"
        and "items" (see ``mask``).
      axes: mesh axes over which the tokens of rows lie, in runs; () where rows are whole.
    """

    segments_BT: Int[Array, "B T"]
    inputs: Mapping[str, Array]
    axes: tuple[str, ...] = ()

    @classmethod
    def of(cls, inputs: Mapping[str, Array], axes: tuple[str, ...] = ()) -> Tokens:
        """The tokens that host inputs describe."""
        return cls(inputs["segments"], inputs, axes)

    @property
    def order_BT(self) -> Int[Array, "B T"]:
        """Each token's place in its row; one row of it may stand for all.

        Causality is by order: an index changes where rows are cut over ranks, and positions repeat. Without an input of
        that name it is the index, made where it is used: made once, backward would keep it.
        """
        if "order" in self.inputs:
            return self.inputs["order"]
        length = self.segments_BT.shape[1]
        first = lax.axis_index(self.axes) * length if self.axes else 0
        return first + lax.broadcasted_iota(jnp.int32, (1, length), 1)

    @property
    def orders_BT(self) -> Int[Array, "B T"]:
        """The same for every row."""
        return jnp.broadcast_to(self.order_BT, self.segments_BT.shape)

    def known(self, name: str) -> Array:
        """A host input of every token.

        Raises:
          ValueError: the stage does not read it.
        """
        if name not in self.inputs:
            raise ValueError(f"the stage reads no {name!r}; add what the mask reads to what Module.inputs gives")
        return self.inputs[name]

    @property
    def positions(self) -> Int[Array, "B T *A"]:
        """Places in the sample or medium, ``[B, T]`` or along several axes.

        Raises:
          ValueError: the stage does not read them.
        """
        if "positions" not in self.inputs:
            fix = "add 'positions' to what Module.inputs gives, or @reads('positions') to the callback"
            raise ValueError(f"the stage reads no positions; {fix}")
        return self.inputs["positions"]


def filled(x: Array, size: int, axis: int = 1) -> Array:
    """The array with 0 at the end of an axis, up to a multiple of a size."""
    lacking = -x.shape[axis] % size
    return jnp.pad(x, [(0, lacking * (own == axis)) for own in range(x.ndim)]) if lacking else x


def picked(x_BN: Array, numbers_BM: Int[Array, "B M"]) -> Array:
    """For each row, what stands at some of its places."""
    x_BN, numbers_BM = jax_compat.alike(x_BN, numbers_BM)
    pick = lambda x_N, numbers_M: x_N.at[numbers_M].get(mode="promise_in_bounds")  # noqa: E731
    return jax.vmap(pick)(x_BN, numbers_BM)
