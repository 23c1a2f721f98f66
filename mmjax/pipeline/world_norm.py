"""The world op of a step: sums every stage's squared gradient norms over all ranks, with the result on every rank.

No value is fetched to the host: clipping and skipping a step happen on the devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
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
        """Groups stages on disjoint ranks into layers: the rows of a layer form one array over the world.

        Args:
          world: the devices.
          submeshes: submeshes of the stages that have gradients, by stage name; rank sets may overlap.
          modules: number of modules, the columns of a row.
        """
        self.world, self.submeshes, self.modules = world, dict(submeshes), modules
        self._local_devices = {world.devices[rank] for rank in world.local_ranks}
        self._layers: list[dict[Device, str]] = []  # per layer: device -> stage
        for name, submesh in self.submeshes.items():
            devices = list(submesh.mesh.devices.flat)
            layer = next(
                (devices_of_layer for devices_of_layer in self._layers if not devices_of_layer.keys() & set(devices)),
                None,
            )
            if layer is None:
                self._layers.append(layer := {})
            layer.update(dict.fromkeys(devices, name))
        spec = PartitionSpec("world")
        self._sharding = NamedSharding(world.mesh, spec)
        aval = jax.ShapeDtypeStruct((world.size, modules), jnp.float32, sharding=self._sharding)
        count = len(self._layers)

        def body(*rows: jax.Array) -> jax.Array:
            return lax.psum(sum(rows[1:], start=rows[0]), "world")

        spmd = Spmd(body, world.mesh, (spec,) * count, spec)
        self.program = Program.of("norm world", spmd, [aval] * count)
        self._stitcher = Stitcher((1, modules), jnp.float32)

    def __call__(self, rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Sums over the world, by the name of every local stage and under "world".

        Each is ``[ranks of the stage, modules]`` with equal rows, on the stage's submesh or the world's mesh.

        Args:
          rows: by stage, its norm rows ``[ranks of the stage, modules]``; of every local stage.
        """
        shards = {name: by_device(array) for name, array in rows.items()}
        stitched = []
        for layer in self._layers:
            pieces = {d: shards[name][d] for d, name in layer.items() if d in self._local_devices}
            stitched.append(self._stitcher(pieces, (self.world.size, self.modules), self._sharding))
        totals = self.program(*stitched)
        by_rank = by_device(totals)
        local_sums = {name: self._on(submesh, by_rank) for name, submesh in self.submeshes.items() if submesh.local}
        return local_sums | {WORLD: totals}

    def trace(self, rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The same sums by stage, inside ``jit``, without "world"; all stages have to share their devices."""
        result = traced_total(
            (self.submeshes[name].mesh, self.submeshes[name].axes.all, row) for name, row in rows.items()
        )
        totals = {}
        for name, submesh in self.submeshes.items():
            stage_spread = submesh.spread
            spread = Spmd(lambda total: total[None], submesh.mesh, (stage_spread.replicated,), stage_spread.per_rank)
            totals[name] = spread(result)
        return totals

    def _on(self, submesh: Submesh, totals: Mapping[Device, jax.Array]) -> jax.Array:
        sharding = submesh.sharding(submesh.spread.per_rank)
        shape, devices = (len(submesh.ranks), self.modules), [d for d in submesh.mesh.devices.flat if d in totals]
        return jax.make_array_from_single_device_arrays(shape, sharding, [totals[device] for device in devices])


def traced_total(rows: Iterable[tuple[Mesh, tuple[str, ...], jax.Array]]) -> jax.Array:
    """Sums ``[modules]`` of all norm rows, squared norms by module, replicated, inside ``jit``.

    Args:
      rows: (mesh, its axes over which the rows are stacked, rows ``[ranks, modules]``) of each stage, one or more.
    """
    total: Any = 0.0
    for mesh, axes, array in rows:
        total = total + Spmd(partial(_sum_rows, axes), mesh, (PartitionSpec(axes),), PartitionSpec())(array)
    return total


def _sum_rows(axes: tuple[str, ...], row: jax.Array) -> jax.Array:
    return lax.psum(row.squeeze(0), axes)
