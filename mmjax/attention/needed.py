"""Blocks of keys and values that each rank needs of the others: those that its queries may see, and how they travel.

A rank sends to each distance along the ranks by itself, since what is needed differs by distance: packed rows and
windows reach a neighbour or two. Shapes are static, so each distance has a few sizes, and all ranks take the same one.

Shapes: B rows, R ranks, T tokens of a rank, N blocks of t tokens of a rank, G key/value heads, K head width (local to
this rank's part of tp). Needed blocks are by the rank that needs them, the rank that has them, and their number.
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
from mmjax.attention.mask import Columns, Mask, bounds
from mmjax.attention.tokens import filled, picked

BLOCK = 128
"""The most tokens of a block."""
FEWEST = 8
"""Blocks of a rank that has as many tokens: with fewer, nearly every block holds something that is seen."""
SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)
"""Shares of a rank's blocks that may travel to a distance: those that are needed, rounded up to one of these."""

Needed = Bool[Array, "B R R N"]


def sizes(blocks: int) -> tuple[int, ...]:
    """Numbers of a rank's blocks that may travel to a distance."""
    return tuple(sorted({int(np.ceil(share * blocks)) for share in SHARES}))


def choices(most_R: Int[Array, " R"], blocks: int) -> Int[Array, " R"]:
    """Which of the ``sizes`` travels to each distance, where the most that is needed there is given."""
    return jnp.searchsorted(np.array(sizes(blocks)), most_R).astype(jnp.int32)


def received_blocks(most_R: Int[np.ndarray, " R"], blocks: int) -> int:
    """Blocks that a rank receives, of all ranks of which each has so many."""
    return int(np.array(sizes(blocks))[np.asarray(choices(jnp.asarray(most_R), blocks))][1:].sum())


