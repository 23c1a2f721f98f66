"""Transfers: rows on one submesh are materialised on another, in three steps that can be scheduled separately.

``pack`` runs on the source submesh, ``move`` between devices, ``unpack`` on the target submesh. A transfer carries one
copy of every row and never adds copies up. Source: heterogeneous parallelism for MLLM training, §3.1 and §3.2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from mmjax.mesh.collectives import exchange
from mmjax.mesh.movers import Mover
from mmjax.mesh.routing import Routing
from mmjax.mesh.spmd import Program, Spmd


class Transfer(ABC):
    """One direction of a boundary for one tensor shape.

    Attributes:
      kind: ``local`` (no move), ``async`` (the sender does not wait) or ``rendezvous`` (both sides take part).
      routing: how rows are cut into pieces, the routes of the pieces, and how they are joined.
      source, target: the stage submeshes.
      source_aval, target_aval: the tensor before and after, with shardings.
      reads_later: see ``Mover``. It concerns the result of ``pack``, which may be the tensor itself.
    """

    kind: str
    reads_later: bool = False

    def __init__(self, routing: Routing):
        self.routing = routing
        self.source, self.target = routing.source, routing.target
        self.source_aval, self.target_aval = routing.source_aval, routing.target_aval

    def pack(self, x: jax.Array) -> Any:
        """Cuts the global array ``x``, of ``source_aval``, into pieces, for ``move``.

        Runs a program on the source submesh, or does nothing.
        """
        return x

    def move(self, packed: Any) -> Any:
        """Carries the result of ``pack`` to the target's devices, for ``unpack``; ``local`` returns it unchanged."""
        return packed

    @abstractmethod
    def unpack(self, moved: Any) -> jax.Array:
        """Joins the result of ``move`` to a global array of ``target_aval``.

        Runs a program on the target submesh, or does nothing.
        """

    @abstractmethod
    def programs(self) -> list[Program]:
        """Programs of this transfer that have to be compiled; it may have none."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """All three steps: the array ``x`` of ``source_aval``, in the layout of ``target_aval``."""
        return self.unpack(self.move(self.pack(x)))


class MovedTransfer(Transfer):
    """A transfer between different rank sets: rows are cut, carried and joined (§3.1). Any routing fits any mover."""

    def __init__(self, routing: Routing, mover: Mover):
        super().__init__(routing)
        self.mover, self.kind, self.reads_later = mover, mover.kind, mover.reads_later
        cutting, joining, received = (
            routing.cutting(),
            routing.joining(),
            [routing.received_aval] * routing.target_pieces,
        )
        self._pack = Program.of(f"{routing.name} pack", cutting, [self.source_aval]) if cutting else None
        self._unpack = Program.of(f"{routing.name} unpack", joining, received) if joining else None

    def pack(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Cuts the rows: one array for each piece number, with a piece of every source rank; ``(x,)`` if uncut."""
        return self._pack(x) if self._pack else (x,)

    def move(self, packed: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Carries the result of ``pack``: one array for each piece number, with a piece of every target rank."""
        return self.mover.move(packed)

    def unpack(self, moved: tuple[jax.Array, ...]) -> jax.Array:
        """Joins the result of ``move`` to the rows, a global array of ``target_aval``."""
        if self._unpack:
            return self._unpack(*moved)
        (rows,) = moved
        return rows

    def programs(self) -> list[Program]:
        """The programs of pack and unpack, where they have one, and of the mover."""
        return [program for program in (self._pack, *self.mover.programs(), self._unpack) if program]


class LocalTransfer(Transfer):
    """A transfer between modules on the same ranks in different layouts (§3.2).

    Equal degrees need no data movement; fan-in gathers, fan-out selects, and other pairs of degrees exchange pieces.
    ``trace`` may be called inside ``jit``, so that a whole straight-line step is one program.
    """

    kind = "local"

    def __init__(self, routing: Routing):
        super().__init__(routing)
        ends = [end.row_sharding for end in (self.source, self.target)]
        if max(end.copies for end in ends) > 1 and ends[0] != ends[1]:
            fix = "on one rank set both have the same dp and copies, or neither has copies"
            raise ValueError(f"{routing.name}: copies={ends[0].copies} to copies={ends[1].copies}: {fix}")
        self._program = None
        if self._intervals[0] != self._intervals[1]:
            # The sharding is explicit: JAX may infer a wrong one for results on another mesh than the arguments'.
            name, aval = f"{routing.name} unpack", self.target_aval
            self._program = Program(name, self.trace, [self.source_aval], aval, out_shardings=aval.sharding)

    @property
    def _intervals(self) -> list[tuple[int, int]]:
        """Numbers of row intervals and of parts of each, at source and target."""
        return [end.degrees[:2] for end in self.routing.ends]

    def trace(self, x: jax.Array) -> jax.Array:
        """The transform as a traceable function: a global array of ``source_aval`` to one of ``target_aval``."""
        (source_dp, source_parts), (target_dp, target_parts) = self._intervals
        if (source_dp, source_parts) == (target_dp, target_parts):
            return x
        if source_dp % target_dp == 0 and target_parts == 1:
            mesh, finer = self._siblings(target_dp, source_dp // target_dp, source_parts)
            return Spmd(self._gather, mesh, finer, PartitionSpec("a"), check_vma=False)(x)
        if target_dp % source_dp == 0 and source_parts == 1:
            mesh, finer = self._siblings(source_dp, target_dp // source_dp, target_parts)
            return Spmd(self._select, mesh, PartitionSpec("a"), finer)(x)
        return self._exchange(x)

    def _siblings(self, groups: int, siblings: int, parts: int) -> tuple[Mesh, PartitionSpec]:
        """A mesh of the same devices, and the spec of the end with more intervals on it.

        Its axes: copies, intervals of the smaller dp, intervals of the larger dp within them, parts of rows, replicas.
        """
        copies = self.routing.source_end.sharding.copies  # both ends have as many
        devices = self.source.mesh.devices.reshape(copies, groups, siblings, parts, -1)
        spec = PartitionSpec(("a", "k"), *(["p"] if parts > 1 else []))
        return Mesh(devices, ("c", "a", "k", "p", "r")), spec

    def _gather(self, x: jax.Array) -> jax.Array:
        rows = lax.all_gather(x, "k", tiled=True)
        return lax.all_gather(rows, "p", axis=1, tiled=True) if self._intervals[0][1] > 1 else rows

    def _select(self, x: jax.Array) -> jax.Array:
        rows = x.shape[0] * self.source.layout.dp // self.target.layout.dp
        selected = lax.dynamic_slice_in_dim(x, lax.axis_index("k") * rows, rows)
        if (parts := self._intervals[1][1]) == 1:
            return selected
        width = x.shape[1] // parts
        return lax.dynamic_slice_in_dim(selected, lax.axis_index("p") * width, width, axis=1)

    def _exchange(self, x: jax.Array) -> jax.Array:
        routing, end = self.routing, self.source  # either end: the ranks are the same, in the same order
        cutting, joining = routing.cutting(), routing.joining()
        assert cutting and joining  # neither dp divides the other, so each rank has several units
        body = partial(
            exchange,
            routes=routing.routes,
            target_pieces=routing.target_pieces,
            position={rank: i for i, rank in enumerate(end.ranks)},
            axes=end.axes.all,
        )
        stacked = end.spread.per_rank
        exchanging = Spmd(body, end.mesh, stacked, stacked)
        return joining(*exchanging(cutting(x)))

    def unpack(self, moved: jax.Array) -> jax.Array:
        """The whole transform, as a compiled program; returns ``moved`` itself if the layouts are equal."""
        return self._program(moved) if self._program else moved

    def programs(self) -> list[Program]:
        """One program, or none if both ends have the same shards."""
        return [self._program] if self._program else []
