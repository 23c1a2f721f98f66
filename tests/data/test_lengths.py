"""Figures of lengths by hand."""

from __future__ import annotations

from mmjax.data.lengths import figures_of


def test_figures_of_lengths() -> None:
    assert figures_of([5, 1, 3, 2, 4]) == {"count": 5, "mean": 3, "median": 3, "p90": 5, "p99": 5, "most": 5}
    hundred = figures_of(range(100, 0, -1))
    assert hundred == {"count": 100, "mean": 50.5, "median": 50, "p90": 90, "p99": 99, "most": 100}
    assert set(figures_of([]).values()) == {0}
