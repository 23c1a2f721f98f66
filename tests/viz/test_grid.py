"""The grid of pictures that generators have made: their pixels, below those that were to be made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from mmjax.viz.grid import as_levels, draw_grid


def test_levels_go_from_black_to_white() -> None:
    picture = np.array([[[-1.5, -1.0, 0.0], [0.5, 1.0, 2.0]]], np.float32)
    np.testing.assert_array_equal(as_levels(picture), [[[0, 0, 128], [191, 255, 255]]])
    assert as_levels(picture[..., :1]).shape == (1, 2)


def test_each_picture_is_below_the_one_that_was_to_be_made(tmp_path: Path) -> None:
    """Ten pairs of other sizes and channels fill two double rows; small pictures grow to 64 pixels."""
    rng = np.random.default_rng(0)
    sizes = [(16, 32, 3), (16, 16, 1)] * 5
    pairs = [tuple(rng.uniform(-1, 1, size).astype(np.float32) for _ in range(2)) for size in sizes]
    draw_grid(pairs, tmp_path / "grid.png")  # type: ignore[arg-type]
    sheet = np.asarray(Image.open(tmp_path / "grid.png"))
    assert sheet.shape == (4 * 66 - 2, 8 * 130 - 2, 3)
    for number, pair in enumerate(pairs):
        row, column = divmod(number, 8)
        for below, picture in enumerate(pair):
            top, left = (2 * row + below) * 66, column * 130
            cut = sheet[top : top + 64, left : left + 4 * picture.shape[1]]
            want = as_levels(picture)
            want = want if want.ndim == 3 else want[..., None].repeat(3, -1)
            np.testing.assert_array_equal(cut, want.repeat(4, 0).repeat(4, 1))
    assert (sheet[3 * 66 :, 2 * 130 :] == 255).all()
