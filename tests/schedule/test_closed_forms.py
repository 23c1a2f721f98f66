"""Idle seconds of even pipelines against their closed forms, and in-flight peaks against the promises of schedules."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_graphs import chain, connect, spread, stage, steady

from mmjax.schedule import closed_forms as forms
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import Schedule
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs, simulate
from mmjax.schedule.validate import validate

depths, microbatches_ = st.integers(2, 6), st.integers(1, 12)
fewer = settings(steady, max_examples=40)
seconds = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0])


def chunked(depth: int, chunks: int) -> StageGraph:
    """An LLM whose stages go round `depth` ranks, `chunks` times."""
    names = [f"llm.{i}" for i in range(depth * chunks)]
    return connect([stage(n, (i % depth,)) for i, n in enumerate(names)], list(pairwise(names)), "async")


def with_encoder(depth: int, ranks) -> StageGraph:
    """An encoder on `ranks` before an LLM of `depth` stages, a rank each."""
    pairs = [("vision.0", "llm.0"), *pairwise(f"llm.{i}" for i in range(depth))]
    return connect([stage("vision.0", ranks), *chain(depth).stages], pairs, "async")


def check(schedule: Schedule, costs: Costs, idle: float, ranks=None) -> None:
    """Every rank is idle for `idle` seconds; every stage has as many microbatches in flight as is promised."""
    report, timeline = validate(schedule), simulate(schedule, costs)
    for rank in ranks or schedule.graph.ranks:
        assert timeline.bubbles[rank] * timeline.makespan == pytest.approx(idle, abs=1e-9), f"rank {rank}"
    promised = {node.name: schedule.bound(node.name) for node in schedule.graph.stages}
    assert timeline.in_flight == report.in_flight == promised


@fewer
@given(st.sampled_from(["gpipe", "1f1b", "eager-1f1b"]), depths, microbatches_, seconds, seconds)
def test_gpipe_and_1f1b(name, depth, microbatches, forward, ratio):
    costs = Costs.nominal(chain(depth), forward=forward, backward=ratio)
    schedule = make_schedule(name, chain(depth), microbatches, costs)
    check(schedule, costs, forms.idle_1f1b(depth, forward=forward, backward=forward * ratio))


@fewer
@given(depths, microbatches_, st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([0.1, 0.5, 1.0]))
def test_eager_1f1b_hides_moves(depth, microbatches, ratio, move):
    costs = Costs.nominal(chain(depth), backward=ratio, move=move)
    eager = make_schedule("eager-1f1b", chain(depth), microbatches, costs)
    check(eager, costs, forms.idle_eager(depth, forward=1.0, backward=ratio, move=move))
    plain = simulate(make_schedule("1f1b", chain(depth), microbatches, costs), costs).makespan
    assert simulate(eager, costs).makespan <= plain + 1e-9
    if microbatches > depth:
        assert simulate(eager, costs).makespan < plain


@fewer
@given(depths, microbatches_, st.integers(1, 4), seconds, seconds)
def test_interleaved(depth, microbatches, chunks, forward, ratio):
    graph = chunked(depth, chunks)
    costs = Costs.nominal(graph, forward=forward / chunks, backward=ratio)
    idle = forms.idle_interleaved(depth, microbatches, chunks=chunks, forward=forward, backward=forward * ratio)
    check(make_schedule("interleaved", graph, microbatches, costs), costs, idle)


@fewer
@given(depths, microbatches_, seconds, seconds, seconds)
def test_zb_h1(depth, microbatches, forward, backward, shorter):
    graph, weight = chain(depth), min(shorter, backward)
    names = [node.name for node in graph.stages]
    taken = {("F", n, False): forward for n in names} | {("B", n, False): backward for n in names}
    costs = Costs(seconds=taken | {("W", n, False): weight for n in names})
    schedule = make_schedule("zb-h1", graph, microbatches, costs)
    check(schedule, costs, forms.idle_zb_h1(depth, microbatches, forward=forward, backward=backward, weight=weight))


@fewer
@given(depths, microbatches_, st.integers(0, 12), seconds, seconds)
def test_three_phase(depth, microbatches, window, forward, ratio):
    graph = with_encoder(depth, range(depth))
    costs = Costs.nominal(graph, forward=forward, backward=ratio)
    schedule = make_schedule("three-phase", graph, microbatches, costs, window=window)
    idle = forms.idle_three_phase(depth, microbatches, window=window, forward=forward, backward=forward * ratio)
    check(schedule, costs, idle)


@fewer
@given(depths, microbatches_, seconds, seconds)
def test_encoders_first(depth, microbatches, forward, ratio):
    graph = with_encoder(depth, (9,))
    costs = Costs.nominal(
        graph, forward=dict.fromkeys((n.name for n in graph.stages), 1.0) | {"vision.0": forward}, backward=ratio
    )
    schedule = make_schedule("encoders-first", graph, microbatches, costs)
    idle = forms.idle_encoders_first(
        depth, microbatches, forward=1.0, backward=ratio, encoder_forward=forward, encoder_backward=forward * ratio
    )
    check(schedule, costs, idle, ranks=range(depth))


@fewer
@given(depths, st.integers(1, 3), st.booleans(), seconds, seconds, seconds)
def test_encoders_in_lanes(depth, units, frozen, forward, ratio, encoder):
    """If all encoders are first, they leave no rank idle; nested, they fill some of the LLM's idle time."""
    graph, idle = spread(depth, frozen=frozen), forms.idle_1f1b(depth, forward=forward, backward=forward * ratio)
    each = {node.name: encoder if node.lanes > 1 else forward for node in graph.stages}
    costs = Costs.nominal(graph, forward=each, backward=ratio)
    check(make_schedule("encoders-first", graph, units * depth, costs), costs, idle)
    nested = simulate(make_schedule("nested", graph, units * depth, costs), costs)
    assert max(nested.bubbles.values()) * nested.makespan <= idle + 1e-9
