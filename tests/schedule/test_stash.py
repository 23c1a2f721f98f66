"""Residuals leave the devices between F and B: bytes on the devices, times of copies, and their cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from mmjax.schedule.graph import StageGraph, StageNode, connected
from mmjax.schedule.ops import (
    MOST_UNSTASHED,
    STASH_COPIES,
    Op,
    Schedule,
    dependencies,
    occupied_ranks,
    occupied_resources,
    participating_ranks,
)
from mmjax.schedule.schedules import INNER, SCHEDULES, STASHING, make_schedule
from mmjax.schedule.simulate import Costs, simulate
from mmjax.schedule.validate import ScheduleError, validate

WAYS = [("nested", inner) for inner in INNER] + [("encoders-first", "1f1b"), ("three-phase", "1f1b")]


def spread(depth: int, *, stash: bool = True, chunks: int = 1, lanes: bool = True, backward: bool = True) -> StageGraph:
    """An encoder on all ranks of an LLM's pipeline, in as many lanes or in one."""
    width, lanes_of_encoder = chunks * depth, depth if lanes else 1
    eye = StageNode(
        name="eye.0",
        module="eye",
        index=0,
        ranks=tuple(range(depth)),
        lanes=lanes_of_encoder,
        stash=stash,
        trainable=backward,
    )
    llm = [StageNode(name=f"llm.{i}", module="llm", index=i, ranks=(i % depth,)) for i in range(width)]
    return connected([eye, *llm], list(pairwise(node.name for node in (eye, *llm))), lambda *_: "async")


def costs_of(graph: StageGraph, copy: float) -> Costs:
    """Nominal costs, and seconds of a copy of a microbatch's residuals; an F takes 1."""
    copies = {(kind, "eye.0", False): copy for kind in STASH_COPIES}
    return Costs(seconds={**Costs.nominal(graph).seconds, **copies})


def compute(schedule: Schedule, rank: int) -> list[Op]:
    return [op for op in schedule.for_rank(rank) if op.kind in ("F", "B", "W")]


def own_order(schedule: Schedule, stage: str) -> list[Op]:
    return [op for op in schedule.for_stage(stage) if op.kind in ("F", "B")]


@pytest.mark.parametrize("depth", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "inner"), WAYS, ids=lambda value: value)
def test_few_microbatches_are_there_whatever_the_batch_and_the_llm_does_not_notice(
    name: str, inner: str, depth: int
) -> None:
    chunks = 2 if inner == "interleaved" else 1
    graph, plain = (spread(depth, chunks=chunks, stash=stash) for stash in (True, False))
    for microbatches, copy in ((depth, 0.0), (4 * depth, 0.7), (5 * depth + (chunks == 1), 4.0)):
        costs = costs_of(graph, copy)
        away = make_schedule(name, graph, microbatches, costs, inner=inner)
        home = make_schedule(name, plain, microbatches, costs, inner=inner)
        report = validate(away, {"eye.0": 1})
        assert report.residual_bytes["eye.0"] <= MOST_UNSTASHED
        assert report.in_flight == validate(home).in_flight
        if copy < 1:  # so short that it costs nothing
            assert simulate(away, costs).makespan == simulate(home, costs).makespan
        for node in (node for node in graph.stages if node.module == "llm"):
            assert own_order(away, node.name) == own_order(home, node.name)


@pytest.mark.parametrize("name", ["nested", "encoders-first"])
def test_the_way_back_is_beside_other_ops_and_no_earlier_than_it_needs(name: str) -> None:
    """Behind the first units it begins beside the op before B; with longer copies as much earlier as they take."""
    graph = spread(2)
    for copy in (0.5, 2.5):
        costs = costs_of(graph, copy)
        timeline = simulate(make_schedule(name, graph, 16, costs), costs)
        for microbatch in range(16):
            back, need = (timeline.span(Op(kind, "eye.0", microbatch)) for kind in ("unstash", "B"))
            ranks = participating_ranks(graph, Op("B", "eye.0", microbatch))
            before = [end for op, start, end in timeline.for_rank(ranks[0]) if start < need[0] and op.kind in "FBW"]
            assert back[0] < before[-1] <= need[0], "an op runs beside it"
            encoder_ops = [op for op in compute(timeline.schedule, ranks[0]) if op.stage == "eye.0"]
            guard = encoder_ops[max(0, encoder_ops.index(Op("B", "eye.0", microbatch)) - 2)]
            assert back[0] >= timeline.span(guard)[1]
            if name == "nested" and microbatch >= 2:
                assert back[1] <= need[0], "B need not wait for it"
                assert need[0] - back[0] <= copy + 4, "no whole unit earlier"


