"""Routings: how rows are cut into pieces on the source, which routes the pieces take, and how they are joined.

A mover carries the pieces. Cutting and joining are functions of one rank's shard, made of ``jax.lax`` collectives in
its tp·cp group. No routing sums replicas. Source: heterogeneous parallelism for MLLM training, §3.1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from mmjax.mesh.collectives import broadcast_from_leader
from mmjax.mesh.routes import (
    Route,
    RowSharding,
    UnitGrid,
    leader_routes,
    peer_routes,
    sliced_routes,
    slices_received,
    slices_sent,
)
from mmjax.mesh.spmd import Spmd
from mmjax.mesh.submesh import Submesh

Placement = Literal["whole", "inside", "listed"]
"""Placement of a tensor at one end of a boundary.

* ``whole``: rows are sharded over dp, and every rank of cp has whole rows.
* ``inside``: the features of a module's tokens between two of its stages, sharded over their tokens too.
* ``listed``: rows are sharded over dp, and each rank of cp has the tokens of its own list.
"""
WHOLE_ROWS: tuple[Placement, Placement] = ("whole", "whole")
INSIDE_MODULE: tuple[Placement, Placement] = ("inside", "inside")
LISTED_TOKENS: tuple[Placement, Placement] = ("whole", "listed")
"""From the module that computes the tokens to the one that reads them."""


@dataclass(frozen=True)
class End:
    """One end of a boundary."""

    submesh: Submesh
    placement: Placement

    @property
    def sharding(self) -> RowSharding:
        """Sharding of the tensor's rows, and of the tokens of rows, over the ranks."""
        end = self.submesh
        return {"whole": end.row_sharding, "inside": end.token_sharding, "listed": end.list_sharding}[self.placement]

    @property
    def spec(self) -> PartitionSpec:
        """Spec of the global tensor ``[rows, ...]`` on the submesh."""
        spread = self.submesh.spread
        return spread.tokens if self.placement == "listed" else spread.activation(inside=self.placement == "inside")

    @property
    def group(self) -> tuple[str, ...]:
        """Mesh axes over which ranks hold the same part of the tensor, such as ("cp", "tp") for ``whole``."""
        spread = self.submesh.spread
        return {"whole": spread.same_rows, "inside": spread.same_tokens, "listed": spread.same_inputs}[self.placement]

    @property
    def degrees(self) -> tuple[int, int, int]:
        """Numbers of row intervals, of parts of each, and of ranks that hold the same part, as of ``sharding``."""
        return self.sharding.dp, self.sharding.parts, self.sharding.width


