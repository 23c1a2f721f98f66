"""How many keys each query sees under a mask that is given token by token. NumPy alone.

Shapes: T tokens, N blocks of tokens, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Int


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
