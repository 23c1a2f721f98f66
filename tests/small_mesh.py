"""A mesh of four devices, and functions of its shards, for tests of JAX's behaviour."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

ROWS, WHOLE = PartitionSpec("dp"), PartitionSpec()


def small_mesh() -> Mesh:
    """A mesh with dp 2 and tp 2."""
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))


def spmd(mesh, in_specs, out_specs):
    """A decorator that maps a function of shards over the mesh."""
    return lambda body: jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
