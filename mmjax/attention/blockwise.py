"""Blockwise attention: by pairs of blocks of tokens, forward and backward, in plain XLA on any device.

No array has the size of all pairs of tokens: forward keeps its output and one number a token and head, and backward
recomputes the weights of a pair of blocks (Dao et al. 2022, "FlashAttention", §3; Rabe and Staats 2021, "Self-attention
Does Not Need O(n²) Memory"). A pair of blocks that the mask hides is never computed: each block of queries has a list
of blocks of keys, not a range.

Shapes: B rows, T queries, S keys, H query heads, G key/value heads, R = H / G, K width of queries and keys, V of
values (all local to this rank); P blocks of t queries, N blocks of s keys.
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
from mmjax.attention.custom_vjp import AttentionVjp, TokenInfo, attend, token_info
from mmjax.attention.mask import Bounds, Mask, MaskInputs, bounds
from mmjax.attention.tokens import Tokens, pad_to_multiple

BLOCK = 512
"""The most tokens of a block, where there are several."""
_HIDDEN_SCORE = -1e30
"""Score of a pair that the mask hides: finite, so that a token that sees nothing has no NaN."""
_ROUND = 16
"""_Blocks are a multiple of this many tokens: tensor cores work on tiles."""


def attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGV: Float[Array, "B S G V"],
    tokens: Tokens,
    mask: Mask,
    keys: Tokens | None = None,
    soft_cap: float = 0.0,
) -> Float[Array, "B T H V"]:
    """Grouped-query attention among the tokens of one segment; differentiable, and in the dtype of the inputs.

    Query head ``h`` reads key head ``h // (H/G)``. Scores and the softmax are fp32. Where the scores of a row are no
    more than those of a pair of blocks, the row is one block, and there is no loop.

    Args:
      q_BTHK, k_BSGK, v_BSGV: queries and keys with rotary embedding, and values, of equal dtype; H is a multiple of G.
      tokens: the queries' tokens, such as ``Tokens.of({"segments": segments_BT})``. The outputs of padding are finite
        and unused.
      mask: the attention mask, such as ``Mask("causal")``.
      keys: the keys' tokens; by default the queries' tokens.
      soft_cap: see ``AttentionVjp``.

    Raises:
      ValueError: a host input of the mask is missing.
    """
    key_tokens = token_info(keys or tokens, mask)
    return attend(Blockwise(mask, soft_cap=soft_cap), q_BTHK, k_BSGK, v_BSGV, token_info(tokens, mask), key_tokens)


@dataclass(frozen=True)
class Blockwise(AttentionVjp):
    """Attention by blocks."""

    def forward(
        self, q: Array, k: Array, v: Array, query_tokens: TokenInfo, key_tokens: TokenInfo
    ) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T"]]:
        """The output in the dtype of the inputs, and the fp32 logarithm of each softmax's denominator.

        Args:
          q, k, v: queries ``[B, T, H, K]`` and keys ``[B, S, G, K]`` with rotary embedding, and values
            ``[B, S, G, V]``.
          query_tokens, key_tokens: results of ``custom_vjp.token_info`` for queries and keys: host inputs by name,
            "segments" among them.
        """
        return forward(self.mask, q, k, v, query_tokens, key_tokens, soft_cap=self.soft_cap)

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        query_tokens: TokenInfo,
        key_tokens: TokenInfo,
        out: Array,
        stats: Float[Array, "B H T"],
        d_out: Array,
    ) -> tuple[Array, Array, Array]:
        """fp32 gradients of queries, keys and values, in the shapes of these.

        Args:
          q, k, v, query_tokens, key_tokens: the arguments of ``forward``.
          out, stats: the results of ``forward``.
          d_out: the gradient of ``out``.
        """
        return backward(self.mask, q, k, v, query_tokens, key_tokens, out, stats, d_out, soft_cap=self.soft_cap)


@dataclass(frozen=True)
class _Blocking:
    """The blocks of a call: ``q_count`` blocks of ``q_size`` queries, and ``k_count`` blocks of ``k_size`` keys."""

    mask: Mask
    q_size: int
    k_size: int
    q_count: int
    k_count: int
    soft_cap: float

    @classmethod
    def of(cls, q_BTHK: Array, k_BSGK: Array, mask: Mask, max_tokens: int, soft_cap: float) -> _Blocking:
        """Blocks of at most ``max_tokens`` tokens; 0 stands for ``BLOCK``."""
        T, S, max_tokens = q_BTHK.shape[1], k_BSGK.shape[1], max_tokens or BLOCK
        if max_tokens * max_tokens >= T * S:
            return cls(mask, T, S, 1, 1, soft_cap)
        (q_size, q_count), (k_size, k_count) = (
            _block_size_and_count(T, max_tokens),
            _block_size_and_count(S, max_tokens),
        )
        return cls(mask, q_size, k_size, q_count, k_count, soft_cap)

    @property
    def is_single_pair(self) -> bool:
        """Whether there is only one pair of blocks."""
        return self.q_count * self.k_count == 1


def _block_size_and_count(tokens: int, max_tokens: int) -> tuple[int, int]:
    """Size and number of equal blocks that hold ``tokens`` tokens, of about ``max_tokens`` each at most."""
    count = -(-tokens // max_tokens)
    size = -(-tokens // count)
    size = -(-size // _ROUND) * _ROUND if count > 1 else size
    return size, -(-tokens // size)


# ---- forward and backward --------------------------------------------------------------------------------------------


def forward(
    mask: Mask,
    q_BTHK: Array,
    k_BSGK: Array,
    v_BSGV: Array,
    query_tokens: TokenInfo,
    key_tokens: TokenInfo,
    block: int = 0,
    soft_cap: float = 0.0,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T"]]:
    """Attention without a gradient: the output in the dtype of the inputs, and fp32 ``lse`` for ``backward``.

    ``lse`` is the logarithm of each softmax's denominator, by head: -1e30 or less where a query sees nothing.

    Args:
      mask: the attention mask, such as ``Mask("causal")``.
      q_BTHK, k_BSGK, v_BSGV: queries and keys with rotary embedding, and values, of equal dtype. All arrays vary over
        the same mesh axes (see ``jax_compat.alike``).
      query_tokens, key_tokens: host inputs by name of the T queries and the S keys, such as {"segments": segments_BT},
        as ``custom_vjp.token_info`` makes them.
      block: the most tokens of a block; 0 stands for ``BLOCK``.
      soft_cap: see ``AttentionVjp``.

    Raises:
      ValueError: a host input of the mask is missing.
    """
    blocks = _Blocking.of(q_BTHK, k_BSGK, mask, block, soft_cap)
    q_BPtGRK, k_BNsGK, v_BNsGV, pairs = _split(blocks, q_BTHK, k_BSGK, v_BSGV, query_tokens, key_tokens)
    run = _forward_single_pair if blocks.is_single_pair else _forward_blocks
    out_BPtGRV, lse_BPGRt = run(blocks, q_BPtGRK, k_BNsGK, v_BNsGV, pairs)
    B, T, H, _ = q_BTHK.shape
    out = out_BPtGRV.reshape(B, -1, H, v_BSGV.shape[-1])[:, :T]
    return out, jnp.moveaxis(lse_BPGRt, 1, 3).reshape(B, H, -1)[..., :T]


def backward(
    mask: Mask,
    q_BTHK: Array,
    k_BSGK: Array,
    v_BSGV: Array,
    query_tokens: TokenInfo,
    key_tokens: TokenInfo,
    out_BTHV: Array,
    lse_BHT: Array,
    d_out_BTHV: Array,
    block: int = 0,
    soft_cap: float = 0.0,
) -> tuple[Array, Array, Array]:
    """Gradients (fp32) of queries ``[B, T, H, K]``, keys ``[B, S, G, K]`` and values ``[B, S, G, V]``.

    The keys may be a part of all keys that the queries see; ``out_BTHV`` and ``lse_BHT`` are of all of them.

    Args:
      mask: the attention mask, such as ``Mask("causal")``.
      q_BTHK, k_BSGK, v_BSGV: queries and keys with rotary embedding, and values.
      query_tokens, key_tokens: host inputs by name of the T queries and the S keys, as ``custom_vjp.token_info`` makes
        them, such as {"segments": segments_BT}; with "order", places in the row, where keys are a part of it.
      out_BTHV, lse_BHT: the results of ``forward``: the output, and the logarithm of each softmax's denominator.
      d_out_BTHV: the gradient of the output.
      block: the most tokens of a block; 0 stands for ``BLOCK``.
      soft_cap: see ``AttentionVjp``.
    """
    blocks = _Blocking.of(q_BTHK, k_BSGK, mask, block, soft_cap)
    q_BPtGRK, k_BNsGK, v_BNsGV, pairs = _split(blocks, q_BTHK, k_BSGK, v_BSGV, query_tokens, key_tokens)
    # The sum over the keys of weights times their gradients (D in FlashAttention, §B.2).
    delta_BTH = jnp.sum(out_BTHV.astype(jnp.float32) * d_out_BTHV.astype(jnp.float32), axis=-1)
    groups = q_BPtGRK.shape[3:5]
    per_query_BTH = (delta_BTH, jnp.swapaxes(lse_BHT, 1, 2))
    delta, lse = (jnp.moveaxis(_to_blocks(x, blocks.q_size, blocks.q_count, groups), 2, -1) for x in per_query_BTH)
    inputs = _BackwardInputs(q_BPtGRK, _to_blocks(d_out_BTHV, blocks.q_size, blocks.q_count, groups), lse, delta)
    run = _backward_single_pair if blocks.is_single_pair else _backward_blocks
    dq, dk, dv = run(blocks, inputs, k_BNsGK, v_BNsGV, pairs)
    return _from_blocks(dq, q_BTHK), _from_blocks(dk, k_BSGK), _from_blocks(dv, v_BSGV)


# ---- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _BlockPairs:
    """The mask's inputs by block, and the pairs of blocks to compute.

    Attributes:
      queries, keys: the mask's inputs, with dimensions [B, P, t] and [B, N, s].
      lists_BPN: for each block of queries the indices of all blocks of keys, first the visible ones in order.
      counts_BP: the number of visible blocks of keys.
    """

    queries: MaskInputs
    keys: MaskInputs
    lists_BPN: Int[Array, "B P N"]
    counts_BP: Int[Array, "B P"]


def _split(blocks: _Blocking, q: Array, k: Array, v: Array, query_tokens: TokenInfo, key_tokens: TokenInfo) -> Any:
    """Queries, keys and values in blocks, and the pairs of blocks to compute."""
    heads, groups = q.shape[2], k.shape[2]
    q_BPtGRK = _to_blocks(q, blocks.q_size, blocks.q_count, (groups, heads // groups))
    k_BNsGK, v_BNsGV = (_to_blocks(x, blocks.k_size, blocks.k_count, (groups,)) for x in (k, v))
    queries = _mask_inputs(blocks.mask, query_tokens, blocks.q_size, blocks.q_count)
    keys = _mask_inputs(blocks.mask, key_tokens, blocks.k_size, blocks.k_count)
    visible_BPN = blocks.mask.may_allow(_bounds(queries), _bounds(keys))
    lists_BPN = jnp.argsort(~visible_BPN, axis=-1, stable=True).astype(jnp.int32)
    counts_BP = jnp.sum(visible_BPN, axis=-1, dtype=jnp.int32)
    return q_BPtGRK, k_BNsGK, v_BNsGV, _BlockPairs(queries, keys, lists_BPN, counts_BP)


def _bounds(inputs: MaskInputs) -> Bounds:
    B, _, block = inputs.segments.shape
    return bounds(jax.tree.map(lambda x: x.reshape(B, -1, *x.shape[3:]), inputs), block)


def _mask_inputs(mask: Mask, info: TokenInfo, block: int, count: int) -> MaskInputs:
    return jax.tree.map(lambda x: _to_blocks(x, block, count, x.shape[2:]), mask.inputs(Tokens.of(info)))


def _to_blocks(x_BT: Array, block: int, count: int, groups: tuple[int, ...]) -> Array:
    """``[B, T, H, ...]`` as ``[B, P, t, *groups, ...]``, padded with zeros: in segments 0 means padding."""
    x_BT = pad_to_multiple(x_BT, block)
    return x_BT.reshape(len(x_BT), count, block, *groups, *x_BT.shape[3:])


def _from_blocks(blocked: Array, x_BT: Array) -> Array:
    """The fp32 gradient by block, without padding and in the shape of its primal ``x_BT``."""
    B, T = x_BT.shape[:2]
    flat = blocked.reshape(B, -1, *blocked.shape[3:])[:, :T]
    return flat.reshape(x_BT.shape).astype(jnp.float32)


# ---- one pair of blocks ----------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _BackwardInputs:
    """Arrays of a block of queries for backward.

    ``q`` is [..., t, G, R, K], ``d_out`` [..., t, G, R, V], and the others are [..., G, R, t].
    """

    q: Array
    d_out: Array
    lse: Array
    delta: Array


def _scores(
    blocks: _Blocking, q_tGRK: Array, k_sGK: Array, queries: MaskInputs, keys: MaskInputs
) -> Float[Array, "G R t s"]:
    return _masked(blocks.mask, _all_scores(blocks.soft_cap, q_tGRK, k_sGK), queries, keys)


def _all_scores(soft_cap: float, q_tGRK: Array, k_sGK: Array) -> Float[Array, "G R t s"]:
    """The scores of all pairs, hidden ones too."""
    scores = jnp.einsum("tgrk,sgk->grts", q_tGRK, k_sGK, preferred_element_type=jnp.float32)
    scores *= q_tGRK.shape[-1] ** -0.5
    return soft_cap * jnp.tanh(scores / soft_cap) if soft_cap else scores


def _masked(mask: Mask, scores: Array, queries: MaskInputs, keys: MaskInputs) -> Float[Array, "G R t s"]:
    return jnp.where(mask.allowed(queries, keys), scores, jnp.float32(_HIDDEN_SCORE))


def _gradients(
    blocks: _Blocking, inputs: _BackwardInputs, k_sGK: Array, v_sGV: Array, queries: MaskInputs, keys: MaskInputs
) -> tuple[Array, Array, Array]:
    """The contributions of a pair of blocks to the gradients of queries, keys and values, in fp32."""
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores_GRts = _all_scores(blocks.soft_cap, inputs.q, k_sGK)
    weights_GRts = jnp.exp(_masked(blocks.mask, scores_GRts, queries, keys) - inputs.lse[..., None])
    dv_sGV = product("grts,tgrv->sgv", weights_GRts.astype(v_sGV.dtype), inputs.d_out)
    d_weights_GRts = product("tgrv,sgv->grts", inputs.d_out, v_sGV)
    d_scores_GRts = weights_GRts * (d_weights_GRts - inputs.delta[..., None]) * inputs.q.shape[-1] ** -0.5
    if blocks.soft_cap:
        d_scores_GRts *= 1 - jnp.square(scores_GRts / blocks.soft_cap)
    d_scores_GRts = d_scores_GRts.astype(inputs.q.dtype)
    dq_tGRK = product("grts,sgk->tgrk", d_scores_GRts, k_sGK)
    return dq_tGRK, product("grts,tgrk->sgk", d_scores_GRts, inputs.q), dv_sGV


# ---- rows of one block -----------------------------------------------------------------------------------------------


def _forward_single_pair(blocks: _Blocking, q: Array, k: Array, v: Array, pairs: _BlockPairs) -> tuple[Array, Array]:
    def of_row(q_tGRK: Array, k_sGK: Array, v_sGV: Array, queries: MaskInputs, keys: MaskInputs) -> tuple[Array, Array]:
        scores_GRts = _scores(blocks, q_tGRK, k_sGK, queries, keys)
        lse_GRt = jax.nn.logsumexp(scores_GRts, axis=-1)
        weights_GRts = jnp.exp(scores_GRts - lse_GRt[..., None]).astype(v_sGV.dtype)
        return jnp.einsum("grts,sgv->tgrv", weights_GRts, v_sGV), lse_GRt

    return _vmap_rows_and_blocks(of_row)(q, k, v, pairs.queries, pairs.keys)


def _backward_single_pair(
    blocks: _Blocking, inputs: _BackwardInputs, k: Array, v: Array, pairs: _BlockPairs
) -> tuple[Array, Array, Array]:
    return _vmap_rows_and_blocks(partial(_gradients, blocks))(inputs, k, v, pairs.queries, pairs.keys)


def _vmap_rows_and_blocks(function: Any) -> Any:
    """Maps a function of one pair of blocks over rows with one pair each."""
    return jax.vmap(jax.vmap(function))


# ---- rows of several blocks ------------------------------------------------------------------------------------------


def _forward_blocks(blocks: _Blocking, q: Array, k: Array, v: Array, pairs: _BlockPairs) -> tuple[Array, Array]:
    """Loops over blocks of queries, and for each over its visible blocks of keys."""
    numbers, axes = (*q.shape[3:5], q.shape[2]), sorted(jax_compat.varying_axes(q))
    out_shape = (*q.shape[:-1], v.shape[-1])

    def of_block(place: tuple[Array, Array]) -> tuple[Array, Array]:
        row, block = place
        q_tGRK, queries = q[row, block], _at(pairs.queries, row, block)

        def add(n: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            acc_tGRV, total_GRt, top_GRt = sums
            key_block = pairs.lists_BPN[row, block, n]
            scores_GRts = _scores(blocks, q_tGRK, k[row, key_block], queries, _at(pairs.keys, row, key_block))
            new_GRt = jnp.maximum(top_GRt, scores_GRts.max(axis=-1))
            weights_GRts, shrink_GRt = jnp.exp(scores_GRts - new_GRt[..., None]), jnp.exp(top_GRt - new_GRt)
            increment = jnp.einsum(
                "grts,sgv->tgrv", weights_GRts.astype(v.dtype), v[row, key_block], preferred_element_type=jnp.float32
            )
            acc_tGRV = acc_tGRV * jnp.moveaxis(shrink_GRt, -1, 0)[..., None] + increment
            return acc_tGRV, total_GRt * shrink_GRt + weights_GRts.sum(axis=-1), new_GRt

        acc_tGRV = jnp.zeros(out_shape[2:], jnp.float32)
        start = acc_tGRV, jnp.zeros(numbers), jnp.full(numbers, _HIDDEN_SCORE, jnp.float32)
        sums = lax.fori_loop(0, pairs.counts_BP[row, block], add, jax_compat.tree_to_varying(start, axes))
        acc_tGRV, total_GRt, top_GRt = sums
        total_GRt = jnp.where(total_GRt > 0, total_GRt, 1.0)  # a block of padding sees no block
        out_tGRV = acc_tGRV / jnp.moveaxis(total_GRt, -1, 0)[..., None]
        return out_tGRV.astype(q.dtype), top_GRt + jnp.log(total_GRt)

    B, P = q.shape[:2]
    zeros = jnp.zeros(out_shape, q.dtype), jnp.zeros((B, P, *numbers))
    q, results = _beside(q, jax_compat.tree_to_varying(zeros, axes))
    rows_N, blocks_N = _places(B, P)

    def write(n: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        place = rows_N[n], blocks_N[n]
        return jax.tree.map(lambda all_blocks, block: all_blocks.at[place].set(block), results, of_block(place))

    return lax.fori_loop(0, B * P, write, results)


def _backward_blocks(
    blocks: _Blocking, inputs: _BackwardInputs, k: Array, v: Array, pairs: _BlockPairs
) -> tuple[Array, Array, Array]:
    """Loops as ``_forward_blocks`` does; gradients of keys and values are summed in place."""
    axes = sorted(jax_compat.varying_axes(k))

    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (inputs.q, k, v))
    inputs, sums = _beside(inputs, jax_compat.tree_to_varying(tuple(zeros), axes))
    rows_N, blocks_N = _places(*inputs.q.shape[:2])

    def of_block(n: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        dq, dk, dv = sums
        row, block = rows_N[n], blocks_N[n]
        block_inputs = jax.tree.map(lambda x: x[row, block], inputs)
        queries = _at(pairs.queries, row, block)

        def add(n: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq_tGRK, dk, dv = sums
            key_block = pairs.lists_BPN[row, block, n]
            keys = _at(pairs.keys, row, key_block)
            pair_dq, pair_dk, pair_dv = _gradients(
                blocks, block_inputs, k[row, key_block], v[row, key_block], queries, keys
            )
            return dq_tGRK + pair_dq, dk.at[row, key_block].add(pair_dk), dv.at[row, key_block].add(pair_dv)

        start = jax_compat.to_varying(jnp.zeros(block_inputs.q.shape, jnp.float32), axes)
        dq_tGRK, dk, dv = lax.fori_loop(0, pairs.counts_BP[row, block], add, (start, dk, dv))
        return dq.at[row, block].set(dq_tGRK), dk, dv

    return lax.fori_loop(0, len(rows_N), of_block, sums)


def _beside(inputs: Any, zeros: Any) -> tuple[Any, Any]:
    """The inputs of a loop and the zeros that it begins with, which are not in memory before these inputs are.

    XLA for GPUs otherwise makes the zeros of all of a program's loops in one kernel at its beginning.
    """
    return lax.optimization_barrier((inputs, zeros))


def _places(rows: int, blocks: int) -> tuple[Array, Array]:
    """The row and the index in the row of every block of queries."""
    rows_N, blocks_N = jnp.divmod(jnp.arange(rows * blocks, dtype=jnp.int32), blocks)
    return rows_N, blocks_N


def _at(inputs: MaskInputs, row: Array, block: Array) -> MaskInputs:
    """The mask's inputs of one block of a row."""
    return jax.tree.map(lambda x: x[row, block], inputs)
