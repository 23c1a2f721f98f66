"""Attention by cuDNN's fused kernels on NVIDIA's GPUs, forward and backward.

cuDNN supports rows of one segment, and on newer devices packed rows as a list of runs, whose length is static. Which of
the two a microbatch needs is known on the host, and is a static property of the program (``max_runs``). Rows that cuDNN
does not support are computed blockwise. The residuals are queries, keys, values, output, and one number a token and
head for each row, or for each run of the list.

Shapes: B rows, T tokens, H query heads, G key/value heads, K head width (local to this rank); N rows, or runs of the
list.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtyping import Array, Float

from mmjax import jax_compat
from mmjax.attention import blockwise, row_runs
from mmjax.attention.custom_vjp import TokenInfo
from mmjax.attention.kernels import AttentionCall, Kernel, RowOrder, segment_runs
from mmjax.attention.row_runs import ANY_RUNS

_PACKED_DEVICES = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "B300", "GB200", "GB300")
"""Words in the names of devices on which cuDNN supports packed rows: compute capability 9.0 and later."""


@dataclass(frozen=True)
class CuDNN(Kernel):
    """Attention of rows that are complete on this rank.

    Attributes:
      max_runs: 1 for whole rows, n for packed rows of at most n runs on average; other rows are computed blockwise.
    """

    max_runs: int = ANY_RUNS
    LIBRARY = "cudnn"
    DEVICES = ("NVIDIA",)

    @classmethod
    def of(cls, call: AttentionCall) -> CuDNN:
        """The kernel for a call that ``refusal`` does not refuse."""
        return replace(super().of(call), max_runs=cls.compiled_runs(call))

    @classmethod
    def compiled_runs(cls, call: AttentionCall) -> int:
        """See ``Kernel.compiled_runs``: packed rows need a newer device, and a mask without a window."""
        packed = not call.window and call.device_is_one_of(*_PACKED_DEVICES)
        return call.max_runs if call.max_runs <= (row_runs.MAX_PACKED_RUNS if packed else 1) else ANY_RUNS

    @property
    def causal(self) -> bool:
        """Whether the mask is causal."""
        return self.mask.kind == "causal"

    def forward(
        self, q: Array, k: Array, v: Array, query_tokens: TokenInfo, key_tokens: TokenInfo
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "N H T"]]:
        """The output, and the fp32 logarithm of each softmax's denominator. ``query_tokens`` is not read.

        Args:
          q, k, v: queries ``[B, T, H, K]`` and keys with rotary embedding, and values, ``[B, S, G, K]``.
          query_tokens, key_tokens: results of ``custom_vjp.token_info`` for queries and keys: host inputs by name,
            "segments" among them.
        """
        del query_tokens  # queries and keys are the same tokens
        row_order, (segments_BT, q, k, v) = self._in_row_order(key_tokens, q, k, v)
        if self.max_runs == ANY_RUNS:
            tokens = {"segments": segments_BT}
            out, stats = blockwise.forward(self.mask, q, k, v, tokens, tokens)
        else:
            runs, window = self._runs(segments_BT), self.mask.window
            out, stats = jax_compat.cudnn_forward(q, k, v, runs, causal=self.causal, window=window)
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
        row_order, (segments_BT, q, k, v, out, d_out) = self._in_row_order(key_tokens, q, k, v, out, d_out)
        if self.max_runs == ANY_RUNS:
            tokens = {"segments": segments_BT}
            gradients = blockwise.backward(self.mask, q, k, v, tokens, tokens, out, stats, d_out)
        else:
            runs, window = self._runs(segments_BT), self.mask.window
            gradients = jax_compat.cudnn_backward(q, k, v, out, stats, d_out, runs, causal=self.causal, window=window)
        dq, dk, dv = map(row_order.from_row_order, gradients)
        return dq, dk, dv

    def _runs(self, segments_BT: Array) -> jax_compat.Runs | None:
        """The list of runs of packed rows; ``None`` for whole rows."""
        return None if self.max_runs == 1 else segment_runs(segments_BT, self.max_runs * len(segments_BT))

    def _in_row_order(self, key_tokens: TokenInfo, *arrays: Array) -> tuple[RowOrder, list[Array]]:
        """The permutation to row order; and the permuted segments, followed by the permuted arrays."""
        row_order = RowOrder.of(key_tokens, in_row_order=self.in_row_order)
        return row_order, [row_order.to_row_order(x) for x in jax_compat.alike(key_tokens["segments"], *arrays)]
