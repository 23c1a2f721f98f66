"""Transfers: rows laid out on one submesh are materialised on another, in three steps that can be scheduled apart.

``pack`` runs on the source submesh, ``move`` between devices, ``unpack`` on the target submesh. A transfer carries one
copy of every row and never adds copies up. Source: heterogeneous parallelism for MLLM training, §3.1 and §3.2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.mesh.collectives import broadcast_from_leader, exchange
from mmjax.mesh.routes import Route, units
from mmjax.mesh.spmd import Program, Spmd
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.world import World


class Transfer(ABC):
    """One direction of a boundary for one tensor shape.

    Attributes:
      kind: ``local`` (no move), ``async`` (the sender does not wait) or ``rendezvous`` (both sides take part).
      source_aval, target_aval: the tensor before and after, with shardings.
    """

    kind: str

    def __init__(self, name: str, source: Submesh, target: Submesh, aval: jax.ShapeDtypeStruct):
        total = units(source.layout.dp, target.layout.dp)
        if aval.shape[0] % total:
            raise ValueError(f"{name}: {aval.shape[0]} rows do not divide into {total} equal intervals; pad the rows")
        self.name, self.source, self.target = name, source, target
        self.source_units, self.target_units = total // source.layout.dp, total // target.layout.dp
        self.unit_rows = aval.shape[0] // total
        self.source_aval, self.target_aval = _placed(aval, source), _placed(aval, target)

    def pack(self, x: jax.Array) -> Any:
        """Cuts the rows into what travels; a program on the source submesh, or nothing."""
        return x

    def move(self, packed: Any) -> Any:
        """Carries what ``pack`` returned to the target's devices."""
        return packed

    @abstractmethod
    def unpack(self, moved: Any) -> jax.Array:
        """Puts the rows together in the target's layout; a program on the target submesh, or nothing."""

    def programs(self) -> list[Program]:
        """What has to be compiled."""
        return []

    def __call__(self, x: jax.Array) -> jax.Array:
        """All three steps."""
        return self.unpack(self.move(self.pack(x)))


