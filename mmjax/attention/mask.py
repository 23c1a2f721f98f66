"""Attention masks: which query may attend to which key, for pairs of tokens and for pairs of blocks of tokens.

Shapes: T queries, S keys, P blocks of queries, N blocks of keys, A axes of a position; leading dimensions are rows or
blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt32

from mmjax.attention.language import ITEMS, MaskKind, Relation, Rules

if TYPE_CHECKING:  # data workers read masks, and have no JAX
    from jaxtyping import Array

    from mmjax.attention.tokens import Tokens

__all__ = ["Bounds", "Mask", "MaskInputs", "MaskKind", "bounds"]


class MaskInputs(NamedTuple):
    """The inputs of a mask: integers of each token, or a lower or upper bound of them in each block of tokens.

    Bounds of the bit fields ``seen_as`` and ``attends`` are the bits that any token of the block has.

    Attributes:
      segments: the sample or medium that each token belongs to, from 1; 0 is padding.
      order: each token's place in its row; ``None`` for a full mask.
      windows: the window of each token along every axis of positions; ``None`` without windows of a grid.
      seen_as: the host input "is", the bits of the rules whose keys include the token; ``None`` but for "words".
      attends: the bits of the rules whose queries include the token; ``None`` but for "words".
      items: the number of each token's medium, 0 for text; ``None`` if no rule reads it.
    """

    segments: Int[Array, "*B T"]
    order: Int[Array, "*B T"] | None = None
    windows: Int[Array, "*B T A"] | None = None
    seen_as: UInt32[Array, "*B T"] | None = None
    attends: UInt32[Array, "*B T"] | None = None
    items: Int[Array, "*B T"] | None = None


Bounds = tuple[MaskInputs, MaskInputs]
"""Lower and upper bounds of the mask's inputs in each block of tokens; see ``bounds``."""


