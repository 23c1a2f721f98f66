"""The GPU kernels of grouped products, interpreted on a CPU, against products of each group in fp64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.models.experts import grouped_blocks, grouped_kernels
from mmjax.models.experts.dispatch import Rows
from mmjax.models.experts.grouped import grouped_products

CASES = {
    "blocks do not divide anything": (70, 90, (100, 0, 37, 150), 13),
    "blocks divide widths": (64, 128, (0, 0, 64), 0),
    "no rows": (5, 7, (0, 0, 0), 40),
    "several blocks of a group": (40, 130, (300, 130, 1, 200), 69),
}
"""Inputs, outputs, rows of each expert, rows behind the last."""


def drawn(case: str) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray], tuple[int, ...]]:
    inputs, outputs, sizes, behind = CASES[case]
    rng, rows = np.random.default_rng(len(case)), sum(sizes) + behind
    weights = [rng.normal(size=(len(sizes), inputs, outputs)) for _ in range(2)]
    return rng.normal(size=(rows, inputs)), weights, [rng.normal(size=(rows, outputs)) for _ in range(2)], sizes


def groups(sizes: tuple[int, ...]) -> list[slice]:
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def close(got: jax.Array, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("case", CASES)
def test_products_and_gradients_are_those_of_each_group(case: str) -> None:
    x, weights, dys, sizes = drawn(case)
    of = jnp.float32
    x_MD, sizes_E = jnp.asarray(x, of), jnp.asarray(sizes)
    weights_EDF, dys_MF = [jnp.asarray(w, of) for w in weights], [jnp.asarray(dy, of) for dy in dys]
    y, dx, dw = np.zeros((2, *dys[0].shape)), np.zeros(x.shape), np.zeros((2, *weights[0].shape))
    for expert, rows in enumerate(groups(sizes)):
        for place in range(2):
            y[place, rows] = x[rows] @ weights[place][expert]
            dx[rows] += dys[place][rows] @ weights[place][expert].T
            dw[place, expert] = x[rows].T @ dys[place][rows]
    close(jnp.stack(grouped_kernels.products(Rows(x_MD), weights_EDF, sizes_E)), y)
    close(grouped_kernels.input_gradient([Rows(dy) for dy in dys_MF], weights_EDF, sizes_E), dx)
    close(jnp.stack(grouped_kernels.weight_gradients([(Rows(x_MD), [Rows(dy) for dy in dys_MF], sizes_E)])), dw)


@pytest.mark.long
@pytest.mark.parametrize("ways", [grouped_kernels, grouped_blocks])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_read_by_index_and_gradients_of_parts_are_added_to_a_total(case: str, ways: Any) -> None:
    x, weights, dys, sizes = drawn(case)
    rng, of = np.random.default_rng(1), jnp.float32
    sizes_E, total = jnp.asarray(sizes), rng.normal(size=weights[0].shape)
    places = [rng.permutation(len(x) + 5)[: len(x)] for _ in range(2)]  # of 5 values that no row has, too
    values = [rng.normal(size=(len(x) + 5, a.shape[1])) for a in (x, dys[0])]
    for value, place, a in zip(values, places, (x, dys[0]), strict=True):
        value[place] = a
    x_rows, dy_rows = (Rows(jnp.asarray(v, of), jnp.asarray(p)) for v, p in zip(values, places, strict=True))
    x_MD, dy_MF, w_EDF = jnp.asarray(x, of), jnp.asarray(dys[0], of), jnp.asarray(weights[0], of)
    copied = ways.products(Rows(x_MD), [w_EDF], sizes_E)[0]
    np.testing.assert_array_equal(ways.products(x_rows, [w_EDF], sizes_E)[0], copied)
    copied = ways.input_gradient([Rows(dy_MF)], [w_EDF], sizes_E)
    np.testing.assert_array_equal(ways.input_gradient([dy_rows], [w_EDF], sizes_E), copied)
    half = jnp.minimum(sizes_E, 3)
    parts = [(x_rows, [Rows(dy_MF)], sizes_E), (Rows(x_MD), [dy_rows], half), (x_rows, [dy_rows], sizes_E)]
    expected = total.copy()
    for expert, rows in enumerate(groups(sizes)):
        expected[expert] += 2 * x[rows].T @ dys[0][rows]
    for expert, rows in enumerate(groups(tuple(np.asarray(half)))):
        expected[expert] += x[rows].T @ dys[0][rows]
    close(ways.weight_gradients(parts, [jnp.asarray(total, of)])[0], expected)


def test_bfloat16_is_summed_in_fp32() -> None:
    """2,048 equal products: a sum in bf16 would stay at 256."""
    x_MD, w_EDF = jnp.ones((20, 2048), jnp.bfloat16), jnp.ones((2, 2048, 32), jnp.bfloat16)
    (y_MF,) = grouped_kernels.products(Rows(x_MD), [w_EDF], jnp.asarray([15, 5]))
    assert y_MF.dtype == jnp.bfloat16
    assert bool(jnp.all(y_MF == 2048))
    rows = Rows(jnp.ones((1000, 16), jnp.bfloat16))
    (dw_EDF,) = grouped_kernels.weight_gradients([(rows, [Rows(jnp.ones((1000, 16)))], jnp.asarray([999]))])
    assert dw_EDF.dtype == jnp.float32
    assert bool(jnp.all(dw_EDF == 999))


def test_too_many_elements_are_refused() -> None:
    rows = jax.ShapeDtypeStruct((2**20, 4096), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((4, 4096, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"experts: an array of shape \(1048576, 4096\) .* set Layout.ep"):
        jax.eval_shape(lambda x, w: grouped_kernels.products(Rows(x), [w], jnp.zeros(4, jnp.int32)), rows, weights)


@pytest.mark.gpu
def test_products_on_a_gpu_are_those_of_each_group() -> None:
    x, weights, dys, sizes = drawn("several blocks of a group")
    arrays = [jnp.asarray(a, jnp.float32) for a in (x, *weights)]

    def loss(x_MD: jax.Array, *weights: jax.Array) -> jax.Array:
        results = grouped_products(x_MD, weights, jnp.asarray(sizes))
        return sum((jnp.sum(y * dy) for y, dy in zip(results, dys, strict=True)), start=jnp.zeros(()))

    with jax.default_matmul_precision("highest"):
        dx, *dw = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)
    for expert, rows in enumerate(groups(sizes)):
        close(dx[rows], np.sum([dys[n][rows] @ weights[n][expert].T for n in range(2)], axis=0))
        for place in range(2):
            close(dw[place][expert], x[rows].T @ dys[place][rows])
