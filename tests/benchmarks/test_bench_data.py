"""The benchmark of data, with small images: what it prints, not how much."""

from __future__ import annotations

import pytest

from benchmarks import data


@pytest.mark.slow
def test_rows_of_all_ways_to_prepare_batches(monkeypatch):
    monkeypatch.setattr(data, "SHAPE", data.Shape(2, 256))
    monkeypatch.setattr(data, "GRID", (data.Shape(3, 256),))
    rows = {row.case: row for row in data.bench_data(rounds=2)}
    ways = ("in its process", "two workers", "server")
    assert all(rows[f"consumer waits: {way}"].unit == "ms/step" for way in ways)
    assert all(row.value > 0 for row in rows.values())
    assert rows["consumer waits: server"].ok  # it sleeps longer than a batch takes
    targets = {row.case: row.target for row in rows.values() if row.target}
    servers = {"consumer waits: server", "3 images of 256x256, server"}
    assert set(targets) == {*servers, "steps: two workers over one, idle trainer"}
    assert {case for case in rows if "3 images" in case and "process" in case} == {
        "3 images of 256x256, in its process"
    }
