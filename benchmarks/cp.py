"""Tokens distributed over context-parallel ranks: work of the fullest rank by method, under masks like the paper's.

The setting is that of Cornstarch's Table 4: eight ranks, 16k to 64k tokens, 50 random masks of each type in its Figure
11. Pairs are *counted*. Attention is *timed* under a few of the masks, of one head: the share of the fullest rank runs
alone, forward and backward, on this machine's processor. The paper does not say how it draws its masks, so ratios can
be compared only roughly. Bytes are those of all heads of the layer, counted too.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import numpy as np

from benchmarks.cp_attention import seconds_of_ranks
from benchmarks.cp_bytes import received, received_needed
from benchmarks.cp_masks import draw_mask
from mmjax.attention.distribution import METHODS, lpt
from mmjax.attention.pairs import Intervals, block_work, rank_work, round_work
from mmjax.bench.rows import Row, Target, at_most

RANKS, BLOCK, MASKS = 8, 128, 50
TIMED = {16_384: 3, 32_768: 1, 65_536: 1}
"""Number of masks of each type under which attention is timed, by tokens."""
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
MIB = 2**20


def bench_cp(rounds: int) -> Iterator[Row]:
    """Yields ratios to LPT by mask, effects of block size, bytes, and the balance of long sequences."""
    for (length, name), published in PUBLISHED.items():
        timed = _timed(name, length, min(rounds, 2))
        fullest = np.mean([_fullest(draw_mask(name, length, seed)) for seed in range(MASKS)], axis=0)
        for i, method in enumerate(COMPARED[1:], 1):
            case = f"{name}, {length} tokens: {method} / lpt"
            yield _row(f"{case}, fullest rank, counted", fullest[i, 0] / fullest[0, 0], "ratio")
            yield _row(f"{case}, by rounds of a ring, counted", fullest[i, 1] / fullest[0, 1], "ratio")
            yield _row(f"{case}, pairs of what is timed", timed[i, 1] / timed[0, 1], "ratio")
            yield _row(f"{case}, timed, one head, CPU", timed[i, 0] / timed[0, 0], "ratio")
            yield _row(f"{case}, published", published[i] / published[0], "ratio")
        yield _row(f"{name}, {length} tokens: lpt, fullest / mean", fullest[0, 0], "ratio")
        yield _row(f"{name}, {length} tokens: lpt, fullest rank, timed, one head, CPU", 1e3 * timed[0, 0], "ms")
    yield from _mixed(min(rounds, 2))
    yield from _bytes()
    yield from _large(rounds)


def _timed(name: str, length: int, rounds: int) -> np.ndarray:
    """Seconds and pairs of the fullest rank by method [methods, 2], mean over masks."""
    fullest = []
    for seed in range(TIMED[length]):
        mask = draw_mask(name, length, seed)
        work = block_work(mask, BLOCK)
        ranks = [METHODS[method](work, RANKS) for method in COMPARED]
        loads = [np.bincount(rank_of_block, work, RANKS) for rank_of_block in ranks]
        shares = [rank_of_block == load.argmax() for rank_of_block, load in zip(ranks, loads, strict=True)]
        seconds = seconds_of_ranks(mask, shares, BLOCK, rounds)
        fullest.append([(time, load.max()) for time, load in zip(seconds, loads, strict=True)])
    return np.mean(fullest, axis=0)


def _mixed(rounds: int) -> Iterator[Row]:
    """Time with blocks four times as large, over the time with distributed blocks."""
    length = min(TIMED)
    for name in ("EE", "MP"):
        mask = draw_mask(name, length, 0)
        work = block_work(mask, BLOCK)
        for method in ("lpt", "contiguous"):
            ranks = METHODS[method](work, RANKS)
            share = ranks == np.bincount(ranks, work, RANKS).argmax()
            small, large = (seconds_of_ranks(mask, [share], size, rounds)[0] for size in (BLOCK, 4 * BLOCK))
            yield _row(f"{name}, {length} tokens: {method}, timed, blocks of 512 / of 128", large / small, "ratio")


def _bytes() -> Iterator[Row]:
    """Bytes that a rank receives in a layer of Llama 3.1 70B."""
    length, cp_ways = max(length for length, _ in PUBLISHED), ("gather", "ring", "all-to-all")
    directions = ("forward", "backward")
    for cp_way in cp_ways:
        for direction, size in zip(directions, received(cp_way, length, RANKS), strict=True):
            yield _row(f"{length} tokens: a rank receives, {cp_way}, {direction}, counted", size / MIB, "MiB")
    for name in dict.fromkeys(name for _, name in PUBLISHED):
        for method in ("lpt", "contiguous"):
            masks = (draw_mask(name, length, seed) for seed in range(MASKS))
            sizes = np.mean([received_needed(mask, METHODS[method], BLOCK, RANKS) for mask in masks], axis=0)
            for direction, size in zip(directions, sizes, strict=True):
                case = f"{name}, {length} tokens: a rank receives, need, {method}, {direction}, counted"
                yield _row(case, size / MIB, "MiB")


def _large(rounds: int) -> Iterator[Row]:
    work = block_work(draw_mask("EE", 2**20, 0), BLOCK)
    seconds = []
    for _ in range(max(3, rounds)):
        start = perf_counter()
        ranks = lpt(work, RANKS)
        seconds.append(perf_counter() - start)
    yield _row("1M tokens, blocks of 128, 8 ranks: lpt", 1e3 * min(seconds), "ms", at_most(1.5))
    yield _row("1M tokens, 8 ranks: lpt, fullest / mean", _over_mean(work, ranks, RANKS), "ratio", at_most(1.001))
    work = block_work(draw_mask("EE", 65_536, 0), BLOCK)
    largest_block = work.max() / (work.sum() / 64)
    excess = _over_mean(work, lpt(work, 64), 64) - 1
    yield _row("64k tokens, 64 ranks: lpt, excess over the mean", excess, "ratio", at_most(largest_block))


def _row(case: str, value: float, unit: str, target: Target | None = None) -> Row:
    return Row(bench="cp", case=case, value=float(value), unit=unit, target=target)


def _over_mean(work: np.ndarray, ranks: np.ndarray, count: int) -> float:
    loads = np.bincount(ranks, work, count)
    return loads.max() / loads.mean()


def _fullest(mask: Intervals) -> list[tuple[float, float]]:
    """By method, pairs of the fullest rank over the mean: of all keys at once, and by rounds of a ring."""
    work, loads = block_work(mask, BLOCK), []
    for method in COMPARED:
        ranks = METHODS[method](work, RANKS)
        by_rounds = round_work(rank_work(mask, BLOCK, ranks, RANKS)) / (work.sum() / RANKS)
        loads.append((_over_mean(work, ranks, RANKS), by_rounds))
    return loads
