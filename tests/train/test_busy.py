"""Busy times from the ends of ops, by a clock of the test; and which ranks are named as slow."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mmjax.pipeline.ends import OpTimes, busy_seconds
from mmjax.schedule.ops import Op
from mmjax.train.busy import IN_A_ROW, SILENCE, BusyTimes, SlowRanks, imbalance

MOVE = Op("move", "llm.0", 0, "vision.0->llm.0")
SEES, READS, BACK = Op("F", "vision.0", 0), Op("F", "llm.0", 0), Op("B", "llm.0", 0)
DEPENDENCIES = {SEES: (), MOVE: (SEES,), READS: (MOVE,), BACK: (READS,)}


def times(step: int = 1) -> OpTimes:
    """Vision on ranks 2 and 3, the LLM on 0 and 1, which waits for it; the move is no program."""
    return OpTimes(
        step,
        [SEES, READS, BACK],
        {SEES: 1.0, READS: 1.5, BACK: 1.75},
        {SEES: {2: 3.0, 3: 5.0}, READS: {0: 6.0, 1: 6.5}, BACK: {0: 8.0, 1: 8.5}},
    )


def module(op: Op) -> str:
    return op.stage.partition(".")[0]


def test_busy_seconds_are_between_what_an_op_waits_for_and_its_end() -> None:
    busy = busy_seconds(times(), DEPENDENCIES.__getitem__, module)
    # The LLM's forward awaits the slower of vision's ranks; its backward awaits the slower rank's forward.
    assert busy == {"vision": {2: 2.0, 3: 4.0}, "llm": {0: 1.0 + 1.5, 1: 1.5 + 2.0}}
    assert imbalance(busy) == pytest.approx(4.0 / 3.0)
    assert imbalance({}) is None


def test_a_rank_begins_an_op_when_the_one_before_has_ended() -> None:
    """The ops read nothing of each other, and were dispatched at once."""
    later = Op("F", "vision.0", 1)
    found = OpTimes(1, [SEES, later], {SEES: 1.0, later: 1.0}, {SEES: {0: 2.0, 1: 3.0}, later: {0: 4.0, 1: 3.5}})
    assert busy_seconds(found, lambda _: (), module) == {"vision": {0: 1.0 + 2.0, 1: 2.0 + 0.5}}


def test_a_rank_that_works_on_two_modules_is_busy_with_both() -> None:
    assert imbalance({"vision": {0: 1.0, 1: 1.0}, "llm": {0: 2.0}}) == pytest.approx(3 / 2)


def even(**changes: float) -> dict[str, dict[int, float]]:
    return {"vision": {rank: changes.get(f"vision{rank}", 1.0) for rank in (4, 5, 6)}, "llm": {0: 5.0, 1: 5.0}}


def test_a_slow_rank_is_named_once_in_a_while() -> None:
    slow = SlowRanks()
    said = [slow(even(vision5=1.8)) for _ in range(SILENCE + IN_A_ROW)]
    line = ["rank 5 (vision) takes 1.8 × the median of its module"]
    assert [step for step, lines in enumerate(said, 1) if lines] == [IN_A_ROW, IN_A_ROW + SILENCE]
    assert said[IN_A_ROW - 1] == said[-1] == line


@pytest.mark.parametrize(
    "steps",
    [
        [even(vision5=1.8), even(), even(vision5=1.8)] * 3,  # now and then
        [even(vision5=1.4)] * 9,  # a little
        [even(vision5=1.8, vision4=1.8, vision6=1.8)] * 9,  # all alike
        [{"vision": {4: 0.1, 5: 0.3}, "llm": {0: 9.0}}] * 9,  # much, of nothing
        [{"vision": {4: 0.0}, "llm": {0: 0.0, 1: 0.0}}] * 9,
    ],
)
def test_who_is_not_named(steps: list[dict[str, dict[int, float]]]) -> None:
    slow = SlowRanks()
    assert not any(slow(busy) for busy in steps)


class Notes:
    def __init__(self, shared: dict[int, str], process: int):
        self.shared, self.process = shared, process

    def pin(self, note: str) -> None:
        self.shared[self.process] = note

    def read(self) -> dict[int, str]:
        return dict(self.shared)


def two_processes(shared: dict[int, str], lines: list[str]) -> list[BusyTimes]:
    """Two processes that have measured nothing: vision is on ranks of the first, the LLM on those of the second."""
    stages = [SimpleNamespace(module="vision"), SimpleNamespace(module="llm")]
    graph = SimpleNamespace(stage=lambda name: stages[name == "llm.0"], stages=stages)
    schedule: Any = SimpleNamespace(graph=graph, dependencies=DEPENDENCIES.__getitem__)
    return [BusyTimes(schedule, Notes(shared, process), 2, lines.append, names_slow=True) for process in range(2)]


def test_a_process_that_is_steps_behind_joins_them_all() -> None:
    """A fast process writes several steps before another reads its notes."""
    lines = list[str]()
    first, second = two_processes({}, lines)
    for step in (1, 2, 3):
        first.add(OpTimes(step, [SEES], {SEES: 0.0}, {SEES: {2: 2.0, 3: 9.0}}))
    for step in (1, 2, 3):
        assert lines == []
        second.add(OpTimes(step, [READS], {READS: 0.0}, {READS: {0: 3.0}}))
    assert lines == ["step 3: rank 3 (vision) takes 4.5 × the median of its module"]


def test_processes_join_their_times() -> None:
    """Whoever is first finds the other's times a measured step later; nobody waits."""
    shared, lines = dict[int, str](), list[str]()
    first, second = two_processes(shared, lines)
    assert first.columns() == {"imbalance": None, "vision/busy_s": None, "llm/busy_s": None}
    own = OpTimes(1, [SEES], {SEES: 0.0}, {SEES: {2: 2.0, 3: 9.0}})
    other = OpTimes(1, [READS], {READS: 0.0}, {READS: {0: 3.0}})
    for step in (1, 2, 3, 4):
        own.step = other.step = step
        first.add(own)
        assert first.columns()["imbalance"] is None or step > 1
        second.add(other)
    assert (
        first.columns()
        == second.columns()
        == {
            "imbalance": pytest.approx(9 / (14 / 3)),
            "vision/busy_s": 9.0,
            "llm/busy_s": 3.0,
        }
    )
    assert [note["step"] for note in json.loads(shared[0])] == [1, 2, 3, 4]
    assert "step 3: rank 3 (vision) takes 4.5 × the median of its module" in lines
