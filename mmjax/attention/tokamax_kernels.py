"""Attention by tokamax's kernels for NVIDIA's Hopper GPUs: each token sees one interval of keys.

Its public function takes masks of all pairs, or lengths; intervals are taken by the kernels below it. Forward skips
blocks of keys outside of a block's intervals. Backward skips those behind it under a causal mask, and no others.

Where queries are in an order of their own, as under context parallelism, keys are put in that of their rows, so that
what each query sees is an interval all the same.

Shapes: B rows, T tokens that ask, S tokens that are asked, H query heads, G key/value heads, K head width (all local to
this rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mmjax import jax_compat
from mmjax.attention import blockwise
from mmjax.attention.by_hand import Known
from mmjax.attention.kernels import Kernel, Sequence, intervals, seen_runs
from mmjax.attention.mask import Mask
from mmjax.attention.tokens import filled

_ON = ("H100", "H200", "H800", "H20", "GH200")
"""Devices that the kernels are written for, by a word of their names: compute capability 9.0."""
_ROUND = 128
"""Rows are filled up to a multiple of this many tokens, two blocks of queries."""
_KERNELS = "tokamax._src.ops.attention.pallas_mosaic_gpu"
_BLOCKS = {"block_q": 64, "block_kv": 128, "num_stages": 2}
"""tokamax's own choice for heads up to a width of 128; it would tune them by running, for each shape."""
_BACKWARD_BLOCKS = {"block_q_dkv": 64, "block_kv_dkv": 64, "block_q_dq": 64, "block_kv_dq": 64, "num_stages": 2}


@dataclass(frozen=True)
class Tokamax(Kernel):
    """Attention of queries in any order, each to an interval of keys, forward and backward.

    A mask of words, or of windows of a grid, may show keys that are no interval. That is data: where a rank has such
    rows, it computes by blocks.
    """

    LIBRARY = "tokamax"
    DEVICES = _ON

    @classmethod
    def found(cls, mask: Mask, asking: Known, asked: Known, *, by_index: bool) -> Known:
        """The interval of keys that each query sees, and whether it sees all of them; see ``Kernel``."""
        if by_index and _is_plain(mask):
            return {}  # found faster from segments
        row = Sequence.of(asked, by_index=by_index)
        first_BT, last_BT, are_runs = seen_runs(mask, asking, {name: row.put(x) for name, x in asked.items()})
        return {"first": first_BT, "last": last_BT, "are_runs": are_runs}

    def forward(self, q: Array, k: Array, v: Array, asking: Known, asked: Known) -> tuple[Float[Array, "B T H K"], Any]:
        """The output, and two numbers of each softmax; see ``ByHand``."""
        kernel, settings = forward_kernel()
        static = {"out_dtype": q.dtype, "normalize_output": True, "return_residuals": True}
        static |= {"use_stable_softmax": True, "rescale_threshold": 1.0, "config": settings, **self._static(q)}
        T, seen = q.shape[1], self._seen(asking, asked)

        def of_row(qkv: list[Array], first: Array, last: Array | None) -> Any:
            return kernel(*qkv, None, None, first, last, **static)

        def by_kernel(q: Array, k: Array, v: Array) -> Any:
            row = Sequence.of(asked, by_index=self.by_index)
            out, stats = jax.vmap(of_row)(_filled(q, row.put(k), row.put(v)), *seen.intervals)
            return _typed((out[:, :T], tuple(stats)), q)

        def by_blocks(q: Array, k: Array, v: Array) -> Any:
            out, lse_BHT = blockwise.forward(self.mask, q, k, v, asking, asked)
            (lse_BTH,) = _filled(jnp.swapaxes(lse_BHT, 1, 2))
            return _typed((out, (jnp.swapaxes(lse_BTH, 1, 2), jnp.zeros((len(q), q.shape[2], lse_BTH.shape[1])))), q)

        return seen.choose(by_kernel, by_blocks, q, k, v)

    def backward(
        self, q: Array, k: Array, v: Array, asking: Known, asked: Known, out: Array, stats: Any, d_out: Array
    ) -> tuple[Array, Array, Array]:
        """See ``ByHand``."""
        kernel, settings = backward_kernel()
        static = {"config": settings, "ds_dtype": None, **self._static(q)}
        (T, S), seen = (q.shape[1], k.shape[1]), self._seen(asking, asked)

        def of_row(qkv: list[Array], stats: Any, outs: list[Array], first: Array, last: Array | None) -> Any:
            return kernel(*qkv, stats, *outs, None, None, first, last, **static)[:3]

        def by_kernel(q: Array, k: Array, v: Array, out: Array, stats: Any, d_out: Array) -> Any:
            row = Sequence.of(asked, by_index=self.by_index)
            dq, dk, dv = jax.vmap(of_row)(
                _filled(q, row.put(k), row.put(v)), stats, _filled(out, d_out), *seen.intervals
            )
            return _typed((dq[:, :T], row.back(dk[:, :S]), row.back(dv[:, :S])), q)

        def by_blocks(q: Array, k: Array, v: Array, out: Array, stats: Any, d_out: Array) -> Any:
            lse_BHT = stats[0][..., :T]
            gradients = blockwise.backward(self.mask, q, k, v, asking, asked, out, lse_BHT, d_out)
            return _typed(tuple(d.astype(x.dtype) for d, x in zip(gradients, (q, k, v), strict=True)), q)

        return seen.choose(by_kernel, by_blocks, q, k, v, out, stats, d_out)

    # ---- what the kernels are told -----------------------------------------------------------------------------------

    @property
    def _by_segment(self) -> bool:
        """Whether segments say which keys are seen."""
        return self.by_index and _is_plain(self.mask)

    def _static(self, q_BTHK: Array) -> dict[str, Any]:
        causal = self._by_segment and self.mask.kind == "causal"
        return {"is_causal": causal, "logits_scale": q_BTHK.shape[-1] ** -0.5, "logits_soft_cap": None}

    def _seen(self, asking: Known, asked: Known) -> _Seen:
        """The intervals of all heads; under a causal mask, which the kernels know, they need no end."""
        if not self._by_segment:
            own = asking if "are_runs" in asking else self.found(self.mask, asking, asked, by_index=self.by_index)
            return _Seen(own["first"], own["last"], None if _is_plain(self.mask) else own["are_runs"])
        first_BT, last_BT = intervals(asked["segments"])
        if window := self.mask.window:
            first_BT = jnp.maximum(first_BT, jnp.arange(first_BT.shape[1], dtype=jnp.int32) - (window - 1))
        return _Seen(first_BT, None if self.mask.kind == "causal" else last_BT)


