"""Measured busy times of ranks: how even a step is, and which rank is slow.

They come from the ends of ops in one step of every few (`Train.log_every`); nothing waits for them. Ranks that share
the cores of a host, as virtual devices do, take turns, and their times tell little.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mmjax.pipeline.ends import OpTimes, busy_seconds
from mmjax.schedule.ops import Schedule
from mmjax.train.watchdog import NoteBoard

Busy = Mapping[str, Mapping[int, float]]
"""Busy seconds of a step by module and rank."""
SLOW, NOTICEABLE, IN_A_ROW = 1.5, 0.05, 3
"""A rank is named as slow if it takes more than so many times the median of its module's other ranks, loses more than
this share of the busiest rank's time by it, and does so in so many measured steps in a row."""
_PINNED = 8
"""Newest measured steps that a process shows the others, which may read them some steps later."""
SILENCE = 50
"""Measured steps until a rank is named again."""


def imbalance(busy: Busy) -> float | None:
    """Busy seconds of the busiest rank over those of the mean rank, 1.0 or more; `None` where nothing was measured.

    busy: busy seconds of a step by module and rank: {"vision": {0: 0.2}, "llm": {0: 0.3, 1: 0.4}}.
    """
    totals = _totals(busy)
    mean = sum(totals.values()) / len(totals) if totals else 0.0
    return max(totals.values()) / mean if mean else None


def _totals(busy: Busy) -> dict[int, float]:
    totals: dict[int, float] = {}
    for ranks in busy.values():
        for rank, seconds in ranks.items():
            totals[rank] = totals.get(rank, 0.0) + seconds
    return totals


class SlowRanks:
    """Names ranks that are slow in `IN_A_ROW` measured steps in a row; call it with the times of each step."""

    def __init__(self) -> None:
        self._newest = deque[dict[tuple[str, int], float]](maxlen=IN_A_ROW)
        self._steps, self._quiet_until = 0, dict[tuple[str, int], int]()

    def __call__(self, busy: Busy) -> list[str]:
        """Takes the times of a step; returns a line for each rank that is slow and was not named lately.

        Such as "rank 3 (vision) takes 2.1 × the median of its module".
        """
        self._steps += 1
        self._newest.append(_ratios(busy))
        if len(self._newest) < IN_A_ROW:
            return []
        lines = []
        for key in sorted(set.intersection(*map(set, self._newest))):
            if self._steps >= self._quiet_until.get(key, 0):
                self._quiet_until[key] = self._steps + SILENCE
                ratio = statistics.median(step[key] for step in self._newest)
                lines.append(f"rank {key[1]} ({key[0]}) takes {ratio:.1f} × the median of its module")
        return lines


def _ratios(busy: Busy) -> dict[tuple[str, int], float]:
    """The slow ranks of a step by module and rank: their times over the median of the module's other ranks."""
    busiest, slow = max(_totals(busy).values(), default=0.0), {}
    for module, ranks in busy.items():
        for rank, seconds in ranks.items():
            median = statistics.median([time for peer, time in ranks.items() if peer != rank] or [seconds])
            if seconds > SLOW * median and seconds - median > NOTICEABLE * busiest:
                slow[module, rank] = seconds / median if median else float("inf")
    return slow


class BusyTimes:
    """The busy times of the newest measured step, of all processes.

    A thread of each process adds its own; they meet on a board, and nobody waits for anybody.
    """

    def __init__(
        self,
        schedule: Schedule,
        board: NoteBoard,
        processes: int,
        report: Callable[[str], None],
        *,
        names_slow: bool,
    ):
        """Has measured nothing yet.

        Args:
          schedule: what is run.
          board: shared with the other processes.
          processes: how many there are.
          report: receives lines about slow ranks, in any thread.
          names_slow: whether the devices work side by side, so that a slow one can be named.
        """
        self._schedule, self._board, self._processes = schedule, board, processes
        self._parts: dict[int, dict[int, Busy]] = {}  # by step and process, of steps that are not joined yet
        self._measured = deque[dict[str, Any]](maxlen=_PINNED)
        self._report, self._slow = report, SlowRanks() if names_slow else None
        self._lock, self._step, self._busy = threading.Lock(), 0, dict[str, dict[int, float]]()

    def add(self, times: OpTimes) -> None:
        """Takes this process's times of a step; joins the steps that all processes have measured by now."""
        graph = self._schedule.graph
        busy = busy_seconds(times, self._schedule.dependencies, lambda op: graph.stage(op.stage).module)
        self._measured.append({"step": times.step, "busy": busy})
        notes: Mapping[int, str] = {}
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 may be gone
            self._board.pin(json.dumps([*self._measured]))
            notes = self._board.read()
        for process, note in notes.items():
            for part in json.loads(note):
                if part["step"] > self._step:
                    by_module = part["busy"].items()
                    ranks_of = {name: {int(rank): time for rank, time in ranks.items()} for name, ranks in by_module}
                    self._parts.setdefault(part["step"], {})[process] = ranks_of
        for step in sorted(step for step, parts in self._parts.items() if len(parts) == self._processes):
            self._join(step)

    def _join(self, step: int) -> None:
        busy: dict[str, dict[int, float]] = {}
        for part in self._parts[step].values():
            for module, ranks in part.items():
                busy.setdefault(module, {}).update(ranks)
        self._parts = {later: parts for later, parts in self._parts.items() if later > step}
        with self._lock:
            self._step, self._busy = step, busy
        for line in self._slow(busy) if self._slow else ():
            self._report(f"step {step}: {line}")

    def columns(self) -> dict[str, Any]:
        """Columns of `metrics.jsonl`: "imbalance", and as "vision/busy_s" the busy seconds of a module's busiest rank.

        `None` where nothing was measured yet.
        """
        with self._lock:
            busy = self._busy
        modules = dict.fromkeys(stage.module for stage in self._schedule.graph.stages)
        longest = {f"{name}/busy_s": max(busy[name].values()) if name in busy else None for name in modules}
        return {"imbalance": imbalance(busy), **longest}
