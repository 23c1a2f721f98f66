"""What a program is estimated to need while it runs, beside its arguments and results."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.jax_compat import PlannedDevice
from mmjax.temporaries import WORKSPACE, temporary_bytes

SQUARE = jax.ShapeDtypeStruct((10, 10), jnp.float32)
SIZE = 400


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), ("x",))


def products(x: jax.Array) -> jax.Array:
    for _ in range(5):
        x = x @ x
    return x


def elementwise(x: jax.Array) -> jax.Array:
    for i in range(5):
        x = jnp.sin(x) * i
    return x


def kept(x: jax.Array) -> jax.Array:
    """Four products that are all read at the end, the first of them last."""
    every = [x @ (x * i) for i in range(4)]
    for y in every[::-1]:
        x = x @ y
    return x


def residual_stream(x: jax.Array) -> jax.Array:
    """Layers that normalise what they read and add to it."""
    for _ in range(5):
        x = x + (x / jnp.sqrt(jnp.sum(x * x))) @ x
    return x


CASES = [
    (products, SIZE, "one product is read while the next is written; every second lies in the result"),
    (elementwise, 0, "one kernel"),
    (lambda x: (x @ x).reshape(4, 25).T[None] * 2, 0, "views lie where the product does, and the result too"),
    (lambda x: jnp.sin(x.T) @ x, SIZE, "a product reads an array"),
    (lambda x: x.T @ x, 0, "it reads a transposed one as it is"),
    (lambda x: x + x @ x, 0, "a product is written to where it is added to"),
    (lambda x: jnp.sin(x + x @ x), SIZE, "but not what is not added alone"),
    (lambda x: jnp.sum(jnp.sin(x) ** 2), 0, "a reduction makes what it adds up"),
    (lambda x: jnp.sin(jnp.zeros((10, 10)).at[0].add(x[0])) @ x, SIZE, "zeros, added to and changed in place"),
    (lambda x: jax.jit(lambda y: (y @ y, y @ x))(x)[0], 0, "what no result needs is left out"),
]


@pytest.mark.parametrize(("program", "size", "why"), CASES, ids=[why for _, _, why in CASES])
def test_what_is_in_memory(program: Callable[[jax.Array], jax.Array], size: int, why: str) -> None:
    assert temporary_bytes(program, [SQUARE]) == size, why


def test_what_is_read_later_is_kept() -> None:
    assert 4 * SIZE <= temporary_bytes(kept, [SQUARE]) <= 6 * SIZE
    assert temporary_bytes(residual_stream, [SQUARE]) <= 3 * SIZE + 16


def test_an_update_needs_nothing() -> None:
    """All arithmetic on a weight, its moments and its gradient is one kernel, which writes over its arguments."""
    optimizer = optax.adamw(1e-3, weight_decay=0.1)
    weights = {"a": SQUARE, "b": SQUARE}
    state = jax.eval_shape(optimizer.init, weights)

    def update(weights: dict[str, jax.Array], state: optax.OptState, grads: dict[str, jax.Array]) -> object:
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
        updates, new = optimizer.update(jax.tree.map(lambda g: g / norm, grads), state, weights)
        applied = optax.apply_updates(weights, updates)
        return jax.tree.map(lambda x, y: jnp.where(jnp.isfinite(norm), x, y), (applied, new), (weights, state))

    assert temporary_bytes(update, [weights, state, weights]) < 100  # numbers


def test_a_loop_counts_once_and_copies_what_its_kernels_read() -> None:
    def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return carry @ x, None

    few, many = (
        temporary_bytes(lambda xs: lax.scan(step, xs[0], xs)[0], [jax.ShapeDtypeStruct((n, 10, 10), jnp.float32)])
        for n in (2, 50)
    )
    assert few == many and SIZE <= few <= 3 * SIZE


def test_local_shapes_count(mesh: Mesh) -> None:
    spec = PartitionSpec("x")
    local = jax.shard_map(lambda x: (x @ x.T) @ x, mesh=mesh, in_specs=spec, out_specs=spec)
    assert temporary_bytes(local, [jax.ShapeDtypeStruct((40, 10), jnp.float32)]) == SIZE
    # Of what one shard_map hands to another a device holds its part.
    assert temporary_bytes(lambda x: local(local(x)), [jax.ShapeDtypeStruct((40, 10), jnp.float32)]) == 2 * SIZE


def test_products_on_gpus_have_a_workspace() -> None:
    devices = np.array([PlannedDevice(0, "gpu", "NVIDIA H100 80GB HBM3")])
    sharding = NamedSharding(Mesh(devices, ("x",)), PartitionSpec())
    aval = jax.ShapeDtypeStruct((10, 10), jnp.float32, sharding=sharding)
    assert temporary_bytes(lambda x: x @ x, [aval]) == WORKSPACE
    assert temporary_bytes(jnp.sin, [aval]) == 0
