"""Schedules replayed by real processes: their waits, and agreement with simulations."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stage_graphs import chain, connect, costs_of, frozen_encoder, offloaded, stage, stage_graphs

from benchmarks import replay as replays
from benchmarks.replay import ReplayError, blocks_of, replay
from mmjax.schedule.ops import Op, Schedule, step_ops
from mmjax.schedule.schedules import SCHEDULES, gpipe, make_schedule, one_f_one_b
from mmjax.schedule.simulate import Costs, Timeline, simulate
from mmjax.schedule.validate import ScheduleError

MS = 1e-3
SKEW = 5 * MS
"""By how much the blocks of one op may disagree about when it ran."""

STEPS = 8
"""In how many steps a machine has to be quiet once."""


def require_no_less(measured: Timeline, costs: Costs) -> None:
    """A machine only adds time to the model, however busy it is."""
    assert measured.makespan >= simulate(measured.schedule, costs).makespan
    for op, (start, end) in measured.spans.items():
        assert end - start >= costs.of(op) - 1e-9


def require_as_simulated(measured: Timeline, costs: Costs) -> None:
    """Ops take their costs, in order; a simulation with the measured times is right."""
    slept = [(end - start) / costs.of(op) for op, (start, end) in measured.spans.items() if costs.of(op) > 10 * MS]
    assert min(slept, default=1.0) < 1.1, "an op takes what it costs"
    for op, (start, _) in measured.spans.items():
        for before in measured.schedule.dependencies(op):
            assert start >= measured.span(before)[1] - SKEW, f"{op} before {before} had ended"
    assert measured.makespan == pytest.approx(
        simulate(measured.schedule, replays.costs_of(measured)).makespan, rel=0.05, abs=10 * MS
    )
    for rank in measured.schedule.graph.ranks:
        spans = [(start, end) for _, start, end in measured.for_rank(rank)]
        assert spans == sorted(spans)
        assert all(a[1] <= b[0] + SKEW for a, b in pairwise(spans)), "ranks run one op at a time"


def require_of_a_step(schedule: Schedule, costs: Costs, claim: Callable[[Timeline], object] = lambda _: None) -> None:
    """Asserts ``claim`` of one step of several: a busy machine wakes processes late, seldom in every step."""
    late: AssertionError | None = None
    for measured in replay(schedule, costs, STEPS):
        require_no_less(measured, costs)
        try:
            require_as_simulated(measured, costs)
            claim(measured)
        except AssertionError as error:
            late = error
        else:
            return
    assert late
    raise late


def scaled(costs: Costs, factor: float) -> Costs:
    return Costs(seconds={key: factor * seconds for key, seconds in costs.seconds.items()})


def test_nothing_here_imports_jax():
    code = "import benchmarks.replay, benchmarks.simulate, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ranks_that_the_same_stages_use_are_one_block():
    assert blocks_of(chain(3)) == ((0,), (1,), (2,))
    stages = [stage("vision.0", range(6)), stage("llm.0", (0, 1)), stage("llm.1", (2, 3))]
    graph = connect(stages, [("vision.0", "llm.0"), ("llm.0", "llm.1")], "async")
    assert blocks_of(graph) == ((0, 1), (2, 3), (4, 5))
    assert blocks_of(frozen_encoder(1)) == ((0,), (8, 9))


@pytest.mark.parametrize("kind", ["async", "rendezvous"])
def test_a_pipeline_takes_the_time_that_was_simulated(kind):
    costs = scaled(Costs.nominal(chain(2, kind), move=0.8, once=0.5), 15 * MS)
    schedule = one_f_one_b(chain(2, kind), 3, costs)
    require_of_a_step(schedule, costs)


def test_an_encoder_on_several_stages_runs_in_all_of_them_together():
    stages = [stage("vision.0", range(4)), stage("llm.0", (0, 1)), stage("llm.1", (2, 3))]
    graph = connect(stages, [("vision.0", "llm.0"), ("llm.0", "llm.1")], "async")
    costs = scaled(Costs.nominal(graph, move=0.3), 15 * MS)
    require_of_a_step(gpipe(graph, 2, costs), costs)


def test_an_async_move_takes_its_time_and_nobodys():
    """The receiver waits for the move; meanwhile the sender runs its next op."""
    graph = chain(2).forward_only()
    costs = scaled(Costs.nominal(graph, move=4.0), 15 * MS)
    schedule = Schedule(graph=graph, microbatches=2, ops=tuple(step_ops(graph, 2)), name="mine")

    def claim(measured: Timeline) -> None:
        assert measured.span(Op("F", "llm.0", 1))[0] < measured.span(Op("F", "llm.1", 0))[0] - 40 * MS

    require_of_a_step(schedule, costs, claim)


@pytest.mark.parametrize("kind", ["async", "rendezvous"])
def test_a_delayed_receiver_delays_its_sender_under_rendezvous_alone(kind):
    """The receiver's first forward is eight times as long as the others: is the sender on time? As it was simulated."""
    graph = chain(2, kind).forward_only()
    even = scaled(Costs.nominal(graph, move=0.5), 20 * MS)
    late = replace(even, overrides={("F", "llm.1", False, 0): 160 * MS})
    schedule = Schedule(graph=graph, microbatches=4, ops=tuple(step_ops(graph, 4)), name="mine")
    on_time = simulate(schedule, even)

    def claim(measured: Timeline) -> None:
        simulated = simulate(schedule, replays.costs_of(measured))
        for microbatch in range(4):
            op = Op("F", "llm.0", microbatch)
            assert measured.span(op)[0] == pytest.approx(simulated.span(op)[0], rel=0.05, abs=10 * MS)
        delay = measured.span(Op("F", "llm.0", 3))[0] - on_time.span(Op("F", "llm.0", 3))[0]
        assert delay < 50 * MS if kind == "async" else delay > 100 * MS

    require_of_a_step(schedule, late, claim)


