"""Boundaries of an op of several microbatches: its activation is shared out to them, their gradients are joined.

The rows of such an op lie cell by cell, and in a cell microbatch by microbatch. So they cross as one tensor, and then
every rank of the destination has the rows of its cells for all microbatches, and cuts them without communication.
Source: heterogeneous parallelism for MLLM training, §3.3: a packed boundary tensor with a view for each microbatch.

Legend: C cells of a rank, M microbatches, R rows of a microbatch in a cell.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from mmjax.mesh.boundary import Boundary
from mmjax.mesh.spmd import Program, Spmd
from mmjax.mesh.transfer import Transfer


class SharedOut:
    """A boundary whose source has the rows of several microbatches, and whose destination has those of each.

    Attributes:
      of_op: the boundary of the op's tensor, of all its microbatches.
      forward, backward: as of ``Boundary``. What arrives forward, and what leaves backward, is a tuple of arrays, one
        for each microbatch.
    """

    def __init__(self, of_op: Boundary, microbatches: int, cells: int):
        """Plans the cuts.

        Args:
          of_op: the boundary of the op's tensor, rows cell by cell, then microbatch by microbatch.
          microbatches: their number.
          cells: cells of a microbatch; dp of the destination divides them.
        """
        self.of_op, self.name = of_op, of_op.name
        pieces = _Pieces(of_op, microbatches, cells)
        self.forward, self.backward = _Sharing(of_op.forward, pieces), _Joining(of_op.backward, pieces)

    @property
    def kind(self) -> str:
        """As of ``Boundary``."""
        return self.of_op.kind


class _Pieces:
    """The rows of each microbatch at the destination."""

    def __init__(self, of_op: Boundary, microbatches: int, cells: int):
        target, self.microbatches = of_op.forward.target_aval, microbatches
        self.submesh, self._spec = of_op.forward.target, target.sharding.spec
        self._cells = cells // math.gcd(cells, self.submesh.layout.dp)
        self.op_aval, (rows, *trailing) = target, target.shape
        self.aval = jax.ShapeDtypeStruct((rows // microbatches, *trailing), target.dtype, sharding=target.sharding)

    def cutting(self, name: str) -> Program:
        """The program that cuts the rows of a rank into those of each microbatch."""
        specs = (self._spec,) * self.microbatches
        return Program.of(name, Spmd(self._cut, self.submesh.mesh, self._spec, specs, check_vma=False), [self.op_aval])

    def joining(self, name: str) -> Program:
        """The inverse of ``cutting``."""
        joining = Spmd(self._join, self.submesh.mesh, self._spec, self._spec, check_vma=False)
        return Program.of(name, joining, [self.aval] * self.microbatches)

    def _cut(self, rows: jax.Array) -> tuple[jax.Array, ...]:
        parts_CMR = rows.reshape(self._cells, self.microbatches, -1, *rows.shape[1:])
        return tuple(parts_CMR[:, m].reshape(-1, *rows.shape[1:]) for m in range(self.microbatches))

    def _join(self, *pieces: jax.Array) -> jax.Array:
        trailing = pieces[0].shape[1:]
        parts = [piece.reshape(self._cells, -1, *trailing) for piece in pieces]
        return jnp.stack(parts, axis=1).reshape(-1, *trailing)


class _Sharing(Transfer):
    """The forward direction, whose unpack also cuts the rows into those of each microbatch."""

    def __init__(self, transfer: Transfer, pieces: _Pieces):
        super().__init__(transfer.routing)
        self.transfer, self.kind, self.reads_later = transfer, transfer.kind, transfer.reads_later
        self.target_aval, self._pieces = pieces.aval, pieces

    @cached_property
    def _cutting(self) -> Program:
        return self._pieces.cutting(f"{self.routing.name} unpack by microbatch")

    def pack(self, x: jax.Array) -> Any:
        """Packs the activation of all microbatches."""
        return self.transfer.pack(x)

    def move(self, packed: Any) -> Any:
        """Moves the packed arrays, which are of all microbatches."""
        return self.transfer.move(packed)

    def unpack(self, moved: Any) -> Any:
        """The rows of each microbatch, a tuple of arrays of ``target_aval``."""
        return self._cutting(self.transfer.unpack(moved))

    def programs(self) -> list[Program]:
        """The programs of the op's tensor, and the one that cuts it."""
        return [*self.transfer.programs(), self._cutting]


class _Joining(Transfer):
    """The backward direction, whose first step also joins the gradients of all microbatches."""

    def __init__(self, transfer: Transfer, pieces: _Pieces):
        super().__init__(transfer.routing)
        self.transfer, self.kind = transfer, transfer.kind
        self.source_aval, self._pieces = pieces.aval, pieces

    @cached_property
    def _joining(self) -> Program:
        first = "unpack" if self.kind == "local" else "pack"
        return self._pieces.joining(f"{self.routing.name} {first} by microbatch")

    def pack(self, x: Any) -> Any:
        """Joins the gradients, a sequence of arrays of ``source_aval``, and cuts them into pieces for ``move``."""
        return x if self.kind == "local" else self.transfer.pack(self._joining(*x))

    def move(self, packed: Any) -> Any:
        """Moves the packed arrays, which are of all microbatches."""
        return self.transfer.move(packed)

    def unpack(self, moved: Any) -> jax.Array:
        """The gradient of the op's tensor."""
        return self.transfer.unpack(self._joining(*moved) if self.kind == "local" else moved)

    def programs(self) -> list[Program]:
        """The programs of the op's tensor, and the one that joins it."""
        return [self._joining, *self.transfer.programs()]
