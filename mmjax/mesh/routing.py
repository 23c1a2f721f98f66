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
    Units,
    leader_routes,
    peer_routes,
    sliced_routes,
    slices_kept,
    slices_sent,
)
from mmjax.mesh.spmd import Spmd
from mmjax.mesh.submesh import Submesh

Lies = Literal["whole", "inside", "listed"]
"""How a tensor lies at one end of a boundary: rows over dp and whole on every rank of cp; as the features of a module's
tokens, between two of its stages; or rows over dp, of which each rank of cp has the part that was listed for it."""
WHOLE: tuple[Lies, Lies] = ("whole", "whole")
INSIDE: tuple[Lies, Lies] = ("inside", "inside")
LISTED: tuple[Lies, Lies] = ("whole", "listed")
"""From the module that has the tokens to the one that reads them."""


@dataclass(frozen=True)
class End:
    """One end of a boundary."""

    submesh: Submesh
    lies: Lies

    @property
    def sharding(self) -> RowSharding:
        """How the tensor lies on the ranks."""
        one = self.submesh
        return {"whole": one.row_sharding, "inside": one.token_sharding, "listed": one.list_sharding}[self.lies]

    @property
    def spec(self) -> PartitionSpec:
        """Spec of the tensor."""
        spread = self.submesh.spread
        return spread.tokens if self.lies == "listed" else spread.activation(inside=self.lies == "inside")

    @property
    def group(self) -> tuple[str, ...]:
        """Axes over which ranks hold the same."""
        spread = self.submesh.spread
        return {"whole": spread.together, "inside": spread.replica, "listed": spread.alike}[self.lies]

    @property
    def degrees(self) -> tuple[int, int, int]:
        """Intervals of rows, parts of each, and the ranks that hold the same."""
        return self.sharding.dp, self.sharding.parts, self.sharding.width


