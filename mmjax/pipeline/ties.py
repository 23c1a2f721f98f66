"""Ties: a weight that one stage owns and another stage of its module uses too, such as a tied embedding.

Once a step the owner's master shards are sent to the borrower, which prepares its compute weight from them, and the
borrower's reduced gradient shards are sent back. Both stages have equal degrees, so every rank has one counterpart.
"""

from __future__ import annotations

from typing import Any

import jax

from mmjax.mesh.boundary import Boundary
from mmjax.mesh.layout import Layout
from mmjax.mesh.spmd import Program
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.transfer import Transfer
from mmjax.mesh.world import World


class Tie:
    """The two directions of one tied weight.

    Attributes:
      forward: master shards, owner to borrower.
      backward: gradient shards, borrower to owner.
    """

    def __init__(
        self, name: str, *, owned: Any, borrowed: Any, ends: tuple[Submesh, Submesh], world: World, transport: str
    ):
        """Plans the routes, rank to rank.

        Args:
          name: name of the weight.
          owned, borrowed: avals of its shards on both stages: same shape and dtype, equal shardings on other devices.
          ends: the owner's and the borrower's submesh.
          world: the devices.
          transport: see ``Boundary``.
        """
        # A boundary between flat submeshes, on which each rank's shard is an interval of rows.
        source, target = (world.submesh(Layout(dp=len(end.ranks), rank_offset=end.ranks[0]), 0) for end in ends)
        rows, *trailing = owned.sharding.shard_shape(owned.shape)
        blocks = jax.ShapeDtypeStruct((rows * len(source.ranks), *trailing), owned.dtype)
        boundary = Boundary(name, source, target, blocks, world, transport)
        self.forward = TieTransfer(boundary.forward, borrowed)
        self.backward = TieTransfer(boundary.backward, owned)


class TieTransfer:
    """One direction: a transfer of one block per rank between arrays of any sharding over the same ranks.

    ``blocks`` transfers arrays with one block per rank; ``target_aval`` is the result of ``unpack``.
    """

    def __init__(self, blocks: Transfer, target_aval: Any):
        self.blocks, self.target, self.target_aval = blocks, blocks.target, target_aval

    def pack(self, x: jax.Array) -> Any:
        """Reads every shard of the sender's array as its rank's block.

        The owner's update donates its master shards, so a copy is sent where they may be read after that.
        """
        return self.blocks.pack(_relabelled(x, self.blocks.source_aval, copies=self.blocks.reads_later))

    def move(self, packed: Any) -> Any:
        """Carries the result of ``pack`` to the other stage's devices."""
        return self.blocks.move(packed)

    def unpack(self, moved: Any) -> jax.Array:
        """Reads every block of the result of ``move`` as its rank's shard: the receiver's array, of ``target_aval``."""
        return _relabelled(self.blocks.unpack(moved), self.target_aval)

    def programs(self) -> list[Program]:
        """Programs that have to be compiled."""
        return self.blocks.programs()


def _relabelled(x: jax.Array, aval: Any, *, copies: bool = False) -> jax.Array:
    """An array of another aval with the same shards, rank by rank, or with copies of them."""
    shards = [shard.data for shard in x.addressable_shards]
    if copies:
        shards = [jax.device_put(shard, shard.sharding, may_alias=False) for shard in shards]
    return jax.make_array_from_single_device_arrays(aval.shape, aval.sharding, shards, dtype=aval.dtype)