@dataclass(frozen=True)
class Mask:
    """An attention mask within segments: tokens of different segments never see each other.

    Attributes:
      kind: ``causal`` (a token sees itself and earlier tokens by order), ``full``, or ``words`` (a token sees itself
        and the tokens that share a bit of a rule with it, see ``language``).
      window: width of the sliding window over earlier tokens, the token itself included; 0 means no limit. It limits
        ``causal`` and the relation "before".
      grid_window: edge of the windows that segments are cut into along every axis of positions. A token sees only its
        own window, and by the relation "in item" its whole item. 0 means no windows.
      relations: the relation of each rule bit, for kind ``words``.
      words_show_intervals: whether rules show each token one interval of keys (see ``Rules.shows_intervals``), for kind
        ``words``.

    Raises:
      ValueError: there is a window, but no rule for earlier tokens; or relations and kind do not fit.
    """

    kind: MaskKind
    window: int = 0
    grid_window: int = 0
    relations: tuple[Relation, ...] = ()
    words_show_intervals: bool = False

    def __post_init__(self) -> None:
        if self.window and self.kind != "causal" and "before" not in self.relations:
            fix = "use 'causal', or a window of 0"
            raise ValueError(f"window={self.window}: a mask that is {self.kind!r} has none; {fix}")
        if bool(self.relations) != (self.kind == "words"):
            fix = "give one for each rule of 'words', and none otherwise"
            raise ValueError(f"relations={self.relations!r}: the mask is {self.kind!r}; {fix}")

    @classmethod
    def of(cls, rules: Rules | str, window: int = 0, grid_window: int = 0) -> Mask:
        """The mask that rules describe, with a kind and relations from them.

        Args:
          rules: the rules, a line of rules, or the name of a preset such as "causal".
          window: width of the sliding window over earlier tokens, ignored where no rule is about these; 0 is no limit.
          grid_window: edge of the windows that segments are cut into along every axis of positions; 0 means no windows.

        Raises:
          ConfigError: the line is wrong.
        """
        rules = Rules.parse(rules) if isinstance(rules, str) else rules
        has_before = rules.kind == "causal" or "before" in rules.relations
        shows_intervals = rules.kind == "words" and rules.shows_intervals
        return cls(rules.kind, window if has_before else 0, grid_window, rules.relations, shows_intervals)

    @property
    def shows_intervals(self) -> bool:
        """Whether each query sees one interval of the keys of its row, if tokens of each medium are neighbours.

        A grid cuts an image into windows of several pieces, and a text into chunks of one.
        """
        if self.kind == "words":
            return self.words_show_intervals
        return self.kind == "causal" or not self.grid_window

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the host inputs that the mask reads, "segments" first; "order" is optional (see
        ``Tokens.order_BT``).
        """
        order = ["order"] * (self.kind != "full")
        words = ["is", "attends"] * (self.kind == "words") + ["items"] * (ITEMS in self.relations)
        return ("segments", *order, *["positions"] * bool(self.grid_window), *words)

    def inputs(self, tokens: Tokens) -> MaskInputs:
        """This mask's inputs, from the host inputs of ``tokens``; ``None`` for those that it does not read.

        Raises:
          ValueError: a host input is missing: positions for a grid window, or "is", "attends" and "items" for words.
        """
        segments_BT = tokens.segments_BT
        order = None if self.kind == "full" else tokens.orders_BT
        windows = None
        if self.grid_window:
            windows = tokens.positions.reshape(*segments_BT.shape, -1) // self.grid_window
        if self.kind != "words":
            return MaskInputs(segments_BT, order, windows)
        items = tokens.input("items") if ITEMS in self.relations else None
        return MaskInputs(segments_BT, order, windows, tokens.input("is"), tokens.input("attends"), items)

    def allowed(self, queries: MaskInputs, keys: MaskInputs) -> Bool[Array, "*B T S"]:
        """Whether each query sees each key, from the results of ``inputs`` for both. Padding sees padding."""
        allowed = queries.segments[..., :, None] == keys.segments[..., None, :]
        if queries.order is not None and keys.order is not None:
            distance = queries.order[..., :, None] - keys.order[..., None, :]
            if self.kind == "words":
                return allowed & (self._rules_allow(queries, keys, distance) | (distance == 0))
            allowed &= self._is_before(distance)
        if queries.windows is not None and keys.windows is not None:
            allowed &= _equal(queries.windows, keys.windows)
        return allowed

    def may_allow(self, queries: Bounds, keys: Bounds) -> Bool[Array, "*B P N"]:
        """Whether any query of a block may see any key of another block, from the results of ``bounds`` for both.

        True may be too much. The result is never False where ``allowed`` is True for a pair of tokens that are not
        padding.
        """
        (low, high), (key_low, key_high) = queries, keys
        may_see = _overlap(low.segments, high.segments, key_low.segments, key_high.segments)
        may_see &= (high.segments > 0)[..., :, None] & (key_high.segments > 0)[..., None, :]
        if low.order is not None and high.order is not None:
            assert key_low.order is not None and key_high.order is not None
            may_be_before = key_low.order[..., None, :] <= high.order[..., :, None]
            if self.window:
                may_be_before &= low.order[..., :, None] - key_high.order[..., None, :] < self.window
            if self.kind == "words":
                itself = _overlap(low.order, high.order, key_low.order, key_high.order)
                return may_see & (self._rules_may_allow(queries, keys, may_be_before) | itself)
            may_see &= may_be_before
        if low.windows is not None:
            may_see &= _may_equal(queries, keys)
        return may_see

    # ---- words -------------------------------------------------------------------------------------------------------

    def _is_before(self, distance: Int[Array, "*B T S"]) -> Bool[Array, "*B T S"]:
        """Whether keys at these distances before their queries are earlier tokens within the window."""
        return (distance >= 0) & (distance < self.window) if self.window else distance >= 0

    def _rules_allow(
        self, queries: MaskInputs, keys: MaskInputs, distance: Int[Array, "*B T S"]
    ) -> Bool[Array, "*B T S"]:
        """Whether a rule applies: query and key share its bit, and stand in its relation."""
        assert queries.attends is not None and keys.seen_as is not None
        shared = queries.attends[..., :, None] & keys.seen_as[..., None, :]
        conditions = []
        if bits := self._bits("before"):
            conditions.append((shared & bits != 0) & self._is_before(distance))
        if bits := self._bits("everywhere"):
            conditions.append(shared & bits != 0)
        if queries.windows is not None and keys.windows is not None and conditions:
            conditions = [reduce(or_, conditions) & _equal(queries.windows, keys.windows)]
        if bits := self._bits(ITEMS):
            assert queries.items is not None and keys.items is not None
            same = queries.items[..., :, None] == keys.items[..., None, :]
            conditions.append((shared & bits != 0) & same & (keys.items > 0)[..., None, :])
        return reduce(or_, conditions)

    def _rules_may_allow(
        self, queries: Bounds, keys: Bounds, may_be_before: Bool[Array, "*B P N"]
    ) -> Bool[Array, "*B P N"]:
        """Whether a rule may apply to any query of a block and any key of another."""
        (low, high), (key_low, key_high) = queries, keys
        assert high.attends is not None and key_high.seen_as is not None
        shared = high.attends[..., :, None] & key_high.seen_as[..., None, :]
        conditions = []
        if bits := self._bits("before"):
            conditions.append((shared & bits != 0) & may_be_before)
        if bits := self._bits("everywhere"):
            conditions.append(shared & bits != 0)
        if low.windows is not None and conditions:
            conditions = [reduce(or_, conditions) & _may_equal(queries, keys)]
        if bits := self._bits(ITEMS):
            assert low.items is not None and high.items is not None
            assert key_low.items is not None and key_high.items is not None
            same = _overlap(low.items, high.items, key_low.items, key_high.items)
            conditions.append((shared & bits != 0) & same)
        return reduce(or_, conditions)

    def _bits(self, relation: Relation) -> np.uint32:
        """The bits of all rules with this relation; 0 if there are none."""
        return np.uint32(sum(1 << bit for bit, candidate in enumerate(self.relations) if candidate == relation))


def bounds(inputs: MaskInputs, block: int) -> Bounds:
    """Lower and upper bounds of a mask's inputs in each block of ``block`` tokens.

    The inputs, such as ``mask.inputs(tokens)``, are ``[B, T]`` or ``[B, T, A]``, where T is a multiple of ``block``.
    The bounds are two ``MaskInputs`` (lower, upper) with T / ``block`` in place of T, and ``None`` for the same fields.

    For bit fields both bounds are the bits of all tokens of the block. Padding is left out; the upper bound of segments
    in a block of padding alone is at most 0. Tokens of text are left out of the bounds of items.
    """
    import jax
    import jax.numpy as jnp

    real_BT = inputs.segments > 0
    largest = jnp.iinfo(jnp.int32).max

    def blocks(x: Array) -> Array:
        return x.reshape(x.shape[0], -1, block, *x.shape[2:])

    def minimum(x: Array, *, real: Array = real_BT) -> Array:
        real = real if x.ndim == real.ndim else real[..., None]
        return blocks(jnp.where(real, x, largest)).min(axis=2)

    def maximum(x: Array, *, real: Array = real_BT) -> Array:
        return -minimum(-x, real=real)

    def union_of_bits(x: Array | None) -> Array | None:
        if x is None:
            return None
        zero = jnp.uint32(0)
        return jax.lax.reduce(blocks(jnp.where(real_BT, x, zero)), zero, jax.lax.bitwise_or, (2,))

    comparable = inputs._replace(seen_as=None, attends=None, items=None)
    low, high = jax.tree.map(minimum, comparable), jax.tree.map(maximum, comparable)
    words = {"seen_as": union_of_bits(inputs.seen_as), "attends": union_of_bits(inputs.attends)}
    if inputs.items is None:
        return low._replace(**words), high._replace(**words)
    in_item = real_BT & (inputs.items > 0)
    low_items, high_items = minimum(inputs.items, real=in_item), maximum(inputs.items, real=in_item)
    return low._replace(**words, items=low_items), high._replace(**words, items=high_items)


def _equal(query_windows: Array, key_windows: Array) -> Bool[Array, "*B T S"]:
    """Whether query and key are in the same window along every axis."""
    axes = range(query_windows.shape[-1])
    return reduce(and_, (query_windows[..., :, None, axis] == key_windows[..., None, :, axis] for axis in axes))


def _may_equal(queries: Bounds, keys: Bounds) -> Bool[Array, "*B P N"]:
    """Whether any query of a block may be in the same window as any key of another."""
    windows = [inputs.windows for inputs in (*queries, *keys) if inputs.windows is not None]
    axes = range(windows[0].shape[-1])
    return reduce(and_, (_overlap(*(bound[..., axis] for bound in windows)) for axis in axes))


def _overlap(low: Array, high: Array, key_low: Array, key_high: Array) -> Bool[Array, "*B P N"]:
    """Whether the ranges of values of a block of queries and of a block of keys overlap."""
    return (low[..., :, None] <= key_high[..., None, :]) & (key_low[..., None, :] <= high[..., :, None])
