"""The one world op of a step: every stage's squared gradient norms summed over all ranks, result on every rank.

No value visits the host, so clipping and skipping a step stay on the devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.mesh.spmd import Program, Spmd, Stitcher, by_device
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.world import Device, World
from mmjax.schedule.graph import WORLD


class WorldNorm:
    """Sums norm rows ``[ranks, modules]`` of stages on any rank sets."""

    def __init__(self, world: World, submeshes: Mapping[str, Submesh], modules: int):
        """Plans which stages' rows can be read as one array over the world.

        Args:
          world: the devices.
          submeshes: submeshes of the stages that have gradients, by stage name; rank sets may overlap.
          modules: number of modules, the columns of a row.
        """
        self.world, self.submeshes, self.modules = world, dict(submeshes), modules
        self._own = {world.devices[rank] for rank in world.local_ranks}
        self._layers: list[dict[Device, str]] = []  # per layer: device -> stage
        for name, submesh in self.submeshes.items():
            devices = list(submesh.mesh.devices.flat)
            layer = next((one for one in self._layers if not one.keys() & set(devices)), None)
            if layer is None:
                self._layers.append(layer := {})
            layer.update(dict.fromkeys(devices, name))
        spec = PartitionSpec("world")
        self._sharding = NamedSharding(world.mesh, spec)
        aval = jax.ShapeDtypeStruct((world.size, modules), jnp.float32, sharding=self._sharding)
        count = len(self._layers)
        body = lambda *rows: lax.psum(sum(rows[1:], start=rows[0]), "world")  # noqa: E731
        spmd = Spmd(body, world.mesh, (spec,) * count, spec)
        self.program = Program.of("norm world", spmd, [aval] * count)
        self._stitcher = Stitcher((1, modules), jnp.float32)

    def __call__(self, rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Sums over the world, repeated as rows on the submesh of every stage here, and on the world's mesh."""
        shards = {name: by_device(array) for name, array in rows.items()}
        stitched = []
        for layer in self._layers:
            pieces = {d: shards[name][d] for d, name in layer.items() if d in self._own}
            stitched.append(self._stitcher(pieces, (self.world.size, self.modules), self._sharding))
        totals = self.program(*stitched)
        by_rank = by_device(totals)
        here = {name: self._on(submesh, by_rank) for name, submesh in self.submeshes.items() if submesh.local}
        return here | {WORLD: totals}

    def trace(self, rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The sums inside ``jit``, where all stages share their devices."""
        result = traced_total(
            (self.submeshes[name].mesh, self.submeshes[name].axes.all, row) for name, row in rows.items()
        )
        totals = {}
        for name, submesh in self.submeshes.items():
            own = submesh.spread
            spread = Spmd(lambda total: total[None], submesh.mesh, (own.whole,), own.each)
            totals[name] = spread(result)
        return totals

    def _on(self, submesh: Submesh, totals: Mapping[Device, jax.Array]) -> jax.Array:
        sharding = submesh.sharding(submesh.spread.each)
        shape, own = (len(submesh.ranks), self.modules), [d for d in submesh.mesh.devices.flat if d in totals]
        return jax.make_array_from_single_device_arrays(shape, sharding, [totals[device] for device in own])


def traced_total(rows: Iterable[tuple[Mesh, tuple[str, ...], jax.Array]]) -> jax.Array:
    """Sums ``[modules]`` of all norm rows, inside ``jit``; each comes with the mesh and axes it is stacked over."""
    total: Any = 0.0
    for mesh, axes, array in rows:
        one = lambda row, axes=axes: lax.psum(row.squeeze(0), axes)  # noqa: E731
        total = total + Spmd(one, mesh, (PartitionSpec(axes),), PartitionSpec())(array)
    return total
