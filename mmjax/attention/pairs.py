"""Counts of the keys that each query sees, under a ``Mask`` or a mask defined token by token. NumPy alone.

Shapes: T tokens, Q queries, N blocks of tokens, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Int

from mmjax.attention.language import ITEMS, Relation
from mmjax.attention.mask import Mask


class Pairs(Protocol):
    """The pairs of query and key that a mask allows."""

    @property
    def tokens(self) -> int:
        """Number of tokens T; each is a query and a key."""
        ...

    def key_counts(self, key_filter_T: Bool[np.ndarray, " T"] | None = None) -> Int[np.ndarray, " T"]:
        """The number of keys that each query sees: of all keys, or of those where ``key_filter_T`` is True."""
        ...


@dataclass(frozen=True)
class Intervals:
    """A mask under which each query sees one interval of keys.

    Attributes:
      first_T, last_T: the first key of each interval, and the key behind its last.
    """

    first_T: Int[np.ndarray, " T"]
    last_T: Int[np.ndarray, " T"]

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return len(self.first_T)

    def key_counts(self, key_filter_T: Bool[np.ndarray, " T"] | None = None) -> Int[np.ndarray, " T"]:
        """The number of keys that each query sees: of all keys, or of those where ``key_filter_T`` is True."""
        if key_filter_T is None:
            return self.last_T - self.first_T
        before = _counts_before(key_filter_T)
        return before[self.last_T] - before[self.first_T]


@dataclass(frozen=True)
class Words:
    """A mask by bit fields of kinds: a query sees the keys of the kinds that it attends to (Cornstarch §4.3.1).

    Attributes:
      is_T: the kinds of each token as a key.
      attends_T: the kinds that each token attends to as a query.
      causal: whether a query sees no later keys.
    """

    is_T: Int[np.ndarray, " T"]
    attends_T: Int[np.ndarray, " T"]
    causal: bool

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return len(self.is_T)

    def key_counts(self, key_filter_T: Bool[np.ndarray, " T"] | None = None) -> Int[np.ndarray, " T"]:
        """The number of keys that each query sees: of all keys, or of those where ``key_filter_T`` is True."""
        result = np.zeros(self.tokens, np.int64)
        for attended, queries in self._queries():
            visible_T = (self.is_T & attended) != 0
            before = _counts_before(visible_T if key_filter_T is None else visible_T & key_filter_T)
            result[queries] = before[queries + 1] if self.causal else before[-1]
        return result

    def _queries(self) -> Iterator[tuple[int, Int[np.ndarray, " Q"]]]:
        """The different values of ``attends``, each with its queries; there are few, however many tokens there are."""
        for attended in np.unique(self.attends_T):
            yield attended, np.flatnonzero(self.attends_T == attended)


@dataclass(frozen=True)
class MaskedRow:
    """The pairs that a mask allows in one row of tokens, in any order; padding neither sees nor is seen.

    Attributes:
      mask: the attention mask.
      inputs: the host inputs of the mask by name, of one row: [T], or [T, A] for positions along several axes.
    """

    mask: Mask
    inputs: Mapping[str, np.ndarray]

    @property
    def tokens(self) -> int:
        """Number of tokens T, padding included."""
        return len(self.inputs["segments"])

    def key_counts(self, key_filter_T: Bool[np.ndarray, " T"] | None = None) -> Int[np.ndarray, " T"]:
        """The number of keys that each query sees: of all keys, or of those where ``key_filter_T`` is True. 0 for
        padding.
        """
        real_T, result = self.inputs["segments"] > 0, np.zeros(self.tokens, np.int64)
        key_filter_T = real_T if key_filter_T is None else real_T & key_filter_T
        for attended in np.unique(self._attends[real_T]):
            queries = np.flatnonzero(real_T & (self._attends == attended))
            result[queries] = self._key_counts(attended, queries, key_filter_T)
        return result

    def _key_counts(self, attended: np.ndarray, queries: Int[np.ndarray, " Q"], key_filter_T: np.ndarray) -> np.ndarray:
        """The number of keys in the filter that each query sees; the queries have the same value of "attends".

        A key that a query sees by several rules counts once.
        """
        shared_T = self._is & attended
        everywhere = shared_T & self._bits("everywhere") != 0
        before = (shared_T & self._bits("before") != 0) & ~everywhere
        in_item = (shared_T & self._bits(ITEMS) != 0) & (self._items > 0)
        itself = ~(everywhere | before | in_item) & key_filter_T
        everywhere, before, in_item = (keys_T & key_filter_T for keys_T in (everywhere, before, in_item))
        segments, items, both = self._groups
        return (
            self._of_group(segments, everywhere, queries)
            + self._count_before(segments, before, queries)
            + self._of_group(items, in_item, queries)
            - self._of_group(both, in_item & everywhere, queries)
            - self._count_before(both, in_item & before, queries)
            + itself[queries]
        )

    @cached_property
    def _groups(self) -> tuple[Int[np.ndarray, " T"], Int[np.ndarray, " T"], Int[np.ndarray, " T"]]:
        """The group numbers of each token: by segment (and grid window), by item, and by both."""
        columns = [self.inputs["segments"]]
        if self.mask.grid_window:
            columns += [*(self.inputs["positions"].reshape(self.tokens, -1) // self.mask.grid_window).T]
        segments, items = _numbered(columns), _numbered([columns[0], self._items])
        return segments, items, _numbered([segments, items])

    def _of_group(self, group_T: np.ndarray, flags_T: np.ndarray, queries: np.ndarray) -> np.ndarray:
        """The number of flagged keys in the group of each query."""
        return np.bincount(group_T[flags_T], minlength=group_T.max(initial=0) + 1)[group_T[queries]]

    def _count_before(self, group_T: np.ndarray, flags_T: np.ndarray, queries: np.ndarray) -> np.ndarray:
        """The number of flagged keys in the group of each query that are not behind it and in its sliding window."""
        order_T = self._order + 1
        span = int(order_T.max(initial=0)) + 1
        keys = np.sort(group_T[flags_T] * span + order_T[flags_T])
        least = np.maximum(order_T[queries] - self.mask.window, 0) if self.mask.window else 0
        ends = (group_T[queries] * span + order for order in (order_T[queries], least))
        upto, below = (np.searchsorted(keys, end, side="right") for end in ends)
        return upto - below

    def _bits(self, relation: Relation) -> np.uint32:
        relations = self.mask.relations or ({"causal": "before", "full": "everywhere"}[self.mask.kind],)
        return np.uint32(sum(1 << bit for bit, candidate in enumerate(relations) if candidate == relation))

    @cached_property
    def _order(self) -> Int[np.ndarray, " T"]:
        return np.asarray(self.inputs.get("order", np.arange(self.tokens)), np.int64)

    @cached_property
    def _items(self) -> Int[np.ndarray, " T"]:
        return self.inputs["items"] if ITEMS in self.mask.relations else np.zeros(self.tokens, np.int64)

    @cached_property
    def _is(self) -> np.ndarray:
        return self.inputs["is"] if self.mask.kind == "words" else np.ones(self.tokens, np.uint32)

    @cached_property
    def _attends(self) -> np.ndarray:
        return self.inputs["attends"] if self.mask.kind == "words" else np.ones(self.tokens, np.uint32)


def pairs_of(mask: Mask, inputs: Mapping[str, np.ndarray]) -> Pairs:
    """The pairs that a mask allows in one row of T tokens; its ``key_counts()`` are the keys that each query sees.

    Counting takes about O(T · K) for K different values of "attends".

    Args:
      mask: the attention mask, such as ``Mask("causal")``.
      inputs: the row's host inputs by name, ``[T]`` or ``[T, A]``, including those of ``mask.input_names``, such as
        {"segments": np.array([1, 1, 2, 0])}, with tokens in any order; without "order" tokens are in row order.
    """
    return MaskedRow(mask, {name: np.asarray(inputs[name]) for name in mask.input_names if name in inputs})


def _numbered(columns: Sequence[Int[np.ndarray, " T"]]) -> Int[np.ndarray, " T"]:
    """Numbers the different combinations of values of the columns; the number of each token's combination."""
    numbers = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        shifted = column - column.min(initial=0)
        numbers = np.unique(numbers * (int(shifted.max(initial=0)) + 1) + shifted, return_inverse=True)[1].reshape(-1)
    return numbers


