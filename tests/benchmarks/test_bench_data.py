"""The benchmark of data, with small images: what it prints, not how much."""

from __future__ import annotations

import pytest

from benchmarks import data


@pytest.mark.slow
def test_rows_of_all_ways_to_prepare_batches(monkeypatch):
    monkeypatch.setattr(data, "IMAGES", 2)
    monkeypatch.setattr(data, "EDGE", 256)
    rows = {row.case: row for row in data.bench_data(rounds=2)}
    ways = ("in its process", "two workers", "server")
    assert all(rows[f"consumer waits: {way}"].unit == "ms/step" for way in ways)
    assert all(row.value > 0 for row in rows.values())
    assert rows["consumer waits: server"].ok  # it sleeps longer than a batch takes
    targets = {row.case: row.target for row in rows.values() if row.target}
    assert set(targets) == {"consumer waits: server", "steps: two workers over one, idle trainer"}
