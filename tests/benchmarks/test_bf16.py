"""The comparison of bf16 layouts: from curves to rows and picture, and a few real steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.bf16 import (
    EXACT,
    LARGEST,
    MEAN,
    RUNS,
    SMALLER,
    WINDOW,
    between_layouts,
    draw,
    from_exact,
    rows,
    smoothed,
    train,
)
from mmjax.config import load_config
from mmjax.config.shipped import CONFIGS

HOMOGENEOUS, COLOCATED, APART, _ = RUNS
STEPS = 60


def curves(homogeneous: float | np.ndarray, colocated: float, apart: float = 0.0) -> dict[str, np.ndarray]:
    """An fp32 loss that falls from 6 to 1 nats, and the other cases so many nats above it."""
    exact = np.concatenate([np.linspace(6.0, 1.0, STEPS - WINDOW), np.ones(WINDOW)])
    added = {HOMOGENEOUS: homogeneous, COLOCATED: colocated, APART: apart}
    return {case: exact + nats for case, nats in added.items()} | {EXACT: exact}


def values(found: dict[str, np.ndarray]) -> dict[str, float]:
    return {row.case: row.value for row in rows(found)}


def test_differences_are_parts_of_what_the_loss_has_fallen_by() -> None:
    found = curves(0.2, -0.1)
    assert {case: float(d[0]) for case, d in from_exact(found).items()} == pytest.approx(
        {HOMOGENEOUS: 0.2, COLOCATED: -0.1, APART: 0.0}
    )
    assert between_layouts(found) == pytest.approx(np.repeat([[0.3], [0.2], [0.1]], STEPS - WINDOW + 1, axis=1))
    named = values(found)
    assert named["largest difference between two layouts"] == pytest.approx(0.3 / 5)
    assert named["mean difference between two layouts"] == pytest.approx(0.2 / 5)
    assert named[f"{COLOCATED}: mean difference from fp32"] == pytest.approx(0.1 / 5)
    assert named["between layouts / between bf16 and fp32"] == pytest.approx(0.2 / 0.1)
    assert (named[f"{EXACT}: first loss"], named[f"{EXACT}: final loss"]) == pytest.approx((6.0, 1.0))
    assert named[f"{HOMOGENEOUS}: final loss"] == pytest.approx(1.2)


def test_the_mean_is_over_a_window() -> None:
    peak = np.zeros(30)
    peak[12] = 9.0
    wide = smoothed(peak)
    assert len(wide) == 30 - WINDOW + 1 and wide.max() == pytest.approx(9.0 / WINDOW)
    assert np.flatnonzero(wide > 1e-9).tolist() == list(range(12 - WINDOW + 1, 13))
    assert smoothed(np.asarray([1.0, 3.0])).tolist() == [2.0]


def test_curves_that_part_miss_the_targets() -> None:
    near = 0.9 * MEAN * 5
    assert all(row.ok for row in rows(curves(near, near / 2, near)))

    def missed(homogeneous: float | np.ndarray, colocated: float, apart: float) -> set[str]:
        return {row.case for row in rows(curves(homogeneous, colocated, apart)) if not row.ok}

    late = near + np.where(np.arange(STEPS) > STEPS - 12, 1.1 * LARGEST * 5, 0.0)
    assert "largest difference between two layouts" in missed(late, near, near)
    assert "mean difference between two layouts" not in missed(late, near, near)
    together = 1.1 * MEAN * 5  # all layouts agree with each other, and not with fp32
    assert missed(together, together, together) == {
        f"{case}: mean difference from fp32" for case in (HOMOGENEOUS, COLOCATED, APART)
    }
    assert missed(near, -near, near) == {"mean difference between two layouts"}
    assert missed(near / 10, -near / 10, near / 1000) == {"between layouts / between bf16 and fp32"}
    assert not next(rows(curves(np.nan, near))).ok


def test_the_picture_shows_every_curve(tmp_path: Path) -> None:
    path = tmp_path / "bf16.png"
    found = curves(0.2, -0.1)
    figure = draw(found, path)
    assert isinstance(figure, Figure)
    upper, lower = figure.axes
    shown = {str(line.get_label()): np.asarray(line.get_ydata()) for line in upper.lines}
    assert set(shown) == set(RUNS)
    for case, losses in shown.items():
        np.testing.assert_array_equal(losses, found[case])
    middles = np.asarray(lower.lines[0].get_xdata())
    assert (middles[0], middles[-1]) == (1 + WINDOW // 2, STEPS - WINDOW // 2)
    assert np.asarray(lower.lines[0].get_ydata()) == pytest.approx(np.full(STEPS - WINDOW + 1, 0.2))
    with Image.open(path) as picture:
        assert min(picture.size) > 600
    with pytest.raises(ValueError, match="at least 9"):
        draw({case: losses[:5] for case, losses in found.items()})


def test_every_case_trains_on_the_same_batches() -> None:
    cases = [(CONFIGS / name, [*SMALLER, f"Train.dtype='{dtype}'"]) for name, dtype in RUNS.values()]
    configs = [load_config([path], bindings) for path, bindings in cases]
    assert [config.train.dtype for config in configs] == ["bfloat16"] * 3 + ["float32"]
    assert all(config.train.clip_norm == 1.0 for config in configs)
    same = {replace(config.train, dtype="float32") for config in configs}
    assert len(same) == 1 and all(config.data == configs[0].data for config in configs)
    assert len({tuple(config.model.layouts.items()) for config in configs}) == 4


@pytest.mark.slow
def test_a_few_real_steps() -> None:
    found = train(steps=21)
    assert {case: len(losses) for case, losses in found.items()} == dict.fromkeys(RUNS, 21)
    assert all(row.ok for row in rows(found))
    assert found[EXACT][-1] < 0.6 * found[EXACT][0]
    differing = {case: np.abs(losses - found[EXACT]).max() for case, losses in found.items() if case != EXACT}
    assert all(difference > 1e-5 for difference in differing.values()), "no bf16 was computed in"
