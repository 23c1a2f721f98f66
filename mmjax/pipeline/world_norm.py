"""The one world op of a step: every stage's squared gradient norms summed over all ranks, result on every rank.

No value visits the host, so clipping and skipping a step stay on the devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.mesh.spmd import Program, Spmd
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.world import World


class WorldNorm:
    """Sums norm rows ``[ranks, modules]`` of stages on any rank sets."""

    def __init__(self, world: World, submeshes: Mapping[str, Submesh], modules: int):
        """Plans which stages' rows can be read as one array over the world.

        Args:
          world: the devices.
          submeshes: of the stages that have gradients, by stage name; rank sets may overlap.
          modules: columns of a row.
        """
        self.world, self.submeshes, self.modules = world, dict(submeshes), modules
        self._layers: list[dict[int, tuple[str, int]]] = []  # per layer: rank -> (stage, position in its submesh)
        for name, submesh in self.submeshes.items():
            layer = next((one for one in self._layers if not one.keys() & set(submesh.ranks)), None)
            if layer is None:
                self._layers.append(layer := {})
            layer.update({rank: (name, i) for i, rank in enumerate(submesh.ranks)})
        spec = PartitionSpec("world")
        self._sharding = NamedSharding(world.mesh, spec)
        aval = jax.ShapeDtypeStruct((world.size, modules), jnp.float32, sharding=self._sharding)
        count = len(self._layers)
        body = lambda *rows: lax.psum(sum(rows[1:], start=rows[0]), "world")  # noqa: E731
        spmd = Spmd(body, world.mesh, (spec,) * count, spec)
        self.program = Program.of("norm world", spmd, [aval] * count)
        self._zeros: dict[int, jax.Array] = {}

    def __call__(self, rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Totals as rows on every stage's submesh: each rank's row holds the sums over the world."""
        shards = {name: [shard.data for shard in array.addressable_shards] for name, array in rows.items()}
        stitched = []
        for layer in self._layers:
            pieces = [shards[layer[r][0]][layer[r][1]] if r in layer else self._zero(r) for r in range(self.world.size)]
            shape = (self.world.size, self.modules)
            stitched.append(jax.make_array_from_single_device_arrays(shape, self._sharding, pieces))
        totals = [shard.data for shard in self.program(*stitched).addressable_shards]
        return {name: self._on(submesh, totals) for name, submesh in self.submeshes.items()}

    def trace(self, rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The same inside ``jit``, where all stages share their devices."""
        result = traced_total(
            (self.submeshes[name].mesh, self.submeshes[name].axes.all, row) for name, row in rows.items()
        )
        totals = {}
        for name, submesh in self.submeshes.items():
            every = PartitionSpec(submesh.axes.all)
            spread = Spmd(lambda total: total[None], submesh.mesh, (PartitionSpec(),), every)
            totals[name] = spread(result)
        return totals

    def _on(self, submesh: Submesh, totals: list[jax.Array]) -> jax.Array:
        sharding = submesh.sharding(PartitionSpec(submesh.axes.all))
        shape = (len(submesh.ranks), self.modules)
        return jax.make_array_from_single_device_arrays(shape, sharding, [totals[rank] for rank in submesh.ranks])

    def _zero(self, rank: int) -> jax.Array:
        if rank not in self._zeros:
            self._zeros[rank] = jax.device_put(np.zeros((1, self.modules), np.float32), self.world.devices[rank])
        return self._zeros[rank]


def traced_total(rows: Iterable[tuple[Mesh, tuple[str, ...], jax.Array]]) -> jax.Array:
    """Sums ``[modules]`` over all, inside ``jit``; norm rows come with the mesh and axes they are stacked over."""
    total: Any = 0.0
    for mesh, axes, array in rows:
        one = lambda row, axes=axes: lax.psum(jnp.sum(row, 0), axes)  # noqa: E731
        total = total + Spmd(one, mesh, (PartitionSpec(axes),), PartitionSpec())(array)
    return total