def test_moves_over_one_wire_follow_one_another():
    """Two sends of 80 ms, 20 ms apart: the second arrives 80 ms after the first, and the sender waits for neither."""
    graph = chain(2).forward_only()
    costs = scaled(Costs.nominal(graph, move=4.0), 20 * MS)
    schedule = one_f_one_b(graph, 3, costs)

    def claim(measured: Timeline) -> None:
        starts = [measured.span(Op("F", "llm.1", m))[0] for m in range(3)]
        assert [b - a for a, b in pairwise(starts)] == pytest.approx([80 * MS] * 2, abs=15 * MS)
        assert measured.span(Op("F", "llm.0", 2))[1] == pytest.approx(60 * MS, abs=15 * MS)

    require_of_a_step(replace(schedule, in_flight={}), costs, claim)


def test_parameters_leave_and_come_back_beside_the_ranks():
    graph = offloaded()
    nominal = scaled(Costs.nominal(graph), 15 * MS)
    slow = {("offload", "e0.0", False): 30 * MS, ("reload", "e0.0", False): 45 * MS}
    costs = Costs(seconds={**nominal.seconds, **slow})
    schedule = make_schedule("three-phase", graph, 4, costs, window=2)

    def claim(measured: Timeline) -> None:
        assert measured.makespan == pytest.approx(simulate(schedule, costs).makespan, rel=0.15)
        for first in (0, 2):
            gone, back = (measured.span(Op(kind, "e0.0", first)) for kind in ("offload", "reload"))
            assert gone[0] >= measured.span(Op("F", "e0.0", first + 1))[1] and back[0] >= gone[1]
            assert back[1] <= measured.span(Op("B", "e0.0", first))[0] + SKEW

    require_of_a_step(schedule, costs, claim)


def test_a_stage_without_backward_waits_for_those_that_it_awaits():
    graph = frozen_encoder(1)
    costs = scaled(Costs.nominal(graph, forward={"vision.0": 0.2, "llm.0": 2.0}), 15 * MS)
    schedule = one_f_one_b(graph, 4, costs)
    assert any(schedule.awaits(op) for op in schedule.ops)
    last = Op("F", "vision.0", 3)

    def waits(measured: Timeline) -> None:
        for op in schedule.ops:
            for before in schedule.awaits(op):
                assert measured.span(op)[0] >= measured.span(before)[1]

    def runs_ahead(measured: Timeline) -> None:
        assert measured.span(last)[0] < simulate(schedule, costs).span(last)[0] - 20 * MS

    require_of_a_step(schedule, costs, waits)
    require_of_a_step(replace(schedule, in_flight={}), costs, runs_ahead)


def test_a_schedule_that_is_not_valid_is_refused_before_any_process_starts(monkeypatch):
    monkeypatch.setattr(replays, "_Processes", None)
    costs = Costs.nominal(chain(2))
    schedule = one_f_one_b(chain(2), 2, costs)
    with pytest.raises(ScheduleError):
        next(replay(replace(schedule, ops=schedule.ops[::-1]), costs))


def test_processes_end_with_the_iterator(monkeypatch):
    started, start = [], replays._start
    monkeypatch.setattr(replays, "_start", lambda plan: started.append(start(plan)) or started[-1])
    costs = scaled(Costs.nominal(chain(3)), MS)
    steps = replay(one_f_one_b(chain(3), 2, costs), costs, 5)
    next(steps)
    assert [process.poll() for process in started] == [None] * 3
    steps.close()
    assert all(process.poll() is not None for process in started)


def test_a_process_that_dies_is_named(monkeypatch):
    started, start = [], replays._start
    monkeypatch.setattr(replays, "_start", lambda plan: started.append(start(plan)) or started[-1])
    costs = scaled(Costs.nominal(chain(3)), MS)
    steps = replay(one_f_one_b(chain(3), 2, costs), costs, 2)
    next(steps)
    started[1].kill()
    started[1].wait()
    with pytest.raises(ReplayError, match="the process of block 1 of a replay ended early"):
        next(steps)
    assert all(process.poll() is not None for process in started)


def test_processes_that_wait_for_one_another_are_given_up(monkeypatch):
    """A plan in which two blocks wait for each other first; a valid schedule has none."""
    monkeypatch.setattr(replays, "PATIENCE_SECONDS", 0.5)
    plans = replays._plans
    costs = scaled(Costs.nominal(chain(2)), MS)
    schedule = one_f_one_b(chain(2), 1, costs)
    last = len(schedule.ops) - 1

    def crossed(schedule: Schedule, costs: Costs) -> list:
        result = plans(schedule, costs)
        for block in result:
            block[0][2] = [(last + 1, 0.0)]
        return result

    monkeypatch.setattr(replays, "_plans", crossed)
    with pytest.raises(ReplayError, match="ops wait for one another"):
        next(replay(schedule, costs))


@pytest.mark.slow
@settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(graph=stage_graphs(), data=st.data())
def test_any_layout_takes_the_time_that_was_simulated(graph, data):
    costs = scaled(data.draw(costs_of(graph)), 15 * MS)
    name = data.draw(st.sampled_from(list(SCHEDULES)))
    schedule = make_schedule(name, graph, 3, costs)
    require_of_a_step(schedule, costs.split_as(schedule.graph))
