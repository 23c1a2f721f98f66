"""The layers of an autoencoder's encoder over pictures on canvases.

A picture gets the latent that it gets alone. It may be smaller than its canvas: places outside are zeros before each
convolution, no statistic counts them, and no place attends to them.

Shapes: B pictures, H rows and W columns of pixels at one of the encoder's sizes, C channels.
"""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Bool, Float

from mmjax.models.autoencoder.layers import EPS, Norm, Resampled, attended, unscaled_rms
from mmjax.models.layers import linear
from mmjax.models.norms import repeated
from mmjax.models.parallel_convolution import convolution, group_norm, normed_silu
from mmjax.models.recorded_work import record_work


class OnCanvases:
    """Passes over pictures on canvases, see ``autoencoder.layers.Passes``; weights may be handles.

    Args:
      inside_BHW: the places of the pictures' pixels.
      sizes: number of the encoder's sizes, each with half the sides of the one before.
    """

    def __init__(self, inside_BHW: Bool[Array, "B H W"], sizes: int):
        levels = [inside_BHW[:, :: 2**level, :: 2**level] for level in range(sizes)]
        self._inside = {level.shape[1:]: level[..., None] for level in levels}

    def convolve(
        self, x: Float[Array, "B H W C"], p: Any, norm: Norm | None = None, resampled: Resampled = ""
    ) -> Float[Array, "B H2 W2 F"]:
        """See ``autoencoder.layers.Passes``; nothing is made larger."""
        inside = self._inside[x.shape[1:3]]
        x = self._normed(x, norm, inside) if norm else x
        x = x * inside.astype(x.dtype)
        if resampled == "smaller":  # zeros are below and behind a picture alone
            return convolution(x, p["kernel"], p["bias"], stride=2, front=False)
        return convolution(x, p["kernel"], p["bias"])

    def attend(self, x: Float[Array, "B H W C"], p: Any, norm: Norm) -> Float[Array, "B H W C"]:
        """See ``autoencoder.layers.Passes``."""
        inside = self._inside[x.shape[1:3]]
        x = self._normed(x, norm, inside)
        q, k, v = (linear(x, p[name]["kernel"], p[name]["bias"]) for name in "qkv")
        places = x.shape[1] * x.shape[2]
        record_work(4 * len(x) * places**2 * x.shape[-1])
        return linear(attended(q, k, v, inside[..., 0]), p["o"]["kernel"], p["o"]["bias"])

    @staticmethod
    def _normed(x: Array, norm: Norm, inside: Bool[Array, "B H W 1"]) -> Array:
        if norm.groups:
            width = x.shape[-1] // norm.groups
            if norm.silu:
                return normed_silu(x, norm.p, inside, width, EPS)
            return group_norm(x, norm.p, inside, width=width, eps=EPS)
        y = (unscaled_rms(x) * repeated(norm.p["scale"], x)).astype(x.dtype)
        return jax.nn.silu(y) if norm.silu else y
