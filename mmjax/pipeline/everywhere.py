"""Brings one stage's results, losses or decoded tokens, to every process.

Where one process owns every device it reads them off the stage. With several processes, one world program per step or
token brings them to all, dispatched in its turn like any op; nothing waits for it before the numbers are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.mesh.spmd import Program, Spmd, Stitcher, by_device
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.world import World


class Everywhere:
    """Brings arrays that lie in rows on one submesh to every device of the world, whole."""

    def __init__(self, name: str, world: World, submesh: Submesh, aval: jax.ShapeDtypeStruct, count: int):
        """Plans the program.

        Args:
          name: name of the program.
          world: the devices.
          submesh: submesh that the arrays are on.
          aval: shape ``[rows, ...]`` and dtype of an array.
          count: number of arrays.
        """
        rows, *rest = aval.shape
        shard = (rows // submesh.layout.dp, *rest)
        self._shape = (world.size * shard[0], *rest)
        self._sharding = NamedSharding(world.mesh, PartitionSpec("world"))
        leaders = np.array([submesh.row_sharding.leader(interval) for interval in range(submesh.layout.dp)])

        def body(*shards: jax.Array) -> tuple[jax.Array, ...]:
            all_WN = lax.all_gather(jnp.stack(shards), "world")
            return tuple(all_WN[leaders, i].reshape(aval.shape) for i in range(count))

        avals = [jax.ShapeDtypeStruct(self._shape, aval.dtype, sharding=self._sharding)] * count
        # Copies alone: nothing is differentiated, and an all-gather's result is not typed as equal everywhere.
        spmd = Spmd(body, world.mesh, (PartitionSpec("world"),) * count, PartitionSpec(), check_vma=False)
        self.program, self._count = Program.of(f"{name} everywhere", spmd, avals), count
        self._stitcher = Stitcher(shard, aval.dtype)

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays as every process can read them; ``arrays`` is empty where this process has no part of them."""
        shards = [by_device(array) for array in arrays] or [{}] * self._count
        return list(self.program(*(self._stitcher(own, self._shape, self._sharding) for own in shards)))