@dataclass(frozen=True, eq=False)
class Routing(ABC):
    """One direction of a boundary for one tensor shape.

    Attributes:
      name: used in messages and program names.
      source, target: the stage submeshes.
      aval: global shape ``[rows, ...]`` and dtype of the tensor.
      placements: placement of the tensor at source and target.

    Raises:
      ValueError: for rows that do not divide into the units of both ends, or stages of one module that differ in
        degrees.
    """

    name: str
    source: Submesh
    target: Submesh
    aval: jax.ShapeDtypeStruct
    placements: tuple[Placement, Placement] = WHOLE_ROWS

    def __post_init__(self) -> None:
        if self.placements == INSIDE_MODULE:
            row_degrees = [End(end.submesh, "whole").degrees for end in self.ends]
            degrees = [
                (degrees_of_rows[0], end.degrees[0], degrees_of_rows[2])
                for degrees_of_rows, end in zip(row_degrees, self.ends, strict=True)
            ]
            if degrees[0] != degrees[1]:
                raise ValueError(f"{self.name}: stages of one module with the degrees {degrees[0]} and {degrees[1]}")
            return
        rows, parts = self.units.rows, self.units.parts
        if self.aval.shape[0] % rows:
            raise ValueError(
                f"{self.name}: {self.aval.shape[0]} rows do not divide into {rows} equal intervals; pad the rows"
            )
        if parts > 1 and self.aval.shape[1] % parts:
            raise ValueError(
                f"{self.name}: {self.aval.shape[1]} tokens of a cell are no lists of equal length for cp={parts}; "
                "pad the lists"
            )

    # ---- rows --------------------------------------------------------------------------------------------------------

    @cached_property
    def source_end(self) -> End:
        """Submesh and placement at the source."""
        return End(self.source, self.placements[0])

    @cached_property
    def target_end(self) -> End:
        """Submesh and placement at the target."""
        return End(self.target, self.placements[1])

    @property
    def ends(self) -> tuple[End, End]:
        """Source and target."""
        return self.source_end, self.target_end

    @cached_property
    def units(self) -> UnitGrid:
        """The units of the tensor; see ``routes``."""
        return UnitGrid.between(self.source_end.sharding, self.target_end.sharding)

    @property
    def source_units(self) -> int:
        """Number of units on a source rank."""
        return self.source_end.sharding.units_per_rank(self.units.rows, self.units.parts)

    @property
    def target_units(self) -> int:
        """Number of units on a target rank."""
        return self.target_end.sharding.units_per_rank(self.units.rows, self.units.parts)

    @property
    def unit(self) -> tuple[int, ...]:
        """Shape of a unit: of ``aval``, with ``aval.shape[0] / units.rows`` rows and 1 / ``units.parts`` of the tokens.

        Between stages of one module, of a rank's whole shard.
        """
        if self.placements == INSIDE_MODULE:
            return self.source_aval.sharding.shard_shape(self.aval.shape)
        rows, *trailing = self.aval.shape
        if self.units.parts > 1:
            trailing[0] //= self.units.parts
        return (rows // self.units.rows, *trailing)

    @cached_property
    def source_aval(self) -> jax.ShapeDtypeStruct:
        """Global shape, dtype and sharding of the tensor in the source's layout."""
        return self._placed(self.source_end)

    @cached_property
    def target_aval(self) -> jax.ShapeDtypeStruct:
        """Global shape, dtype and sharding of the tensor in the target's layout."""
        return self._placed(self.target_end)

    def _placed(self, end: End) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.aval.shape, self.aval.dtype, sharding=end.submesh.sharding(end.spec))

    def as_units(self, x: jax.Array) -> jax.Array:
        """Cuts a source rank's local shard into its units ``[source_units, *unit]``, by rows and then by parts."""
        rows, *trailing = self.unit
        parts = self.units.parts // self.source_end.sharding.parts  # parts of each row on this rank
        if parts == 1:
            return x.reshape(self.source_units, rows, *trailing)
        split = x.reshape(self.source_units // parts, rows, parts, *trailing)
        return jnp.moveaxis(split, 2, 1).reshape(self.source_units, rows, *trailing)

    def of_units(self, units: jax.Array) -> jax.Array:
        """Joins a target rank's units ``[target_units, *unit]`` to its local shard; the inverse of ``as_units``."""
        rows, *trailing = self.unit
        parts = self.units.parts // self.target_end.sharding.parts
        if parts == 1:
            return units.reshape(self.target_units * rows, *trailing)
        split = jnp.moveaxis(units.reshape(self.target_units // parts, parts, rows, *trailing), 1, 2)
        return split.reshape(self.target_units // parts * rows, parts * trailing[0], *trailing[1:])

    # ---- pieces ------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def routes(self) -> tuple[Route, ...]:
        """The routes of all pieces, from world ranks of the source to world ranks of the target."""

    @property
    @abstractmethod
    def piece(self) -> tuple[int, ...]:
        """Shape of a piece, the same for all: of a unit, or of a flat slice ``(size,)``."""

    @property
    @abstractmethod
    def source_pieces(self) -> int:
        """Number of pieces that the rows of a source rank are cut into."""

    @property
    @abstractmethod
    def target_pieces(self) -> int:
        """Number of pieces that the rows of a target rank are joined from."""

    # ---- programs ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def cutting(self) -> Spmd | None:
        """The function from the tensor in ``source_aval`` to ``source_pieces`` arrays, stacked over the source's ranks.

        Each array has a ``piece`` for each rank, along its first dimension. ``None`` if there is one piece, the rows
        themselves.
        """

    @abstractmethod
    def joining(self) -> Spmd | None:
        """The function from ``target_pieces`` arrays, each of ``received_aval``, to the tensor in ``target_aval``.

        ``None`` if there is one piece, the rows themselves.
        """

    @cached_property
    def received_aval(self) -> jax.ShapeDtypeStruct:
        """Global shape, dtype and sharding of each array that ``joining`` takes; ``target_aval`` if it is ``None``."""
        if not self.joining():
            return self.target_aval
        first, *trailing = self.piece
        sharding = self.target.sharding(self.target.spread.per_rank)
        return jax.ShapeDtypeStruct((len(self.target.ranks) * first, *trailing), self.aval.dtype, sharding=sharding)

    def _over_source(self, cut: Callable[[jax.Array], tuple[jax.Array, ...]]) -> Spmd:
        return Spmd(cut, self.source.mesh, self.source_end.spec, self.source.spread.per_rank)

    def _over_target(self, join: Callable[..., jax.Array]) -> Spmd:
        each = self.target.spread.per_rank
        return Spmd(join, self.target.mesh, each, self.target_end.spec, check_vma=False)


class PeerRouting(Routing):
    """Equal degrees: every rank sends its rows to its counterpart, without cutting or joining."""

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """One route for each source rank, to its counterpart."""
        return peer_routes(self.source_end.sharding, self.target_end.sharding)

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of a rank's whole shard."""
        return self.unit

    @property
    def source_pieces(self) -> int:
        """1, the whole shard."""
        return 1

    @property
    def target_pieces(self) -> int:
        """1, the whole shard."""
        return 1

    def cutting(self) -> None:
        """``None``: nothing is cut."""
        return None

    def joining(self) -> None:
        """``None``: nothing is joined."""
        return None


class LeaderRouting(Routing):
    """Units go from leader to leader, then are broadcast in the target's tp·cp group (tp if parts differ over cp)."""

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """One route for each unit, from a leader to a leader."""
        return leader_routes(self.source_end.sharding, self.target_end.sharding)

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of a unit."""
        return self.unit

    @property
    def source_pieces(self) -> int:
        """Number of units on a source rank."""
        return self.source_units

    @property
    def target_pieces(self) -> int:
        """Number of units on a target rank."""
        return self.target_units

    def cutting(self) -> Spmd | None:
        """The function from rows to their units; ``None`` if a source rank has one unit. See ``Routing.cutting``."""
        return self._over_source(self._cut) if self.source_units > 1 else None

    def joining(self) -> Spmd | None:
        """The function that broadcasts units in a target group and joins them; ``None`` for one unit on one rank.

        See ``Routing.joining``.
        """
        joins = self.target_units > 1 or self.target_end.sharding.width > 1
        return self._over_target(self._join) if joins else None

    def _cut(self, rows: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(self.as_units(rows))

    def _join(self, *pieces: jax.Array) -> jax.Array:
        return broadcast_from_leader(self.of_units(jnp.stack(pieces)), self.target_end.group)


class SlicedRouting(Routing):
    """Every rank of the target's tp·cp group receives its slices of each unit, and the group all-gathers.

    A unit is flattened, padded and cut into equal slices, at least one for every rank of either group, so that every
    link carries an equal share, rounded up. All ranks of the source's group send slices in turn.
    """

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """Routes of slices, such that every rank sends and every rank receives."""
        return sliced_routes(self.source_end.sharding, self.target_end.sharding)

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of a flat slice, ``(size,)``, with padding."""
        return (-(-math.prod(self.unit) // (self._slices_received * self.target_end.sharding.width)),)

    @property
    def source_pieces(self) -> int:
        """Largest number of slices that a source rank sends."""
        return self.source_units * self._slices_sent

    @property
    def target_pieces(self) -> int:
        """Number of slices that a target rank receives."""
        return self.target_units * self._slices_received

    @property
    def _slices_sent(self) -> int:
        return slices_sent(self.source_end.sharding, self.target_end.sharding)

    @property
    def _slices_received(self) -> int:
        return slices_received(self.source_end.sharding, self.target_end.sharding)

    def cutting(self) -> Spmd:
        """The function from rows to the slices that each source rank sends; see ``Routing.cutting``."""
        return self._over_source(self._cut)

    def joining(self) -> Spmd:
        """The function that all-gathers the slices of a target group, and joins them; see ``Routing.joining``."""
        return self._over_target(self._join)

    def _cut(self, rows: jax.Array) -> tuple[jax.Array, ...]:
        share, width, (size,) = self._slices_sent, self.source_end.sharding.width, self.piece
        flat_UE = self.as_units(rows).reshape(self.source_units, -1)
        padding = share * width * size - flat_UE.shape[1]
        slices_SWE = jnp.pad(flat_UE, ((0, 0), (0, padding))).reshape(self.source_pieces, width, size)
        me = lax.axis_index(self.source_end.group)
        return tuple(lax.dynamic_index_in_dim(slices_SWE, me, 1, keepdims=False))

    def _join(self, *pieces: jax.Array) -> jax.Array:
        slices_UE = jnp.stack(pieces).reshape(self.target_units, -1)
        flat_UE = lax.all_gather(slices_UE, self.target_end.group, axis=1, tiled=True)
        flat_UE = flat_UE[:, : math.prod(self.unit)]
        return self.of_units(flat_UE.reshape(self.target_units, *self.unit))


def make_routing(
    route: str,
    *,
    name: str,
    source: Submesh,
    target: Submesh,
    aval: jax.ShapeDtypeStruct,
    placements: tuple[Placement, Placement] = WHOLE_ROWS,
) -> Routing:
    """The routing for the setting ``route`` ("leader" or "sliced") between two stages.

    Stages of equal degrees need no leader: every rank sends its shard to its counterpart. Between groups of one rank a
    slice is a whole unit, so "sliced" is the same as "leader".

    Args:
      route: the value of ``World.route``.
      name: a name for messages, such as "vision->llm".
      source, target: the devices of the stages, such as ``Submesh.of(Layout(), (0,), devices)``.
      aval: global shape and dtype of the tensor, rows first.
      placements: how the stages at the two ends hold the tensor, "whole", "inside" or "listed" (see ``Placement``).

    Raises:
      ValueError: rows do not divide into the units of both ends, or stages of one module differ in degrees.
    """
    degrees = {End(submesh, placement).degrees for submesh, placement in zip((source, target), placements, strict=True)}
    routing_class = LeaderRouting
    if route == "sliced" and max(width for _, _, width in degrees) > 1:
        routing_class = SlicedRouting
    elif len(degrees) == 1:
        routing_class = PeerRouting
    return routing_class(name, source, target, aval, placements)
