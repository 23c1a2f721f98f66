"""Expert parallelism: ranks with different experts compute them for each other's tokens.

*Ring*: each rank's tokens go round all ranks of the group, with the sum of the results so far, which comes home last.
The next rank's tokens travel beside the products of the present ones. Every rank receives all tokens, whatever the
router chooses, so buffers hold at most the rows of one rank's tokens.

*All-to-all*: each choice of a token is a row that goes to the rank of its expert, and its result comes back. Shapes are
static, so each pair of ranks exchanges a buffer of a fixed number of rows (Lepikhin et al., "GShard", §3.2). By default
it holds the worst case, in which all tokens of a rank choose experts of one other; rows that do not fit a smaller one
are dropped and counted.

Shapes: N tokens of this rank, k experts a token, R ranks, C rows of a buffer, L experts of this rank, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax.mesh.spread import Axes
from mmjax.models.experts.dispatch import Dispatch, add_rows, send_rows, send_weights, sort_by_expert

Compute = Callable[[Array, Array, Int[Array, " L"]], Array]
"""The results ``[M, D]`` of rows ``[M, D]`` times their weights ``[M]``, sorted by expert; the last are the numbers of
rows of each local expert.
"""


@dataclass(frozen=True, kw_only=True)
class LocalExperts:
    """The experts of this rank: ``count`` from the number ``first``."""

    first: Int[Array, ""]
    count: int

    @classmethod
    def of(cls, axes: Axes, count: int) -> LocalExperts:
        """The experts of this rank, inside ``shard_map``; each rank has ``count``."""
        first = lax.axis_index(axes.experts) * count if axes.experts else jnp.zeros((), jnp.int32)
        return cls(first=first, count=count)

    def local(self, experts: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """Their numbers on this rank, from 0; ``count`` for the experts of other ranks."""
        local = experts - self.first
        return jnp.where((local >= 0) & (local < self.count), local, self.count)


def compute_local(
    compute: Compute, experts: LocalExperts, h_ND: Array, experts_Nk: Array, weights_Nk: Array
) -> Float[Array, "N D"]:
    """The sum of the results of those of each token's choices that are experts of this rank."""
    most = h_ND.shape[0] * min(experts_Nk.shape[1], experts.count)
    dispatch = sort_by_expert(experts.local(experts_Nk), experts.count, most)
    rows_MD = compute(send_rows(h_ND, dispatch), send_weights(weights_Nk, dispatch), dispatch.sizes_E)
    return add_rows(rows_MD, dispatch)


def compute_in_ring(
    compute: Compute, experts: LocalExperts, axes: tuple[str, ...], h_ND: Array, experts_Nk: Array, weights_Nk: Array
) -> Float[Array, "N D"]:
    """The sum over all choices of each token, by ranks along ``axes`` in turn; with tp this rank's part of it."""
    size = lax.axis_size(axes)
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    tokens, total_ND = (h_ND, experts_Nk, weights_Nk), None
    for turn in range(size):
        is_last = turn == size - 1
        arriving = tokens if is_last else jax.tree.map(lambda x: lax.ppermute(x, axes, ring), tokens)
        y_ND = compute_local(compute, experts, *tokens)
        total_ND = y_ND if total_ND is None else total_ND + y_ND
        total_ND, tokens = lax.ppermute(total_ND, axes, ring), arriving
    assert total_ND is not None
    return total_ND


