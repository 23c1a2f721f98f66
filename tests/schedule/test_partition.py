"""Layers to stages: as good as every other cut, and aware of what is frozen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.schedule.partition import backward_factor, cut

SECONDS = st.integers(0, 9).map(float) | st.floats(0.0, 10.0)


def every_cut(layers: int, pieces: int) -> Iterator[list[range]]:
    for inner in itertools.combinations(range(1, layers), pieces - 1):
        yield [range(a, b) for a, b in itertools.pairwise([0, *inner, layers])]


def longest_stage(seconds: Sequence[float], stages: Sequence[range]) -> float:
    return max(math.fsum(seconds[layer] for layer in stage) for stage in stages)


def squares(seconds: Sequence[float], stages: Sequence[range]) -> float:
    return math.fsum(math.fsum(seconds[layer] for layer in stage) ** 2 for stage in stages)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), seconds=st.lists(SECONDS, min_size=1, max_size=9))
def test_no_other_cut_has_a_shorter_longest_stage(data: st.DataObject, seconds: list[float]) -> None:
    chunks = data.draw(st.integers(1, min(3, len(seconds))))
    stages = data.draw(st.integers(1, len(seconds) // chunks))
    found = cut(seconds, stages, chunks=chunks)
    assert len(found) == stages * chunks and [layer for stage in found for layer in stage] == list(range(len(seconds)))
    others = list(every_cut(len(seconds), stages * chunks))
    best = min(longest_stage(seconds, other) for other in others)
    assert longest_stage(seconds, found) == pytest.approx(best, rel=1e-9)
    tied = [other for other in others if longest_stage(seconds, other) <= best * (1 + 1e-13)]
    assert squares(seconds, found) <= min(squares(seconds, other) for other in tied) * (1 + 1e-9) + 1e-12


def test_backward_by_what_is_trained_and_where() -> None:
    factors = {
        (trained, before, recompute): backward_factor(trained=trained, trained_before=before, recompute=recompute)
        for trained, before, recompute in itertools.product((False, True), repeat=3)
    }
    assert factors == {
        (False, False, False): 0, (False, False, True): 0,
        (False, True, False): 1, (False, True, True): 2,
        (True, False, False): 2, (True, False, True): 3,
        (True, True, False): 2, (True, True, True): 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "stages", "chunks", "message"),
    [
        ([1.0, 1.0], 3, 1, "2 layers in 3 · 1 stages: a stage needs a layer"),
        ([1.0] * 5, 3, 2, "5 layers in 3 · 2 stages"),
        ([], 1, 1, "0 layers"),
        ([1.0], 0, 1, "1 layers in 0"),
        ([1.0, -1.0], 1, 1, "a layer takes 0 seconds or more"),
        ([float("nan")], 1, 1, "a layer takes 0 seconds or more"),
    ],
)
def test_what_cannot_be_cut(seconds: list[float], stages: int, chunks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut(seconds, stages, chunks=chunks)


def test_a_deep_model_is_cut_at_once() -> None:
    seconds = [1.0 + (layer % 7) / 10 for layer in range(128)]
    found = cut(seconds, 16, chunks=2)
    assert longest_stage(seconds, found) < 1.15 * sum(seconds) / 32
