"""Expert parallelism: ranks with different experts compute them for each other's tokens.

*Ring*: each rank's tokens go round all ranks of the group, with the sum of the results so far, which comes home last.
The next rank's tokens travel beside the products of the present ones. Every rank receives all tokens, whatever the
router chooses, so buffers hold at most the rows of one rank's tokens.

*All-to-all*: a token goes once to each rank that has some of its experts, whose summed results come back. Shapes are
static, so each pair of ranks exchanges a buffer of a fixed number of tokens (Lepikhin et al., "GShard", §3.2). By
default it holds all tokens of a rank, the worst case, and nothing has to be sorted for it: tokens are gathered. Tokens
that do not fit a smaller one are dropped and counted, and so are the choices for which a rank has no rows.

Shapes: N tokens of this rank, k experts a token, R ranks, C tokens of a buffer, S = R · C tokens that this rank
receives, M rows in the order of experts, L experts of this rank, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax.mesh.spread import Axes
from mmjax.models.experts.dispatch import Dispatch, TokenRows, add_rows, send_rows, sort_by_expert
from mmjax.models.experts.sizes import HALF_TOKENS

Compute = Callable[[Sequence[TokenRows]], list[Array]]
"""The sums ``[N, D]`` of the weighted results of each token's local experts, for each part of the tokens."""


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
    return compute([_local_rows(experts, h_ND, experts_Nk, weights_Nk)])[0]


def _local_rows(
    experts: LocalExperts, h_ND: Array, experts_Nk: Array, weights_Nk: Array, most: int | None = None
) -> TokenRows:
    """The tokens with rows for their choices of this rank's experts: at most ``most``, or as many as there may be."""
    worst = h_ND.shape[0] * min(experts_Nk.shape[1], experts.count)
    dispatch = sort_by_expert(experts.local(experts_Nk), experts.count, min(worst, most or worst))
    return TokenRows(h_ND, weights_Nk, dispatch)


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
    exchange: AllToAll,
    h_ND: Array,
    experts_Nk: Array,
    weights_Nk: Array,
    *,
    halves: bool,
) -> tuple[Float[Array, "N D"], Float[Array, ""]]:
    """The sum over all choices of each token, and the number of choices that were dropped; with tp this rank's part.

    Args:
      compute: computes rows.
      experts: those of this rank.
      exchange: the ranks and the sizes of buffers.
      h_ND, experts_Nk, weights_Nk: the tokens of this rank, their experts and weights.
      halves: whether two halves of the tokens may be exchanged one after the other, so that the exchange of one lies
        beside the products of the other. ``compute`` gets both at once, and adds to the weights' gradients once.
    """
    count = h_ND.shape[0]
    number = 2 if halves and count % 2 == 0 and count >= 2 * HALF_TOKENS else 1
    sent = [
        _Sent.of(exchange, experts, *part)
        for part in zip(*(jnp.split(x, number) for x in (h_ND, experts_Nk, weights_Nk)), strict=True)
    ]
    results = compute([part.received for part in sent])
    y_ND = jnp.concatenate([part.returned(y_SD) for part, y_SD in zip(sent, results, strict=True)])
    return y_ND, sum((part.dropped.astype(jnp.float32) for part in sent), start=jnp.zeros(()))


@dataclass(frozen=True, kw_only=True)
class AllToAll:
    """The ranks of an all-to-all, and the sizes of its buffers.

    Attributes:
      axes: mesh axes of the ranks with each other's experts.
      tokens: of a number of a rank's tokens, how many of them it sends to another at most.
      rows: of a number of tokens that a rank receives, rows for their choices.
    """

    axes: tuple[str, ...]
    tokens: Callable[[int], int]
    rows: Callable[[int], int]


