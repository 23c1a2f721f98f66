"""The base class of libraries' kernels, the description of a call, and the runs and intervals that kernels read.

A run is a stretch of neighbouring tokens of one segment, or of padding.

Shapes: B rows, T queries, S keys, H query heads, G key/value heads, K head width, N the maximal number of runs of all
rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mmjax import jax_compat
from mmjax.attention.custom_vjp import AttentionVjp, TokenInfo
from mmjax.attention.mask import Mask, MaskInputs
from mmjax.attention.row_runs import ANY_RUNS
from mmjax.attention.settings import LIBRARIES
from mmjax.attention.tokens import Tokens, pad_to_multiple, take_per_row


@dataclass(frozen=True)
class AttentionCall:
    """The properties of an attention call that are static when its program is traced.

    Attributes:
      platform, device_kind: the devices of the program, such as "gpu" and "NVIDIA H100 80GB HBM3".
      mask: the attention mask.
      dtype: the dtype of queries.
      queries, keys: numbers of queries and keys in a row.
      heads, groups, width: number of query heads, number of key/value heads, width of a head.
      cp_way: how ranks exchange tokens, a key of ``exchange.EXCHANGES``; "" where rows are complete on each rank.
      in_row_order: whether tokens are stored in the order of their rows, and queries and keys are the same tokens.
      max_runs: the known bound on the number of runs in rows (see ``row_runs``).
      value_width: width of a head of values; 0 stands for ``width``.
      soft_cap: see ``AttentionVjp``.
    """

    platform: str
    device_kind: str
    mask: Mask
    dtype: str
    queries: int
    keys: int
    heads: int
    groups: int
    width: int
    cp_way: str = ""
    in_row_order: bool = True
    max_runs: int = ANY_RUNS
    value_width: int = 0
    soft_cap: float = 0.0

    @classmethod
    def of(
        cls,
        q_BTHK: Float[Array, "B T H K"],
        k_BSGK: Float[Array, "B S G K"],
        tokens: Tokens,
        mask: Mask,
        keys: Tokens | None = None,
        cp_way: str = "",
        max_runs: int = ANY_RUNS,
        value_width: int = 0,
        soft_cap: float = 0.0,
    ) -> AttentionCall:
        """The call with these arguments on the devices of the trace; with ``cp_way`` they are one rank's arguments.

        ``keys`` are the keys' tokens; ``None`` stands for ``tokens``, the queries'. For ``max_runs`` see ``row_runs``.
        ``value_width`` is the width of a head of values; 0 stands for that of queries. For ``soft_cap`` see
        ``AttentionVjp``.
        """
        platform, device_kind = jax_compat.traced_devices()
        queries, heads, width = q_BTHK.shape[1:]
        return cls(
            platform=platform,
            device_kind=device_kind,
            mask=mask,
            dtype=str(q_BTHK.dtype),
            queries=queries,
            keys=k_BSGK.shape[1],
            heads=heads,
            groups=k_BSGK.shape[2],
            width=width,
            cp_way=cp_way,
            in_row_order=not cp_way and (keys is None or keys is tokens) and "order" not in tokens.inputs,
            max_runs=max_runs,
            value_width=value_width,
            soft_cap=soft_cap,
        )

    def device_is_one_of(self, *words: str) -> bool:
        """Whether the device's name contains one of the words, such as "H100", as a complete word."""
        return not {*words}.isdisjoint(self.device_kind.replace("-", " ").split())

    @property
    def window(self) -> int:
        """The mask's sliding window; 0 where it hides no token of a row."""
        return self.mask.window if self.cp_way or self.mask.window < self.queries else 0


