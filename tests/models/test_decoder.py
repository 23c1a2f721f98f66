"""The decoder: packed samples see their own past alone, and modality tokens go where the index says."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spmd_runs import AXES, context, on_tp, slice_of

from mmjax.models.layers import embed_tokens
from mmjax.models.llama import layers
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.module import Llama
from mmjax.models.module import run_layers
from mmjax.models.norms import rms_norm
from mmjax.models.parameters import join_logical, split_logical
from mmjax.models.placeholders import merge_modality_tokens
from mmjax.reference import decoder as reference_decoder

CONFIG = DecoderConfig(layers=2, width=16, heads=4, kv_heads=2, head_dim=8, mlp=24, vocab=11)
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0]])
POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0]])
FIRST, SECOND, PADDING = (SEGMENTS[0] == i for i in (1, 2, 0))


@cache
def parameters() -> Any:
    fresh = slice_of(Llama(CONFIG), "llm").initialise(jax.random.key(0))
    return jax.tree.map(lambda x: x + 0.1 * np.random.default_rng(x.size).normal(size=x.shape).astype("f4"), fresh)


@cache
def compiled() -> Any:
    def body(p: Any, x: Any, segments: Any, positions: Any) -> jax.Array:
        return run_layers(Llama(CONFIG), p, context(Llama(CONFIG), segments=segments, positions=positions), x)[0]

    return jax.jit(lambda *args: on_tp(1, body, *args))


def run(x: np.ndarray, segments: np.ndarray = SEGMENTS, positions: np.ndarray = POSITIONS) -> np.ndarray:
    return np.asarray(compiled()(parameters(), x, segments, positions))


def test_causality_is_by_order_not_by_index() -> None:
    """Tokens that lie in another order, and say so, attend as before."""
    x, shuffled = features(), np.random.default_rng(4).permutation(11)
    given = {"segments": SEGMENTS, "positions": POSITIONS, "order": np.arange(11)[None]}
    moved = {name: array[:, shuffled] for name, array in given.items()}

    def body(p: Any, x: Any, given: Any) -> jax.Array:
        return run_layers(Llama(CONFIG), p, context(Llama(CONFIG), **given), x)[0]

    got = jax.jit(lambda *args: on_tp(1, body, *args))(parameters(), x[:, shuffled], moved)
    seen = ~PADDING[shuffled]
    np.testing.assert_allclose(np.asarray(got)[0, seen], run(x)[0, shuffled][seen], rtol=1e-4, atol=1e-5)
    wrong = {name: array for name, array in moved.items() if name != "order"}
    by_index = jax.jit(lambda *args: on_tp(1, body, *args))(parameters(), x[:, shuffled], wrong)
    assert np.abs(np.asarray(by_index)[0, seen] - run(x)[0, shuffled][seen]).max() > 1e-2


def features() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(1, 11, 16)).astype(np.float32)


def test_a_sample_does_not_see_its_neighbour() -> None:
    x = features()
    before = run(x)
    for changed, kept in ((SECOND, FIRST), (FIRST, SECOND), (PADDING, FIRST | SECOND)):
        y = x.copy()
        y[0, changed] += 5
        after = run(y)
        np.testing.assert_array_equal(after[0, kept], before[0, kept])
        assert (after[0, changed] != before[0, changed]).any(axis=-1).all()


def test_a_token_sees_itself_and_its_past() -> None:
    x = features()
    y, before = x.copy(), run(x)
    y[0, 6] += 5
    changed = (run(y)[0] != before[0]).any(axis=-1)
    assert changed.tolist() == [False] * 6 + [True] * 3 + [False] * 2


@pytest.mark.parametrize(("full_layers", "reach"), [(0, 3), (1, 5), (2, 5)])
def test_a_window_is_of_the_layers_that_have_one(full_layers: int, reach: int) -> None:
    """Two layers that each see a token and the one before it see three tokens together."""
    x, llm = features(), Llama(dataclasses.replace(CONFIG, window=2, full_layers=full_layers))
    own = {"segments": SEGMENTS, "positions": POSITIONS}
    part = slice_of(llm, "llm")

    def body(p: Any, x: Any) -> jax.Array:
        return run_layers(llm, p, context(llm, **own), x)[0]

    named = split_logical(jax.tree.leaves(slice_of(Llama(CONFIG), "llm").leaves()), jax.tree.leaves(parameters()))
    leaves, tree = jax.tree.flatten(part.leaves())
    p = jax.tree.unflatten(tree, join_logical(leaves, named))
    ran = jax.jit(lambda *args: on_tp(1, body, *args))
    y, before = x.copy(), np.asarray(ran(p, x))
    y[0, 4] += 5
    changed = (np.asarray(ran(p, y))[0] != before[0]).any(axis=-1)
    assert changed.tolist() == [4 <= at < min(4 + reach, 9) for at in range(11)]


def test_a_packed_sample_is_the_sample_alone() -> None:
    x = features()
    alone = [np.zeros_like(a) for a in (x, SEGMENTS, POSITIONS)]
    for array, of in zip(alone, (x, SEGMENTS, POSITIONS), strict=True):
        array[:, :5] = of[:, SECOND]
    np.testing.assert_allclose(run(*alone)[0, :5], run(x)[0, SECOND], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_the_references(tied: bool) -> None:
    c = DecoderConfig(**{**vars(CONFIG), "tied": tied})
    part, tokens = slice_of(Llama(c), "llm"), np.array([[3, 1, 4, 1, 5, 9, 2]])
    params = part.initialise(jax.random.key(1))

    def body(p: Any, tokens: Any) -> jax.Array:
        x = embed_tokens(tokens, p["embed"], AXES)
        x, *_ = run_layers(
            Llama(c), p, context(Llama(c), segments=jnp.ones_like(tokens), positions=jnp.arange(7)[None]), x
        )
        return layers.logits(p, c, AXES, rms_norm(x, p["norm"], c.norm_eps))

    got = jax.jit(lambda *args: on_tp(1, body, *args, out=jax.sharding.PartitionSpec(None, None, "tp")))(params, tokens)
    leaves = split_logical(jax.tree.leaves(part.leaves()), jax.tree.leaves(params))
    want = reference_decoder.decode({n: jnp.asarray(a) for n, a in leaves.items()}, c, jnp.asarray(tokens[0]), ())
    np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-5)


def test_modality_tokens_replace_placeholders_of_their_own_cell() -> None:
    """Two cells of two text rows and three encoder rows each."""
    rng = np.random.default_rng(0)
    x, tokens = rng.normal(size=(4, 5, 2)).astype("f4"), rng.normal(size=(6, 3, 2)).astype("f4")
    index = np.array([[-1, 0, 1, 8, -1], [4, -1, -1, -1, 2], [-1] * 5, [0, 8, 3, -1, 7]])
    got = np.asarray(merge_modality_tokens(jnp.asarray(x), jnp.asarray(tokens), jnp.asarray(index), 2))
    for row, column in np.ndindex(4, 5):
        at, cell = index[row, column], row // 2
        want = x[row, column] if at < 0 else tokens[cell * 3 : cell * 3 + 3].reshape(9, 2)[at]
        np.testing.assert_array_equal(got[row, column], want)


def test_a_replaced_embedding_gets_no_gradient() -> None:
    x, tokens, index = jnp.ones((1, 3, 2)), jnp.ones((1, 2, 2)), jnp.array([[-1, 1, 1]])
    dx, dtokens = jax.grad(lambda a: jnp.sum(merge_modality_tokens(a[0], a[1], index, 1)))((x, tokens))
    assert np.asarray(dx)[0, :, 0].tolist() == [1, 0, 0]
    assert np.asarray(dtokens)[0, :, 0].tolist() == [0, 2]
