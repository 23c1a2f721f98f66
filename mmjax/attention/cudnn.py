"""Attention by cuDNN's fused kernels on NVIDIA's GPUs, forward and backward.

cuDNN supports rows of one segment, and on newer devices packed rows as a list of runs, whose length is static. Which of
the two a microbatch needs depends on its data. So a program has three branches, one for each and one of blockwise
attention for rows with more runs, and selects one of them at run time. The residuals are the same for all: queries,
keys, values, output, and one number a token and head for each run that a row may have.

Shapes: B rows, T tokens, H query heads, G key/value heads, K head width (local to this rank); N = B · ``RUNS_PER_ROW``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.attention import blockwise
from mmjax.attention.custom_vjp import TokenInfo
from mmjax.attention.kernels import AttentionCall, Kernel, RowOrder, run_starts, segment_runs

RUNS_PER_ROW = 16
"""The maximal number of runs of a packed row, padding included, on average over a rank's rows."""
_PACKED_DEVICES = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "B300", "GB200", "GB300")
"""Words in the names of devices on which cuDNN supports packed rows: compute capability 9.0 and later."""


@dataclass(frozen=True)
class CuDNN(Kernel):
    """Attention of rows that are complete on this rank.

    Attributes:
      packed: whether packed rows are supported, by the device and with the mask.
    """

    packed: bool = False
    LIBRARY = "cudnn"
    DEVICES = ("NVIDIA",)

    @classmethod
    def of(cls, call: AttentionCall) -> CuDNN:
        """The kernel for a call that ``refusal`` does not refuse."""
        return replace(super().of(call), packed=not call.window and call.device_is_one_of(*_PACKED_DEVICES))

    @property
    def causal(self) -> bool:
        """Whether the mask is causal."""
        return self.mask.kind == "causal"

    def forward(
        self, q: Array, k: Array, v: Array, query_tokens: TokenInfo, key_tokens: TokenInfo
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "N H T"]]:
        """The output, and the fp32 logarithm of each softmax's denominator by run. ``query_tokens`` is not read.

        Args:
          q, k, v: queries ``[B, T, H, K]`` and keys with rotary embedding, and values, ``[B, S, G, K]``.
          query_tokens, key_tokens: results of ``custom_vjp.token_info`` for queries and keys: host inputs by name,
            "segments" among them.
        """
        del query_tokens  # queries and keys are the same tokens
        branches = [_unpacked_forward, *[_packed_forward] * self.packed, _blockwise_forward]
        row_order, (segments_BT, *arrays) = self._in_row_order(key_tokens, q, k, v)
        bound = [partial(branch, self) for branch in branches]
        out, stats = lax.switch(_branch_index(self, segments_BT), bound, *arrays, segments_BT)
        return row_order.from_row_order(out), stats

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        query_tokens: TokenInfo,
        key_tokens: TokenInfo,
        out: Array,
        stats: Array,
        d_out: Array,
    ) -> tuple[Array, Array, Array]:
        """Gradients of queries, keys and values, in the shapes of these. ``query_tokens`` is not read.

        Args:
          q, k, v, query_tokens, key_tokens: the arguments of ``forward``.
          out, stats: the results of ``forward``.
          d_out: the gradient of ``out``.
        """
        del query_tokens
        branches = [_unpacked_backward, *[_packed_backward] * self.packed, _blockwise_backward]
        row_order, (segments_BT, q, k, v, out, d_out) = self._in_row_order(key_tokens, q, k, v, out, d_out)
        bound = [partial(branch, self) for branch in branches]
        gradients = lax.switch(_branch_index(self, segments_BT), bound, q, k, v, out, stats, d_out, segments_BT)
        dq, dk, dv = map(row_order.from_row_order, gradients)
        return dq, dk, dv

    def _in_row_order(self, key_tokens: TokenInfo, *arrays: Array) -> tuple[RowOrder, list[Array]]:
        """The permutation to row order; and the permuted segments, followed by the permuted arrays."""
        row_order = RowOrder.of(key_tokens, in_row_order=self.in_row_order)
        return row_order, [row_order.to_row_order(x) for x in jax_compat.alike(key_tokens["segments"], *arrays)]


def _branch_index(call: CuDNN, segments_BT: Int[Array, "B T"]) -> Int[Array, ""]:
    """The branch to run: 0 for rows of one segment, 1 for packed rows if ``call.packed``, and the last for others."""
    starts_BT = run_starts(segments_BT)
    # A row of one segment may have padding at its end: a causal mask hides it from all tokens, a full mask does not.
    later_run_BT = starts_BT[:, 1:] & (segments_BT[:, 1:] > 0) if call.causal else starts_BT[:, 1:]
    too_many = starts_BT.sum() > RUNS_PER_ROW * len(segments_BT) if call.packed else False
    return later_run_BT.any().astype(jnp.int32) + (later_run_BT.any() & too_many)


# ---- rows of one segment ---------------------------------------------------------------------------------------------


def _unpacked_forward(call: CuDNN, q: Array, k: Array, v: Array, segments_BT: Array) -> tuple[Array, Array]:
    out, stats_BHT = jax_compat.cudnn_forward(q, k, v, causal=call.causal, window=call.mask.window)
    return out, _pad_to_runs(stats_BHT)


def _unpacked_backward(
    call: CuDNN, q: Array, k: Array, v: Array, out: Array, stats_NHT: Array, d_out: Array, segments_BT: Array
) -> tuple[Array, ...]:
    stats_BHT = stats_NHT[: len(q)]
    return jax_compat.cudnn_backward(q, k, v, out, stats_BHT, d_out, causal=call.causal, window=call.mask.window)


def _pad_to_runs(stats_BHT: Float[Array, "B H T"]) -> Float[Array, "N H T"]:
    """Statistics by row as the first B of the N statistics by run."""
    return jnp.pad(stats_BHT, [(0, (RUNS_PER_ROW - 1) * len(stats_BHT)), (0, 0), (0, 0)])


# ---- packed rows -----------------------------------------------------------------------------------------------------


def _packed_forward(call: CuDNN, q: Array, k: Array, v: Array, segments_BT: Array) -> tuple[Array, Array]:
    runs = segment_runs(segments_BT, RUNS_PER_ROW * len(segments_BT))
    return jax_compat.cudnn_forward(q, k, v, runs, causal=call.causal)


def _packed_backward(
    call: CuDNN, q: Array, k: Array, v: Array, out: Array, stats_NHT: Array, d_out: Array, segments_BT: Array
) -> tuple[Array, ...]:
    runs = segment_runs(segments_BT, RUNS_PER_ROW * len(segments_BT))
    return jax_compat.cudnn_backward(q, k, v, out, stats_NHT, d_out, runs, causal=call.causal)


# ---- rows of many runs -----------------------------------------------------------------------------------------------


def _blockwise_forward(call: CuDNN, q: Array, k: Array, v: Array, segments_BT: Array) -> tuple[Array, Array]:
    tokens = {"segments": segments_BT}
    out, stats_BHT = blockwise.forward(call.mask, q, k, v, tokens, tokens)
    return out, _pad_to_runs(stats_BHT)


def _blockwise_backward(
    call: CuDNN, q: Array, k: Array, v: Array, out: Array, stats_NHT: Array, d_out: Array, segments_BT: Array
) -> tuple[Array, ...]:
    tokens, stats_BHT = {"segments": segments_BT}, stats_NHT[: len(q)]
    gradients = blockwise.backward(call.mask, q, k, v, tokens, tokens, out, stats_BHT, d_out)
    return tuple(d.astype(x.dtype) for d, x in zip(gradients, (q, k, v), strict=True))
