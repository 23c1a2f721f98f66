"""Positions of a sample's tokens along three axes, time, row and column: M-RoPE (Wang et al., "Qwen2-VL", 2024, §2.1).

A token of text, of a recording, or of a picture to be drawn has the same number along all three axes. An image whose
first token has number n has its token in row r and column c at (n, n + r, n + c). Where times of videos are positions,
the token of a video in the temporal patch with number t is at (n + t, n + r, n + c). The number of the next token is
always the largest number so far plus 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from mmjax.data.types import EncoderSpec, Sample

AXES = 3
"""Numbers of a position."""
Grids = Mapping[str, Sequence[tuple[int, ...]]]
"""Patches along every axis of each medium, by encoder, as ``SampleMeta.grids`` has them."""


class _Grid(NamedTuple):
    """An image, or a video whose times are positions, in the text.

    Attributes:
      first: the place of its first token.
      times: numbers of its temporal patches along time, from 0; (0,) for an image.
      sides: its rows and columns of tokens.
    """

    first: int
    times: tuple[int, ...]
    sides: tuple[int, int]


def sample_positions(sample: Sample, grids: Grids, encoders: Mapping[str, EncoderSpec]) -> Int[np.ndarray, "N 3"]:
    """The positions of a sample's N tokens, int32: time, row and column.

    A token of text, of a recording or of a picture to be drawn has one number three times. The token in row r and
    column c of an image that begins at number n is at (n, n + r, n + c), that of a video in `Sample.video_times` at
    (n + t, n + r, n + c). The next token has the largest number so far plus 1; the first has 0.

    Args:
      sample: the sample; only the places of its media's tokens are read, not the media.
      grids: the patches of its media along every axis, as ``SampleMeta.grids`` has them: {"vision": ((16, 16),)}.
      encoders: the specs of encoders and generators, by name.

    Raises:
      ValueError: an image's tokens do not stand together.
    """
    positions = np.empty((len(sample.tokens), AXES), np.int32)
    done = number = 0
    for first, times, sides in sorted(_grids(sample, grids, encoders)):
        positions[done:first] = (number + np.arange(first - done))[:, None]
        number += first - done
        done = first + len(times) * prod(sides)
        positions[first:done, 0] = number + np.repeat(times, prod(sides))
        positions[first:done, 1:] = number + np.tile(np.indices(sides, np.int32).reshape(2, -1).T, (len(times), 1))
        number += max(times[-1] + 1, *sides)
    positions[done:] = (number + np.arange(len(positions) - done))[:, None]
    return positions


def _grids(sample: Sample, grids: Grids, encoders: Mapping[str, EncoderSpec]) -> Iterator[_Grid]:
    """The images and videos that encoders see, encoder by encoder; each must stand together in the text."""
    for name, grids_of in grids.items():
        spec = encoders[name]
        if spec.drawn or spec.axes != 2:
            continue
        places, used, remaining = np.flatnonzero(sample.placeholders(name)), 0, list(grids_of)
        for times in sample.video_times.get(name, ((),) * len(grids_of)):
            (rows, columns), *_ = remaining
            sides = rows // spec.merge, columns // spec.merge
            del remaining[: max(1, len(times))]
            count = max(1, len(times)) * prod(sides)
            of_grid = places[used : used + count]
            used += count
            if len(of_grid) != count or of_grid[-1] - of_grid[0] + 1 != count:
                shown = f"{len(times)} times {sides[0]}x{sides[1]}" if times else f"{sides[0]}x{sides[1]}"
                kind = "a video" if times else "an image"
                text = f"{kind} of {shown} tokens has {len(of_grid)} places in a row"
                raise ValueError(f"{sample.question!r}: {text}; M-RoPE needs its tokens one behind the other")
            yield _Grid(int(of_grid[0]), times or (0,), sides)
