"""The GPU kernels of grouped products, interpreted on a CPU, against products of each group in fp64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.models.experts import grouped_kernels
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
    close(jnp.stack(grouped_kernels.products(x_MD, weights_EDF, sizes_E)), y)
    close(grouped_kernels.input_gradient(dys_MF, weights_EDF, sizes_E), dx)
    close(jnp.stack(grouped_kernels.weight_gradients(x_MD, dys_MF, sizes_E)), dw)


def test_bfloat16_is_summed_in_fp32() -> None:
    """2,048 equal products: a sum in bf16 would stay at 256."""
    x_MD, w_EDF = jnp.ones((20, 2048), jnp.bfloat16), jnp.ones((2, 2048, 32), jnp.bfloat16)
    (y_MF,) = grouped_kernels.products(x_MD, [w_EDF], jnp.asarray([15, 5]))
    assert y_MF.dtype == jnp.bfloat16
    assert bool(jnp.all(y_MF == 2048))
    (dw_EDF,) = grouped_kernels.weight_gradients(
        jnp.ones((1000, 16), jnp.bfloat16), [jnp.ones((1000, 16))], jnp.asarray([999])
    )
    assert dw_EDF.dtype == jnp.float32
    assert bool(jnp.all(dw_EDF == 999))


def test_too_many_elements_are_refused() -> None:
    rows = jax.ShapeDtypeStruct((2**20, 4096), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((4, 4096, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"experts: an array of shape \(1048576, 4096\) .* set Layout.ep"):
        jax.eval_shape(lambda x, w: grouped_kernels.products(x, [w], jnp.zeros(4, jnp.int32)), rows, weights)


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
