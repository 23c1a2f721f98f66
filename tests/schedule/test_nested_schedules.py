"""Nested schedules: the order, microbatches in flight, and the seconds of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_graphs import chain, connect, spread, stage, steady
from test_replay import require_of_a_step

from mmjax.schedule.dispatch import dispatch_table
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import Op, Schedule
from mmjax.schedule.schedules import INNER, SCHEDULES, make_schedule
from mmjax.schedule.simulate import Costs, Timeline, simulate
from mmjax.schedule.validate import ScheduleError, validate


def costs(graph: StageGraph, *, encoder: float = 0.7, generator: float = 1.3, llm: float = 1.0) -> Costs:
    """Seconds of F by the kind of module; a backward takes twice as long."""
    each = {"e": encoder, "g": generator, "l": llm}
    return Costs.nominal(graph, forward={node.name: each[node.name[0]] for node in graph.stages})


def without_lanes(graph: StageGraph) -> StageGraph:
    """The graph of the stages that are not spread."""
    stages = tuple(node for node in graph.stages if node.lanes == 1)
    names = {node.name for node in stages}
    return replace(graph, stages=stages, edges=tuple(e for e in graph.edges if {e.src, e.dst} <= names))


def on_rank(schedule: Schedule, rank: int, modules: str = "l") -> list[Op]:
    """F, B and W of `modules`, by their first letters, on a rank."""
    return [op for op in schedule.for_rank(rank) if op.kind in ("F", "B", "W") and op.stage[0] in modules]


@st.composite
def steps(draw: st.DrawFn, *, generators: bool = False) -> tuple[str, StageGraph, int]:
    """An inner schedule, a graph with an encoder and microbatches."""
    inner = draw(st.sampled_from(INNER))
    graph = spread(
        draw(st.integers(2, 4)),
        width=draw(st.sampled_from([1, 1, 2])),
        chunks=draw(st.integers(1, 3)) if inner == "interleaved" else 1,
        encoders=draw(st.integers(1, 2)),
        generators=draw(st.integers(1, 2)) if generators else 0,
        frozen=draw(st.booleans()),
    )
    return inner, graph, draw(st.integers(1, 14))


def test_the_order_of_a_small_step():
    graph = spread(2, generators=1)
    schedule = make_schedule("nested", graph, 4, costs(graph))
    ranks = [" ".join(f"{op.kind}{op.stage[0]}{op.microbatch}" for op in on_rank(schedule, r, "elg")) for r in (0, 1)]
    assert ranks == [
        "Fe0 Fe2 Fl0 Fl1 Fl2 Fg0 Bg0 Bl0 Fl3 Fg2 Bg2 Bl1 Be0 Bl2 Bl3 Be2",
        "Fe1 Fe3 Fl0 Fl1 Fg1 Bg1 Bl0 Fl2 Bl1 Fl3 Fg3 Bg3 Bl2 Be1 Bl3 Be3",
    ]
    assert (schedule.in_flight["e0.0"], schedule.in_flight["g0.0"]) == (4, 2)


def check_order(inner: str, graph: StageGraph, microbatches: int) -> None:
    """The LLM keeps the inner order on every rank, and its memory."""
    alone = without_lanes(graph)
    nested = make_schedule("nested", graph, microbatches, costs(graph), inner=inner)
    wanted = make_schedule(inner, alone, microbatches, costs(alone))
    for rank in graph.ranks:
        assert on_rank(nested, rank) == on_rank(wanted, rank)
    assert all(nested.bound(node.name) == wanted.bound(node.name) for node in alone.stages)


def check_time(inner: str, graph: StageGraph, microbatches: int, encoder: float, llm: float) -> None:
    """A step takes the inner one and its units, and where these take no time as long as the inner one."""
    alone, seconds = without_lanes(graph), costs(graph, encoder=encoder, llm=llm)
    makespan = simulate(make_schedule("nested", graph, microbatches, seconds, inner=inner), seconds).makespan
    bare = simulate(make_schedule(inner, alone, microbatches, seconds), seconds).makespan
    encoders = [node for node in graph.stages if node.lanes > 1]
    units = -(-microbatches // encoders[0].lanes)
    assert makespan <= (bare + units * encoder * sum(1 + 2 * node.backward for node in encoders)) * (1 + 1e-9)
    free = costs(graph, encoder=0.0, llm=llm)
    nothing = simulate(make_schedule("nested", graph, microbatches, free, inner=inner), free).makespan
    assert nothing == pytest.approx(bare)


def check_generators(inner: str, graph: StageGraph, microbatches: int, generator: float) -> None:
    """Generators add their units to the inner schedule with a unit of lead."""
    each = [costs(graph, generator=generator_seconds) for generator_seconds in (0.0, generator)]
    schedules = [make_schedule("nested", graph, microbatches, stage_costs, inner=inner) for stage_costs in each]
    bare, with_generator = (
        simulate(schedule, stage_costs).makespan for schedule, stage_costs in zip(schedules, each, strict=True)
    )
    generators = [node for node in graph.stages if node.module[0] == "g"]
    units = -(-microbatches // generators[0].lanes)
    assert with_generator <= (bare + units * 3 * generator * len(generators)) * (1 + 1e-9)


@settings(steady, max_examples=6)
@given(steps(), steps(generators=True), st.floats(0, 9), st.floats(0.1, 9))
def test_order_and_time(step, drawing, encoder, llm):
    check_order(*step)
    check_time(*step, encoder=encoder, llm=llm)
    check_generators(*drawing, generator=encoder)


@pytest.mark.long
@settings(steady, max_examples=200)
@given(steps(), steps(generators=True), st.floats(0, 9), st.floats(0.1, 9))
def test_order_and_time_of_many(step, drawing, encoder, llm):
    check_order(*step)
    check_time(*step, encoder=encoder, llm=llm)
    check_generators(*drawing, generator=encoder)


@pytest.mark.parametrize("generators", [0, 1])
@pytest.mark.parametrize("depth", [2, 3])
def test_a_step_takes_as_long_as_with_all_encoders_first_and_keeps_less(depth, generators):
    """Optimus with unlimited memory: the LLM's fill and drain, and every unit's own seconds.

    Nested it is even a little shorter, because units fill some of the fill.
    """
    graph = spread(depth, generators=generators)
    for microbatches in (depth, 8 * depth):
        optimus, nested = (
            make_schedule(name, graph, microbatches, costs(graph)) for name in ("encoders-first", "nested")
        )
        units = microbatches // depth
        bound = (microbatches + depth - 1) * 3 + units * 3 * (0.7 + 1.3 * generators)
        assert simulate(optimus, costs(graph)).makespan == pytest.approx(bound)
        assert bound * 0.98 < simulate(nested, costs(graph)).makespan <= bound * (1 + 1e-9)
        if units > 1 and not generators:
            assert simulate(nested, costs(graph)).makespan < bound - 0.1
        optimus_flight, less = validate(optimus).in_flight, validate(nested).in_flight
        assert optimus_flight["e0.0"] == microbatches >= less["e0.0"] and less["e0.0"] <= 3 * depth
        if generators:
            assert (
                optimus_flight["llm.0"] == optimus_flight["llm.1"] == microbatches and optimus_flight["g0.0"] <= depth
            )
            assert less["llm.0"] <= 2 * depth - 1


@pytest.mark.parametrize("inner", INNER)
def test_an_llm_fed_by_free_units_with_a_generator_keeps_its_pace(inner):
    graph = spread(4, chunks=2 if inner == "interleaved" else 1, generators=1)
    seconds = costs(graph, encoder=0.0, generator=0.0)
    nested = simulate(make_schedule("nested", graph, 16, seconds, inner=inner), seconds).makespan
    alone = simulate(make_schedule(inner, without_lanes(graph), 16, seconds), seconds).makespan
    assert nested == pytest.approx(alone)


def test_units_in_flight_are_those_of_the_paper():
    """§3.1: K is 3 for interleaved 1F1B with more than two submeshes, 2 for 1F1B and where there are two."""
    orders = {
        (inner, depth): make_schedule("nested", graph, 4 * depth, costs(graph), inner=inner).in_flight["e0.0"] / depth
        for inner, chunks in (("1f1b", 1), ("interleaved", 2), ("eager-1f1b", 1), ("zb-h1", 1))
        for depth in (2, 4)
        for graph in [spread(depth, chunks=chunks)]
    }
    three = [("interleaved", 4), ("eager-1f1b", 4)]
    assert orders == {key: 3 if key in three else 2 for key in orders}
    frozen = spread(4, frozen=True)
    assert make_schedule("nested", frozen, 16, costs(frozen)).in_flight["e0.0"] == 4


def test_a_unit_grows_with_the_lanes():
    """Figure 7: an LLM with cp 2 and an encoder without cp have two lanes a submesh, so units of eight at pp 4."""
    graph = spread(4, width=2)
    graph = replace(graph, stages=(replace(graph.stages[0], lanes=8), *graph.stages[1:]))
    schedule = make_schedule("nested", graph, 32, costs(graph))
    assert schedule.in_flight["e0.0"] == validate(schedule).in_flight["e0.0"] == 2 * 8
    check_order("1f1b", graph, 20)
    check_time("1f1b", graph, 24, encoder=0.7, llm=1.0)


@pytest.mark.parametrize("inner", INNER)
def test_one_unit_less_would_starve_the_llm(inner):
    """With K - 1 units in flight the F of some unit would come behind its first use."""
    graph = spread(3, chunks=2 if inner == "interleaved" else 1)
    schedule = make_schedule("nested", graph, 18, costs(graph), inner=inner)
    ahead = schedule.in_flight["e0.0"]
    place = {op: i for i, op in enumerate(op for op in schedule.ops if op.stage[0] == "l")}
    released = [max(place[Op("B", "llm.0", m)] for m in range(i, i + 3)) for i in range(0, 18, 3)]
    used = [place[Op("F", "llm.0", i)] for i in range(0, 18, 3)]
    assert all(b < f for b, f in zip(released, used[ahead // 3 :], strict=False))
    assert any(b > f for b, f in zip(released, used[ahead // 3 - 1 :], strict=False))


@pytest.mark.parametrize("most", [32, pytest.param(256, marks=pytest.mark.long)])
@pytest.mark.parametrize("inner", INNER)
def test_in_flight_is_flat_in_the_batch(inner, most):
    graph = spread(2, chunks=2 if inner == "interleaved" else 1, generators=1)
    schedules = [make_schedule("nested", graph, m, costs(graph), inner=inner) for m in (8, most)]
    reports = [validate(schedule).in_flight for schedule in schedules]
    assert reports[0] == reports[1]
    assert reports[0]["g0.0"] == 2 and reports[0]["e0.0"] == schedules[0].in_flight["e0.0"] <= 8


@pytest.mark.parametrize("inner", INNER)
def test_a_generator_costs_the_llm_a_unit_of_memory_at_most(inner):
    graph = spread(4, chunks=2 if inner == "interleaved" else 1, generators=1)
    plain = make_schedule(inner, without_lanes(graph), 20, costs(graph))
    nested = make_schedule("nested", graph, 20, costs(graph), inner=inner)
    extra = {name: nested.bound(name) - bound for name, bound in plain.in_flight.items()}
    assert max(extra.values()) <= 4 and min(extra.values()) >= 3


@pytest.mark.long
@pytest.mark.parametrize("inner", INNER)
def test_real_processes_take_the_time_that_was_simulated(inner):
    """Within 5 %, with uneven lanes and moves."""
    graph = spread(2, chunks=2 if inner == "interleaved" else 1, generators=1)
    seconds = Costs.nominal(
        graph, forward={n.name: {"e": 0.014, "g": 0.012, "l": 0.02}[n.name[0]] for n in graph.stages}, move=0.003
    )
    uneven = {("F", "e0.0", False, m): 0.014 * (1 + m % 3) for m in range(6)}
    seconds = replace(seconds, overrides=uneven)
    schedule = make_schedule("nested", graph, 6, seconds, inner=inner)
    seconds = seconds.split_as(schedule.graph)
    simulated = simulate(schedule, seconds).makespan

    def quick(measured: Timeline) -> None:
        assert measured.makespan < 1.05 * simulated

    require_of_a_step(schedule, seconds, quick)


def test_lanes_are_described_and_have_calls():
    graph = spread(2)
    schedule = make_schedule("nested", graph, 6, costs(graph))
    assert "e0.0   ranks 0–1 in 2 lanes, distance 1, in flight ≤ 4, 2 a lane: F0 F1 " in schedule.describe()
    table = dispatch_table(schedule)
    assert (table.stages[0], table.ranks[0]) == ("e0.0", "0–1")
    assert table.rows[0].cells == ("", "local+NC", "p2p"), "one lane is on the ranks of llm.0, the other is not"


def test_a_stage_between_others_cannot_be_spread():
    nodes = [stage("a.0", (0,)), replace(stage("b.0", (0, 1)), lanes=2), stage("c.0", (1,))]
    graph = connect(nodes, [("a.0", "b.0"), ("b.0", "c.0")], "async")
    with pytest.raises(ScheduleError, match=r"'b\.0' lies between 'a\.0' and 'c\.0'.* set b/Layout\.lanes to 1"):
        make_schedule("nested", graph, 2, Costs.nominal(graph))


def test_inner_schedules_are_for_those_put_around_one():
    with pytest.raises(
        ScheduleError, match=r"gpipe has no inner schedule 'zb-h1': use '1f1b', or three-phase or nested"
    ):
        make_schedule("gpipe", chain(2), 2, Costs.nominal(chain(2)), inner="zb-h1")
    with pytest.raises(ScheduleError, match=r"nested around 'gpipe': use one of 1f1b, interleaved, eager-1f1b, zb-h1"):
        make_schedule("nested", chain(2), 2, Costs.nominal(chain(2)), inner="gpipe")
    assert set(INNER) < set(SCHEDULES)
