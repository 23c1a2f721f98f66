"""Several samples in an LLM row: nothing is lost, cells are kept apart, rows are even in compute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from data_samples import TOKENIZER, numbered_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.configurable import ConfigError
from mmjax.data.buckets import text_buckets
from mmjax.data.first_fit import first_fit_decreasing, spread
from mmjax.data.packing import Packer
from mmjax.data.types import EncoderSpec, WorstCase

SPEC = EncoderSpec(patch=2, buckets=((27, 12),))
LENGTH = 64
TEXT = ((1, 32), (2, 48), (3, 64), (9, 64))


def packer(**changes) -> Packer:
    plain = Packer(encoders={"vision": SPEC}, sequence_length=LENGTH, microbatches=1, cells=1, pad=TOKENIZER.pad)
    return replace(plain, **{"text": TEXT, **changes})


sizes = st.lists(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=2), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes=sizes, cells=st.integers(1, 3), pairs=st.sampled_from([0.0, 0.05]))
def test_every_sample_is_a_segment_with_all_that_it_has_in_a_row_of_its_own(sizes, cells, pairs):
    samples, costs = numbered_samples(SPEC, sizes), {"llm": pairs, "vision": pairs}
    apart = packer(cells=cells, text=()).microbatch(samples, len(samples))
    packed = packer(cells=cells, pairs=costs)
    plan = packed.plan_microbatch([packed._meta(sample) for sample in samples], len(samples))
    rows = packed.fill(plan, dict(enumerate(samples)))
    rows_per_cell, width = TEXT[rows.bucket["llm"]]
    arrays = rows.inputs["llm"]
    assert {array.shape for array in arrays.values()} == {(rows_per_cell * cells, width)}
    places, patches = set(), [rows.inputs["vision"]["patches"].reshape(cells, -1, 4), apart.inputs["vision"]["patches"]]
    patches[1] = patches[1].reshape(cells, -1, 4)
    for index, sample in enumerate(samples):
        (row, start), n = plan.llm.places[index], len(sample.tokens)
        cell = next(cell for cell in range(cells) if index in plan.cell(cell))
        assert row // rows_per_cell == cell, "a sample has left its cell"
        span = slice(start, start + n)
        for name in ("tokens", "targets", "weights", "positions"):
            assert np.array_equal(arrays[name][row, span], apart.inputs["llm"][name][index, :n]), name
        segment = set(arrays["segments"][row, span].tolist())
        assert len(segment) == 1 and 0 not in segment and (row, *segment) not in places
        places.add((row, *segment))
        at = [arrays["vision_index"][row, span], apart.inputs["llm"]["vision_index"][index, :n]]
        assert np.array_equal(at[0] >= 0, at[1] >= 0)
        images = [where[cell][places_of[places_of >= 0]] for where, places_of in zip(patches, at, strict=True)]
        assert np.array_equal(*images)
    assert (arrays["segments"] > 0).sum() == sum(len(sample.tokens) for sample in samples)
    for name in ("weights", "positions"):
        assert not arrays[name][arrays["segments"] == 0].any()
    assert arrays["weights"].sum() == apart.inputs["llm"]["weights"].sum()


def test_rows_are_as_few_as_first_fit_needs_and_even_in_compute():
    """First fit by tokens puts 8 and 2 into one row. Even in compute, 8 has a row alone and the others share one."""
    assert first_fit_decreasing([8, 2, 4, 4], 10) == [(0, 0), (0, 8), (1, 0), (1, 4)]
    assert spread([8, 2, 4, 4], 2, 10, 1.0) == [(0, 0), (1, 8), (1, 0), (1, 4)]
    # Of 6, 4, 4, 3, 3 the fours would share a row, and the last three found none.
    tight = [6, 5, 5, 4]
    assert spread(tight, 2, 10, 1.0) == [(0, 0), (1, 0), (1, 5), (0, 6)] == first_fit_decreasing(tight, 10)
    assert spread([6, 4, 4, 3, 3], 2, 10, 0.5) == first_fit_decreasing([6, 4, 4, 3, 3], 10)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_balanced_rows_hold_all_and_no_two_overlap(sizes):
    rows = 1 + max(row for row, _ in first_fit_decreasing(sizes, 30))
    places = spread(sizes, rows, 30, 0.1)
    taken = np.zeros((rows, 30), int)
    for size, (row, start) in zip(sizes, places, strict=True):
        taken[row, start : start + size] += 1
        assert start + size <= 30
    assert taken.max() == 1 and taken.sum() == sum(sizes)


def test_prompts_have_rows_of_their_own_in_the_widest_shape():
    samples = numbered_samples(SPEC, [[], [(1, 1)], []])
    apart = packer(cells=2, text=((1, 32), (4, 64), (4, 48)))
    rows = apart.microbatch(samples, 3, apart=True)
    assert rows.bucket["llm"] == apart.widest == 1
    llm = rows.inputs["llm"]
    assert llm["segments"].max(axis=1).tolist() == [1, 1, 0, 0, 1, 0, 0, 0]
    assert llm["segments"].shape == (8, 64)


def test_a_shape_for_the_largest_cell_is_added():
    worst = WorstCase(tokens=30, media={}, patches={})
    check = {"samples_per_cell": 4, "sequence_length": 64}
    assert text_buckets((), worst, **check) == ()
    assert text_buckets(((2, 64), (1, 64)), worst, **check) == ((1, 64), (2, 64))
    assert text_buckets(((1, 64),), worst, **check) == ((1, 64), (2, 64))
    assert text_buckets(((9, 16),), worst, **check) == ((2, 64), (9, 16))
    with pytest.raises(ConfigError, match=r"rows of 65 tokens are longer than Data.sequence_length=64; use 64"):
        text_buckets(((2, 65),), worst, **check)
    with pytest.raises(ConfigError, match="add a larger"):
        packer(text=((1, 32),)).microbatch(numbered_samples(SPEC, [[(3, 4)], [(3, 4)]]), 2)