def compute_all_to_all(
    compute: Compute,
    experts: LocalExperts,
    axes: Axes,
    h_ND: Array,
    experts_Nk: Array,
    weights_Nk: Array,
    *,
    rows: int,
) -> tuple[Float[Array, "N D"], Float[Array, ""]]:
    """The sum over all choices of each token, and the number of choices that did not fit.

    Args:
      compute: computes rows.
      experts: those of this rank.
      axes: mesh axes by role, of which ``ep`` are those of the exchange.
      h_ND, experts_Nk, weights_Nk: the tokens of this rank, their experts and weights.
      rows: rows of the buffer of each pair of ranks.
    """
    blocks = _BlocksOfRanks(axes, experts.count)
    dispatch, experts_RC = _buffers(blocks, experts_Nk, rows)
    is_row_RC = experts_RC < blocks.experts
    x_RCD = jnp.where(is_row_RC.reshape(-1, 1), send_rows(h_ND, dispatch), 0).reshape(*is_row_RC.shape, -1)
    weights_RC = send_weights(weights_Nk, dispatch).reshape(is_row_RC.shape)
    x_RCD, weights_RC, experts_RC = (
        lax.all_to_all(x, axes.ep, 0, 0, tiled=True) for x in (x_RCD, weights_RC, experts_RC)
    )
    flat = x_RCD.reshape(-1, h_ND.shape[1]), experts_RC.reshape(-1, 1), weights_RC.reshape(-1, 1)
    y_RCD = compute_local(compute, experts, *flat).reshape(x_RCD.shape)
    y_RCD = lax.all_to_all(y_RCD, axes.ep, 0, 0, tiled=True)
    is_dropped_Nk = (blocks.rank_of(experts_Nk) < blocks.ranks) & (dispatch.rows_Nk == is_row_RC.size)
    return add_rows(y_RCD.reshape(-1, h_ND.shape[1]), dispatch), jnp.sum(is_dropped_Nk).astype(jnp.float32)


def _buffers(blocks: _BlocksOfRanks, experts_Nk: Array, rows: int) -> tuple[Dispatch, Int[Array, "R C"]]:
    """The dispatch to the buffers, whose row (r, c) is choice number c of an expert of rank r, and each row's expert.

    The dispatch's sizes are those of ranks, not of experts. The expert is ``blocks.experts`` for a row of no choice;
    choices that do not fit have the row R · C.
    """
    by_expert = sort_by_expert(experts_Nk, blocks.experts, experts_Nk.size)
    starts_R, counts_R = blocks.of_ranks(by_expert.sizes_E)
    places_RC = jnp.minimum(starts_R[:, None] + jnp.arange(rows), experts_Nk.size - 1)
    choices_RC = by_expert.choices_M[places_RC]
    is_row_RC = jnp.arange(rows) < counts_R[:, None]
    experts_RC = jnp.where(is_row_RC, experts_Nk.reshape(-1)[choices_RC], blocks.experts)
    rank_Nk = blocks.rank_of(experts_Nk)
    at_Nk = by_expert.rows_Nk - jnp.take(starts_R, rank_Nk, mode="clip")
    fits_Nk = (rank_Nk < blocks.ranks) & (at_Nk < rows)
    rows_Nk = jnp.where(fits_Nk, rank_Nk * rows + at_Nk, blocks.ranks * rows)
    return Dispatch(choices_RC.reshape(-1), rows_Nk, counts_R), experts_RC


class _BlocksOfRanks:
    """The experts with which this rank exchanges tokens, by rank along ``axes.ep``.

    Where ranks of tp have whole experts, a rank exchanges those of its own place in tp; others see to the rest.
    """

    def __init__(self, axes: Axes, count: int):
        self.ranks, self.count = lax.axis_size(axes.ep), count
        self._stride = count * (lax.axis_size(axes.tp) if axes.has_whole_experts else 1)
        self._first = lax.axis_index(axes.tp) * count if axes.has_whole_experts else 0
        self.experts = self.ranks * self._stride

    def rank_of(self, experts: Int[Array, "*S"]) -> Int[Array, "*S"]:
        """The rank with an expert; ``ranks`` for experts that this rank does not exchange, and for none."""
        place = experts % self._stride - self._first
        is_exchanged = (experts < self.experts) & (place >= 0) & (place < self.count)
        return jnp.where(is_exchanged, experts // self._stride, self.ranks)

    def of_ranks(self, sizes_E: Int[Array, " E"]) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
        """The first row of each rank among rows sorted by expert, and the number of its rows."""
        starts_E = jnp.cumsum(sizes_E) - sizes_E
        of_rank_RL = self._first + jnp.arange(self.ranks)[:, None] * self._stride + jnp.arange(self.count)
        return starts_E[of_rank_RL[:, 0]], jnp.sum(sizes_E[of_rank_RL], axis=1)
