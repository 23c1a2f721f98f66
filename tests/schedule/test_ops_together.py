"""Ops of encoders that take several microbatches of a window together: their order, edges, bounds and refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from stage_graphs import chain, connect, stage

from mmjax.schedule.graph import GraphError, StageGraph
from mmjax.schedule.ops import Op, dependencies
from mmjax.schedule.recurrence import Recurrence
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs, simulate
from mmjax.schedule.validate import ScheduleError, validate


def spanning(microbatches: int, depth: int = 2, *, backward: bool = True, **fields: Any) -> StageGraph:
    """An encoder on all ranks of an LLM of `depth` stages, with so many microbatches an op."""
    vision = replace(stage("vision.0", range(depth), backward=backward), microbatches=microbatches, **fields)
    pairs = [("vision.0", "llm.0"), *pairwise(f"llm.{i}" for i in range(depth))]
    return connect([vision, *chain(depth).stages], pairs, "async")


def microbatches_of(schedule: Any, kind: str, name: str) -> list[int]:
    return [op.microbatch for op in schedule.for_stage(name) if op.kind == kind]


@pytest.mark.parametrize("fields", [{}, {"offload": True}, {"stash": True}, {"backward": False}], ids=str)
@pytest.mark.parametrize("count", [1, 4, 5, 7])
@pytest.mark.parametrize("times", [0, 1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_an_op_runs_once_for_its_microbatches(size: int, times: int, count: int, fields: dict[str, Any]) -> None:
    graph = spanning(size, **fields)
    costs = Costs.nominal(graph, move=0.1)
    schedule = make_schedule("three-phase", graph, count, costs, window=times * size)
    report = validate(schedule)
    firsts = list(range(0, count, size))
    assert microbatches_of(schedule, "F", "vision.0") == firsts
    assert microbatches_of(schedule, "B", "vision.0") == (firsts if graph.stage("vision.0").backward else [])
    assert microbatches_of(schedule, "F", "llm.0") == list(range(count))
    assert report.in_flight["vision.0"] == min(count, times * size or count)
    assert simulate(schedule, costs).in_flight["vision.0"] == report.in_flight["vision.0"]


def test_edges_carry_the_microbatches_of_an_op_at_once() -> None:
    """To the LLM before its first of them, and back after its last; the last op of five has one."""
    graph = spanning(2)
    edge = graph.edges[0].name

    def needed(*op: Any, **fields: Any) -> set[Op]:
        return set(dependencies(graph, 5, Op(*op, **fields)))

    for microbatch, first in enumerate((0, 0, 2, 2, 4)):
        assert Op("unpack", "llm.0", first, edge=edge) in needed("F", "llm.0", microbatch)
    assert needed("pack", "llm.0", 2, edge=edge, backward=True) == {Op("B", "llm.0", 2), Op("B", "llm.0", 3)}
    assert needed("pack", "llm.0", 4, edge=edge, backward=True) == {Op("B", "llm.0", 4)}
    assert Op("B", "vision.0", 4) in needed("reduce", "vision.0")


def test_an_op_longer_than_a_microbatch_takes_its_cost_once() -> None:
    graph = spanning(4)
    costs = Costs.nominal(graph)
    assert simulate(make_schedule("three-phase", graph, 4, costs), costs).makespan == pytest.approx(3 + 5 * 3)


@pytest.mark.parametrize("varying", [["vision.0"], ["llm.1", "vision.0"]], ids=str)
@pytest.mark.parametrize(("size", "count", "window"), [(2, 5, 2), (3, 7, 6), (4, 4, 0)])
def test_the_recurrence_takes_the_costs_of_an_op_s_microbatches(
    size: int, count: int, window: int, varying: list[str]
) -> None:
    graph = spanning(size)
    costs = Costs.nominal(graph, move=0.1)
    schedule = make_schedule("three-phase", graph, count, costs, window=window)
    recurrence = Recurrence(schedule, costs, varying)
    table_CM = np.random.default_rng(0).uniform(0.1, 5, (len(recurrence.keys), count))
    overrides = {}
    for costs_M, (kind, name) in zip(table_CM, recurrence.keys, strict=True):
        together = graph.stage(name).microbatches
        sums = {(kind, name, False, m): float(costs_M[m : m + together].sum()) for m in range(0, count, together)}
        overrides |= sums
    timeline = simulate(schedule, replace(costs, overrides=overrides))
    assert recurrence.makespans(table_CM[..., None])[0] == pytest.approx(timeline.makespan)
    ends = recurrence.ends(table_CM[..., None])[1:, 0]
    assert ends.tolist() == pytest.approx([timeline.span(op)[1] for op in recurrence.ops])


def test_what_has_no_place_is_refused() -> None:
    costs = Costs.nominal(spanning(2))
    with pytest.raises(ScheduleError, match=r"1f1b runs 'vision\.0' microbatch by microbatch: use three-phase"):
        make_schedule("1f1b", spanning(2), 4, costs)
    with pytest.raises(ScheduleError, match=r"a window of 3 cuts the 2 microbatches of an op of 'vision\.0'"):
        make_schedule("three-phase", spanning(2), 4, costs, window=3)
    apart = connect([replace(stage("vision.0", [2]), microbatches=2), *chain(2).stages],
                    [("vision.0", "llm.0"), ("llm.0", "llm.1")], "async")  # fmt: skip
    with pytest.raises(ScheduleError, match=r"'vision\.0' is no encoder with phases of its own: set microbatches=1"):
        make_schedule("three-phase", apart, 4, costs)
    with pytest.raises(GraphError, match="has 2 microbatches an op and 2 lanes"):
        spanning(2, lanes=2)
    ends = [stage("vision.0", [0]), replace(stage("llm.0", [1]), microbatches=2)]
    with pytest.raises(GraphError, match="1 microbatches an op to 2: give the source as many"):
        connect(ends, [("vision.0", "llm.0")], "async")