class _Sent(NamedTuple):
    """Tokens that were sent to the ranks of their experts.

    Attributes:
      axes: mesh axes of the ranks.
      received: the tokens that this rank has received, with rows of its experts.
      dispatch: of this rank's tokens to the buffers; ``None`` if all were sent to all ranks.
      dropped: number of choices of this rank's tokens that did not fit the buffers, and of those received that have no
        row.
    """

    axes: tuple[str, ...]
    received: TokenRows
    dispatch: Dispatch | None
    dropped: Int[Array, ""]

    @classmethod
    def of(cls, exchange: AllToAll, experts: LocalExperts, h_ND: Array, experts_Nk: Array, weights_Nk: Array) -> _Sent:
        """Sends tokens."""
        axes, count = exchange.axes, h_ND.shape[0]
        size = exchange.tokens(count)
        rows = exchange.rows(count * lax.axis_size(axes))
        if size >= count:
            experts_Sk = lax.all_gather(experts_Nk, axes, tiled=True)
            x_SD: Any = gather_tokens(h_ND, axes)
            weights_Sk: Any = gather_tokens(weights_Nk, axes)
            received = _local_rows(experts, x_SD, experts_Sk, weights_Sk, rows)
            return cls(axes, received, None, _without_row(experts, experts_Sk, received))
        first_R = lax.all_gather(experts.first, axes)
        is_of_NkR = (experts_Nk[..., None] >= first_R) & (experts_Nk[..., None] < first_R + experts.count)
        dispatch, is_token_RC = _buffers(jnp.any(is_of_NkR, axis=1), size)
        experts_Sk = jnp.where(is_token_RC.reshape(-1, 1), experts_Nk[dispatch.tokens_M], -1)
        x_SD, weights_Sk, experts_Sk = (
            lax.all_to_all(x, axes, 0, 0, tiled=True)
            for x in (send_rows(h_ND, dispatch), send_rows(weights_Nk, dispatch), experts_Sk)
        )
        received = _local_rows(experts, x_SD, experts_Sk, weights_Sk, rows)
        is_dropped_NR = dispatch.rows_Nk == is_token_RC.size
        dropped = jnp.sum(is_of_NkR & is_dropped_NR[:, None]) + _without_row(experts, experts_Sk, received)
        return cls(axes, received, dispatch, dropped)

    def returned(self, y_SD: Float[Array, "S D"]) -> Float[Array, "N D"]:
        """The sum over ranks of the results for this rank's tokens, of those for the tokens that ranks received."""
        if self.dispatch is None:
            return sum_results(y_SD, self.axes)
        return add_rows(lax.all_to_all(y_SD, self.axes, 0, 0, tiled=True), self.dispatch)


def _without_row(experts: LocalExperts, experts_Nk: Array, tokens: TokenRows) -> Int[Array, ""]:
    """The number of choices of this rank's experts that have no row."""
    return jnp.sum(experts.local(experts_Nk) < experts.count) - jnp.sum(tokens.dispatch.sizes_E)


def _buffers(is_sent_NR: Array, size: int) -> tuple[Dispatch, Array]:
    """The dispatch of tokens to the buffers, and whether each row ``[R, C]`` has a token.

    A "choice" of the dispatch is a rank: tokens that do not go there, or do not fit, have the row R · C.
    """
    ranks = is_sent_NR.shape[1]
    place_NR = jnp.cumsum(is_sent_NR, axis=0) - 1
    fits_NR = is_sent_NR & (place_NR < size)
    rows_NR = jnp.where(fits_NR, jnp.arange(ranks) * size + place_NR, ranks * size)
    choices_S = (
        jnp.zeros(ranks * size, rows_NR.dtype).at[rows_NR.reshape(-1)].set(jnp.arange(rows_NR.size), mode="drop")
    )
    counts_R = jnp.minimum(jnp.sum(is_sent_NR, axis=0), size)
    return Dispatch(choices_S, rows_NR, counts_R), jnp.arange(size) < counts_R[:, None]


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_tokens(x_ND: Float[Array, "N D"], axes: tuple[str, ...]) -> Float[Array, "S D"]:
    """The tokens of all ranks along ``axes``. Backward is ``sum_results``."""
    return lax.all_gather(x_ND, axes, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_results(y_SD: Float[Array, "S D"], axes: tuple[str, ...]) -> Float[Array, "N D"]:
    """The sum over all ranks along ``axes`` of their results for this rank's tokens, in fp32 and then rounded.

    Backward is ``gather_tokens``.
    """
    ranks = lax.axis_size(axes)
    y_RND = lax.all_to_all(y_SD, axes, 0, 0, tiled=True).reshape(ranks, -1, y_SD.shape[1])
    return jnp.sum(y_RND.astype(jnp.float32), axis=0).astype(y_SD.dtype)


gather_tokens.defvjp(
    lambda x_ND, axes: (gather_tokens(x_ND, axes), None), lambda axes, _, dx_SD: (sum_results(dx_SD, axes),)
)
sum_results.defvjp(
    lambda y_SD, axes: (sum_results(y_SD, axes), None), lambda axes, _, dy_ND: (gather_tokens(dy_ND, axes),)
)
