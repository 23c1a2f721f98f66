"""Lanes: ranks of a spread stage that take microbatches in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stage_graphs import chain, spread

from benchmarks.replay import blocks_of
from mmjax.schedule.graph import GraphError
from mmjax.schedule.ops import Op, edge_ops, occupied_resources, participating_ranks
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs, simulate
from mmjax.schedule.validate import ScheduleError, validate

EDGE = "e0.0->llm.0"


def test_microbatches_run_on_lanes_in_turn_and_the_rest_on_all_ranks():
    graph = spread(2, width=2)
    assert [participating_ranks(graph, Op("F", "e0.0", m)) for m in range(3)] == [(0, 1), (2, 3), (0, 1)]
    assert participating_ranks(graph, Op("update", "e0.0")) == (0, 1, 2, 3)
    assert participating_ranks(graph, Op("move", "llm.0", 1, EDGE)) == (0, 1, 2, 3)
    assert participating_ranks(graph, Op("pack", "e0.0", 1, EDGE)) == (2, 3)
    assert blocks_of(graph) == ((0, 1), (2, 3))


def test_an_edge_is_local_for_the_lane_that_has_the_ranks_of_its_other_end():
    graph = spread(3)
    edge = graph.edge(EDGE)
    assert [graph.kind_of(edge, m) for m in range(4)] == ["local", "async", "async", "local"]
    assert [len(edge_ops(graph, edge, m, backward=False)) for m in range(3)] == [1, 3, 3]


def test_each_pair_of_lanes_has_a_wire_of_its_own():
    graph = spread(3)
    moves = [Op("move", "llm.0", m, EDGE) for m in (1, 2, 4)]
    first, second, third = (occupied_resources(graph, op) for op in moves)
    assert first != second and first == third


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_a_reduce_waits_for_the_last_backward_of_every_lane(microbatches):
    schedule = make_schedule("gpipe", spread(3), microbatches, Costs.nominal(spread(3)))
    needed = schedule.dependencies(Op("reduce", "e0.0"))
    assert {op.microbatch for op in needed} == set(range(microbatches)[-3:])


def test_lanes_keep_their_own_order_and_not_that_of_others():
    schedule = make_schedule("encoders-first", spread(2), 4, Costs.nominal(spread(2)))
    validate(schedule)
    ops, forwards = list(schedule.ops), [Op("F", "e0.0", m) for m in range(4)]
    first, second = ops.index(forwards[0]), ops.index(forwards[1])
    ops[first], ops[second] = forwards[1], forwards[0]
    validate(replace(schedule, ops=tuple(ops)))
    ops[ops.index(forwards[2])], ops[second] = forwards[0], forwards[2]
    with pytest.raises(ScheduleError):
        validate(replace(schedule, ops=tuple(ops)))


def test_lanes_compute_side_by_side():
    graph = spread(2)
    costs = Costs.nominal(graph, forward={"e0.0": 1.0, "llm.0": 0.0, "llm.1": 0.0})
    timeline = simulate(make_schedule("encoders-first", graph, 4, costs), costs)
    assert timeline.makespan == pytest.approx(2 * (1 + 2))


def test_lanes_are_equal():
    with pytest.raises(GraphError, match=r"'llm\.0' has 2 lanes on 1 ranks: lanes are equal"):
        replace(chain(1), stages=(replace(chain(1).stages[0], lanes=2),))
