"""Resizes frames by cubic convolution with the integers of ``torch``'s kernel for bytes, as ``transformers`` does.

``torch.nn.functional.interpolate(mode="bicubic", antialias=True)`` on uint8 resizes along rows and then along columns.
Its weights are Keys 1981, "Cubic Convolution Interpolation", eq. 4 with a = -1/2, stretched where the frame shrinks, as
integers of 16 bits; after each axis, values are rounded to bytes. Pillow's have more bits, and differ by one level in a
hundredth of the pixels. ``bilinear`` has a triangle in place of the cubic.

Legend: K taps of a pixel, N pixels along an axis.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mmjax.data.sources.sizes import Size

_SHARPNESS, _WEIGHT_BITS, _MOST_BITS = -0.5, 15, 22
_REACH = {"bicubic": 2.0, "bilinear": 1.0}
"""Filters that frames may be resized with, and the pixels on each side that they reach."""


class _Taps(NamedTuple):
    """The pixels that each resized one is made of.

    Attributes:
      places_NK: their places along the axis.
      weights_NK: int32 weights; 0 for a place that only fills up the row.
      bits: the weights' sum is 2 to this power.
    """

    places_NK: np.ndarray
    weights_NK: np.ndarray
    bits: int


def resize_frame(pixels: np.ndarray, size: Size, resample: str) -> np.ndarray:
    """A frame, uint8 [h, w, C], resized to ``size`` (height, width): uint8 [height, width, C].

    resample: "bicubic" or "bilinear".
    """
    height, width = size
    if width != pixels.shape[1]:
        rows = _along_first(pixels.swapaxes(0, 1), _taps(pixels.shape[1], width, resample))
        pixels = rows.swapaxes(0, 1)
    if height != pixels.shape[0]:
        pixels = _along_first(pixels, _taps(pixels.shape[0], height, resample))
    return np.ascontiguousarray(pixels)


def _along_first(pixels: np.ndarray, taps: _Taps) -> np.ndarray:
    """``pixels`` resized along their first axis."""
    pixels = np.ascontiguousarray(pixels)
    total = np.full((len(taps.places_NK), *pixels.shape[1:]), 1 << (taps.bits - 1), np.int32)
    for places_N, weights_N in zip(taps.places_NK.T, taps.weights_NK.T, strict=True):
        total += pixels[places_N] * weights_N.reshape(-1, *[1] * (pixels.ndim - 1))
    return np.clip(total >> taps.bits, 0, 255).astype(np.uint8)


@lru_cache(maxsize=64)
def _taps(old: int, new: int, resample: str) -> _Taps:
    """The taps with which ``old`` pixels along an axis become ``new`` ones."""
    scale = old / new
    stretch = max(scale, 1.0)
    reach = _REACH[resample] * stretch
    centres_N = scale * (np.arange(new) + 0.5)
    firsts_N = np.maximum((centres_N - reach + 0.5).astype(int), 0)
    ends_N = np.minimum((centres_N + reach + 0.5).astype(int), old)
    places_NK = firsts_N[:, None] + np.arange((ends_N - firsts_N).max())
    shares_NK = _filter((places_NK - centres_N[:, None] + 0.5) / stretch, resample)
    shares_NK = np.where(places_NK < ends_N[:, None], shares_NK, 0.0)
    shares_NK /= shares_NK.sum(axis=1, keepdims=True)
    bits = 0
    while bits < _MOST_BITS and int(0.5 + shares_NK.max() * (1 << (bits + 1))) < 1 << _WEIGHT_BITS:
        bits += 1
    scaled_NK = shares_NK * (1 << bits)
    weights_NK = (scaled_NK + np.where(scaled_NK < 0, -0.5, 0.5)).astype(np.int32)
    return _Taps(np.minimum(places_NK, old - 1), weights_NK, bits)


def _filter(distance: np.ndarray, resample: str) -> np.ndarray:
    """The filter at a distance in pixels."""
    x, a = np.abs(distance), _SHARPNESS
    if resample == "bilinear":
        return np.maximum(1.0 - x, 0.0)
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
