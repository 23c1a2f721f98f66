"""Which blocks of a sequence's tokens each context-parallel rank has, so that all compute about as much attention.

A block's work is the pairs of tokens that the mask allows to its queries; what its keys cost is the same everywhere.

Shapes: N blocks, R ranks, Q sets of R blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Int

from mmjax.configurable import ConfigError

MOST_EXACT = 512
"""Blocks times ranks of the largest problem that is solved exactly: the time doubles with every few blocks more."""
SECONDS = 20.0
"""The longest time for an exact solution."""

Work = Int[np.ndarray, " N"]
Ranks = Int[np.ndarray, " N"]
"""The rank of each block."""


def lpt(work_N: Work, ranks: int) -> Ranks:
    """The most work to the rank that has the least (longest processing time first), with equally many blocks a rank.

    Blocks in descending order of work are cut into sets of one block a rank. Two sets become one by giving the rank
    with the most work of one the least work of the other, and so on, sets with like differences first. Differences
    between ranks never grow: the fullest rank has no more than the mean and the work of one block. Sets of a level are
    joined together, so that a million tokens in blocks of 128 take a millisecond.
    """
    blocks = len(work_N)
    sets = -(-blocks // ranks)
    padded = np.zeros(sets * ranks, np.int64)
    padded[:blocks] = work_N
    order = np.argsort(-padded, kind="stable")
    load_QR, own_QRB = padded[order].reshape(sets, ranks), order.reshape(sets, ranks, 1)
    while len(load_QR) > 1:
        by_difference = np.argsort(load_QR[:, 0] - load_QR[:, -1])  # loads of a set descend
        load_QR, own_QRB = load_QR[by_difference], own_QRB[by_difference]
        odd, pairs = len(load_QR) % 2, len(load_QR) // 2
        rest, left = (load_QR[:odd], own_QRB[:odd]), (load_QR[odd::2], own_QRB[odd::2])
        right = load_QR[odd + 1 :: 2, ::-1], own_QRB[odd + 1 :: 2, ::-1]
        load_QR, own_QRB = left[0] + right[0], np.concatenate([left[1], right[1]], axis=2)
        descending = np.argsort(-load_QR, axis=1)
        rows = np.arange(pairs)[:, None]
        load_QR, own_QRB = load_QR[rows, descending], own_QRB[rows, descending]
        if odd:
            load_QR = np.concatenate([rest[0], load_QR])
            lacking = own_QRB.shape[2] - rest[1].shape[2]
            filled = np.pad(rest[1], [(0, 0), (0, 0), (0, lacking)], constant_values=len(padded))
            own_QRB = np.concatenate([filled, own_QRB])
    rank_of = np.empty(len(padded) + 1, np.int64)  # the last stands for no block
    rank_of[own_QRB[0].reshape(-1)] = np.repeat(np.arange(ranks), own_QRB.shape[2])
    return rank_of[:blocks]


def lpt_by_work(work_N: Work, ranks: int) -> Ranks:
    """Longest processing time first by work alone, as published (Cornstarch, Algorithm 2): ranks differ in blocks."""
    heap = [(0, rank) for rank in range(ranks)]
    result = np.empty(len(work_N), np.int64)
    for block in np.argsort(-work_N, kind="stable"):
        load, rank = heap[0]
        result[block] = rank
        heapq.heapreplace(heap, (load + int(work_N[block]), rank))
    return result


def contiguous(work_N: Work, ranks: int) -> Ranks:
    """One run of blocks a rank, as a plain ring has them."""
    return np.arange(len(work_N)) * ranks // len(work_N)


def striped(work_N: Work, ranks: int) -> Ranks:
    """Blocks in turn (Brandon et al. 2023, "Striped Attention")."""
    return np.arange(len(work_N)) % ranks


def zigzag(work_N: Work, ranks: int) -> Ranks:
    """Two runs a rank, one from either end, which balances a causal mask."""
    run_N = np.arange(len(work_N)) * 2 * ranks // len(work_N)
    return np.minimum(run_N, 2 * ranks - 1 - run_N)


def at_random(work_N: Work, ranks: int) -> Ranks:
    """Equally many blocks a rank in an order that depends on their number alone."""
    return np.random.default_rng(0).permutation(np.arange(len(work_N)) % ranks)


def exact(work_N: Work, ranks: int) -> Ranks:
    """The least work of the fullest rank with equally many blocks a rank, of small problems (Cornstarch, Equation 1).

    Raises:
      ConfigError: the problem is too large, or was not solved in `SECONDS`.
    """
    blocks = len(work_N)
    if blocks * ranks > MOST_EXACT:
        size = f"{blocks} blocks on {ranks} ranks"
        raise ConfigError(f"--method='exact': {size} are more than {MOST_EXACT} choices; use 'lpt', or larger blocks")
    import cvxpy as cp

    scale = max(1, int(work_N.max()))
    chosen_NR, most = cp.Variable((blocks, ranks), boolean=True), cp.Variable()
    constraints = [
        cp.sum(chosen_NR, axis=1) == 1,
        cp.sum(chosen_NR, axis=0) <= -(-blocks // ranks),
        (work_N / scale) @ chosen_NR <= most,
    ]
    problem = cp.Problem(cp.Minimize(most), constraints)
    problem.solve(solver=cp.HIGHS, highs_options={"time_limit": SECONDS, "mip_rel_gap": 0.0})
    if problem.status != cp.OPTIMAL or chosen_NR.value is None:
        raise ConfigError(f"--method='exact': not solved in {SECONDS:.0f} s; use 'lpt', or larger blocks")
    return chosen_NR.value.argmax(axis=1)


def whole_parts(work_N: Work, sizes_N: Int[np.ndarray, " N"], ranks: int, room: int) -> Ranks | None:
    """The most work first, to the rank that has the least of those with room for it; parts may differ in size.

    Args:
      work_N: work of each part of a sequence.
      sizes_N: tokens of each.
      ranks: ranks to give them to.
      room: tokens that a rank has.

    Returns:
      The rank of each part, or None where a part is left that no rank has room for.
    """
    load_R, left_R, rank_N = np.zeros(ranks, np.int64), np.full(ranks, room), np.empty(len(work_N), np.int64)
    for part in np.lexsort((-sizes_N, -work_N)):
        fits = left_R >= sizes_N[part]
        if not fits.any():
            return None
        rank = int(np.argmin(np.where(fits, load_R, np.iinfo(np.int64).max)))
        rank_N[part] = rank
        load_R[rank] += work_N[part]
        left_R[rank] -= sizes_N[part]
    return rank_N


METHODS: Mapping[str, Callable[[Work, int], Ranks]] = {
    "lpt": lpt,
    "lpt-by-work": lpt_by_work,
    "contiguous": contiguous,
    "striped": striped,
    "zigzag": zigzag,
    "random": at_random,
    "exact": exact,
}
"""Ways to distribute blocks, by name."""
