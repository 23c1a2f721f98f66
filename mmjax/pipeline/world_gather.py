"""Copies one stage's results, losses or decoded tokens, to every process.

A run of one process reads them from the stage. With several processes, one world program per step or token copies them
to all, dispatched in its turn like any op; the host waits only when it reads the numbers.
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


class WorldGather:
    """Gathers arrays, with rows sharded over dp on one submesh, to every device of the world."""

    def __init__(self, name: str, world: World, submesh: Submesh, aval: jax.ShapeDtypeStruct, count: int):
        """Plans the program.

        Args:
          name: name of the program.
          world: the devices.
          submesh: submesh of the arrays.
          aval: shape ``[rows, ...]`` and dtype of an array.
          count: number of arrays.
        """
        rows, *trailing = aval.shape
        shard = (rows // submesh.layout.dp, *trailing)
        self._shape = (world.size * shard[0], *trailing)
        self._sharding = NamedSharding(world.mesh, PartitionSpec("world"))
        leaders = np.array([submesh.row_sharding.leader(interval) for interval in range(submesh.layout.dp)])

        def body(*shards: jax.Array) -> tuple[jax.Array, ...]:
            all_WN = lax.all_gather(jnp.stack(shards), "world")
            return tuple(all_WN[leaders, i].reshape(aval.shape) for i in range(count))

        avals = [jax.ShapeDtypeStruct(self._shape, aval.dtype, sharding=self._sharding)] * count
        # Only copies, not differentiated; the type of an all-gather's result is not that of equal values on all ranks.
        spmd = Spmd(body, world.mesh, (PartitionSpec("world"),) * count, PartitionSpec(), check_vma=False)
        self.program, self._count = Program.of(f"{name} everywhere", spmd, avals), count
        self._stitcher = Stitcher(shard, aval.dtype)

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The gathered arrays ``[rows, ...]``, in their order, whole on every device of the world.

        ``arrays`` are the ``count`` arrays, or empty in a process without shards of them. Every process has to call it.
        """
        shards = [by_device(array) for array in arrays] or [{}] * self._count
        return list(
            self.program(*(self._stitcher(shard_by_device, self._shape, self._sharding) for shard_by_device in shards))
        )
