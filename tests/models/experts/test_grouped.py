"""Grouped products against a product of each row with its expert's weight, with their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from mmjax.models.experts.grouped import grouped_products
from mmjax.models.experts.grouped_blocks import LARGEST, SMALLEST
from mmjax.models.handles import Adapted, Handle

INPUTS, OUTPUTS, BEHIND = 5, 7, 4
SIZES = {
    "uneven": (3, 40, 1),
    "an empty group between": (6, 0, 9),
    "all in the first": (20, 0, 0),
    "all in the last": (0, 0, 33),
    "none at all": (0, 0, 0),
    "more than a block": (LARGEST + 3, 0, 2 * LARGEST + SMALLEST),
    "blocks exactly": (SMALLEST, LARGEST, SMALLEST),
    "nearly a block": (LARGEST - SMALLEST, 1, LARGEST + 1),
}


def drawn(sizes: tuple[int, ...]) -> dict[str, jax.Array]:
    rng, experts = np.random.default_rng(sum(sizes)), len(sizes)
    shapes = {"x": (sum(sizes) + BEHIND, INPUTS), "w": (experts, INPUTS, OUTPUTS), "v": (experts, INPUTS, OUTPUTS)}
    shapes |= {"a": (experts, INPUTS, 2), "b": (experts, 2, OUTPUTS)}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def row_by_row(x_MD: jax.Array, w_EDF: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    expert_M = np.repeat(np.arange(len(sizes)), sizes)
    y_MF = jnp.einsum("md,mdf->mf", x_MD[: len(expert_M)], w_EDF[expert_M])
    return jnp.pad(y_MF, ((0, BEHIND), (0, 0)))


def on_a_device(fn: Any, arrays: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:1]), ("rows",))
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()))(arrays)


def compare(sizes: tuple[int, ...], weights: Any, merged: Any) -> None:
    """Values, and gradients of a loss with a factor for each element, of grouped products and of ``row_by_row``."""
    arrays = drawn(sizes)
    factors = jnp.cos(jnp.arange((sum(sizes) + BEHIND) * OUTPUTS, dtype=jnp.float32)).reshape(-1, OUTPUTS)

    def ours(p: dict[str, jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        results = grouped_products(p["x"], weights(p), jnp.asarray(sizes))
        return jnp.sum(factors * sum(map(jnp.tanh, results), start=jnp.zeros(()))), results

    def theirs(p: dict[str, jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        results = [row_by_row(p["x"], w, sizes) for w in merged(p)]
        return jnp.sum(factors * sum(map(jnp.tanh, results), start=jnp.zeros(()))), results

    got_grads, got = on_a_device(jax.grad(ours, has_aux=True), arrays)
    want_grads, want = jax.grad(theirs, has_aux=True)(arrays)
    for y, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    for name, gradient in want_grads.items():
        np.testing.assert_allclose(got_grads[name], gradient, rtol=1e-4, atol=1e-4, err_msg=name)


BLOCKS = ("more than a block", "blocks exactly", "nearly a block")


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(sizes, id=name, marks=[pytest.mark.long] if name in BLOCKS else []) for name, sizes in SIZES.items()],
)
def test_products_and_gradients_are_those_of_each_row(sizes: tuple[int, ...]) -> None:
    compare(sizes, lambda p: [p["w"], p["v"]], lambda p: [p["w"], p["v"]])


def test_a_handle_is_opened() -> None:
    def doubled(w: jax.Array) -> Any:
        return Handle(stored=w, open=lambda stored: 2 * stored)

    compare(SIZES["uneven"], lambda p: [doubled(p["w"])], lambda p: [2 * p["w"]])


def test_adapters_add_low_rank_products_of_each_expert() -> None:
    def adapted(p: dict[str, jax.Array]) -> list[Any]:
        return [Adapted(weight=p["w"], a=p["a"], b=p["b"], scale=0.5), p["v"]]

    compare(SIZES["an empty group between"], adapted, lambda p: [p["w"] + 0.5 * p["a"] @ p["b"], p["v"]])


def test_rows_behind_the_groups_are_neither_computed_nor_differentiated() -> None:
    arrays = drawn((3, 2))
    spoilt = arrays | {"x": arrays["x"].at[5:].set(jnp.nan)}

    def results(p: dict[str, jax.Array]) -> Any:
        def loss(p: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            (y_MF,) = grouped_products(p["x"], [p["w"]], jnp.array([3, 2]))
            return jnp.sum(y_MF**2), y_MF

        return jax.grad(loss, has_aux=True)(p)

    (got_grads, got), (grads, want) = on_a_device(results, spoilt), on_a_device(results, arrays)
    assert not np.asarray(want)[5:].any()
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got_grads["w"], grads["w"])
    assert not np.asarray(got_grads["x"])[5:].any()
