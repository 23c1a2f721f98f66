"""Distribution of a sequence's blocks of tokens over context-parallel ranks, with balanced attention work.

The work of a block is the number of pairs that the mask allows to its queries. The cost of its keys does not depend on
the rank.

Shapes: N blocks, R ranks, Q sets of R blocks, B blocks of a rank in a set.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Int

from mmjax.configurable import ConfigError

MAX_EXACT = 512
"""The maximal product of blocks and ranks for an exact solution: the time doubles with every few blocks more."""
SECONDS = 20.0
"""The time limit for an exact solution."""

Work = Int[np.ndarray, " N"]
Ranks = Int[np.ndarray, " N"]
"""The rank of each block."""


def lpt(work_N: Work, ranks: int) -> Ranks:
    """Longest processing time first: most work to the rank with the least, with equally many blocks a rank.

    Takes the work of each block, whole numbers of 0 or more, and the number of ranks; returns the rank of each block,
    int64 [N] from 0. If ``ranks`` does not divide the blocks, ranks differ by one block.

    Blocks in descending order of work are cut into sets of one block a rank. Pairs of sets with similar differences
    between ranks are merged: the rank with the most work of one set gets the least work of the other, and so on.
    Differences between ranks never grow, so the busiest rank exceeds the mean by at most the work of one block. All
    pairs of a level are merged at once: a million tokens in blocks of 128 take a millisecond.
    """
    blocks = len(work_N)
    sets = -(-blocks // ranks)
    padded = np.zeros(sets * ranks, np.int64)
    padded[:blocks] = work_N
    order = np.argsort(-padded, kind="stable")
    load_QR, blocks_QRB = padded[order].reshape(sets, ranks), order.reshape(sets, ranks, 1)
    while len(load_QR) > 1:
        by_difference = np.argsort(load_QR[:, 0] - load_QR[:, -1])  # loads of a set descend
        load_QR, blocks_QRB = load_QR[by_difference], blocks_QRB[by_difference]
        odd, pairs = len(load_QR) % 2, len(load_QR) // 2
        odd_set, first_sets = (load_QR[:odd], blocks_QRB[:odd]), (load_QR[odd::2], blocks_QRB[odd::2])
        second_sets = load_QR[odd + 1 :: 2, ::-1], blocks_QRB[odd + 1 :: 2, ::-1]
        load_QR, blocks_QRB = first_sets[0] + second_sets[0], np.concatenate([first_sets[1], second_sets[1]], axis=2)
        descending = np.argsort(-load_QR, axis=1)
        rows = np.arange(pairs)[:, None]
        load_QR, blocks_QRB = load_QR[rows, descending], blocks_QRB[rows, descending]
        if odd:
            load_QR = np.concatenate([odd_set[0], load_QR])
            missing = blocks_QRB.shape[2] - odd_set[1].shape[2]
            padded_blocks = np.pad(odd_set[1], [(0, 0), (0, 0), (0, missing)], constant_values=len(padded))
            blocks_QRB = np.concatenate([padded_blocks, blocks_QRB])
    rank_of = np.empty(len(padded) + 1, np.int64)  # the last entry is for padding
    rank_of[blocks_QRB[0].reshape(-1)] = np.repeat(np.arange(ranks), blocks_QRB.shape[2])
    return rank_of[:blocks]


def lpt_by_work(work_N: Work, ranks: int) -> Ranks:
    """Longest processing time first, as published (Cornstarch, Algorithm 2): ranks may differ in numbers of blocks.

    Returns the rank of each block, int64 [N] from 0: in descending order of work, each block goes to the rank with the
    least work so far, the lowest of several. ``work_N`` has the work of each block; ``ranks`` is the number of ranks.
    """
    heap = [(0, rank) for rank in range(ranks)]
    result = np.empty(len(work_N), np.int64)
    for block in np.argsort(-work_N, kind="stable"):
        load, rank = heap[0]
        result[block] = rank
        heapq.heapreplace(heap, (load + int(work_N[block]), rank))
    return result


def contiguous(work_N: Work, ranks: int) -> Ranks:
    """One run of neighbouring blocks a rank, as in ring attention: block i of N has rank i * ranks // N.

    ``work_N`` has the work of each block, of which only the number counts. Returns the rank of each block, int64 [N].
    """
    return np.arange(len(work_N)) * ranks // len(work_N)


def striped(work_N: Work, ranks: int) -> Ranks:
    """Round robin (Brandon et al. 2023, "Striped Attention"): block i has rank i % ranks.

    ``work_N`` has the work of each block, of which only the number counts. Returns the rank of each block, int64 [N].
    """
    return np.arange(len(work_N)) % ranks


def zigzag(work_N: Work, ranks: int) -> Ranks:
    """Two runs of blocks a rank, one from either end, which balances a causal mask.

    ``work_N`` has the work of each block, of which only the number counts. Returns the rank of each block, int64 [N]
    such as [0, 1, 1, 0] for 4 blocks and 2 ranks.
    """
    run_N = np.arange(len(work_N)) * 2 * ranks // len(work_N)
    return np.minimum(run_N, 2 * ranks - 1 - run_N)


def random_order(work_N: Work, ranks: int) -> Ranks:
    """The rank of each block, int64 [N] from 0, by a fixed permutation, with equally many blocks a rank.

    ``work_N`` has the work of each block, of which only the number counts. If ``ranks`` does not divide it, ranks
    differ by one block.
    """
    return np.random.default_rng(0).permutation(np.arange(len(work_N)) % ranks)


def exact(work_N: Work, ranks: int) -> Ranks:
    """The optimum with equally many blocks a rank, for small problems (Cornstarch, Equation 1).

    ``work_N`` has the work of each block, whole numbers of 0 or more. Returns the rank of each block, int64 [N] from 0.

    Raises:
      ConfigError: blocks times ranks are more than ``MAX_EXACT``, or the problem was not solved in ``SECONDS``.
    """
    blocks = len(work_N)
    if blocks * ranks > MAX_EXACT:
        size = f"{blocks} blocks on {ranks} ranks"
        raise ConfigError(f"--method='exact': {size} are more than {MAX_EXACT} choices; use 'lpt', or larger blocks")
    import cvxpy as cp

    scale = max(1, int(work_N.max()))
    chosen_NR, max_load = cp.Variable((blocks, ranks), boolean=True), cp.Variable()
    constraints = [
        cp.sum(chosen_NR, axis=1) == 1,
        cp.sum(chosen_NR, axis=0) <= -(-blocks // ranks),
        (work_N / scale) @ chosen_NR <= max_load,
    ]
    problem = cp.Problem(cp.Minimize(max_load), constraints)
    problem.solve(solver=cp.HIGHS, highs_options={"time_limit": SECONDS, "mip_rel_gap": 0.0})
    if problem.status != cp.OPTIMAL or chosen_NR.value is None:
        raise ConfigError(f"--method='exact': not solved in {SECONDS:.0f} s; use 'lpt', or larger blocks")
    return chosen_NR.value.argmax(axis=1)


def assign_parts(work_N: Work, sizes_N: Int[np.ndarray, " N"], ranks: int, capacity: int) -> Ranks | None:
    """Assigns parts of different sizes: most work first, to the rank with the least work among those with capacity.

    Args:
      work_N: work of each part of a sequence, as whole numbers such as pairs.
      sizes_N: tokens of each part.
      ranks: number of ranks.
      capacity: tokens of a rank.

    Returns:
      The rank of each part, int64 [N] from 0, or None if some part fits on no rank.
    """
    load_R, free_R, rank_N = np.zeros(ranks, np.int64), np.full(ranks, capacity), np.empty(len(work_N), np.int64)
    for part in np.lexsort((-sizes_N, -work_N)):
        fits = free_R >= sizes_N[part]
        if not fits.any():
            return None
        rank = int(np.argmin(np.where(fits, load_R, np.iinfo(np.int64).max)))
        rank_N[part] = rank
        load_R[rank] += work_N[part]
        free_R[rank] -= sizes_N[part]
    return rank_N


METHODS: Mapping[str, Callable[[Work, int], Ranks]] = {
    "lpt": lpt,
    "lpt-by-work": lpt_by_work,
    "contiguous": contiguous,
    "striped": striped,
    "zigzag": zigzag,
    "random": random_order,
    "exact": exact,
}
"""Methods by name: functions of the work of each block and the number of ranks."""
