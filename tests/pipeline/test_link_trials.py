"""Trials before the first step: all that it sends is tried, nothing is changed, and what is slow or down is named."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import toy
from test_toy_steps import APART, GROUPS, GROUPS_SIDE_BY_SIDE

from mmjax.pipeline.compile import compile_all
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.link_trials import LinkTrial, link_trials, programs_of
from mmjax.pipeline.straight import StraightExecutor
from mmjax.train.warm_up import WarmUp, WarmUpError, warm_up

pytestmark = pytest.mark.long

BOTH = ("forward", "backward")


@pytest.fixture(scope="module")
def executor() -> toy.Run:
    """The eye on ranks 0-7, the ear on 0-3, the LLM's stages on 0-3 and 4-7; dp and tp, a tie, optimizer instances."""
    model = toy.placed(GROUPS, toy.optimizers(decay=0.1))
    result = toy.executor(model, 2)
    compile_all(programs_of(link_trials(result)))
    return result


def run(executor: toy.Run, trials: tuple[LinkTrial, ...] = (), seconds: float = 60.0) -> WarmUp:
    return warm_up(trials or link_trials(executor), executor.placed.world, seconds)


def test_everything_that_a_step_sends_is_tried(executor: toy.Run) -> None:
    found = {link.name: link for link in run(executor).links}
    edges = ("eye.0->ear.0", "eye.0->llm.0", "ear.0->llm.0", "llm.0->llm.1")
    ties = ("llm/ends/bias", "llm/ends/down", "llm/ends/up")
    boundaries = {f"{name} {way}" for name in (*edges, *ties) for way in BOTH}
    gathers = {f"{name} gather" for name in ("eye.0", "llm.0", "llm.1")}  # the ear's dp are as many instances
    reduces = {f"{name} reduce" for name in ("eye.0", "ear.0", "llm.0", "llm.1")}
    # Equal rank sets and dp: a relabelling, which sends nothing.
    boundaries -= {f"ear.0->llm.0 {way}" for way in BOTH}
    assert set(found) == boundaries | gathers | reduces | {"eye tp 0-7", "world norm"}
    assert found["eye.0->ear.0 forward"].ends == (tuple(range(8)), tuple(range(4)))
    assert found["eye.0->ear.0 backward"].ends == (tuple(range(4)), tuple(range(8)))
    assert found["eye.0->ear.0 forward"].bytes == toy.ROWS * 2 * toy.WIDTH * 4  # of the larger bucket
    weights = toy.WIDTH * toy.HIDDEN * 2 + toy.WIDTH
    assert found["llm.0 reduce"].bytes == (3 + 1) * weights * 4  # of three layers and the ends
    assert all(link.seconds > 0 for link in found.values())


def test_nothing_is_changed(executor: toy.Run) -> None:
    assert isinstance(executor, Executor)
    before = toy.logical(executor.placed, executor.states)
    run(executor)
    after = toy.logical(executor.placed, executor.states)
    assert all(np.array_equal(after[name], leaf) for name, leaf in before.items())
    assert executor.sums == {}


def test_what_has_no_gradient_is_not_sent_back() -> None:
    executor = toy.executor(toy.placed(APART, toy.optimizers(("eye", "ear"))), 2)
    names = {trial.name for trial in link_trials(executor)}
    assert {"eye.0->ear.0 forward", "eye.0->llm.0 forward", "llm.0->llm.1 backward"} < names
    assert not names & {f"{edge} backward" for edge in ("eye.0->ear.0", "eye.0->llm.0", "ear.0->llm.0")}
    assert not {"eye.0 reduce", "ear.0 reduce"} & names and "eye.0 gather" in names  # frozen, and sharded all the same


