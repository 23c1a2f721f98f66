"""Attention by blocks beside an oracle of all pairs in fp64: outputs, gradients, and what is never in memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from mmjax.attention import blockwise
from mmjax.attention.blockwise import attention
from mmjax.attention.language import ITEMS
from mmjax.attention.mask import Mask, bounds
from mmjax.attention.pairs import pairs_of
from mmjax.attention.reference import dense_attention
from mmjax.attention.tokens import Tokens

WIDTH = 8


ROWS, TOKENS, HEADS, GROUPS = 2, 60, 4, 2
MASKS = [
    *(Mask("causal"), Mask("full"), Mask("causal", 1), Mask("causal", 20)),
    *(Mask("full", grid_window=3), Mask("causal", 5, 3)),
]
WORDS = [
    Mask("words", relations=("before", "in item")),
    Mask("words", 4, 3, ("in item", "before", "everywhere")),
    Mask("words", relations=("everywhere", "in item"), grid_window=3),
    Mask("words", 7, relations=("before", "everywhere", "before") + (ITEMS,) * 29),
]
"""Masks whose words are drawn; the last uses every bit."""


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mask, dict[str, np.ndarray], int]:
    """A mask, packed rows with or without padding, in their order or another, and a seed."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    cuts = np.sort(rng.integers(0, TOKENS + 1, (ROWS, draw(st.integers(1, 4)))), axis=1)
    segments = 1 + np.sum(np.arange(TOKENS) >= cuts[:, :, None], axis=1)
    segments = np.where(segments > cuts.shape[1], 0, segments) if draw(st.booleans()) else segments
    order = np.broadcast_to(np.arange(TOKENS), segments.shape)
    if draw(st.booleans()):
        order = np.argsort(rng.random(segments.shape), axis=1)
    inputs = {"segments": segments, "order": order, "positions": rng.integers(0, 9, (*segments.shape, 2))}
    # Runs of a medium each, and text between them.
    inputs["items"] = np.repeat(rng.integers(0, 4, (ROWS, TOKENS // 5)) * rng.integers(0, 2), 5, axis=1)
    inputs = {name: value.astype(np.int32) for name, value in inputs.items()}
    mask = draw(st.sampled_from([*MASKS, *WORDS]))
    kinds = rng.integers(0, 2**32, (2, draw(st.integers(1, 4))), np.uint32)
    if draw(st.booleans()):  # few bits: most pairs of kinds share none
        kinds &= rng.integers(0, 2**32, kinds.shape, np.uint32) & rng.integers(0, 2**32, kinds.shape, np.uint32)
    own = np.repeat(rng.integers(0, kinds.shape[1], (ROWS, TOKENS // 6)), 6, axis=1)
    inputs |= {name: words[own] for name, words in zip(("is", "attends"), kinds, strict=True)}
    return mask, inputs, draw(st.integers(0, 99))


def seen(mask: Mask, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Which tokens see which, pair by pair: [row, token that asks, token that is asked]."""
    result = np.zeros((ROWS, TOKENS, TOKENS), bool)
    for row, t, s in np.ndindex(result.shape):
        segments, order = inputs["segments"][row], inputs["order"][row]
        before, (here, there) = order[t] - order[s], inputs["positions"][row, [t, s]]
        own = segments[t] == segments[s] > 0
        earlier = bool(before >= 0 and (not mask.window or before < mask.window))
        near = not mask.grid_window or bool((here // mask.grid_window == there // mask.grid_window).all())
        if mask.kind == "words":
            result[row, t, s] = own and (t == s or by_a_bit(mask, inputs, row, (t, s), earlier, near))
            continue
        result[row, t, s] = own and (mask.kind == "full" or earlier) and near
    return result


def by_a_bit(mask: Mask, inputs: Any, row: int, pair: tuple[int, int], earlier: bool, near: bool) -> bool:
    """Whether a token sees another by one of the bits, tried one after another."""
    t, s = pair
    item, other = inputs["items"][row, t], inputs["items"][row, s]
    for bit, how in enumerate(mask.relations):
        there = {"before": earlier and near, "everywhere": near, "in item": item == other and item > 0}[how]
        if (int(inputs["attends"][row, t]) >> bit) & (int(inputs["is"][row, s]) >> bit) & 1 and there:
            return True
    return False


def numbers(seed: int) -> list[np.ndarray]:
    """Queries, keys, values and the gradient of the output."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(ROWS, TOKENS, n, WIDTH)) for n in (HEADS, GROUPS, GROUPS, HEADS)]


def oracle(mask: Mask, inputs: dict[str, np.ndarray], seed: int) -> list[np.ndarray]:
    """The output, 0 at padding, and the gradients of queries, keys and values in fp64, by the rule of the softmax."""
    q, k, v, d_out = numbers(seed)
    k, v = (np.repeat(x, HEADS // GROUPS, axis=2) for x in (k, v))
    allowed = seen(mask, inputs)[:, None]
    scores = np.where(allowed, np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(WIDTH), -np.inf)
    exp = np.where(allowed, np.exp(scores - scores.max(-1, keepdims=True, initial=-1e9)), 0)
    weights = exp / np.maximum(exp.sum(-1, keepdims=True), 1e-300)
    d_out = d_out * (inputs["segments"] > 0)[..., None, None]
    d_weights = np.einsum("bthk,bshk->bhts", d_out, v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / np.sqrt(WIDTH)
    dq, dk = np.einsum("bhts,bshk->bthk", d_scores, k), np.einsum("bhts,bthk->bshk", d_scores, q)
    dv = np.einsum("bhts,bthk->bshk", weights, d_out)
    dk, dv = (x.reshape(ROWS, TOKENS, GROUPS, -1, WIDTH).sum(3) for x in (dk, dv))
    return [np.einsum("bhts,bshk->bthk", weights, v), dq, dk, dv]


@partial(jax.jit, static_argnums=(0, 1))
def results(attend: Any, mask: Mask, inputs: Any, q: Any, k: Any, v: Any, d_out: Any) -> Any:
    real = (inputs["segments"] > 0)[..., None, None]
    out, back = jax.vjp(lambda *x: jnp.where(real, attend(*x, Tokens.of(inputs), mask), 0), q, k, v)
    return out, *back(d_out)


def in_blocks(*given: Any) -> Any:
    return attention(*given)


def require_oracle(attend: Any, mask: Mask, inputs: dict[str, np.ndarray], seed: int) -> None:
    got = results(attend, mask, inputs, *(x.astype(np.float32) for x in numbers(seed)))
    for name, one, exact in zip(("out", "dq", "dk", "dv"), got, oracle(mask, inputs, seed), strict=True):
        np.testing.assert_allclose(one, exact, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "BLOCK", 16)


@pytest.mark.long
@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_several_blocks_are_the_oracle(case: Any) -> None:
    require_oracle(in_blocks, *case)


@pytest.mark.parametrize("attend", [attention, dense_attention])
@settings(max_examples=15, deadline=None)
@given(cases())
def test_one_block_and_all_pairs_are_the_oracle(attend: Any, case: Any) -> None:
    require_oracle(attend, *case)


@partial(jax.jit, static_argnums=0)
def met(mask: Mask, inputs: Any) -> Any:
    inputs = mask.inputs(Tokens.of(inputs))
    return mask.may_allow(bounds(inputs, 12), bounds(inputs, 12))


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(cases())
def test_a_pair_of_blocks_is_skipped_only_where_the_mask_hides_all_of_it(case: Any) -> None:
    mask, inputs, _ = case
    found, blocks = np.asarray(met(mask, inputs)), TOKENS // 12
    some = seen(mask, inputs).reshape(ROWS, blocks, 12, blocks, 12).any(axis=(2, 4))
    assert (found >= some).all()
    if mask == Mask("full") and (np.diff(inputs["segments"]) >= 0).all():  # then bounds say all
        assert (found == some).all()


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 99))
def test_pairs_of_a_mask_are_counted(case: Any, among: int) -> None:
    mask, inputs, _ = case
    some = np.random.default_rng(among).random(TOKENS) < 0.5
    for row, allowed in enumerate(seen(mask, inputs)):
        pairs = pairs_of(mask, {name: values[row] for name, values in inputs.items()})
        assert pairs.tokens == TOKENS
        np.testing.assert_array_equal(pairs.key_counts(), allowed.sum(axis=1))
        np.testing.assert_array_equal(pairs.key_counts(some), allowed[:, some].sum(axis=1))


def packed(lengths: list[int]) -> Tokens:
    return Tokens.of({"segments": jnp.repeat(jnp.arange(1, len(lengths) + 1), jnp.asarray(lengths))[None]})


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("mask", "lengths", "pairs"),
    [
        (Mask("full"), [64], 16),
        (Mask("causal"), [64], 10),
        (Mask("causal", window=16), [64], 7),
        (Mask("causal"), [16, 16, 32], 5),
        (Mask("full"), [16, 16, 32], 6),
    ],
    ids=str,
)
def test_hidden_pairs_of_blocks_are_not_computed(mask: Mask, lengths: list[int], pairs: int) -> None:
    tokens = packed(lengths)
    inputs = mask.inputs(tokens)
    assert int(mask.may_allow(bounds(inputs, 16), bounds(inputs, 16)).sum()) == pairs
    # What is not computed is not read either: a NaN in a key that nobody sees does not reach the output.
    x = jnp.ones((1, 64, 1, WIDTH))
    k = x.at[0, -1].set(jnp.nan)
    out = np.asarray(attention(x, k, x, tokens, mask))
    first = 32 if mask.kind == "full" and len(lengths) > 1 else 0 if mask.kind == "full" else 48
    assert np.isfinite(out[0, :first]).all() and not np.isfinite(out[0, first:]).all()


@pytest.mark.long
@pytest.mark.usefixtures("small_blocks")
def test_a_hidden_token_changes_nothing() -> None:
    """Not a bit of what a causal token gives, nor of its gradients."""
    tokens, mask = packed([20, 40]), Mask("causal")
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 60, 2, WIDTH)), jnp.float32) for _ in range(3))

    def early(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, tokens, mask)[:, 20:40].sum()

    plain = jax.value_and_grad(early, (0, 1, 2))(q, k, v)
    changed = jax.value_and_grad(early, (0, 1, 2))(q, k.at[:, 40:].add(1), v.at[:, :20].add(1))
    assert plain[0] == changed[0]
    for one, other in zip(plain[1], changed[1], strict=True):
        np.testing.assert_array_equal(one, other)
        assert not np.asarray(other)[:, :20].any() and not np.asarray(other)[:, 40:].any()


@pytest.mark.long
@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), st.integers(0, TOKENS - 1))
def test_tokens_that_a_token_does_not_see_change_nothing(case: Any, at: int) -> None:
    """Not a bit of what it gives, nor of its gradients, whatever the mask."""
    mask, inputs, seed = case
    q, k, v, d_out = (x.astype(np.float32) for x in numbers(seed))
    hidden = ~seen(mask, inputs)[:, at]
    only = d_out * (np.arange(TOKENS) == at)[:, None, None]
    plain = results(in_blocks, mask, inputs, q, k, v, only)
    changed = results(
        in_blocks, mask, inputs, q, np.where(hidden[..., None, None], 3 - k, k), v - hidden[..., None, None], only
    )
    np.testing.assert_array_equal(plain[0][:, at], changed[0][:, at])
    for one, other in zip(plain[1:], changed[1:], strict=True):
        np.testing.assert_array_equal(one, other)
    for gradient in changed[2:]:
        assert not np.asarray(gradient)[hidden].any()


@pytest.mark.long
@pytest.mark.parametrize("mask", [Mask("causal"), Mask.of("gemma3")], ids=["causal", "words"])
def test_blocks_in_shard_map_over_rows_and_heads(mask: Mask) -> None:
    """With ``check_vma``: rows over dp, heads over tp, segments and words equal over tp."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 600, 4, WIDTH)), jnp.float32) for _ in range(3))
    inputs = {"segments": np.sort(rng.integers(1, 4, (2, 600)), axis=1).astype(np.int32)}
    inputs |= {name: np.repeat(rng.integers(0, 4, (2, 6), np.uint32), 100, axis=1) for name in ("is", "attends")}
    inputs["items"] = np.repeat(rng.integers(0, 3, (2, 12)), 50, axis=1).astype(np.int32)

    def loss(attend: Any, q: Any, k: Any, v: Any, inputs: Any) -> Any:
        return jnp.sum(attend(q, k, v, Tokens.of(inputs), mask) ** 2)

    def local(q: Any, k: Any, v: Any, inputs: Any) -> Any:
        return jax.grad(partial(loss, attention), (0, 1, 2))(q, k, v, inputs)

    heads, rows = PartitionSpec("dp", None, "tp"), PartitionSpec("dp")
    run = jax.shard_map(local, mesh=mesh, in_specs=(heads, heads, heads, rows), out_specs=(heads,) * 3)
    want = jax.grad(partial(loss, dense_attention), (0, 1, 2))(q, k, v, inputs)
    for got, exact in zip(jax.jit(run)(q, k, v, inputs), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-4)


def compiled(length: int) -> Any:
    """Loss and gradients of one row of packed text."""
    shape = jax.ShapeDtypeStruct((1, length, 2, WIDTH), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(q: Any, k: Any, v: Any, segments: Any) -> Any:
        return jnp.sum(attention(q, k, v, Tokens.of({"segments": segments}), Mask("causal")))

    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape, segments).compile()


def test_memory_grows_with_tokens_and_not_with_pairs() -> None:
    sizes = [compiled(length).memory_analysis().temp_size_in_bytes for length in (4096, 8192, 16384)]
    more = np.diff(sizes) / (4096, 8192)
    assert more[1] <= 1.1 * more[0] and sizes[-1] < 16384 * 16384
