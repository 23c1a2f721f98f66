"""Norms inside ``shard_map``: gradients of arguments that are equal on ranks, beside others that differ."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from mmjax import jax_compat
from mmjax.models.norms import rms_norm


def test_ranks_that_normalise_the_same_features_sum_their_gradients() -> None:
    """Such as a projector's norm on ranks of cp, which have whole rows and use different tokens of them."""
    rng = np.random.default_rng(0)
    x_ND, scale_D, factors_RND = (jnp.asarray(rng.normal(size=size)) for size in ((6, 4), (4,), (2, 6, 4)))

    def loss(x_ND: jax.Array, scale_D: jax.Array, factors_RND: jax.Array) -> jax.Array:
        return jnp.sum(rms_norm(x_ND, scale_D, 1e-6) * factors_RND)

    def on_ranks(x_ND: jax.Array, scale_D: jax.Array, factors_RND: jax.Array) -> jax.Array:
        scale_D = jax_compat.to_varying(scale_D, ("cp",))
        return jax.lax.psum(loss(x_ND, scale_D, factors_RND), "cp")

    mesh = Mesh(np.array(jax.devices()[:2]), ("cp",))
    specs = PartitionSpec(), PartitionSpec(), PartitionSpec("cp")
    sharded = jax.shard_map(on_ranks, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    arguments = x_ND, scale_D, factors_RND
    expected = jax.grad(loss, (0, 1))(*arguments)
    actual = jax.jit(jax.grad(sharded, (0, 1)))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)
