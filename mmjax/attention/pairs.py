"""How many keys each query sees, under a ``Mask`` or one that is given token by token. NumPy alone.

Shapes: T tokens, N blocks of tokens, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Int

from mmjax.attention.language import ITEMS, How
from mmjax.attention.mask import Mask


class Pairs(Protocol):
    """Pairs of a query and a key that it sees."""

    @property
    def tokens(self) -> int:
        """Number of tokens T; each is a query and a key."""
        ...

    def counted(self, among_T: Bool[np.ndarray, " T"] | None = None) -> Int[np.ndarray, " T"]:
        """Number of keys that each query sees, of all or of some keys."""
        ...


@dataclass(frozen=True)
class Intervals:
    """Each query sees one run of keys.

    first_T, last_T: its first key, and the one behind its last.
    """

    first_T: Int[np.ndarray, " T"]
    last_T: Int[np.ndarray, " T"]

    @property
    def tokens(self) -> int:
        return len(self.first_T)

    def counted(self, among_T: Bool[np.ndarray, " T"] | None = None) -> Int[np.ndarray, " T"]:
        if among_T is None:
            return self.last_T - self.first_T
        before = _before(among_T)
        return before[self.last_T] - before[self.first_T]


@dataclass(frozen=True)
class Words:
    """A query sees the keys that are of a kind which it attends, bit by bit (Cornstarch §4.3.1).

    is_T, attends_T: kinds of each token as a key, and those that it attends as a query.
    causal: whether it sees none behind itself.
    """

    is_T: Int[np.ndarray, " T"]
    attends_T: Int[np.ndarray, " T"]
    causal: bool

    @property
    def tokens(self) -> int:
        return len(self.is_T)

    def counted(self, among_T: Bool[np.ndarray, " T"] | None = None) -> Int[np.ndarray, " T"]:
        result = np.zeros(self.tokens, np.int64)
        for attended, queries in self._queries():
            seen = (self.is_T & attended) != 0
            before = _before(seen if among_T is None else seen & among_T)
            result[queries] = before[queries + 1] if self.causal else before[-1]
        return result

    def _queries(self) -> Iterator[tuple[int, Int[np.ndarray, " Q"]]]:
        """Each set of kinds that any query attends, and these queries; few, however many tokens there are."""
        for attended in np.unique(self.attends_T):
            yield attended, np.flatnonzero(self.attends_T == attended)


@dataclass(frozen=True)
class Row:
    """What a mask allows in one row of tokens, in any order; padding neither sees nor is seen.

    mask: the mask.
    inputs: by name the host inputs that it reads, of one row: [T], or [T, A] for positions along several axes.
    """

    mask: Mask
    inputs: Mapping[str, np.ndarray]

    @property
    def tokens(self) -> int:
        return len(self.inputs["segments"])

    def counted(self, among_T: Bool[np.ndarray, " T"] | None = None) -> Int[np.ndarray, " T"]:
        real_T, result = self.inputs["segments"] > 0, np.zeros(self.tokens, np.int64)
        seen_T = real_T if among_T is None else real_T & among_T
        for attended in np.unique(self._attends[real_T]):
            queries = np.flatnonzero(real_T & (self._attends == attended))
            result[queries] = self._counted(attended, queries, seen_T)
        return result

    def _counted(self, attended: np.ndarray, queries: Int[np.ndarray, " Q"], seen_T: np.ndarray) -> np.ndarray:
        """Keys among ``seen_T`` that each of some queries sees, which attend the same bits; each counts once."""
        shared_T = self._is & attended
        everywhere, before, in_item = (shared_T & self._bits(how) != 0 for how in ("everywhere", "before", ITEMS))
        before, in_item = before & ~everywhere, in_item & (self._items > 0)
        itself = ~(everywhere | before | in_item) & seen_T
        everywhere, before, in_item = (own & seen_T for own in (everywhere, before, in_item))
        segments, items, both = self._groups
        return (
            self._of_group(segments, everywhere, queries)
            + self._before(segments, before, queries)
            + self._of_group(items, in_item, queries)
            - self._of_group(both, in_item & everywhere, queries)
            - self._before(both, in_item & before, queries)
            + itself[queries]
        )

    @cached_property
    def _groups(self) -> tuple[Int[np.ndarray, " T"], Int[np.ndarray, " T"], Int[np.ndarray, " T"]]:
        """By token, the number of its segment, or of its window in it; of its item; and of what it shares of both."""
        columns = [self.inputs["segments"]]
        if self.mask.grid_window:
            columns += [*(self.inputs["positions"].reshape(self.tokens, -1) // self.mask.grid_window).T]
        segments, items = _numbered(columns), _numbered([columns[0], self._items])
        return segments, items, _numbered([segments, items])

    def _of_group(self, group_T: np.ndarray, flags_T: np.ndarray, queries: np.ndarray) -> np.ndarray:
        """Flagged keys in the group of each query."""
        return np.bincount(group_T[flags_T], minlength=group_T.max(initial=0) + 1)[group_T[queries]]

    def _before(self, group_T: np.ndarray, flags_T: np.ndarray, queries: np.ndarray) -> np.ndarray:
        """Flagged keys in the group of each query that are not behind it, and in its window."""
        order_T = self._order + 1
        span = int(order_T.max(initial=0)) + 1
        keys = np.sort(group_T[flags_T] * span + order_T[flags_T])
        least = np.maximum(order_T[queries] - self.mask.window, 0) if self.mask.window else 0
        ends = (group_T[queries] * span + order for order in (order_T[queries], least))
        upto, below = (np.searchsorted(keys, end, side="right") for end in ends)
        return upto - below

    def _bits(self, how: How) -> np.uint32:
        hows = self.mask.hows or ({"causal": "before", "full": "everywhere"}[self.mask.kind],)
        return np.uint32(sum(1 << bit for bit, own in enumerate(hows) if own == how))

    @cached_property
    def _order(self) -> Int[np.ndarray, " T"]:
        return np.asarray(self.inputs.get("order", np.arange(self.tokens)), np.int64)

    @cached_property
    def _items(self) -> Int[np.ndarray, " T"]:
        return self.inputs["items"] if ITEMS in self.mask.hows else np.zeros(self.tokens, np.int64)

    @cached_property
    def _is(self) -> np.ndarray:
        return self.inputs["is"] if self.mask.kind == "words" else np.ones(self.tokens, np.uint32)

    @cached_property
    def _attends(self) -> np.ndarray:
        return self.inputs["attends"] if self.mask.kind == "words" else np.ones(self.tokens, np.uint32)


def pairs_of(mask: Mask, inputs: Mapping[str, np.ndarray]) -> Pairs:
    """What a mask allows in one row, in about O(T · K) for K different sets of bits that its tokens attend.

    Args:
      mask: the mask.
      inputs: the row's host inputs, those of ``mask.reads`` among them, in any order of tokens; without "order" it is
        that of the row.
    """
    return Row(mask, {name: np.asarray(inputs[name]) for name in mask.reads if name in inputs})


def _numbered(columns: Sequence[Int[np.ndarray, " T"]]) -> Int[np.ndarray, " T"]:
    """The number of each token among those that differ in some column."""
    found = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        own = column - column.min(initial=0)
        found = np.unique(found * (int(own.max(initial=0)) + 1) + own, return_inverse=True)[1].reshape(-1)
    return found


def _before(among_T: Bool[np.ndarray, " T"]) -> Int[np.ndarray, " T+1"]:
    """How many there are before each token, and in all."""
    return np.concatenate([[0], np.cumsum(among_T, dtype=np.int64)])


def block_work(pairs: Pairs, block: int) -> Int[np.ndarray, " N"]:
    """Pairs of the queries of each block of so many tokens; the last block may be shorter."""
    return np.add.reduceat(pairs.counted(), np.arange(0, pairs.tokens, block))


def rank_work(pairs: Pairs, block: int, rank_N: Int[np.ndarray, " N"], ranks: int) -> Int[np.ndarray, "R R"]:
    """Pairs by the rank of the query and the rank of the key."""
    rank_T = np.repeat(rank_N, block)[: pairs.tokens]
    columns = [np.bincount(rank_T, pairs.counted(rank_T == key), ranks) for key in range(ranks)]
    return np.stack(columns, axis=1).astype(np.int64)


def round_work(work_RR: Int[np.ndarray, "R R"]) -> int:
    """Pairs of the fullest rank, round by round, in a ring: in round k rank r has the keys of rank r + k."""
    ranks = np.arange(len(work_RR))
    return sum(int(work_RR[ranks, (ranks + k) % len(ranks)].max()) for k in ranks)
