"""The order of an image's tokens in the LLM's rows, for encoders that see an image as a whole and in tiles.

It follows LLaVA-NeXT (Liu et al. 2024) and LLaVA-OneVision (Li et al. 2024), as implemented in ``transformers``. An
encoder sees the whole image and then its tiles, row by row. The LLM sees the tokens of the whole image, then those of
a *picture*: the tiles' tokens side by side, without the padding that the tiles' common aspect adds. A learned *newline*
follows each row of the picture. An image without tiles ends with one newline. A picture that is too large is resized:
each of its places is then a mean of up to four tokens.

All of this is index arithmetic on sizes: nothing is decoded.

Legend: N places of an image in the LLM's rows, K tokens that are averaged for a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from mmjax.data.derived import token_counts
from mmjax.data.types import EncoderSpec, Tiled

Size = tuple[int, int]
"""Height and width, or rows and columns."""
NEWLINE = -2
"""The index of a newline."""
TOO_LARGE = 1.1
"""A picture is resized if its side is more than so many times the largest picture's."""


class Places(NamedTuple):
    """The tokens at the places of a sample's images.

    Attributes:
      index: int32 [N, K], the encoder's tokens that are averaged for a place, numbered within the sample; ``NEWLINE``
        in all K for a newline.
      shares: float32 [N, K], the weight of each token.
    """

    index: np.ndarray
    shares: np.ndarray


def token_count(spec: EncoderSpec, sizes: Sequence[tuple[int, ...]], tiled: Tiled | None = None) -> int:
    """Number of LLM tokens of an image or a recording.

    Args:
      spec: the spec of its encoder.
      sizes: the sizes of its media in pixels or frames, without channels: [(336, 336)]; the whole image, then its
        tiles.
      tiled: how it was cut, with ``spec.newline``, such as Tiled(size=(600, 800), grid=(2, 2)); by default it has no
        tiles.

    Raises:
      ValueError: the media do not agree with ``tiled``.
    """
    if not spec.newline:
        return sum(spec.tokens(*size) for size in sizes)
    tile = _tile([spec.grid(*size) for size in sizes], spec, tiled)
    if not tiled or not prod(tiled.grid):
        return prod(tile) + 1
    rows, columns = _resized(_unpadded(tile, tiled)[1], tile, spec.most_tiles)
    return prod(tile) + rows * (columns + 1)


def arrange(spec: EncoderSpec, grids: Sequence[tuple[int, ...]], images: Sequence[Tiled]) -> Places:
    """The places of a sample's images, one image after another: ``index`` int32 [N, K] and ``shares`` float32 [N, K].

    ``index`` numbers the encoder's tokens within the sample, from 0, of which a place is the mean weighted by
    ``shares``; -2 stands for a newline. K is ``spec.blended``, 1 or 4.

    Args:
      spec: the spec of their encoder.
      grids: patches along every axis of each of their media, such as [(24, 24)]: each whole image, then its tiles.
      images: how each image was cut; ignored without ``spec.newline``, where each token has one place, in order.

    Raises:
      ValueError: the media do not agree with ``images``.
    """
    if not spec.newline:
        index = np.arange(sum(token_counts(spec, grids)), dtype=np.int32)
        return Places(index[:, None], np.ones((len(index), 1), np.float32))
    remaining, by_image, first = list(grids), list[Places](), 0
    for tiled in images:
        count = 1 + prod(tiled.grid)
        of_image, remaining = remaining[:count], remaining[count:]
        tile = _tile(of_image, spec, tiled)
        places = _image(tile, tiled, spec)
        by_image.append(Places(np.where(places.index < 0, places.index, places.index + first), places.shares))
        first += len(of_image) * prod(tile)
    if remaining:
        used = len(grids) - len(remaining)
        raise ValueError(f"{len(grids)} media for {len(images)} images, whose tiles make {used}")
    empty = Places(np.zeros((0, spec.blended), np.int32), np.zeros((0, spec.blended), np.float32))
    return _concatenated([empty, *by_image])


