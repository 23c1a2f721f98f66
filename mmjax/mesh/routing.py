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

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from mmjax.mesh.collectives import broadcast_from_leader
from mmjax.mesh.routes import (
    Route,
    RowSharding,
    leader_routes,
    peer_routes,
    sliced_routes,
    slices_kept,
    slices_sent,
    units,
)
from mmjax.mesh.spmd import Spmd
from mmjax.mesh.submesh import Submesh


@dataclass(frozen=True, eq=False)
class Routing(ABC):
    """One direction of a boundary for one tensor shape.

    Attributes:
      name: used in messages and program names.
      source, target: the stage submeshes.
      aval: shape ``[rows, ...]`` and dtype of the tensor.
      inside: whether both stages are of one module: then rows ``[rows, positions, ...]`` lie as its tokens do. Between
        modules they are whole on every rank of cp.

    Raises:
      ValueError: for rows that do not divide into the units of both dp, or stages of one module that differ in degrees.
    """

    name: str
    source: Submesh
    target: Submesh
    aval: jax.ShapeDtypeStruct
    inside: bool = False

    def __post_init__(self) -> None:
        if self.inside:
            degrees = [(end.row_sharding.dp, end.token_sharding.dp, end.row_sharding.width) for end in self.ends]
            if degrees[0] != degrees[1]:
                raise ValueError(f"{self.name}: stages of one module with the degrees {degrees[0]} and {degrees[1]}")
            return
        if self.aval.shape[0] % self.units:
            raise ValueError(
                f"{self.name}: {self.aval.shape[0]} rows do not divide into {self.units} equal intervals; pad the rows"
            )

    # ---- rows --------------------------------------------------------------------------------------------------------

    @property
    def ends(self) -> tuple[Submesh, Submesh]:
        """Source and target."""
        return self.source, self.target

    def sharding(self, end: Submesh) -> RowSharding:
        """How the tensor lies on the ranks of one end."""
        return end.token_sharding if self.inside else end.row_sharding

    def spec(self, end: Submesh) -> PartitionSpec:
        """Spec of the tensor at one end."""
        return end.spread.activation(inside=self.inside)

    def group(self, end: Submesh) -> tuple[str, ...]:
        """Axes over which the ranks of one end hold the same."""
        return end.spread.replica if self.inside else end.spread.together

    @property
    def units(self) -> int:
        """Number of units that the rows are cut into; see ``routes``."""
        return units(self.sharding(self.source).dp, self.sharding(self.target).dp)

    @property
    def source_units(self) -> int:
        """Number of units that a source rank holds."""
        return self.units // self.sharding(self.source).dp

    @property
    def target_units(self) -> int:
        """Number of units that a target rank holds."""
        return self.units // self.sharding(self.target).dp

    @property
    def unit(self) -> tuple[int, ...]:
        """Shape of a unit."""
        if self.inside:
            return self.source_aval.sharding.shard_shape(self.aval.shape)
        return (self.aval.shape[0] // self.units, *self.aval.shape[1:])

    @cached_property
    def source_aval(self) -> jax.ShapeDtypeStruct:
        """The tensor in the source's layout."""
        return self._placed(self.source)

    @cached_property
    def target_aval(self) -> jax.ShapeDtypeStruct:
        """The tensor in the target's layout."""
        return self._placed(self.target)

    def _placed(self, submesh: Submesh) -> jax.ShapeDtypeStruct:
        sharding = submesh.sharding(self.spec(submesh))
        return jax.ShapeDtypeStruct(self.aval.shape, self.aval.dtype, sharding=sharding)

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
        return Spmd(cut, self.source.mesh, self.spec(self.source), self.source.spread.each)

    def _over_target(self, join: Callable[..., jax.Array]) -> Spmd:
        each = self.target.spread.each
        return Spmd(join, self.target.mesh, each, self.spec(self.target), check_vma=False)


class PeerRouting(Routing):
    """Equal degrees: every rank hands its rows to its counterpart; nothing to cut or join."""

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        return peer_routes(self.sharding(self.source), self.sharding(self.target))

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
    """Units go from leader to leader, then through the target's tp·cp group."""

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        return leader_routes(self.sharding(self.source), self.sharding(self.target))

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
        joins = self.target_units > 1 or self.sharding(self.target).width > 1
        return self._over_target(self._join) if joins else None

    def _cut(self, rows: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.split(rows, self.source_units))

    def _join(self, *pieces: jax.Array) -> jax.Array:
        return broadcast_from_leader(jnp.concatenate(pieces), self.group(self.target))


class SlicedRouting(Routing):
    """Every rank of the target's tp·cp group receives its slices of each unit, and the group all-gathers.

    A unit is flattened, padded and cut into equal slices, at least one for every rank of either group, so that every
    rail carries an equal share, rounded up. Slices come from all ranks of the source's group in turn.
    """

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        return sliced_routes(self.sharding(self.source), self.sharding(self.target))

    @property
    def piece(self) -> tuple[int, ...]:
        return (-(-math.prod(self.unit) // (self._kept * self.sharding(self.target).width)),)

    @property
    def sent(self) -> int:
        return self.source_units * self._sent

    @property
    def kept(self) -> int:
        return self.target_units * self._kept

    @property
    def _sent(self) -> int:
        return slices_sent(self.sharding(self.source), self.sharding(self.target))

    @property
    def _kept(self) -> int:
        return slices_kept(self.sharding(self.source), self.sharding(self.target))

    def cutting(self) -> Spmd:
        return self._over_source(self._cut)

    def joining(self) -> Spmd:
        return self._over_target(self._join)

    def _cut(self, rows: jax.Array) -> tuple[jax.Array, ...]:
        share, width, (size,) = self._sent, self.sharding(self.source).width, self.piece
        flat_UE = rows.reshape(self.source_units, -1)
        padding = share * width * size - flat_UE.shape[1]
        slices_SWE = jnp.pad(flat_UE, ((0, 0), (0, padding))).reshape(self.sent, width, size)
        me = lax.axis_index(self.group(self.source))
        return tuple(lax.dynamic_index_in_dim(slices_SWE, me, 1, keepdims=False))

    def _join(self, *pieces: jax.Array) -> jax.Array:
        own_UE = jnp.stack(pieces).reshape(self.target_units, -1)
        flat_UE = lax.all_gather(own_UE, self.group(self.target), axis=1, tiled=True)
        flat_UE = flat_UE[:, : math.prod(self.unit)]
        return flat_UE.reshape(self.target_units * self.unit[0], *self.unit[1:])


def make_routing(
    route: str, name: str, source: Submesh, target: Submesh, aval: jax.ShapeDtypeStruct, *, inside: bool = False
) -> Routing:
    """The routing that ``route`` (``leader`` or ``sliced``) means between two stages.

    Between stages of equal dp and width no leader is needed: the ranks of a group hold the same rows, and each hands
    them to its counterpart. Between groups of one rank a slice is the whole unit, so sliced is leader.
    """
    shardings = [end.token_sharding if inside else end.row_sharding for end in (source, target)]
    degrees = {(sharding.dp, sharding.width) for sharding in shardings}
    made = LeaderRouting
    if route == "sliced" and max(width for _, width in degrees) > 1:
        made = SlicedRouting
    elif len(degrees) == 1:
        made = PeerRouting
    return made(name, source, target, aval, inside)
