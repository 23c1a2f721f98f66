"""Finds the ops of a training step that have ended, without waiting for any and without keeping a result alive.

Dispatch is asynchronous, so the host's position in the schedule is no information. Every program has an empty array
among its results, which is ready when the program has ended (`Program.newest_end`); a thread polls it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax

from mmjax.mesh.spmd import Program
from mmjax.mesh.world import Device
from mmjax.schedule.ops import Op

Work = Op | str
"""An op, or the name of the program that is a whole step."""


@dataclass(frozen=True)
class Dispatched:
    """A dispatched op.

    Attributes:
      step: its step.
      op: the op.
      at: time of dispatch.
      end: an array that is ready when it has ended.
      timed: whether its end on each rank is recorded.
    """

    step: int
    op: Work
    at: float
    end: jax.Array
    timed: bool


@dataclass
class OpTimes:
    """When the ops of one step were dispatched and ended, in seconds of one clock.

    Attributes:
      step: its number.
      ops: in the order of dispatch.
      dispatched: time of dispatch by op.
      ended: time of the end by op, then by rank of this process.
    """

    step: int
    ops: list[Op] = field(default_factory=list)
    dispatched: dict[Op, float] = field(default_factory=dict)
    ended: dict[Op, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))


class Ends:
    """The ops of a run between dispatch and end. One thread dispatches, another one calls `poll`.

    Attributes:
      step: the step that is being dispatched, from 1.
      op: the op that is being dispatched; `None` when all ops of the step are dispatched.
      ended: number of ops that have ended.
      complete: the last step whose ops are all dispatched.
      wake: set while a timed step runs, which should be polled often.
    """

    def __init__(self, ranks: Mapping[Device, int], clock: Callable[[], float] = time.perf_counter):
        """Starts without ops. `ranks` are the ranks of this process's devices, by device; `clock` returns seconds."""
        self.step, self.complete, self.op, self.ended = 0, 0, None, 0
        self.wake = threading.Event()
        self._ranks, self._clock, self._timed = ranks, clock, False
        self._new = deque[Dispatched]()  # from the dispatching thread to the polling one
        self._running: list[Dispatched] = []
        self._queues = defaultdict[int, deque[tuple[Op, float, Any]]](deque)
        self._times: OpTimes | None = None
        self._missed = 0  # a step that is not timed, because the step before it had not ended

    # ---- the dispatching thread --------------------------------------------------------------------------------------

    def begin_step(self, step: int, *, timed: bool) -> None:
        """Begins a step, numbered from 1; if `timed`, `poll` records the ends of its ops."""
        self.step, self._timed = step, timed
        if timed:
            self.wake.set()

    def begin(self, op: Work) -> None:
        """Records that an op is about to be dispatched."""
        self.op = op
        Program.newest_end = None

    def dispatched(self, op: Work) -> None:
        """Records that an op was dispatched; it ends with its last program. An op without a program is skipped."""
        end = Program.newest_end
        if end is not None:
            self._new.append(Dispatched(self.step, op, self._clock(), end, self._timed))

    def end_step(self) -> None:
        """Records that all ops of the step are dispatched."""
        self.op, self.complete = None, self.step

    # ---- the other thread --------------------------------------------------------------------------------------------

    def poll(self) -> OpTimes | None:
        """Finds the ops that have ended; returns the times of a timed step when its last op has ended, else None."""
        complete, times = self.complete, None
        for new in self._take_new():
            self._running.append(new)
            if self._times and self._times.step < new.step:
                times = self._poll_times(new.step) or times
            if new.timed and isinstance(new.op, Op):
                self._begin_timing(new, new.op)
        done = [entry for entry in self._running if _is_ready(entry.end)]
        if done:
            self.ended += len(done)
            finished = set(map(id, done))
            self._running = [entry for entry in self._running if id(entry) not in finished]
        times = self._poll_times(complete) or times
        self.wake.clear()  # before the check, whose result may change meanwhile
        if self._times or (self._timed and self.complete < self.step):
            self.wake.set()
        return times

    def oldest(self, number: Callable[[Work], int]) -> tuple[int, int, Work] | None:
        """(step, number, op) of the first op that has not ended; None if all have. `number` is made by `numbers_of`."""
        return min(((entry.step, number(entry.op), entry.op) for entry in self._running), default=None, key=_place)

    def _take_new(self) -> Sequence[Dispatched]:
        return [self._new.popleft() for _ in range(len(self._new))]

    def _begin_timing(self, new: Dispatched, op: Op) -> None:
        if self._times is None and new.step != self._missed:
            self._times = OpTimes(new.step)
            self._queues.clear()
        if self._times is None or self._times.step != new.step:
            self._missed = new.step
            return
        self._times.ops.append(op)
        self._times.dispatched[op] = new.at
        for shard in new.end.addressable_shards:
            self._queues[self._ranks[shard.device]].append((op, new.at, shard.data))

    def _poll_times(self, complete: int) -> OpTimes | None:
        """The times of the timed step if all of its ops have ended; steps up to `complete` are dispatched."""
        times = self._times
        if times is None:
            return None
        for rank, queue in self._queues.items():
            while queue and _is_ready(queue[0][2]):
                times.ended[queue.popleft()[0]][rank] = self._clock()
        if any(self._queues.values()) or complete < times.step:
            return None
        self._times = None
        return times


def busy_seconds(
    times: OpTimes, dependencies: Callable[[Op], Sequence[Op]], module: Callable[[Op], str]
) -> dict[str, dict[int, float]]:
    """Seconds that each rank spent in the F, B and W of each module: {"llm": {0: 1.5}}, by module, then by rank.

    Ranks are those of this process.

    Args:
      times: when the ops of a step were dispatched and ended, in seconds of one clock: ``OpTimes(step=0, ops=ops,
        dispatched={op: 0.0, ...}, ended={op: {0: 1.5}, ...})``, ended by op and then by rank.
      dependencies: returns the ops whose results an op reads: `Schedule.dependencies`.
      module: returns the name of the module of an F, B or W, such as "llm".

    A rank begins an op when the op is dispatched and both the rank's previous op and the op's dependencies have ended.
    Time in which the ranks of an op wait for each other inside it counts for all of them.
    """
    busy: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    free = defaultdict[int, float](float)

    @cache
    def end(op: Op) -> float:
        """The time at which an op had ended on all local ranks; an op without a program ends with its dependencies."""
        if op in times.ended:
            return max(times.ended[op].values())
        return max(map(end, dependencies(op)), default=0.0)

    for op in times.ops:
        ready = max([times.dispatched[op], *map(end, dependencies(op))])
        for rank, at in times.ended[op].items():
            if op.kind in ("F", "B", "W"):
                busy[module(op)][rank] += max(0.0, at - max(ready, free[rank]))
            free[rank] = at
    return {name: dict(ranks) for name, ranks in busy.items()}


def numbers_of(ops: Sequence[Op]) -> Callable[[Work], int]:
    """A function from an op to its position in `ops`, from 0; 0 for other ops and for a text, the name of the program
    of a whole step.
    """
    numbers = dict(zip(ops, itertools.count()))
    return lambda op: numbers.get(op, 0) if isinstance(op, Op) else 0


def _place(entry: tuple[int, int, Work]) -> tuple[int, int]:
    return entry[:2]


def _is_ready(end: Any) -> bool:
    try:
        return end.is_ready()
    except jax.errors.JaxRuntimeError:  # it has failed, which readers of its results see
        return True
