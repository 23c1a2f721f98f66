"""Context parallelism against attention of complete rows: outputs and gradients on any number of ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from mmjax.attention import blockwise
from mmjax.attention.backends import Backend
from mmjax.attention.exchange import EXCHANGES, gather_tokens
from mmjax.attention.mask import Mask
from mmjax.attention.reference import dense_attention
from mmjax.attention.tokens import Tokens

ROWS, TOKENS, WIDTH = 2, 60, 8
MASKS = [Mask("causal"), Mask("full"), Mask("causal", 9), Mask("full", grid_window=3)]
Case = tuple[Mask, dict[str, np.ndarray], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A mask, packed rows with padding in a drawn order, and a seed."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    cuts = np.sort(rng.integers(0, TOKENS + 1, (ROWS, draw(st.integers(1, 4)))), axis=1)
    segments = np.sum(np.arange(TOKENS) >= cuts[:, :, None], axis=1)
    order = np.argsort(rng.random(segments.shape), axis=1)
    inputs = {"segments": segments, "order": order, "positions": rng.integers(0, 9, (*segments.shape, 2))}
    return draw(st.sampled_from(MASKS)), {k: v.astype(np.int32) for k, v in inputs.items()}, draw(st.integers(0, 99))


def numbers(seed: int, heads: int, groups: int, value_width: int = WIDTH) -> list[np.ndarray]:
    """Queries, keys, values and the gradient of the output."""
    rng, sizes = np.random.default_rng(seed), ((heads, WIDTH), (groups, WIDTH), (groups, value_width))
    return [rng.normal(size=(ROWS, TOKENS, *size)).astype(np.float32) for size in (*sizes, (heads, value_width))]


def across_ranks(
    cp_way: str,
    ranks: int,
    mask: Mask,
    inputs: dict[str, Any],
    arrays: list[np.ndarray],
    distances: tuple[int, ...] | None = None,
) -> Any:
    """Output and gradients with the tokens of rows on several ranks."""
    mesh, spec = Mesh(np.array(jax.devices()[:ranks]), ("cp",)), PartitionSpec(None, "cp")

    def run(inputs: Any, q: Any, k: Any, v: Any, d_out: Any) -> Any:
        tokens = Tokens.of(inputs, ("cp",))
        keys = gather_tokens(tokens, mask, ("cp",), cp_way)
        real = (inputs["segments"] > 0)[..., None, None]

        def attend(q: Any, k: Any, v: Any) -> Any:
            backend = Backend("blockwise", distances=distances)
            out = backend.attend_across_ranks(q, k, v, tokens, mask, keys, axes=("cp",), cp_way=cp_way)
            return jnp.where(real, out, 0)

        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(d_out)

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))(inputs, *arrays)


def complete_rows(mask: Mask, inputs: dict[str, Any], arrays: list[np.ndarray]) -> Any:
    """Output and gradients of complete rows, from scores of all pairs."""
    real = (inputs["segments"] > 0)[..., None, None]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jnp.where(real, dense_attention(q, k, v, Tokens.of(inputs), mask), 0)

    out, vjp = jax.vjp(attend, *arrays[:3])
    return out, *vjp(arrays[3])


def require_equal(got: Any, expected_all: Any) -> None:
    for name, actual, expected in zip(("out", "dq", "dk", "dv"), got, expected_all, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5, err_msg=name)


SIZES = [(2, 4, 2), (3, 6, 2)]
"""Ranks, query heads and key/value heads."""
MORE_SIZES = [(4, 4, 4), (5, 5, 1), (3, 6, 3), (6, 12, 2)]
QUICK = [("need", 2), ("gather", 3), ("ring", 3), ("all-to-all", 3)]
"""The ways and numbers of ranks of `make test`: among three ranks, "need" compiles for as long as all others do."""


@pytest.mark.parametrize(
    ("cp_way", "ranks", "heads", "groups"),
    [
        *(
            pytest.param(way, *size, marks=() if (way, size[0]) in QUICK else pytest.mark.long)
            for way, size in product(EXCHANGES, SIZES)
        ),
        *(pytest.param(way, *size, marks=pytest.mark.slow) for way, size in product(EXCHANGES, MORE_SIZES)),
    ],
)
@settings(max_examples=4, deadline=None)
@given(case=cases())
def test_every_way_is_attention_of_whole_rows(cp_way: str, ranks: int, heads: int, groups: int, case: Case) -> None:
    mask, inputs, seed = case
    arrays = numbers(seed, heads, groups)
    require_equal(across_ranks(cp_way, ranks, mask, inputs, arrays), complete_rows(mask, inputs, arrays))


@pytest.mark.long
@pytest.mark.parametrize("cp_way", EXCHANGES)
@pytest.mark.parametrize(("value_width", "block"), [pytest.param(5, 512, marks=pytest.mark.long), (11, 16)])
def test_values_of_another_width_than_keys(
    cp_way: str, value_width: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks, and of complete rows, in one block and in several, beside a sum over pairs of tokens in NumPy."""
    monkeypatch.setattr(blockwise, "BLOCK", block)
    order = np.argsort(np.random.default_rng(0).random((ROWS, TOKENS)), axis=1).astype(np.int32)
    inputs: dict[str, Any] = {"segments": np.where(order < 50, 1 + order // 30, 0).astype(np.int32), "order": order}
    arrays, mask = numbers(3, 4, 2, value_width), Mask("causal")
    want = complete_rows(mask, inputs, arrays)
    require_equal(across_ranks(cp_way, 2, mask, inputs, arrays), want)
    q, k, v = (x.astype(np.float64) for x in arrays[:3])
    scores = np.einsum("bthk,bshk->bhts", q, np.repeat(k, 2, axis=2)) * WIDTH**-0.5
    same = inputs["segments"][:, :, None] == inputs["segments"][:, None]
    sees = (same & (order[:, :, None] >= order[:, None]) & (inputs["segments"] > 0)[..., None])[:, None]
    weights = np.where(sees, np.exp(scores), 0)
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-9)
    np.testing.assert_allclose(want[0], np.einsum("bhts,bshv->bthv", weights, np.repeat(v, 2, axis=2)), atol=2e-5)
    queries, keys, values = (jnp.asarray(x) for x in arrays[:3])
    whole = blockwise.attention(queries, keys, values, Tokens.of(inputs), mask)
    real = inputs["segments"] > 0
    np.testing.assert_allclose(np.asarray(whole)[real], np.asarray(want[0])[real], atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "cp_way", [pytest.param(way, marks=() if way == "ring" else pytest.mark.long) for way in EXCHANGES]
)
def test_rows_of_several_blocks(cp_way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "BLOCK", 16)
    rng = np.random.default_rng(0)
    order = np.argsort(rng.random((ROWS, TOKENS)), axis=1).astype(np.int32)
    inputs = {"segments": np.where(order < 50, 1 + order // 30, 0).astype(np.int32), "order": order}
    arrays = numbers(1, 4, 2)
    for mask in MASKS[:3]:
        require_equal(across_ranks(cp_way, 2, mask, inputs, arrays), complete_rows(mask, inputs, arrays))


def test_an_order_that_is_not_given_is_the_place_in_the_row() -> None:
    segments = np.repeat([[1, 2, 2, 0]] * ROWS, TOKENS // 4, axis=1).astype(np.int32)
    arrays = numbers(2, 4, 2)
    expected_all = complete_rows(MASKS[0], {"segments": segments}, arrays)
    require_equal(across_ranks("ring", 3, MASKS[0], {"segments": segments}, arrays), expected_all)


def test_heads_that_do_not_divide_are_refused_by_name() -> None:
    segments = np.ones((ROWS, TOKENS), np.int32)
    with pytest.raises(ValueError, match=r"^Layout\.cp_way='all-to-all': 4 heads .* cp=3; use 'gather' or 'ring'"):
        across_ranks("all-to-all", 3, MASKS[1], {"segments": segments}, numbers(0, 4, 2))
