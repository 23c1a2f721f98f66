"""Shares samples among ranks that have fixed numbers of rows: as the paper does, and with better balance.

Shapes are static, so a rank gets as many samples as it has rows, no more and no fewer. Everything here is a pure
function of its arguments; equal loads and sizes are told apart by index.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

Groups = list[list[int]]
"""The samples of each rank."""


def greedy(sizes_S: np.ndarray, rows: Sequence[int]) -> Groups:
    """Zhang et al., "DistTrain", Alg. 1 with equal rows: largest first, each to the least loaded rank with a free row.

    A rank's samples are in the order in which it got them.

    Args:
      sizes_S: sizes of the samples, 0 or more.
      rows: rows of each rank; their sum is the number of samples.
    """
    left = list(rows)
    # A number is compared faster than a pair: the load above, the rank in the lowest bits.
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
    """Sizes as multiples of a unit, a power of two, such that their sum is at most 2^40 units."""
    _, exponent = np.frexp(sizes_S.max(initial=0.0) * len(sizes_S))
    return np.rint(np.ldexp(sizes_S, 40 - exponent)).astype(np.int64)


def descending(sizes_S: np.ndarray) -> np.ndarray:
    """Samples from the largest to the smallest; equal ones in their order."""
    return np.argsort(-sizes_S, kind="stable")


def balanced(sizes_S: np.ndarray, rows: Sequence[int], *, groups: Groups | None = None, exchanges: int = 64) -> Groups:
    """`greedy` (or its result, `groups`), followed by exchanges of samples between the most and the least loaded rank.

    Each of at most `exchanges` is the one that brings the two loads closest together; they end when none does, or at
    `least_load`. A rank's samples are sorted from the largest to the smallest.
    """
    own = [np.array(group, np.int64) for group in (groups or greedy(sizes_S, rows))]
    loads = np.array([sizes_S[group].sum() for group in own])
    held = np.array([room > 0 for room in rows])
    enough = least_load(sizes_S, rows) * (1 + 1e-6)
    for _ in range(exchanges if held.sum() > 1 else 0):
        most = int(loads.argmax())
        least = int(np.where(held, loads, np.inf).argmin())
        gap = loads[most] - loads[least]
        if loads[most] <= enough or gap <= 0:
            break
        moved = sizes_S[own[most]][:, None] - sizes_S[own[least]][None, :]
        one, other = np.unravel_index(np.abs(moved - gap / 2).argmin(), moved.shape)
        if not 0 < moved[one, other] < gap:
            break
        own[most][one], own[least][other] = own[least][other], own[most][one]
        for rank in (most, least):
            loads[rank] = sizes_S[own[rank]].sum()
    return [group[descending(sizes_S[group])].tolist() for group in own]


def least_load(sizes_S: np.ndarray, rows: Sequence[int]) -> float:
    """A lower bound of the largest load of a rank, however samples are shared among ranks with so many `rows`.

    The largest of the mean load and, for each n, this sum: some rank has n + 1 of the n·ranks + 1 largest samples, at
    least the smallest of these, and the smallest of all samples in the rest of its rows.
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
    """Samples of similar size in one group of ranks, the largest in the first: the samples of each rank, by group.

    A group has the largest samples that are left, shared by `greedy`. But one that costs as much with the smallest of
    all for company as the other ranks do on average without it has these: they wait for it and for nothing else.

    Args:
      sizes_S: sizes of the samples, 0 or more.
      rows: rows of each rank, by group; their sum is the number of samples.
    """
    left = descending(sizes_S)
    result: list[Groups] = []
    for own in rows:
        groups: Groups = [[] for _ in own]
        free = [rank for rank, room in enumerate(own) if room]
        # A rank with one row has no company.
        for rank in sorted((rank for rank in free if own[rank] > 1), key=lambda rank: own[rank])[: len(free) - 1]:
            end, others = len(left) - own[rank] + 1, sum(own[other] for other in free) - own[rank]
            alone = np.append(left[:1], left[end:])
            if sizes_S[alone].sum() * (len(free) - 1) < sizes_S[left[1 : 1 + others]].sum():
                break
            groups[rank], left = alone.tolist(), left[1:end]
            free.remove(rank)
        count = sum(own[rank] for rank in free)
        block, left = left[:count], left[count:]
        for rank, share in zip(free, greedy(sizes_S[block], [own[rank] for rank in free]), strict=True):
            groups[rank] = block[share].tolist()
        result.append(groups)
    return result


def cut(group: Sequence[int], sizes_S: np.ndarray, microbatches: int) -> Groups:
    """A rank's samples in `microbatches` of equally many, with sums as even as `greedy` makes them."""
    own = np.array(group, np.int64)
    shares = greedy(sizes_S[own], [len(group) // microbatches] * microbatches)
    return [own[share].tolist() for share in shares]
