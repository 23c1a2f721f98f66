"""Convolutions of pictures and norms over groups of their channels, on local shards inside ``shard_map``.

Shapes: B pictures, H rows and W columns of places, C channels of the input and F of the output, G groups of channels.

tp splits a pair of convolutions as it splits a pair of products: the first by output channels, the second by input
channels. A rank's channels are whole groups of the norm between them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mmjax import jax_compat
from mmjax.mesh.spread import Axes
from mmjax.models.handles import Handle, opened
from mmjax.models.layers import Params, saved
from mmjax.models.norms import repeated
from mmjax.models.recorded_work import record_work
from mmjax.models.taps import CONVOLUTION, Tapped, record_uses, with_mark
from mmjax.models.weight_gradients import summed

_DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def convolution(
    x_BHWC: Float[Array, "B H W C"],
    kernel: Float[Array, "K K C F"],
    bias: Float[Array, " F"] | None = None,
    *,
    stride: int = 1,
    front: bool = True,
) -> Float[Array, "B h w F"]:
    """A convolution with a kernel of 3 x 3 places, and zeros beyond the sides; or with one of a single place.

    The kernel may be a handle or a tapped weight, whose gradient is computed later (see ``taps``); the bias may be a
    handle.

    Args:
      x_BHWC: the pictures.
      kernel: the kernel.
      bias: the bias, or ``None``.
      stride: 1, or 2 for half as many rows and columns, rounded up.
      front: whether there are zeros above and in front of the pictures; without them the kernel is not trained.
    """
    kernel = with_mark(kernel, CONVOLUTION) if front else kernel
    if isinstance(kernel, Tapped) and kernel.dy is not None:
        y_BHWF: Any = _tapped(stride, x_BHWC, kernel.weight, kernel.x, kernel.dy)
    else:
        y_BHWF = _untapped(stride, x_BHWC, kernel.weight if isinstance(kernel, Tapped) else kernel, front=front)
    if front:
        record_uses(x_BHWC, [kernel], [y_BHWF], stride=stride)
    record_work(2 * x_BHWC.shape[-1] * kernel.shape[0] * kernel.shape[1] * y_BHWF.size)
    return y_BHWF if bias is None else y_BHWF + repeated(bias, y_BHWF)


def column_convolution(x_BHWC: Float[Array, "B H W C"], p: Params, axes: Axes) -> Float[Array, "B H W F"]:
    """A convolution that tp splits by output channels: F are this rank's.

    Args:
      x_BHWC: the pictures, equal on all tp ranks.
      p: "kernel" and "bias" of this rank's channels.
      axes: mesh axes by role.
    """
    return convolution(jax_compat.to_varying(x_BHWC, axes.tp), p["kernel"], p["bias"])


def row_convolution(x_BHWC: Float[Array, "B H W C"], p: Params, axes: Axes) -> Float[Array, "B H W F"]:
    """A convolution that tp splits by input channels; the result is equal on all ranks.

    C are this rank's channels. ``p`` has this rank's "kernel" and the complete "bias", which is added once.
    """
    y_BHWF = lax.psum(convolution(x_BHWC, p["kernel"]), axes.tp)
    return y_BHWF + repeated(p["bias"], y_BHWF)


def kernel_gradient(x: Array, dy: Array, like: Array, *, stride: int, stacked: bool) -> Float[Array, "*L 3 3 C F"]:
    """A convolution's contribution to its kernel's gradient, in fp32.

    Args:
      x, dy: input and gradient of the output; the first dimension is layers if stacked.
      like: an array, such as the kernel, with the shape and the varying axes of the result, which is summed over all
        others.
      stride: see ``convolution``.
      stacked: whether there is one convolution for each of several layers.
    """
    if stacked:
        by_layer = [kernel_gradient(*arrays, stride=stride, stacked=False) for arrays in zip(x, dy, like, strict=True)]
        return jnp.stack(by_layer)
    axes = jax_compat.varying_axes(x) | jax_compat.varying_axes(dy)
    kernel = jax_compat.to_varying(like, tuple(sorted(axes - jax_compat.varying_axes(like))))
    (gradient,) = jax.linear_transpose(partial(_convolved, stride, x), kernel)(dy)
    return summed(gradient.astype(jnp.float32), jax_compat.varying_axes(like))


def group_norm(
    x_BHWC: Float[Array, "B H W C"], p: Params, mask_BHW1: Float[Array, "B H W 1"], *, width: int, eps: float
) -> Float[Array, "B H W C"]:
    """GroupNorm (Wu and He 2018, "Group Normalization") over the places where the mask is 1; statistics in fp32.

    Args:
      x_BHWC: the pictures, with whole groups of channels.
      p: "scale" and "bias" ``[C]``, arrays or handles.
      mask_BHW1: 1 at the picture's places, and 0 at others, which do not count and become the bias.
      width: channels of a group.
      eps: is added to the variance.
    """
    mask = mask_BHW1.astype(jnp.float32)[..., None]
    x_BHWGC = x_BHWC.astype(jnp.float32).reshape(*x_BHWC.shape[:3], -1, width)
    count = jnp.maximum(width * jnp.sum(mask, axis=(1, 2, 4), keepdims=True), 1.0)
    mean = jnp.sum(x_BHWGC * mask, axis=(1, 2, 4), keepdims=True) / count
    centred = (x_BHWGC - mean) * mask
    variance = jnp.sum(centred * centred, axis=(1, 2, 4), keepdims=True) / count
    y_BHWC = (centred * lax.rsqrt(variance + eps)).reshape(x_BHWC.shape).astype(x_BHWC.dtype)
    return y_BHWC * repeated(p["scale"], y_BHWC) + repeated(p["bias"], y_BHWC)


@partial(jax.checkpoint, static_argnums=(3, 4))  # the residual is the input alone
def normed_silu(x_BHWC: Array, p: Params, mask_BHW1: Array, width: int, eps: float) -> Float[Array, "B H W C"]:
    """SiLU of ``group_norm``, and zeros where the mask is 0, as a convolution expects them beyond a picture."""
    return jax.nn.silu(group_norm(x_BHWC, p, mask_BHW1, width=width, eps=eps)) * mask_BHW1.astype(x_BHWC.dtype)


def _convolved(stride: int, x_BHWC: Array, kernel: Array, *, front: bool = True) -> Array:
    # Padding as in torch, the same on all sides; "SAME" would put less of it in front of a strided convolution.
    behind = kernel.shape[0] // 2
    beyond = (behind if front else 0, behind)
    return lax.conv_general_dilated(x_BHWC, kernel, (stride, stride), (beyond, beyond), dimension_numbers=_DIMENSIONS)


def _untapped(stride: int, x: Array, kernel: Any, *, front: bool = True) -> Array:
    """The convolution; an opened or broadcast kernel is no residual, but recomputed in backward."""
    convolved = partial(_convolved, stride, front=front)
    if isinstance(kernel, Handle) or jax_compat.varying_axes(x) - jax_compat.varying_axes(kernel):
        return saved(jax.checkpoint(lambda x, kernel: convolved(x, opened(kernel)))(x, kernel))
    return saved(convolved(x, opened(kernel)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped(stride: int, x: Array, kernel: Any, x_tap: Array, dy_tap: Array) -> Array:
    return _convolved(stride, x, opened(kernel))


def _tapped_forward(stride: int, x: Array, kernel: Any, x_tap: Array, dy_tap: Array) -> Any:
    return saved(_convolved(stride, x, opened(kernel))), (x, kernel)


def _tapped_backward(stride: int, residuals: Any, dy: Array) -> Any:
    x, kernel = residuals[0], opened(residuals[1])
    _, gradient_of_x = jax.vjp(lambda x: _convolved(stride, x, kernel), x)
    return *gradient_of_x(dy), None, x, dy


_tapped.defvjp(_tapped_forward, _tapped_backward)
