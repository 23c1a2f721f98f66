"""Context parallelism: attention of queries to keys on other ranks, where the tokens of a row are split over ranks.

The residuals are this rank's queries, keys, values and output, and one number a token and head. Keys and values of
other ranks are exchanged again in backward. Gradients of keys and values are summed in fp32 on their way to the keys'
ranks.

* *gather*: every rank gets all keys and values, some heads at a time, so that the next arrive while these are used.
* *need*: every rank gets the blocks of keys and values that its queries may see (see ``needed_blocks``).
* *ring*: keys and values go from rank to rank (Liu et al. 2023, "Ring Attention with Blockwise Transformers", §3).
* *all-to-all*: every rank gets all tokens of some heads (Jacobs et al. 2023, "DeepSpeed Ulysses", §3).

Shapes: B rows, T tokens of a rank, S = T · (ranks) tokens of a row, H query heads, G key/value heads, K width of
queries and keys, V of values (all local to this rank's part of tp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mmjax import jax_compat
from mmjax.attention import blockwise
from mmjax.attention.custom_vjp import AttentionVjp, TokenInfo, attend, token_info
from mmjax.attention.mask import Mask
from mmjax.attention.needed_blocks import NeededBlocksExchange, max_by_distance, needed_blocks
from mmjax.attention.tokens import Tokens

MAX_CHUNKS = 4
"""The maximal number of chunks of heads in *gather*: only the first all-gather is not hidden behind computation."""


@dataclass(frozen=True)
class CpGroup:
    """The ranks of cp that have parts of the same rows.

    Attributes:
      axes: the mesh axes that number the ranks.
      size: the number of ranks.
    """

    axes: tuple[str, ...]
    size: int

    @classmethod
    def over(cls, axes: tuple[str, ...]) -> CpGroup:
        """The ranks along some mesh axes, such as ("cp",); to be called inside ``shard_map``."""
        return cls(axes, lax.axis_size(axes))

    @property
    def rank(self) -> Array:
        """This rank's number in the group, an int32 scalar."""
        return lax.axis_index(self.axes)

    def all_gather(self, tree: Any) -> Any:
        """A tree of complete rows ``[B, S, ...]`` from each rank's ``[B, T, ...]``, in the order of the ranks."""
        return lax.all_gather(tree, self.axes, axis=1, tiled=True)

    def reduce_scatter(self, tree: Any) -> Any:
        """This rank's tokens ``[B, T, ...]`` of the sum over the ranks of complete rows ``[B, S, ...]``, for each array
        of a tree.
        """
        return lax.psum_scatter(tree, self.axes, scatter_dimension=1, tiled=True)

    def ring_shift(self, tree: Any) -> Any:
        """The next rank's arrays in a ring, as a tree like this rank's: after k shifts a rank has the arrays of rank +
        k.
        """
        routes = [(rank, (rank - 1) % self.size) for rank in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, routes), tree)

    def tokens_to_heads(self, x_BTHK: Array) -> Array:
        """Complete rows ``[B, S, H/R, K]`` of this rank's share of the heads, from this rank's tokens ``[B, T, H, K]``
        of all heads.

        The number of ranks R divides H.
        """
        return lax.all_to_all(x_BTHK, self.axes, split_axis=2, concat_axis=1, tiled=True)

    def heads_to_tokens(self, x_BSHK: Array) -> Array:
        """The inverse of ``tokens_to_heads``: ``[B, T, H, K]`` from ``[B, S, H/R, K]``."""
        return lax.all_to_all(x_BSHK, self.axes, split_axis=1, concat_axis=2, tiled=True)

    def tokens_of_rank(self, row_tokens: TokenInfo, rank: Array) -> TokenInfo:
        """The tokens ``[B, T, ...]`` of rank number ``rank``, by name, from the arrays ``[B, S, ...]`` of complete
        rows.
        """
        length = next(iter(row_tokens.values())).shape[1] // self.size
        return {name: lax.dynamic_slice_in_dim(x, rank * length, length, 1) for name, x in row_tokens.items()}