class LocalTransfer(Transfer):
    """Both modules share the rank set: the same devices read their ranks under the other layout (§3.2).

    Equal dp is a relabelling; fan-in gathers among siblings; fan-out selects; other pairs exchange units.
    ``trace`` may be called inside ``jit``, so that a whole straight-line step is one program.
    """

    kind = "local"

    def __init__(
        self, name: str, source: Submesh, target: Submesh, aval: jax.ShapeDtypeStruct, routes: tuple[Route, ...]
    ):
        super().__init__(name, source, target, aval)
        self.routes = routes
        self._program = None
        if source.layout.dp != target.layout.dp:
            self._program = Program(f"{name} unpack", self.trace, [self.source_aval], self.target_aval)

    def trace(self, x: jax.Array) -> jax.Array:
        """The transform as a traceable function of the global array."""
        source_dp, target_dp = self.source.layout.dp, self.target.layout.dp
        if source_dp == target_dp:
            return x
        if source_dp % target_dp == 0:
            mesh = self._siblings(target_dp, source_dp // target_dp)
            return Spmd(self._gather, mesh, PartitionSpec(("a", "k")), PartitionSpec("a"), check_vma=False)(x)
        if target_dp % source_dp == 0:
            mesh = self._siblings(source_dp, target_dp // source_dp)
            return Spmd(self._select, mesh, PartitionSpec("a"), PartitionSpec(("a", "k")), check_vma=False)(x)
        return self._exchange(x)

    def _siblings(self, groups: int, siblings: int) -> Mesh:
        """The same devices as intervals of the coarser dp, their parts in the finer one, and replicas."""
        return Mesh(self.source.mesh.devices.reshape(groups, siblings, -1), ("a", "k", "r"))

    def _gather(self, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, "k", axis=0, tiled=True)

    def _select(self, x: jax.Array) -> jax.Array:
        rows = self.target_units * self.unit_rows
        return lax.dynamic_slice_in_dim(x, lax.axis_index("k") * rows, rows)

    def _exchange(self, x: jax.Array) -> jax.Array:
        source, target = self.source, self.target
        body = partial(
            exchange,
            routes=self.routes,
            groups=target.placement.groups,
            position={rank: i for i, rank in enumerate(source.ranks)},
            source_units=self.source_units,
            target_units=self.target_units,
            axes=source.axes.all,
        )
        blocks = Spmd(body, source.mesh, source.axes.rows, PartitionSpec(source.axes.all), check_vma=False)(x)
        whole = PartitionSpec(target.axes.all)
        return Spmd(lambda x: x, target.mesh, whole, target.axes.rows, check_vma=False)(blocks)

    def unpack(self, moved: jax.Array) -> jax.Array:
        """The whole transform."""
        return self._program(moved) if self._program else moved

    def programs(self) -> list[Program]:
        """One program, or none for equal dp."""
        return [self._program] if self._program else []


class PeerTransfer(Transfer):
    """Equal degrees on other ranks: every rank copies its shard to its counterpart; nothing to pack or unpack."""

    kind = "async"

    def move(self, packed: jax.Array) -> jax.Array:
        """One asynchronous copy per rank."""
        return jax.device_put(packed, self.target_aval.sharding)

    def unpack(self, moved: jax.Array) -> jax.Array:
        """Already in place."""
        return moved


class LeaderTransfer(Transfer):
    """Leader to leader by one ``jax.device_put`` per unit, then a broadcast inside the tp·cp group (§3.1).

    The sender does not wait for its receiver. Needs every device in this process.
    """

    kind = "async"

    def __init__(
        self,
        name: str,
        source: Submesh,
        target: Submesh,
        aval: jax.ShapeDtypeStruct,
        routes: tuple[Route, ...],
        world: World,
    ):
        super().__init__(name, source, target, aval)
        self.routes, self.world = routes, world
        self._source_slot = {rank: i for i, rank in enumerate(source.ranks)}
        self._target_slot = {rank: i for i, rank in enumerate(target.ranks)}
        self._pack = self._unpack = None
        whole = PartitionSpec(target.axes.all)
        self._piece_sharding = target.sharding(whole)
        self._piece_shape = (len(target.ranks) * self.unit_rows, *aval.shape[1:])
        self._empty: dict[int, jax.Array] = {}
        if self.source_units > 1:
            cut = Spmd(self._cut, source.mesh, source.axes.rows, source.axes.rows, check_vma=False)
            self._pack = Program.of(f"{name} pack", cut, [self.source_aval])
        if self.target_units > 1 or target.placement.width > 1:
            piece = jax.ShapeDtypeStruct(self._piece_shape, aval.dtype, sharding=self._piece_sharding)
            join = Spmd(self._join, target.mesh, (whole,) * self.target_units, target.axes.rows, check_vma=False)
            self._unpack = Program.of(f"{name} unpack", join, [piece] * self.target_units)

    def pack(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """One array per unit of a source shard."""
        return self._pack(x) if self._pack else (x,)

    def move(self, packed: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Copies each unit to its target leader; other ranks of the target group hold an empty buffer."""
        shards = [[shard.data for shard in array.addressable_shards] for array in packed]
        pieces = [self._empty_pieces() for _ in range(self.target_units)]
        for route in self.routes:
            for unit in range(route.start, route.stop):
                data = shards[unit % self.source_units][self._source_slot[route.source]]
                copied = jax.device_put(data, self.world.devices[route.target])
                pieces[unit % self.target_units][self._target_slot[route.target]] = copied
        return tuple(
            jax.make_array_from_single_device_arrays(self._piece_shape, self._piece_sharding, piece) for piece in pieces
        )

    def unpack(self, moved: tuple[jax.Array, ...]) -> jax.Array:
        """Concatenates in row order and broadcasts within each group."""
        return self._unpack(*moved) if self._unpack else moved[0]

    def programs(self) -> list[Program]:
        """Pack and unpack, where they do anything."""
        return [program for program in (self._pack, self._unpack) if program]

    def _cut(self, x: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.split(x, self.source_units))

    def _join(self, *pieces: jax.Array) -> jax.Array:
        return broadcast_from_leader(jnp.concatenate(pieces), self.target.axes.replica)

    def _empty_pieces(self) -> list[Any]:
        if not self._empty and self.target.placement.width > 1:
            leaders = {self.target.placement.leader(i) for i in range(self.target.layout.dp)}
            zeros = np.zeros((self.unit_rows, *self.source_aval.shape[1:]), self.source_aval.dtype)
            for rank, slot in self._target_slot.items():
                if rank not in leaders:
                    self._empty[slot] = jax.device_put(zeros, self.world.devices[rank])
        return [self._empty.get(slot) for slot in range(len(self.target.ranks))]


class CollectiveTransfer(Transfer):
    """``lax.ppermute`` over the union of both rank sets, where devices cannot copy to each other directly.

    One program per connected component of the routes. Source shards and empty buffers are stitched without a copy.
    Both sides take part, so a sender waits for its receiver.
    """

    kind = "rendezvous"

    def __init__(
        self,
        name: str,
        source: Submesh,
        target: Submesh,
        aval: jax.ShapeDtypeStruct,
        routes: tuple[Route, ...],
        world: World,
    ):
        super().__init__(name, source, target, aval)
        self.world = world
        self._source_piece = (self.source_units * self.unit_rows, *aval.shape[1:])
        self._parts = [self._part(ranks, routes) for ranks in self._components(routes)]
        self._empty: dict[int, jax.Array] = {}

    def _components(self, routes: tuple[Route, ...]) -> list[tuple[int, ...]]:
        group_of = {group[0]: set(group) for group in self.target.placement.groups}
        parts: list[set[int]] = []
        for route in routes:
            joined = {route.source} | group_of[route.target]
            apart = [part for part in parts if not part & joined]
            parts = [*apart, joined.union(*(part for part in parts if part & joined))]
        return [tuple(sorted(part)) for part in parts]

    def _part(
        self, ranks: tuple[int, ...], routes: tuple[Route, ...]
    ) -> tuple[tuple[int, ...], NamedSharding, Program]:
        mesh = Mesh(np.array([self.world.devices[r] for r in ranks]), ("u",))
        inside, spec = set(ranks), PartitionSpec("u")
        body = partial(
            exchange,
            routes=tuple(route for route in routes if route.source in inside),
            groups=[group for group in self.target.placement.groups if inside.issuperset(group)],
            position={rank: i for i, rank in enumerate(ranks)},
            source_units=self.source_units,
            target_units=self.target_units,
            axes=("u",),
        )
        shape = (len(ranks) * self._source_piece[0], *self._source_piece[1:])
        sharding = NamedSharding(mesh, spec)
        aval = jax.ShapeDtypeStruct(shape, self.source_aval.dtype, sharding=sharding)
        spmd = Spmd(body, mesh, spec, spec, check_vma=False)
        program = Program.of(f"{self.name} move {ranks[0]}-{ranks[-1]}", spmd, [aval])
        return ranks, sharding, program

    def move(self, packed: jax.Array) -> dict[int, jax.Array]:
        """Runs the union programs; returns the local rows by target rank."""
        local = {rank: shard.data for rank, shard in zip(self.source.ranks, packed.addressable_shards, strict=True)}
        received = {}
        for ranks, sharding, program in self._parts:
            shards = [local[rank] if rank in local else self._empty_buffer(rank) for rank in ranks]
            shape = (len(ranks) * self._source_piece[0], *self._source_piece[1:])
            out = program(jax.make_array_from_single_device_arrays(shape, sharding, shards))
            received.update(zip(ranks, (shard.data for shard in out.addressable_shards), strict=True))
        return received

    def unpack(self, moved: dict[int, jax.Array]) -> jax.Array:
        """Reads the received buffers as one array on the target submesh."""
        shards = [moved[rank] for rank in self.target.ranks]
        return jax.make_array_from_single_device_arrays(self.target_aval.shape, self.target_aval.sharding, shards)

    def programs(self) -> list[Program]:
        """One program per component."""
        return [program for _, _, program in self._parts]

    def _empty_buffer(self, rank: int) -> jax.Array:
        if rank not in self._empty:
            zeros = np.zeros(self._source_piece, self.source_aval.dtype)
            self._empty[rank] = jax.device_put(zeros, self.world.devices[rank])
        return self._empty[rank]


def _placed(aval: jax.ShapeDtypeStruct, submesh: Submesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=submesh.sharding(submesh.axes.rows))
