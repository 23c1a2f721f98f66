"""Movers: carry pieces along routes from the source's devices to the target's, whatever the pieces contain.

On the host, a mover handles only the devices of this process, and looks shards up by device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property, partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mmjax import jax_compat
from mmjax.mesh.collectives import exchange
from mmjax.mesh.pulls import ProcessCopies, process_pulls
from mmjax.mesh.routes import Route, components
from mmjax.mesh.routing import Routing
from mmjax.mesh.spmd import Program, Spmd, Stitcher, by_device
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.world import Device, World

Pieces = Mapping[tuple[int, Device], jax.Array]
"""Pieces by number and device: arrays of ``Routing.piece`` on one device each."""


class Mover(ABC):
    """Carries the pieces that were cut on the source to the target, where they are joined.

    Attributes:
      kind: ``async`` (the sender does not wait) or ``rendezvous`` (both sides take part).
      reads_later: whether another process reads the source's own buffers after ``move`` has returned. JAX does not know
        of that read, so the caller may not donate them.
    """

    kind: str
    reads_later: bool = False

    def __init__(self, routing: Routing, world: World):
        """For the pieces and routes of ``routing``, whose ranks number the devices of ``world``."""
        self.routing, self.world = routing, world
        self._stitcher = Stitcher(routing.piece, routing.aval.dtype)

    def move(self, packed: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Carries the pieces.

        Args:
          packed: one array for each piece number of the source, with one piece on each of its devices; empty in a
            process that has none of these devices.

        Returns:
          One array for each piece number of the target, of ``Routing.received_aval``. Its values do not matter on ranks
          that no route leads to.
        """
        return self._stitch(self.carry(_pieces(packed)), (self.routing.received_aval,) * self.routing.target_pieces)

    @abstractmethod
    def carry(self, source_pieces: Pieces) -> Pieces:
        """Carries the pieces on this process's source devices, by source piece number and device.

        Returns the pieces on this process's target devices, by target piece number and device.
        """

    def programs(self) -> list[Program]:
        """Programs that this process has to compile."""
        return []

    def _stitch(self, pieces: Pieces, avals: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.Array, ...]:
        """Joins the pieces of each number into an array, without a copy; zeros where a device has no piece."""
        by_number: list[dict[Device, jax.Array]] = [{} for _ in avals]
        for (number, device), piece in pieces.items():
            by_number[number][device] = piece
        arrays = zip(by_number, avals, strict=True)
        return tuple(self._stitcher(local_pieces, aval.shape, aval.sharding) for local_pieces, aval in arrays)


