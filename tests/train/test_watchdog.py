"""The watchdog by a clock that the test turns: whom it names, when, and whom it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmjax.mesh import stacks
from mmjax.mesh.spmd import Program
from mmjax.pipeline.ends import Ends, numbers_of
from mmjax.schedule.ops import Op
from mmjax.train import watchdog
from mmjax.train.watchdog import Watchdog

OPS = (Op("F", "vision.0", 0), Op("move", "llm.0", 0, "vision.0->llm.0"), Op("F", "llm.0", 0), Op("B", "llm.0", 0))


class End:
    """Stands for the end of a program."""

    def __init__(self) -> None:
        self.ready, self.addressable_shards = False, ()

    def is_ready(self) -> bool:
        return self.ready


class Shards(End):
    """Stands for the end of a program on one device, a shard of which is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.device = 0
        self.addressable_shards = (self,)  # type: ignore[assignment]

    @property
    def data(self) -> Shards:
        return self


class Notes:
    """A board of processes that are objects here."""

    def __init__(self, shared: dict[int, str], process: int):
        self._shared, self._process = shared, process

    def pin(self, note: str) -> None:
        self._shared[self._process] = note

    def read(self) -> dict[int, str]:
        return dict(self._shared)


class Company:
    """Processes whose watchdogs tick by one clock."""

    def __init__(self, count: int, seconds: float = 10.0):
        self.now, self.news, shared = 0.0, list[tuple[int, int, str]](), dict[int, str]()
        self.ends = [Ends({}, lambda: self.now) for _ in range(count)]
        self.dogs = [
            Watchdog(
                ends,
                numbers_of(OPS),
                Notes(shared, process),
                seconds=seconds,
                process=process,
                processes=count,
                end=lambda blamed, news, process=process: self.news.append((process, blamed, news)),
                clock=lambda: self.now,
            )
            for process, ends in enumerate(self.ends)
        ]

    def dispatch(self, process: int, step: int, *ops: Op, into: Op | None = None, whole: bool = False) -> list[End]:
        """A process dispatches `ops`, and is stuck while it dispatches `into`."""
        self.dogs[process].enter("step", step)
        ends, made = self.ends[process], []
        ends.begin_step(step, timed=False)
        for op in ops:
            ends.begin(op)
            Program.newest_end = end = End()  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
            ends.dispatched(op)
            made.append(end)
        if into:
            ends.begin(into)
        if whole:
            ends.end_step()
        return made

    def wait(self, seconds: int, without: int | None = None) -> None:
        """Time goes by; process `without` does not tick."""
        for _ in range(seconds):
            self.now += 1.0
            for process, dog in enumerate(self.dogs):
                if process != without and not self.news:
                    dog.tick()


@pytest.fixture(autouse=True)
def _no_program_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "compiling", set())
    monkeypatch.setattr(Program, "newest_end", None)


def test_an_op_that_never_ends() -> None:
    """In process 1, which has dispatched everything; process 0 waits for it in an op behind it."""
    company = Company(2)
    first, *_ = company.dispatch(1, 3, OPS[0], OPS[1], whole=True)
    company.dispatch(0, 3, OPS[1], OPS[2], OPS[3], whole=True)
    company.wait(9)
    assert not company.news
    company.wait(4)
    ((_, blamed, news),) = company.news
    assert blamed == 1 and not first.ready and "\n" not in news
    assert "process 1 has not ended F vision.0 microbatch 0 of step 3" in news
    assert "process 0, which waits, has not ended move vision.0->llm.0 microbatch 0 of step 3" in news
    assert news.startswith("nothing has moved for 1") and "(World.hang_seconds)" in news


def test_a_host_that_is_stuck_in_dispatch() -> None:
    company = Company(2)
    for end in company.dispatch(1, 3, OPS[0], into=OPS[1]):
        end.ready = True
    company.dispatch(0, 3, OPS[1], OPS[2], OPS[3], whole=True)
    company.wait(13)
    ((_, blamed, news),) = company.news
    assert blamed == 1 and "process 1 has not dispatched move vision.0->llm.0 microbatch 0 of step 3" in news


def test_a_process_that_compiles_late_trips_nobody() -> None:
    company = Company(2)
    for end in company.dispatch(1, 3, OPS[0], into=OPS[1]):
        end.ready = True
    company.dispatch(0, 3, OPS[1], OPS[2], OPS[3], whole=True)
    Program.compiling.add("move")  # in process 1; seen by both here, of whom only 1 is at its host's place
    company.wait(int(watchdog.LIMITS["compile"]) - 100)
    assert not company.news
    company.wait(200)
    assert company.news[0][1] == 1 and "process 1 compiles move" in company.news[0][2]


def test_data_that_do_not_come() -> None:
    company = Company(2)
    company.dogs[1].enter("data", 4)
    company.dispatch(0, 4, *OPS, whole=True)
    company.wait(590)
    assert not company.news
    company.wait(30)
    assert company.news[0][1] == 1 and "process 1 waits for the data of step 4; " in company.news[0][2]


def test_a_process_whose_python_is_stuck_grows_old() -> None:
    """Its note stays the same: the others find out by their own clocks."""
    company = Company(2)
    company.dispatch(1, 3, into=OPS[0])
    company.dispatch(0, 3, OPS[1], whole=True)
    company.wait(2)
    company.wait(20, without=1)
    assert company.news[0][:2] == (0, 1)