@dataclass(frozen=True)
class Kernel(AttentionVjp):
    """Attention by a library's kernels.

    Attributes:
      in_row_order: see ``AttentionCall``.
      LIBRARY: the library's key in ``settings.LIBRARIES``.
      DEVICES: words in the names of supported devices.
      ONE_INTERVAL: whether a query may see one interval of keys alone, so that under rules about media the tokens of
        each have to be neighbours.
    """

    in_row_order: bool = True
    LIBRARY: ClassVar[str]
    DEVICES: ClassVar[tuple[str, ...]]
    ONE_INTERVAL: ClassVar[bool] = False

    @classmethod
    def of(cls, call: AttentionCall) -> Self:
        """The kernel for a call that ``refusal`` does not refuse."""
        return cls(replace(call.mask, window=call.window), call.in_row_order, soft_cap=call.soft_cap)

    @classmethod
    def refusal(cls, call: AttentionCall) -> str:
        """The reason in words why the library cannot compute a call on its device; "" where it can."""
        library = LIBRARIES[cls.LIBRARY]
        if call.platform != "gpu" or not call.device_is_one_of(*cls.DEVICES):
            return f"{library.name} runs on {library.devices} and this is {call.device_kind}"
        if call.dtype not in library.dtypes:
            return f"{library.name} takes {' and '.join(library.dtypes)} and queries are {call.dtype}"
        if not call.in_row_order and not call.cp_way:
            return f"{library.name} reads a token's place from its index, and rows are cut or permuted"
        return library.refusal(
            call.width,
            call.mask.grid_window,
            call.mask.kind,
            call.cp_way,
            value_width=call.value_width,
            soft_cap=call.soft_cap,
        )

    @classmethod
    def compiled_runs(cls, call: AttentionCall) -> int:
        """The value of ``max_runs`` for which the call is compiled: ``ANY_RUNS`` for a kernel that takes any rows.

        Calls with equal values have equal programs.
        """
        del call
        return ANY_RUNS

    @classmethod
    def precompute(cls, mask: Mask, query_tokens: TokenInfo, key_tokens: TokenInfo, *, in_row_order: bool) -> TokenInfo:
        """Arrays by name that ``forward`` and ``backward`` read from ``query_tokens``, computed once for all layers
        with a mask.

        {} for a kernel without such arrays.

        Args:
          mask: the mask of the layers.
          query_tokens, key_tokens: the host inputs of the queries' and the keys' tokens, see ``custom_vjp.token_info``.
          in_row_order: whether tokens are stored in the order of their rows, and queries and keys are the same tokens.
        """
        del mask, query_tokens, key_tokens, in_row_order
        return {}


