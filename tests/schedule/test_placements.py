"""Placements: ranks of all stages, sums of layers and work, and even cuts."""

from __future__ import annotations

from collections import defaultdict

import pytest

from mmjax.schedule.ops import Op
from mmjax.schedule.placements import (
    Placement,
    TimedModule,
    apart,
    colocated_stages,
    in_lanes,
    in_pipeline,
    replicated,
    spanning,
)
from mmjax.schedule.schedules import LANED, SCHEDULES, make_schedule
from mmjax.schedule.simulate import simulate
from mmjax.schedule.validate import validate

VISION, AUDIO, LLM = (TimedModule(name=n, layers=k, seconds=0.5) for n, k in (("vision", 4), ("audio", 2), ("llm", 6)))
ENCODERS = (VISION, AUDIO)
FROZEN = tuple(TimedModule(name=p.name, layers=p.layers, seconds=p.seconds, trainable=False) for p in ENCODERS)


def _all(encoders=ENCODERS) -> dict[str, Placement]:
    return {
        "apart": apart(encoders, LLM, {"vision": 2, "audio": 1, "llm": 3}),
        "chunks": apart(encoders, LLM, {"vision": 2, "audio": 1, "llm": 3}, chunks=2),
        "spanning": spanning(encoders, LLM, 6),
        "in_pipeline": in_pipeline(encoders, LLM, 6),
        "colocated": colocated_stages(encoders, LLM, 6, 2),
        "replicated": replicated(encoders, LLM, 6),
    }


def _work(placement: Placement) -> dict[str, float]:
    """Layers of each module that all ranks together run for a microbatch."""
    work: dict[str, float] = defaultdict(float)
    for stage, load in placement.loads.items():
        for part, layers in load.items():
            work[part] += layers * len(placement.graph.stage(stage).ranks)
    return work


@pytest.mark.parametrize("encoders", [ENCODERS, FROZEN], ids=["trained", "frozen"])
def test_every_way_has_all_layers_on_six_ranks_and_runs_every_schedule(encoders):
    for name, placement in _all(encoders).items():
        times = 6 if name == "replicated" else 1
        assert _work(placement) == pytest.approx({"vision": 4 * times, "audio": 2 * times, "llm": 6})
        assert placement.graph.ranks == tuple(range(6))
        costs = placement.costs(4, move=0.1, once=0.2)
        for schedule_name in SCHEDULES:
            schedule = make_schedule(schedule_name, placement.graph, 4, costs)
            validate(schedule)
            timeline = simulate(schedule, costs)
            assert timeline.makespan > 4 * (12 if name != "replicated" else 42) * 0.5 / 6, (name, schedule_name)


def test_stages_and_edges():
    stages = {name: [f"{n.name}@{n.ranks[0]}" for n in p.graph.stages] for name, p in _all().items()}
    assert stages["apart"] == ["vision.0@0", "vision.1@1", "audio.0@2", "llm.0@3", "llm.1@4", "llm.2@5"]
    assert stages["chunks"][3:] == [f"llm.{k}@{3 + k % 3}" for k in range(6)]
    assert stages["colocated"] == ["vision+audio.0@0", "vision+audio.1@1", *(f"llm.{k}@{2 + k}" for k in range(4))]
    assert len(stages["replicated"]) == 18 and _all()["spanning"].graph.stage("vision.0").ranks == tuple(range(6))
    edges = {edge.name: edge.kind for edge in _all()["replicated"].graph.edges}
    assert edges["audio.3->llm.3"] == "local" and edges["llm.2->llm.3"] == "async" and len(edges) == 17
    joined = [edge.src for edge in _all()["apart"].graph.in_edges("llm.0")]
    assert joined == ["vision.1", "audio.0"]


def test_costs_follow_layers_ranks_what_is_trained_and_the_microbatch():
    factors = (1.0, 3.0)
    vision = TimedModule(name="vision", layers=4, seconds=0.5, factors=factors)
    still = TimedModule(name="llm", layers=6, seconds=0.5, trainable=False)
    placement = colocated_stages((vision, AUDIO), still, 5, 2)
    costs = placement.costs(2)
    of = lambda kind, stage, m: costs.of(Op(kind, stage, m))  # noqa: E731
    assert of("F", "vision+audio.1", 0) == 2 * 0.5 + 0.5 and of("B", "vision+audio.1", 0) == 3.0
    assert of("F", "vision+audio.1", 1) == 2 * 0.5 * 3 + 0.5
    assert of("F", "llm.2", 1) == of("B", "llm.2", 1) == 1.0  # passes gradients on
    node = placement.graph.stage("llm.2")
    assert node.backward and not node.trainable
    assert spanning(ENCODERS, LLM, 4).costs(1).of(Op("F", "vision.0", 0)) == 0.5
    frozen = spanning(FROZEN, LLM, 4).graph
    assert not frozen.stage("vision.0").backward and not frozen.edge("vision.0->llm.0").gradient


def test_what_is_frozen_counts_for_its_forward_alone():
    """Six frozen layers and three that are trained: four ranks have the former on one and a half."""
    llm = TimedModule(name="llm", layers=6, seconds=1.0)
    placement = in_pipeline((TimedModule(name="vision", layers=6, seconds=1.0, trainable=False),), llm, 4)
    assert {name: dict(load) for name, load in placement.loads.items()} == {
        "vision.0": {"vision": 6.0}, "llm.0": {"llm": 2.0}, "llm.1": {"llm": 2.0}, "llm.2": {"llm": 2.0},
    }  # fmt: skip
    shared = in_pipeline((TimedModule(name="vision", layers=1, seconds=1.0),), llm, 3)
    assert shared.graph.stage("vision.0").ranks == shared.graph.stage("llm.0").ranks == (0,)
    assert shared.graph.edge("vision.0->llm.0").kind == "local"