def gather_tokens(tokens: Tokens, mask: Mask, axes: tuple[str, ...], cp_way: str) -> Tokens:
    """The tokens of complete rows, from this rank's tokens; equal on all ranks of the group. Inside ``shard_map``.

    Their inputs are those of the mask, "order" included, and the plan of the exchange (see ``Exchange.plan``).

    Args:
      tokens: this rank's tokens, such as ``Tokens.of(inputs, ("cp",))`` with "segments" ``[B, T]`` in ``inputs``.
      mask: the attention mask, such as ``Mask("causal")``.
      axes: mesh axes that the tokens of rows are split over, such as ("cp",).
      cp_way: a key of ``EXCHANGES``: "gather", "need", "ring" or "all-to-all".

    Raises:
      ValueError: a host input of the mask is missing.
    """
    rank_tokens = token_info_with_order(tokens, mask)
    row_tokens = {name: jax_compat.all_gather_invariant(x, axes, 1) for name, x in rank_tokens.items()}
    return Tokens.of(row_tokens | EXCHANGES[cp_way].plan(mask, CpGroup.over(axes), row_tokens))


def token_info_with_order(tokens: Tokens, mask: Mask) -> TokenInfo:
    """The host inputs that the mask reads, by name; with "order" ``[B, T]`` if it reads orders, even where that is
    implicit.

    Always has "segments" ``[B, T]``; by the mask also "order", "positions", "is", "attends" and "items". An implicit
    order depends on the rank, so it has to be exchanged.

    Args:
      tokens: this rank's tokens, such as ``Tokens.of(inputs, ("cp",))`` with "segments" ``[B, T]`` in ``inputs``.
      mask: the attention mask, such as ``Mask("causal")``.

    Raises:
      ValueError: a host input of the mask is missing.
    """
    return token_info(tokens, mask) | ({"order": tokens.orders_BT} if "order" in mask.input_names else {})


def attend_across_ranks(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGV: Float[Array, "B T G V"],
    tokens: Tokens,
    keys: Tokens,
    *,
    kernel: AttentionVjp,
    axes: tuple[str, ...],
    cp_way: str,
    precomputed: TokenInfo | None = None,
    distances: tuple[int, ...] | None = None,
) -> Float[Array, "B T H V"]:
    """Grouped-query attention within segments whose tokens are on several ranks; differentiable. Inside ``shard_map``.

    Args:
      q_BTHK, k_BTGK, v_BTGV: queries, keys and values of this rank's tokens.
      tokens: this rank's tokens, such as ``Tokens.of(inputs, ("cp",))`` with "segments" ``[B, T]`` in ``inputs``.
      keys: the tokens of complete rows, ``gather_tokens(tokens, kernel.mask, axes, cp_way)``.
      kernel: computes the attention of queries to keys that are on one rank; its mask and soft cap are those of the
        attention, such as ``Blockwise(Mask("causal"))``.
      axes: mesh axes that the tokens of rows are split over, such as ("cp",).
      cp_way: a key of ``EXCHANGES``: "gather", "need", "ring" or "all-to-all".
      precomputed: the kernel's arrays of the queries' tokens by name (see ``Backend.precompute``); ``None`` for none.
      distances: the distances over which blocks of "need" travel, with all that these rows need; ``None`` where the
        device chooses (see ``reach``).

    Raises:
      ValueError: with "all-to-all", the number of query heads is no multiple of the number of ranks.
    """
    exchange = EXCHANGES[cp_way]
    query_tokens = token_info_with_order(tokens, kernel.mask) | (precomputed or {})
    key_tokens = token_info(keys, kernel.mask) | {name: keys.inputs[name] for name in exchange.PLAN_NAMES}
    q, k, v, _ = jax_compat.alike(q_BTHK, k_BTGK, v_BTGV, lax.axis_index(axes))
    return attend(exchange(kernel.mask, kernel, CpGroup.over(axes), distances), q, k, v, query_tokens, key_tokens)


@dataclass(frozen=True)
class Exchange(AttentionVjp):
    """Attention across ranks: an exchange of tokens, and a kernel that computes on one rank.

    Attributes:
      kernel: computes the attention of queries to keys that are on one rank.
      group: the ranks.
      distances: the distances over which blocks of "need" travel; ``None`` where the device chooses (see ``reach``).
      PLAN_NAMES: names of the arrays of ``plan``.
    """

    kernel: AttentionVjp
    group: CpGroup
    distances: tuple[int, ...] | None = None
    PLAN_NAMES: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def plan(cls, mask: Mask, group: CpGroup, row_tokens: TokenInfo) -> TokenInfo:
        """Arrays that the exchange reads, computed once for all layers with a mask from the tokens of complete rows.

        Their names are ``PLAN_NAMES``; {} for an exchange without a plan. ``row_tokens`` has the mask's host inputs
        ``[B, S]``.
        """
        del mask, group, row_tokens
        return {}

    @classmethod
    def tokens_of_queries(cls, query_tokens: TokenInfo, key_tokens: TokenInfo) -> TokenInfo:
        """The description of the queries that the kernel gets: this rank's tokens, or for "all-to-all" those of
        complete rows.

        Args:
          query_tokens: this rank's tokens, and possibly arrays of ``Backend.precompute``.
          key_tokens: the tokens of complete rows.
        """
        del key_tokens
        return query_tokens


