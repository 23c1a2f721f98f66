"""Images in tiles: puts the arrays of their tokens together to a picture.

Letters: N tokens, D width, H and W rows and columns of the picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mmjax.reference.arithmetic import matmul


def in_rows(
    tokens: Sequence[Float[Array, "n D"]],
    tile: tuple[int, int],
    grid: tuple[int, int],
    original: tuple[int, int],
    newline_D: Float[Array, " D"],
    most_tiles: int,
) -> Float[Array, "N D"]:
    """The LLM's tokens of an image: those of its thumbnail, then of its tiles as one picture, a newline after each row.

    Args:
      tokens: tokens [n, D] of the thumbnail, then of each tile, row by row; n = rows · columns of `tile`.
      tile: rows and columns of tokens of the thumbnail and of each tile.
      grid: rows and columns of tiles; (0, 0) for an image without tiles, which has one newline at its end.
      original: height and width of the image, in pixels; only their ratio counts.
      newline_D: the newline.
      most_tiles: a picture with over 1.1² times the tokens of this many tiles is resized to about as many; 0 never
        resizes.
    """
    if grid == (0, 0):
        return jnp.concatenate([tokens[0], newline_D[None]])
    lines = [
        jnp.concatenate([tokens[1 + row * grid[1] + column].reshape(*tile, -1) for column in range(grid[1])], axis=1)
        for row in range(grid[0])
    ]
    picture_HWD = _trimmed(jnp.concatenate(lines, axis=0), original)
    height, width = picture_HWD.shape[:2]
    if most_tiles and (ratio := math.sqrt(height * width / (most_tiles * tile[0] * tile[1]))) > 1.1:
        picture_HWD = _shrunk(picture_HWD, int(height // ratio), int(width // ratio))
    ending_H1D = jnp.broadcast_to(newline_D, (picture_HWD.shape[0], 1, len(newline_D)))
    return jnp.concatenate([tokens[0], jnp.concatenate([picture_HWD, ending_H1D], axis=1).reshape(-1, len(newline_D))])


def _trimmed(picture_HWD: jax.Array, original: tuple[int, int]) -> jax.Array:
    """The picture without the padding that fits the image's aspect: equal numbers of rows or columns on both sides."""
    height, width = picture_HWD.shape[:2]
    if original[1] / original[0] > width / height:
        bar = (height - math.floor(round(original[0] * (width / original[1]), 7))) // 2
        return picture_HWD[bar : height - bar]
    bar = (width - math.floor(round(original[1] * (height / original[0]), 7))) // 2
    return picture_HWD[:, bar : width - bar]


def _shrunk(picture_HWD: jax.Array, height: int, width: int) -> jax.Array:
    """Resizes the picture by linear interpolation along rows and columns between the centres of tokens."""
    H, W, D = picture_HWD.shape
    by_row, by_column = (jnp.asarray(_tents(*sides), picture_HWD.dtype) for sides in ((height, H), (width, W)))
    along = matmul(by_row, picture_HWD.reshape(H, -1)).reshape(height, W, D)
    return matmul(by_column, along.swapaxes(0, 1).reshape(W, -1)).reshape(width, height, D).swapaxes(0, 1)


def _tents(side: int, before: int) -> Float[np.ndarray, "side before"]:
    """For each of ``side`` tokens, the weights of ``before`` old tokens: the two nearest ones, by distance."""
    middles = np.clip((np.arange(side) + 0.5) * before / side - 0.5, 0, before - 1)
    return np.maximum(0.0, 1.0 - np.abs(middles[:, None] - np.arange(before)))
