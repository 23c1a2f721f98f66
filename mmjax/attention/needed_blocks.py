"""Exchange of the blocks of keys and values that the queries of each rank may see.

There is one transfer for each distance between sender and receiver, since the number of needed blocks depends on the
distance: packed rows and windows reach a neighbour or two. Shapes are static, so each transfer has a few possible
sizes, and all ranks use the same one. The device chooses it; or the host, by the segments, the distances over which all
blocks travel (see ``reach``).

Shapes: B rows, R ranks, T tokens of a rank, N blocks of t tokens of a rank, M blocks of a transfer, G key/value heads,
K head width (local to this rank's part of tp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from mmjax import jax_compat
from mmjax.attention.mask import Mask, MaskInputs, bounds
from mmjax.attention.tokens import pad_to_multiple, take_per_row

BLOCK = 128
"""The maximal number of tokens of a block."""
MIN_BLOCKS = 8
"""The minimal number of a rank's blocks, if it has as many tokens: larger blocks nearly all hold a visible key."""
_SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)
"""Possible sizes of a transfer, as shares of a rank's blocks; the needed blocks are rounded up to one of these."""

NeededBlocks = Bool[Array, "B R R N"]
"""Whether a block is needed, by the rank that needs it, the rank that has it, and its index there."""


def transfer_sizes(blocks: int) -> tuple[int, ...]:
    """Possible numbers of blocks of a transfer, ascending, where a rank has so many: (0, 1, 2, 4, 8) for 8."""
    return tuple(sorted({int(np.ceil(share * blocks)) for share in _SHARES}))


def size_indices(max_R: Int[Array, " R"], blocks: int) -> Int[Array, " R"]:
    """The index in ``transfer_sizes(blocks)`` of the transfer over each distance.

    ``max_R`` has the number of needed blocks by distance, as ``max_by_distance`` gives it: [0, 3, 8] becomes [0, 3, 4]
    for 8 blocks, whose sizes are (0, 1, 2, 4, 8). A number between two sizes is rounded up.
    """
    return jnp.searchsorted(np.array(transfer_sizes(blocks)), max_R).astype(jnp.int32)


def received_blocks(max_R: Int[np.ndarray, " R"], blocks: int) -> int:
    """The number of blocks that a rank receives from all others, where each rank has ``blocks`` of them.

    ``max_R`` has the number of needed blocks by distance, as ``max_by_distance`` gives it; entry 0 does not count. Each
    transfer is rounded up to one of ``transfer_sizes``: [0, 3, 8] needs 4 + 8 = 12, for 8 blocks a rank.
    """
    return int(np.array(transfer_sizes(blocks))[np.asarray(size_indices(jnp.asarray(max_R), blocks))][1:].sum())


