"""`bench schedules`: what it compares, that the comparison is fair, and all of it against real processes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks import schedules as bench
from mmjax.schedule.schedules import NESTING, SCHEDULES
from mmjax.schedule.simulate import simulate
from mmjax.schedule.validate import validate


def test_every_schedule_and_baseline_is_there():
    assert {way.schedule for way in bench.METHODS} == set(SCHEDULES) - set(NESTING)
    assert [way.name for way in bench.METHODS if way.baseline] == [
        "all encoders first", "encoders in the pipeline", "encoders colocated", "encoders replicated"]  # fmt: skip
    assert [workload.name for workload in bench.WORKLOADS] == ["balanced", "frozen encoders", "uneven encoders"]


@pytest.mark.long
def test_steps_are_simulated_on_the_same_ranks_and_none_beats_its_work():
    spans: dict[str, dict[str, float]] = {}
    for workload in bench.WORKLOADS:
        for way in bench.METHODS:
            schedule, costs = way.best(workload)
            validate(schedule)
            assert schedule.graph.ranks == tuple(range(bench.RANKS))
            timeline = simulate(schedule, costs)
            assert timeline.makespan > workload.least
            spans.setdefault(workload.name, {})[way.name] = timeline.makespan
    for found in spans.values():
        best = min(found[way.name] for way in bench.METHODS if not way.baseline)
        assert all(found[way.name] > best for way in bench.METHODS if way.baseline)
        assert found["three-phase, offload"] == pytest.approx(found["three-phase"]), "copies are hidden"
        assert found["zb-h1"] < found["1f1b"] and found["eager-1f1b"] < found["1f1b"]
        assert found["three-phase"] < found["three-phase, windows of 4"]
        assert max(found, key=found.__getitem__) == "encoders replicated"


@pytest.mark.long
def test_rows_table_and_picture(tmp_path):
    found = []
    for workload in bench.WORKLOADS:
        for way in bench.METHODS:
            timeline = simulate(*way.best(workload))
            found.append(bench.Result(workload=workload, method=way, simulated=timeline, measured=timeline))
    rows = list(bench.rows(found[0]))
    assert [row.case.partition(": ")[2] for row in rows] == [
        "step, simulated", "step, measured", "difference", "bubble, simulated", "bubble, measured",
        "in flight, encoders", "in flight, LLM"]  # fmt: skip
    assert rows[2].value == 0 and rows[2].ok and rows[0].value == pytest.approx(825, abs=1)
    assert found[0].in_flight == (5, 3) and found[0].ranks == "vision 2, audio 1, llm 3"
    lines = bench.markdown(found).splitlines()
    assert len(lines) == 2 + len(found) and all(a.count("|") == b.count("|") for a, b in pairwise(lines))
    bench.draw(found, tmp_path / "schedules.png")
    assert (tmp_path / "schedules.png").stat().st_size > 20_000


def test_a_way_is_measured_by_processes(monkeypatch):
    monkeypatch.setattr(bench, "WORKLOADS", bench.WORKLOADS[1:2])
    monkeypatch.setattr(bench, "METHODS", [way for way in bench.METHODS if way.name == "zb-h1"])
    rows = {row.case.partition(": ")[2]: row.value for row in bench.bench_schedules(1)}
    # A busy machine adds time and takes none off. One op after another would take four times the time.
    assert rows["step, simulated"] <= rows["step, measured"] < 1.8 * rows["step, simulated"]
    assert rows["difference"] == pytest.approx(100 * (rows["step, measured"] / rows["step, simulated"] - 1))
    busy = {how: rows[f"step, {how}"] * (100 - rows[f"bubble, {how}"]) for how in ("simulated", "measured")}
    assert busy["measured"] >= 0.999 * busy["simulated"]


@pytest.mark.slow
def test_every_step_is_within_the_target_of_its_simulation():
    rows = list(bench.bench_schedules(3))
    assert len(rows) == 7 * len(bench.WORKLOADS) * len(bench.METHODS)
    assert not [f"{row.case}: {row.value:.1f} {row.unit}" for row in rows if not row.ok]
