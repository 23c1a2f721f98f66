"""The world op of a step: sums every stage's squared gradient norms over all ranks, with the result on every rank.

No value is fetched to the host: clipping and skipping a step happen on the devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax import jax_compat
from mmjax.mesh.spmd import Program, Spmd
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.world import Device, World
from mmjax.schedule.graph import WORLD

_NO_STAGE = ""
"""In place of a stage, on devices that no stage of a layer is on: their rows are zeros."""


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
        sharding = NamedSharding(world.mesh, spec)
        aval = jax.ShapeDtypeStruct((world.size, modules), jnp.float32, sharding=sharding)
        count = len(self._layers)

        def body(*rows: jax.Array) -> jax.Array:
            return lax.psum(sum(rows[1:], start=rows[0]), "world")

        spmd = Spmd(body, world.mesh, (spec,) * count, spec)
        self.program = Program.of("norm world", spmd, [aval] * count)
        self._local_devices = [world.devices[rank] for rank in sorted(world.local_ranks)]
        self._rows, self._totals = self._places()

    def _places(self) -> tuple[list[list[tuple[str, int]]], dict[str, tuple[jax.ShapeDtypeStruct, list[int]]]]:
        """Finds the places of the shards of rows and totals, so that no step has to look them up.

        Returns:
          For each layer and local device the stage that its row is of, and the place of the row among this process's
          shards of the stage; and for each local stage its totals, and the places of their shards among the world's.
        """
        places = {_NO_STAGE: {device: place for place, device in enumerate(self._local_devices)}}
        for name, submesh in self.submeshes.items():
            local = (device for device in submesh.mesh.devices.flat if device in places[_NO_STAGE])
            places[name] = {device: place for place, device in enumerate(local)}
        stages = [[(device, layer.get(device, _NO_STAGE)) for device in self._local_devices] for layer in self._layers]
        rows = [[(name, places[name][device]) for device, name in layer] for layer in stages]
        local_stages = {name: submesh for name, submesh in self.submeshes.items() if submesh.local}
        totals = {
            name: (self._totals_aval(submesh), [places[_NO_STAGE][device] for device in places[name]])
            for name, submesh in local_stages.items()
        }
        return rows, totals

    def _totals_aval(self, submesh: Submesh) -> jax.ShapeDtypeStruct:
        sharding = submesh.sharding(submesh.spread.per_rank)
        return jax.ShapeDtypeStruct((len(submesh.ranks), self.modules), jnp.float32, sharding=sharding)

    @cached_property
    def _zeros(self) -> list[jax.Array]:
        row = np.zeros((1, self.modules), np.float32)
        return [jax.device_put(row, device) for device in self._local_devices]

    def __call__(self, rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Sums over the world, by the name of every local stage and under "world".

        Each is ``[ranks of the stage, modules]`` with equal rows, on the stage's submesh or the world's mesh.

        Args:
          rows: by stage, its norm rows ``[ranks of the stage, modules]``; of every local stage.
        """
        shards = {name: jax_compat.shards(array) for name, array in rows.items()} | {_NO_STAGE: self._zeros}
        world_rows = [
            _joined(aval, [shards[name][place] for name, place in layer])
            for aval, layer in zip(self.program.avals, self._rows, strict=True)
        ]
        totals = self.program(*world_rows)
        parts = jax_compat.shards(totals)
        by_stage = {name: _joined(aval, [parts[n] for n in places]) for name, (aval, places) in self._totals.items()}
        return by_stage | {WORLD: totals}

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


def _joined(aval: jax.ShapeDtypeStruct, shards: Sequence[jax.Array]) -> jax.Array:
    return jax_compat.array_of_shards(aval.shape, aval.dtype, aval.sharding, shards)


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
