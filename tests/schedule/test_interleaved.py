"""Interleaved 1F1B: groups, orders, and the modules before and behind it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from stage_graphs import chain, connect, stage

from mmjax.schedule.graph import StageGraph
from mmjax.schedule.interleaved import chunked_modules, interleaved
from mmjax.schedule.ops import Schedule
from mmjax.schedule.schedules import one_f_one_b
from mmjax.schedule.simulate import Costs, simulate
from mmjax.schedule.validate import ScheduleError, validate


def _chunks(depth: int, chunks: int) -> StageGraph:
    names = [f"llm.{i}" for i in range(depth * chunks)]
    return connect([stage(name, (i % depth,)) for i, name in enumerate(names)], list(pairwise(names)), "async")


def _of_rank(schedule: Schedule, rank: int) -> str:
    """F and B of a rank in order, with the chunk: "F0" of chunk 1 is "f0", of chunk 2 "f0'"."""
    depth = len(schedule.graph.ranks)
    ops = [op for op in schedule.for_rank(rank) if op.kind in ("F", "B")]
    return " ".join(f"{op.kind}{schedule.graph.stage(op.stage).index // depth}.{op.microbatch}" for op in ops)


def test_interleaved_takes_microbatches_in_groups_through_the_chunks():
    graph = _chunks(2, 2)
    schedule = interleaved(graph, 4, Costs.nominal(graph))
    first = "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3"
    last = "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3"
    assert [_of_rank(schedule, rank) for rank in (0, 1)] == [first, last]


def test_interleaved_groups_are_never_smaller_than_the_pipeline_is_deep():
    (module,) = chunked_modules(_chunks(4, 2))
    assert [module.groups(m) for m in (1, 4, 7, 8, 9, 11, 12)] == [(1,), (4,), (7,), (4, 4), (5, 4), (6, 5), (4, 4, 4)]
    assert [node.name for node in module.stages] == [f"llm.{i}" for i in range(8)] and module.depth == 4
    assert chunked_modules(chain(4)) == ()


def test_an_encoder_keeps_up_with_the_chunks_behind_it():
    """It has one microbatch more in flight than the LLM's first chunk, and only the LLM's depth leaves a bubble."""
    graph = _chunks(2, 2)
    nodes = [stage("vision.0", (7,)), *graph.stages]
    graph = connect(nodes, [("vision.0", "llm.0"), *((e.src, e.dst) for e in graph.edges)], "async")
    schedule = interleaved(graph, 8, Costs.nominal(graph))
    assert schedule.in_flight["vision.0"] == schedule.in_flight["llm.0"] + 1
    # Two chunks of 3 a microbatch, one chunk's way there and back, and the encoder before and behind them.
    assert simulate(schedule, Costs.nominal(graph)).makespan == 8 * 6 + 3 + 3


def test_modules_whose_chunks_feed_each_other_in_a_circle_are_refused():
    names = ["a.0", "b.0", "a.1", "b.1"]
    graph = connect([stage(name, (0,)) for name in names], list(pairwise(names)), "async")
    with pytest.raises(ScheduleError, match=r"interleaved: 'b.0' feeds 'a.1', which leads back to its module"):
        interleaved(graph, 3, Costs.nominal(graph))
    assert validate(one_f_one_b(graph, 3, Costs.nominal(graph)))
