"""Attention by tokamax's kernels for NVIDIA's Hopper GPUs: each token sees one interval of keys.

tokamax's public function takes masks of all pairs, or lengths; the kernels below it take intervals. Forward skips
blocks of keys outside of the intervals of a block of queries. Backward skips later blocks under a causal mask, and no
others.

Where tokens are not in row order, as under context parallelism, keys are permuted into row order. Then each query still
sees an interval of keys.

Shapes: B rows, T queries, S keys, H query heads, G key/value heads, K head width (all local to
this rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.attention import blockwise
from mmjax.attention.custom_vjp import TokenInfo
from mmjax.attention.kernels import Kernel, RowOrder, run_intervals, visible_intervals
from mmjax.attention.mask import Mask
from mmjax.attention.tokens import pad_to_multiple

_DEVICES = ("H100", "H200", "H800", "H20", "GH200")
"""Words in the names of devices that the kernels are written for: compute capability 9.0."""
_ROUND = 128
"""Rows are padded to a multiple of this many tokens, two blocks of queries."""
_KERNELS = "tokamax._src.ops.attention.pallas_mosaic_gpu"
_BLOCKS = {"block_q": 64, "block_kv": 128, "num_stages": 2}
"""tokamax's own choice for heads up to a width of 128; it would tune them by running, for each shape."""
_BACKWARD_BLOCKS = {"block_q_dkv": 64, "block_kv_dkv": 64, "block_q_dq": 64, "block_kv_dq": 64, "num_stages": 2}


@dataclass(frozen=True)
class Tokamax(Kernel):
    """Attention of queries in any order, where each sees an interval of keys in row order.

    Under masks that may show a query several intervals, attention is computed blockwise (see ``Mask.shows_intervals``).
    """

    LIBRARY = "tokamax"
    DEVICES = _DEVICES
    ONE_INTERVAL = True

    @classmethod
    def precompute(cls, mask: Mask, query_tokens: TokenInfo, key_tokens: TokenInfo, *, in_row_order: bool) -> TokenInfo:
        """The interval of keys that each query sees.

        Args:
          mask: the mask of the layers.
          query_tokens, key_tokens: results of ``custom_vjp.token_info`` for queries and keys: host inputs by name,
            "segments" among them.
          in_row_order: whether tokens are stored in the order of their rows, and queries and keys are the same tokens.

        Returns:
          "first" and "last" ``[B, T]``, indices in row order (see ``visible_intervals``); {} where the intervals follow
            from segments, and where there are none.
        """
        if not mask.shows_intervals or _by_segment(mask, in_row_order=in_row_order):  # ``run_intervals`` is faster
            return {}
        row_order = RowOrder.of(key_tokens, in_row_order=in_row_order)
        ordered_keys = {name: row_order.to_row_order(x) for name, x in key_tokens.items()}
        first_BT, last_BT = visible_intervals(mask, query_tokens, ordered_keys)
        return {"first": first_BT, "last": last_BT}

    def forward(
        self, q: Array, k: Array, v: Array, query_tokens: TokenInfo, key_tokens: TokenInfo
    ) -> tuple[Float[Array, "B T H K"], Any]:
        """The output, and two numbers of each softmax, each ``[B, H, T]`` with T padded to a multiple of 128.

        Blockwise it is one number, ``[B, H, T]``.

        Args:
          q, k, v: queries ``[B, T, H, K]`` and keys with rotary embedding, and values, ``[B, S, G, K]``.
          query_tokens, key_tokens: results of ``custom_vjp.token_info`` for queries and keys: host inputs by name,
            "segments" among them.
        """
        if not self.mask.shows_intervals:
            return blockwise.forward(self.mask, q, k, v, query_tokens, key_tokens, soft_cap=self.soft_cap)
        kernel, config = forward_kernel()
        options = {"out_dtype": q.dtype, "normalize_output": True, "return_residuals": True}
        options |= {"use_stable_softmax": True, "rescale_threshold": 1.0, "config": config, **self._options(q)}
        T, visible = q.shape[1], self._visible_keys(query_tokens, key_tokens)

        def of_row(qkv: list[Array], first: Array, last: Array | None) -> Any:
            return kernel(*qkv, None, None, first, last, **options)

        row_order = RowOrder.of(key_tokens, in_row_order=self.in_row_order)
        qkv = _pad_rows(q, row_order.to_row_order(k), row_order.to_row_order(v))
        out, stats = jax.vmap(of_row)(qkv, *visible.intervals)
        return _varying_like((out[:, :T], tuple(stats)), q)

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
        """Gradients of queries, keys and values, in their shapes and dtypes.

        Args:
          q, k, v, query_tokens, key_tokens: the arguments of ``forward``.
          out, stats: the results of ``forward``.
          d_out: the gradient of ``out``.
        """
        if not self.mask.shows_intervals:
            tokens = query_tokens, key_tokens
            return blockwise.backward(self.mask, q, k, v, *tokens, out, stats, d_out, soft_cap=self.soft_cap)
        kernel, config = backward_kernel()
        options = {"config": config, "ds_dtype": None, **self._options(q)}
        (T, S), visible = (q.shape[1], k.shape[1]), self._visible_keys(query_tokens, key_tokens)

        def of_row(qkv: list[Array], stats: Any, outs: list[Array], first: Array, last: Array | None) -> Any:
            return kernel(*qkv, stats, *outs, None, None, first, last, **options)[:3]

        row_order = RowOrder.of(key_tokens, in_row_order=self.in_row_order)
        qkv = _pad_rows(q, row_order.to_row_order(k), row_order.to_row_order(v))
        dq, dk, dv = jax.vmap(of_row)(qkv, stats, _pad_rows(out, d_out), *visible.intervals)
        dk, dv = row_order.from_row_order(dk[:, :S]), row_order.from_row_order(dv[:, :S])
        return _varying_like((dq[:, :T], dk, dv), q)

    # ---- arguments of the kernels ------------------------------------------------------------------------------------

    def _options(self, q_BTHK: Array) -> dict[str, Any]:
        """Keyword arguments of both kernels."""
        causal = _by_segment(self.mask, in_row_order=self.in_row_order) and self.mask.kind == "causal"
        scores = {"logits_scale": q_BTHK.shape[-1] ** -0.5, "logits_soft_cap": self.soft_cap or None}
        return {"is_causal": causal, **scores}

    def _visible_keys(self, query_tokens: TokenInfo, key_tokens: TokenInfo) -> _VisibleKeys:
        """The intervals of all queries; without ends under a causal mask, which the kernels apply themselves."""
        if not _by_segment(self.mask, in_row_order=self.in_row_order):
            info = query_tokens
            if "first" not in info:
                info = self.precompute(self.mask, query_tokens, key_tokens, in_row_order=self.in_row_order)
            return _VisibleKeys(info["first"], info["last"])
        first_BT, last_BT = run_intervals(key_tokens["segments"])
        if window := self.mask.window:
            first_BT = jnp.maximum(first_BT, jnp.arange(first_BT.shape[1], dtype=jnp.int32) - (window - 1))
        return _VisibleKeys(first_BT, None if self.mask.kind == "causal" else last_BT)


