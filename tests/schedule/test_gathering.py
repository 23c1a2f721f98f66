"""Gathers of lanes' parameters in schedules: pulls beside the op before, and collectives of all lanes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from stage_graphs import chain, spread

from benchmarks.pull import step as pulled_step
from benchmarks.pull import waiting
from mmjax.schedule.gathering import gathers_of_readers, with_gathers
from mmjax.schedule.graph import GatherKind, GraphError, StageGraph
from mmjax.schedule.ops import Op, Schedule, gather_of, occupied_ranks, occupied_resources, participating_ranks
from mmjax.schedule.schedules import INNER, make_schedule
from mmjax.schedule.simulate import Costs, simulate
from mmjax.schedule.timeline import draw_timeline, write_trace
from mmjax.schedule.validate import ScheduleError, validate

STAGE = "e0.0"


def gathering(way: GatherKind, lanes: int = 4) -> StageGraph:
    """An encoder in lanes, one on each stage of an LLM, whose lanes gather."""
    return spread(lanes).with_gathers({STAGE: way})


def costs_of(graph: StageGraph, seconds: float = 0.0, slow: float = 1.0) -> Costs:
    """Forwards of a second, with the LLM's sixth microbatch `slow` times as long; gathers of `seconds`."""
    costs = Costs.nominal(graph, move=0.01, once=0.01)
    gathers = {("gather", STAGE, backward): seconds for backward in (False, True)}
    stages = [node.name for node in graph.stages if node.name != STAGE]
    late = {(kind, name, False, 5): slow * costs.seconds[kind, name, False] for kind in "FB" for name in stages}
    return Costs(seconds={**costs.seconds, **gathers}, overrides=late)


def computing(schedule: Schedule, rank: int) -> list[Op]:
    """The F, B and W of a rank."""
    nodes = schedule.graph.stage
    ops = (op for op in schedule.ops if op.kind in ("F", "B", "W"))
    return [op for op in ops if rank in nodes(op.stage).ranks_of(op.microbatch)]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("way", ["pull", "collective"])
def test_gathers_leave_the_order_of_every_rank_as_it_is(way, inner):
    graph = gathering(way)
    costs = costs_of(graph, 0.3)
    plain = make_schedule("nested", graph.with_gathers({}), 13, costs, inner=inner)
    schedule = make_schedule("nested", graph, 13, costs, inner=inner)
    validate(schedule)
    assert {op.kind for op in schedule.ops} - {op.kind for op in plain.ops} == {"gather"}
    for rank in graph.ranks:
        assert computing(schedule, rank) == computing(plain, rank)


def test_a_pull_lies_beside_one_op_and_its_parameters_are_there_once():
    graph = gathering("pull")
    costs = costs_of(graph, 0.5)
    schedule = make_schedule("nested", graph, 12, costs)
    timeline = simulate(schedule, costs)
    pulls = [op for op in schedule.ops if op.kind == "gather"]
    assert pulls and schedule.skipped_gathers
    sources = gathers_of_readers(schedule)
    for pull in pulls:
        (rank,) = graph.stage(STAGE).ranks_of(pull.microbatch)
        order = computing(schedule, rank)
        reader = order.index(Op("B" if pull.backward else "F", STAGE, pull.microbatch))
        if reader >= 2:  # from the end of the op before the last
            assert timeline.span(pull)[0] >= timeline.span(order[reader - 2])[1]
        assert timeline.span(pull)[1] <= timeline.span(order[reader])[0]
        older = [op for op in order[:reader] if op in sources and sources[op] != pull]
        assert all(timeline.span(op)[1] <= timeline.span(pull)[0] for op in older), "one copy of the parameters"


def test_an_op_that_follows_one_of_its_stage_reads_what_is_there():
    graph = gathering("pull")
    schedule = make_schedule("nested", graph, 12, costs_of(graph, 0.5))
    for rank in graph.ranks:
        order = computing(schedule, rank)
        for before, op in zip(["", *order], order, strict=False):
            if op.stage == STAGE and op.kind in ("F", "B"):
                follows = isinstance(before, Op) and before.stage == STAGE
                assert (gather_of(schedule.graph, op) in schedule.skipped_gathers) == follows
    assert all(gather not in schedule.ops for gather in schedule.skipped_gathers)


def test_a_w_of_the_stage_leaves_its_parameters_there():
    graph = gathering("pull")
    schedule = make_schedule("nested", graph, 12, costs_of(graph, 0.5), inner="zb-h1")
    between = 0
    for rank in graph.ranks:
        order = computing(schedule, rank)
        for i, op in enumerate(order[2:], 2):
            kinds = [before.kind for before in order[i - 2 : i] if before.stage == STAGE]
            if op.stage == STAGE and op.kind == "F" and kinds == ["B", "W"]:
                between += 1
                assert gather_of(schedule.graph, op) in schedule.skipped_gathers
            if op.stage == STAGE and op.kind == "F" and order[i - 1].kind == "W" and order[i - 2].stage != STAGE:
                assert gather_of(schedule.graph, op) not in schedule.skipped_gathers
    assert between


