"""The cases of `bench simulate`: what they cover, and all of them against real processes."""

from __future__ import annotations

import pytest

from benchmarks import simulate as bench
from benchmarks.replay import blocks_of
from mmjax.schedule.simulate import simulate
from mmjax.schedule.validate import validate


def test_at_least_ten_cases_cover_schedules_kinds_of_edges_and_placements():
    cases = bench.cases()
    assert len({case.name for case in cases}) == len(cases) >= 10
    for case in cases:
        validate(case.schedule)
        assert simulate(case.schedule, case.costs).makespan > 0.2
    graphs = [case.schedule.graph for case in cases]
    assert {case.schedule.name for case in cases} == {"1f1b", "gpipe"}
    assert {edge.kind for graph in graphs for edge in graph.edges} == {"local", "async", "rendezvous"}
    assert {case.schedule.microbatches for case in cases} > {1}
    assert any(len(blocks_of(graph)) < len(graph.stages) for graph in graphs), "stages that share ranks"
    assert any(not stage.backward for graph in graphs for stage in graph.stages)
    assert any(graph.ties for graph in graphs)
    assert any(case.costs.overrides for case in cases)


def test_wrong_simulators_predict_something_else():
    """The predictions lie so far apart that a measurement within the target cannot agree with both."""
    for case, wrong in bench.wrong_cases():
        right = simulate(case.schedule, case.costs).makespan
        assert bench.error(right, simulate(wrong, case.costs).makespan) > 2 * bench.MOST_ERROR


def test_a_wrong_simulator_is_found_out_by_the_processes():
    """A rendezvous taken for an asynchronous move."""
    case, wrong = next(bench.wrong_cases())
    predicted = simulate(case.schedule, case.costs).makespan
    measured = bench.measure(case, predicted, 1)
    assert bench.error(measured, simulate(wrong, case.costs).makespan) > bench.MOST_ERROR


def test_the_shortest_step_counts_and_one_that_is_close_ends_the_case(monkeypatch):
    class Step:
        def __init__(self, makespan: float):
            self.makespan = makespan

    taken = []

    def steps(*_):
        for seconds in (1.2, 1.3, 1.04, 1.0):
            taken.append(seconds)
            yield Step(seconds)

    monkeypatch.setattr(bench, "replay", steps)
    assert bench.measure(bench.cases()[0], 1.0, 3) == 1.04
    assert taken == [1.2, 1.3, 1.04]


@pytest.mark.slow
def test_every_simulation_is_within_the_target_of_real_processes():
    rows = list(bench.bench_simulate(bench.MOST_REPEATS))
    assert len(rows) >= 12
    assert not [f"{row.case}: {row.value:.1f} {row.unit}" for row in rows if not row.ok]
