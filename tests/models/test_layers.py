"""Layers against NumPy, and the vocabulary and hidden units split over tp against whole ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from spmd_runs import AXES, on_tp

from mmjax.attention.blockwise import attention
from mmjax.attention.mask import Mask
from mmjax.attention.tokens import Tokens
from mmjax.models import layers, norms, vocabulary
from mmjax.models.handles import Handle

TP = pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long), 4])
VOCAB, PADDED = 13, 16


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# ---- positions and norms ---------------------------------------------------------------------------------------------


def test_rotation_is_a_turn_in_the_plane_of_each_pair() -> None:
    x, positions, theta = normal(2, 5, 3, 8), np.array([[0, 1, 2, 0, 1], [7, 3, 0, 100, 2]]), 50.0
    got = np.asarray(layers.rotate(jnp.asarray(x), jnp.asarray(positions), theta))
    for i in range(4):
        pair = x[..., i] + 1j * x[..., i + 4]
        turned = pair * np.exp(1j * positions * theta ** (-2 * i / 8))[..., None]
        np.testing.assert_allclose(got[..., i] + 1j * got[..., i + 4], turned, rtol=1e-5, atol=2e-5)
    np.testing.assert_array_equal(got[0, 0], x[0, 0])


def test_rotated_products_depend_on_the_distance_alone() -> None:
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1)

    def product(at_q: int, at_k: int) -> float:
        turned = [layers.rotate(jnp.asarray(x), jnp.array([[at]]), 10.0) for x, at in ((q, at_q), (k, at_k))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert product(5, 3) == pytest.approx(product(9, 7), rel=1e-4)
    assert product(5, 3) != pytest.approx(product(3, 5), rel=1e-2)


def test_rms_norm() -> None:
    x, scale = normal(2, 3, 8), normal(8, seed=1)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.5) * scale
    np.testing.assert_allclose(norms.rms_norm(jnp.asarray(x), jnp.asarray(scale), 0.5), want, rtol=1e-5)


@pytest.mark.parametrize("handle", [False, True])
def test_gradients_of_rms_norm(handle: bool) -> None:
    """Those of fp64, of heads too; of a handle the gradient is of what is stored."""

    def norm(x: Any, scale: Any) -> Any:
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 0.5) * scale

    x, scale, dy = normal(2, 3, 2, 8), normal(8, seed=1), normal(2, 3, 2, 8, seed=2)
    with jax.enable_x64(True):
        want = [np.asarray(d) for d in jax.vjp(norm, *map(jnp.float64, (x, scale)))[1](jnp.float64(dy))]

    def by_layers(x: Any, stored: Any) -> Any:
        return norms.rms_norm(x, Handle(stored=stored, open=lambda s: 2 * s) if handle else stored, 0.5)

    _, back = jax.vjp(by_layers, jnp.asarray(x), jnp.asarray(scale / (2 if handle else 1)))
    for got, wanted, factor in zip(back(jnp.asarray(dy)), want, (1, 2 if handle else 1), strict=True):
        np.testing.assert_allclose(got, factor * wanted, rtol=1e-5, atol=1e-5)


def test_layer_norm() -> None:
    x, p = normal(2, 3, 8) + 3, {"scale": normal(8, seed=1), "bias": normal(8, seed=2)}
    want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.5) * p["scale"] + p["bias"]
    got = norms.layer_norm(jnp.asarray(x), jax.tree.map(jnp.asarray, p), eps=0.5)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norms_of_bf16_take_their_statistics_in_fp32(norm: str) -> None:
    """Rounded once, at the end: statistics in bf16 would move a good part of the elements."""
    x, ones = jnp.asarray(normal(1, 8, 64) + (norm == "layer"), jnp.bfloat16), jnp.ones(64, jnp.bfloat16)
    p = {"scale": ones, "bias": ones * 0}
    got = norms.rms_norm(x, ones, 1e-6) if norm == "rms" else norms.layer_norm(x, p)
    exact = np.asarray(x, np.float64)
    exact = exact - exact.mean(-1, keepdims=True) * (norm == "layer")
    want = jnp.asarray(exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6), jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    assert (np.asarray(got) != np.asarray(want)).mean() < 0.01


READS, ROWS, FEATURES = 2104, 16, 32


def bf16_gradient(fn: Any, p: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Of a parameter in bf16, on one rank."""

    def gradient(p: Any, dy: Any) -> jax.Array:
        return jax.vjp(lambda p: on_tp(1, fn, p), p)[1](dy)[0]

    got = jax.jit(gradient)(jnp.asarray(p, jnp.bfloat16), jnp.asarray(dy, jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    return np.asarray(got, np.float64)


@pytest.mark.parametrize("reader", ["embedding", "lookup"])
def test_gradients_of_what_is_read_often_are_summed_in_fp32(reader: str) -> None:
    """Beside a sum in fp64, row by row: off by the rounding of the result to bf16 and no more."""
    rng = np.random.default_rng(0)
    index = rng.permutation(np.concatenate([np.full(READS, 3), rng.integers(0, ROWS, 1000)]))
    table, dy = normal(ROWS, FEATURES), np.asarray(jnp.asarray(normal(len(index), FEATURES), jnp.bfloat16), np.float64)
    if reader == "lookup":
        index[::50] = -1  # none
        got = bf16_gradient(lambda t: layers.lookup(t, jnp.asarray(index)), table, dy)
    else:
        got = bf16_gradient(lambda t: layers.embed_tokens(jnp.asarray(index), t, AXES), table, dy)
    want = np.zeros_like(got)
    np.add.at(want, index[index >= 0], dy[index >= 0])
    gaps = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert gaps.max() < 2**-8


def test_a_lookup_gives_zeros_where_there_is_no_row() -> None:
    table, index = normal(ROWS, 3), np.array([[2, -1], [-1, 15]])
    got = on_tp(1, lambda t: layers.lookup(t, jnp.asarray(index)), jnp.asarray(table))
    np.testing.assert_array_equal(got, np.where(index[..., None] < 0, 0, table[index]))


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


@TP
def test_a_column_and_a_row_parallel_product_are_two_products(tp: int) -> None:
    x, up, bias, down, last = normal(2, 3, 4), normal(4, 8), normal(8, seed=1), normal(8, 4, seed=2), normal(4, seed=3)
    specs = (P(), P(None, "tp"), P("tp"), P("tp", None), P())

    def loss(fn: Any, *args: Any) -> jax.Array:
        return jnp.sum(jnp.sin(fn(*args)))

    def parallel(x: Any, up: Any, bias: Any, down: Any, last: Any) -> jax.Array:
        first, second = layers.column_parallel(x, [(up, bias), (up, None)], AXES)
        return layers.row_parallel(jnp.tanh(first) * second, down, AXES, last)

    def split(*args: Any) -> jax.Array:
        return on_tp(tp, parallel, *args, specs=specs)

    def whole(x: Any, up: Any, bias: Any, down: Any, last: Any) -> jax.Array:
        return (jnp.tanh(x @ up + bias) * (x @ up)) @ down + last

    args = [jnp.asarray(a) for a in (x, up, bias, down, last)]
    got, want = (jax.jit(jax.value_and_grad(lambda a, f=fn: loss(f, *a)))(args) for fn in (split, whole))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@TP
def test_embedding_of_a_split_vocabulary(tp: int) -> None:
    tokens, table = np.array([[0, 3, 12, 15], [4, 8, 7, 11]]), normal(PADDED, 6)
    got = on_tp(tp, lambda t, w: layers.embed_tokens(t, w, AXES), tokens, table, specs=(P(), P("tp", None)))
    np.testing.assert_array_equal(got, table[tokens])


@TP
def test_cross_entropy_of_a_split_and_padded_vocabulary(tp: int) -> None:
    """Padded entries get no probability and no gradient, whatever the padded columns of the head hold."""
    x, head, targets = normal(2, 4, 6) * 3, normal(6, PADDED, seed=1), np.array([[0, 3, 12, 7], [4, 8, 11, 2]])

    def split(x: Any, head: Any) -> jax.Array:
        def body(x: Any, head: Any) -> jax.Array:
            return vocabulary.cross_entropy(
                vocabulary.vocabulary_logits(x, head, AXES, VOCAB), jnp.asarray(targets), AXES
            )

        return on_tp(tp, body, x, head, specs=(P(), P(None, "tp")))

    def dense(x: Any, head: Any) -> jax.Array:
        chosen = jax.nn.log_softmax(x @ head[:, :VOCAB])
        return -jnp.take_along_axis(chosen, jnp.asarray(targets)[..., None], -1)[..., 0]

    np.testing.assert_allclose(split(x, head), dense(x, head), rtol=1e-5, atol=1e-5)
    weights = normal(2, 4, seed=2)
    got, want = (jax.jit(jax.grad(lambda a, f=fn: jnp.sum(f(*a) * weights)))((x, head)) for fn in (split, dense))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert not np.asarray(got[1])[:, VOCAB:].any()


@pytest.mark.long
def test_cross_entropy_of_large_logits_is_finite() -> None:
    logits = jnp.array([[[3e4, -3e4, 0.0, 0.0]]])
    got = on_tp(2, lambda z: vocabulary.cross_entropy(z, jnp.array([[1]]), AXES), logits, specs=(P(None, None, "tp"),))
    assert float(got[0, 0]) == 6e4


@TP
def test_the_best_token_is_the_lowest_of_the_largest(tp: int) -> None:
    logits = np.full((1, 4, PADDED), -1.0, np.float32)
    logits[0, 0, [3, 9]] = 2
    logits[0, 1, [15]] = 2
    logits[0, 2, [5, 6, 7]] = 2
    got = on_tp(tp, lambda z: vocabulary.best_token(z, AXES), logits, specs=(P(None, None, "tp"),))
    assert np.asarray(got).tolist() == [[3, 15, 5, 0]]


# ---- layers and attention --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_layers_run_in_order(remat: str) -> None:
    stacked = {"w": jnp.array([2.0, 3.0, 5.0])}
    got, *_ = layers.scan_layers(lambda x, p: (x * p["w"] + 1, {}), jnp.array(1.0), stacked, remat)
    assert float(got) == ((1 * 2 + 1) * 3 + 1) * 5 + 1


@pytest.mark.parametrize(("kind", "window"), [("causal", 0), ("full", 0), ("causal", 2)])
def test_attention_is_softmax_within_a_segment(kind: Any, window: int) -> None:
    """Query head h reads key head h // (H/G); the scale is the root of the head's width."""
    q, k, v = normal(1, 6, 4, 8), normal(1, 6, 2, 8, seed=1), normal(1, 6, 2, 8, seed=2)
    segments = np.array([[1, 1, 1, 2, 2, 0]])
    tokens = Tokens.of({"segments": jnp.asarray(segments)})
    got = np.asarray(attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), tokens, Mask(kind, window)))
    for t in range(5):
        first = t + 1 - (window or 6)
        seen = [s for s in range(6) if segments[0, s] == segments[0, t] and (kind == "full" or first <= s <= t)]
        for h in range(4):
            scores = k[0, seen, h // 2] @ q[0, t, h] / np.sqrt(8)
            weights = np.exp(scores) / np.exp(scores).sum()
            np.testing.assert_allclose(got[0, t, h], weights @ v[0, seen, h // 2], rtol=1e-4, atol=1e-5)
    assert np.isfinite(got).all()


def test_a_full_mask_has_no_window() -> None:
    x, tokens = jnp.ones((1, 2, 1, 4)), Tokens.of({"segments": jnp.ones((1, 2), jnp.int32)})
    with pytest.raises(ValueError, match=r"^window=3: a mask that is 'full' has none"):
        attention(x, x, x, tokens, Mask("full", 3))
