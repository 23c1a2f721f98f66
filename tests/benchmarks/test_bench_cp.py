"""`mmjax.bench cp`: what is timed is attention under the mask, and bytes are those of the blocks that are seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cp_attention import Runs, seconds_of_ranks, token_inputs
from benchmarks.cp_bytes import GROUPS, WIDTH, received, received_needed
from benchmarks.cp_masks import draw_mask
from mmjax.attention.blockwise import backward, forward
from mmjax.attention.distribution import contiguous, lpt
from mmjax.attention.needed_blocks import block_size
from mmjax.attention.pairs import Intervals

BLOCK, TOKENS, RANKS = 16, 256, 4
MASKS = [draw_mask(name, TOKENS, seed) for name in ("EP", "EE", "MP") for seed in (0, 1)]


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
    own, asked = token_inputs(place, runs[place]), token_inputs(np.arange(TOKENS), runs)
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
def test_what_is_needed_comes_and_no_more_than_all(mask: Intervals, method) -> None:
    rank_N = method(allowed(mask).sum(axis=1).reshape(-1, BLOCK).sum(axis=1), RANKS)
    place = np.argsort(np.repeat(rank_N, BLOCK), kind="stable")
    size = block_size(TOKENS // RANKS)
    tiles = allowed(mask)[np.ix_(place, place)].reshape(RANKS, -1, RANKS, TOKENS // RANKS // size, size)
    seen = tiles.any(axis=(1, 4)) & ~np.eye(RANKS, dtype=bool)[:, :, None]
    numbers = 2 * GROUPS * WIDTH * size
    ahead, back = received_needed(mask, method, BLOCK, RANKS)
    assert seen.sum(axis=(1, 2)).max() * numbers * 2 <= ahead <= received("gather", TOKENS, RANKS)[0]
    assert back == 3 * ahead


def test_packed_runs_receive_less_than_all() -> None:
    sizes = [received_needed(draw_mask("MP", 4096, seed), contiguous, BLOCK, RANKS)[0] for seed in range(10)]
    assert np.mean(sizes) < 0.7 * received("gather", 4096, RANKS)[0]


def test_bytes_of_a_mask_that_shows_everything_are_those_of_gather() -> None:
    full = Intervals(np.zeros(TOKENS, int), np.full(TOKENS, TOKENS))
    assert received_needed(full, lpt, BLOCK, RANKS) == received("gather", TOKENS, RANKS)
    ring, gather = received("ring", TOKENS, RANKS), received("gather", TOKENS, RANKS)
    assert ring[0] == gather[0] and ring[1] > gather[1]