def _tile(grids: Sequence[tuple[int, ...]], spec: EncoderSpec, tiled: Tiled | None) -> Size:
    """LLM tokens along the sides of each of an image's media. Raises ValueError for a wrong number or unequal sizes."""
    count = 1 + (prod(tiled.grid) if tiled else 0)
    if len(grids) != count or len({*grids}) != 1:
        raise ValueError(f"an image as {count} media of one size wanted, not {[tuple(grid) for grid in grids]}")
    rows, columns = (side // spec.merge for side in grids[0])
    return rows, columns


def _image(tile: Size, tiled: Tiled, spec: EncoderSpec) -> Places:
    """The places of one image, its tokens numbered from 0."""
    of_whole_image = _single(np.arange(prod(tile)), spec.blended)
    newline = Places(np.full((1, spec.blended), NEWLINE, np.int32), np.eye(1, spec.blended, dtype=np.float32))
    if not prod(tiled.grid):
        return _concatenated([of_whole_image, newline])
    (top, left), (height, width) = _unpadded(tile, tiled)
    numbers = prod(tile) * (1 + np.arange(prod(tiled.grid)).reshape(tiled.grid))[:, None, :, None]
    numbers = numbers + np.arange(prod(tile)).reshape(tile)[None, :, None, :]
    picture = numbers.reshape(tiled.grid[0] * tile[0], -1)[top : top + height, left : left + width]
    rows, columns = _resized((height, width), tile, spec.most_tiles)
    if (rows, columns) == (height, width):
        of_picture = _single(picture.reshape(-1), spec.blended)
    else:
        of_picture = _blended(picture, (rows, columns))
    shape = (rows, columns, spec.blended)
    with_newlines = Places(
        *(
            np.concatenate([values.reshape(shape), np.repeat(ending[None], rows, 0)], axis=1).reshape(-1, spec.blended)
            for values, ending in zip(of_picture, newline, strict=True)
        )
    )
    return _concatenated([of_whole_image, with_newlines])


def _concatenated(places: Sequence[Places]) -> Places:
    """Places of several parts, one part after another."""
    return Places(*(np.concatenate(arrays) for arrays in zip(*places, strict=True)))


def _single(numbers: np.ndarray, blended: int) -> Places:
    """Places with one token each, in arrays for `blended` tokens."""
    index = np.repeat(numbers[:, None], blended, axis=1).astype(np.int32)
    return Places(index, np.repeat(np.eye(1, blended, dtype=np.float32), len(numbers), axis=0))


def _unpadded(tile: Size, tiled: Tiled) -> tuple[Size, Size]:
    """The first row and column, and the rows and columns, of the picture without the padding that the aspect adds.

    Rounds as ``unpad_image`` in ``transformers``.
    """
    (height, width), (rows, columns) = tiled.size, (n * side for n, side in zip(tiled.grid, tile, strict=True))
    if width / height > columns / rows:
        above = (rows - int(round(height * (columns / width), 7))) // 2
        return (above, 0), (rows - 2 * above, columns)
    before = (columns - int(round(width * (rows / height), 7))) // 2
    return (0, before), (rows, columns - 2 * before)


def _resized(size: Size, tile: Size, most: int) -> Size:
    """Rows and columns of a picture after resizing it to at most ``most`` tiles; 0 does not resize.

    Raises:
      ValueError: nothing would be left of it.
    """
    ratio = sqrt(prod(size) / (most * prod(tile))) if most else 1.0
    if ratio <= TOO_LARGE:
        return size
    rows, columns = (int(side // ratio) for side in size)
    if not rows or not columns:
        raise ValueError(f"a picture of {size[0]}x{size[1]} tokens is too long to be resized to {most} tiles")
    return rows, columns


def _blended(picture: np.ndarray, size: Size) -> Places:
    """The picture resized as ``torch.nn.functional.interpolate`` does it (bilinear, ``align_corners=False``)."""
    (above, below, down), (before, behind, right) = (
        _between(side, wanted) for side, wanted in zip(picture.shape, size, strict=True)
    )
    corners = [(rows, columns) for rows in (above, below) for columns in (before, behind)]
    index = np.stack([picture[np.ix_(rows, columns)] for rows, columns in corners], axis=-1)
    shares = np.stack([np.outer(rows, columns) for rows in (1 - down, down) for columns in (1 - right, right)], axis=-1)
    return Places(index.reshape(-1, 4).astype(np.int32), shares.reshape(-1, 4).astype(np.float32))


def _between(side: int, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of `wanted` places along a side: the token before it, the token after it, and the latter's share."""
    at = np.maximum((np.arange(wanted) + 0.5) * (side / wanted) - 0.5, 0.0)
    before = np.floor(at).astype(int)
    return before, np.minimum(before + 1, side - 1), at - before
