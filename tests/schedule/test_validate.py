"""`validate` refuses wrong schedules and names the reason."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_graphs import (
    TIE,
    chain,
    connect,
    costs_of,
    frozen_encoder,
    offloaded,
    stage,
    stage_graphs,
    steady,
    two_encoders,
)

from mmjax.schedule.ops import ONCE, Op, Schedule
from mmjax.schedule.schedules import gpipe, one_f_one_b
from mmjax.schedule.simulate import Costs, simulate
from mmjax.schedule.validate import ScheduleError, ScheduleReport, validate


def _schedule(graph, microbatches: int = 4) -> Schedule:
    return one_f_one_b(graph, microbatches, Costs.nominal(graph))


def _swap(schedule: Schedule, first: Op, second: Op) -> Schedule:
    exchange = {first: second, second: first}
    return replace(schedule, ops=tuple(exchange.get(op, op) for op in schedule.ops))


def _move_before(schedule: Schedule, op: Op, before: Op) -> Schedule:
    ops = [o for o in schedule.ops if o != op]
    ops.insert(ops.index(before), op)
    return replace(schedule, ops=tuple(ops))


def test_the_report_counts_ops_and_microbatches_in_flight():
    schedule = _schedule(chain(3), 8)
    assert validate(schedule) == ScheduleReport(ops=len(schedule.ops), in_flight={"llm.0": 3, "llm.1": 2, "llm.2": 1})
    assert validate(gpipe(chain(3), 8, Costs.nominal(chain(3)))).in_flight == {f"llm.{i}": 8 for i in range(3)}


def test_in_flight_meets_its_bound_on_long_chains():
    for depth in (1, 2, 5, 8):
        report = validate(_schedule(chain(depth), 3 * depth))
        assert report.in_flight == {f"llm.{i}": depth - i for i in range(depth)}


def test_a_dependency_after_its_user_is_refused():
    schedule = _schedule(chain(2))
    wrong = _move_before(schedule, Op("F", "llm.1", 0), Op("unpack", "llm.1", 0, "llm.0->llm.1"))
    with pytest.raises(ScheduleError, match=r"F llm.1 microbatch 0 \(op \d+\) precedes unpack llm.0->llm.1"):
        validate(wrong)


def test_a_missing_op_is_refused():
    schedule = _schedule(chain(2))
    for lost in (Op("B", "llm.0", 2), Op("reduce", "llm.1"), Op("pack", "llm.1", 3, "llm.0->llm.1", True)):
        with pytest.raises(ScheduleError, match=f"{lost} is missing"):
            validate(replace(schedule, ops=tuple(op for op in schedule.ops if op != lost)))


def test_a_tie_that_is_dropped_or_late_is_refused():
    schedule = _schedule(chain(2, tied=True))
    back = Op("unpack", "llm.0", ONCE, TIE, True)
    with pytest.raises(ScheduleError, match=f"{back} is missing"):
        validate(replace(schedule, ops=tuple(op for op in schedule.ops if op != back)))
    with pytest.raises(ScheduleError, match=r"reduce llm.0 \(op \d+\) precedes unpack llm/embed backward"):
        validate(_move_before(schedule, Op("reduce", "llm.0"), back))
    with pytest.raises(ScheduleError, match=r"prepare llm.1 \(op \d+\) precedes unpack llm/embed "):
        validate(_move_before(schedule, Op("prepare", "llm.1"), Op("unpack", "llm.1", ONCE, TIE)))
    untied = replace(schedule, graph=chain(2))
    with pytest.raises(ScheduleError, match=r"llm/embed .*unknown edge 'llm/embed'"):
        validate(untied)


def test_an_op_twice_is_refused():
    schedule = _schedule(chain(2))
    with pytest.raises(ScheduleError, match=r"update llm.0 is there 2 times"):
        validate(replace(schedule, ops=(*schedule.ops, Op("update", "llm.0"))))


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (Op("F", "llm.0", 4), "F llm.0 microbatch 4 .*of 4 microbatches.* is no op of this step"),
        (Op("F", "llm.7", 0), "F llm.7 microbatch 0 .*unknown stage 'llm.7'"),
        (Op("unpack", "llm.0", 0, "x"), "unpack x microbatch 0 .*unknown edge 'x'"),
        (Op("B", "vision.0", 0), "B vision.0 microbatch 0 .*is no op"),
        (Op("reduce", "vision.0"), "reduce vision.0 .*is no op"),
        (Op("W", "llm.0", 0), "W llm.0 microbatch 0 .*is no op"),
    ],
)
def test_an_op_that_is_not_of_the_step_is_refused(op, message):
    schedule = _schedule(frozen_encoder())
    with pytest.raises(ScheduleError, match=message):
        validate(replace(schedule, ops=(*schedule.ops, op)))


def test_microbatches_out_of_order_are_refused():
    graph = chain(1)
    schedule = gpipe(graph, 3, Costs.nominal(graph))
    with pytest.raises(ScheduleError, match=r"F llm.0 microbatch 2 comes where microbatch 1 is due"):
        validate(_swap(schedule, Op("F", "llm.0", 1), Op("F", "llm.0", 2)))
    with pytest.raises(ScheduleError, match=r"B llm.0 microbatch 1 comes where microbatch 0 is due"):
        validate(_swap(schedule, Op("B", "llm.0", 0), Op("B", "llm.0", 1)))


def test_more_in_flight_than_promised_is_refused():
    schedule = _schedule(chain(3), 6)
    wrong = _move_before(schedule, Op("F", "llm.0", 3), Op("B", "llm.0", 0))
    with pytest.raises(ScheduleError, match=r"F llm.0 microbatch 3 is in-flight microbatch number 4: 1f1b promises 3"):
        validate(wrong)
    assert validate(replace(wrong, in_flight={})).in_flight["llm.0"] == 4


def test_a_split_stage_is_in_flight_until_its_w():
    graph = chain(2).with_split()
    schedule = _schedule(graph, 4)
    assert validate(schedule).in_flight == {"llm.0": 2, "llm.1": 1}
    late = _move_before(schedule, Op("F", "llm.1", 1), Op("W", "llm.1", 0))
    with pytest.raises(ScheduleError, match=r"F llm.1 microbatch 1 is in-flight microbatch number 2: 1f1b promises 1"):
        validate(late)
    with pytest.raises(ScheduleError, match=r"reduce llm.1 \(op \d+\) precedes W llm.1 microbatch 3"):
        validate(_move_before(schedule, Op("reduce", "llm.1"), Op("W", "llm.1", 3)))


def test_what_an_op_waits_for_comes_first():
    graph = offloaded()
    schedule = gpipe(graph, 2, Costs.nominal(graph))
    reload = Op("reload", "e0.0", 0)
    assert validate(replace(schedule, waits={reload: (Op("F", "llm.0", 0),)}))
    with pytest.raises(ScheduleError, match=r"reload e0.0 .*precedes update llm.0, which gpipe lets it wait for"):
        validate(replace(schedule, waits={reload: (Op("update", "llm.0"),)}))
    with pytest.raises(ScheduleError, match=r"B e0.0 microbatch 0 \(op \d+\) precedes reload e0.0"):
        validate(_move_before(schedule, Op("B", "e0.0", 0), reload))


def test_a_frozen_encoder_that_runs_ahead_is_refused():
    graph = frozen_encoder()
    schedule = _schedule(graph, 6)
    wrong = schedule
    for microbatch in range(1, 4):
        wrong = _move_before(wrong, Op("F", "vision.0", microbatch), Op("F", "llm.0", 0))
    with pytest.raises(
        ScheduleError, match=r"F vision.0 microbatch 3 .* number 4: 1f1b promises 3 of stage 'vision.0'"
    ):
        validate(wrong)


def test_a_frozen_encoder_is_in_flight_until_its_last_consumer_has_run():
    """Its features join the first and the last of three LLM stages, so that the last one's F counts."""
    llm = [f"llm.{i}" for i in range(3)]
    nodes = [stage("vision.0", (9,), backward=False), *(stage(name, (i,)) for i, name in enumerate(llm))]
    graph = connect(nodes, [("vision.0", "llm.0"), ("vision.0", "llm.2"), *pairwise(llm)], "async")
    costs = Costs.nominal(graph, forward={"vision.0": 0.1} | dict.fromkeys(llm, 1.0))
    schedule = one_f_one_b(graph, 8, costs)
    assert validate(schedule).in_flight == simulate(schedule, costs).in_flight
    assert validate(schedule).in_flight == {"vision.0": 4, "llm.0": 3, "llm.1": 2, "llm.2": 1}


def test_an_error_is_one_line():
    schedule = _schedule(two_encoders())
    with pytest.raises(ScheduleError) as caught:
        validate(replace(schedule, ops=schedule.ops[::-1]))
    assert "\n" not in str(caught.value)


@steady
@given(st.data(), stage_graphs(), st.integers(1, 5), st.sampled_from([gpipe, one_f_one_b]))
def test_mutated_schedules_are_refused(data, graph, microbatches, make):
    schedule = make(graph, microbatches, data.draw(costs_of(graph)))
    ops = list(schedule.ops)
    place = data.draw(st.integers(0, len(ops) - 1))
    mutation = data.draw(st.sampled_from(["drop", "duplicate", "swap"]))
    if mutation == "drop":
        del ops[place]
    elif mutation == "duplicate":
        ops.insert(data.draw(st.integers(0, len(ops))), ops[place])
    else:
        users = [i for i, op in enumerate(ops) if schedule.dependencies(op)]
        user = data.draw(st.sampled_from(users))
        dependency = ops.index(data.draw(st.sampled_from(schedule.dependencies(ops[user]))))
        ops[user], ops[dependency] = ops[dependency], ops[user]
    with pytest.raises(ScheduleError):
        validate(replace(schedule, ops=tuple(ops)))