def block_size(tokens: int) -> int:
    """Tokens of a block where a rank has so many; the last block of a rank may be shorter."""
    count = min(tokens, max(FEWEST, -(-tokens // BLOCK)))
    return -(-tokens // count)


def needed_blocks(mask: Mask, columns: Columns, ranks: int) -> Needed:
    """The blocks that each rank needs of each other one, from what the mask reads of all tokens of rows."""
    tokens = columns.segments.shape[1] // ranks
    size = block_size(tokens)

    def padded(x: Array) -> Array:
        by_rank = filled(x.reshape(x.shape[0], ranks, tokens, *x.shape[2:]), size, axis=2)
        return by_rank.reshape(x.shape[0], -1, *x.shape[2:])

    columns = columns._replace(segments=_by_place(columns.segments))
    ends = bounds(jax.tree.map(padded, columns), size)
    met = mask.may_meet(ends, ends)
    count = met.shape[1] // ranks
    met = met.reshape(-1, ranks, count, ranks, count).any(axis=2)
    return met & ~jnp.eye(ranks, dtype=bool)[:, :, None]


def _by_place(segments_BS: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Segments numbered by their first places, so that those of a rank are side by side, as bounds want them."""
    places_S = jnp.arange(1, segments_BS.shape[1] + 1, dtype=jnp.int32)

    def of_row(segments_S: Array) -> Array:
        segments_S = jnp.minimum(segments_S, len(places_S))
        none_S = jnp.full(len(places_S) + 1, len(places_S) + 1, jnp.int32)
        first_S, segments_S, own_S = jax_compat.alike(none_S, segments_S, places_S)
        first_S = first_S.at[segments_S].min(own_S)
        return jnp.where(segments_S > 0, first_S[segments_S], 0)

    return jax.vmap(of_row)(segments_BS)


def most_by_distance(needed_BRRN: Needed) -> Int[Array, " R"]:
    """The most blocks that any rank needs of the rank so far before it, in any row; typed as equal on all devices."""
    counts_RR = needed_BRRN.sum(axis=-1, dtype=jnp.int32).max(axis=0)
    ranks = jnp.arange(len(counts_RR))
    most_R = jnp.stack([counts_RR[ranks, ranks - distance].max() for distance in range(len(counts_RR))])
    # A permutation waits for all devices of a program, so those with other rows have to send as much.
    axes = tuple(sorted(jax_compat.varying_axes(most_R)))
    return lax.pmax(most_R, axes) if axes else most_R


@dataclass(frozen=True)
class Need:
    """How needed blocks come to the ranks, and the gradients of these go home.

    Attributes:
      axes: the mesh axes that number the ranks.
      needed_BRRN: see ``needed_blocks``, equal on all ranks.
      most_R: see ``most_by_distance``.
    """

    axes: tuple[str, ...]
    needed_BRRN: Needed
    most_R: Int[Array, " R"]

    def gathered(self, tree: Any) -> Any:
        """Whole rows ``[B, R·T, ...]`` of this rank's parts ``[B, T, ...]``; what is not needed is 0 or what it is."""
        whole = partial(lax.all_gather, axis_name=self.axes, axis=1, tiled=True)
        return lax.cond(self._all, whole, partial(jax.tree.map, self._brought), tree)

    def scattered(self, tree: Any) -> Any:
        """This rank's part of the sum of whole rows over the ranks; what is not needed of them is 0."""
        whole = partial(lax.psum_scatter, axis_name=self.axes, scatter_dimension=1, tiled=True)
        return lax.cond(self._all, whole, partial(jax.tree.map, self._home), tree)

    @property
    def _ranks(self) -> int:
        return self.needed_BRRN.shape[1]

    @property
    def _blocks(self) -> int:
        return self.needed_BRRN.shape[3]

    @property
    def _all(self) -> Array:
        """Whether all blocks would travel to all distances: one collective is better at that."""
        return jnp.all(choices(self.most_R[1:], self._blocks) == len(sizes(self._blocks)) - 1)

    def _brought(self, x_BT: Array) -> Array:
        me, tokens = lax.axis_index(self.axes), x_BT.shape[1]
        own_BNt = self._blocked(x_BT)
        rows_BRNt = jnp.zeros_like(own_BNt, shape=(own_BNt.shape[0], self._ranks, *own_BNt.shape[1:]))
        rows_BRNt = lax.dynamic_update_index_in_dim(*jax_compat.alike(rows_BRNt, own_BNt), me, 1)

        def bring(distance: int, size: int, rows_BRNt: Array) -> Array:
            to, source = (me + distance) % self._ranks, (me - distance) % self._ranks
            sent = picked(own_BNt, self._listed(to, me)[:, :size])
            found_BNt = self._placed(self._sent(sent, distance), source=source, to=me)
            return lax.dynamic_update_index_in_dim(rows_BRNt, found_BNt, source, 1)

        rows_BRNt = self._by_distance(bring, rows_BRNt)
        rows_BRT = rows_BRNt.reshape(*rows_BRNt.shape[:2], -1, *x_BT.shape[2:])[:, :, :tokens]
        return rows_BRT.reshape(x_BT.shape[0], -1, *x_BT.shape[2:])

    def _home(self, d_BS: Array) -> Array:
        me, tokens = lax.axis_index(self.axes), d_BS.shape[1] // self._ranks
        d_BRT = d_BS.reshape(d_BS.shape[0], self._ranks, tokens, *d_BS.shape[2:])
        of = lambda rank: self._blocked(lax.dynamic_index_in_dim(d_BRT, rank, 1, keepdims=False))  # noqa: E731

        def bring_home(distance: int, size: int, sum_BNt: Array) -> Array:
            to, source = (me + distance) % self._ranks, (me - distance) % self._ranks
            sent = picked(of(source), self._listed(me, source)[:, :size])
            return sum_BNt + self._placed(self._sent(sent, -distance), source=me, to=to)

        sum_BNt = self._by_distance(bring_home, of(me))
        return sum_BNt.reshape(d_BS.shape[0], -1, *d_BS.shape[2:])[:, :tokens]

    def _by_distance(self, step: Callable[[int, int, Array], Array], x: Array) -> Array:
        """A step for each distance with the size that travels to it; none where that is 0."""
        chosen_R = choices(self.most_R, self._blocks)
        for distance in range(1, self._ranks):
            steps = [partial(step, distance, size) if size else lambda x: x for size in sizes(self._blocks)]
            x = lax.switch(chosen_R[distance], steps, x)
        return x

    def _sent(self, x: Array, distance: int) -> Array:
        """The array of the rank so far before this one."""
        routes = [(rank, (rank + distance) % self._ranks) for rank in range(self._ranks)]
        return lax.ppermute(x, self.axes, routes)

    def _between(self, to: Array, source: Array) -> Bool[Array, "B N"]:
        by_source = lax.dynamic_index_in_dim(self.needed_BRRN, to, 1, keepdims=False)
        return lax.dynamic_index_in_dim(by_source, source, 1, keepdims=False)

    def _listed(self, to: Array, source: Array) -> Int[Array, "B N"]:
        """The numbers of the blocks that a rank needs of another, in order, then those of the others."""
        return jnp.argsort(~self._between(to, source), axis=-1, stable=True)

    def _placed(self, came: Array, *, source: Array, to: Array) -> Array:
        """Blocks that travelled, of the source's numbers, each at its own; 0 where none was needed."""
        needed_BN = self._between(to, source)
        places_BN = jnp.maximum(jnp.cumsum(needed_BN, axis=-1) - 1, 0)
        return jnp.where(needed_BN.reshape(*needed_BN.shape, *[1] * (came.ndim - 2)), picked(came, places_BN), 0)

    def _blocked(self, x_BT: Array) -> Array:
        """``[B, T, ...]`` as ``[B, N, t, ...]``, with 0 at the end."""
        x_BT = filled(x_BT, block_size(x_BT.shape[1]))
        return x_BT.reshape(x_BT.shape[0], self._blocks, -1, *x_BT.shape[2:])
