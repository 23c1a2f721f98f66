"""Convolutions and group norms over pictures, channels last.

Shapes: B pictures, H rows, W columns, C channels, I channels in, O channels out, G groups of channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


class Convolution(nnx.Module):
    """Parameters "kernel" ``[*sides, I, O]`` and "bias" ``[O]``, initially 0, of a convolution.

    Args:
      inputs, outputs: channels in and out.
      rngs: random numbers of the kernel, which is normal with variance 1 / (numbers that an output reads).
      sides: sides of the kernel, such as (3, 3); a causal kernel has the number of frames before them.
    """

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs, sides: tuple[int, ...] = (3, 3)):
        init = nnx.initializers.lecun_normal()
        dims = (*("frames", "height", "width")[3 - len(sides) :], "input", "output")
        self.kernel = nnx.Param(init(rngs.params(), (*sides, inputs, outputs)), dims=dims)
        self.bias = nnx.Param(jnp.zeros(outputs), dims=("output",))


Padding = tuple[tuple[int, int], tuple[int, int]]
"""Rows of zeros above and below a picture, and columns before and behind it."""


def convolve(
    x_BHWI: Float[Array, "B H W I"], p: Any, padding: Padding = ((0, 0), (0, 0)), *, stride: int = 1
) -> Float[Array, "B H2 W2 O"]:
    """A convolution with its bias. ``p`` has "kernel" ``[height, width, I, O]`` and "bias" ``[O]``."""
    dims = ("NHWC", "HWIO", "NHWC")
    y_BHWO = lax.conv_general_dilated(x_BHWI, p["kernel"], (stride, stride), padding, dimension_numbers=dims)
    return y_BHWO + p["bias"]


class Moments(NamedTuple):
    """Statistics of groups of channels of each picture, in fp32.

    Attributes:
      mean: ``[B, G]``.
      squares: the mean square of what differs from the mean, ``[B, G]``.
    """

    mean: Float[Array, "B G"]
    squares: Float[Array, "B G"]


def group_moments(x_BHWC: Float[Array, "B H W C"], groups: int) -> Moments:
    """The statistics of each picture's groups of channels."""
    x_BNGC = x_BHWC.astype(jnp.float32).reshape(len(x_BHWC), -1, groups, x_BHWC.shape[-1] // groups)
    mean_BG = jnp.mean(x_BNGC, axis=(1, 3))
    return Moments(mean_BG, jnp.mean(jnp.square(x_BNGC - mean_BG[:, None, :, None]), axis=(1, 3)))


def group_norm(x_BHWC: Float[Array, "B H W C"], p: Any, moments: Moments, eps: float = 1e-6) -> Float[Array, "B H W C"]:
    """GroupNorm (Wu and He 2018, §3) of pictures, or parts of them, with statistics of whole pictures.

    Args:
      x_BHWC: the pictures.
      p: "scale" and "bias" ``[C]``.
      moments: the statistics, as ``group_moments(x, groups)`` gives them.
      eps: added to the mean squares.
    """
    groups = moments.mean.shape[1]
    x_BHWGC = x_BHWC.astype(jnp.float32).reshape(*x_BHWC.shape[:3], groups, -1)
    mean, squares = (part[:, None, None, :, None] for part in moments)
    y_BHWC = ((x_BHWGC - mean) * lax.rsqrt(squares + eps)).reshape(x_BHWC.shape)
    return (y_BHWC * p["scale"] + p["bias"]).astype(x_BHWC.dtype)