# ---- all keys on every rank ------------------------------------------------------------------------------------------


class _Gather(Exchange):
    max_chunks: ClassVar[int] = MAX_CHUNKS

    def forward(
        self, q: Array, k: Array, v: Array, query_tokens: TokenInfo, key_tokens: TokenInfo
    ) -> tuple[Array, Any]:
        collectives, key_tokens = self._collectives(key_tokens)
        outs, lses = [], []
        for q_chunk, k_chunk, v_chunk in zip(*self._head_chunks(q, k, v, groups=k.shape[2]), strict=True):
            k_rows, v_rows = collectives.all_gather((k_chunk, v_chunk))
            out, lse = self.kernel.forward(q_chunk, k_rows, v_rows, query_tokens, key_tokens)
            outs.append(out)
            lses.append(lse)
        return jnp.concatenate(outs, axis=2), tuple(lses)

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        query_tokens: TokenInfo,
        key_tokens: TokenInfo,
        out: Array,
        stats: Any,
        d_out: Array,
    ) -> tuple[Array, Array, Array]:
        collectives, key_tokens = self._collectives(key_tokens)
        chunks = self._head_chunks(q, k, v, out, d_out, groups=k.shape[2])
        gradients = []
        for q_chunk, k_chunk, v_chunk, out_chunk, d_chunk, lse in zip(*chunks, stats, strict=True):
            k_rows, v_rows = collectives.all_gather((k_chunk, v_chunk))
            dq, dk, dv = self.kernel.backward(
                q_chunk, k_rows, v_rows, query_tokens, key_tokens, out_chunk, lse, d_chunk
            )
            gradients.append((dq, *collectives.reduce_scatter((dk.astype(jnp.float32), dv.astype(jnp.float32)))))
        dq, dk, dv = (jnp.concatenate(chunks, axis=2) for chunks in zip(*gradients, strict=True))
        return dq, dk, dv

    def _collectives(self, key_tokens: TokenInfo) -> tuple[CpGroup | NeededBlocksExchange, TokenInfo]:
        """The object that gathers keys and values and scatters their gradients; and the keys' tokens for the kernel."""
        return self.group, key_tokens

    def _head_chunks(self, *arrays: Array, groups: int) -> list[list[Array]]:
        """Splits the heads of each array into the same number of chunks: key/value heads and their query heads."""
        count = next(n for n in range(min(self.max_chunks, groups), 0, -1) if groups % n == 0)
        return [jnp.split(x, count, axis=2) for x in arrays]


class _NeededBlocks(_Gather):
    """Gathers all heads at once: a collective inside a branch cannot overlap, and each branch waits for its index."""

    PLAN_NAMES = ("needed", "max_needed")
    max_chunks = 1

    @classmethod
    def plan(cls, mask: Mask, group: CpGroup, row_tokens: TokenInfo) -> TokenInfo:
        needed_BRRN = needed_blocks(mask, mask.inputs(Tokens.of(row_tokens)), group.size)
        return {"needed": needed_BRRN, "max_needed": max_by_distance(needed_BRRN)}

    def _collectives(self, key_tokens: TokenInfo) -> tuple[CpGroup | NeededBlocksExchange, TokenInfo]:
        needed_BRRN, max_R = key_tokens["needed"], key_tokens["max_needed"]
        exchange = NeededBlocksExchange(self.group.axes, needed_BRRN, max_R, self.distances)
        return exchange, {name: x for name, x in key_tokens.items() if name not in self.PLAN_NAMES}


# ---- keys and values go round a ring ---------------------------------------------------------------------------------


