"""What is known of the tokens of packed rows.

Shapes: B rows, T tokens, A axes of a position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


@dataclass(frozen=True)
class Tokens:
    """The tokens of a microbatch's rows on this rank.

    Attributes:
      segments_BT: the sample or medium that a token belongs to, from 1; 0 is padding.
      order_BT: the token's place in its row. Causality is by order: an index changes where rows are cut over ranks, and
        positions repeat. One row of it may stand for all.
      read: positions, where the stage reads them.
    """

    segments_BT: Int[Array, "B T"]
    order_BT: Int[Array, "B T"]
    read: Int[Array, "B T *A"] | None = None

    @classmethod
    def of(cls, inputs: Mapping[str, Array]) -> Tokens:
        """The tokens that host inputs describe; without an ``order`` they are in the order of their indices."""
        segments_BT = inputs["segments"]
        order_BT = inputs["order"] if "order" in inputs else _indices(segments_BT.shape[1])
        return cls(segments_BT, order_BT, inputs.get("positions"))

    @property
    def positions(self) -> Int[Array, "B T *A"]:
        """Places in the sample or medium, ``[B, T]`` or along several axes.

        Raises:
          ValueError: the stage does not read them.
        """
        if self.read is None:
            raise ValueError("the stage reads no positions; add 'positions' to what Module.inputs gives")
        return self.read


def _indices(length: int) -> Int[Array, "1 T"]:
    return lax.broadcasted_iota(jnp.int32, (1, length), 1)
