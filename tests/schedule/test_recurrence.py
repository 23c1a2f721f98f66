"""The recurrence equals the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_graphs import chain, steady
from test_properties import steps

from mmjax.schedule.recurrence import CHUNK, Recurrence
from mmjax.schedule.schedules import one_f_one_b
from mmjax.schedule.simulate import Costs, simulate

fewer = settings(steady, max_examples=60)


@fewer
@given(steps(), st.data())
def test_times_are_those_of_the_simulator(step, data):
    schedule, costs = step
    costs = costs.split_as(schedule.graph)
    names = [stage.name for stage in schedule.graph.stages]
    varying = data.draw(st.lists(st.sampled_from(names), unique=True))
    recurrence = Recurrence(schedule, costs, varying)
    assert {stage for _, stage in recurrence.keys} == set(varying)
    cases = data.draw(st.integers(1, 3))
    seconds = st.sampled_from([0.0, 0.3, 1.0, 2.5, 7.0])
    table_CMK = np.zeros((len(recurrence.keys), schedule.microbatches, cases))
    for place in np.ndindex(table_CMK.shape):
        table_CMK[place] = data.draw(seconds)
    spans, ends = recurrence.makespans(table_CMK), recurrence.ends(table_CMK)
    for case in range(cases):
        overrides = {
            (kind, stage, False, m): float(table_CMK[i, m, case])
            for i, (kind, stage) in enumerate(recurrence.keys)
            for m in range(schedule.microbatches)
        }
        timeline = simulate(schedule, replace(costs, overrides={**costs.overrides, **overrides}))
        assert spans[case] == timeline.makespan
        assert ends[1:, case].tolist() == [timeline.span(op)[1] for op in recurrence.ops]


def test_ancestors_are_all_that_must_have_ended():
    graph = chain(2)
    recurrence = Recurrence(one_f_one_b(graph, 2, Costs.nominal(graph)), Costs.nominal(graph), ["llm.0"])
    ops = {str(op): op for op in recurrence.ops}
    ancestors = recurrence.ancestors(recurrence.index[ops["B llm.0 microbatch 0"]])
    names = {str(recurrence.ops[i - 1]) for i in ancestors}
    assert names == {f"{op} microbatch 0" for op in ("F llm.0", "F llm.1", "B llm.1")} | {"F llm.0 microbatch 1"}


def test_more_cases_than_a_chunk_are_timed_in_several():
    graph = chain(3)
    costs = Costs.nominal(graph)
    recurrence = Recurrence(one_f_one_b(graph, 4, costs), costs, ["llm.0"])
    table = np.linspace(0.1, 3.0, 2 * 4 * (2 * CHUNK + 3)).reshape(2, 4, -1)
    assert np.array_equal(recurrence.makespans(table), recurrence.ends(table).max(axis=0))


def test_an_order_that_the_simulator_refuses_is_refused():
    graph = chain(2)
    schedule = one_f_one_b(graph, 2, Costs.nominal(graph))
    turned = replace(schedule, ops=schedule.ops[::-1])
    with pytest.raises(ValueError, match="which it needs: validate the schedule first"):
        Recurrence(turned, Costs.nominal(graph), [])
    with pytest.raises(ValueError, match="which it needs: validate the schedule first"):
        simulate(turned, Costs.nominal(graph))