def test_one_program_has_sums_of_the_same_size_in_place_of_its_own() -> None:
    model = toy.placed(GROUPS_SIDE_BY_SIDE, toy.optimizers())
    executor = toy.executor(model, 2, run=StraightExecutor)
    trials = link_trials(executor)
    compile_all(programs_of(trials))
    found = {link.name: link.kind for link in run(executor, trials).links}
    crossed = {f"{edge} {way}": "local" for edge in ("eye.0->ear.0", "eye.0->llm.0") for way in BOTH}
    sums = {f"{module} dp 0-3": "dp" for module in toy.MODULES} | {"eye tp 0-3": "tp"}
    assert found == crossed | sums


# ---- what is slow or down --------------------------------------------------------------------------------------------


@pytest.fixture
def broken(executor: toy.Run, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[Any], Any]], None]:
    """Puts something around the move of a boundary, both of its buckets' if they have one each."""
    assert isinstance(executor, Executor)

    def change(name: str, around: Callable[[Any], Any]) -> None:
        edge, _, way = name.rpartition(" ")
        for boundary in {id(b): b for (e, _), b in executor.boundaries.items() if e == edge}.values():
            transfer = getattr(boundary, way)
            move = transfer.move
            monkeypatch.setattr(transfer, "move", lambda packed, move=move: around(move(packed)))

    return change


def late(moved: Any) -> Any:
    time.sleep(0.1)
    return moved


def test_a_slow_boundary_is_named(executor: toy.Run, broken: Callable[..., None]) -> None:
    broken("eye.0->ear.0 backward", late)
    found = run(executor)
    assert "eye.0->ear.0 backward" in [link.name for link in found.links if link.slow]
    first, *others = found.lines()
    assert first.startswith("warm-up: 6 boundaries, 9 collectives; slowest eye.0->ear.0 backward, 10")
    (line,) = (line for line in others if "eye.0->ear.0 backward" in line)
    assert "is slow: " in line and " GB/s where its like have " in line and "\n" not in line
    assert ", ranks 0–3 of process 0 on " in line and " to ranks 0–7 of process 0 on " in line


def test_a_boundary_that_raises_is_named(executor: toy.Run, broken: Callable[..., None]) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("Connection closed by peer\nand more")

    broken("llm.0->llm.1 forward", fail)
    with pytest.raises(WarmUpError) as raised:
        run(executor)
    said = str(raised.value)
    assert said.startswith("warm-up: llm.0->llm.1 forward, ranks 0–3 of process 0 on ")
    assert " to ranks 4–7 of process 0 on " in said and said.endswith(": Connection closed by peer")


def test_what_arrives_wrong_is_named(executor: toy.Run, broken: Callable[..., None]) -> None:
    broken("llm.0->llm.1 backward", lambda moved: tuple(x + 1 for x in moved))
    with pytest.raises(WarmUpError, match=r"^warm-up: llm\.0->llm\.1 backward, .*: what arrived is not what was sent$"):
        run(executor)


@pytest.fixture
def until_the_end() -> Iterator[threading.Event]:
    """Set after the test, so that no thread waits on."""
    event = threading.Event()
    yield event
    event.set()


def test_a_boundary_that_hangs_is_named_in_time(
    executor: toy.Run, broken: Callable[..., None], until_the_end: threading.Event
) -> None:
    def hang(moved: Any) -> Any:
        until_the_end.wait(30)
        return moved

    broken("llm.0->llm.1 backward", hang)
    begin = time.monotonic()
    with pytest.raises(WarmUpError, match=r"llm\.0->llm\.1 backward, .*: nothing arrived in 3 s \(World\.warm_up_sec"):
        run(executor, seconds=3.0)
    assert time.monotonic() - begin < 20


def test_a_collective_that_fails_is_named(executor: toy.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(executor, Executor)

    def fail(*_: Any) -> Any:
        raise RuntimeError("NCCL operation failed")

    monkeypatch.setitem(executor.reduce_programs, "llm.1", fail)
    with pytest.raises(
        WarmUpError, match=r"^warm-up: llm\.1 reduce, ranks 4–7 of process 0 on .*: NCCL operation fail"
    ):
        run(executor)