def _counts_before(key_filter_T: Bool[np.ndarray, " T"]) -> Int[np.ndarray, " T+1"]:
    """The number of filtered tokens before each token, and in total."""
    return np.concatenate([[0], np.cumsum(key_filter_T, dtype=np.int64)])


def block_work(pairs: Pairs, block: int) -> Int[np.ndarray, " N"]:
    """The number of allowed pairs of each block of ``block`` queries, N = T / ``block`` rounded up; the last block may
    be shorter.

    ``pairs`` is the mask of a row, as ``pairs_of`` gives it. For 4 tokens of one segment under a causal mask and blocks
    of 2 the result is [3, 7].
    """
    return np.add.reduceat(pairs.key_counts(), np.arange(0, pairs.tokens, block))


def rank_work(pairs: Pairs, block: int, rank_N: Int[np.ndarray, " N"], ranks: int) -> Int[np.ndarray, "R R"]:
    """The number of allowed pairs by the rank of the query (row) and the rank of the key (column).

    Args:
      pairs: the mask of a row, as ``pairs_of`` gives it.
      block: tokens of a block.
      rank_N: the rank of each block of queries and keys, from 0, as ``distribution.lpt`` gives it.
      ranks: the number of ranks.
    """
    rank_T = np.repeat(rank_N, block)[: pairs.tokens]
    columns = [np.bincount(rank_T, pairs.key_counts(rank_T == key), ranks) for key in range(ranks)]
    return np.stack(columns, axis=1).astype(np.int64)


def round_work(work_RR: Int[np.ndarray, "R R"]) -> int:
    """The pairs of the busiest rank in each round of a ring, summed: in round k rank r has the keys of rank r + k.

    ``work_RR`` has the allowed pairs by the rank of the query (row) and of the key (column), as ``rank_work`` gives
    them.
    """
    ranks = np.arange(len(work_RR))
    return sum(int(work_RR[ranks, (ranks + k) % len(ranks)].max()) for k in ranks)