@dataclass(frozen=True)
class _Seen:
    """The keys that queries see.

    Attributes:
      first_BT, last_BT: the interval of each query; ``None`` where it ends with the query itself.
      are_runs: whether it sees all of it; ``None`` where that is so.
    """

    first_BT: Int[Array, "B T"]
    last_BT: Int[Array, "B T"] | None
    are_runs: Bool[Array, ""] | None = None

    @property
    def intervals(self) -> tuple[Array, Array | None]:
        """First and last of all heads, ``[B, 1, T]``, filled up as queries are."""
        first_BT, last_BT = self.first_BT, self.last_BT
        fill = lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % _ROUND)), mode="edge")[:, None]  # noqa: E731
        return fill(first_BT), None if last_BT is None else fill(last_BT)

    def choose(self, by_kernel: Any, by_blocks: Any, *given: Any) -> Any:
        """What the kernel makes of arrays, or what blocks make of them where intervals do not say what is seen."""
        return by_kernel(*given) if self.are_runs is None else lax.cond(self.are_runs, by_kernel, by_blocks, *given)


def _is_plain(mask: Mask) -> bool:
    """Whether all rows are runs: in the order of its row, each token sees one run of keys."""
    return mask.kind != "words" and not mask.grid_window


def _filled(*given: Array) -> list[Array]:
    """Arrays ``[B, T, ...]`` filled up with zeros."""
    return [filled(x, _ROUND) for x in given]


def _typed(results: Any, like: Array) -> Any:
    """Results of a kernel, which says nothing of mesh axes, as varying over those that its arguments vary over."""
    return jax_compat.tree_to_varying(results, sorted(jax_compat.varying_axes(like)))


def forward_kernel() -> tuple[Any, Any]:
    """tokamax's function of one row, and its blocks."""
    module = import_module(f"{_KERNELS}_kernel_sm90")
    return module.flash_attention_kernel, module.Config(**_BLOCKS)


def backward_kernel() -> tuple[Any, Any]:
    """The same for gradients."""
    module = import_module(f"{_KERNELS}_vjp_kernel_sm90")
    return module.flash_attention_vjp_kernel, import_module(f"{_KERNELS}_vjp_common").Config(**_BACKWARD_BLOCKS)
