"""Positions of three axes: what is known of them, and that packing and the dense reference agree on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.data.mrope import sample_positions
from mmjax.data.packing import Packer
from mmjax.data.process_rows import ProcessRows
from mmjax.data.sample import meta_of
from mmjax.data.types import EncoderSpec, Sample
from mmjax.reference.positions import Grid, token_positions

ENCODERS = {
    "vision": EncoderSpec(patch=2, merge=2, buckets=((2, 64),)),
    "second": EncoderSpec(patch=4, merge=1, buckets=((2, 64),)),
    "audio": EncoderSpec(patch=2, merge=2, axes=1, buckets=((2, 64),)),
    "painter": EncoderSpec(patch=2, merge=1, drawn=True, buckets=((2, 64),)),
}
IDS = {name: 90 + number for number, name in enumerate(ENCODERS)}


def sample(*pieces: int | tuple[Any, ...]) -> Sample:
    """Runs of so many tokens of text, and media: an encoder's name and sides in tokens."""
    tokens: list[int] = []
    media: dict[str, tuple[np.ndarray, ...]] = {}
    for piece in pieces:
        if isinstance(piece, int):
            tokens += [1] * piece
            continue
        name, *sides = piece
        tokens += [IDS[name]] * int(np.prod(sides))
        block = ENCODERS[name].block
        media[name] = (*media.get(name, ()), np.zeros((*(side * block for side in sides), 1), np.float32))
    weights = np.ones(len(tokens), np.float32)
    fields: Any = {"question": "which?", "answer": "", "prompt": 0, "media_tokens": IDS}
    return Sample(tokens=np.array(tokens, np.int32), loss_weights=weights, media=media, **fields)


def positions(of: Sample) -> np.ndarray:
    return sample_positions(of, meta_of(of, ENCODERS).grids, ENCODERS)


def test_a_text_around_an_image() -> None:
    positions_N3 = positions(sample(2, ("vision", 2, 3), 2))
    image = [(2, 2 + row, 2 + column) for row in range(2) for column in range(3)]
    assert (
        positions_N3.tolist() == [[0] * 3, [1] * 3, *map(list, image), [5] * 3, [6] * 3]
        and positions_N3.dtype == np.int32
    )


def test_recordings_and_drawings_are_as_text() -> None:
    assert positions(sample(1, ("audio", 3), ("painter", 1, 2), 1))[:, 0].tolist() == list(range(7))


def test_a_video_whose_times_are_positions() -> None:
    """Its temporal patches begin at the same number; text goes on behind the largest."""
    of = sample(1, ("vision", 1, 2), ("vision", 1, 2), ("vision", 1, 2), 1)
    timed = replace(of, video_times={"vision": ((0, 3), ())})
    assert positions(timed)[:, 0].tolist() == [0, 1, 1, 4, 4, 5, 5, 7]
    assert positions(timed)[:, 1].tolist() == [0, 1, 1, 1, 1, 5, 5, 7]
    assert positions(timed)[:, 2].tolist() == [0, 1, 2, 1, 2, 5, 6, 7]
    assert positions(of)[:, 0].tolist() == [0, 1, 1, 3, 3, 5, 5, 7]
    torn = replace(timed, tokens=np.array([1, *[IDS["vision"]] * 2, 1, *[IDS["vision"]] * 4], np.int32))
    with pytest.raises(ValueError, match=r"a video of 2 times 1x2 tokens has 4 places in a row; M-RoPE needs"):
        positions(torn)


PIECES = st.lists(
    st.integers(1, 5)
    | st.tuples(st.sampled_from(("vision", "second")), st.integers(1, 4), st.integers(1, 4))
    | st.tuples(st.just("audio"), st.integers(1, 4))
    | st.tuples(st.just("video"), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(PIECES)
def test_they_are_those_of_the_reference(pieces: list[Any]) -> None:
    """Also of adjacent images, and of images first and last. The next number follows from the last token alone."""
    flat: list[Any] = []
    grids, first, times_of = list[Grid](), 0, list[tuple[int, ...]]()
    for piece in pieces:
        if isinstance(piece, int) or piece[0] == "audio":
            flat.append(piece)
            first += piece if isinstance(piece, int) else piece[1]
            continue
        times: tuple[int, ...] = (0,)
        if piece[0] == "video":
            times, piece = (0, *sorted(piece[1])), ("vision", 2, 3)
        flat += [piece] * len(times)
        grids.append(Grid(first, piece[1], piece[2], times))
        first += len(times) * piece[1] * piece[2]
        times_of += [times if len(times) > 1 else ()] if piece[0] == "vision" else []
    of = replace(sample(*flat), video_times={"vision": tuple(times_of)} if times_of else {})
    positions_N3 = positions(of)
    np.testing.assert_array_equal(positions_N3, token_positions(len(of.tokens), grids))
    longer = positions(replace(sample(*flat, 1), video_times=of.video_times))
    assert (longer[-1] == positions_N3[-1].max() + 1).all() and (longer[-1] == positions_N3.max() + 1).all()


def test_an_images_tokens_have_to_stand_together() -> None:
    of = sample(1, ("vision", 1, 2), 1)
    of.tokens[1:] = [IDS["vision"], 1, IDS["vision"]]
    with pytest.raises(ValueError, match=r"'which\?': an image of 1x2 tokens has 2 places in a row; M-RoPE needs"):
        positions(of)


def test_packed_rows_begin_anew_with_every_sample() -> None:
    """A process that reads positions alone opens the texts, and no medium."""
    both = [sample(1, ("vision", 2, 2), 1), sample(3, ("second", 1, 3))]
    settings: Any = {"sequence_length": 12, "microbatches": 1, "cells": 1, "pad": 0, "text": ((1, 12),)}
    packer = Packer(encoders=ENCODERS, axes=3, **settings)
    plan = packer.plan_microbatch([meta_of(item, ENCODERS) for item in both], 2)
    rows = packer.fill(plan, dict(enumerate(both))).inputs["llm"]
    for (row, start), item in zip(plan.llm.places, both, strict=True):
        np.testing.assert_array_equal(rows["positions"][row, start : start + len(item.tokens)], positions(item))
    assert rows["positions"].shape == (1, 12, 3) and not rows["positions"][rows["segments"] == 0].any()
    process_rows = ProcessRows(cells={"llm": {"positions": (0,)}})
    assert plan.needed(process_rows) == {0: frozenset(), 1: frozenset()}
    plain = Packer(encoders=ENCODERS, **settings).plan_microbatch(plan.metas, 2)
    assert plain.needed(process_rows) == {}
