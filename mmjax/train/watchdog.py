"""Notices that a run hangs although all of its processes live, reports where, and ends it.

Progress is the ends of ops on the devices, and what the host does: dispatch, compilation, waiting for data, a
checkpoint, an evaluation. All processes run the ops of one total order, so the one whose place in it is first holds up
the others. It has a limit, by its phase, within which it has to move; how long others have waited for it does not
matter. So a process that compiles a program late trips nobody.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Protocol

import jax

from mmjax.mesh import stacks
from mmjax.mesh.process_group import give_up_stuck
from mmjax.mesh.spmd import Program
from mmjax.pipeline.ends import Ends, OpTimes, Work

LEAST, TIMES, FIRST = 60.0, 5.0, 600.0
"""Seconds without a move that a step may have: so many times the longest of the newest steps, and at least `LEAST`;
before a step has ended, `FIRST`."""
NEWEST = 20
"""Steps whose times count."""
LIMITS = {"compile": 3600.0, "data": 600.0, "checkpoint": 3600.0, "evaluation": 600.0}
"""The same in other phases, where a step's limit is not longer."""
TICK, FAST = 1.0, 1e-3
"""Seconds between looks; while ops are timed."""
_BEFORE, _BEHIND = -1, 1 << 30
"""Places in a step before its first op, and behind its last one."""
_DONE = 1 << 60
_LEAVE = 5.0


@dataclass(frozen=True, kw_only=True)
class Note:
    """The position of a process in its run.

    Attributes:
      step, number: its first step that has not ended, and the place of the first op in it that has not: even where it
        is not dispatched, odd where it is. A process that has not dispatched an op holds up those that have.
      phase: "step", or one of `LIMITS`.
      text: the same in words, such as "has not ended F llm.0 microbatch 1 of step 3".
      idle: seconds since it has moved.
    """

    step: int
    number: int
    phase: str
    text: str
    idle: float = 0.0

    @property
    def place(self) -> tuple[int, int]:
        """Comparable between processes; the smallest holds up the others."""
        return self.step, self.number


class NoteBoard(Protocol):
    """A board on which processes pin their notes."""

    def pin(self, note: str) -> None:
        """Puts this process's note in place of its last one."""
        ...

    def read(self) -> dict[int, str]:
        """The newest note of each process that has pinned one, by process."""
        ...


