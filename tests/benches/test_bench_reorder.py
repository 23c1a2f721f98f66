"""The workload and the rows of `bench reorder`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mmjax.benches import reorder
from mmjax.benches.workloads import laion_like
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
    monkeypatch.setattr(reorder, "least", lambda run, rounds: 0.0)
    rows = {row.case: row for row in reorder.bench_reorder(3)}
    assert all(row.ok for row in rows.values()), [row for row in rows.values() if not row.ok]
    for way in ("", ", ranks in step"):
        spans = [rows[f"dp 120: makespan over its bound, {method}{way}"].value for method in METHODS]
        assert spans[0] > spans[1] > spans[2] >= 1