@dataclass(frozen=True)
class _VisibleKeys:
    """The interval of keys that each query sees.

    Attributes:
      first_BT: the first key of each interval.
      last_BT: the key behind the last of each interval; ``None`` where it ends with the query itself.
    """

    first_BT: Int[Array, "B T"]
    last_BT: Int[Array, "B T"] | None

    @property
    def intervals(self) -> tuple[Array, Array | None]:
        """``first`` and ``last`` for all heads, ``[B, 1, T]``, padded like queries."""

        def padded(x_BT: Array) -> Array:
            return jnp.pad(x_BT, ((0, 0), (0, -x_BT.shape[1] % _ROUND)), mode="edge")[:, None]

        return padded(self.first_BT), None if self.last_BT is None else padded(self.last_BT)


def _by_segment(mask: Mask, *, in_row_order: bool) -> bool:
    """Whether the interval of each query follows from segments alone."""
    return in_row_order and mask.kind != "words" and not mask.grid_window


def _pad_rows(*arrays: Array) -> list[Array]:
    """Arrays ``[B, T, ...]`` padded with zeros to a multiple of ``_ROUND`` tokens."""
    return [pad_to_multiple(x, _ROUND) for x in arrays]


def _varying_like(results: Any, like: Array) -> Any:
    """Types a kernel's results, which have no mesh axes, as varying over the axes of ``like``."""
    return jax_compat.tree_to_varying(results, sorted(jax_compat.varying_axes(like)))


def forward_kernel() -> tuple[Any, Any]:
    """The pair (function, config): tokamax's attention of one row, and its block sizes as tokamax's ``Config``.

    Imports tokamax, an optional package; raises ImportError without it.
    """
    module = import_module(f"{_KERNELS}_kernel_sm90")
    return module.flash_attention_kernel, module.Config(**_BLOCKS)


def backward_kernel() -> tuple[Any, Any]:
    """The pair (function, config): tokamax's gradients of one row, and their block sizes as tokamax's ``Config``.

    Imports tokamax, an optional package; raises ImportError without it.
    """
    module = import_module(f"{_KERNELS}_vjp_kernel_sm90")
    return module.flash_attention_vjp_kernel, import_module(f"{_KERNELS}_vjp_common").Config(**_BACKWARD_BLOCKS)
