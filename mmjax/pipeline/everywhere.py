"""What every process has to know of one stage's results: losses, and decoded tokens.

Where one process owns every device it reads them off the stage. Where several do, one world program a step or token
brings them to all, dispatched in its turn like any op; nobody waits for it before the numbers are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.mesh.spmd import Program, Spmd, by_device
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.world import Device, World


class Everywhere:
    """Brings arrays that lie in rows on one submesh to every device of the world, whole."""

    def __init__(self, name: str, world: World, submesh: Submesh, aval: jax.ShapeDtypeStruct, count: int):
        """Plans the program.

        Args:
          name: of the program.
          world: the devices.
          submesh: where the arrays are.
          aval: shape ``[rows, ...]`` and dtype of an array.
          count: how many there are.
        """
        rows, *rest = aval.shape
        self._shard, self._dtype = (rows // submesh.layout.dp, *rest), aval.dtype
        self._own = [world.devices[rank] for rank in sorted(world.local_ranks)]
        self._shape = (world.size * self._shard[0], *rest)
        self._sharding = NamedSharding(world.mesh, PartitionSpec("world"))
        leaders = np.array([submesh.placement.leader(interval) for interval in range(submesh.layout.dp)])

        def body(*shards: jax.Array) -> tuple[jax.Array, ...]:
            all_WN = lax.all_gather(jnp.stack(shards), "world")
            return tuple(all_WN[leaders, i].reshape(aval.shape) for i in range(count))

        avals = [jax.ShapeDtypeStruct(self._shape, aval.dtype, sharding=self._sharding)] * count
        # Copies alone: nothing is differentiated, and an all-gather's result is not typed as equal everywhere.
        spmd = Spmd(body, world.mesh, (PartitionSpec("world"),) * count, PartitionSpec(), check_vma=False)
        self.program, self._count = Program.of(f"{name} everywhere", spmd, avals), count
        self._zeros: dict[Device, jax.Array] = {}

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays as every process can read them; none are given where this process has no part of them."""
        shards = [by_device(array) for array in arrays] or [{}] * self._count
        return list(self.program(*map(self._over_world, shards)))

    def _over_world(self, shards: dict[Device, jax.Array]) -> jax.Array:
        pieces = [shards[device] if device in shards else self._zero(device) for device in self._own]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, pieces)

    def _zero(self, device: Device) -> jax.Array:
        if device not in self._zeros:
            self._zeros[device] = jax.device_put(np.zeros(self._shard, self._dtype), device)
        return self._zeros[device]
