"""Layers of autoencoders over pictures in host memory, tile by tile: a device has one tile at a time.

Each layer goes over all tiles before the next one begins. A tile is read with the pixels around it that its convolution
reads, and a GroupNorm has the statistics of all tiles, so that results are those of whole pictures. The attention of
the middle has all pixels of a latent on the device, and scores of one row of queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from mmjax.models.autoencoder.config import RESAMPLED
from mmjax.models.autoencoder.layers import Norm, Resampled, around, attention, convolved, doubled, normed
from mmjax.models.convolutions import Moments

_NONE = ((0, 0), (0, 0))
Size = tuple[int, int]
"""Height and width, or row and column."""


class Tiles:
    """Passes over pictures in host memory, see ``layers.Passes``.

    Args:
      side: the even side of a tile, in pixels of the larger of a layer's input and output.
    """

    def __init__(self, side: int):
        self._side = side

    def convolve(self, x: np.ndarray, p: Any, norm: Norm | None = None, resampled: Resampled = "") -> np.ndarray:
        """See ``Passes``."""
        moments, parameters = self._moments(x, norm), norm.p if norm else None
        size = (_resampled(x.shape[1], resampled), _resampled(x.shape[2], resampled))
        sides = self._sides(size, self._side // RESAMPLED if resampled == "smaller" else self._side)
        out = np.empty((len(x), *size, p["kernel"].shape[-1]), np.float32)
        reach = p["kernel"].shape[-4] // 2
        run = partial(_convolved, groups=norm.groups if norm else 0, resampled=resampled)
        for start in _starts(size, sides):
            read = [_read_by(at, side, reach, resampled) for at, side in zip(start, sides, strict=True)]
            (top, left), (height, width) = zip(*read, strict=True)
            part = _cut(x, (top, left), (height, width))
            tile = np.asarray(run(part, p, parameters, moments, np.array([top, left]), np.array(x.shape[1:3])))
            place = tuple(slice(at, at + side) for at, side in zip(start, sides, strict=True))
            _, rows, columns, _ = out[:, *place].shape
            out[:, *place] = tile[:, :rows, :columns]
        return out

    def attend(self, x: np.ndarray, p: Any, norm: Norm) -> np.ndarray:
        """See ``Passes``."""
        return np.asarray(_attended(x, p, norm.p, self._moments(x, norm), groups=norm.groups))

    def _moments(self, x: np.ndarray, norm: Norm | None) -> Moments | None:
        """The statistics of whole pictures, combined from those of tiles (Chan et al. 1979, eq. 2.1)."""
        if not norm or not norm.groups:
            return None
        count, mean, squares = 0, np.zeros(0), np.zeros(0)
        size = (x.shape[1], x.shape[2])
        sides = self._sides(size, self._side)
        for start in _starts(size, sides):
            part = _cut(x, start, sides)
            inside = tuple(min(side, n - at) for side, n, at in zip(sides, size, start, strict=True))
            tile = _tile_moments(part, np.array(inside), groups=norm.groups)
            tile_mean, tile_squares = (np.asarray(part, np.float64) for part in tile)
            numbers = inside[0] * inside[1]
            if not count:
                count, mean, squares = numbers, tile_mean, tile_squares * numbers
                continue
            total, apart = count + numbers, tile_mean - mean
            mean = mean + apart * numbers / total
            squares = squares + tile_squares * numbers + apart**2 * count * numbers / total
            count = total
        return Moments(jnp.asarray(mean, jnp.float32), jnp.asarray(squares / count, jnp.float32))

    def _sides(self, size: Size, most: int) -> Size:
        """The sides of tiles of at most ``most`` pixels for pictures of this size: no more than these, and even."""
        return min(most, size[0] + size[0] % RESAMPLED), min(most, size[1] + size[1] % RESAMPLED)


def _resampled(n: int, resampled: Resampled) -> int:
    return n // RESAMPLED if resampled == "smaller" else n * RESAMPLED if resampled == "larger" else n


def _starts(size: Size, sides: Size) -> Iterator[Size]:
    """The first row and column of each tile of pictures of this size."""
    return product(range(0, size[0], sides[0]), range(0, size[1], sides[1]))


def _read_by(start: int, side: int, reach: int, resampled: Resampled) -> tuple[int, int]:
    """The first row that a tile of the output reads, and the number of rows; columns alike."""
    if resampled == "smaller":
        return RESAMPLED * start, RESAMPLED * side + reach
    if resampled == "larger":
        return start // RESAMPLED - 1, side // RESAMPLED + 2
    return start - reach, side + 2 * reach


def _cut(x: np.ndarray, at: Size, size: Size) -> np.ndarray:
    """A part of pictures, with zeros where it reaches beyond them."""
    bounds = [(max(0, a), min(n, a + m)) for a, m, n in zip(at, size, x.shape[1:3], strict=True)]
    inside = x[:, bounds[0][0] : bounds[0][1], bounds[1][0] : bounds[1][1]]
    padding = [(low - a, m - (high - a)) for (low, high), a, m in zip(bounds, at, size, strict=True)]
    return np.pad(inside, [(0, 0), *padding, (0, 0)]) if any(map(any, padding)) else inside


@partial(jax.jit, static_argnames=("groups", "resampled"))
def _convolved(
    part: Array,
    p: Any,
    norm: Any,
    moments: Moments | None,
    at: Array,
    size: Array,
    *,
    groups: int,
    resampled: Resampled,
) -> Array:
    """The layer on one tile, read from place ``at`` on, of pictures of this height and width."""
    if norm is not None:
        rows, columns = (jnp.arange(n) + at[axis] for axis, n in enumerate(part.shape[1:3]))
        is_inside = ((rows >= 0) & (rows < size[0]))[:, None] & ((columns >= 0) & (columns < size[1]))
        # Around a picture there are zeros behind the norm, not in front of it.
        part = jnp.where(is_inside[None, :, :, None], normed(part, Norm(norm, groups), moments), 0)
    if resampled == "larger":
        part = doubled(part)[:, 1:-1, 1:-1]
    if resampled == "smaller":
        return convolved(part, p, _NONE, resampled)
    # XLA computes convolutions with zeros around 2.4 times as fast on CPUs as those without.
    reach = p["kernel"].shape[-4] // 2
    padded = convolved(part, p, around(p, ""))
    return padded[:, reach : padded.shape[1] - reach, reach : padded.shape[2] - reach]


@partial(jax.jit, static_argnames=("groups",))
def _tile_moments(part: Array, inside: Array, *, groups: int) -> Moments:
    """The statistics of the first rows and columns of a tile."""
    is_inside = (jnp.arange(part.shape[1]) < inside[0])[:, None] & (jnp.arange(part.shape[2]) < inside[1])
    weights = is_inside[None, :, :, None, None] / (inside[0] * inside[1] * (part.shape[-1] // groups))
    x = part.reshape(*part.shape[:3], groups, -1)
    mean = jnp.sum(x * weights, axis=(1, 2, 4))
    return Moments(mean, jnp.sum(jnp.square(x - mean[:, None, None, :, None]) * weights, axis=(1, 2, 4)))


@partial(jax.jit, static_argnames=("groups",))
def _attended(x: Array, p: Any, norm: Any, moments: Moments | None, *, groups: int) -> Array:
    return attention(normed(x, Norm(norm, groups, silu=False), moments), p)
