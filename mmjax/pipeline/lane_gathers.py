"""Whole parameters of a lane, from shards that lie on all lanes of its stage.

A lane *pulls* them: it copies every shard that it lacks straight onto its own devices, in the dtype of the computation,
and joins them. The lanes that own the shards run nothing for it. Between processes the owners' hosts offer them
(``mmjax.mesh.pulls``). Where that does not work all lanes gather together, by one program (*collective*).

Zhang et al., "BigMac", §3.3, which copies by NVSHMEM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from mmjax import jax_compat
from mmjax.mesh.pulls import process_pulls
from mmjax.mesh.spmd import Program, Spmd, by_device, with_sharding
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.world import Device
from mmjax.pipeline.lane_views import array_of, on_lane
from mmjax.pipeline.stage_state import StageState
from mmjax.pipeline.trees import Tree, by_name, nested
from mmjax.pipeline.zero import ZeroLeaf, shard_axes

Piece = tuple[str, int]
"""The name of a parameter, such as "vision/embed", and the number of a shard of it."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy of one shard to one device of a lane.

    Attributes:
      piece: the shard.
      owner: the device that has it, in the same optimizer instance.
      target: the device that it goes to, which may be the owner.
    """

    piece: Piece
    owner: Device
    target: Device


@dataclass(frozen=True)
class Pulled:
    """Parameters of a lane that are on their way.

    Attributes:
      pieces: shards on the lane's devices.
      shards: the shards on all lanes, for the parameters that are repeated.
    """

    pieces: Mapping[Piece, jax.Array]
    shards: Tree


class LaneGather:
    """Gathers the parameters of one stage's lanes."""

    def __init__(self, name: str, state: StageState, lanes: Mapping[str, StageState]):
        """Plans the copies; nothing is traced.

        Args:
          name: the stage's, such as "vision.0".
          state: its state, whose parameters are shards over all lanes.
          lanes: the states of all lanes, by place, such as {"vision.0": ..., "vision.0/1": ...}; their parameters are
            whole.
        """
        self.name, self._state, self._lanes = name, state, lanes
        zeros = by_name(state.zero)
        self._sharded = {name: zero for name, zero in zeros.items() if zero.dimension is not None}
        self._repeated = [name for name in zeros if name not in self._sharded]

    # ---- pulls -------------------------------------------------------------------------------------------------------

    def open_pulls(self) -> None:
        """Opens this process's socket if its pulls reach over processes, before another process waits for it."""
        if len(self._state.submesh.processes) > 1 and self._state.submesh.local:
            process_pulls()

    def pull(self, place: str, shards: Tree) -> Pulled | None:
        """Starts this process's copies for the lane ``place``, and offers what other processes pull for it.

        Args:
          place: name of the lane, such as "vision.0/1".
          shards: the stage's shards, by module, such as {"vision": {"embed": x}}; not donated before they are read.

        Returns:
          The parameters for ``join``, which are not there yet; ``None`` if the lane is another process's.
        """
        plan, named = self._plans[place], by_name(shards)
        held = {name: by_device(named[name]) for name in self._sharded}
        for receiver, offers in plan.offered.items():
            arrays = [held[copy.piece[0]][copy.owner] for copy in offers]
            process_pulls().offer(self._transfer(place), receiver, arrays)
        if not self._lanes[place].submesh.local:
            return None
        copies = [*plan.local]
        sources = [held[copy.piece[0]][copy.owner] for copy in copies]
        arrays = jax_compat.copies_on(sources, [copy.target for copy in copies])
        for sender, pulled in plan.pulled.items():
            avals = [self._on_device(place, copy) for copy in pulled]
            arrays += process_pulls().pull(self._transfer(place), sender, avals)
            copies += pulled
        on_devices: dict[Piece, dict[Device, jax.Array]] = {}
        for copy, array in zip(copies, arrays, strict=True):
            on_devices.setdefault(copy.piece, {})[copy.target] = array
        pieces = {piece: array_of([by], self._piece_aval(place, piece[0])) for piece, by in on_devices.items()}
        return Pulled(pieces, {name: named[name] for name in self._repeated})

    def join(self, place: str, pulled: Pulled) -> Tree:
        """The whole parameters of a lane, by module: joins what it has pulled, on its own devices alone."""
        lane_avals = self._lanes[place].param_avals
        repeated = on_lane(nested(pulled.shards), lane_avals)
        joined = self._joins[place](
            {name: [pulled.pieces[name, n] for n in range(self._parts(name))] for name in self._sharded}
        )
        return nested({**by_name(repeated), **joined})

    def _transfer(self, place: str) -> str:
        """The name of a lane's pulls: the ends of a transfer count its copies, which a lane makes in order."""
        return f"gather {place}"

    @cached_property
    def _plans(self) -> dict[str, _Plan]:
        return {place: _Plan.of(self._copies(lane.submesh)) for place, lane in self._lanes.items()}

    def _copies(self, lane: Submesh) -> list[Copy]:
        """The copies of all shards to all devices of a lane."""
        mesh = self._state.submesh.mesh
        position = {device: np.unravel_index(i, mesh.devices.shape) for i, device in enumerate(mesh.devices.flat)}
        copies = []
        for name, zero in self._sharded.items():
            axes = [mesh.axis_names.index(axis) for axis in shard_axes(zero.leaf, self._state.submesh.axes)]
            for target in lane.mesh.devices.flat:
                group: list[Any] = list(position[target])
                for axis in axes:
                    group[axis] = slice(None)
                # Mesh axes that are left keep the mesh's order; shards are numbered in the order of ``axes``.
                owners = mesh.devices[tuple(group)].transpose(np.argsort(np.argsort(axes)))
                copies += [
                    Copy(piece=(name, number), owner=owner, target=target) for number, owner in enumerate(owners.flat)
                ]
        return copies

    def _parts(self, name: str) -> int:
        """The number of shards of a parameter."""
        submesh = self._state.submesh
        return math.prod(submesh.mesh.shape[axis] for axis in shard_axes(self._sharded[name].leaf, submesh.axes))

    def _piece_aval(self, place: str, name: str) -> jax.ShapeDtypeStruct:
        """One shard of a parameter as an array of a lane, equal on its ranks of dp and cp."""
        zero, lane = self._sharded[name], self._lanes[place]
        shape = list(zero.shape)
        shape[_dimension(zero)] //= self._parts(name)
        aval = jax.ShapeDtypeStruct(tuple(shape), self._state.param_dtype(zero.leaf))
        return with_sharding(aval, lane.submesh.mesh, zero.leaf.spec(lane.submesh.axes))

    def _on_device(self, place: str, copy: Copy) -> jax.ShapeDtypeStruct:
        aval = self._piece_aval(place, copy.piece[0])
        sharding = jax.sharding.SingleDeviceSharding(copy.target)
        return jax.ShapeDtypeStruct(aval.sharding.shard_shape(aval.shape), aval.dtype, sharding=sharding)

    @cached_property
    def _joins(self) -> dict[str, Program]:
        return {place: self._join_program(place) for place, lane in self._lanes.items() if lane.submesh.local}

    def _join_program(self, place: str) -> Program:
        lane = self._lanes[place].submesh
        specs = {name: zero.leaf.spec(lane.axes) for name, zero in self._sharded.items()}
        avals = {name: [self._piece_aval(place, name)] * self._parts(name) for name in self._sharded}

        def body(pieces: dict[str, list[jax.Array]]) -> dict[str, jax.Array]:
            return {name: _joined(self._sharded[name], parts) for name, parts in pieces.items()}

        in_specs: tuple[dict[str, list[PartitionSpec]]] = (
            {name: [specs[name]] * len(parts) for name, parts in avals.items()},
        )
        # No donation: one piece of each parameter is the lane's own shard.
        return Program.of(f"join {place}", Spmd(body, lane.mesh, in_specs, specs), [avals])

    # ---- together ----------------------------------------------------------------------------------------------------

    def collect(self, shards: Tree) -> dict[str, Tree]:
        """The whole parameters of this process's lanes, by place, which all lanes gather together."""
        whole = self._collective(shards)
        return {place: on_lane(whole, lane.param_avals) for place, lane in self._lanes.items() if lane.submesh.local}

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
        """The programs of ``pull`` and ``join`` in this process, or the one of ``collect``."""
        return list(self._joins.values()) if pulls else [self._collective]

    def temporary_bytes(self, *, pulls: bool) -> int:
        """Bytes on a device while parameters are made whole, beside these: pulled shards, and what the program needs.

        An estimate from the program's trace.
        """
        if not pulls:
            return self._collective.temporary_bytes()
        program = self._join_program(self.name)
        (pieces,) = program.avals
        sizes = (math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(pieces))
        return sum(sizes) + program.temporary_bytes()

    def pulled_bytes(self, place: str) -> dict[tuple[Device, Device], int]:
        """Bytes that a lane copies, by the device that has them and the device that they go to."""
        sizes: dict[tuple[Device, Device], int] = {}
        for copy in self._copies(self._lanes[place].submesh):
            if copy.owner != copy.target:
                aval, ends = self._on_device(place, copy), (copy.owner, copy.target)
                sizes[ends] = sizes.get(ends, 0) + math.prod(aval.shape) * aval.dtype.itemsize
        return sizes


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The copies for a lane that this process takes part in: inside it, by receiving process, by sending process."""

    local: list[Copy]
    offered: dict[int, list[Copy]]
    pulled: dict[int, list[Copy]]

    @classmethod
    def of(cls, copies: list[Copy]) -> _Plan:
        plan, me = cls(local=[], offered={}, pulled={}), jax_compat.process_index()
        for copy in copies:
            sender, receiver = copy.owner.process_index, copy.target.process_index
            if sender == me == receiver:
                plan.local.append(copy)
            elif sender == me:
                plan.offered.setdefault(receiver, []).append(copy)
            elif receiver == me:
                plan.pulled.setdefault(sender, []).append(copy)
        return plan


def _dimension(zero: ZeroLeaf) -> int:
    assert zero.dimension is not None, "sharded"
    return zero.dimension


def _joined(zero: ZeroLeaf, parts: list[jax.Array]) -> jax.Array:
    """A rank's part of the parameter without padding, from its shards. Inside ``shard_map``."""
    dimension = _dimension(zero)
    whole = jnp.concatenate(parts, dimension)
    # The padded dimension is never split over tp, so its local size is the global one.
    return lax.slice_in_dim(whole, 0, zero.leaf.shape[dimension], axis=dimension) if zero.padding else whole
