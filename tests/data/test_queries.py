"""Rows of generators whose condition has places of its own: small values, computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.assembly.packers import bucket_shapes
from mmjax.configurable import ConfigError
from mmjax.data.buckets import Cells, choose, fill_buckets
from mmjax.data.packing import Packer
from mmjax.data.patches import patchify, unpatchify
from mmjax.data.possible_runs import possible_runs
from mmjax.data.sample import meta_of
from mmjax.data.types import EncoderSpec, Sample, SampleMeta, WorstCase

PAINTER = 90
QUERIES = 2
CANVASES = ((2, 2), (2, 4), (4, 4))
SPEC = EncoderSpec(patch=1, special=QUERIES, queries=QUERIES, drawn=True, bounded_by="UNet.canvases", channels=1)
ON_CANVAS = replace(SPEC, canvases=CANVASES)


def sample(*sizes: tuple[int, int], first: int = 1) -> Sample:
    """A sample with a token of text before each picture; pictures' pixels are numbered from ``first``, noise is 0."""
    pictures, tokens = list[np.ndarray](), list[int]()
    for rows, columns in sizes:
        pictures.append(np.arange(first, first + rows * columns, dtype=np.float32).reshape(rows, columns, 1))
        first, tokens = first + rows * columns, [*tokens, 5, *[PAINTER] * QUERIES]
    arrays: Any = {"painter": tuple(pictures)} if pictures else {}
    return Sample(
        tokens=np.array([*tokens, 6], np.int32),
        loss_weights=np.ones(len(tokens) + 1, np.float32),
        media=arrays,
        question="?",
        answer="",
        prompt=1,
        media_tokens={"painter": PAINTER},
        noise={name: tuple(map(np.zeros_like, pictures)) for name in arrays},
        times={name: (0.25,) * len(pictures) for name in arrays},
    )


def packer_of(spec: EncoderSpec, cells: int) -> Packer:
    return Packer(encoders={"painter": spec}, sequence_length=40, microbatches=1, cells=cells, pad=0)


def test_a_row_is_the_places_of_a_condition_and_one_picture() -> None:
    """Two pictures of 2 x 2 and 1 x 3 patches do not share a row, though it has room for both."""
    packer = packer_of(replace(SPEC, buckets=((3, QUERIES + 8),)), 1)
    painter = packer.microbatch([sample((2, 2), (1, 3))], 1).inputs["painter"]
    assert painter["segments"].tolist() == [[1] * 6 + [0] * 4, [1] * 5 + [0] * 5, [0] * 10]
    assert painter["index"].tolist() == [[1, 2], [4, 5], [-1, -1]]
    assert painter["patches"][:, :, 0].tolist()[0] == [0.75, 1.5, 2.25, 3, 0, 0, 0, 0]
    assert painter["targets"].shape == (3, 8, 1) and painter["times"].shape == painter["weights"].shape == (3, 8)
    assert painter["weights"].sum(axis=1).tolist() == [4, 3, 0]
    assert painter["positions"][1, :5].tolist() == [[-1, -1], [-2, -2], [0, 0], [0, 1], [0, 2]]


