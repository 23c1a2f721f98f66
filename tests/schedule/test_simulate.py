"""Times of schedules: closed forms, hand-made timelines, and agreement with the list scheduler."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_graphs import chain, costs_of, frozen_encoder, offloaded, stage, stage_graphs, steady

from mmjax.schedule import schedules
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.list_scheduler import list_schedule
from mmjax.schedule.ops import COPY_KINDS, Op, Schedule, occupied_ranks, step_ops
from mmjax.schedule.schedules import forward_only, gpipe, one_f_one_b
from mmjax.schedule.simulate import Costs, simulate


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("backward", [1.0, 2.0])
@pytest.mark.parametrize("kind", ["async", "rendezvous"])
def test_bubble_of_an_even_chain_is_p_minus_1_over_m_plus_p_minus_1(make, backward, kind):
    for p in (1, 2, 3, 5):
        for m in (1, 2, 5, 12):
            costs = Costs.nominal(chain(p, kind), backward=backward)
            timeline = simulate(make(chain(p, kind), m, costs), costs)
            assert timeline.makespan == pytest.approx((m + p - 1) * (1 + backward))
            assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
            assert list(timeline.bubbles.values()) == pytest.approx([(p - 1) / (m + p - 1)] * p)


def test_forward_only_of_an_even_chain_fills_and_drains_once():
    costs = Costs.nominal(chain(4), forward=0.5)
    assert simulate(forward_only(chain(4), 6, costs), costs).makespan == pytest.approx((6 + 3) * 0.5)


def test_the_slowest_stage_sets_the_pace():
    costs = Costs.nominal(chain(3), forward={"llm.0": 1.0, "llm.1": 3.0, "llm.2": 1.0})
    timeline = simulate(one_f_one_b(chain(3), 40, costs), costs)
    assert timeline.makespan == pytest.approx(40 * 9 + 3)  # beside it only the first F and the last B of llm.0
    assert timeline.bubbles[1] == pytest.approx(3 / 363)
    assert timeline.bubbles[0] == pytest.approx(1 - 120 / 363)


def _two_stages(kind) -> tuple[Schedule, Costs]:
    """Forward only, two microbatches; pack 0.25, move 1, unpack 0.5, F of 2 and then 1."""
    graph = chain(2, kind).forward_only()
    (edge,) = graph.edges
    costs = Costs(
        seconds={
            ("F", "llm.0", False): 2.0,
            ("F", "llm.1", False): 1.0,
            ("pack", edge.name, False): 0.25,
            ("move", edge.name, False): 1.0,
            ("unpack", edge.name, False): 0.5,
        }
    )
    return Schedule(graph=graph, microbatches=2, ops=tuple(step_ops(graph, 2)), name="mine"), costs


def test_an_async_move_occupies_nobody():
    schedule, costs = _two_stages("async")
    timeline = simulate(schedule, costs)
    name = "llm.0->llm.1"
    assert timeline.span(Op("pack", "llm.0", 0, name)) == (2.0, 2.25)
    assert timeline.span(Op("move", "llm.1", 0, name)) == (2.25, 3.25)
    assert timeline.span(Op("unpack", "llm.1", 0, name)) == (3.25, 3.75)
    assert timeline.span(Op("F", "llm.1", 0)) == (3.75, 4.75)
    assert timeline.span(Op("F", "llm.0", 1)) == (2.25, 4.25)
    assert timeline.makespan == 7.0
    assert timeline.bubbles == {0: pytest.approx(1 - 4.5 / 7), 1: pytest.approx(1 - 3 / 7)}
    assert [op.kind for op, _, _ in timeline.for_rank(0)] == ["prepare", "F", "pack", "F", "pack"]


def test_a_rendezvous_occupies_both_sides():
    schedule, costs = _two_stages("rendezvous")
    timeline = simulate(schedule, costs)
    assert timeline.span(Op("F", "llm.0", 1)) == (3.25, 5.25)
    assert timeline.makespan == 8.0
    assert timeline.bubble == pytest.approx(1 - (6.5 + 5) / 16)
    assert [op.kind for op, _, _ in timeline.for_rank(0)] == ["prepare", "F", "pack", "move", "F", "pack", "move"]


def test_moves_over_one_wire_follow_one_another_and_pass_those_that_come_back():
    schedule, costs = _two_stages("async")
    slow = replace(costs, overrides={("move", "llm.0->llm.1", False, 0): 10.0})
    timeline = simulate(schedule, slow)
    assert timeline.span(Op("move", "llm.1", 0, "llm.0->llm.1")) == (2.25, 12.25)
    assert timeline.span(Op("pack", "llm.0", 1, "llm.0->llm.1")) == (4.25, 4.5)
    assert timeline.span(Op("move", "llm.1", 1, "llm.0->llm.1")) == (12.25, 13.25)
    graph = chain(2)
    costs = Costs.nominal(graph, move=4.0)
    timeline = simulate(one_f_one_b(graph, 2, costs), costs)
    assert timeline.span(Op("move", "llm.1", 1, "llm.0->llm.1")) == (5.0, 9.0)
    assert timeline.span(Op("move", "llm.0", 0, "llm.0->llm.1", True)) == (8.0, 12.0)


def test_a_split_backward_costs_what_the_whole_did():
    graph = chain(2)
    costs = Costs.nominal(graph, backward=2.5)
    unsplit, split = costs.of(Op("B", "llm.0", 0)), costs.split_as(graph.with_split())
    assert split.of(Op("B", "llm.0", 0)) == split.of(Op("W", "llm.0", 0)) == unsplit / 2
    assert split.split_as(graph.with_split()) == split and costs.split_as(graph) is costs
    measured = Costs(seconds={**costs.seconds, ("W", "llm.0", False): 0.5, ("W", "llm.1", False): 0.6})
    assert measured.split_as(graph.with_split()) is measured
    odd = replace(costs, overrides={("B", "llm.1", False, 1): 7.0}).split_as(graph.with_split())
    assert odd.of(Op("B", "llm.1", 1)) == odd.of(Op("W", "llm.1", 1)) == 3.5
    unsplit, split = one_f_one_b(graph, 4, costs), one_f_one_b(graph.with_split(), 4, costs)
    assert simulate(split, costs).makespan < simulate(unsplit, costs).makespan  # a B goes back before its W
    assert simulate(split, costs).in_flight == simulate(unsplit, costs).in_flight == {"llm.0": 2, "llm.1": 1}


def test_copies_run_beside_the_ranks_ops_and_one_after_another():
    graph = offloaded(2)
    costs = Costs.nominal(graph)
    slow = Costs(seconds={**costs.seconds} | {(k, f"e{i}.0", False): 3.0 for k in COPY_KINDS for i in (0, 1)})
    timeline = simulate(gpipe(graph, 2, slow), slow)
    spans = {str(op): span for op, span in timeline.spans.items() if op.kind in COPY_KINDS}
    first = min(timeline.span(Op("F", f"e{i}.0", 1))[1] for i in (0, 1))
    assert sorted(spans.values()) == [(first + 3.0 * i, first + 3.0 * (i + 1)) for i in range(4)]
    assert not any(op.kind in COPY_KINDS for op, _, _ in timeline.for_rank(0))


def test_microbatches_may_cost_something_else():
    schedule, costs = _two_stages("async")
    slow = replace(costs, overrides={("F", "llm.0", False, 1): 5.0})
    timeline = simulate(schedule, slow)
    assert timeline.span(Op("F", "llm.0", 0)) == (0.0, 2.0)
    assert timeline.span(Op("F", "llm.0", 1)) == (2.25, 7.25)


def test_in_flight_counts_from_forward_to_backward():
    costs = Costs.nominal(chain(3))
    assert simulate(one_f_one_b(chain(3), 9, costs), costs).in_flight == {"llm.0": 3, "llm.1": 2, "llm.2": 1}
    assert simulate(one_f_one_b(chain(3), 2, costs), costs).in_flight == {"llm.0": 2, "llm.1": 2, "llm.2": 1}
    assert simulate(gpipe(chain(3), 9, costs), costs).in_flight == {"llm.0": 9, "llm.1": 9, "llm.2": 9}


def test_a_promise_holds_back_a_stage_that_nothing_comes_back_to():
    graph = frozen_encoder(1)
    costs = Costs.nominal(graph, forward={"vision.0": 1.0, "llm.0": 10.0})
    schedule = one_f_one_b(graph, 4, costs)
    timeline = simulate(schedule, costs)
    assert timeline.in_flight["vision.0"] == 2
    assert timeline.span(Op("F", "vision.0", 2))[0] == timeline.span(Op("F", "llm.0", 0))[1] == 11.0
    assert simulate(replace(schedule, in_flight={}), costs).in_flight["vision.0"] == 4


def test_an_op_before_what_it_needs_is_refused():
    schedule, costs = _two_stages("async")
    with pytest.raises(ValueError, match=r"precedes .*, which it needs: validate the schedule first"):
        simulate(replace(schedule, ops=schedule.ops[::-1]), costs)


def test_a_forward_without_cost_is_refused():
    schedule, costs = _two_stages("async")
    seconds = {key: value for key, value in costs.seconds.items() if key[:2] != ("F", "llm.1")}
    with pytest.raises(ValueError, match=r"no cost for F llm.1 microbatch 0"):
        simulate(schedule, Costs(seconds=seconds))
    assert Costs(seconds={}).of(Op("reduce", "llm.0")) == 0.0


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_impossible_costs_are_refused(seconds):
    with pytest.raises(ValueError, match=r"cost of \('F', 'llm.0', False\) is"):
        Costs(seconds={("F", "llm.0", False): seconds})
    with pytest.raises(ValueError, match="give finite seconds"):
        Costs(seconds={}, overrides={("F", "llm.0", False, 0): seconds})


def test_nominal_costs_follow_what_is_trained():
    nodes = (stage("llm.0", (0,), trainable=False), stage("llm.1", (1,)))
    graph = StageGraph(stages=nodes, edges=chain(2).edges)
    costs = Costs.nominal(graph, forward={"llm.0": 2.0, "llm.1": 3.0}, move=0.1, once=0.7)
    assert costs.of(Op("F", "llm.0", 0)) == 2.0
    assert costs.of(Op("B", "llm.0", 0)) == 2.0
    assert costs.of(Op("B", "llm.1", 0)) == 6.0
    assert costs.of(Op("move", "llm.0", 0, "llm.0->llm.1", True)) == 0.1
    assert costs.of(Op("pack", "llm.0", 0, "llm.0->llm.1")) == 0.0
    assert costs.of(Op("update", "llm.1")) == 0.7


@steady
@given(st.data(), stage_graphs(), st.integers(1, 9), st.sampled_from([gpipe, one_f_one_b, forward_only]))
def test_simulation_agrees_with_the_list_scheduler(data, graph, microbatches, make):
    costs = data.draw(costs_of(graph))
    timelines = []

    def keep(*args, **kwargs):
        timelines.append(list_schedule(*args, **kwargs))
        return timelines[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "list_schedule", keep)
        timeline = simulate(make(graph, microbatches, costs), costs)
    assert timeline.starts == timelines[0].starts
    assert timeline.ends == timelines[0].ends
    assert list(timeline.starts) == sorted(timeline.starts)


@steady
@given(st.data(), stage_graphs(), st.integers(1, 6), st.sampled_from([gpipe, one_f_one_b]))
def test_ranks_run_one_op_at_a_time_and_bubbles_add_up(data, graph, microbatches, make):
    costs = data.draw(costs_of(graph))
    timeline = simulate(make(graph, microbatches, costs), costs)
    for rank in graph.ranks:
        spans = timeline.for_rank(rank)
        assert all(first[2] <= second[1] for first, second in pairwise(spans))
    busy = sum((end - start) * len(occupied_ranks(graph, op)) for op, (start, end) in timeline.spans.items())
    if timeline.makespan:
        assert timeline.bubble == pytest.approx(1 - busy / (timeline.makespan * len(graph.ranks)), abs=1e-9)
    else:
        assert timeline.bubble == 0
    work = {r: sum(costs.of(op) for op, _, _ in timeline.for_rank(r)) for r in graph.ranks}
    assert timeline.makespan >= max(work.values()) - 1e-9
