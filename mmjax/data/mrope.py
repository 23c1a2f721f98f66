"""Positions of a sample's tokens along three axes, time, row and column: M-RoPE (Wang et al., "Qwen2-VL", 2024, §2.1).

A token of text, of a recording, or of a picture to be drawn has the same number along all three axes. An image whose
first token has number n has its token in row r and column c at (n, n + r, n + c). The number of the next token is
always the largest number so far plus 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np
from jaxtyping import Int

from mmjax.data.types import EncoderSpec, Sample

AXES = 3
"""Numbers of a position."""
Grids = Mapping[str, Sequence[tuple[int, ...]]]
"""Patches along every axis of each medium, by encoder, as ``SampleMeta.grids`` has them."""


def sample_positions(sample: Sample, grids: Grids, encoders: Mapping[str, EncoderSpec]) -> Int[np.ndarray, "N 3"]:
    """The positions of a sample's N tokens, int32: time, row and column.

    A token of text, of a recording or of a picture to be drawn has one number three times. The token in row r and
    column c of an image that begins at number n is at (n, n + r, n + c). The next token has the largest number so far
    plus 1; the first has 0.

    Args:
      sample: the sample; only the places of its media's tokens are read, not the media.
      grids: the patches of its media along every axis, as ``SampleMeta.grids`` has them: {"vision": ((16, 16),)}.
      encoders: the specs of encoders and generators, by name.

    Raises:
      ValueError: an image's tokens do not stand together.
    """
    positions = np.empty((len(sample.tokens), AXES), np.int32)
    done = number = 0
    for first, sides in sorted(_images(sample, grids, encoders)):
        positions[done:first] = (number + np.arange(first - done))[:, None]
        number += first - done
        done = first + prod(sides)
        positions[first:done] = number
        positions[first:done, 1:] += np.indices(sides, np.int32).reshape(2, -1).T
        number += max(sides)
    positions[done:] = (number + np.arange(len(positions) - done))[:, None]
    return positions


def _images(sample: Sample, grids: Grids, encoders: Mapping[str, EncoderSpec]) -> Iterator[tuple[int, tuple[int, int]]]:
    """The first token of each image that an encoder sees, and its rows and columns of tokens."""
    for name, grids_of in grids.items():
        spec = encoders[name]
        if spec.drawn or spec.axes != 2:
            continue
        places, used = np.flatnonzero(sample.placeholders(name)), 0
        for rows, columns in grids_of:
            sides = rows // spec.merge, columns // spec.merge
            of_image = places[used : used + prod(sides)]
            used += prod(sides)
            if len(of_image) != prod(sides) or of_image[-1] - of_image[0] + 1 != len(of_image):
                count = f"an image of {sides[0]}x{sides[1]} tokens has {len(of_image)} places in a row"
                raise ValueError(f"{sample.question!r}: {count}; M-RoPE needs its tokens one behind the other")
            yield int(of_image[0]), sides
