"""RMSNorm and LayerNorm, with statistics in fp32, on local shards inside ``shard_map(check_vma=True)``.

Shapes: B rows, T tokens, D width; other dimensions may stand in place of B and T. N is all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from mmjax import jax_compat
from mmjax.models.handles import opened
from mmjax.models.weight_gradients import summed

PARTIAL_SUMS = 64
"""Sums of runs of tokens before the sum over all: GPUs compute these in the pass that makes the numbers."""


def repeated(p_D: Array, x_BTD: Array) -> Array:
    """A feature parameter ``[D]`` broadcast to the shape of ``x``; its gradient, a sum over all tokens, is summed in
    fp32.
    """
    p_D = opened(p_D)
    return jnp.broadcast_to(p_D.astype(jnp.float32), x_BTD.shape).astype(p_D.dtype)


def rms_norm(x_BTD: Array, scale_D: Any, eps: float, *, plus: float = 0.0, over: Sequence[str] = ()) -> Array:
    """RMSNorm with the scale ``[D]``, an array or a handle; statistics in fp32. The residuals are the arguments, and
    backward is two passes over memory: sums over features, then the gradients.

    ``plus`` is added to the scale in fp32, and features are rounded behind their product with that sum: 1 for weights
    that are initially 0. ``over`` are mesh axes over which features and the scale are split into parts of one width:
    the mean square is that of all parts.
    """
    return _rms_norm(eps, plus, tuple(over), x_BTD, scale_D)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rms_norm(eps: float, plus: float, over: tuple[str, ...], x_BTD: Array, scale_D: Any) -> Array:
    x32 = x_BTD.astype(jnp.float32)
    y = x32 * lax.rsqrt(_mean(x32 * x32, over) + eps)
    if plus:
        return (y * (plus + repeated(scale_D, x_BTD).astype(jnp.float32))).astype(x_BTD.dtype)
    return y.astype(x_BTD.dtype) * repeated(scale_D, x_BTD)


def _rms_norm_forward(
    eps: float, plus: float, over: tuple[str, ...], x_BTD: Array, scale_D: Any
) -> tuple[Array, tuple[Array, Any]]:
    return _rms_norm(eps, plus, over, x_BTD, scale_D), (x_BTD, scale_D)


def _rms_norm_backward(
    eps: float, plus: float, over: tuple[str, ...], residuals: tuple[Array, Any], dy_BTD: Array
) -> tuple[Array, Any]:
    x_BTD, handle_D = residuals
    axes = jax_compat.varying_axes(x_BTD)  # behind the barrier x varies over the axes of dy too
    # Not shared with the forward that is computed again: statistics with two readers would be a pass of their own.
    x_BTD, dy_BTD = lax.optimization_barrier((x_BTD, dy_BTD))
    scale_D, gradient_of_handle = jax.vjp(opened, handle_D)
    x32, dy32 = x_BTD.astype(jnp.float32), dy_BTD.astype(jnp.float32)
    scaled_dy = dy32 * (scale_D.astype(jnp.float32) + plus)
    # Both sums are of one pass, since neither reads the other; whoever reads one waits for both.
    sums = tuple(_mean(x32 * factor, over) for factor in (x32, scaled_dy))
    squares, shared = lax.optimization_barrier(sums)
    inverse = lax.rsqrt(squares + eps)
    dx_BTD = inverse * scaled_dy - x32 * (inverse**3 * shared)
    d_scale_D = _sum_over_tokens(dy32 * (x32 * inverse))
    d_scale_D = summed(d_scale_D, jax_compat.varying_axes(scale_D)).astype(scale_D.dtype)
    (d_handle_D,) = gradient_of_handle(d_scale_D)
    return summed(dx_BTD.astype(x_BTD.dtype), axes), d_handle_D


def _mean(x_BTD: Array, over: tuple[str, ...]) -> Array:
    """The mean over the last dimension, and over the mesh axes ``over``."""
    mean_BT1 = jnp.mean(x_BTD, axis=-1, keepdims=True)
    return lax.pmean(mean_BT1, over) if over else mean_BT1


@partial(jax.checkpoint, static_argnums=(1,))
def unscaled_rms_norm(x_BTD: Array, eps: float) -> Array:
    """RMSNorm without a scale; statistics in fp32. Its residual is its argument."""
    x32 = x_BTD.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x_BTD.dtype)


def _sum_over_tokens(x_BTD: Array) -> Array:
    """The sum over all dimensions but the last."""
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    if len(x_ND) % PARTIAL_SUMS == 0:
        x_ND = lax.optimization_barrier(jnp.sum(x_ND.reshape(PARTIAL_SUMS, -1, x_ND.shape[1]), axis=1))
    return jnp.sum(x_ND, axis=0)


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def layer_norm(x_BTD: Array, p: Mapping[str, Any], eps: float = 1e-6) -> Array:
    """LayerNorm over D; statistics in fp32. ``p`` has "scale" and "bias" ``[D]``, which keep their dtype."""
    y = scaled(normalise(x_BTD, eps), p["scale"])
    return y + repeated(p["bias"], y)


def any_norm(x_BTD: Array, p: Mapping[str, Any], eps: float = 1e-6, *, plus: float = 0.0) -> Array:
    """LayerNorm, or RMSNorm if ``p`` has no "bias"; statistics in fp32. "scale" is ``[D]``, in the dtype of ``x``.

    ``plus`` is added to the scale of an RMSNorm, see ``rms_norm``.
    """
    return layer_norm(x_BTD, p, eps) if "bias" in p else rms_norm(x_BTD, p["scale"], eps, plus=plus)


def normalise(x_BTD: Array, eps: float = 1e-6) -> Array:
    """LayerNorm without scale and bias, in the dtype of ``x_BTD``; statistics in fp32."""
    x32 = x_BTD.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    return (centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)).astype(x_BTD.dtype)


@jax.checkpoint
def scaled(x_BTD: Array, scale_D: Array) -> Array:
    """``x · scale``. It is checkpointed, since the broadcast scale would be a residual of every microbatch."""
    return x_BTD * repeated(scale_D, x_BTD)


def scaled_by_constant(x_BTD: Array, scale_1: Any) -> Array:
    """``x`` times a number ``[1]``, an array or a handle, whose gradient is 0."""
    axes = jax_compat.varying_axes(x_BTD)

    @jax.custom_vjp
    def product(x_BTD: Array, scale_1: Any) -> Array:
        return x_BTD * opened(scale_1).astype(x_BTD.dtype)

    def backward(scale_1: Any, dy_BTD: Array) -> tuple[Array, Any]:
        scale, gradient_of_handle = jax.vjp(opened, scale_1)
        return summed(dy_BTD * scale.astype(dy_BTD.dtype), axes), *gradient_of_handle(jnp.zeros_like(scale))

    product.defvjp(lambda x_BTD, scale_1: (product(x_BTD, scale_1), scale_1), backward)
    return product(x_BTD, scale_1)
