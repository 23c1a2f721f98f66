"""The tokens of packed rows: their segments, positions and order.

Shapes: B rows, T tokens, A axes of a position; N elements of a row, M indices.
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
    """This rank's tokens of a microbatch's rows.

    Attributes:
      segments_BT: the sample or medium that each token belongs to, from 1; 0 is padding.
      inputs: host inputs by name. "positions" and "order" are optional; masks of kind "words" read "is", "attends" and
        "items" too (see ``mask``).
      axes: mesh axes that the token dimension is split over, in contiguous runs; () where each rank has complete rows.
    """

    segments_BT: Int[Array, "B T"]
    inputs: Mapping[str, Array]
    axes: tuple[str, ...] = ()

    @classmethod
    def of(cls, inputs: Mapping[str, Array], axes: tuple[str, ...] = ()) -> Tokens:
        """The tokens that host inputs describe: ``inputs`` by name, with "segments" ``[B, T]``; for ``axes`` see the
        class.
        """
        return cls(inputs["segments"], inputs, axes)

    @property
    def order_BT(self) -> Int[Array, "B T"]:
        """Each token's place in its row; of shape [1, T] where it is the same in all rows.

        Causal masks compare orders. They cannot compare array indices, which change where rows are split over ranks,
        or positions, which repeat. Without a host input "order" the order is the index. It is computed at each use: a
        stored array would be kept for backward.
        """
        if "order" in self.inputs:
            return self.inputs["order"]
        length = self.segments_BT.shape[1]
        first = lax.axis_index(self.axes) * length if self.axes else 0
        return first + lax.broadcasted_iota(jnp.int32, (1, length), 1)

    @property
    def orders_BT(self) -> Int[Array, "B T"]:
        """``order_BT`` broadcast to all rows."""
        return jnp.broadcast_to(self.order_BT, self.segments_BT.shape)

    def input(self, name: str) -> Array:
        """The host input of this name, such as "items".

        Raises:
          ValueError: it is not among the stage's inputs.
        """
        if name not in self.inputs:
            raise ValueError(f"the stage reads no {name!r}; add what the mask reads to what Module.inputs gives")
        return self.inputs[name]

    @property
    def positions(self) -> Int[Array, "B T *A"]:
        """Positions in the sample or medium, ``[B, T]`` or ``[B, T, A]``.

        Raises:
          ValueError: they are not among the stage's inputs.
        """
        if "positions" not in self.inputs:
            fix = "add 'positions' to what Module.inputs gives, or @reads('positions') to the callback"
            raise ValueError(f"the stage reads no positions; {fix}")
        return self.inputs["positions"]


def pad_to_multiple(x: Array, size: int, axis: int = 1) -> Array:
    """The array with zeros added at the end of dimension ``axis``, up to a multiple of ``size``; ``x`` if it is one."""
    missing = -x.shape[axis] % size
    return jnp.pad(x, [(0, missing * (dim == axis)) for dim in range(x.ndim)]) if missing else x


def take_per_row(x_BN: Array, indices_BM: Int[Array, "B M"]) -> Array:
    """Gathers ``x_BN[b, indices_BM[b, m]]`` for each row b: ``[B, M, ...]`` from ``[B, N, ...]``. Indices are in 0 … N
    - 1.
    """
    x_BN, indices_BM = jax_compat.alike(x_BN, indices_BM)

    def take(x_N: Array, indices_M: Array) -> Array:
        return x_N.at[indices_M].get(mode="promise_in_bounds")

    return jax.vmap(take)(x_BN, indices_BM)
