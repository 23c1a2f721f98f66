"""Attention by tokamax's kernels for NVIDIA's Hopper GPUs: each token sees one interval of keys.

Its public function takes masks of all pairs, or lengths; intervals are taken by the kernels below it. Forward skips
blocks of keys outside of a block's intervals. Backward skips those behind it under a causal mask, and no others.

Shapes: B rows, T tokens, H query heads, G key/value heads, K head width (local to this rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.attention import kernels
from mmjax.attention.blockwise import KEPT
from mmjax.attention.kernels import Asked, intervals
from mmjax.attention.mask import Mask
from mmjax.attention.settings import LIBRARIES
from mmjax.attention.tokens import Tokens

_ON = ("H100", "H200", "H800", "H20", "GH200")
"""Devices that the kernels are written for, by a word of their names: compute capability 9.0."""
_ROUND = 128
"""Rows are filled up to a multiple of this many tokens, two blocks of queries."""
_KERNELS = "tokamax._src.ops.attention.pallas_mosaic_gpu"
_BLOCKS = {"block_q": 64, "block_kv": 128, "num_stages": 2}
"""tokamax's own choice for heads up to a width of 128; it would tune them by running, for each shape."""
_BACKWARD_BLOCKS = {"block_q_dkv": 64, "block_kv_dkv": 64, "block_q_dq": 64, "block_kv_dq": 64, "num_stages": 2}


def refusal(asked: Asked) -> str:
    """Why tokamax does not compute this; "" where it does."""
    return kernels.refusal(asked, LIBRARIES["tokamax"], *_ON)


def attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGK: Float[Array, "B T G K"],
    tokens: Tokens,
    mask: Mask,
    keys: Tokens | None = None,
) -> Float[Array, "B T H K"]:
    """What ``blockwise.attention`` gives, for calls without ``refusal``."""
    del keys  # the queries' own
    T = q_BTHK.shape[1]
    given = jax_compat.alike(q_BTHK, k_BTGK, v_BTGK, tokens.segments_BT)
    lacking = -T % _ROUND
    q, k, v, segments_BT = (jnp.pad(x, [(0, 0), (0, lacking)] + [(0, 0)] * (x.ndim - 2)) for x in given)
    call = Call(mask.kind == "causal", mask.window if mask.window < T else 0, q_BTHK.shape[-1] ** -0.5)
    out: Any = _attend(call, q, k, v, segments_BT)
    return out[:, :T]


@dataclass(frozen=True)
class Call:
    """What is static of a call.

    Attributes:
      causal: whether a token sees none behind itself.
      window: tokens that it sees, itself included; 0 means all.
      scale: factor of the products of queries and keys.
    """

    causal: bool
    window: int
    scale: float


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, q: Array, k: Array, v: Array, segments_BT: Array) -> Array:
    return _forward(call, q, k, v, segments_BT)[0]


def _forward(call: Call, q: Array, k: Array, v: Array, segments_BT: Array) -> tuple[Array, Any]:
    kernel, settings = forward_kernel()
    static = {"config": settings, "is_causal": call.causal, "logits_scale": call.scale, "logits_soft_cap": None}
    static |= {"out_dtype": q.dtype, "normalize_output": True, "return_residuals": True}
    static |= {"use_stable_softmax": True, "rescale_threshold": 1.0}

    def of_row(q: Array, k: Array, v: Array, first: Array, last: Array | None) -> Any:
        return kernel(q, k, v, None, None, first, last, **static)

    out, stats = jax.vmap(of_row)(q, k, v, *_seen(call, segments_BT))
    kept = jax_compat.tree_to_varying((out, *stats), sorted(jax_compat.varying_axes(q)))
    out, *stats = (checkpoint_name(x, KEPT) for x in kept)
    return out, (q, k, v, out, tuple(stats), segments_BT)


def _backward(call: Call, kept: Any, d_out: Array) -> tuple[Array | None, ...]:
    kernel, settings = backward_kernel()
    static = {"config": settings, "is_causal": call.causal, "logits_scale": call.scale, "logits_soft_cap": None}
    q, k, v, out, stats, segments_BT = kept

    def of_row(q: Array, k: Array, v: Array, stats: Any, out: Array, d_out: Array, first: Array, last: Any) -> Any:
        return kernel(q, k, v, stats, out, d_out, None, None, first, last, **static, ds_dtype=None)[:3]

    gradients = jax.vmap(of_row)(q, k, v, stats, out, d_out, *_seen(call, segments_BT))
    return *jax_compat.tree_to_varying(gradients, sorted(jax_compat.varying_axes(q))), None


def forward_kernel() -> tuple[Any, Any]:
    """tokamax's function of one row, and its blocks."""
    module = import_module(f"{_KERNELS}_kernel_sm90")
    return module.flash_attention_kernel, module.Config(**_BLOCKS)


def backward_kernel() -> tuple[Any, Any]:
    """The same for gradients."""
    module = import_module(f"{_KERNELS}_vjp_kernel_sm90")
    return module.flash_attention_vjp_kernel, import_module(f"{_KERNELS}_vjp_common").Config(**_BACKWARD_BLOCKS)


_attend.defvjp(_forward, _backward)


def _seen(call: Call, segments_BT: Int[Array, "B T"]) -> tuple[Array, Array | None]:
    """The intervals of all heads, ``[B, 1, T]``; under a causal mask, which the kernels know, they need no end."""
    first_BT, last_BT = intervals(segments_BT)
    if call.window:
        first_BT = jnp.maximum(first_BT, jnp.arange(first_BT.shape[1], dtype=jnp.int32) - (call.window - 1))
    return first_BT[:, None], None if call.causal else last_BT[:, None]