@pytest.mark.parametrize("slow", [1.0, 2.5])
def test_pulls_that_fit_beside_an_op_take_no_time(slow):
    graph = gathering("pull")
    costs = costs_of(graph, 0.9, slow)
    whole = simulate(make_schedule("nested", graph.with_gathers({}), 12, costs), costs).makespan
    step = simulate(make_schedule("nested", graph, 12, costs), costs).makespan
    # The first ops of a lane have no op before them.
    assert whole <= step <= whole + 0.9 + 1e-9


def test_lanes_wait_at_a_collective_for_the_slowest_rank():
    graph = gathering("collective")
    costs = costs_of(graph, 0.0, 2.5)
    schedule = make_schedule("nested", graph, 12, costs)
    timeline = simulate(schedule, costs)
    gathers = [op for op in schedule.ops if op.kind == "gather"]
    assert gathers and all(op.microbatch % 4 == 0 for op in gathers)
    pulled = simulate(make_schedule("nested", gathering("pull"), 12, costs), costs)
    assert timeline.makespan > pulled.makespan
    for op in gathers:  # none of a gather's readers starts before all ranks have come to it
        readers = [reader for reader, gather in gathers_of_readers(schedule).items() if gather == op]
        assert min(timeline.span(reader)[0] for reader in readers) >= timeline.span(op)[1]


def test_a_collective_occupies_all_lanes_and_a_pull_none():
    pull, together = gathering("pull"), gathering("collective")
    op = Op("gather", STAGE, 2)
    assert occupied_ranks(pull, op) == () and occupied_resources(pull, op) == (("pull", 2, False),)
    assert participating_ranks(pull, op) == (0, 1, 2, 3), "owners may offer"
    assert occupied_ranks(together, replace(op, microbatch=0)) == (0, 1, 2, 3)
    assert pull.stage(STAGE).gathered_for(6) == 6 and together.stage(STAGE).gathered_for(6) == 4


def test_moves_decide_how_lanes_gather():
    graph = gathering("collective")
    assert graph.with_moves("async").stage(STAGE).gather == "pull"
    assert graph.with_moves("rendezvous").stage(STAGE).gather == "collective"
    assert spread(4).with_moves("async").stage(STAGE).gather == ""
    assert graph.forward_only().stage(STAGE).gather == ""


@pytest.mark.parametrize("name", ["gpipe", "encoders-first", "three-phase"])
@pytest.mark.parametrize("way", ["pull", "collective"])
def test_every_schedule_with_lanes_has_gathers(name, way):
    graph = gathering(way)
    costs = costs_of(graph, 0.3)
    schedule = make_schedule(name, graph, 10, costs)
    assert validate(schedule).ops == len(schedule.ops)
    assert {op for op in schedule.ops if op.kind == "gather"}.isdisjoint(schedule.skipped_gathers)


def test_a_schedule_without_gathers_is_itself():
    graph = spread(2)
    schedule = make_schedule("gpipe", graph, 4, Costs.nominal(graph))
    assert with_gathers(schedule, {}, Costs.nominal(graph)) is schedule


def test_a_missing_gather_is_refused():
    graph = gathering("pull")
    schedule = make_schedule("nested", graph, 8, costs_of(graph))
    gather = next(op for op in schedule.ops if op.kind == "gather")
    with pytest.raises(ScheduleError, match=f"{gather} is missing"):
        validate(replace(schedule, ops=tuple(op for op in schedule.ops if op != gather)))


def test_wrong_gathers_are_refused():
    with pytest.raises(GraphError, match="gathers and has one lane"):
        chain(2).with_gathers({chain(2).stages[0].name: "pull"})
    with pytest.raises(GraphError, match="gathers by 'push'"):
        spread(2).with_gathers({STAGE: "push"})  # pyright: ignore[reportArgumentType]


@pytest.mark.long
@pytest.mark.parametrize(("model", "least"), [("encoder", 1.03), ("encoder and generator", 1.03)])
def test_pulls_gain_under_uneven_microbatches(model, least):
    """The benchmark's steps: what a collective costs more than a pull is waiting, beside the gathers themselves."""
    pull, together = (pulled_step(model, way).timeline for way in ("pull", "collective"))
    assert together.makespan / pull.makespan >= least
    assert waiting(pull) == 0 and waiting(together) > 0


@pytest.mark.parametrize("way", ["pull", "collective"])
def test_timelines_show_gathers(way, tmp_path):
    graph = gathering(way)
    costs = costs_of(graph, 0.5)
    timeline = simulate(make_schedule("nested", graph, 8, costs), costs)
    write_trace(timeline, tmp_path / "trace.json")
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e.get("cat") == "gather"]
    boxes = {event["tid"] for event in events if event["ph"] == "X"}
    assert boxes == (set() if way == "pull" else {0, 1, 2, 3}), "a collective is on every rank"
    gathers = sum(op.kind == "gather" for op in timeline.schedule.ops)
    assert len(events) == gathers * (2 if way == "pull" else 4)
    draw_timeline(timeline, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