def block_size(tokens: int) -> int:
    """The number of tokens of a block, where a rank has ``tokens`` tokens of a row: at most ``BLOCK``, such as 125 for
    1000.

    It is ``tokens`` divided by the least number of blocks, ``MIN_BLOCKS`` or more, and rounded up; the last may be
    shorter.
    """
    count = min(tokens, max(MIN_BLOCKS, -(-tokens // BLOCK)))
    return -(-tokens // count)


def needed_blocks(mask: Mask, mask_inputs: MaskInputs, ranks: int) -> NeededBlocks:
    """Whether each rank needs each block of each other rank.

    Args:
      mask: the attention mask, such as ``Mask("causal")``.
      mask_inputs: the mask's inputs ``[B, S]`` of all tokens of the rows, in the order of the ranks, such as
        ``mask.inputs(tokens)``.
      ranks: the number of ranks; it divides S.

    Returns:
      Booleans ``[B, R, R, N]`` by row, needing rank, holding rank and the block's index there; False for a rank's own
        blocks. A block has ``block_size(S / ranks)`` tokens.
    """
    tokens = mask_inputs.segments.shape[1] // ranks
    size = block_size(tokens)

    def padded(x: Array) -> Array:
        x_BRT = pad_to_multiple(x.reshape(x.shape[0], ranks, tokens, *x.shape[2:]), size, axis=2)
        return x_BRT.reshape(x.shape[0], -1, *x.shape[2:])

    mask_inputs = mask_inputs._replace(segments=_renumber_segments(mask_inputs.segments))
    block_bounds = bounds(jax.tree.map(padded, mask_inputs), size)
    needed = mask.may_allow(block_bounds, block_bounds)
    count = needed.shape[1] // ranks
    needed = needed.reshape(-1, ranks, count, ranks, count).any(axis=2)
    return needed & ~jnp.eye(ranks, dtype=bool)[:, :, None]


def _renumber_segments(segments_BS: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Renumbers segments by their first tokens, so that a rank's segments are one range: bounds are tight then."""
    numbers_S = jnp.arange(1, segments_BS.shape[1] + 1, dtype=jnp.int32)

    def of_row(segments_S: Array) -> Array:
        segments_S = jnp.minimum(segments_S, len(numbers_S))
        no_number_S = jnp.full(len(numbers_S) + 1, len(numbers_S) + 1, jnp.int32)
        first_S, segments_S, number_S = jax_compat.alike(no_number_S, segments_S, numbers_S)
        first_S = first_S.at[segments_S].min(number_S)
        return jnp.where(segments_S > 0, first_S[segments_S], 0)

    return jax.vmap(of_row)(segments_BS)


def max_by_distance(needed_BRRN: NeededBlocks) -> Int[Array, " R"]:
    """The maximal number of blocks that any rank needs, in any row, of the rank at each distance before it.

    ``needed_BRRN`` is a result of ``needed_blocks``: booleans by row, needing rank, holding rank and block. Entry d of
    the int32 result is about rank r - d, modulo R, for all r; entry 0 is 0. The result is typed as equal on all
    devices.
    """
    counts_RR = needed_BRRN.sum(axis=-1, dtype=jnp.int32).max(axis=0)
    ranks = jnp.arange(len(counts_RR))
    max_R = jnp.stack([counts_RR[ranks, ranks - distance].max() for distance in range(len(counts_RR))])
    # A ppermute involves all devices of a program, so devices with other rows have to send as many blocks.
    axes = tuple(sorted(jax_compat.varying_axes(max_R)))
    return lax.pmax(max_R, axes) if axes else max_R


@dataclass(frozen=True)
class NeededBlocksExchange:
    """All-gather and reduce-scatter that transfer needed blocks alone.

    Attributes:
      axes: the mesh axes that number the ranks.
      needed_BRRN: the result of ``needed_blocks``, equal on all ranks.
      max_R: the result of ``max_by_distance``, for sizes that the device chooses.
      distances: the distances over which blocks travel, all of a rank's; ``None`` where the device chooses sizes.
    """

    axes: tuple[str, ...]
    needed_BRRN: NeededBlocks
    max_R: Int[Array, " R"]
    distances: tuple[int, ...] | None = None

    def all_gather(self, tree: Any) -> Any:
        """Complete rows ``[B, R·T, ...]`` from each rank's ``[B, T, ...]``, for each array of a tree.

        A block that this rank does not need may be 0.
        """
        collective = partial(lax.all_gather, axis_name=self.axes, axis=1, tiled=True)
        return self._whole_or_blocks(collective, partial(jax.tree.map, self._gather), tree)

    def reduce_scatter(self, tree: Any) -> Any:
        """This rank's tokens ``[B, T, ...]`` of the sum over the ranks of complete rows ``[B, R·T, ...]``, for each
        array of a tree.

        The blocks that a rank does not need are 0 in its rows.
        """
        collective = partial(lax.psum_scatter, axis_name=self.axes, scatter_dimension=1, tiled=True)
        return self._whole_or_blocks(collective, partial(jax.tree.map, self._reduce), tree)

    def _whole_or_blocks(self, collective: Callable[[Any], Any], by_blocks: Callable[[Any], Any], tree: Any) -> Any:
        """Applies ``collective`` to the tree if every transfer has all blocks, and otherwise ``by_blocks``."""
        if self.distances is None:
            return lax.cond(self._all_travel, collective, by_blocks, tree)
        return collective(tree) if len(self.distances) == self._ranks - 1 else by_blocks(tree)

    @property
    def _ranks(self) -> int:
        return self.needed_BRRN.shape[1]

    @property
    def _blocks(self) -> int:
        return self.needed_BRRN.shape[3]

    @property
    def _all_travel(self) -> Array:
        """Whether every transfer has all blocks: then one collective is faster."""
        return jnp.all(size_indices(self.max_R[1:], self._blocks) == len(transfer_sizes(self._blocks)) - 1)

    def _gather(self, x_BT: Array) -> Array:
        rank, tokens = lax.axis_index(self.axes), x_BT.shape[1]
        local_BNt = self._split_into_blocks(x_BT)
        rows_BRNt = jnp.zeros_like(local_BNt, shape=(local_BNt.shape[0], self._ranks, *local_BNt.shape[1:]))
        rows_BRNt = lax.dynamic_update_index_in_dim(*jax_compat.alike(rows_BRNt, local_BNt), rank, 1)

        def receive(distance: int, size: int, rows_BRNt: Array) -> Array:
            to, source = (rank + distance) % self._ranks, (rank - distance) % self._ranks
            blocks_BMt = take_per_row(local_BNt, self._order_of_blocks(to, rank)[:, :size])
            received_BNt = self._to_block_positions(self._shift(blocks_BMt, distance), source=source, to=rank)
            return lax.dynamic_update_index_in_dim(rows_BRNt, received_BNt, source, 1)

        rows_BRNt = self._by_distance(receive, rows_BRNt)
        rows_BRT = rows_BRNt.reshape(*rows_BRNt.shape[:2], -1, *x_BT.shape[2:])[:, :, :tokens]
        return rows_BRT.reshape(x_BT.shape[0], -1, *x_BT.shape[2:])

    def _reduce(self, d_BS: Array) -> Array:
        rank, tokens = lax.axis_index(self.axes), d_BS.shape[1] // self._ranks
        d_BRT = d_BS.reshape(d_BS.shape[0], self._ranks, tokens, *d_BS.shape[2:])

        def blocks_of_rank(rank: Array) -> Array:
            return self._split_into_blocks(lax.dynamic_index_in_dim(d_BRT, rank, 1, keepdims=False))

        def reduce_from(distance: int, size: int, sum_BNt: Array) -> Array:
            to, source = (rank + distance) % self._ranks, (rank - distance) % self._ranks
            blocks_BMt = take_per_row(blocks_of_rank(source), self._order_of_blocks(rank, source)[:, :size])
            return sum_BNt + self._to_block_positions(self._shift(blocks_BMt, -distance), source=rank, to=to)

        sum_BNt = self._by_distance(reduce_from, blocks_of_rank(rank))
        return sum_BNt.reshape(d_BS.shape[0], -1, *d_BS.shape[2:])[:, :tokens]

    def _by_distance(self, step: Callable[[int, int, Array], Array], x: Array) -> Array:
        """Applies ``step(distance, size, x)`` for each distance with its transfer's size, unless that is 0."""
        if self.distances is not None:
            for distance in self.distances:
                x = step(distance, self._blocks, x)
            return x
        index_R = size_indices(self.max_R, self._blocks)
        for distance in range(1, self._ranks):
            steps = [partial(step, distance, size) if size else lambda x: x for size in transfer_sizes(self._blocks)]
            x = lax.switch(index_R[distance], steps, x)
        return x

    def _shift(self, x: Array, distance: int) -> Array:
        """The array of the rank at this distance before this one."""
        routes = [(rank, (rank + distance) % self._ranks) for rank in range(self._ranks)]
        return lax.ppermute(x, self.axes, routes)

    def _needed_between(self, to: Array, source: Array) -> Bool[Array, "B N"]:
        """Whether the rank ``to`` needs each block of the rank ``source``."""
        by_source = lax.dynamic_index_in_dim(self.needed_BRRN, to, 1, keepdims=False)
        return lax.dynamic_index_in_dim(by_source, source, 1, keepdims=False)

    def _order_of_blocks(self, to: Array, source: Array) -> Int[Array, "B N"]:
        """The indices of the source's blocks: first the needed ones in order, then the others."""
        return jnp.argsort(~self._needed_between(to, source), axis=-1, stable=True)

    def _to_block_positions(self, blocks_BMt: Array, *, source: Array, to: Array) -> Array:
        """``[B, N, t, ...]`` with the transferred blocks at their indices in the source; 0 for blocks not needed."""
        needed_BN = self._needed_between(to, source)
        indices_BN = jnp.maximum(jnp.cumsum(needed_BN, axis=-1) - 1, 0)
        blocks_BNt = take_per_row(blocks_BMt, indices_BN)
        return jnp.where(needed_BN.reshape(*needed_BN.shape, *[1] * (blocks_BMt.ndim - 2)), blocks_BNt, 0)

    def _split_into_blocks(self, x_BT: Array) -> Array:
        """``[B, T, ...]`` as ``[B, N, t, ...]``, padded with zeros."""
        x_BT = pad_to_multiple(x_BT, block_size(x_BT.shape[1]))
        return x_BT.reshape(x_BT.shape[0], self._blocks, -1, *x_BT.shape[2:])
