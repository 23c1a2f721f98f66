"""Bytes that a context-parallel rank receives in the attention of a layer, counted: bfloat16, sums of gradients fp32.

Shapes: T tokens, N blocks, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int

from mmjax.attention.pairs import Intervals, block_work

HEADS, GROUPS, WIDTH = 64, 8, 128
"""Query heads, key/value heads and their width in a layer of Llama 3.1 70B."""
ITEM, SUM = 2, 4
"""Bytes of a number, and of a sum of gradients."""


def received(way: str, tokens: int, ranks: int) -> tuple[float, float]:
    """Bytes in forward and backward under `Layout.cp_way`: "gather", "ring" or "all-to-all"."""
    others, per_rank = (ranks - 1) / ranks, tokens * WIDTH / ranks
    if way == "all-to-all":
        pairs = 2 * math.lcm(GROUPS, ranks)
        ahead = (2 * HEADS + pairs) * ITEM
        back = (3 * HEADS + pairs) * ITEM + (HEADS + pairs) * SUM
        return ahead * others * per_rank, back * others * per_rank
    once = 2 * GROUPS * WIDTH * tokens
    home = 1.0 if way == "ring" else others  # sums go all around a ring
    return once * ITEM * others, once * (ITEM * others + SUM * home)


def received_of_need(
    mask: Intervals, method: Callable[[np.ndarray, int], np.ndarray], block: int, ranks: int
) -> tuple[float, float]:
    """Bytes of the rank that receives most, if only blocks come that a query of the rank sees.

    In a backward they come again, and each rank that had a block sends its share of the gradients home.
    """
    rank_N = method(block_work(mask, block), ranks)
    needed_RN = needed(mask, block, rank_N, ranks)
    needed_RN[rank_N, np.arange(len(rank_N))] = False  # its own are there
    size = 2 * GROUPS * WIDTH * block
    came_R = needed_RN.sum(axis=1)
    home_R = np.bincount(rank_N, needed_RN.sum(axis=0), ranks)
    return float(came_R.max() * size * ITEM), float((came_R * ITEM + home_R * SUM).max() * size)


def needed(mask: Intervals, block: int, rank_N: Int[np.ndarray, " N"], ranks: int) -> Bool[np.ndarray, "R N"]:
    """The blocks of keys of which a query of each rank sees any."""
    rank_T = np.repeat(rank_N, block)[: mask.tokens]
    seeing = mask.last_T > mask.first_T
    ends_RN = np.zeros((ranks, len(rank_N) + 1), np.int64)  # where runs of seen blocks begin, and end
    np.add.at(ends_RN, (rank_T[seeing], mask.first_T[seeing] // block), 1)
    np.add.at(ends_RN, (rank_T[seeing], (mask.last_T[seeing] - 1) // block + 1), -1)
    return ends_RN.cumsum(axis=1)[:, :-1] > 0
