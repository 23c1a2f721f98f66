"""The workload and the rows of `bench reorder`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import reorder, uneven
from benchmarks.workloads import laion_like
from mmjax.data import buckets
from mmjax.data.reorder import METHODS


def test_the_workload_is_what_its_program_draws():
    assert json.loads(laion_like.PATH.read_text()) == laion_like.draw()
    patches = laion_like.read()
    logs = np.log(patches[patches < laion_like.MOST])
    assert patches.shape == (1920,) and patches.max() == laion_like.MOST
    assert np.median(patches) == pytest.approx(512, rel=0.1) and logs.std() == pytest.approx(1.0, abs=0.05)


def test_padding_is_what_a_microbatch_s_smaller_ranks_lack():
    sizes = np.array([4.0, 1.0, 3.0, 3.0])
    assert reorder.padding(sizes, (((0,), (2,)), ((1,), (3,)))) == pytest.approx(1 - 11 / 14)
    assert reorder.padding(sizes, (((0, 1), (2, 3)),)) == 0


def test_rows_hold_what_they_promise_but_for_times(monkeypatch):
    """At 120 ranks, without timing: the machine may be busy."""
    monkeypatch.setattr(reorder, "RANKS", (120,))
    monkeypatch.setattr(reorder, "_FEW", ((4, 6),))
    monkeypatch.setattr(reorder, "_NESTED", ((4, 16, 30, 1),))
    monkeypatch.setattr(reorder, "least", lambda run, rounds: 0.0)
    monkeypatch.setattr(reorder, "bench_uneven", lambda rounds: iter(()))
    rows = {row.case: row for row in reorder.bench_reorder(3)}
    assert all(row.ok for row in rows.values()), [row for row in rows.values() if not row.ok]
    for way in ("", ", ranks in step"):
        spans = [rows[f"dp 120: makespan over its bound, {method}{way}"].value for method in METHODS]
        assert spans[0] > spans[1] > spans[2] >= 1
    nested = {
        case.removeprefix("nested, 4 stages, dp 30, 4 a row, encoder of 1: "): row.value for case, row in rows.items()
    }
    assert nested["none / best, simulated"] > 1.1 and nested["best for 1F1B / best, simulated"] > 1.02
    assert nested["imbalance of units, best"] < nested["imbalance of units, none"]


@pytest.mark.long
def test_uneven_digits_are_measured_as_they_are_simulated(monkeypatch):
    """A smaller batch; the measured step has at least the seconds of its ops, and what a busy machine adds."""
    monkeypatch.setattr(uneven, "UNEVEN", (*uneven.UNEVEN, "Train.global_batch=32", "Train.microbatches=8"))
    monkeypatch.setattr(uneven, "STEPS", 1)
    monkeypatch.setattr(uneven, "SECONDS", 0.5)
    monkeypatch.setattr(buckets, "_STEPS", (4, 8))
    rows = {row.case.removeprefix("uneven digits: "): row.value for row in uneven.bench_uneven(1)}
    assert rows["step, simulated, none"] == pytest.approx(500)
    for method in METHODS:
        assert rows[f"step, measured, {method}"] > 0.99 * rows[f"step, simulated, {method}"]
        for positions in ("vision_patches", "llm_tokens"):
            assert 0 <= rows[f"{positions} that are padding, {method}"] < 100
    for how in ("simulated", "measured"):
        steps = {method: rows[f"step, {how}, {method}"] for method in METHODS}
        for method in METHODS[:-1]:
            assert rows[f"{method} / best, {how}"] == pytest.approx(steps[method] / steps["best"])
    assert rows["none / best, simulated"] > 1.05
