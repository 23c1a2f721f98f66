"""Tapped products: their gradients are the plain ones, whatever the input and the weight vary over."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from mmjax.jax_compat import to_varying, varying_axes
from mmjax.models.taps import PRODUCT, Summed, Tapped, Use, Value, products
from mmjax.models.weight_gradients import weight_gradient

ROWS, WHOLE, COLUMNS = PartitionSpec("dp"), PartitionSpec(), PartitionSpec(None, "tp")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))


def test_gradients_are_summed_over_what_only_the_other_factor_varies_over(mesh: Mesh) -> None:
    """An input that all of tp has, a weight that all of dp has: neither was made varying beforehand."""
    rng = np.random.default_rng(0)
    x_ND, w_DF, v_DF, dy_NF = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 3), (3, 4), (3, 4), (4, 4)))

    def body(x: jax.Array, w: jax.Array, v: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        def run(x: jax.Array, x_tap: jax.Array, taps: list[jax.Array]) -> list[jax.Array]:
            first, second = Tapped(weight=w, x=x_tap, dy=taps[0]), Tapped(weight=v, dy=taps[1])
            return products(x, [first, second])

        like = [Value.of(x @ w).zeros() for _ in range(2)]
        assert [varying_axes(tap) for tap in like] == [{"dp", "tp"}] * 2
        ys, back = jax.vjp(run, x, Value.of(x).zeros(), like)
        dx, kept_x, kept_dy = back([dy, 2 * dy])
        assert varying_axes(dx) == varying_axes(x) == {"dp"}
        dw, dv = (weight_gradient(kept_x, one, w, stacked=False, transposed=False) for one in kept_dy)
        turned = weight_gradient(kept_x, kept_dy[0], w.T, stacked=False, transposed=True)
        stacked = weight_gradient(kept_x[None], kept_dy[0][None], w[None], stacked=True, transposed=False)
        return dx, dw, dv, turned.T, stacked[0], ys[1]

    split = PartitionSpec("dp", "tp")
    run = jax.shard_map(
        body, mesh=mesh, in_specs=(ROWS, COLUMNS, COLUMNS, split), out_specs=(ROWS, *[COLUMNS] * 4, split)
    )
    dx, dw, dv, turned, stacked, y = jax.jit(run)(x_ND, w_DF, v_DF, dy_NF)
    near = lambda one, other: np.testing.assert_allclose(np.asarray(one), other, rtol=1e-5, atol=1e-5)  # noqa: E731
    near(dx, dy_NF @ w_DF.T + 2 * dy_NF @ v_DF.T)
    near(dw, x_ND.T @ dy_NF)
    near(dv, 2 * x_ND.T @ dy_NF)
    near(turned, x_ND.T @ dy_NF)
    near(stacked, x_ND.T @ dy_NF)
    near(y, x_ND @ v_DF)


def test_factors_that_vary_over_different_axes_are_multiplied(mesh: Mesh) -> None:
    """``weight_gradient`` of x over dp and dy over tp alone."""

    def body(x: jax.Array, dy: jax.Array) -> jax.Array:
        assert (varying_axes(x), varying_axes(dy)) == ({"dp"}, {"tp"})
        return weight_gradient(x, dy, to_varying(dy, ("tp",)), stacked=False, transposed=False)

    x, dy = np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(8, dtype=np.float32).reshape(2, 4)
    run = jax.shard_map(body, mesh=mesh, in_specs=(ROWS, COLUMNS), out_specs=COLUMNS)
    want = (x[:2] + x[2:]).T @ dy
    np.testing.assert_array_equal(np.asarray(jax.jit(run)(x, dy)), want)


def test_a_tap_is_of_the_dtype_of_its_weight() -> None:
    tapped = Tapped(weight=jnp.ones((2, 3), jnp.bfloat16), name="w")
    assert (tapped.dtype, tapped.shape, tapped.T.shape) == (jnp.bfloat16, (2, 3), (3, 2))
    assert tapped.T.transposed and not tapped.T.T.transposed
    with pytest.raises(dataclasses.FrozenInstanceError):
        tapped.name = "v"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="positional"):
        Tapped(jnp.ones(1))  # pyright: ignore[reportCallIssue]
    value = Value((2,), jnp.float32, frozenset())
    use = Use(x=value, dy=value, group=("w",), transposed=False)
    for one, name in ((use, "group"), (value, "dtype")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, name, None)
    with pytest.raises(TypeError, match="positional"):
        Use(value, value, (), False)  # pyright: ignore[reportCallIssue]
    assert PRODUCT and Tapped(weight=jnp.ones(1)).name == ""
    np.testing.assert_array_equal(Value((2,), jnp.float32, frozenset()).zeros(), [0.0, 0.0])


# ---- sums of gradients -----------------------------------------------------------------------------------------------


def test_products_add_their_gradients_to_sums_without_rounding_them() -> None:
    """bf16 inputs, three rounds: the sums are those of fp64 to fp32's precision, a thousand times finer than bf16's."""
    rng = np.random.default_rng(1)
    w_DF, v_DF = (jnp.asarray(rng.normal(size=(16, 8)), jnp.bfloat16) for _ in range(2))
    sums = start = (jnp.asarray(rng.normal(size=(16, 8)), jnp.float32), jnp.zeros((8, 16), jnp.float32))
    want = [np.asarray(total, np.float64) for total in start]

    def run(x: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The second weight is the transpose of an array among the parameters; the third has no sum."""
        weights = [Summed(weight=w_DF, total=sums[0]), Summed(weight=v_DF.T, total=sums[1]).T, v_DF]
        return tuple(products(x, weights))

    for _ in range(3):
        x_ND, dy_NF, dv_NF = (jnp.asarray(rng.normal(size=(32, n)), jnp.bfloat16) for n in (16, 8, 8))
        ys, back = jax.vjp(run, x_ND, sums)
        np.testing.assert_array_equal(ys[1], ys[2])
        dx, sums = back((dy_NF, dv_NF, jnp.zeros_like(dv_NF)))
        x, dy, dv, w, v = (np.asarray(a, np.float64) for a in (x_ND, dy_NF, dv_NF, w_DF, v_DF))
        want[0] += x.T @ dy
        want[1] += dv.T @ x
        np.testing.assert_allclose(np.asarray(dx, np.float64), dy @ w.T + dv @ v.T, rtol=0.05, atol=0.1)
        assert dx.dtype == jnp.bfloat16
    for total, wanted in zip(sums, want, strict=True):
        assert total.dtype == jnp.float32
        np.testing.assert_allclose(total, wanted, rtol=1e-5, atol=1e-5)


def test_sums_are_of_what_the_weight_varies_over(mesh: Mesh) -> None:
    """An input that differs over dp and a weight that differs over tp: the sum is of both ranks of dp."""
    rng = np.random.default_rng(2)
    x_ND, w_DF, dy_NF = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 3), (3, 4), (4, 4)))

    def body(x: jax.Array, w: jax.Array, total: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, back = jax.vjp(lambda x, total: products(x, [Summed(weight=w, total=total)])[0], x, total)
        dx, new = back(dy)
        assert (varying_axes(dx), varying_axes(new)) == ({"dp"}, {"tp"})
        return dx, new

    specs = (ROWS, COLUMNS, COLUMNS, PartitionSpec("dp", "tp"))
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(ROWS, COLUMNS))
    dx, total = jax.jit(run)(x_ND, w_DF, 2 * w_DF, dy_NF)
    np.testing.assert_allclose(dx, dy_NF @ w_DF.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(total, 2 * w_DF + x_ND.T @ dy_NF, rtol=1e-5, atol=1e-5)
