"""Tokens distributed over context-parallel ranks: pairs of the fullest rank by method, under masks like the paper's.

The setting is that of Cornstarch's Table 4: eight ranks, 16k to 64k tokens, 50 random masks of each type in its Figure
11. Pairs are *counted*; no attention runs. How the paper draws its masks is not said, so ratios are to be compared, and
not too closely. Times are those of the distribution itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from time import perf_counter

import numpy as np

from mmjax.attention.distribution import METHODS, lpt
from mmjax.attention.pairs import Intervals, block_work, rank_work, round_work
from mmjax.benches.rows import Row, Target, at_most

RANKS, BLOCK, MASKS = 8, 128, 50
LENGTHS = (16_384, 32_768, 65_536)
COMPARED = ("lpt", "random", "contiguous", "zigzag")
PUBLISHED = {
    (16_384, "EP"): (3.92, 3.93, 4.24, 3.96),
    (16_384, "EE"): (4.31, 4.32, 4.86, 4.37),
    (16_384, "MP"): (3.00, 2.99, 3.12, 3.08),
    (32_768, "EP"): (10.01, 10.07, 11.76, 10.21),
    (32_768, "EE"): (11.12, 11.12, 13.43, 11.60),
    (32_768, "MP"): (6.09, 6.18, 6.76, 6.57),
    (65_536, "EP"): (25.43, 25.48, 32.24, 28.17),
    (65_536, "EE"): (36.99, 37.12, 46.67, 37.36),
    (65_536, "MP"): (14.18, 14.15, 16.56, 15.33),
}
"""Milliseconds of attention (Table 4), by tokens and mask, in the order of `COMPARED`; "Naive Ring" is contiguous."""


def bench_cp(rounds: int) -> Iterator[Row]:
    """Ratios to LPT by mask, what equal tokens cost, then large sequences."""
    for (length, name), published in PUBLISHED.items():
        fullest = np.mean([_fullest(_mask(name, length, seed)) for seed in range(MASKS)], axis=0)
        for i, method in enumerate(COMPARED[1:], 1):
            case = f"{name}, {length} tokens: {method} / lpt"
            yield _row(f"{case}, fullest rank, counted", fullest[i, 0] / fullest[0, 0], "ratio")
            yield _row(f"{case}, by rounds of a ring, counted", fullest[i, 1] / fullest[0, 1], "ratio")
            yield _row(f"{case}, published", published[i] / published[0], "ratio")
        yield _row(f"{name}, {length} tokens: lpt, fullest / mean", fullest[0, 0], "ratio")
    yield from _large(rounds)


def _large(rounds: int) -> Iterator[Row]:
    work = block_work(_mask("EE", 2**20, 0), BLOCK)
    seconds = []
    for _ in range(max(3, rounds)):
        begun = perf_counter()
        found = lpt(work, RANKS)
        seconds.append(perf_counter() - begun)
    yield _row("1M tokens, blocks of 128, 8 ranks: lpt", 1e3 * min(seconds), "ms", at_most(1.5))
    yield _row("1M tokens, 8 ranks: lpt, fullest / mean", _over_mean(work, found, RANKS), "ratio", at_most(1.001))
    work = block_work(_mask("EE", 65_536, 0), BLOCK)
    most = work.max() / (work.sum() / 64)
    excess = _over_mean(work, lpt(work, 64), 64) - 1
    yield _row("64k tokens, 64 ranks: lpt, excess over the mean", excess, "ratio", at_most(most))


def _row(case: str, value: float, unit: str, target: Target | None = None) -> Row:
    return Row(bench="cp", case=case, value=float(value), unit=unit, target=target)


def _over_mean(work: np.ndarray, ranks: np.ndarray, count: int) -> float:
    loads = np.bincount(ranks, work, count)
    return loads.max() / loads.mean()


def _fullest(mask: Intervals) -> list[tuple[float, float]]:
    """By method, pairs of the fullest rank over the mean: all at once, and by rounds of a ring."""
    work, found = block_work(mask, BLOCK), []
    for method in COMPARED:
        ranks = METHODS[method](work, RANKS)
        by_rounds = round_work(rank_work(mask, BLOCK, ranks, RANKS)) / (work.sum() / RANKS)
        found.append((_over_mean(work, ranks, RANKS), by_rounds))
    return found


# ---- masks (Figure 11) -----------------------------------------------------------------------------------------------


def _mask(name: str, length: int, seed: int) -> Intervals:
    return _DRAWN[name](length, np.random.default_rng(seed))


def prepended(length: int, rng: np.random.Generator) -> Intervals:
    """One to four media in front, each of which sees itself; then text, which sees all before it."""
    media = _cuts(int(length * rng.uniform(0.2, 0.7)), int(rng.integers(1, 5)), rng)
    first, last = np.zeros(length, np.int64), np.arange(1, length + 1)
    _see_themselves(first, last, media[:-1], media[1:])
    return Intervals(first, last)


def embedded(length: int, rng: np.random.Generator) -> Intervals:
    """Text with four to sixteen media in it, each of which sees itself."""
    count = int(rng.integers(4, 17))
    cuts = _cuts(length, 2 * count, rng)
    first, last = np.zeros(length, np.int64), np.arange(1, length + 1)
    _see_themselves(first, last, cuts[1::2], cuts[2::2])
    return Intervals(first, last)


def packed(length: int, rng: np.random.Generator) -> Intervals:
    """Four to twelve samples one behind the other, each a text with one to three media."""
    first, last = np.zeros(length, np.int64), np.arange(1, length + 1)
    ends = _cuts(length, int(rng.integers(4, 13)), rng)
    for begin, end in pairwise(ends):
        first[begin:end] = begin
        cuts = begin + _cuts(end - begin, 2 * int(rng.integers(1, 4)), rng)
        _see_themselves(first, last, cuts[1::2], cuts[2::2])
    return Intervals(first, last)


def _cuts(length: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Where so many parts of random length begin, and where the last one ends."""
    return np.concatenate([[0], np.sort(rng.integers(0, length + 1, parts - 1)), [length]])


def _see_themselves(first: np.ndarray, last: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
    for begin, end in zip(begins, ends, strict=True):
        first[begin:end], last[begin:end] = begin, end


_DRAWN: dict[str, Callable[[int, np.random.Generator], Intervals]] = {"EP": prepended, "EE": embedded, "MP": packed}