def test_a_way_back_waits_until_what_was_there_has_left() -> None:
    """Of a lane's last two forwards, for its first two backwards: devices may copy both ways at once."""
    graph = spread(2)
    schedule = make_schedule("encoders-first", graph, 8, costs_of(graph, 0.5))
    for m in range(4):
        assert Op("stash", "eye.0", m + 4) in schedule.awaits(Op("unstash", "eye.0", m))
    later = (awaited for m in range(4, 8) for awaited in schedule.awaits(Op("unstash", "eye.0", m)))
    assert not any(awaited.kind == "stash" for awaited in later), "a B has made room"


def test_an_encoder_without_lanes_has_one_microbatch_of_a_window_there() -> None:
    graph = spread(2, lanes=False)
    costs = costs_of(graph, 0.5)
    schedule = make_schedule("three-phase", graph, 8, costs, window=4)
    report = validate(schedule, {"eye.0": 1})
    assert (report.residual_bytes["eye.0"], report.in_flight["eye.0"]) == (1, 4)
    assert occupied_resources(graph, Op("stash", "eye.0", 3)) == (("copy", 0, False), ("copy", 1, False))


def test_copies_are_ops_of_a_lane_that_leave_its_ranks_free() -> None:
    graph = spread(2)
    for kind in STASH_COPIES:
        assert (
            participating_ranks(graph, Op(kind, "eye.0", 3)) == (1,)
            and occupied_ranks(graph, Op(kind, "eye.0", 3)) == ()
        )
        assert occupied_resources(graph, Op(kind, "eye.0", 3)) == (("copy", 1, False),)
    away, back = (Op(kind, "eye.0", 3) for kind in STASH_COPIES)
    assert dependencies(graph, 4, away) == (Op("F", "eye.0", 3),) and dependencies(graph, 4, back) == (away,)
    assert back in dependencies(graph, 4, Op("B", "eye.0", 3))
    assert Op("F", "eye.0", 3) not in dependencies(graph, 4, Op("B", "eye.0", 3))


def test_a_stage_without_backward_keeps_nothing_to_stash() -> None:
    graph = spread(2, backward=False)
    schedule = make_schedule("nested", graph, 6, costs_of(graph, 1.0))
    validate(schedule)
    assert not any(op.kind in STASH_COPIES for op in schedule.ops)
    assert not any(node.stash for node in spread(2).forward_only().stages)


def test_too_many_there_and_a_b_without_its_way_back_are_refused() -> None:
    graph = spread(2)
    schedule = make_schedule("encoders-first", graph, 8, costs_of(graph, 0.0))
    late = [op for op in schedule.ops if op.kind != "stash"]
    at = next(i for i, op in enumerate(late) if op.kind == "unstash")
    late[at:at] = [op for op in schedule.ops if op.kind == "stash"]
    with pytest.raises(
        ScheduleError, match=r"microbatch 4 leaves residuals of 3 microbatches on the devices of .eye.0."
    ):
        validate(replace(schedule, ops=tuple(late), waits={}))
    back = Op("unstash", "eye.0", 0)
    early = [op for op in schedule.ops if op != back]
    with pytest.raises(ScheduleError, match=r"unstash eye\.0 microbatch 0 is missing"):
        validate(replace(schedule, ops=tuple(early)))
    early.insert(early.index(Op("B", "eye.0", 0)) + 1, back)
    with pytest.raises(ScheduleError, match=r"B eye.0 microbatch 0 .* precedes unstash eye.0 microbatch 0"):
        validate(replace(schedule, ops=tuple(early)))


def test_where_nothing_waits_it_is_refused() -> None:
    graph = spread(2, lanes=False)
    assert set(STASHING) == {"three-phase", "encoders-first", "nested"}
    for name in (name for name in SCHEDULES if name not in STASHING):
        with pytest.raises(ScheduleError, match=f"{name} leaves no time to stash 'eye.0': use three-phase"):
            make_schedule(name, graph, 2, costs_of(graph, 0.0))
    llm = replace(graph, stages=tuple(replace(node, stash=node.module == "llm") for node in graph.stages))
    for name in STASHING:
        with pytest.raises(ScheduleError, match=r"'llm.0' is no encoder .*: set stash=False"):
            make_schedule(name, llm, 2, costs_of(graph, 0.0))
