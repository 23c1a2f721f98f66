"""Three phases around the LLM's own schedule: interleaved, eager 1F1B or ZB-H1 in every window."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from stage_graphs import chain, connect, stage, with_generators

from mmjax.schedule import phased
from mmjax.schedule.closed_forms import idle_interleaved, idle_zb_h1
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import Op, Schedule
from mmjax.schedule.schedules import INNER, make_schedule, one_f_one_b
from mmjax.schedule.simulate import Costs, simulate
from mmjax.schedule.validate import ScheduleError, validate


def spanning(depth: int = 2, *, chunks: int = 1, ranks: Sequence[int] = (), frozen: bool = False) -> StageGraph:
    """An encoder on `ranks`, by default all of an LLM of `depth` submeshes of a rank each."""
    names = [f"llm.{k}" for k in range(depth * chunks)]
    vision = stage("vision.0", ranks or range(depth), backward=not frozen)
    llm = [stage(name, (k % depth,)) for k, name in enumerate(names)]
    return connect([vision, *llm], [("vision.0", names[0]), *pairwise(names)], "async")


def with_encoder(graph: StageGraph, **fields: Any) -> StageGraph:
    """The graph whose encoder has other fields."""
    return replace(graph, stages=(replace(graph.stages[0], **fields), *graph.stages[1:]))


def beside(graph: StageGraph) -> StageGraph:
    """The graph with another encoder, of two stages on ranks of their own."""
    ears = [stage("audio.0", (8,)), stage("audio.1", (9,))]
    pairs = [("audio.0", "audio.1"), ("audio.1", "llm.0"), *((edge.src, edge.dst) for edge in graph.edges)]
    return connect([*graph.stages, *ears], pairs, "async")


def phases(schedule: Schedule, rank: int) -> str:
    """A letter for each F, B and W of a rank in order: the encoder's lower case, the LLM's upper case."""
    ops = [op for op in schedule.for_rank(rank) if op.kind in ("F", "B", "W")]
    return "".join(op.kind if op.stage.startswith("llm") else op.kind.lower() for op in ops)


GRAPHS = {
    "plain": spanning(),
    "chunks": spanning(chunks=2),
    "frozen": spanning(frozen=True),
    **{
        name: with_encoder(spanning(chunks=2), **fields)
        for name, fields in (("offload", {"offload": True}), ("stash", {"stash": True}), ("ops", {"microbatches": 2}))
    },
    "an encoder beside": beside(spanning(chunks=2)),
}


@pytest.mark.parametrize("window", [0, 1, 2, 3])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("kind", [*GRAPHS])
def test_every_window_has_an_inner_schedule(kind: str, inner: str, window: int) -> None:
    graph = GRAPHS[kind]
    costs = Costs.nominal(graph, move=0.1)
    for count in (1, 2, 3, 5, 8) if window % graph.stages[0].microbatches == 0 else ():
        schedule = make_schedule("three-phase", graph, count, costs, window=window, inner=inner)
        report, size = validate(schedule), window or count
        for name in ("llm.0", "llm.1"):
            weights = [op.microbatch for op in schedule.for_stage(name) if op.kind == "W"]
            assert weights == list(range(count)) * (inner == "zb-h1")
            assert report.in_flight[name] <= schedule.bound(name) <= size
        windows = re.fullmatch(r"(f+[FBW]+b*)*", phases(schedule, 0))
        assert windows and len(re.findall("f+", windows[0])) == -(-count // size)


def test_a_windows_weight_gradients_end_before_the_encoders_backward() -> None:
    graph = spanning()
    schedule = make_schedule("three-phase", graph, 4, Costs.nominal(graph), window=2, inner="zb-h1")
    assert [phases(schedule, rank) for rank in (0, 1)] == ["ffFFBWBWbb" * 2, "ffFBFBWWbb" * 2]
    assert not schedule.graph.stage("vision.0").split and schedule.graph.stage("llm.0").split


@pytest.mark.parametrize("window", [0, 2, 3])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_1f1b_inside_is_what_phases_have_by_themselves(count: int, window: int) -> None:
    for graph in (spanning(3), spanning(2, frozen=True), spanning(3, ranks=(0, 1))):
        costs = Costs.nominal(graph, move=0.1)
        plain = phased.three_phase(graph, count, costs, window=window)
        inside = phased.three_phase(graph, count, costs, window=window, inner=one_f_one_b)
        assert [phases(inside, rank) for rank in graph.ranks] == [phases(plain, rank) for rank in graph.ranks]
        assert inside.in_flight == plain.in_flight
        assert simulate(inside, costs).makespan == simulate(plain, costs).makespan


@pytest.mark.parametrize(("count", "window"), [(8, 0), (8, 4), (16, 8)])
def test_idle_time_is_that_of_the_inner_schedule_in_each_window(count: int, window: int) -> None:
    """The closed forms of ZB-H1 and of interleaved 1F1B, once a window."""
    depth, times = 4, count // (window or count)
    encoder = 3 * count  # an F of 1 and a B of 2 on all ranks
    split = spanning(depth)
    seconds = {**Costs.nominal(split).seconds, **{("W", f"llm.{k}", False): 1.0 for k in range(depth)}}
    seconds |= {("B", f"llm.{k}", False): 1.0 for k in range(depth)}
    costs = Costs(seconds=seconds)
    makespan = simulate(make_schedule("three-phase", split, count, costs, window=window, inner="zb-h1"), costs).makespan
    idle = idle_zb_h1(depth, window or count, forward=1.0, backward=1.0, weight=1.0)
    assert makespan == pytest.approx(encoder + 3 * count + times * idle)
    chunked = spanning(depth, chunks=2)
    costs = Costs.nominal(chunked)
    schedule = make_schedule("three-phase", chunked, count, costs, window=window, inner="interleaved")
    idle = idle_interleaved(depth, window or count, chunks=2, forward=2.0, backward=4.0)
    assert simulate(schedule, costs).makespan == pytest.approx(encoder + 6 * count + times * idle)


def test_generators_behind_the_llm_run_in_its_schedule() -> None:
    graph = with_generators()
    spread = replace(graph, stages=tuple(replace(n, ranks=(2, 3)) if n.module == "eye" else n for n in graph.stages))
    for inner in INNER:
        schedule = make_schedule("three-phase", spread, 5, Costs.nominal(spread), window=2, inner=inner)
        validate(schedule)
        firsts = [op for op in schedule.for_stage("two.1") if op.kind == "F"]
        assert firsts == [Op("F", "two.1", m) for m in range(5)]


def test_lanes_behind_the_llm_are_for_1f1b() -> None:
    nodes = [stage("vision.0", (0, 1)), *chain(2).stages, replace(stage("painter.0", (0, 1)), lanes=2)]
    pairs = [("vision.0", "llm.0"), ("llm.0", "llm.1"), ("llm.1", "painter.0")]
    graph = connect(nodes, pairs, "async")
    with pytest.raises(ScheduleError, match=r"'painter\.0' has lanes, for which only '1f1b' has a place"):
        make_schedule("three-phase", graph, 4, Costs.nominal(graph), inner="zb-h1")
