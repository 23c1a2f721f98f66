"""Properties that every schedule has, on drawn graphs, costs, windows, splits and offloads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_graphs import costs_of, spread_graphs, stage_graphs, steady

from mmjax.schedule.graph import StageGraph
from mmjax.schedule.nested import laned_groups
from mmjax.schedule.ops import PARAMETER_COPIES, STASH_COPIES, Op, Schedule, participating_ranks
from mmjax.schedule.phased import encoders
from mmjax.schedule.schedules import INNER, LANED, NESTING, OFFLOADING, SCHEDULES, STASHING, WINDOWED, make_schedule
from mmjax.schedule.simulate import Costs, simulate
from mmjax.schedule.validate import ScheduleError, validate

fewer = settings(steady, max_examples=70)


@st.composite
def orders(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `make_schedule` for a drawn graph and a schedule of any kind."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    inner = draw(st.sampled_from(INNER)) if name in NESTING else INNER[0]
    laned = name in NESTING or (name in LANED and draw(st.booleans()))
    graph = draw(spread_graphs(inner) if laned else stage_graphs())
    if draw(st.booleans()):
        graph = graph.with_split()
    window = draw(st.integers(0, 4)) if name in WINDOWED else 0
    costs = draw(costs_of(graph))
    if name in OFFLOADING and not laned and draw(st.booleans()):
        graph = _offloaded(graph, everywhere=name == "encoders-first")
        copies = {
            (kind, node.name, False): draw(st.sampled_from([0.0, 0.7, 4.0]))
            for node in graph.stages
            for kind in PARAMETER_COPIES
        }
        costs = replace(costs, seconds={**costs.seconds, **copies})
    if name in STASHING and draw(st.booleans()):
        graph = _stashing(graph, name)
        copies = {
            (kind, node.name, False): draw(st.sampled_from([0.0, 0.7, 4.0]))
            for node in graph.stages
            for kind in STASH_COPIES
        }
        costs = replace(costs, seconds={**costs.seconds, **copies})
    microbatches = draw(st.integers(1, 7))
    return dict(name=name, graph=graph, microbatches=microbatches, costs=costs, window=window, inner=inner)


def steps() -> st.SearchStrategy[tuple[Schedule, Costs]]:
    """A schedule of any kind for a drawn graph, and the costs that it was made by."""
    return orders().map(lambda order: (make_schedule(**order), order["costs"]))


def _offloaded(graph: StageGraph, *, everywhere: bool) -> StageGraph:
    """The graph with all encoders offloaded that share a rank with a module that is no encoder."""
    behind = {rank for node in graph.stages if node.module not in encoders(graph) for rank in node.ranks}
    may = {node.module for node in graph.stages if everywhere or behind.intersection(node.ranks)}
    stages = (replace(node, offload=node.module in may and node.module in encoders(graph)) for node in graph.stages)
    return replace(graph, stages=tuple(stages))


def _stashing(graph: StageGraph, name: str) -> StageGraph:
    """With all stages stashing that may under this schedule: encoders with lanes, or with a phase of their own."""
    if name in NESTING:
        may = {stage for group in laned_groups(graph) if not group.ins for stage in group.names}
    else:
        may = {node.name for node in _offloaded(graph, everywhere=name == "encoders-first").stages if node.offload}
    return replace(graph, stages=tuple(replace(node, stash=node.name in may) for node in graph.stages))


def _critical_path(schedule: Schedule, costs: Costs) -> float:
    """The longest chain of ops that read each other: no order can be shorter."""
    costs, ends = costs.split_as(schedule.graph), {}
    for op in schedule.ops:
        ends[op] = costs.of(op) + max((ends[before] for before in schedule.dependencies(op)), default=0.0)
    return max(ends.values())


@fewer
@given(steps())
def test_schedules_are_valid_and_keep_their_promise(step):
    schedule, costs = step
    report, timeline = validate(schedule), simulate(schedule, costs)
    for node in schedule.graph.stages:
        assert max(report.in_flight[node.name], timeline.in_flight[node.name]) <= schedule.bound(node.name)
    assert list(timeline.starts) == sorted(timeline.starts), "a total order by starting time"
    assert timeline.makespan >= _critical_path(schedule, costs) - 1e-9
    work = {rank: sum(end - start for _, start, end in timeline.for_rank(rank)) for rank in schedule.graph.ranks}
    assert timeline.makespan >= max(work.values()) - 1e-9


@fewer
@given(steps())
def test_ranks_that_run_their_ops_in_order_never_deadlock(step):
    """Each rank is a queue; an op runs when it is first on all of its ranks and its dependencies have ended."""
    schedule, _ = step
    queues = {rank: list(schedule.for_rank(rank))[::-1] for rank in schedule.graph.ranks}
    ended: set[Op] = set()
    while heads := {queue[-1] for queue in queues.values() if queue}:
        ready = {
            op
            for op in heads
            if ended.issuperset((*schedule.dependencies(op), *schedule.awaits(op)))
            and all(queues[rank][-1] == op for rank in participating_ranks(schedule.graph, op))
        }
        assert ready, f"deadlock before {[str(op) for op in heads]}"
        for op in ready:
            for rank in participating_ranks(schedule.graph, op):
                queues[rank].pop()
        ended |= ready
    assert ended == set(schedule.ops)


@fewer
@given(orders())
def test_schedules_are_deterministic(order):
    graph = order["graph"]
    again = StageGraph(stages=tuple(graph.stages), edges=tuple(graph.edges), ties=tuple(graph.ties))
    assert make_schedule(**{**order, "graph": again}) == make_schedule(**order)


@fewer
@given(st.data(), steps())
def test_mutated_schedules_are_refused(data, step):
    schedule, _ = step
    ops = list(schedule.ops)
    place = data.draw(st.integers(0, len(ops) - 1))
    mutation = data.draw(st.sampled_from(["drop", "duplicate", "swap", "ahead"]))
    if mutation == "drop":
        del ops[place]
    elif mutation == "duplicate":
        ops.insert(data.draw(st.integers(0, len(ops))), ops[place])
    elif mutation == "swap":
        users = [i for i, op in enumerate(ops) if schedule.dependencies(op)]
        user = data.draw(st.sampled_from(users))
        dependency = ops.index(data.draw(st.sampled_from(schedule.dependencies(ops[user]))))
        ops[user], ops[dependency] = ops[dependency], ops[user]
    else:  # a microbatch earlier than its turn
        due = [(i, j) for j, op in enumerate(ops) for i in range(j) if _same_turn(schedule.graph, ops[i], op)]
        if not due:
            return
        early, late = data.draw(st.sampled_from(due))
        ops[early], ops[late] = ops[late], ops[early]
    with pytest.raises(ScheduleError):
        validate(replace(schedule, ops=tuple(ops)))


def _same_turn(graph: StageGraph, first: Op, second: Op) -> bool:
    if (first.kind, first.stage) != (second.kind, second.stage) or first.kind not in ("F", "B", "W"):
        return False
    return len({graph.stage(op.stage).lane(op.microbatch) for op in (first, second)}) == 1
