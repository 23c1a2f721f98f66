"""Patches of an image, and where they are in it."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def patch_positions(rows: int, columns: int, merge: int) -> Int[np.ndarray, "T 2"]:
    """(row, column) of every patch in encoder order: merge x merge blocks row-major, row-major inside a block."""
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


def cut_patches(image_HWC: Float[np.ndarray, "h w C"], patch: int, merge: int) -> Float[np.ndarray, "T P*P*C"]:
    """Patches of an image in `patch_positions` order, each flattened as (row, column, channel).

    Raises ValueError when a side is no multiple of patch * merge.
    """
    height, width, channels = image_HWC.shape
    if height % (patch * merge) or width % (patch * merge):
        raise ValueError(f"image: size {height}x{width} is no multiple of {patch * merge}; resize or pad the image")
    positions = patch_positions(height // patch, width // patch, merge)
    squares = [image_HWC[r * patch : (r + 1) * patch, c * patch : (c + 1) * patch] for r, c in positions]
    return np.stack(squares).reshape(len(positions), patch * patch * channels)
