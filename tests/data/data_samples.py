"""Samples with images of known, all different pixels, for the tests of the data side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmjax.data.sample import build_sample
from mmjax.data.tokenizer import ByteTokenizer
from mmjax.data.types import EncoderSpec, Sample

TOKENIZER = ByteTokenizer(("vision",))


def numbered_image(height: int, width: int, channels: int, first: int) -> np.ndarray:
    """An image whose values count up from `first`, so that no two pixels of a test are equal."""
    values = np.arange(first, first + height * width * channels, dtype=np.float32)
    return values.reshape(height, width, channels)


def numbered_samples(spec: EncoderSpec, sizes: Sequence[Sequence[tuple[int, int]]]) -> list[Sample]:
    """A sample for each element of `sizes`, with images of (rows, columns) blocks of `spec`."""
    samples, first = [], 1
    for number, blocks in enumerate(sizes):
        images = []
        for rows, columns in blocks:
            images.append(numbered_image(rows * spec.block, columns * spec.block, spec.channels, first))
            first += images[-1].size
        turns = ((f"read {number}", str(number)),)
        samples.append(build_sample(TOKENIZER, {"vision": spec}, {"vision": images}, turns))
    return samples
