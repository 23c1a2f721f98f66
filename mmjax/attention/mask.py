"""Which tokens see which: a rule for pairs of tokens, and for pairs of blocks of tokens.

Shapes: T tokens that ask, S tokens that are asked, A axes of a position; leading dimensions are rows or blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mmjax.attention.tokens import Tokens

MaskKind = Literal["causal", "full"]


class Columns(NamedTuple):
    """What a mask reads of each token, or bounds of it for each block of tokens."""

    segments: Int[Array, "*B T"]
    order: Int[Array, "*B T"] | None = None
    windows: Int[Array, "*B T A"] | None = None


@dataclass(frozen=True)
class Mask:
    """A rule among the tokens of one segment.

    Attributes:
      kind: ``causal`` (a token sees itself and the tokens of its segment that are before it in order) or ``full``.
      window: under ``causal``, a token sees only those that are less than this before it in order; 0 means all.
      grid_window: a token sees only those in its own window, where windows of this edge cut its segment along every
        axis of its positions; 0 means all.

    Raises:
      ValueError: there is a window and the kind is not causal.
    """

    kind: MaskKind
    window: int = 0
    grid_window: int = 0

    def __post_init__(self) -> None:
        if self.window and self.kind != "causal":
            fix = "use 'causal', or a window of 0"
            raise ValueError(f"window={self.window}: a mask that is {self.kind!r} has none; {fix}")

    def columns(self, tokens: Tokens) -> Columns:
        """What this mask reads of ``tokens``.

        Raises:
          ValueError: it has a window of a grid, and the stage does not read positions.
        """
        segments_BT = tokens.segments_BT
        order = jnp.broadcast_to(tokens.order_BT, segments_BT.shape) if self.kind == "causal" else None
        if not self.grid_window:
            return Columns(segments_BT, order)
        return Columns(segments_BT, order, tokens.positions.reshape(*segments_BT.shape, -1) // self.grid_window)

    def allowed(self, asking: Columns, asked: Columns) -> Bool[Array, "*B T S"]:
        """Whether each token that asks sees each that is asked. Padding, segment 0, sees padding."""
        seen = asking.segments[..., :, None] == asked.segments[..., None, :]
        if asking.order is not None and asked.order is not None:
            before = asking.order[..., :, None] - asked.order[..., None, :]
            seen &= (before >= 0) & (before < self.window) if self.window else before >= 0
        if asking.windows is not None and asked.windows is not None:
            for axis in range(asking.windows.shape[-1]):
                seen &= asking.windows[..., :, None, axis] == asked.windows[..., None, :, axis]
        return seen

    def may_meet(self, asking: tuple[Columns, Columns], asked: tuple[Columns, Columns]) -> Bool[Array, "*B P N"]:
        """Whether any token of a block that asks may see any of a block that is asked, from bounds of both.

        It is never False where ``allowed`` is True for a pair of tokens that are not padding.

        Args:
          asking, asked: the least and the greatest value of each column in each block (see ``bounds``).
        """
        (low, high), (asked_low, asked_high) = asking, asked
        met = _overlap(low.segments, high.segments, asked_low.segments, asked_high.segments)
        met &= (high.segments > 0)[..., :, None] & (asked_high.segments > 0)[..., None, :]
        if low.order is not None and high.order is not None:
            assert asked_low.order is not None and asked_high.order is not None
            met &= asked_low.order[..., None, :] <= high.order[..., :, None]
            if self.window:
                met &= low.order[..., :, None] - asked_high.order[..., None, :] < self.window
        if low.windows is not None and high.windows is not None:
            assert asked_low.windows is not None and asked_high.windows is not None
            for a in range(low.windows.shape[-1]):
                here = [one[..., a] for one in (low.windows, high.windows, asked_low.windows, asked_high.windows)]
                met &= _overlap(*here)
        return met


def bounds(columns: Columns, block: int) -> tuple[Columns, Columns]:
    """The least and the greatest value of each column in each block of so many tokens.

    Padding has no part in either; a block of padding alone has no segment above 0.
    """
    real_BT = columns.segments > 0
    largest = jnp.iinfo(jnp.int32).max

    def least(x: Array, *, turned: bool = False) -> Array:
        real = real_BT if x.ndim == real_BT.ndim else real_BT[..., None]
        x = jnp.where(real, -x if turned else x, largest)
        split = x.reshape(x.shape[0], -1, block, *x.shape[2:]).min(axis=2)
        return -split if turned else split

    def greatest(x: Array) -> Array:
        return least(x, turned=True)

    return jax.tree.map(least, columns), jax.tree.map(greatest, columns)


def _overlap(low: Array, high: Array, asked_low: Array, asked_high: Array) -> Bool[Array, "*B P N"]:
    return (low[..., :, None] <= asked_high[..., None, :]) & (asked_low[..., None, :] <= high[..., :, None])
