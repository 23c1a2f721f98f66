"""Lanes: the stage submeshes of a pipeline as one mesh with a ``pp`` axis, for a step that is one program.

Arrays of one SPMD program have one shape on all devices. A *block* is such a shape: the shape of a device's part of an
array, with the axes over which the part varies. Lanes with different arrays share blocks of equal kind. The global
array of a block stacks the parts of all devices along the first dimension, so that a stage's shards are converted to a
block, and back, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax import jax_compat
from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.world import World
from mmjax.pipeline.single.lane_layout import lane_layout, lane_of

PP = "pp"
"""The mesh axis that numbers lanes."""


@dataclass(frozen=True)
class LaneBlock:
    """A device's part of an array.

    Attributes:
      shape, dtype: shape and dtype of the part.
      axes: axes beside ``pp`` over which the part may vary, in mesh order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str, ...]

    @classmethod
    def of(cls, aval: Any) -> LaneBlock:
        """The block of an array, or of a ``ShapeDtypeStruct`` with sharding, on a stage submesh."""
        named = {name for part in aval.sharding.spec for name in ((part,) if isinstance(part, str) else part or ())}
        shape, order = aval.sharding.shard_shape(aval.shape), aval.sharding.mesh.axis_names
        return cls(tuple(shape), np.dtype(aval.dtype), tuple(axis for axis in order if axis in named))

    @property
    def bytes(self) -> int:
        """Bytes on one device."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def varying(self) -> tuple[str, ...]:
        """All axes over which the part may vary."""
        return (PP, *self.axes)

    @property
    def spec(self) -> PartitionSpec:
        """Spec of its global array."""
        return PartitionSpec(self.varying)


class Lanes:
    """The lanes of a world, as one mesh.

    Attributes:
      layout: degrees and ranks that all lanes share.
      mesh: mesh over all ranks: ``pp``, then the axes of a stage submesh.
      rows: spec of rows stacked over lanes.
      axes: all mesh axes; a spec over them stacks one block per rank, in rank order.
    """

    def __init__(self, layouts: Mapping[str, Layout], world: World):
        """Finds the lanes.

        Raises:
          ConfigError: see ``lane_layout``.
        """
        self.layout = lane_layout(layouts)
        first, devices = world.submesh(self.layout, 0), [world.devices[rank] for rank in self.layout.ranks]
        self.axes = (PP, *first.axes.all)
        self.mesh = Mesh(np.array(devices).reshape(self.layout.pp, *first.mesh.devices.shape), self.axes)
        self.rows = PartitionSpec((PP, *first.spread.rows))
        self._parts = math.prod(first.mesh.shape[axis] for axis in first.spread.positions)

    def __len__(self) -> int:
        return self.layout.pp

    def of(self, submesh: Submesh) -> int | None:
        """The lane of a stage submesh; ``None`` if the submesh spans all lanes with other degrees."""
        return lane_of(self.layout, submesh.layout, submesh.ranks)

    def parted(self, rows: np.ndarray) -> np.ndarray:
        """Rows of host inputs in the order of a block: the parts of rows for one rank of cp after those for another.

        Rows ``[B, T, ...]`` become ``[B · parts, T / parts, ...]``, with a part for each rank of cp.
        """
        if self._parts == 1:
            return rows
        count, width, *trailing = rows.shape
        dp, parts = self.layout.dp, self._parts
        split = rows.reshape(dp, count // dp, parts, width // parts, *trailing)
        return np.moveaxis(split, 2, 1).reshape(count * parts, width // parts, *trailing)

    def aval(self, block: LaneBlock) -> jax.ShapeDtypeStruct:
        """The aval of a block's global array."""
        first, *trailing = block.shape or (1,)
        copies = math.prod(self.mesh.shape[axis] for axis in block.varying)
        return jax.ShapeDtypeStruct((copies * first, *trailing), block.dtype, sharding=self.sharding(block.spec))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """The sharding of ``spec`` over all lanes."""
        return NamedSharding(self.mesh, spec)

    def join(self, block: LaneBlock, parts: Mapping[int, jax.Array]) -> jax.Array:
        """The global array of a block from arrays on stage submeshes, by lane; zeros for lanes without an array."""
        aval, shards = self.aval(block), []
        mine = {d for d in self._devices.flat if d.process_index == jax.process_index()}
        for lane, devices in enumerate(self._devices):
            by_device = {shard.device: shard.data for shard in parts[lane].addressable_shards} if lane in parts else {}
            for device in (d for d in devices if d in mine):
                shard = by_device[device] if by_device else self._zero(block, device)
                shards.append(shard if block.shape else shard.reshape(1))
        return jax.make_array_from_single_device_arrays(aval.shape, aval.sharding, shards, dtype=aval.dtype)

    def part(self, array: jax.Array, lane: int, aval: Any) -> jax.Array:
        """One lane's part of a block's global array, as an array of ``aval`` on its stage submesh."""
        devices = set(self._devices[lane])
        shards = [shard.data for shard in array.addressable_shards if shard.device in devices]
        shards = shards if aval.shape else [shard.reshape(()) for shard in shards]
        return jax.make_array_from_single_device_arrays(aval.shape, aval.sharding, shards, dtype=aval.dtype)

    @cached_property
    def _devices(self) -> np.ndarray:
        return self.mesh.devices.reshape(len(self), -1)

    def _zero(self, block: LaneBlock, device: Any) -> jax.Array:
        return jnp.zeros(block.shape, block.dtype, device=device)


def assign(kinds: Sequence[Sequence[LaneBlock]]) -> list[list[tuple[LaneBlock, int]]]:
    """Numbers each lane's equal blocks from 0, in their order, so that lanes share numbered blocks.

    ``kinds`` has the blocks of each lane: ``[[a, a, b], [a]]`` becomes ``[[(a, 0), (a, 1), (b, 0)], [(a, 0)]]``.
    """
    result = []
    for blocks in kinds:
        counts: dict[LaneBlock, int] = {}
        numbered = []
        for block in blocks:
            counts[block] = counts.get(block, -1) + 1
            numbered.append((block, counts[block]))
        result.append(numbered)
    return result


def typed(x: jax.Array, block: LaneBlock) -> jax.Array:
    """The local value ``x``, typed as varying over the axes of ``block``; inside ``shard_map``.

    All lanes' branches must return the same types. ``block`` is such as ``LaneBlock.of(aval)``.

    Raises:
      TypeError: for another shape or dtype, or a value that varies over more axes than the block.
    """
    x = jax_compat.to_varying(x, block.varying)
    if (x.shape, x.dtype, jax_compat.varying_axes(x)) != (block.shape, block.dtype, frozenset(block.varying)):
        raise TypeError(f"{jax.typeof(x)} for {block}")
    return x


def zeros(block: LaneBlock) -> jax.Array:
    """Zeros with the type of a block, inside ``shard_map``: the content of a block that a lane does not use.

    ``block`` is such as ``LaneBlock.of(aval)``; the result has its shape and dtype.
    """
    return typed(jnp.zeros(block.shape, block.dtype), block)
