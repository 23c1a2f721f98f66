"""Bytes that a context-parallel rank receives in the attention of a layer, counted: bfloat16, sums of gradients fp32.

Shapes: B rows, T tokens, N blocks of all ranks or of one, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from benchmarks.cp_attention import Runs, token_inputs
from mmjax.attention.needed_blocks import block_size, max_by_distance, needed_blocks, received_blocks
from mmjax.attention.pairs import Intervals, block_work
from mmjax.attention.tokens import Tokens

HEADS, GROUPS, WIDTH = 64, 8, 128
"""Query heads, key/value heads and their width in a layer of Llama 3.1 70B."""
ITEM, SUM = 2, 4
"""Bytes of a number, and of a sum of gradients."""


def received(cp_way: str, tokens: int, ranks: int) -> tuple[float, float]:
    """Bytes in forward and backward under `Layout.cp_way`: "gather", "ring" or "all-to-all"."""
    of_other_ranks, per_rank = (ranks - 1) / ranks, tokens * WIDTH / ranks
    if cp_way == "all-to-all":
        pairs = 2 * math.lcm(GROUPS, ranks)
        forward_bytes = (2 * HEADS + pairs) * ITEM
        backward_bytes = (3 * HEADS + pairs) * ITEM + (HEADS + pairs) * SUM
        return forward_bytes * of_other_ranks * per_rank, backward_bytes * of_other_ranks * per_rank
    keys_and_values = 2 * GROUPS * WIDTH * tokens
    gradients_share = 1.0 if cp_way == "ring" else of_other_ranks  # sums go all around a ring
    return keys_and_values * ITEM * of_other_ranks, keys_and_values * (ITEM * of_other_ranks + SUM * gradients_share)


def received_needed(
    mask: Intervals, method: Callable[[np.ndarray, int], np.ndarray], block: int, ranks: int
) -> tuple[float, float]:
    """Bytes that a rank receives in forward and backward under "need", by its plan; all ranks have equally many tokens.

    A backward receives the same blocks again, and as many blocks of gradients.
    """
    rank_N = method(block_work(mask, block), ranks)
    place_T = np.argsort(np.repeat(rank_N, block), kind="stable")
    runs_T2 = np.stack([mask.first_T, mask.last_T], axis=-1).astype(np.int32)
    rule, size = Runs("full"), block_size(mask.tokens // ranks)
    needed_BRRN = needed_blocks(rule, rule.inputs(Tokens.of(token_inputs(place_T, runs_T2[place_T]))), ranks)
    blocks = received_blocks(np.asarray(max_by_distance(needed_BRRN)), needed_BRRN.shape[3])
    numbers = 2 * GROUPS * WIDTH * size * blocks
    return float(numbers * ITEM), float(numbers * (ITEM + SUM))
