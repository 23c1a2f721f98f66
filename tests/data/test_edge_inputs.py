"""Inputs of encoders that read encoders, and of generators that read images: small values, computed by hand.

A pixel is a patch, with a number that no other pixel has; so tokens are followed by their pixels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmjax.data.derived import completed, medium_numbers
from mmjax.data.packing import Packer
from mmjax.data.sample import meta_of
from mmjax.data.types import EncoderSpec, Sample
from mmjax.reference.edges import nearest_tokens

IDS = {"vision": 90, "painter": 91}
VISION, PAINTER = IDS.values()
CLIPS = {
    "vision": EncoderSpec(patch=1, buckets=((2, 6),), text_index=None),
    "temporal": EncoderSpec(patch=1, axes=1, buckets=((2, 6),), reads=(("vision", ""),)),
}
DRAWINGS = {
    "vision": EncoderSpec(patch=1, buckets=((4, 8),)),
    "painter": EncoderSpec(
        patch=1, merge=2, drawn=True, buckets=((1, 32),), reads=(("llm", ""), ("vision", "")), text_index=None
    ),
}


def image(first: int, rows: int, columns: int) -> np.ndarray:
    """An image whose pixels are numbered row by row."""
    return first + np.arange(rows * columns, dtype=np.float32).reshape(rows, columns, 1)


def sample(tokens: list[int], **media: list[np.ndarray]) -> Sample:
    """A sample with these media, all of whose tokens are learned."""
    arrays: Any = {name: tuple(of_name) for name, of_name in media.items()}
    noise = {"painter": arrays["painter"]} if "painter" in arrays else {}
    return Sample(
        tokens=np.array(tokens, np.int32),
        loss_weights=np.ones(len(tokens), np.float32),
        media=arrays,
        question="?",
        answer="",
        prompt=len(tokens),
        media_tokens=IDS,
        noise=noise,
        times={name: (0.5,) * len(of_name) for name, of_name in noise.items()},
    )


def rows_of(specs: dict[str, EncoderSpec], *samples: Sample) -> dict[str, Any]:
    """The inputs of a microbatch with a cell for each sample, by module."""
    packer = Packer(encoders=specs, sequence_length=20, microbatches=1, cells=len(samples), pad=0)
    return dict(packer.microbatch(samples, len(samples)).inputs)


def pixels(arrays: dict[str, Any], index: np.ndarray, cells: int) -> np.ndarray:
    """The pixels of the image tokens at these places within their cells, in the shape of ``index``; -1 for none."""
    tokens, places = arrays["vision"]["patches"].reshape(cells, -1), index.reshape(cells, -1)
    return (
        np.where(places < 0, -1, np.take_along_axis(tokens, np.maximum(places, 0), 1)).reshape(index.shape).astype(int)
    )


def test_a_clip_has_the_tokens_of_all_images_in_their_order() -> None:
    """The second image is the larger one, which packing places first."""
    first = sample([1, VISION, 2, VISION, VISION, VISION], vision=[image(10, 1, 1), image(20, 1, 3)])
    second = sample([VISION, VISION, 3], vision=[image(30, 2, 1)])
    arrays = rows_of(CLIPS, first, second)
    clips = arrays["temporal"]
    assert pixels(arrays, clips["vision_index"], 2)[[0, 2]].tolist() == [
        [10, 20, 21, 22, -1, -1],
        [30, 31, -1, -1, -1, -1],
    ]
    assert clips["segments"].tolist() == [[1, 1, 1, 1, 0, 0], [0] * 6, [1, 1, 0, 0, 0, 0], [0] * 6]
    assert clips["positions"][[0, 2], :, 0].tolist() == [[0, 1, 1, 1, 0, 0], [0] * 6]
    assert clips["items"][[0, 2]].tolist() == [[1, 2, 2, 2, 0, 0], [1, 1, 0, 0, 0, 0]]
    # All tokens are of one kind, under two rules: so they read and are read by both.
    assert clips["is"][[0, 2]].tolist() == clips["attends"][[0, 2]].tolist()
    assert [row.astype(bool).tolist() for row in clips["is"][[0, 2]]] == [
        [True] * 4 + [False] * 2,
        [True] * 2 + [False] * 4,
    ]
    assert "vision_index" not in arrays["llm"]
    assert arrays["llm"]["temporal_index"][:, :7].tolist() == [[-1, 0, -1, 1, 2, 3, -1], [0, 1, -1, -1, -1, -1, -1]]


def test_numbers_of_media_behind_two_encoders() -> None:
    specs = {**CLIPS, "second": EncoderSpec(patch=1, axes=1, buckets=((2, 6),), reads=(("temporal", ""),))}
    meta = completed(meta_of(sample([VISION] * 5, vision=[image(0, 1, 2), image(9, 3, 1)]), CLIPS), specs)
    assert meta.grids["temporal"] == meta.grids["second"] == ((5,),)
    assert medium_numbers(specs, "second", meta).tolist() == [0, 0, 1, 1, 1]


def test_a_drawing_sees_the_last_image_before_it() -> None:
    """Two drawings behind two images and behind three, and one behind text alone, which an image follows.

    The first drawing has two columns, its image three: it sees the outer ones.
    """
    drawn = [image(0, 4, 4), image(0, 2, 6)]
    text = [VISION] * 2 + [1] + [VISION] * 3 + [PAINTER] * 4 + [VISION] * 4 + [PAINTER] * 3
    first = sample(text, vision=[image(10, 1, 2), image(20, 1, 3), image(30, 2, 2)], painter=drawn)
    second = sample([5, PAINTER, VISION], vision=[image(40, 1, 1)], painter=[image(0, 2, 2)])
    arrays = rows_of(DRAWINGS, first, second)
    painter = arrays["painter"]
    # Of the third image's rows the second drawing's only row lies between both: the lower one counts.
    seen = pixels(arrays, painter["vision_index"], 2)
    assert seen.tolist() == [[20, 22, 20, 22, 32, 33, 33, -1], [-1] * 8]
    assert painter["index"].tolist() == [[6, 7, 8, 9, 14, 15, 16, -1], [1, *[-1] * 7]]


@pytest.mark.parametrize(
    ("drawing", "seen", "expected"),
    [
        ((1, 1), (1, 1), [0]),
        ((2, 2), (1, 1), [0, 0, 0, 0]),
        ((1, 1), (3, 3), [4]),
        ((1, 2), (1, 4), [1, 3]),  # in the middle between two tokens: the right one
        ((3, 1), (2, 1), [0, 1, 1]),
        ((2, 3), (2, 3), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_reference_finds_the_nearest_tokens(
    drawing: tuple[int, int], seen: tuple[int, int], expected: list[int]
) -> None:
    assert nearest_tokens(drawing, seen).tolist() == expected
