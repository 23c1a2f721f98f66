"""Positions of a sample's tokens along three axes, time, row and column: M-RoPE (Wang et al., "Qwen2-VL", 2024, §2.1).

A token of text, and what stands for a recording or for a picture to be drawn, has one number three times, the next one.
An image that begins at number n has its token in row r and column c at (n, n + r, n + c); what follows goes on behind
the largest of these. So after any token the next number is its own largest plus 1.
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
    """The positions of a sample's tokens, int32.

    Args:
      sample: the sample; of its media only the places of their tokens are read.
      grids: the patches of its media.
      encoders: the specs of encoders and generators.

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
    """The first token of each image that is seen, and its rows and columns of tokens."""
    for name, own in grids.items():
        spec = encoders[name]
        if spec.drawn or spec.axes != 2:
            continue
        places, used = np.flatnonzero(sample.placeholders(name)), 0
        for rows, columns in own:
            sides = rows // spec.merge, columns // spec.merge
            here = places[used : used + prod(sides)]
            used += prod(sides)
            if len(here) != prod(sides) or here[-1] - here[0] + 1 != len(here):
                what = f"an image of {sides[0]}x{sides[1]} tokens has {len(here)} places in a row"
                raise ValueError(f"{sample.question!r}: {what}; M-RoPE needs its tokens one behind the other")
            yield int(here[0]), sides
