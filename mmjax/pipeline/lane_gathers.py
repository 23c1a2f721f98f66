"""Whole parameters of a lane, from shards that lie on all lanes of its stage.

Once a step, every device *publishes* its shards, in the dtype of the computation: one flat array for the parameters of
a dtype. A lane *pulls* them: it copies the flat arrays that it lacks straight onto its own devices, and cuts and joins
them there. The lanes that own them run nothing for it. Between processes the owners' hosts offer them
(``mmjax.mesh.pulls``). Where that does not work all lanes gather together, by one program (*collective*).

Zhang et al., "BigMac", §3.3, which copies by NVSHMEM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec, SingleDeviceSharding

from mmjax import jax_compat
from mmjax.mesh.pulls import ProcessCopies, process_pulls
from mmjax.mesh.spmd import Program, Spmd, by_device, with_sharding
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.world import Device
from mmjax.pipeline.lane_views import array_of, on_lane
from mmjax.pipeline.stage_state import StageState
from mmjax.pipeline.trees import Tree, by_name, nested
from mmjax.pipeline.zero import ZeroLeaf, shard_axes


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy of one flat array to one device of a lane.

    Attributes:
      bucket: number of the flat array's bucket.
      shard: number of the shard, in the order of the sharding axes.
      owner: the device that has it, in the same optimizer instance.
      target: the device that it goes to, which may be the owner.
    """

    bucket: int
    shard: int
    owner: Device
    target: Device


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Parameters of one dtype whose shards lie over the same mesh axes: a device has one flat array of them.

    Attributes:
      axes: these mesh axes, such as ("dp", "cp").
      dtype: of the compute parameters.
      shapes: shapes of the shards on a device, by parameter, such as {"vision/embed": (12, 16)}.
    """

    axes: tuple[str, ...]
    dtype: Any
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def size(self) -> int:
        """Elements of a flat array."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def bytes(self) -> int:
        """Bytes of a flat array."""
        return self.bytes_of(self.shapes)

    def bytes_of(self, names: Iterable[str]) -> int:
        """Bytes of some parameters in a flat array."""
        return sum(math.prod(self.shapes[name]) for name in names) * jnp.dtype(self.dtype).itemsize

    def flat(self, shards: Mapping[str, jax.Array]) -> jax.Array:
        """The flat array ``[1, size]`` of a device's shards. Inside ``shard_map``."""
        return jnp.concatenate([shards[name].reshape(-1) for name in self.shapes])[None]

    def cut(self, flat: jax.Array) -> Iterator[tuple[str, jax.Array]]:
        """Names and shards of a flat array ``[1, size]``. Inside ``shard_map``."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        for (name, shape), end, size in zip(self.shapes.items(), accumulate(sizes), sizes, strict=True):
            yield name, lax.slice_in_dim(flat[0], end - size, end).reshape(shape)


@dataclass(frozen=True)
class Published:
    """The parameters of a stage as its devices publish them.

    Attributes:
      flats: an array ``[devices, size]`` for each bucket, a row on each device.
      repeated: the parameters that every device has whole, by name.
    """

    flats: tuple[jax.Array, ...]
    repeated: Mapping[str, jax.Array]


@dataclass(frozen=True)
class Pulled:
    """Parameters of a lane that are on their way.

    Attributes:
      flats: by bucket, the flat array of every shard, on the lane's devices.
      repeated: as of ``Published``.
    """

    flats: tuple[tuple[jax.Array, ...], ...]
    repeated: Mapping[str, jax.Array]


class LaneGather:
    """Gathers the parameters of one stage's lanes."""

    def __init__(self, name: str, state: StageState, lanes: Mapping[str, StageState]):
        """Plans the gathers; nothing is traced.

        Args:
          name: the stage's, such as "vision.0".
          state: its state, whose parameters are shards over all lanes.
          lanes: the states of all lanes, by place, such as {"vision.0": ..., "vision.0/1": ...}; their parameters are
            whole.
        """
        self.name, self._state, self._lanes = name, state, lanes
        self._zeros = {name: zero for name, zero in by_name(state.zero).items() if zero.dimension is not None}
        self.buckets = _buckets(self._zeros, state)

    def open_pulls(self) -> None:
        """Opens this process's socket if its pulls reach over processes, before another process waits for it."""
        if len(self._state.submesh.processes) > 1 and self._state.submesh.local:
            process_pulls()

    # ---- pulls -------------------------------------------------------------------------------------------------------

    def publish(self, shards: Tree) -> Published:
        """The parameters for pulls, from the stage's shards by module, such as {"vision": {"embed": x}}.

        They are copies: an owner's update writes over its masters, whoever still reads what it has published.
        """
        named = by_name(shards)
        flats = self._publish({name: named[name] for name in self._zeros})
        return Published(tuple(flats), {name: x for name, x in named.items() if name not in self._zeros})

    def pull(self, place: str, published: Published) -> Pulled | None:
        """Starts this process's copies for the lane ``place``, such as "vision.0/1".

        It also offers what other processes pull for that lane.

        Returns:
          The parameters for ``join``, which are not there yet; ``None`` if the lane is another process's.
        """
        plan, flats = self._plans[place], [by_device(flat) for flat in published.flats]
        for receiver, offers in plan.offered.items():
            arrays = [flats[copy.bucket][copy.owner] for copy in offers]
            process_pulls().offer(self._transfer(place), receiver, arrays)
        if not self._lanes[place].submesh.local:
            return None
        copies = [*plan.local]
        sources = [flats[copy.bucket][copy.owner] for copy in copies]
        arrays = jax_compat.copies_on(sources, [copy.target for copy in copies])
        for sender, pulled in plan.pulled.items():
            avals = [self._row_on(copy) for copy in pulled]
            arrays += process_pulls().pull(self._transfer(place), sender, avals, channel="gather")
            copies += pulled
        rows: dict[tuple[int, int], dict[Device, jax.Array]] = {}
        for copy, array in zip(copies, arrays, strict=True):
            rows.setdefault((copy.bucket, copy.shard), {})[copy.target] = array
        (avals,) = self._joins[place].avals
        joined = tuple(
            tuple(array_of([rows[bucket, shard]], aval) for shard, aval in enumerate(shards))
            for bucket, shards in enumerate(avals)
        )
        return Pulled(joined, published.repeated)

    def join(self, place: str, pulled: Pulled) -> Tree:
        """The whole parameters of a lane, by module: cuts and joins the pulled arrays, on its own devices alone."""
        repeated = on_lane(nested(pulled.repeated), self._lanes[place].param_avals)
        return nested({**by_name(repeated), **self._joins[place](pulled.flats)})

    def _transfer(self, place: str) -> str:
        """The name of a lane's pulls: the ends of a transfer count its copies, which a lane makes in order."""
        return f"gather {place}"

    @cached_property
    def _plans(self) -> dict[str, ProcessCopies[Copy]]:
        return {
            place: ProcessCopies.of(self._copies(lane.submesh), lambda copy: (copy.owner, copy.target))
            for place, lane in self._lanes.items()
        }

    def _copies(self, lane: Submesh) -> list[Copy]:
        """The copies of all flat arrays to all devices of a lane."""
        mesh, copies = self._state.submesh.mesh, list[Copy]()
        position = {device: np.unravel_index(i, mesh.devices.shape) for i, device in enumerate(mesh.devices.flat)}
        for bucket, content in enumerate(self.buckets):
            numbers = [mesh.axis_names.index(axis) for axis in content.axes]
            for target in lane.mesh.devices.flat:
                group: list[Any] = list(position[target])
                for number in numbers:
                    group[number] = slice(None)
                # The slice has the axes in the mesh's order; shards are numbered in the order of the bucket's.
                owners = mesh.devices[tuple(group)].transpose(np.argsort(np.argsort(numbers)))
                copies += [
                    Copy(bucket=bucket, shard=shard, owner=owner, target=target)
                    for shard, owner in enumerate(owners.flat)
                ]
        return copies

    def _row_on(self, copy: Copy) -> jax.ShapeDtypeStruct:
        """A device's flat array on the device that it is copied to."""
        bucket = self.buckets[copy.bucket]
        return jax.ShapeDtypeStruct((1, bucket.size), bucket.dtype, sharding=SingleDeviceSharding(copy.target))

    @cached_property
    def _publish(self) -> Program:
        submesh, named = self._state.submesh, by_name(self._state.param_specs)
        specs, avals = {name: named[name] for name in self._zeros}, by_name(self._state.param_avals)

        def body(shards: dict[str, jax.Array]) -> list[jax.Array]:
            return [bucket.flat(shards) for bucket in self.buckets]

        rows = [PartitionSpec(submesh.axes.all)] * len(self.buckets)
        spmd = Spmd(body, submesh.mesh, (specs,), rows, check_vma=False)
        return Program.of(f"publish {self.name}", spmd, [{name: avals[name] for name in self._zeros}])

    @cached_property
    def _joins(self) -> dict[str, Program]:
        return {place: self._join(place) for place, lane in self._lanes.items() if lane.submesh.local}

    def _join(self, place: str) -> Program:
        lane, mesh = self._lanes[place].submesh, self._state.submesh.mesh
        avals, specs = [], []
        for bucket in self.buckets:
            # Over its other axes a lane has other parts of the parameters.
            parts = tuple(axis for axis in lane.axes.all if axis not in bucket.axes)
            shape = (math.prod(lane.mesh.shape[axis] for axis in parts), bucket.size)
            row = with_sharding(jax.ShapeDtypeStruct(shape, bucket.dtype), lane.mesh, PartitionSpec(parts))
            shards = math.prod(mesh.shape[axis] for axis in bucket.axes)
            avals.append((row,) * shards)
            specs.append((PartitionSpec(parts),) * shards)
        param_specs = {name: zero.leaf.spec(lane.axes) for name, zero in self._zeros.items()}

        def body(flats: tuple[tuple[jax.Array, ...], ...]) -> dict[str, jax.Array]:
            shards: dict[str, list[jax.Array]] = {}
            for bucket, rows in zip(self.buckets, flats, strict=True):
                for name, shard in (pair for row in rows for pair in bucket.cut(row)):
                    shards.setdefault(name, []).append(shard)
            return {name: _joined(self._zeros[name], shards[name]) for name in param_specs}

        # No donation: one of the rows is what the lane's own devices publish.
        spmd = Spmd(body, lane.mesh, (tuple(specs),), param_specs, check_vma=False)
        return Program.of(f"join {place}", spmd, [tuple(avals)])

    # ---- together ----------------------------------------------------------------------------------------------------

    def collect(self, shards: Tree) -> dict[str, Tree]:
        """The whole parameters of this process's lanes, by place, which all lanes gather together."""
        params = self._collective(shards)
        return {place: on_lane(params, lane.param_avals) for place, lane in self._lanes.items() if lane.submesh.local}

    @cached_property
    def _collective(self) -> Program:
        state = self._state
        gather = partial(ZeroLeaf.gather, axes=state.submesh.axes)
        specs = jax.tree.map(lambda zero: zero.leaf.spec(state.submesh.axes), state.zero)

        def body(shards: Tree) -> Tree:
            return jax.tree.map(gather, state.zero, shards)

        spmd = Spmd(body, state.submesh.mesh, (state.param_specs,), specs)
        return Program.of(f"gather {self.name}", spmd, [state.param_avals])

    # ---- programs and sizes ------------------------------------------------------------------------------------------

    def programs(self, *, pulls: bool) -> list[Program]:
        """The programs of ``publish`` and ``join`` in this process, or the one of ``collect``."""
        return [self._publish, *self._joins.values()] if pulls else [self._collective]

    @property
    def published_bytes(self) -> int:
        """Bytes on a device of published masters; published copies of masters take the place of others."""
        prepared = by_name(self._state.prepared_avals)
        return sum(bucket.bytes_of([name for name in bucket.shapes if name not in prepared]) for bucket in self.buckets)

    def temporary_bytes(self, *, pulls: bool) -> int:
        """Bytes on a device while parameters are joined, beside these: pulled arrays, and the program's temporaries.

        An estimate from the program's trace.
        """
        if not pulls:
            return self._collective.temporary_bytes()
        program = self._join(self.name)
        (flats,) = program.avals
        pulled = sum((len(rows) - 1) * bucket.bytes for bucket, rows in zip(self.buckets, flats, strict=True))
        return pulled + program.temporary_bytes()

    def pulled_bytes(self, place: str) -> dict[tuple[Device, Device], int]:
        """Bytes that a lane copies, by the device that has them and the device that they go to."""
        sizes: dict[tuple[Device, Device], int] = {}
        for copy in self._copies(self._lanes[place].submesh):
            if copy.owner != copy.target:
                ends = (copy.owner, copy.target)
                sizes[ends] = sizes.get(ends, 0) + self.buckets[copy.bucket].bytes
        return sizes


def _buckets(zeros: Mapping[str, ZeroLeaf], state: StageState) -> list[Bucket]:
    """The sharded parameters of a stage in buckets."""
    avals, shapes = by_name(state.param_avals), dict[tuple[Any, tuple[str, ...]], dict[str, tuple[int, ...]]]()
    for name, zero in zeros.items():
        key = avals[name].dtype, shard_axes(zero.leaf, state.submesh.axes)
        shapes.setdefault(key, {})[name] = avals[name].sharding.shard_shape(avals[name].shape)
    return [Bucket(axes=axes, dtype=dtype, shapes=by) for (dtype, axes), by in shapes.items()]


def _joined(zero: ZeroLeaf, shards: list[jax.Array]) -> jax.Array:
    """A rank's part of the parameter without padding, from its shards. Inside ``shard_map``."""
    assert zero.dimension is not None, "sharded"
    padded = jnp.concatenate(shards, zero.dimension)
    # The padded dimension is never split over tp, so its local size is the global one.
    return lax.slice_in_dim(padded, 0, zero.leaf.shape[zero.dimension], axis=zero.dimension) if zero.padding else padded
