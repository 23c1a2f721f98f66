"""Shares samples among ranks with fixed numbers of rows: as the paper does, and with better balance.

Shapes are static, so a rank gets exactly as many samples as it has rows. Everything here is a pure function of its
arguments; ties of loads and sizes go to the lower index.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

Groups = list[list[int]]
"""The samples of each rank."""


def greedy(sizes_S: np.ndarray, rows: Sequence[int]) -> Groups:
    """Zhang et al., "DistTrain", Alg. 1 with equal rows: largest first, each to the least loaded rank with a free row.

    [[3, 0], [2, 1]] for sizes [1, 2, 3, 4] and rows [2, 2].

    Args:
      sizes_S: sizes of the samples, such as seconds, 0 or more.
      rows: rows of each rank; their sum is the number of samples.

    Returns:
      For each rank, its samples as indices in `sizes_S`, in the order of assignment.
    """
    left = list(rows)
    # A number, with the load above and the rank in the lowest bits, is compared faster than a pair.
    bits = max(1, len(left) - 1).bit_length()
    mask = (1 << bits) - 1
    heap = [rank for rank, room in enumerate(left) if room]
    falling = descending(sizes_S)
    groups: Groups = [[] for _ in left]
    take = [group.append for group in groups]
    for sample, size in zip(falling.tolist(), (_whole(sizes_S)[falling] << bits).tolist(), strict=True):
        key = heap[0]
        rank = key & mask
        take[rank](sample)
        left[rank] -= 1
        if left[rank]:
            heapq.heapreplace(heap, key + size)
        else:
            heapq.heappop(heap)
    return groups


def _whole(sizes_S: np.ndarray) -> np.ndarray:
    """Sizes as integers, in a unit (a power of two) such that their sum is at most 2^40."""
    _, exponent = np.frexp(sizes_S.max(initial=0.0) * len(sizes_S))
    return np.rint(np.ldexp(sizes_S, 40 - exponent)).astype(np.int64)


def descending(sizes_S: np.ndarray) -> np.ndarray:
    """Indices of the samples from the largest to the smallest [S]; equal ones in their order."""
    return np.argsort(-sizes_S, kind="stable")


def balanced(sizes_S: np.ndarray, rows: Sequence[int], *, groups: Groups | None = None, exchanges: int = 64) -> Groups:
    """`greedy` (or its result, `groups`), followed by exchanges of samples between the most and the least loaded rank.

    Each of at most `exchanges` exchanges brings the two loads as close together as one can. They end when none helps,
    or at `least_load`.

    Args:
      sizes_S: sizes of the samples, such as seconds, 0 or more.
      rows: rows of each rank; their sum is the number of samples.
      groups: the samples of each rank from which to start; by default those of `greedy`.
      exchanges: the most exchanges.

    Returns:
      For each rank, its samples as indices in `sizes_S`, from the largest to the smallest: [[3, 0], [2, 1]].
    """
    samples_of = [np.array(group, np.int64) for group in (groups or greedy(sizes_S, rows))]
    loads = np.array([sizes_S[group].sum() for group in samples_of])
    has_rows = np.array([room > 0 for room in rows])
    enough = least_load(sizes_S, rows) * (1 + 1e-6)
    for _ in range(exchanges if has_rows.sum() > 1 else 0):
        most = int(loads.argmax())
        least = int(np.where(has_rows, loads, np.inf).argmin())
        gap = loads[most] - loads[least]
        if loads[most] <= enough or gap <= 0:
            break
        moved = sizes_S[samples_of[most]][:, None] - sizes_S[samples_of[least]][None, :]
        from_most, from_least = np.unravel_index(np.abs(moved - gap / 2).argmin(), moved.shape)
        if not 0 < moved[from_most, from_least] < gap:
            break
        largest, smallest = samples_of[most], samples_of[least]
        largest[from_most], smallest[from_least] = smallest[from_least], largest[from_most]
        for rank in (most, least):
            loads[rank] = sizes_S[samples_of[rank]].sum()
    return [group[descending(sizes_S[group])].tolist() for group in samples_of]


def least_load(sizes_S: np.ndarray, rows: Sequence[int]) -> float:
    """A lower bound of the largest load of a rank, for any assignment of samples to ranks with these `rows`.

    It is the largest of the mean load and one sum for each n: some rank has n + 1 of the n·ranks + 1 largest samples,
    at least the smallest of these, and at least the smallest of all samples in its other rows.

    Args:
      sizes_S: sizes of the samples, 0 or more; a load is the sum of a rank's sizes.
      rows: rows of each rank; their sum is the number of samples. A rank with 0 rows does not count; without others the
        result is 0.0.
    """
    ranks = sum(room > 0 for room in rows)
    least = min((room for room in rows if room), default=0)
    if not ranks:
        return 0.0
    falling = np.sort(sizes_S)[::-1]
    smallest = np.concatenate([[0.0], np.cumsum(falling[::-1])])
    bound = float(sizes_S.sum()) / ranks
    for several in range(least):
        last = several * ranks
        if last >= len(falling):
            break
        bound = max(bound, float(falling[last - several : last + 1].sum() + smallest[least - several - 1]))
    return bound


def similar(sizes_S: np.ndarray, rows: Sequence[Sequence[int]]) -> list[Groups]:
    """The samples of each rank, by group of ranks; a group has samples of similar size, the first group the largest.

    A group gets the largest remaining samples, shared by `greedy`. There is one exception: a very large sample shares
    its rank with the smallest samples of all, if their cost together is at least the mean load of the group's other
    ranks, which wait for it anyway.

    Args:
      sizes_S: sizes of the samples, 0 or more.
      rows: rows of each rank, by group, such as [[2, 2], [2, 2]]; their sum is the number of samples.

    Returns:
      `result[group][rank]` lists samples as indices in `sizes_S`: [[[1, 5], [0, 2]], [[3, 7], [4, 6]]].
    """
    left = descending(sizes_S)
    result: list[Groups] = []
    for rows_of in rows:
        groups: Groups = [[] for _ in rows_of]
        free = [rank for rank, room in enumerate(rows_of) if room]
        # A rank with one row has no room for small samples beside a large one.
        for rank in sorted((r for r in free if rows_of[r] > 1), key=lambda r: rows_of[r])[: len(free) - 1]:
            end, count = len(left) - rows_of[rank] + 1, sum(rows_of[r] for r in free) - rows_of[rank]
            with_smallest = np.append(left[:1], left[end:])
            if sizes_S[with_smallest].sum() * (len(free) - 1) < sizes_S[left[1 : 1 + count]].sum():
                break
            groups[rank], left = with_smallest.tolist(), left[1:end]
            free.remove(rank)
        count = sum(rows_of[rank] for rank in free)
        block, left = left[:count], left[count:]
        for rank, share in zip(free, greedy(sizes_S[block], [rows_of[rank] for rank in free]), strict=True):
            groups[rank] = block[share].tolist()
        result.append(groups)
    return result


def cut(group: Sequence[int], sizes_S: np.ndarray, microbatches: int) -> Groups:
    """Cuts a rank's samples into `microbatches` of equal length, with sums as even as `greedy` makes them.

    The result lists, for each microbatch, its samples as indices in `sizes_S`, the largest first: [[3, 0], [2, 1]].

    Args:
      group: the rank's samples, as indices in `sizes_S`; their number is a multiple of `microbatches`.
      sizes_S: sizes of all samples.
      microbatches: number of microbatches.
    """
    samples = np.array(group, np.int64)
    shares = greedy(sizes_S[samples], [len(group) // microbatches] * microbatches)
    return [samples[share].tolist() for share in shares]
