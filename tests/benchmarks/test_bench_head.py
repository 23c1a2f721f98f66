"""The benchmark of the head: what it says of a small one."""

from __future__ import annotations

import pytest

from benchmarks import head as bench


@pytest.mark.long
def test_by_chunks_temporaries_stop_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WIDTH", 8)
    monkeypatch.setattr(bench, "VOCABULARY", 16_384)
    monkeypatch.setattr(bench, "TOKENS", (1_024, 4_096, 16_384))
    monkeypatch.setattr(bench, "TIMED", (64, 8, 64))
    rows = {row.case: row for row in bench.bench_head(1)}
    small, large = (rows[f"{tokens} tokens, whole: temporaries, compiled"].value for tokens in (1_024, 16_384))
    assert large > 15 * small > 15 * 1_024 * 16_384 * 4 / bench.MIB
    assert rows["1024 tokens, by chunks: temporaries, compiled"].value == small, "one chunk"
    assert all(row.ok for case, row in rows.items() if not case.startswith("time"))
    assert rows["time, by chunks / whole"].value > 0