@dataclass(frozen=True, eq=False)
class Routing(ABC):
    """One direction of a boundary for one tensor shape.

    Attributes:
      name: used in messages and program names.
      source, target: the stage submeshes.
      aval: shape ``[rows, ...]`` and dtype of the tensor.
      lies: how it lies at source and target.

    Raises:
      ValueError: for rows that do not divide into the units of both ends, or stages of one module that differ in
        degrees.
    """

    name: str
    source: Submesh
    target: Submesh
    aval: jax.ShapeDtypeStruct
    lies: tuple[Lies, Lies] = WHOLE

    def __post_init__(self) -> None:
        if self.lies == INSIDE:
            whole = [End(end.submesh, "whole").degrees for end in self.ends]
            degrees = [(own[0], end.degrees[0], own[2]) for own, end in zip(whole, self.ends, strict=True)]
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
        """How the tensor lies at the source."""
        return End(self.source, self.lies[0])

    @cached_property
    def target_end(self) -> End:
        """How the tensor lies at the target."""
        return End(self.target, self.lies[1])

    @property
    def ends(self) -> tuple[End, End]:
        """Source and target."""
        return self.source_end, self.target_end

    @cached_property
    def units(self) -> Units:
        """The units that the tensor is cut into; see ``routes``."""
        return Units.between(self.source_end.sharding, self.target_end.sharding)

    @property
    def source_units(self) -> int:
        """Number of units that a source rank holds."""
        return self.source_end.sharding.held(self.units.rows, self.units.parts)

    @property
    def target_units(self) -> int:
        """Number of units that a target rank holds."""
        return self.target_end.sharding.held(self.units.rows, self.units.parts)

    @property
    def unit(self) -> tuple[int, ...]:
        """Shape of a unit."""
        if self.lies == INSIDE:
            return self.source_aval.sharding.shard_shape(self.aval.shape)
        rows, *rest = self.aval.shape
        rest = [rest[0] // self.units.parts, *rest[1:]] if self.units.parts > 1 else rest
        return (rows // self.units.rows, *rest)

    @cached_property
    def source_aval(self) -> jax.ShapeDtypeStruct:
        """The tensor in the source's layout."""
        return self._placed(self.source_end)

    @cached_property
    def target_aval(self) -> jax.ShapeDtypeStruct:
        """The tensor in the target's layout."""
        return self._placed(self.target_end)

    def _placed(self, end: End) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.aval.shape, self.aval.dtype, sharding=end.submesh.sharding(end.spec))

    def as_units(self, x: jax.Array) -> jax.Array:
        """The units of a source rank's shard, ``[units, *unit]``, by rows and then by parts."""
        row, *rest = self.unit
        shared = self.units.parts // self.source_end.sharding.parts  # parts that the rank has of each row
        if shared == 1:
            return x.reshape(self.source_units, row, *rest)
        split = x.reshape(self.source_units // shared, row, shared, *rest)
        return jnp.moveaxis(split, 2, 1).reshape(self.source_units, row, *rest)

    def of_units(self, units: jax.Array) -> jax.Array:
        """A target rank's shard from its units, ``[units, *unit]``."""
        row, *rest = self.unit
        shared = self.units.parts // self.target_end.sharding.parts
        if shared == 1:
            return units.reshape(self.target_units * row, *rest)
        split = jnp.moveaxis(units.reshape(self.target_units // shared, shared, row, *rest), 1, 2)
        return split.reshape(self.target_units // shared * row, shared * rest[0], *rest[1:])

    # ---- pieces ------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def routes(self) -> tuple[Route, ...]:
        """Which piece of a source rank becomes which piece of a target rank."""

    @property
    @abstractmethod
    def piece(self) -> tuple[int, ...]:
        """Shape of a piece, the same for all."""

    @property
    @abstractmethod
    def sent(self) -> int:
        """Number of pieces that the rows of a source rank are cut into."""

    @property
    @abstractmethod
    def kept(self) -> int:
        """Number of pieces that the rows of a target rank are joined from."""

    # ---- programs ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def cutting(self) -> Spmd | None:
        """Function from rows to ``sent`` arrays, stacked over the source's ranks; ``None`` where the only piece is the
        rows."""

    @abstractmethod
    def joining(self) -> Spmd | None:
        """Function from ``kept`` arrays, stacked over the target's ranks, to rows; ``None`` where the only piece is the
        rows."""

    @cached_property
    def received_aval(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of each of the arrays that ``joining`` takes; of the rows where it is ``None``."""
        if not self.joining():
            return self.target_aval
        first, *rest = self.piece
        sharding = self.target.sharding(self.target.spread.each)
        return jax.ShapeDtypeStruct((len(self.target.ranks) * first, *rest), self.aval.dtype, sharding=sharding)

    def _over_source(self, cut: Callable[[jax.Array], tuple[jax.Array, ...]]) -> Spmd:
        return Spmd(cut, self.source.mesh, self.source_end.spec, self.source.spread.each)

    def _over_target(self, join: Callable[..., jax.Array]) -> Spmd:
        each = self.target.spread.each
        return Spmd(join, self.target.mesh, each, self.target_end.spec, check_vma=False)


class PeerRouting(Routing):
    """Equal degrees: every rank hands its rows to its counterpart; nothing to cut or join."""

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        return peer_routes(self.source_end.sharding, self.target_end.sharding)

    @property
    def piece(self) -> tuple[int, ...]:
        return self.unit

    @property
    def sent(self) -> int:
        return 1

    @property
    def kept(self) -> int:
        return 1

    def cutting(self) -> None:
        return None

    def joining(self) -> None:
        return None


class LeaderRouting(Routing):
    """Units go from leader to leader, then through the target's tp·cp group, or tp group where parts differ over cp."""

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        return leader_routes(self.source_end.sharding, self.target_end.sharding)

    @property
    def piece(self) -> tuple[int, ...]:
        return self.unit

    @property
    def sent(self) -> int:
        return self.source_units

    @property
    def kept(self) -> int:
        return self.target_units

    def cutting(self) -> Spmd | None:
        return self._over_source(self._cut) if self.source_units > 1 else None

    def joining(self) -> Spmd | None:
        joins = self.target_units > 1 or self.target_end.sharding.width > 1
        return self._over_target(self._join) if joins else None

    def _cut(self, rows: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(self.as_units(rows))

    def _join(self, *pieces: jax.Array) -> jax.Array:
        return broadcast_from_leader(self.of_units(jnp.stack(pieces)), self.target_end.group)


class SlicedRouting(Routing):
    """Every rank of the target's tp·cp group receives its slices of each unit, and the group all-gathers.

    A unit is flattened, padded and cut into equal slices, at least one for every rank of either group, so that every
    rail carries an equal share, rounded up. Slices come from all ranks of the source's group in turn.
    """

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        return sliced_routes(self.source_end.sharding, self.target_end.sharding)

    @property
    def piece(self) -> tuple[int, ...]:
        return (-(-math.prod(self.unit) // (self._kept * self.target_end.sharding.width)),)

    @property
    def sent(self) -> int:
        return self.source_units * self._sent

    @property
    def kept(self) -> int:
        return self.target_units * self._kept

    @property
    def _sent(self) -> int:
        return slices_sent(self.source_end.sharding, self.target_end.sharding)

    @property
    def _kept(self) -> int:
        return slices_kept(self.source_end.sharding, self.target_end.sharding)

    def cutting(self) -> Spmd:
        return self._over_source(self._cut)

    def joining(self) -> Spmd:
        return self._over_target(self._join)

    def _cut(self, rows: jax.Array) -> tuple[jax.Array, ...]:
        share, width, (size,) = self._sent, self.source_end.sharding.width, self.piece
        flat_UE = self.as_units(rows).reshape(self.source_units, -1)
        padding = share * width * size - flat_UE.shape[1]
        slices_SWE = jnp.pad(flat_UE, ((0, 0), (0, padding))).reshape(self.sent, width, size)
        me = lax.axis_index(self.source_end.group)
        return tuple(lax.dynamic_index_in_dim(slices_SWE, me, 1, keepdims=False))

    def _join(self, *pieces: jax.Array) -> jax.Array:
        own_UE = jnp.stack(pieces).reshape(self.target_units, -1)
        flat_UE = lax.all_gather(own_UE, self.target_end.group, axis=1, tiled=True)
        flat_UE = flat_UE[:, : math.prod(self.unit)]
        return self.of_units(flat_UE.reshape(self.target_units, *self.unit))


def make_routing(
    route: str,
    name: str,
    source: Submesh,
    target: Submesh,
    aval: jax.ShapeDtypeStruct,
    lies: tuple[Lies, Lies] = WHOLE,
) -> Routing:
    """The routing that ``route`` (``leader`` or ``sliced``) means between two stages.

    Between stages of equal degrees no leader is needed: the ranks of a group hold the same, and each hands it to its
    counterpart. Between groups of one rank a slice is the whole unit, so sliced is leader.
    """
    degrees = {End(submesh, own).degrees for submesh, own in zip((source, target), lies, strict=True)}
    made = LeaderRouting
    if route == "sliced" and max(width for _, _, width in degrees) > 1:
        made = SlicedRouting
    elif len(degrees) == 1:
        made = PeerRouting
    return made(name, source, target, aval, lies)
