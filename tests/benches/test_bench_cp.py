"""`mmjax.bench cp`: what is timed is attention under the mask, and bytes are those of the blocks that are seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.attention.blockwise import backward, forward
from mmjax.attention.distribution import contiguous, lpt
from mmjax.attention.pairs import Intervals
from mmjax.benches.cp_attention import Runs, known, seconds_of_ranks
from mmjax.benches.cp_bytes import GROUPS, WIDTH, needed, received, received_of_need
from mmjax.benches.cp_masks import drawn

BLOCK, TOKENS, RANKS = 16, 256, 4
MASKS = [drawn(name, TOKENS, seed) for name in ("EP", "EE", "MP") for seed in (0, 1)]


def allowed(mask: Intervals) -> np.ndarray:
    """Whether each query sees each key."""
    keys = np.arange(mask.tokens)
    return np.asarray((keys >= mask.first_T[:, None]) & (keys < mask.last_T[:, None]))


@pytest.mark.parametrize("mask", MASKS[::2])
def test_what_is_timed_is_attention_under_the_mask(mask: Intervals) -> None:
    share = np.arange(TOKENS // BLOCK) % RANKS == 1
    place = np.flatnonzero(np.repeat(share, BLOCK))
    q, d_out = (jax.random.normal(jax.random.key(n), (1, len(place), 1, 8)) for n in (0, 1))
    k, v = (jax.random.normal(jax.random.key(n), (1, TOKENS, 1, 8)) for n in (2, 3))
    runs = np.stack([mask.first_T, mask.last_T], axis=-1).astype(np.int32)
    own, asked = known(place, runs[place]), known(np.arange(TOKENS), runs)
    out, lse = forward(Runs("full"), q, k, v, own, asked, block=BLOCK)
    found = backward(Runs("full"), q, k, v, own, asked, out, lse, d_out, block=BLOCK)

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.where(allowed(mask)[place], q[0, :, 0] @ k[0, :, 0].T * 8**-0.5, -jnp.inf)
        return (jax.nn.softmax(scores, axis=-1) @ v[0, :, 0])[None, :, None]

    wanted, pull = jax.vjp(dense, q, k, v)
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    for one, other in zip(found, pull(d_out), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-5)


def test_more_pairs_take_longer() -> None:
    """Blocks that nobody sees are not computed: the last queries of a causal row take longer than the first."""
    order = np.arange(4096)
    mask = Intervals(np.zeros(4096, int), order + 1)
    first, last = np.arange(32) < 4, np.arange(32) >= 28
    seconds = seconds_of_ranks(mask, [first, last], 128, rounds=2)
    assert seconds[1] > 2 * seconds[0] > 0


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", [lpt, contiguous])
def test_needed_blocks_are_those_that_a_query_sees(mask: Intervals, method) -> None:
    work = allowed(mask).sum(axis=1).reshape(-1, BLOCK).sum(axis=1)
    rank_N = method(work, RANKS)
    tiles = allowed(mask).reshape(TOKENS // BLOCK, BLOCK, TOKENS // BLOCK, BLOCK)
    seen = np.asarray(tiles.any(axis=(1, 3)))
    wanted = np.array([seen[np.flatnonzero(rank_N == rank)].any(axis=0) for rank in range(RANKS)])
    np.testing.assert_array_equal(needed(mask, BLOCK, rank_N, RANKS), wanted)
    wanted[rank_N, np.arange(len(rank_N))] = False  # its own are there
    numbers = 2 * GROUPS * WIDTH * BLOCK
    came = wanted.sum(axis=1)
    home = np.array([wanted[:, rank_N == rank].sum() for rank in range(RANKS)])
    ahead, back = received_of_need(mask, method, BLOCK, RANKS)
    assert ahead == came.max() * numbers * 2 and back == (came * 2 + home * 4).max() * numbers


def test_bytes_of_a_mask_that_shows_everything_are_those_of_gather() -> None:
    full = Intervals(np.zeros(TOKENS, int), np.full(TOKENS, TOKENS))
    assert received_of_need(full, lpt, BLOCK, RANKS) == received("gather", TOKENS, RANKS)
    ring, gather = received("ring", TOKENS, RANKS), received("gather", TOKENS, RANKS)
    assert ring[0] == gather[0] and ring[1] > gather[1]