class _Ring(Exchange):
    def forward(
        self, q: Array, k: Array, v: Array, query_tokens: TokenInfo, key_tokens: TokenInfo
    ) -> tuple[Array, Any]:
        attention = partial(blockwise.forward, self.mask, soft_cap=self.kernel.soft_cap)
        out, lse = attention(q, k, v, query_tokens, self._keys_of_round(key_tokens, 0))
        sums = out.astype(jnp.float32)
        for number in range(1, self.group.size):
            k, v = self.group.ring_shift((k, v))
            round_keys = self._keys_of_round(key_tokens, number)
            round_out, round_lse = attention(q, k, v, query_tokens, round_keys)
            total_lse = jnp.logaddexp(lse, round_lse)
            weights = [jnp.swapaxes(jnp.exp(part_lse - total_lse), 1, 2)[..., None] for part_lse in (lse, round_lse)]
            sums, lse = sums * weights[0] + round_out.astype(jnp.float32) * weights[1], total_lse
        return sums.astype(q.dtype), lse

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        query_tokens: TokenInfo,
        key_tokens: TokenInfo,
        out: Array,
        stats: Any,
        d_out: Array,
    ) -> tuple[Array, Array, Array]:
        gradients = partial(blockwise.backward, self.mask, soft_cap=self.kernel.soft_cap)
        round_keys = self._keys_of_round(key_tokens, 0)
        dq, dk, dv = gradients(q, k, v, query_tokens, round_keys, out, stats, d_out)
        for number in range(1, self.group.size):
            (k, v), (dk, dv) = self.group.ring_shift(((k, v), (dk, dv)))
            round_keys = self._keys_of_round(key_tokens, number)
            round_dq, round_dk, round_dv = gradients(q, k, v, query_tokens, round_keys, out, stats, d_out)
            dq, dk, dv = dq + round_dq, dk + round_dk, dv + round_dv
        dk, dv = self.group.ring_shift((dk, dv))  # to the ranks of the keys
        return dq, dk, dv

    def _keys_of_round(self, key_tokens: TokenInfo, number: int) -> TokenInfo:
        """The description of the keys that are on this rank in a round."""
        return self.group.tokens_of_rank(key_tokens, (self.group.rank + number) % self.group.size)


# ---- all tokens of some heads ----------------------------------------------------------------------------------------


class _AllToAll(Exchange):
    @classmethod
    def tokens_of_queries(cls, query_tokens: TokenInfo, key_tokens: TokenInfo) -> TokenInfo:
        return key_tokens | {name: x for name, x in query_tokens.items() if name not in key_tokens}

    def forward(
        self, q: Array, k: Array, v: Array, query_tokens: TokenInfo, key_tokens: TokenInfo
    ) -> tuple[Array, Any]:
        q, k, v = self._tokens_to_heads(q, k, v)
        out, lse = self.kernel.forward(q, k, v, self.tokens_of_queries(query_tokens, key_tokens), key_tokens)
        return self.group.heads_to_tokens(out), lse

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        query_tokens: TokenInfo,
        key_tokens: TokenInfo,
        out: Array,
        stats: Any,
        d_out: Array,
    ) -> tuple[Array, Array, Array]:
        groups, repeats = k.shape[2], self._repeats(q, k)
        q, k, v = self._tokens_to_heads(q, k, v)
        out, d_out = self.group.tokens_to_heads(out), self.group.tokens_to_heads(d_out)
        query_tokens = self.tokens_of_queries(query_tokens, key_tokens)
        gradients = self.kernel.backward(q, k, v, query_tokens, key_tokens, out, stats, d_out)
        dq, dk, dv = (self.group.heads_to_tokens(d.astype(jnp.float32)) for d in gradients)
        dk, dv = (d.reshape(*d.shape[:2], groups, repeats, d.shape[3]).sum(axis=3) for d in (dk, dv))
        return dq, dk, dv

    def _tokens_to_heads(self, q: Array, k: Array, v: Array) -> list[Array]:
        """Complete rows of this rank's heads; key/value heads are repeated as often as needed."""
        repeats = self._repeats(q, k)
        arrays = (q, jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2))
        return [self.group.tokens_to_heads(x) for x in arrays]

    def _repeats(self, q: Array, k: Array) -> int:
        """The number of copies of each key/value head, so that every rank has those that its query heads attend to.

        Raises:
          ValueError: the number of query heads is no multiple of the number of ranks.
        """
        heads, groups, ranks = q.shape[2], k.shape[2], self.group.size
        if heads % ranks:
            fix = "use 'gather' or 'ring'"
            raise ValueError(f"Layout.cp_way='all-to-all': {heads} heads of a rank do not divide by cp={ranks}; {fix}")
        return next(n for n in range(1, heads // groups + 1) if groups * n % ranks == 0 and heads % (groups * n) == 0)


EXCHANGES: Mapping[str, type[Exchange]] = {
    "gather": _Gather,
    "need": _NeededBlocks,
    "ring": _Ring,
    "all-to-all": _AllToAll,
}
"""Exchanges by the value of ``Layout.cp_way``."""
