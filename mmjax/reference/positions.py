"""Patches of an image, and positions of patches and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


def patch_positions(rows: int, columns: int, merge: int) -> Int[np.ndarray, "T 2"]:
    """(row, column) of every patch in encoder order: merge x merge blocks row-major, row-major inside a block.

    `rows` and `columns` are numbers of patches, multiples of `merge`. The result is int32 [rows · columns, 2] from 0:
    (0, 0), (0, 1), (1, 0), (1, 1), (0, 2), … for 2 rows, 4 columns and merge 2.
    """
    return np.array(
        [
            (block_row + row, block_column + column)
            for block_row in range(0, rows, merge)
            for block_column in range(0, columns, merge)
            for row in range(merge)
            for column in range(merge)
        ],
        np.int32,
    ).reshape(-1, 2)


def centres(positions_T2: Int[np.ndarray, "T 2"]) -> Float[np.ndarray, "T 2"]:
    """Angles of patches' centres by (row, column), before frequencies: -2π at an image's first edge, 2π at its last.

    `positions_T2` are (row, column) of each patch of an image, as `patch_positions` gives them.
    """
    return 2 * np.pi * (2 * (positions_T2 + 0.5) / (positions_T2.max(axis=0) + 1) - 1)


def windows_of(positions_T2: Int[np.ndarray, "T 2"], side: int) -> list[Int[np.ndarray, " W"]]:
    """Indices of the patches in each window of `side` x `side` patches, windows row by row; at the edges they may be
    smaller.

    `positions_T2` are (row, column) of each patch, as `patch_positions` gives them.
    """
    rows, columns = positions_T2.max(axis=0) + 1
    windows = []
    for top in range(0, rows, side):
        for left in range(0, columns, side):
            patches = [
                patch
                for patch, (row, column) in enumerate(positions_T2)
                if top <= row < top + side and left <= column < left + side
            ]
            windows.append(np.array(patches))
    return windows


class Grid(NamedTuple):
    """An image, or a video whose times are positions.

    Attributes:
      first: index of its first token.
      rows, columns: its tokens; of a video those of a temporal patch.
      times: the number of each temporal patch along time, from 0; (0,) of an image.
    """

    first: int
    rows: int
    columns: int
    times: tuple[int, ...] = (0,)


def token_positions(length: int, grids: Sequence[Grid]) -> Int[np.ndarray, "N 3"]:
    """(time, row, column) of every token of a sample by M-RoPE (Wang et al. 2024, "Qwen2-VL", section 2.1).

    Args:
      length: number of tokens.
      grids: images and videos, such as Grid(3, rows=2, columns=2); () for text alone, where all three numbers are the
        index.
    """
    starts = {grid.first: grid for grid in grids}
    positions: list[tuple[int, int, int]] = []
    while len(positions) < length:
        number = max((max(position) for position in positions), default=-1) + 1
        grid = starts.get(len(positions), Grid(0, 1, 1))
        positions += [
            (number + time, number + row, number + column)
            for time in grid.times
            for row in range(grid.rows)
            for column in range(grid.columns)
        ]
    return np.array(positions[:length], np.int32).reshape(-1, 3)


def axis_weights(kind: str, side: int, grid: int) -> Float[np.ndarray, "S G"]:
    """Weights [side, grid] that resize a table of `grid` entries to `side` entries along one axis.

    `kind` is "bicubic", "bicubic_smooth", "bilinear" or "corners". "bicubic": a cubic polynomial through four entries,
    with slopes (p[i+1] - p[i-1]) * 3/4 at the inner two, which is Keys' convolution with a = -3/4; the first and last
    entries are repeated beyond the table. "bilinear": a tent over the table's entries, as wide as two of them or as two
    entries of the result, whichever is wider. "bicubic_smooth": the same with Keys' kernel of a = -1/2 in place of a
    tent. "corners": the entries of the result are equally far apart, from the table's first to its last entry, and each
    is on the line between its two neighbours in the table.
    """
    ratio, rows = grid / side, np.zeros((side, grid))
    for place in range(side):
        if kind == "corners":
            left, rest = divmod(place * (grid - 1), max(side - 1, 1))
            rows[place, left] = 1 - rest / max(side - 1, 1)
            if rest:
                rows[place, left + 1] = rest / (side - 1)
            continue
        if kind in ("bilinear", "bicubic_smooth"):
            reach, middle = max(1.0, ratio), (place + 0.5) * ratio
            distances = [abs(at + 0.5 - middle) / reach for at in range(grid)]
            shares = [max(0.0, 1 - distance) if kind == "bilinear" else _keys(distance) for distance in distances]
            rows[place] = np.array(shares) / sum(shares)
            continue
        at = (place + 0.5) * ratio - 0.5
        left = int(np.floor(at))
        t, slope = at - left, 0.75
        # Hermite's basis: values at both ends of the interval, and slopes computed from their neighbours.
        value0, value1 = 2 * t**3 - 3 * t**2 + 1, 3 * t**2 - 2 * t**3
        slope0, slope1 = (t**3 - 2 * t**2 + t) * slope, (t**3 - t**2) * slope
        shares = (-slope0, value0 - slope1, value1 + slope0, slope1)
        for source, share in zip(range(left - 1, left + 3), shares, strict=True):
            rows[place, min(max(source, 0), grid - 1)] += share
    return rows


def _keys(distance: float) -> float:
    """Keys' kernel with a = -1/2: 1.5 d³ - 2.5 d² + 1 within one place, (-d³ + 5 d² - 8 d + 4) / 2 within two."""
    if distance < 1:
        return 1.5 * distance**3 - 2.5 * distance**2 + 1
    return (-(distance**3) + 5 * distance**2 - 8 * distance + 4) / 2 if distance < 2 else 0.0


def cut_patches(image_HWC: Float[np.ndarray, "h w C"], patch: int, merge: int) -> Float[np.ndarray, "T P*P*C"]:
    """Patches of an image in `patch_positions` order, each flattened as (row, column, channel).

    `patch` is the side of a patch in pixels, `merge` the side of a block of patches that become one token.

    Raises ValueError when a side is not a multiple of patch * merge.
    """
    height, width, channels = image_HWC.shape
    if height % (patch * merge) or width % (patch * merge):
        raise ValueError(f"image: size {height}x{width} is no multiple of {patch * merge}; resize or pad the image")
    positions = patch_positions(height // patch, width // patch, merge)
    squares = [image_HWC[r * patch : (r + 1) * patch, c * patch : (c + 1) * patch] for r, c in positions]
    return np.stack(squares).reshape(len(positions), patch * patch * channels)


def cut_frames(
    medium_HWC: Float[np.ndarray, "h w C"], frames: int, channels: int, *, patch: int, merge: int
) -> Float[np.ndarray, "T X"]:
    """Patches of ``frames`` frames in `patch_positions` order, all pixels of the first frame in front.

    `medium_HWC` is an image, which is repeated for all frames, or has as many frames one behind the other along its
    channels, of `channels` each; X = frames * patch² * channels. `patch` and `merge` are as in `cut_patches`.

    Raises ValueError when a side is not a multiple of patch * merge.
    """
    parts = np.split(medium_HWC, medium_HWC.shape[-1] // channels, axis=-1)
    cut = [cut_patches(part, patch, merge) for part in parts]
    return np.concatenate(cut * (frames // len(cut)), axis=1)
