"""Microbatches in flight of spread modules, counted from live arrays: flat under nested schedules."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import graph_toy
import pytest
import toy
from parity import rescheduled

from mmjax.pipeline.executor import Executor
from mmjax.pipeline.watch import measured_in_flight
from mmjax.schedule.graph import StageGraph, StageNode, connected
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs
from mmjax.schedule.validate import validate

LANES = 2
COUNTS = (8, 32, 128, 256)


def spread() -> StageGraph:
    """An encoder and a generator in two lanes each, over an LLM of two stages that gives a loss too."""
    nodes = [
        StageNode(name="vision.0", module="vision", index=0, ranks=(0, 1), lanes=LANES),
        StageNode(name="llm.0", module="llm", index=0, ranks=(0,)),
        StageNode(name="llm.1", module="llm", index=1, ranks=(1,), loss=True),
        StageNode(name="painter.0", module="painter", index=0, ranks=(0, 1), lanes=LANES, loss=True),
    ]
    return connected(nodes, list(pairwise(node.name for node in nodes)), lambda *_: "async")


@cache
def compiled() -> Executor:
    model = graph_toy.placed(spread())
    return graph_toy.executor(model, model.graph, LANES, "nested")


def in_flight(schedule: str, microbatches: int, inner: str = "1f1b") -> dict[str, int]:
    """Most microbatches in flight by stage in one step, which are those that ``validate`` counts."""
    plain = compiled()
    graph = plain.schedule.graph
    made = make_schedule(schedule, graph, microbatches, Costs.nominal(graph), inner=inner)
    executor = rescheduled(plain, made)
    executor.initialise(toy.SEED)
    with measured_in_flight(executor) as most:
        parts = graph_toy.batch(graph, microbatches)
        executor.step(parts, graph_toy.denominators(graph, parts))
    assert most == validate(made).in_flight
    return dict(most)


@pytest.mark.long
@pytest.mark.parametrize("inner", ["1f1b", "eager-1f1b"])
def test_nested_is_flat_whatever_the_batch(inner: str) -> None:
    found = [in_flight("nested", count, inner) for count in COUNTS]
    assert all(one == found[0] for one in found)
    assert found[0]["painter.0"] <= LANES, "at most one unit"
    assert found[0]["vision.0"] <= 3 * LANES, "at most three units"


@pytest.mark.long
def test_encoders_first_grows_with_the_batch() -> None:
    for count in COUNTS[:3]:
        assert in_flight("encoders-first", count)["vision.0"] == count
