"""Pictures that generators have made, below those that were to be made, as one picture of their own pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from mmjax.assembly.latents import Drawings
from mmjax.data.types import Sample
from mmjax.viz.predictions import as_image

_COLUMNS, _GAP, _LEAST = 8, 2, 64
"""Pictures side by side, white pixels between them, and the least height of a picture, to which small ones grow."""
_CHANNELS = (1, 3)
Pair = tuple[np.ndarray, np.ndarray]
"""A picture that was to be made, and the one that was made."""


def as_levels(picture: np.ndarray) -> np.ndarray:
    """Levels 0…255, uint8, of a picture [h, w, C] in -1…1; [h, w] if it has one channel."""
    levels = np.clip(np.round((picture.astype(np.float64) + 1) * 127.5), 0, 255).astype(np.uint8)
    return levels[..., 0] if picture.shape[-1] == 1 else levels


def pairs_of(samples: Sequence[Sample], drawings: Sequence[Drawings]) -> list[Pair]:
    """The pictures that were to be made, each with the one that was made, in the order of samples.

    Recordings are shown as spectrograms: time to the right, pitch upwards. Media of other channels than 1 and 3, such
    as latents, are left out.

    Args:
      samples: the samples, such as those of `held_out(recipe, 100)`.
      drawings: for each sample, in their order, the media [h, w, C] that each generator drew, in -1…1.
    """
    return [
        (_shown(target), _shown(made))
        for sample, by_generator in zip(samples, drawings, strict=True)
        for name, media in by_generator.items()
        for target, made in zip(sample.media[name], media, strict=False)
        if made.ndim == 2 or made.shape[-1] in _CHANNELS
    ]


def _shown(medium: np.ndarray) -> np.ndarray:
    """The medium; a recording [F, M] as a picture in -1…1."""
    return medium if medium.ndim == 3 else 2 * as_image(medium) - 1


def draw_grid(pairs: Sequence[Pair], path: str | Path) -> None:
    """Writes a grid: a row of pictures that were to be made, below it those that were made, and so on.

    Args:
      pairs: at least one pair of pictures [h, w, C] in -1…1.
      path: the picture; its suffix chooses the format.
    """
    height, width = (max(side) for side in zip(*(made.shape[:2] for pair in pairs for made in pair), strict=True))
    times = -(-_LEAST // height) if height < _LEAST else 1
    columns = min(_COLUMNS, len(pairs))
    cell = height * times + _GAP, width * times + _GAP
    rows = 2 * -(-len(pairs) // columns)
    sheet = np.full((rows * cell[0] - _GAP, columns * cell[1] - _GAP, 3), 255, np.uint8)
    for number, pair in enumerate(pairs):
        row, column = divmod(number, columns)
        for below, picture in enumerate(pair):
            levels = as_levels(picture)
            coloured = levels if levels.ndim == 3 else np.repeat(levels[..., None], 3, axis=-1)
            grown = coloured.repeat(times, axis=0).repeat(times, axis=1)
            top, left = (2 * row + below) * cell[0], column * cell[1]
            sheet[top : top + grown.shape[0], left : left + grown.shape[1]] = grown
    Image.fromarray(sheet).save(path)
