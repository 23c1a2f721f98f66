"""Images that come to the LLM whole and in tiles: which of an image's tokens stands at which of its places.

The rule is that of LLaVA-NeXT (Liu et al. 2024), and of LLaVA-OneVision (Li et al. 2024), as ``transformers`` has it.
An encoder sees the whole image and then its tiles, row by row. Its LLM tokens are those of the whole image; then the
tiles' tokens put together to one picture, without what is there because the image has another aspect than its tiles
have together; and behind each row of the picture a learned *newline*. An image without tiles has one newline at its
end. A picture that is too large is resized: a place is then a mean of up to four tokens.

All of it is index arithmetic on sizes: nothing is decoded.

Legend: N places of an image in the LLM's rows, K tokens that a place is a mean of.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from mmjax.data.types import EncoderSpec, Tiled

Size = tuple[int, int]
"""Height and width, or rows and columns."""
NEWLINE = -2
"""The index of a place that holds the newline."""
TOO_LARGE = 1.1
"""A picture is resized where its side is so many times that of the largest."""


class Places(NamedTuple):
    """What stands at the places of a sample's images.

    Attributes:
      index: int32 [N, K], the encoder's tokens that a place is a mean of, counted over the sample; ``NEWLINE`` in all
        of them for a newline.
      shares: float32 [N, K], the weight of each.
    """

    index: np.ndarray
    shares: np.ndarray


def token_count(spec: EncoderSpec, sizes: Sequence[tuple[int, ...]], tiled: Tiled | None = None) -> int:
    """LLM tokens of an image, or of a recording.

    Args:
      spec: its encoder's.
      sizes: the sizes of the media that it becomes, without channels: a whole image, and its tiles.
      tiled: how it was cut, where ``spec.newline``; by default it is whole.

    Raises:
      ValueError: the media are not those that ``tiled`` says.
    """
    if not spec.newline:
        return sum(spec.tokens(*size) for size in sizes)
    tile = _tile([spec.grid(*size) for size in sizes], spec, tiled)
    if not tiled or not prod(tiled.grid):
        return prod(tile) + 1
    rows, columns = _resized(_kept(tile, tiled)[1], tile, spec.most_tiles)
    return prod(tile) + rows * (columns + 1)


def arrange(spec: EncoderSpec, grids: Sequence[tuple[int, ...]], images: Sequence[Tiled]) -> Places:
    """The places of a sample's images, one after another; K is ``spec.blended``.

    Args:
      spec: their encoder's.
      grids: patches along every axis of each of their media.
      images: how each was cut.

    Raises:
      ValueError: the media are not those that ``images`` say.
    """
    if not spec.newline:
        index = np.arange(sum(prod(grid) for grid in grids) // spec.patches_per_token, dtype=np.int32)
        return Places(index[:, None], np.ones((len(index), 1), np.float32))
    left, found, first = list(grids), list[Places](), 0
    for tiled in images:
        own, left = left[: 1 + prod(tiled.grid)], left[1 + prod(tiled.grid) :]
        tile = _tile(own, spec, tiled)
        places = _image(tile, tiled, spec)
        found.append(Places(np.where(places.index < 0, places.index, places.index + first), places.shares))
        first += len(own) * prod(tile)
    if left:
        raise ValueError(f"{len(grids)} media for {len(images)} images, whose tiles make {len(grids) - len(left)}")
    empty = Places(np.zeros((0, spec.blended), np.int32), np.zeros((0, spec.blended), np.float32))
    return Places(*(np.concatenate(own) for own in zip(empty, *found, strict=True)))


def _tile(grids: Sequence[tuple[int, ...]], spec: EncoderSpec, tiled: Tiled | None) -> Size:
    """LLM tokens along the sides of an image's media. Raises ValueError where they are not as many, or not equal."""
    count = 1 + (prod(tiled.grid) if tiled else 0)
    if len(grids) != count or len({*grids}) != 1:
        raise ValueError(f"an image as {count} media of one size wanted, not {[tuple(grid) for grid in grids]}")
    rows, columns = (side // spec.merge for side in grids[0])
    return rows, columns


def _image(tile: Size, tiled: Tiled, spec: EncoderSpec) -> Places:
    """The places of one image, its tokens counted from 0."""
    whole = _alone(np.arange(prod(tile)), spec.blended)
    newline = Places(np.full((1, spec.blended), NEWLINE, np.int32), np.eye(1, spec.blended, dtype=np.float32))
    if not prod(tiled.grid):
        return Places(*map(np.concatenate, zip(whole, newline, strict=True)))
    (top, left), (height, width) = _kept(tile, tiled)
    numbers = prod(tile) * (1 + np.arange(prod(tiled.grid)).reshape(tiled.grid))[:, None, :, None]
    numbers = numbers + np.arange(prod(tile)).reshape(tile)[None, :, None, :]
    picture = numbers.reshape(tiled.grid[0] * tile[0], -1)[top : top + height, left : left + width]
    rows, columns = _resized((height, width), tile, spec.most_tiles)
    if (rows, columns) == (height, width):
        index, shares = _alone(picture.reshape(-1), spec.blended)
    else:
        index, shares = _blended(picture, (rows, columns))
    shape = (rows, columns, spec.blended)
    rest = [
        np.concatenate([own.reshape(shape), np.repeat(ending[None], rows, 0)], axis=1).reshape(-1, spec.blended)
        for own, ending in zip((index, shares), newline, strict=True)
    ]
    return Places(*(np.concatenate([own, behind]) for own, behind in zip(whole, rest, strict=True)))


def _alone(numbers: np.ndarray, blended: int) -> Places:
    """Places that hold one token each."""
    index = np.repeat(numbers[:, None], blended, axis=1).astype(np.int32)
    return Places(index, np.repeat(np.eye(1, blended, dtype=np.float32), len(numbers), axis=0))


def _kept(tile: Size, tiled: Tiled) -> tuple[Size, Size]:
    """The first row and column, and the rows and columns, of the picture without what the aspect adds.

    Rounding is that of ``unpad_image`` in ``transformers``.
    """
    (height, width), (rows, columns) = tiled.size, (own * side for own, side in zip(tiled.grid, tile, strict=True))
    if width / height > columns / rows:
        above = (rows - int(round(height * (columns / width), 7))) // 2
        return (above, 0), (rows - 2 * above, columns)
    before = (columns - int(round(width * (rows / height), 7))) // 2
    return (0, before), (rows, columns - 2 * before)


def _resized(size: Size, tile: Size, most: int) -> Size:
    """Rows and columns of a picture that is no larger than ``most`` tiles; 0 lets it be.

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
        _between(own, wanted) for own, wanted in zip(picture.shape, size, strict=True)
    )
    corners = [(rows, columns) for rows in (above, below) for columns in (before, behind)]
    index = np.stack([picture[np.ix_(rows, columns)] for rows, columns in corners], axis=-1)
    shares = np.stack([np.outer(rows, columns) for rows in (1 - down, down) for columns in (1 - right, right)], axis=-1)
    return Places(index.reshape(-1, 4).astype(np.int32), shares.reshape(-1, 4).astype(np.float32))


def _between(side: int, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of so many places along a side: the token before it, that behind it, and the share of the latter."""
    at = np.maximum((np.arange(wanted) + 0.5) * (side / wanted) - 0.5, 0.0)
    before = np.floor(at).astype(int)
    return before, np.minimum(before + 1, side - 1), at - before