class LocalCopies:
    """``Mover.move`` between devices of this process, by one copy. Which shard goes where is found out once."""

    def __init__(self, routing: Routing, world: World, stitcher: Stitcher):
        """For the pieces and routes of ``routing``, whose ranks number the devices of ``world``.

        ``stitcher`` has the zeros of devices that no route leads to.
        """
        first, second = ({rank: n for n, rank in enumerate(end.ranks)} for end in (routing.source, routing.target))
        self._aval, self._stitcher, routes = routing.received_aval, stitcher, routing.routes
        self._sent = [(route.source_piece, first[route.source]) for route in routes]
        self._receivers = [world.devices[route.target] for route in routes]
        copies = {(route.target_piece, route.target): number for number, route in enumerate(routes)}
        joined = [[(piece, rank) for rank in second] for piece in range(routing.target_pieces)]
        empty = [key for keys in joined for key in keys if key not in copies]
        self._empty = [world.devices[rank] for _, rank in empty]
        numbers = copies | {key: number for number, key in enumerate(empty, len(routes))}
        self._joined = [[numbers[key] for key in keys] for keys in joined]
        # Each shard has its counterpart, as between stages of one module.
        each = list(range(len(first)))
        self._is_whole = self._sent == [(0, n) for n in each] and self._joined == [each]

    def __call__(self, packed: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The array of each piece of the target, from those of the source."""
        aval = self._aval
        if self._is_whole:
            return (jax_compat.copy_on(packed[0], aval.sharding),)
        shards = [jax_compat.shards(array) for array in packed]
        copies = jax_compat.copies_on([shards[piece][n] for piece, n in self._sent], self._receivers)
        parts = [*copies, *self._zeros]
        return tuple(
            jax_compat.array_of_shards(aval.shape, aval.dtype, aval.sharding, [parts[number] for number in numbers])
            for numbers in self._joined
        )

    @cached_property
    def _zeros(self) -> list[jax.Array]:
        return [self._stitcher.zeros(device) for device in self._empty]


class DevicePutMover(Mover):
    """Direct copies. The sender does not wait for its receiver.

    One process that owns all devices copies everything by one call (``LocalCopies``). Otherwise pieces for another
    process's devices are offered, all at once, and it pulls them (``Pulls``).
    """

    kind = "async"

    def __init__(self, routing: Routing, world: World):
        super().__init__(routing, world)
        in_one_process = len(routing.source.processes | routing.target.processes) == 1
        self._local_copies = LocalCopies(routing, world, self._stitcher) if in_one_process else None
        self._routes = ProcessCopies.of(
            routing.routes, lambda route: (world.devices[route.source], world.devices[route.target])
        )
        self.reads_later = bool(self._routes.offered)
        if self._routes.offered or self._routes.pulled:
            process_pulls()  # opens the socket before another process waits for it

    def move(self, packed: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Starts all copies; see ``Mover.move``."""
        return self._local_copies(packed) if self._local_copies else super().move(packed)

    def carry(self, source_pieces: Pieces) -> Pieces:
        """Starts all copies; see ``Mover.carry``."""
        devices, name = self.world.devices, self.routing.name

        def sources(routes: Sequence[Route]) -> list[jax.Array]:
            return [source_pieces[route.source_piece, devices[route.source]] for route in routes]

        for receiver, routes in self._routes.offered.items():
            process_pulls().offer(name, receiver, sources(routes))
        copies = jax_compat.copies_on(
            sources(self._routes.local), [devices[route.target] for route in self._routes.local]
        )
        routes = list(self._routes.local)
        for sender, pulled in self._routes.pulled.items():
            copies += process_pulls().pull(name, sender, [self._piece_on(route.target) for route in pulled])
            routes += pulled
        return {(route.target_piece, devices[route.target]): copy for route, copy in zip(routes, copies, strict=True)}

    def _piece_on(self, rank: int) -> jax.ShapeDtypeStruct:
        sharding = SingleDeviceSharding(self.world.devices[rank])
        return jax.ShapeDtypeStruct(self.routing.piece, self.routing.aval.dtype, sharding=sharding)


class CollectiveMover(Mover):
    """``lax.ppermute`` over the ranks of both sides, for devices that cannot copy to each other directly.

    One program for each connected component of the routes. Source shards and zeros are stitched without a copy. Both
    sides take part, so a sender waits for its receiver.
    """

    kind = "rendezvous"

    def __init__(self, routing: Routing, world: World):
        super().__init__(routing, world)
        parts = components(routing.routes, routing.target_end.sharding)
        self._programs = [self._program(routes) for routes in parts]

    def _program(self, routes: tuple[Route, ...]) -> Program:
        ranks = sorted({rank for route in routes for rank in (route.source, route.target)})
        mesh, spec = Mesh(np.array([self.world.devices[rank] for rank in ranks]), ("u",)), PartitionSpec("u")
        body = partial(
            exchange,
            routes=routes,
            target_pieces=self.routing.target_pieces,
            position={rank: i for i, rank in enumerate(ranks)},
            axes=("u",),
        )
        first, *trailing = self.routing.piece
        sharding = NamedSharding(mesh, spec)
        stacked = jax.ShapeDtypeStruct((len(ranks) * first, *trailing), self.routing.aval.dtype, sharding=sharding)
        pieces = (stacked,) * self.routing.source_pieces
        spmd = Spmd(body, mesh, spec, spec)
        return Program.of(f"{self.routing.name} move {ranks[0]}-{ranks[-1]}", spmd, [pieces])

    def carry(self, source_pieces: Pieces) -> Pieces:
        """Runs the programs that this process takes part in; see ``Mover.carry``."""
        received: dict[tuple[int, Device], jax.Array] = {}
        for program in self.programs():
            (avals,) = program.avals
            received |= _pieces(program(self._stitch(source_pieces, avals)))
        return received

    def programs(self) -> list[Program]:
        """The programs of the components that this process takes part in."""
        return [program for program in self._programs if program.local]


def _pieces(arrays: tuple[jax.Array, ...]) -> dict[tuple[int, Device], jax.Array]:
    return {(i, device): shard for i, array in enumerate(arrays) for device, shard in by_device(array).items()}


MOVERS: Mapping[str, type[Mover]] = {"device_put": DevicePutMover, "collective": CollectiveMover}


def mover_of(transport: str, source: Submesh, target: Submesh) -> type[Mover]:
    """The class ``DevicePutMover`` or ``CollectiveMover``, by ``transport``: "device_put", "collective" or "auto".

    ``source`` and ``target`` are the devices of the two stages, such as ``Submesh.of(Layout(), (0,), devices)``. For
    "auto" see ``transport_of``.

    The result is the same in every process, also in one that owns none of these devices.
    """
    platform = source.mesh.devices.flat[0].platform
    return MOVERS[transport_of(transport, platform, crosses=len(source.processes | target.processes) > 1)]


def transport_of(transport: str, platform: str, *, crosses: bool) -> str:
    """The transport of a move, "device_put" or "collective".

    "auto" takes "collective" between GPUs of several processes, and else "device_put".

    Args:
      transport: "device_put", "collective" or "auto", as ``World.transport``.
      platform: the devices' platform, such as "gpu".
      crosses: whether the devices belong to several processes.
    """
    if transport != "auto":
        return transport
    return "collective" if crosses and platform == "gpu" else "device_put"