PAINTER = TimedModule(name="painter", layers=4, seconds=0.5)


def test_lanes_have_a_microbatch_each_on_the_ranks_of_the_llm():
    placement = in_lanes((VISION,), LLM, 3, chunks=2, generators=(PAINTER,))
    graph = placement.graph
    assert [f"{n.name}@{n.ranks_of(4)}" for n in graph.stages] == [
        "vision.0@(1,)", *(f"llm.{k}@({k % 3},)" for k in range(6)), "painter.0@(1,)"]  # fmt: skip
    assert [node.lanes for node in graph.stages] == [3, 1, 1, 1, 1, 1, 1, 3]
    joined = [(edge.src, edge.dst) for edge in graph.edges if "llm.1" not in edge.name]
    assert joined[0] == ("vision.0", "llm.0") and joined[-1] == ("llm.5", "painter.0")
    costs = placement.costs(6)
    assert costs.of(Op("F", "vision.0", 5)) == 4 * 0.5 and costs.of(Op("B", "painter.0", 0)) == 2 * 4 * 0.5
    laned = in_lanes((VISION,), LLM, 3, generators=(PAINTER,))
    assert laned.work(6) == dict.fromkeys(range(3), 6 * (4 + 6 + 4) * 0.5 * 3 / 3)
    for schedule in LANED:
        timed = make_schedule(schedule, laned.graph, 6, laned.costs(6))
        validate(timed)
        assert simulate(timed, laned.costs(6)).makespan >= laned.work(6)[0], schedule


def test_work_is_the_sum_of_costs():
    vision = TimedModule(name="vision", layers=4, seconds=0.5, factors=(1.0, 3.0, 0.5, 2.0), backward=2.5)
    for placement in (in_lanes((vision,), LLM, 3), replicated((vision, AUDIO), LLM, 2), in_pipeline((vision,), LLM, 4)):
        costs, graph = placement.costs(4, split=True), placement.graph
        for rank, seconds in placement.work(4).items():
            ops = [Op(k, n.name, m) for n in graph.stages for m in range(4) if rank in n.ranks_of(m) for k in "FBW"]
            assert sum(costs.of(op) for op in ops) == pytest.approx(seconds)


def test_generators_are_behind_the_llm():
    separate = apart((VISION,), LLM, {"vision": 1, "llm": 2, "painter": 2}, chunks=2, generators=(PAINTER,))
    assert [f"{n.name}@{n.ranks[0]}" for n in separate.graph.stages] == [
        "vision.0@0", "llm.0@1", "llm.1@2", "llm.2@1", "llm.3@2", "painter.0@3", "painter.1@4"]  # fmt: skip
    assert [edge.src for edge in separate.graph.in_edges("painter.0")] == ["llm.3"]
    row = in_pipeline((VISION,), LLM, 7, generators=(PAINTER,))
    assert [dict(load) for load in row.loads.values()] == [{"vision": 2}] * 2 + [{"llm": 2}] * 3 + [{"painter": 2}] * 2
    assert [edge.src for edge in row.graph.in_edges("painter.0")] == ["llm.2"]
    frozen = TimedModule(name="painter", layers=4, seconds=0.5, trainable=False)
    behind = in_lanes((VISION,), LLM, 2, generators=(frozen,))
    assert behind.costs(1).of(Op("B", "painter.0", 0)) == 4 * 0.5, "passes gradients on"


def test_a_split_backward_takes_as_long_as_a_whole_one():
    vision = TimedModule(name="vision", layers=4, seconds=0.5, backward=3.5, weights=1.0)
    still = TimedModule(name="llm", layers=6, seconds=0.5, trainable=False)
    placement = in_lanes((vision,), still, 2, generators=(PAINTER,))
    unsplit, split = placement.costs(1), placement.costs(1, split=True)
    of = lambda costs, kind, stage: costs.of(Op(kind, stage, 0))  # noqa: E731
    assert of(unsplit, "B", "vision.0") == 3.5 * 2.0
    assert (of(split, "B", "vision.0"), of(split, "W", "vision.0")) == (2.5 * 2.0, 2.0)
    assert of(split, "B", "painter.0") == of(split, "W", "painter.0") == 2.0
    assert of(split, "B", "llm.0") == of(unsplit, "B", "llm.0") and ("W", "llm.0", False) not in split.seconds


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("trainable", [True, False])
def test_copies_that_run_together_take_as_long_as_separate_ones_if_all_encoders_are_first(ranks, trainable):
    """`Layout.copies` has one op for all copies; in 1F1B the LLM's stages wait for each other at each of them."""
    encoder = TimedModule(name="vision", layers=2, seconds=0.25, trainable=trainable)
    together = spanning([TimedModule(name="vision", layers=2 * ranks, seconds=0.25, trainable=trainable)], LLM, ranks)
    assert together.loads["vision.0"] == {"vision": 2}

    def seconds(placement: Placement, name: str) -> float:
        costs = placement.costs(12)
        return simulate(make_schedule(name, placement.graph, 12, costs), costs).makespan

    separate = seconds(replicated([encoder], LLM, ranks), "1f1b")
    assert seconds(together, "encoders-first") == pytest.approx(separate)
    assert seconds(together, "1f1b") > 1.1 * separate
