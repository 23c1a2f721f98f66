"""Which tokens see which: a rule for pairs of tokens, and for pairs of blocks of tokens.

Shapes: T tokens that ask, S tokens that are asked, A axes of a position; leading dimensions are rows or blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt32

from mmjax.attention.language import ITEMS, How, MaskKind, Rules

if TYPE_CHECKING:  # data workers read masks, and have no JAX
    from jaxtyping import Array

    from mmjax.attention.tokens import Tokens

__all__ = ["Columns", "Mask", "MaskKind", "bounds"]


class Columns(NamedTuple):
    """What a mask reads of each token, or bounds of it for each block of tokens.

    The bounds of words are all bits that any token of the block has.
    """

    segments: Int[Array, "*B T"]
    order: Int[Array, "*B T"] | None = None
    windows: Int[Array, "*B T A"] | None = None
    seen_as: UInt32[Array, "*B T"] | None = None
    attends: UInt32[Array, "*B T"] | None = None
    items: Int[Array, "*B T"] | None = None


@dataclass(frozen=True)
class Mask:
    """A rule among the tokens of one segment.

    Attributes:
      kind: ``causal`` (a token sees itself and the tokens of its segment that are before it in order), ``full``, or
        ``words`` (it sees itself and those that share a bit with it, see ``language``).
      window: what is seen as before a token is less than this before it in order; 0 means all.
      grid_window: a token sees only those in its own window, where windows of this edge cut its segment along every
        axis of its positions; what is seen as of its item is seen anyway. 0 means all.
      hows: of ``words``, how each bit is seen.

    Raises:
      ValueError: there is a window and nothing is seen as before a token; or bits, and the kind is not ``words``.
    """

    kind: MaskKind
    window: int = 0
    grid_window: int = 0
    hows: tuple[How, ...] = ()

    def __post_init__(self) -> None:
        if self.window and self.kind != "causal" and "before" not in self.hows:
            fix = "use 'causal', or a window of 0"
            raise ValueError(f"window={self.window}: a mask that is {self.kind!r} has none; {fix}")
        if bool(self.hows) != (self.kind == "words"):
            raise ValueError(f"hows={self.hows!r}: a mask of kind {self.kind!r}; give one for each bit of 'words'")

    @classmethod
    def of(cls, rules: Rules | str, window: int = 0, grid_window: int = 0) -> Mask:
        """The mask of rules, or of a line of them. A window is left out where nothing is seen as before a token."""
        rules = Rules.parse(rules) if isinstance(rules, str) else rules
        before = rules.kind == "causal" or "before" in rules.hows
        return cls(rules.kind, window if before else 0, grid_window, rules.hows)

    @property
    def reads(self) -> tuple[str, ...]:
        """The host inputs that it reads of each token, "order" if there is one."""
        order = ["order"] * (self.kind != "full")
        words = ["is", "attends"] * (self.kind == "words") + ["items"] * (ITEMS in self.hows)
        return ("segments", *order, *["positions"] * bool(self.grid_window), *words)

    def columns(self, tokens: Tokens) -> Columns:
        """What this mask reads of ``tokens``.

        Raises:
          ValueError: it has a window of a grid, and the stage does not read positions; or words, which it does not.
        """
        segments_BT = tokens.segments_BT
        order = None if self.kind == "full" else tokens.orders_BT
        windows = None
        if self.grid_window:
            windows = tokens.positions.reshape(*segments_BT.shape, -1) // self.grid_window
        if self.kind != "words":
            return Columns(segments_BT, order, windows)
        items = tokens.known("items") if ITEMS in self.hows else None
        return Columns(segments_BT, order, windows, tokens.known("is"), tokens.known("attends"), items)

    def allowed(self, asking: Columns, asked: Columns) -> Bool[Array, "*B T S"]:
        """Whether each token that asks sees each that is asked. Padding, segment 0, sees padding."""
        seen = asking.segments[..., :, None] == asked.segments[..., None, :]
        if asking.order is not None and asked.order is not None:
            before = asking.order[..., :, None] - asked.order[..., None, :]
            if self.kind == "words":
                return seen & (self._shared(asking, asked, before) | (before == 0))
            seen &= self._near(before)
        if asking.windows is not None and asked.windows is not None:
            seen &= _equal(asking.windows, asked.windows)
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
            near = asked_low.order[..., None, :] <= high.order[..., :, None]
            if self.window:
                near &= low.order[..., :, None] - asked_high.order[..., None, :] < self.window
            if self.kind == "words":
                itself = _overlap(low.order, high.order, asked_low.order, asked_high.order)
                return met & (self._may_share(asking, asked, near) | itself)
            met &= near
        if low.windows is not None:
            met &= _may_equal(asking, asked)
        return met

    # ---- words -------------------------------------------------------------------------------------------------------

    def _near(self, before: Int[Array, "*B T S"]) -> Bool[Array, "*B T S"]:
        """Whether a token so far before another is seen as before it."""
        return (before >= 0) & (before < self.window) if self.window else before >= 0

    def _shared(self, asking: Columns, asked: Columns, before: Int[Array, "*B T S"]) -> Bool[Array, "*B T S"]:
        """Whether tokens share a bit, and are to each other as it says."""
        assert asking.attends is not None and asked.seen_as is not None
        shared = asking.attends[..., :, None] & asked.seen_as[..., None, :]
        found = []
        if there := self._bits("before"):
            found.append((shared & there != 0) & self._near(before))
        if there := self._bits("everywhere"):
            found.append(shared & there != 0)
        if asking.windows is not None and asked.windows is not None and found:
            found = [reduce(or_, found) & _equal(asking.windows, asked.windows)]
        if there := self._bits(ITEMS):
            assert asking.items is not None and asked.items is not None
            same = asking.items[..., :, None] == asked.items[..., None, :]
            found.append((shared & there != 0) & same & (asked.items > 0)[..., None, :])
        return reduce(or_, found)

    def _may_share(
        self, asking: tuple[Columns, Columns], asked: tuple[Columns, Columns], near: Bool[Array, "*B P N"]
    ) -> Bool[Array, "*B P N"]:
        """The same for any two tokens of two blocks."""
        (low, high), (asked_low, asked_high) = asking, asked
        assert high.attends is not None and asked_high.seen_as is not None
        shared = high.attends[..., :, None] & asked_high.seen_as[..., None, :]
        found = []
        if there := self._bits("before"):
            found.append((shared & there != 0) & near)
        if there := self._bits("everywhere"):
            found.append(shared & there != 0)
        if low.windows is not None and found:
            found = [reduce(or_, found) & _may_equal(asking, asked)]
        if there := self._bits(ITEMS):
            assert low.items is not None and high.items is not None
            assert asked_low.items is not None and asked_high.items is not None
            same = _overlap(low.items, high.items, asked_low.items, asked_high.items)
            found.append((shared & there != 0) & same)
        return reduce(or_, found)

    def _bits(self, how: How) -> np.uint32:
        """A word of the bits that are seen so; 0 where there is none."""
        return np.uint32(sum(1 << bit for bit, own in enumerate(self.hows) if own == how))


def bounds(columns: Columns, block: int) -> tuple[Columns, Columns]:
    """The least and the greatest value of each column in each block of so many tokens; of words all bits, in both.

    Padding has no part in either; a block of padding alone has no segment above 0. Nor has text in bounds of items.
    """
    import jax
    import jax.numpy as jnp

    real_BT = columns.segments > 0
    largest = jnp.iinfo(jnp.int32).max

    def blocks(x: Array) -> Array:
        return x.reshape(x.shape[0], -1, block, *x.shape[2:])

    def least(x: Array, *, turned: bool = False, real: Array = real_BT) -> Array:
        real = real if x.ndim == real.ndim else real[..., None]
        least = blocks(jnp.where(real, -x if turned else x, largest)).min(axis=2)
        return -least if turned else least

    def either(x: Array | None) -> Array | None:
        zero = jnp.uint32(0)
        return (
            None if x is None else jax.lax.reduce(blocks(jnp.where(real_BT, x, zero)), zero, jax.lax.bitwise_or, (2,))
        )

    plain = columns._replace(seen_as=None, attends=None, items=None)
    low, high = jax.tree.map(least, plain), jax.tree.map(lambda x: least(x, turned=True), plain)
    words = {"seen_as": either(columns.seen_as), "attends": either(columns.attends)}
    if columns.items is None:
        return low._replace(**words), high._replace(**words)
    real = real_BT & (columns.items > 0)
    own = [least(columns.items, turned=turned, real=real) for turned in (False, True)]
    return low._replace(**words, items=own[0]), high._replace(**words, items=own[1])


def _equal(windows: Array, others: Array) -> Bool[Array, "*B T S"]:
    """Whether tokens are in the same window along every axis."""
    axes = range(windows.shape[-1])
    return reduce(and_, (windows[..., :, None, axis] == others[..., None, :, axis] for axis in axes))


def _may_equal(asking: tuple[Columns, Columns], asked: tuple[Columns, Columns]) -> Bool[Array, "*B P N"]:
    """Whether any two tokens of two blocks may be in the same window."""
    ends = [one.windows for one in (*asking, *asked) if one.windows is not None]
    axes = range(ends[0].shape[-1])
    return reduce(and_, (_overlap(*(one[..., axis] for one in ends)) for axis in axes))


def _overlap(low: Array, high: Array, asked_low: Array, asked_high: Array) -> Bool[Array, "*B P N"]:
    return (low[..., :, None] <= asked_high[..., None, :]) & (asked_low[..., None, :] <= high[..., :, None])
