"""Attention by pairs of blocks of tokens, forward and backward, in plain XLA on any device.

No array has the size of all pairs of tokens: forward keeps its output and one number a token and head, and backward
computes the weights of a pair of blocks again (Dao et al. 2022, "FlashAttention", §3; Rabe and Staats 2021,
"Self-attention Does Not Need O(n²) Memory"). A pair of blocks that the mask hides is not computed, wherever it lies:
what each block sees is a list of blocks, not a range.

Shapes: B rows, T tokens that ask, S tokens that are asked, H query heads, G key/value heads, R = H / G, K head width
(all local to this rank); P blocks of t tokens that ask, N blocks of s tokens that are asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.attention.by_hand import ByHand, Known, attend, known
from mmjax.attention.mask import Columns, Mask, bounds
from mmjax.attention.tokens import Tokens, filled

BLOCK = 512
"""The most tokens of a block, where there are several."""
_FLOOR = -1e30
"""Score of a pair that the mask hides: finite, so that a token that sees nothing has no NaN."""
_ROUND = 16
"""_Blocks are a multiple of this many tokens: tensor cores work on tiles."""


def attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGK: Float[Array, "B S G K"],
    tokens: Tokens,
    mask: Mask,
    keys: Tokens | None = None,
) -> Float[Array, "B T H K"]:
    """Grouped-query attention among the tokens of one segment.

    Query head ``h`` reads key head ``h // (H/G)``. Scores and the softmax are fp32. Where the scores of a row are no
    more than those of a pair of blocks, the row is one block, and there is no loop.

    Args:
      q_BTHK, k_BSGK, v_BSGK: rotated queries, keys, and values; H is a multiple of G.
      tokens: what is known of the queries' tokens; the outputs of padding are finite and unused.
      mask: which tokens see which.
      keys: what is known of the keys' tokens, where these are not the queries' own.

    Raises:
      ValueError: the mask reads what is not known of the tokens.
    """
    asked = known(keys or tokens, mask)
    return attend(Blockwise(mask), q_BTHK, k_BSGK, v_BSGK, known(tokens, mask), asked)


@dataclass(frozen=True)
class Blockwise(ByHand):
    """Attention by blocks, forward and backward."""

    def forward(self, *given: Any) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
        """See ``forward``."""
        return forward(self.mask, *given)

    def backward(self, *given: Any) -> tuple[Array, Array, Array]:
        """See ``backward``."""
        return backward(self.mask, *given)


@dataclass(frozen=True)
class _Blocks:
    """How a call is cut: blocks of ``ask`` queries and of ``seen`` keys, as many as there are."""

    mask: Mask
    ask: int
    seen: int
    asks: int
    seens: int

    @classmethod
    def of(cls, q_BTHK: Array, k_BSGK: Array, mask: Mask, most: int = 0) -> _Blocks:
        """Blocks of at most so many tokens; 0 is ``BLOCK``."""
        T, S, most = q_BTHK.shape[1], k_BSGK.shape[1], most or BLOCK
        if most * most >= T * S:
            return cls(mask, T, S, 1, 1)
        (ask, asks), (seen, seens) = _cut(T, most), _cut(S, most)
        return cls(mask, ask, seen, asks, seens)

    @property
    def whole(self) -> bool:
        """Whether there is one pair of blocks."""
        return self.asks * self.seens == 1


def _cut(tokens: int, most: int) -> tuple[int, int]:
    """Size and number of blocks that are about equal, no larger than ``most``, and hold so many tokens."""
    count = -(-tokens // most)
    size = -(-tokens // count)
    size = -(-size // _ROUND) * _ROUND if count > 1 else size
    return size, -(-tokens // size)


# ---- functions of all that they read ---------------------------------------------------------------------------------


def forward(
    mask: Mask, q_BTHK: Array, k_BSGK: Array, v_BSGK: Array, asking: Known, asked: Known, block: int = 0
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    """The output, and the logarithm of each softmax's denominator: `_FLOOR` or less where a query sees nothing.

    All arrays vary over the same axes (see ``jax_compat.alike``). ``block`` is the most tokens of a block; 0 is
    ``BLOCK``.
    """
    blocks = _Blocks.of(q_BTHK, k_BSGK, mask, block)
    q_BPtGRK, k_BNsGK, v_BNsGK, pairs = _split(blocks, q_BTHK, k_BSGK, v_BSGK, asking, asked)
    run = _forward_whole if blocks.whole else _forward_blocks
    out_BPtGRK, lse_BPGRt = run(blocks, q_BPtGRK, k_BNsGK, v_BNsGK, pairs)
    B, T, H, _ = q_BTHK.shape
    out = out_BPtGRK.reshape(B, -1, *q_BTHK.shape[2:])[:, :T]
    return out, jnp.moveaxis(lse_BPGRt, 1, 3).reshape(B, H, -1)[..., :T]


def backward(
    mask: Mask,
    q_BTHK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    asking: Known,
    asked: Known,
    out_BTHK: Array,
    lse_BHT: Array,
    d_out_BTHK: Array,
    block: int = 0,
) -> tuple[Array, Array, Array]:
    """fp32 gradients of queries, keys and values.

    ``out`` and ``lse`` are those of all keys that the queries see; those given here may be a part of them.
    """
    blocks = _Blocks.of(q_BTHK, k_BSGK, mask, block)
    q_BPtGRK, k_BNsGK, v_BNsGK, pairs = _split(blocks, q_BTHK, k_BSGK, v_BSGK, asking, asked)
    # The share of a query's weights that all its keys have in the gradient of its scores (FlashAttention, §B.2).
    common_BTH = jnp.sum(out_BTHK.astype(jnp.float32) * d_out_BTHK.astype(jnp.float32), axis=-1)
    groups = q_BPtGRK.shape[3:5]
    numbers_BTH = (common_BTH, jnp.swapaxes(lse_BHT, 1, 2))
    common, lse = (jnp.moveaxis(_blocked(x, blocks.ask, blocks.asks, groups), 2, -1) for x in numbers_BTH)
    given = _Given(q_BPtGRK, _blocked(d_out_BTHK, blocks.ask, blocks.asks, groups), lse, common)
    run = _backward_whole if blocks.whole else _backward_blocks
    dq, dk, dv = run(blocks, given, k_BNsGK, v_BNsGK, pairs)
    return _like(dq, q_BTHK), _like(dk, k_BSGK), _like(dv, v_BSGK)


# ---- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pairs:
    """What the mask reads of the tokens of every block, and which blocks each block of queries may see.

    Attributes:
      asking, asked: columns with dimensions [B, P, t] and [B, N, s].
      lists_BPN: for each block of queries, blocks of keys: first those that it may see, in order.
      counts_BP: how many these are.
    """

    asking: Columns
    asked: Columns
    lists_BPN: Int[Array, "B P N"]
    counts_BP: Int[Array, "B P"]


def _split(blocks: _Blocks, q: Array, k: Array, v: Array, asking: Known, asked: Known) -> Any:
    """Queries, keys and values in blocks, and the pairs of blocks to compute."""
    heads, groups = q.shape[2], k.shape[2]
    q_BPtGRK = _blocked(q, blocks.ask, blocks.asks, (groups, heads // groups))
    k_BNsGK, v_BNsGK = (_blocked(x, blocks.seen, blocks.seens, (groups,)) for x in (k, v))
    own = _columns(blocks.mask, asking, blocks.ask, blocks.asks)
    others = _columns(blocks.mask, asked, blocks.seen, blocks.seens)
    met_BPN = blocks.mask.may_meet(_bounds(own), _bounds(others))
    lists_BPN = jnp.argsort(~met_BPN, axis=-1, stable=True).astype(jnp.int32)
    return q_BPtGRK, k_BNsGK, v_BNsGK, _Pairs(own, others, lists_BPN, jnp.sum(met_BPN, axis=-1, dtype=jnp.int32))


def _bounds(columns: Columns) -> tuple[Columns, Columns]:
    B, _, block = columns.segments.shape
    return bounds(jax.tree.map(lambda x: x.reshape(B, -1, *x.shape[3:]), columns), block)


def _columns(mask: Mask, known: Known, block: int, count: int) -> Columns:
    return jax.tree.map(lambda x: _blocked(x, block, count, x.shape[2:]), mask.columns(Tokens.of(known)))


def _blocked(x_BT: Array, block: int, count: int, groups: tuple[int, ...]) -> Array:
    """``[B, T, H, ...]`` as ``[B, P, t, *groups, ...]``; what is missing at the end is 0, in segments padding."""
    x_BT = filled(x_BT, block)
    return x_BT.reshape(len(x_BT), count, block, *groups, *x_BT.shape[3:])


def _like(blocked: Array, x_BT: Array) -> Array:
    """A fp32 gradient without what was added at the end, in the shape of the primal."""
    B, T = x_BT.shape[:2]
    flat = blocked.reshape(B, -1, *blocked.shape[3:])[:, :T]
    return flat.reshape(x_BT.shape).astype(jnp.float32)


# ---- one pair of blocks ----------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Given:
    """What backward reads of a block of queries: [..., t, G, R, K] and [..., G, R, t]."""

    q: Array
    d_out: Array
    lse: Array
    common: Array


def _scores(mask: Mask, q_tGRK: Array, k_sGK: Array, asking: Columns, asked: Columns) -> Float[Array, "G R t s"]:
    scores = jnp.einsum("tgrk,sgk->grts", q_tGRK, k_sGK, preferred_element_type=jnp.float32)
    return jnp.where(mask.allowed(asking, asked), scores * q_tGRK.shape[-1] ** -0.5, jnp.float32(_FLOOR))


def _gradients(
    mask: Mask, given: _Given, k_sGK: Array, v_sGK: Array, asking: Columns, asked: Columns
) -> tuple[Array, Array, Array]:
    """The shares of a pair of blocks in the gradients of queries, keys and values, fp32."""
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    weights_GRts = jnp.exp(_scores(mask, given.q, k_sGK, asking, asked) - given.lse[..., None])
    dv_sGK = product("grts,tgrk->sgk", weights_GRts.astype(v_sGK.dtype), given.d_out)
    d_weights_GRts = product("tgrk,sgk->grts", given.d_out, v_sGK)
    d_scores_GRts = weights_GRts * (d_weights_GRts - given.common[..., None]) * given.q.shape[-1] ** -0.5
    d_scores_GRts = d_scores_GRts.astype(given.q.dtype)
    dq_tGRK = product("grts,sgk->tgrk", d_scores_GRts, k_sGK)
    return dq_tGRK, product("grts,tgrk->sgk", d_scores_GRts, given.q), dv_sGK


# ---- rows of one block -----------------------------------------------------------------------------------------------


def _forward_whole(blocks: _Blocks, q: Array, k: Array, v: Array, pairs: _Pairs) -> tuple[Array, Array]:
    def of_row(q_tGRK: Array, k_sGK: Array, v_sGK: Array, asking: Columns, asked: Columns) -> tuple[Array, Array]:
        scores_GRts = _scores(blocks.mask, q_tGRK, k_sGK, asking, asked)
        lse_GRt = jax.nn.logsumexp(scores_GRts, axis=-1)
        weights_GRts = jnp.exp(scores_GRts - lse_GRt[..., None]).astype(v_sGK.dtype)
        return jnp.einsum("grts,sgk->tgrk", weights_GRts, v_sGK), lse_GRt

    return _over_blocks(of_row)(q, k, v, pairs.asking, pairs.asked)


def _backward_whole(blocks: _Blocks, given: _Given, k: Array, v: Array, pairs: _Pairs) -> tuple[Array, Array, Array]:
    return _over_blocks(partial(_gradients, blocks.mask))(given, k, v, pairs.asking, pairs.asked)


def _over_blocks(function: Any) -> Any:
    """The function of a pair of blocks over rows that have one each."""
    return jax.vmap(jax.vmap(function))


# ---- rows of several blocks ------------------------------------------------------------------------------------------


def _forward_blocks(blocks: _Blocks, q: Array, k: Array, v: Array, pairs: _Pairs) -> tuple[Array, Array]:
    """One block of queries after another; of each the blocks of keys that it may see."""
    shape, axes = q.shape[2:], sorted(jax_compat.varying_axes(q))

    def of_block(place: tuple[Array, Array]) -> tuple[Array, Array]:
        row, block = place
        q_tGRK, asking = q[row, block], _at(pairs.asking, row, block)

        def add(n: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            acc_tGRK, total_GRt, top_GRt = sums
            one = pairs.lists_BPN[row, block, n]
            scores_GRts = _scores(blocks.mask, q_tGRK, k[row, one], asking, _at(pairs.asked, row, one))
            new_GRt = jnp.maximum(top_GRt, scores_GRts.max(axis=-1))
            weights_GRts, shrink_GRt = jnp.exp(scores_GRts - new_GRt[..., None]), jnp.exp(top_GRt - new_GRt)
            more = jnp.einsum(
                "grts,sgk->tgrk", weights_GRts.astype(v.dtype), v[row, one], preferred_element_type=jnp.float32
            )
            acc_tGRK = acc_tGRK * jnp.moveaxis(shrink_GRt, -1, 0)[..., None] + more
            return acc_tGRK, total_GRt * shrink_GRt + weights_GRts.sum(axis=-1), new_GRt

        numbers = (*shape[1:3], shape[0])
        start = (jnp.zeros(shape, jnp.float32), jnp.zeros(numbers), jnp.full(numbers, _FLOOR, jnp.float32))
        sums = lax.fori_loop(0, pairs.counts_BP[row, block], add, jax_compat.tree_to_varying(start, axes))
        acc_tGRK, total_GRt, top_GRt = sums
        total_GRt = jnp.where(total_GRt > 0, total_GRt, 1.0)  # a block of padding sees no block
        out_tGRK = acc_tGRK / jnp.moveaxis(total_GRt, -1, 0)[..., None]
        return out_tGRK.astype(q.dtype), top_GRt + jnp.log(total_GRt)

    B, P = q.shape[:2]
    out, lse = lax.map(of_block, _places(B, P))
    return out.reshape(q.shape), lse.reshape(B, P, *lse.shape[1:])


def _backward_blocks(blocks: _Blocks, given: _Given, k: Array, v: Array, pairs: _Pairs) -> tuple[Array, Array, Array]:
    """As forward goes; gradients of keys and values are summed in place."""
    axes = sorted(jax_compat.varying_axes(k))

    def of_block(sums: tuple[Array, Array], place: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        row, block = place
        own, asking = jax.tree.map(lambda x: x[row, block], given), _at(pairs.asking, row, block)

        def add(n: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq_tGRK, dk, dv = sums
            one = pairs.lists_BPN[row, block, n]
            asked = _at(pairs.asked, row, one)
            more = _gradients(blocks.mask, own, k[row, one], v[row, one], asking, asked)
            return dq_tGRK + more[0], dk.at[row, one].add(more[1]), dv.at[row, one].add(more[2])

        start = jax_compat.to_varying(jnp.zeros(own.q.shape, jnp.float32), axes)
        dq_tGRK, dk, dv = lax.fori_loop(0, pairs.counts_BP[row, block], add, (start, *sums))
        return (dk, dv), dq_tGRK

    zeros = jax_compat.tree_to_varying((jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)), axes)
    (dk, dv), dq = lax.scan(of_block, zeros, _places(*given.q.shape[:2]))
    return dq.reshape(given.q.shape), dk, dv


def _places(rows: int, blocks: int) -> tuple[Array, Array]:
    """Row and block of every block of queries."""
    rows_N, blocks_N = jnp.divmod(jnp.arange(rows * blocks, dtype=jnp.int32), blocks)
    return rows_N, blocks_N


def _at(columns: Columns, row: Array, block: Array) -> Columns:
    """The columns of one block of a row."""
    return jax.tree.map(lambda x: x[row, block], columns)
