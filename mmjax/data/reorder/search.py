"""Searches for an order of microbatches by moves and exchanges; all candidates of a round are timed at once.

A *line* is a pipeline with separate microbatches: that of one dp rank, or of all of them if they run in step. The
slowest line counts. The search draws from a fixed sequence and stops after a fixed number of timings (`Effort`), never
by the clock, so every process finds the same order.

Legend: C costs that vary, M microbatches of a line, L lines, K cases, I microbatches of all lines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmjax.schedule.recurrence import Recurrence


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Limits of a search.

    cases: number of orders that are timed in a round. timings: the most timings of an op in a case, in all rounds
    together. rounds: the most rounds. patience: number of rounds without gain after which the search ends.
    """

    cases: int = 256
    timings: int = 1_600_000
    rounds: int = 48
    patience: int = 6

    def rounds_of(self, ops: int) -> int:
        """Number of rounds for a schedule of `ops` ops: at most `rounds`, and within `timings`."""
        return min(self.rounds, self.timings // max(1, ops * self.cases))


class Draws:
    """Pseudorandom integers: SplitMix64 (Steele et al. 2014), the same on every machine."""

    def __init__(self) -> None:
        self._state = 0

    def below(self, limit: np.ndarray | int, count: int) -> np.ndarray:
        """The next `count` numbers of the sequence, int64, each from 0 to `limit` - 1.

        limit: one for all numbers, or an array of `count` limits.
        """
        numbers = np.arange(self._state + 1, self._state + count + 1, dtype=np.uint64)
        self._state += count
        z = numbers * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        return (z % np.asarray(limit, np.uint64)).astype(np.int64)


def improve(
    recurrence: Recurrence,
    sizes_CI: np.ndarray,
    order_ML: np.ndarray,
    rows_L: np.ndarray,
    *,
    enough: float = 0.0,
    effort: Effort | None = None,
) -> np.ndarray:
    """Searches from `order_ML` for an order whose slowest line takes less time; returns it as a new array [M, L].

    A line is a dp rank's pipeline, or that of all ranks in step. Microbatches move inside their line, and are exchanged
    between the slowest line and other lines of as many rows.

    Args:
      recurrence: times the schedule, such as `Recurrence(schedule, costs, ["vision.0"])`.
      sizes_CI: seconds of the I = M·L microbatches, C in the order of `recurrence.keys`, such as ("F", "vision.0").
      order_ML: the microbatches of each line in the order in which they run, by place (from 0) in `sizes_CI`.
      rows_L: rows of each line.
      enough: the search ends once the slowest line takes so many seconds or less.
      effort: limits of the search; `Effort()` by default.
    """
    effort = effort or Effort()
    order_ML = order_ML.copy()
    sizes_CI = sizes_CI.astype(np.float32)  # half the bytes; the result is timed again in full precision
    microbatches, lines = order_ML.shape
    spans_L = recurrence.makespans(sizes_CI[:, order_ML])
    draws, idle = Draws(), 0
    for _ in range(effort.rounds_of(len(recurrence.ops)) if microbatches > 1 else 0):
        before = spans_L.max()
        if before <= enough:
            break
        slowest = int(spans_L.argmax())
        peers = np.flatnonzero((rows_L == rows_L[slowest]) & (np.arange(lines) != slowest))
        pairs = effort.cases // 4 if len(peers) else 0
        moves = _moves(order_ML, spans_L, effort.cases - 2 * pairs, draws)
        swaps = _exchanges(order_ML, slowest, peers, pairs, draws)
        trial_MK = np.concatenate([moves[1], swaps[1]], axis=1)
        spans_K = recurrence.makespans(sizes_CI[:, trial_MK])
        _take_moves(order_ML, spans_L, *moves, spans_K[: len(moves[0])])
        if pairs:
            _take_exchange(order_ML, spans_L, slowest, *swaps, spans_K[len(moves[0]) :])
        idle = 0 if spans_L.max() < before else idle + 1
        if idle == effort.patience:
            break
    return order_ML


def _moves(order_ML: np.ndarray, spans_L: np.ndarray, cases: int, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Cases that move one microbatch of a slow line, or swap two: (lines [K], orders [M, K])."""
    microbatches = len(order_ML)
    slow = np.argsort(-spans_L, kind="stable")
    near = int((spans_L >= 0.99 * spans_L.max()).sum())
    line_K = slow[np.arange(cases) % max(1, min(near, cases // 8))]
    one_K = draws.below(microbatches, cases)
    other_K = (one_K + 1 + draws.below(microbatches - 1, cases)) % microbatches
    place_M1 = np.arange(microbatches)[:, None]
    from_MK = np.where(
        one_K < other_K,
        place_M1 + ((place_M1 >= one_K) & (place_M1 < other_K)),
        place_M1 - ((place_M1 > other_K) & (place_M1 <= one_K)),
    )
    from_MK[other_K, np.arange(cases)] = one_K
    swap_K = draws.below(2, cases) == 0
    swapped_MK = np.where(place_M1 == one_K, other_K, np.where(place_M1 == other_K, one_K, place_M1))
    return line_K, order_ML[np.where(swap_K, swapped_MK, from_MK), line_K]


def _exchanges(
    order_ML: np.ndarray, slowest: int, peers: np.ndarray, pairs: int, draws: Draws
) -> tuple[np.ndarray, np.ndarray]:
    """Cases in which the slowest line and another one exchange a microbatch.

    Returns:
      The other lines [pairs], and orders [M, 2 · pairs], first those of the slowest line.
    """
    microbatches = len(order_ML)
    if not pairs:
        return np.empty(0, np.int64), np.empty((microbatches, 0), np.int64)
    other_K, every = peers[draws.below(len(peers), pairs)], np.arange(pairs)
    mine_K, theirs_K = draws.below(microbatches, pairs), draws.below(microbatches, pairs)
    mine_MK = np.repeat(order_ML[:, slowest : slowest + 1], pairs, axis=1)
    theirs_MK = order_ML[:, other_K]
    taken_K = theirs_MK[theirs_K, every].copy()
    theirs_MK[theirs_K, every] = mine_MK[mine_K, every]
    mine_MK[mine_K, every] = taken_K
    return other_K, np.concatenate([mine_MK, theirs_MK], axis=1)


def _take_moves(
    order_ML: np.ndarray, spans_L: np.ndarray, line_K: np.ndarray, trial_MK: np.ndarray, spans_K: np.ndarray
) -> None:
    """Gives each line its best case, if that is shorter."""
    for line in np.unique(line_K).tolist():
        cases = np.flatnonzero(line_K == line)
        best = cases[spans_K[cases].argmin()]
        if spans_K[best] < spans_L[line]:
            order_ML[:, line], spans_L[line] = trial_MK[:, best], spans_K[best]


def _take_exchange(
    order_ML: np.ndarray,
    spans_L: np.ndarray,
    slowest: int,
    other_K: np.ndarray,
    trial_MK: np.ndarray,
    spans_K: np.ndarray,
) -> None:
    """Makes the best exchange, unless a move has made the slowest line as short or changed the other line."""
    pairs = len(other_K)
    longer_K = np.maximum(spans_K[:pairs], spans_K[pairs:])
    best = int(longer_K.argmin())
    peer = int(other_K[best])
    same = sorted([*order_ML[:, slowest], *order_ML[:, peer]]) == sorted(
        [*trial_MK[:, best], *trial_MK[:, pairs + best]]
    )
    if same and longer_K[best] < max(spans_L[slowest], spans_L[peer]):
        for line, case in ((slowest, best), (peer, pairs + best)):
            order_ML[:, line], spans_L[line] = trial_MK[:, case], spans_K[case]