class Watchdog:
    """A thread that follows the ops of this process, and ends the run when it hangs.

    Use it as a context manager around training. Without a limit it follows the ops alone.
    """

    def __init__(
        self,
        ends: Ends,
        number: Callable[[Work], int],
        board: NoteBoard,
        *,
        seconds: float,
        data_seconds: float = 0.0,
        process: int,
        processes: int,
        measured: Callable[[OpTimes], None] = lambda _: None,
        end: Callable[[int, str], None] = give_up_stuck,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Begins at rest.

        Args:
          ends: the ops under way.
          number: the place of an op in the schedule.
          board: shared with the other processes.
          seconds: the longest time without progress in a step; 0 derives it from the steps' times, below 0 is no limit.
          data_seconds: the longest wait for data, if that is longer than other limits.
          process, processes: the number of this process, from 0, and how many there are.
          measured: called with the times of each timed step, in the watching thread.
          end: called with the number of the process that holds up the run, and the news; ends this process by default.
          clock: returns seconds that rise.
        """
        self._ends, self._number, self._board, self._seconds = ends, number, board, seconds
        self._limits = LIMITS | {"data": max(LIMITS["data"], data_seconds)}
        self._process, self._processes = process, processes
        self._measured, self._end, self._clock = measured, end, clock
        self._phase, self._step = "compile", 0
        self._newest = deque[float](maxlen=NEWEST)
        self._state: object = None
        self._moved = self._looked = clock()
        self._pinned = -TICK
        self._first_read: dict[int, tuple[str, float]] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        self._phase, self._moved, self._looked = "compile", self._clock(), self._clock()
        self._over.clear()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._ends.wake.set()
        if self._thread:
            self._thread.join(_LEAVE)  # process 0 may be gone, and a note under way
        if not error and self._seconds >= 0:
            self._pin(Note(step=_DONE, number=0, phase="step", text="is done"))

    # ---- the training thread -----------------------------------------------------------------------------------------

    def enter(self, phase: str, step: int) -> None:
        """The host begins with ``phase`` of a step: "data", "step" (its ops), "checkpoint" or "evaluation"."""
        self._phase, self._step = phase, step

    def observe(self, seconds: float) -> None:
        """Takes the seconds of a step that has ended, for the limit of later ones."""
        self._newest.append(seconds)

    # ---- the watching thread -----------------------------------------------------------------------------------------

    def limit(self, phase: str) -> float:
        """Seconds within which a process has to move in a phase, "step" or one of `LIMITS`."""
        step = self._seconds or max(LEAST, TIMES * max(tuple(self._newest), default=FIRST / TIMES))
        return max(step, self._limits.get(phase, 0.0))

    def tick(self) -> None:
        """Looks for ends, pins a note for the others, and ends the run if it hangs."""
        times = self._ends.poll()
        if times:
            self._measured(times)
        now = self._clock()
        if now - self._looked < TICK:
            return
        late, self._looked = now - self._looked > 10 * TICK, now
        state = (
            self._phase,
            self._step,
            self._ends.op,
            self._ends.ended,
            Program.dispatches,
            sorted(Program.compiling),
        )
        if state != self._state or late:  # a process that was itself stopped blames nobody
            self._state, self._moved = state, now
            self._first_read.clear()
        if self._seconds >= 0:
            self._pin_and_judge(self.note(now - self._moved), now)

    def note(self, idle: float) -> Note:
        """The position of this process in its run; ``idle`` is in seconds."""
        phase = "compile" if Program.compiling else self._phase
        op, step = self._ends.op, self._step
        number = {"data": _BEFORE, "compile": _BEFORE, "step": _BEFORE}.get(self._phase, _BEHIND + 1)
        if self._phase == "step" and op is not None:
            number = 2 * self._number(op)
        elif self._phase == "step" and self._ends.complete >= step:
            number = _BEHIND
        text = {
            "compile": f"compiles {', '.join(sorted(Program.compiling)[:2]) or 'programs'}",
            "data": f"waits for the data of step {step}",
            "step": f"has not dispatched {op or 'all ops'} of step {step}",
        }.get(phase, f"is in the {phase} after step {step}")
        host = Note(step=step, number=number, phase=phase, text=text, idle=idle)
        oldest = self._ends.oldest(self._number)
        if oldest:
            step, number, op = oldest
            text = f"has not ended {op} of step {step}"
            running = Note(step=step, number=2 * number + 1, phase="step", text=text, idle=idle)
            return min(host, running, key=lambda note: note.place)
        return host

    def _pin_and_judge(self, note: Note, now: float) -> None:
        """Pins a note where it is time, and judges the run where this process has not moved for long."""
        limit = self.limit("step")
        stuck = note.idle > limit / 2
        if stuck or now - self._pinned >= limit / 12:
            self._pinned = now
            self._pin(note)
        if stuck:
            self._judge(note, now)

    def _pin(self, note: Note) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 may be gone
            self._board.pin(json.dumps(asdict(note)))

    def _judge(self, note: Note, now: float) -> None:
        """Ends the run if every process that holds it up has stood still for longer than its limit."""
        notes = self._notes(now) | {self._process: note}
        first = min(standing.place for standing in notes.values())
        behind = {process: standing for process, standing in notes.items() if standing.place == first}
        if first[0] < _DONE and all(late.idle > self.limit(late.phase) for late in behind.values()):
            self._end(min(behind), self._news(behind, notes))

    def _notes(self, now: float) -> dict[int, Note]:
        """The notes of the others; one that stays the same although its process should pin it again grows old here."""
        texts: Mapping[int, str] = {}
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            texts = self._board.read()
        notes = {}
        for process in range(self._processes):
            text = texts.get(process, "")
            if self._first_read.get(process, ("", 0.0))[0] != text or process not in self._first_read:
                self._first_read[process] = text, now
            absent = Note(step=-1, number=0, phase="compile", text="has not begun to train")
            note = Note(**json.loads(text)) if text else absent
            age = now - self._first_read[process][1]
            notes[process] = Note(**{**asdict(note), "idle": note.idle + age})
        return notes

    def _news(self, behind: Mapping[int, Note], notes: Mapping[int, Note]) -> str:
        waiting = {process: note for process, note in notes.items() if process not in behind and note.step < _DONE}
        idle = min(note.idle for note in behind.values())
        lines = [f"process {process} {note.text}" for process, note in [*behind.items()][:3]]
        lines += [f"process {process}, which waits, {note.text}" for process, note in [*waiting.items()][:1]]
        lines += [f"stacks of all processes: {stacks.path_pattern()}"] if stacks.path_pattern() else []
        return f"nothing has moved for {idle:.0f} s (World.hang_seconds): {'; '.join(lines)}"

    def _watch(self) -> None:
        while not self._over.is_set():
            self.tick()
            if self._ends.wake.wait(TICK):
                self._over.wait(FAST)