def test_slow_progress_is_progress() -> None:
    company = Company(2)
    company.dogs[1].enter("data", 9)
    company.dispatch(0, 9, *OPS[1:2], whole=True)
    for _ in range(20):
        ends = company.dispatch(1, 3, OPS[0])
        company.wait(8)
        ends[0].ready = True
        company.wait(1)
    assert not company.news


def test_who_was_stopped_itself_blames_nobody() -> None:
    company = Company(2)
    company.dispatch(1, 3, into=OPS[0])
    company.dispatch(0, 3, OPS[1], whole=True)
    company.wait(2)
    company.now += 1000
    company.wait(8)
    assert not company.news


def test_processes_at_one_op_are_all_named() -> None:
    company = Company(3)
    for process in (0, 1):
        company.dispatch(process, 2, OPS[1], whole=True)
    company.dispatch(2, 2, OPS[3], whole=True)
    company.wait(13)
    news = company.news[0][2]
    assert all(f"process {process} has not ended move" in news for process in (0, 1))
    assert "process 2, which waits, has not ended B" in news


def test_all_at_one_op_have_to_stand_still() -> None:
    """One of two has just come there: it may be on its way."""
    company = Company(2)
    company.dispatch(0, 2, OPS[1], whole=True)
    (before, _) = company.dispatch(1, 2, OPS[0], OPS[1], whole=True)
    company.wait(7)
    before.ready = True
    company.wait(9)
    assert not company.news
    company.wait(3)
    assert company.news


@pytest.mark.parametrize(
    ("seconds", "steps", "limit"),
    [(0.0, (), 600.0), (0.0, (1.0, 2.0), 60.0), (0.0, (30.0, 20.0), 150.0), (7.0, (30,), 7)],
)
def test_limit_of_a_step(seconds: float, steps: tuple[float, ...], limit: float) -> None:
    (dog,) = Company(1, seconds).dogs
    for step in steps:
        dog.observe(step)
    assert dog.limit("step") == limit and dog.limit("compile") == 3600.0


def test_stacks_are_written_where_the_news_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_file", None)
    stacks.dump()  # nowhere
    stacks.write_to(tmp_path, 3)
    company = Company(1)
    company.dispatch(0, 1, into=OPS[0])
    company.wait(13)
    assert company.news[0][2].endswith(f"; stacks of all processes: {tmp_path}/stacks-*.txt")
    stacks.dump()
    assert "test_stacks_are_written" in (tmp_path / "stacks-3.txt").read_text()


def test_off() -> None:
    company = Company(1, -1.0)
    company.dispatch(0, 1, into=OPS[0])
    company.wait(5000)
    assert not company.news


def test_a_process_that_is_done_holds_up_nobody() -> None:
    company = Company(2)
    company.dispatch(0, 3, OPS[0], whole=True)[0].ready = True
    with company.dogs[1]:
        pass
    company.dogs[0].enter("checkpoint", 3)
    company.wait(int(watchdog.LIMITS["checkpoint"]) + 20, without=1)
    assert [blamed for _, blamed, _ in company.news] == [0]


def test_ends_are_looked_for_often_while_a_step_is_timed() -> None:
    ends = Ends({}, lambda: 0.0)
    for step, op in ((1, OPS[0]), (2, "step")):  # a step that is one program has no times
        ends.begin_step(step, timed=True)
        assert ends.poll() is None and ends.wake.is_set()
        ends.begin(op)
        Program.newest_end = end = End()  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
        ends.dispatched(op)
        ends.end_step()
        end.ready = True
        times = ends.poll()
        assert (times is not None) == (step == 1) and not ends.wake.is_set()
    ends.begin_step(3, timed=False)
    ends.poll()
    assert not ends.wake.is_set() and ends.ended == 2


def test_two_timed_steps_at_once() -> None:
    """One that begins before the other has ended is not timed, not even in part."""
    ends, made = Ends({0: 0}, lambda: 0.0), []
    for step in (1, 2, 3):
        ends.begin_step(step, timed=True)
        for op in OPS[:2]:
            ends.begin(op)
            Program.newest_end = end = Shards()  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
            ends.dispatched(op)
            made.append(end)
        ends.end_step()
        if step == 2:
            assert ends.poll() is None
            for end in made:
                end.ready = True
    times = ends.poll()
    assert times and times.step == 1
    for end in made:
        end.ready = True
    times = ends.poll()
    assert times and (times.step, times.ops) == (3, [*OPS[:2]]) and ends.ended == 6


def test_ends_keep_nothing_alive() -> None:
    """The end of a program is empty, and is dropped when it is there."""
    import jax
    import jax.numpy as jnp

    aval: Any = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    program, ends = Program("double", lambda x: 2 * x, [aval], aval), Ends({jax.devices()[0]: 0})
    ends.begin_step(1, timed=True)
    ends.begin(OPS[0])
    result = program(jax.device_put(jnp.ones(4), aval.sharding))
    ends.dispatched(OPS[0])
    assert Program.newest_end is not None and Program.newest_end.nbytes == 0
    ends.end_step()
    result.block_until_ready()
    Program.newest_end.block_until_ready()
    times = ends.poll()
    assert times and times.ops == [OPS[0]] and set(times.ended[OPS[0]]) == {0}
    assert ends.ended == 1 and not ends._running and ends.oldest(numbers_of(OPS)) is None
