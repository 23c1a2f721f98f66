"""Blocks of keys that ranks need of each other: which they are, how they travel, and what that saves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from test_exchange import across_ranks, complete_rows, require_equal

from mmjax.attention.backends import Backend
from mmjax.attention.exchange import gather_tokens
from mmjax.attention.language import Rules
from mmjax.attention.mask import Mask
from mmjax.attention.needed_blocks import block_size, max_by_distance, needed_blocks, received_blocks, transfer_sizes
from mmjax.attention.reach import distances, reach_of
from mmjax.attention.tokens import Tokens
from mmjax.data.split import Split

ROWS, TOKENS, RANKS = 2, 60, 3
BLOCKS = 7
"""Blocks of a rank's 20 tokens; by *gather* it gets 14."""
WORDS = Rules.parse("text sees all before; vision sees vision in item")


def rows(*cuts: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Rows whose segments end at these tokens, with padding behind the last, in their order."""
    segments = [np.searchsorted(ends, np.arange(TOKENS), side="right") + 1 for ends in cuts]
    segments = [np.where(own > len(ends), 0, own) for own, ends in zip(segments, cuts, strict=True)]
    order = np.tile(np.arange(TOKENS), (len(cuts), 1))
    positions = np.stack([order % 6, order // 6], axis=-1)
    text = order % 12 < 5
    words = {"is": np.where(text, 1, 2), "attends": np.where(text, 3, 2), "items": np.where(text, 0, 1 + order // 12)}
    inputs = {"segments": np.stack(segments), "order": order, "positions": positions}
    inputs = {name: x.astype(np.int32) for name, x in (inputs | words).items()}
    return inputs | {name: inputs[name].astype(np.uint32) for name in ("is", "attends")}


def plan(mask: Mask, inputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """What each rank needs of each, and the most by distance."""
    known = {name: jnp.asarray(x) for name, x in inputs.items()}
    needed = needed_blocks(mask, mask.inputs(Tokens.of(known)), RANKS)
    return np.asarray(needed), np.asarray(max_by_distance(needed))


def arrays(seed: int, heads: int = 4, groups: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(ROWS, TOKENS, n, 8)).astype(np.float32) for n in (heads, groups, groups, heads)]


CASES = {
    "whole items a rank": (Mask("full"), rows((20, 40, 60), (20, 40, 60)), 0),
    "nothing but padding on the last rank": (Mask("full"), rows((20, 33), (20,)), 0),
    "a window": (Mask("causal", 4), rows((60,), (60,)), 2),
    "a segment across two ranks": (Mask("full"), rows((20, 60), (20, 40, 60)), 14),
    "an end of a segment": (Mask("causal"), rows((14, 26, 60), (20, 40, 60)), 7),
    "packed": (Mask("causal"), rows((9, 22, 43, 60), (20, 31, 55)), 7),
    "one causal segment": (Mask("causal"), rows((60,), (60,)), 14),
    "windows of a grid": (Mask("full", grid_window=3), rows((60,), (60,)), 2 + 7),
    "words": (Mask.of(WORDS), rows((20, 60), (20, 40, 60)), 4),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_whole_rows(case: str) -> None:
    mask, inputs, _ = CASES[case]
    require_equal(across_ranks("need", RANKS, mask, inputs, arrays(1)), complete_rows(mask, inputs, arrays(1)))


@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_whole_rows_where_the_host_chooses(case: str) -> None:
    mask, inputs, _ = CASES[case]
    backwards = mask.kind == "causal"
    chosen = distances(reach_of(inputs["segments"], RANKS), RANKS, backwards=backwards)
    require_equal(across_ranks("need", RANKS, mask, inputs, arrays(1), chosen), complete_rows(mask, inputs, arrays(1)))


def test_too_short_a_reach_is_wrong() -> None:
    mask, inputs, _ = CASES["one causal segment"]
    got, wanted = across_ranks("need", RANKS, mask, inputs, arrays(1), (1,)), complete_rows(mask, inputs, arrays(1))
    assert reach_of(inputs["segments"], RANKS) == 2 and np.abs(got[0] - wanted[0]).max() > 0.01


@pytest.mark.parametrize("chosen", [None, (), (1,), (1, 2)])
def test_only_without_distances_the_device_chooses(chosen: tuple[int, ...] | None) -> None:
    mask, inputs, _ = CASES["packed"]
    arguments = arrays(1)

    def attention(q: Any) -> Any:
        return across_ranks("need", RANKS, mask, inputs, [q, *arguments[1:]], chosen)

    assert ("cond[" in str(jax.make_jaxpr(attention)(arguments[0]))) == (chosen is None)


@settings(max_examples=50, deadline=None)
@given(st.booleans(), st.booleans(), st.integers(0, 2**16))
def test_a_reach_has_all_that_a_token_sees(causal: bool, shuffled: bool, seed: int) -> None:
    rng, ranks = np.random.default_rng(seed), 6
    inputs = rows(*(tuple(np.sort(rng.integers(1, TOKENS + 1, rng.integers(1, 9)))) for _ in range(ROWS)))
    order = rng.permutation(TOKENS) if shuffled else np.arange(TOKENS)
    segments, place = (inputs[name][:, order] for name in ("segments", "order"))
    chosen = distances(reach_of(segments, ranks), ranks, backwards=causal and not shuffled)
    sees = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, :, None]
    if causal:
        sees &= place[:, None, :] <= place[:, :, None]
    rank = np.arange(TOKENS) // (TOKENS // ranks)
    seen = set(np.unique(((rank[:, None] - rank) % ranks)[sees.any(axis=0)]).tolist()) - {0}
    assert seen <= set(chosen)
    short = reach_of(segments, ranks)
    if short and not causal and not shuffled:
        assert not seen <= set(distances(max(r for r in (0, 1, 2) if r < short), ranks, backwards=False))


@pytest.mark.parametrize("case", CASES)
def test_only_what_is_needed_is_received(case: str) -> None:
    mask, inputs, received = CASES[case]
    assert received_blocks(plan(mask, inputs)[1], BLOCKS) == received


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([case[0] for case in CASES.values()]), st.integers(0, 2**16))
def test_a_block_is_needed_where_a_token_of_another_rank_sees_one_of_it(mask: Mask, seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = rows(*(tuple(np.sort(rng.integers(1, TOKENS + 1, rng.integers(1, 6)))) for _ in range(ROWS)))
    own = rng.permutation(TOKENS) if rng.random() < 0.5 else np.arange(TOKENS)
    inputs = {name: x[:, own] for name, x in inputs.items()}
    needed, most = plan(mask, inputs)
    known = mask.inputs(Tokens.of({name: jnp.asarray(x) for name, x in inputs.items()}))
    real = np.greater(inputs["segments"], 0)
    seen = np.logical_and(mask.allowed(known, known), real[:, :, None] & real[:, None, :])
    length, size = TOKENS // RANKS, block_size(TOKENS // RANKS)
    for to in range(RANKS):
        assert not np.any(needed[:, to, to])
        for source in set(range(RANKS)) - {to}:
            mine, theirs = (slice(rank * length, (rank + 1) * length) for rank in (to, source))
            pairs = np.asarray(np.any(seen[:, mine, theirs], axis=1))
            exact = np.stack([np.any(pairs[:, at : at + size], axis=1) for at in range(0, length, size)], axis=1)
            assert np.all(needed[:, to, source] >= exact)
            assert most[(to - source) % RANKS] >= needed[:, to, source].sum(axis=-1).max()


def test_blocks_and_sizes() -> None:
    assert [block_size(tokens) for tokens in (1, 7, 8, 20, 1024, 4096, 4097)] == [1, 1, 1, 3, 128, 128, 125]
    assert (
        transfer_sizes(8) == (0, 1, 2, 4, 8)
        and transfer_sizes(1) == (0, 1)
        and transfer_sizes(128) == (0, 16, 32, 64, 128)
    )
    assert received_blocks(np.array([0, 0, 1, 5]), 8) == 0 + 1 + 8


@pytest.mark.long
def test_ranks_with_other_rows_send_as_much() -> None:
    """A permutation takes all devices of a program, so they are in the same branch whatever their own rows need."""
    mesh, spec = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("dp", "cp")), PartitionSpec("dp", "cp")
    mask, inputs = Mask("causal"), rows((60,), (20, 40, 60))
    inputs["segments"][0, :20] = 2  # the second rank gives the third what it has, and no other rank anything
    given = arrays(3)

    def most(inputs: Any) -> Any:
        return gather_tokens(Tokens.of(inputs, ("cp",)), mask, ("cp",), "need").inputs["max_needed"]

    equal = jax.shard_map(most, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())  # refuses what varies
    np.testing.assert_array_equal(jax.jit(equal)(inputs), [0, 7, 0])

    def run(inputs: Any, q: Any, k: Any, v: Any, d_out: Any) -> Any:
        tokens = Tokens.of(inputs, ("cp",))
        keys = gather_tokens(tokens, mask, ("cp",), "need")

        def attend(q: Any, k: Any, v: Any) -> Any:
            backend = Backend("blockwise")
            return backend.attend_across_ranks(q, k, v, tokens, mask, keys, axes=("cp",), cp_way="need")

        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(d_out)

    got = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))(inputs, *given)
    require_equal(got, complete_rows(mask, inputs, given))


@pytest.mark.long
def test_nothing_travels_where_segments_are_whole_on_ranks() -> None:
    """Segments 1 and 4 on the first rank, 3 on the second, 2 and 5 on the third: bounds of numbers would overlap."""
    segments = np.repeat([[1, 4, 3, 2, 5]] * ROWS, [9, 11, 20, 13, 7], axis=1).astype(np.int32)
    inputs = {"segments": segments, "order": np.argsort(np.argsort(segments, axis=1, kind="stable"), axis=1)}
    inputs["order"] = inputs["order"].astype(np.int32)
    for mask in (Mask("full"), Mask("causal"), Mask("causal", 5)):
        assert not plan(mask, inputs)[0].any()
        require_equal(across_ranks("need", RANKS, mask, inputs, arrays(4)), complete_rows(mask, inputs, arrays(4)))


@pytest.mark.parametrize("sizes", [(8, 8, 4, 12, 8, 4, 4), (16, 16, 16)])
def test_media_that_the_data_give_whole_to_ranks_exchange_nothing(sizes: tuple[int, ...]) -> None:
    split = Split(ranks=RANKS, unit=4, token=4, method="segments", masks=((1, Mask("full")),))
    segments = np.pad(np.repeat(np.arange(1, len(sizes) + 1), sizes), (0, TOKENS - sum(sizes))).astype(np.int32)
    order = split.order_of_row({"segments": segments})
    needed, most = plan(Mask("full"), {"segments": segments[order][None]})
    assert not needed.any() and received_blocks(most, BLOCKS) == 0