def test_pictures_that_one_is_made_from_follow_it() -> None:
    """Without noise, targets and weights; padding is that of the row, and the picture alone comes back."""
    spec = replace(SPEC, references=2, buckets=((3, QUERIES + 12),))
    packer, made = packer_of(spec, 1), sample((2, 2), (1, 3))
    seen = [np.full((*size, 1), value, np.float32) for size, value in (((1, 2), 7), ((2, 3), 8))]
    made = replace(made, references={"painter": (tuple(seen), ())})
    painter = packer.microbatch([made], 1).inputs["painter"]
    assert painter["segments"].tolist() == [[1] * 14, [1] * 5 + [0] * 9, [0] * 14]
    assert painter["patches"][:2, :, 0].tolist() == [[0.75, 1.5, 2.25, 3, 7, 7] + [8] * 6, [3.75, 4.5, 5.25] + [0] * 9]
    for name in ("weights", "times"):
        assert (painter[name][0] > 0).tolist() == [True] * 4 + [False] * 8
    assert not painter["targets"][0, 4:].any()
    behind = [[1, 0, 0], [1, 0, 1], *([2, row, column] for row in range(2) for column in range(3))]
    assert painter["positions"][0].tolist() == [[-1] * 3, [-2] * 3, [0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], *behind]
    meta = meta_of(made, {"painter": spec})
    assert meta.segments("painter") == (14, 5) and packer.plan(0, [meta]).denominators["painter"] == 7
    back = packer.media("painter", packer.plan(0, [meta]).microbatches[0], -painter["targets"])
    np.testing.assert_array_equal(back[0][0], made.media["painter"][0])


def test_shapes_of_buckets_are_those_of_rows() -> None:
    """Arrays of patches are narrower than rows by the places of the condition, in every bucket."""
    packer = packer_of(replace(SPEC, buckets=((3, QUERIES + 40), (2, QUERIES + 49))), 2)
    for signature, shapes in bucket_shapes(packer, 4).items():
        filled = packer.fill(packer.plan_microbatch([], 4, dict(signature)), {})
        wanted = {key: {name: array.shape for name, array in of.items()} for key, of in filled.inputs.items()}
        assert {key: {name: array.shape for name, array in of.items()} for key, of in shapes.items()} == wanted


def test_a_picture_lies_in_the_corner_of_its_canvas() -> None:
    """A picture of 1 x 3 patches takes the canvas of 2 x 4 beside one of 2 x 2, which then lies on it too."""
    packer = packer_of(replace(ON_CANVAS, buckets=((2, 6), (2, 10), (2, 18))), 1)
    samples = [sample((2, 2)), sample((1, 3))]
    microbatch = packer.microbatch(samples, 2)
    painter = microbatch.inputs["painter"]
    assert microbatch.bucket == {"painter": 1}
    assert painter["segments"].tolist() == [[1, 1] + [1, 1, 0, 0] * 2, [1, 1] + [1, 1, 1, 0] + [0] * 4]
    assert painter["targets"][:, :, 0].tolist() == [[-1, -2, 0, 0, -3, -4, 0, 0], [-1, -2, -3, 0, 0, 0, 0, 0]]
    assert painter["positions"][0, 2:8].tolist() == [[0, 0], [0, 1], [0, 0], [0, 0], [1, 0], [1, 1]]
    plan = packer.plan_microbatch([SampleMeta.of({"painter": ON_CANVAS}, {"painter": [(2, 2)]}, tokens=4, weight=1)], 2)
    back = packer.media("painter", replace(plan, encoders=plan.encoders), np.zeros((2, 4, 1)) + np.arange(4)[:, None])
    assert back[0][0][:, :, 0].tolist() == [[0, 1], [2, 3]]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=3), min_size=1, max_size=5),
    cells=st.integers(1, 2),
    on_canvas=st.booleans(),
)
def test_every_picture_comes_back(sizes: list[list[tuple[int, int]]], cells: int, on_canvas: bool) -> None:
    widths = [QUERIES + rows * columns for rows, columns in CANVASES] if on_canvas else [QUERIES + 16]
    spec = replace(ON_CANVAS if on_canvas else SPEC, buckets=tuple((15, width) for width in widths))
    packer, samples = packer_of(spec, cells), [sample(*of_sample) for of_sample in sizes]
    microbatch = packer.microbatch(samples, len(samples))
    plan = packer.plan_microbatch([SampleMeta.of({"painter": spec}, _sizes(s), tokens=1, weight=1) for s in samples], 0)
    painter = microbatch.inputs["painter"]
    pictures = packer.media("painter", plan, -painter["targets"])
    for number, of_sample in enumerate(samples):
        for made, picture in zip(pictures.get(number, ()), of_sample.media.get("painter", ()), strict=True):
            np.testing.assert_array_equal(made, picture)
    assert (
        (painter["segments"][:, QUERIES:] > 0).sum() == painter["weights"].sum() == sum(p.size for p in _all(samples))
    )
    _assert_conditions(microbatch.inputs, samples, cells)