def run_starts(segments_BT: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Whether each token is the first of a run: of neighbouring tokens of one segment, or of padding.

    The first token of a row always is. ``segments_BT`` has the sample or medium of each token, from 1; 0 is padding.
    """
    previous_BT = jnp.concatenate([jnp.full_like(segments_BT[:, :1], -1), segments_BT[:, :-1]], axis=1)
    return segments_BT != previous_BT


def segment_runs(segments_BT: Int[Array, "B T"], max_runs: int) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
    """First token and length of each run, int32, with tokens numbered through all rows; (B·T, 0) behind the last run.

    Args:
      segments_BT: the sample or medium that each token belongs to, from 1; 0 is padding, which has runs too.
      max_runs: the size N of the results; at least the number of runs.
    """
    total = segments_BT.size
    (first_N,) = jnp.nonzero(run_starts(segments_BT).reshape(-1), size=max_runs, fill_value=total)
    ends_N = jnp.concatenate([first_N[1:], jnp.full_like(first_N[:1], total)])
    return first_N.astype(jnp.int32), (ends_N - first_N).astype(jnp.int32)


def run_intervals(segments_BT: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """First token (included) and last token (excluded) of each token's run, as int32 indices in the row.

    A run is a stretch of neighbouring tokens of one segment, or of padding. ``segments_BT`` has the sample or medium of
    each token, from 1; 0 is padding.
    """
    T = segments_BT.shape[1]
    index_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), segments_BT.shape)
    starts_BT = run_starts(segments_BT)
    first_BT = lax.cummax(jnp.where(starts_BT, index_BT, 0), axis=1)
    next_BT = jnp.concatenate([jnp.where(starts_BT, index_BT, T)[:, 1:], jnp.full_like(index_BT[:, :1], T)], axis=1)
    return first_BT, lax.cummin(next_BT, axis=1, reverse=True)


# ---- tokens that are not in row order --------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowOrder:
    """Permutations of keys into row order and back; the identity where they are ``None``.

    Attributes:
      index_BS: for each place in the row, the index of the key that belongs there.
      place_BS: for each key, its place in the row.
    """

    index_BS: Int[Array, "B S"] | None = None
    place_BS: Int[Array, "B S"] | None = None

    @classmethod
    def of(cls, key_tokens: TokenInfo, *, in_row_order: bool = False) -> RowOrder:
        """The permutations of the keys by "order"; where the mask reads no order, tokens are sorted by segment.

        ``key_tokens`` are host inputs by name, ``[B, S]``. The result is the identity if the keys are ``in_row_order``
        already.
        """
        if in_row_order:
            return cls()
        if "order" not in key_tokens:
            index_BS = jnp.argsort(key_tokens["segments"], axis=1, stable=True).astype(jnp.int32)
            return cls(index_BS, _inverse(index_BS))
        return cls(_inverse(key_tokens["order"]), key_tokens["order"])

    def to_row_order(self, x_BS: Array) -> Array:
        """An array of keys ``[B, S, ...]`` permuted into row order."""
        return x_BS if self.index_BS is None else take_per_row(x_BS, self.index_BS)

    def from_row_order(self, x_BS: Array) -> Array:
        """An array of keys ``[B, S, ...]`` permuted back from row order: the inverse of ``to_row_order``."""
        return x_BS if self.place_BS is None else take_per_row(x_BS, self.place_BS)


def _inverse(order_BS: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """The inverse permutation of each row, without sorting."""

    def of_row(order_S: Array) -> Array:
        index_S = lax.broadcasted_iota(jnp.int32, order_S.shape, 0)
        return jnp.zeros_like(index_S).at[order_S].set(index_S, unique_indices=True, mode="promise_in_bounds")

    return jax.vmap(of_row)(order_BS)


def visible_intervals(
    mask: Mask, query_tokens: TokenInfo, key_tokens: TokenInfo, block: int = 128
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """The interval of keys that each query sees, under a mask that shows intervals.

    All pairs are tested, ``block`` queries at a time; two numbers a query are stored.

    Args:
      mask: the attention mask, such as ``Mask("causal")``.
      query_tokens, key_tokens: host inputs by name of the T queries and the S keys, such as {"segments": segments_BT,
        "order": order_BT}, as ``custom_vjp.token_info`` makes them.
      block: number of queries that are tested at a time.

    Returns:
      The index of the first key of each query's interval, and the index behind its last key, both int32. The interval
        of padding is the first key.
    """
    queries, keys = (mask.inputs(Tokens.of(tokens)) for tokens in (query_tokens, key_tokens))
    index_S = jnp.arange(keys.segments.shape[1], dtype=jnp.int32)
    T, block = queries.segments.shape[1], min(block, queries.segments.shape[1])

    def of_block(inputs: MaskInputs) -> tuple[Array, Array]:
        allowed_BtS = mask.allowed(inputs, keys) & (inputs.segments > 0)[..., None]
        first_Bt = jnp.where(allowed_BtS, index_S, len(index_S)).min(axis=-1)
        last_Bt = jnp.where(allowed_BtS, index_S + 1, 0).max(axis=-1)
        real_Bt = inputs.segments > 0
        return jnp.where(real_Bt, first_Bt, 0), jnp.where(real_Bt, last_Bt, 1)

    def split_rows(x_BT: Array) -> Array:
        x_BT = pad_to_multiple(x_BT, block)
        return jnp.moveaxis(x_BT.reshape(len(x_BT), -1, block, *x_BT.shape[2:]), 1, 0)

    block_results = lax.map(of_block, jax.tree.map(split_rows, queries))
    first_BT, last_BT = (jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :T] for x in block_results)
    return first_BT, last_BT