def _sizes(of_sample: Sample) -> dict[str, list[tuple[int, int]]]:
    return {name: [p.shape[:2] for p in pictures] for name, pictures in of_sample.media.items()}


def _all(samples: list[Sample]) -> list[np.ndarray]:
    return [picture for s in samples for picture in s.media.get("painter", ())]


def _assert_conditions(inputs: Any, samples: list[Sample], cells: int) -> None:
    """Each place of a condition points at a placeholder of its own, and all placeholders are pointed at."""
    tokens = inputs["llm"]["tokens"].reshape(cells, -1)
    index = inputs["painter"]["index"].reshape(cells, -1)
    for in_cell, pointers in zip(tokens, index, strict=True):
        used = pointers[pointers >= 0]
        assert sorted(used) == np.flatnonzero(in_cell == PAINTER).tolist()
    rows = inputs["painter"]["segments"][:, 0] > 0
    assert ((inputs["painter"]["index"] >= 0).all(axis=1) == rows).all()
    assert rows.sum() == len(_all(samples))


def test_derived_buckets_have_a_row_for_each_picture() -> None:
    worst = WorstCase(tokens=9, media={"painter": 3}, patches={"painter": 8}, sides={"painter": 4})
    for spec, width in ((SPEC, 10), (ON_CANVAS, 18)):
        filled = fill_buckets({"painter": spec}, worst, rows_per_cell=2, sequence_length=9)
        assert filled["painter"].buckets == ((6, width),)
        packer = packer_of(filled["painter"], 1).split_over({})
        assert packer.encoders["painter"].buckets == ((6, width),)
    cells = Cells(sizes=[[[6, 6, 10]], [[6]], [[6]]], largest=18, most=3, alone=True)
    assert choose(cells, 2).buckets == ((1, 6), (3, 18)) and choose(cells, 3).buckets == ((1, 6), (3, 10), (3, 18))


def test_rows_on_a_canvas_have_gaps() -> None:
    worst = WorstCase(tokens=9, media={"painter": 1}, patches={"painter": 16}, least={"painter": 3})
    packer = replace(packer_of(replace(ON_CANVAS, buckets=((1, 18),)), 1), worst=worst)
    assert possible_runs(packer, "painter", (1, 18), samples=1, causal=False) == (0,)


def test_refused_in_one_line() -> None:
    worst = WorstCase(tokens=9, media={"painter": 1}, patches={"painter": 8})
    with pytest.raises(ConfigError, match=r"painter/Packing.buckets: rows of 11 positions hold .* \[6, 10, 18\]"):
        fill_buckets({"painter": replace(ON_CANVAS, buckets=((2, 11),))}, worst, rows_per_cell=1, sequence_length=9)
    with pytest.raises(ConfigError, match=r"UNet.canvases=.*: hold no picture of 5 x 1 pixels"):
        SampleMeta.of({"painter": ON_CANVAS}, {"painter": [(5, 1)]}, tokens=4, weight=1.0)


def test_sides_that_are_multiples_of_several_blocks_are_cut_into_single_ones() -> None:
    spec, picture = replace(SPEC, multiple=2), np.arange(8, dtype=np.float32).reshape(4, 2, 1)
    patches_NE, places_NA = patchify(picture, spec)
    assert patches_NE.ravel().tolist() == list(range(8)) and places_NA[-1].tolist() == [3, 1]
    assert np.array_equal(unpatchify(patches_NE, (4, 2), spec), picture)
    with pytest.raises(ValueError, match="multiple = 2"):
        patchify(picture[:3], spec)
