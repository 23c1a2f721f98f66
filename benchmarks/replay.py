"""Replaying a schedule with real processes: one per block of ranks, whose ops sleep for their modelled time.

The step that ``simulate`` computes is run here: processes send messages to each other and wait for them, and a clock
times the step. One process never overlaps two submeshes on CPU; sleeping processes do. Costs may be measured ones.

* A block is a set of ranks that the same stages use. Ranks are exclusive, so a block runs one op at a time, in the
  schedule's order. An op that spans blocks runs in all of them together, as a collective does: it starts when the last
  of them has come to it.
* An op starts when messages have reported the end of every op that it reads or awaits.
* A rendezvous spans the blocks of both sides. An asynchronous move occupies nobody, and neither does a copy to or from
  the host: its sender goes on, and its receiver may use the data once the move's time has passed, counted from when it
  was sent and the wire was free.

The processes ask for real-time priority, which root may have. They sleep nearly all the time, and without this priority
a busy machine wakes each of them milliseconds late. Neither this module nor the processes import jax.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks import replay_process
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import Op, Resource, Schedule, occupied_ranks, occupied_resources
from mmjax.schedule.simulate import Costs, Timeline, simulate
from mmjax.schedule.validate import validate

START_SECONDS = 0.03
"""Seconds between the message to start and the start of the step, so that every process has read it by then."""
PATIENCE_SECONDS = 30.0
"""Seconds, beyond three times the simulated step, after which a step that has not ended is given up."""


class ReplayError(RuntimeError):
    """A process of a replay ended early or did not end in time."""


def blocks_of(graph: StageGraph) -> tuple[tuple[int, ...], ...]:
    """The ranks in blocks: two ranks are in one block if the same lanes of the same stages use them."""
    table: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in graph.ranks:
        table.setdefault(graph.stages_on(rank), []).append(rank)
    return tuple(tuple(ranks) for ranks in table.values())


def replay(schedule: Schedule, costs: Costs, repeats: int = 1) -> Generator[Timeline, None, None]:
    """Runs the step with real processes and yields the measured timeline of each repeat.

    Processes start at the first ``next`` and end with the iterator. Times are of the real clock: they include
    what the machine adds, and are never less than the costs.

    Raises:
      ScheduleError: the schedule is not valid.
      ValueError: a cost is missing.
      ReplayError: a process failed or hangs.
    """
    validate(schedule)
    costs = costs.split_as(schedule.graph)
    patience = PATIENCE_SECONDS + 3 * simulate(schedule, costs).makespan
    with _Processes(_plans(schedule, costs)) as processes:
        processes.collect(patience)  # a line when it is ready
        for _ in range(repeats):
            start = time.monotonic() + START_SECONDS
            yield _measured(schedule, costs, start, processes.step(start, patience))


def costs_of(timeline: Timeline) -> Costs:
    """Costs with the seconds of each op of a timeline. A simulation with them differs only by waiting."""
    seconds = {(op.kind, op.edge or op.stage, op.backward): 0.0 for op in timeline.schedule.ops}
    overrides = {
        (op.kind, op.edge or op.stage, op.backward, op.microbatch): end - start
        for op, (start, end) in timeline.spans.items()
    }
    return Costs(seconds=seconds, overrides=overrides)


# ---- the plan of each block ------------------------------------------------------------------------------------------


@dataclass
class _Step:
    """An op in the plan of its blocks."""

    index: int
    seconds: float
    blocks: tuple[int, ...]
    waits: list[tuple[int, float]] = field(default_factory=list)
    reports_to: set[int] = field(default_factory=set)


def _plans(schedule: Schedule, costs: Costs) -> list[list[Any]]:
    """The ops of each block, as ``replay_process`` takes them."""
    graph, blocks = schedule.graph, blocks_of(schedule.graph)
    steps: dict[Op, _Step] = {}
    needed = _needed(schedule)
    for index, op in enumerate(schedule.ops):
        ranks = set(occupied_ranks(graph, op))
        steps[op] = _Step(index, costs.of(op), tuple(i for i, block in enumerate(blocks) if ranks.intersection(block)))
        for before, delay in _sources(schedule, costs, needed, op).items():
            steps[op].waits.append((steps[before].index, delay))
            # The first block of an op reports its end to the others; blocks that took part need no report.
            steps[before].reports_to.update(set(steps[op].blocks) - set(steps[before].blocks))
    plans: list[list[Any]] = [[] for _ in blocks]
    for step in steps.values():
        for block in step.blocks:
            together = [peer for peer in step.blocks if peer != block]
            reports_to = sorted(step.reports_to) if block == step.blocks[0] else []
            plans[block].append([step.index, step.seconds, step.waits, together, reports_to])
    return plans


def _needed(schedule: Schedule) -> dict[Op, tuple[Op, ...]]:
    """For each op, the ops that must have ended before it starts.

    An op that occupies no rank also needs the last op before it on its wire or copy engines.
    """
    needed: dict[Op, tuple[Op, ...]] = {}
    last: dict[Resource, Op] = {}
    for op in schedule.ops:
        needed[op] = (*schedule.dependencies(op), *schedule.awaits(op))
        if not occupied_ranks(schedule.graph, op):
            resources = occupied_resources(schedule.graph, op)
            needed[op] += tuple(dict.fromkeys(last[resource] for resource in resources if resource in last))
            last.update(dict.fromkeys(resources, op))
    return needed


def _sources(schedule: Schedule, costs: Costs, needed: Mapping[Op, tuple[Op, ...]], op: Op) -> dict[Op, float]:
    """The ops of blocks whose ends ``op`` waits for, with the seconds between each end and the start of ``op``."""
    if not occupied_ranks(schedule.graph, op):
        return {}
    result: dict[Op, float] = {}
    pending = {before: 0.0 for before in needed[op]}
    while pending:
        before, delay = pending.popitem()
        if occupied_ranks(schedule.graph, before):
            result[before] = max(delay, result.get(before, 0.0))
            continue
        for sender in needed[before]:  # no block runs it: only its time passes
            pending[sender] = max(delay + costs.of(before), pending.get(sender, 0.0))
    return result


def _measured(schedule: Schedule, costs: Costs, start: float, reports: Sequence[Any]) -> Timeline:
    """The timeline of a step that started at ``start`` on the processes' clock."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for index, begin, end in (entry for report in reports for entry in report):
        starts[index] = min(begin - start, starts.get(index, begin - start))
        ends[index] = max(end - start, ends.get(index, 0.0))
    place = {op: i for i, op in enumerate(schedule.ops)}
    for op, before in _needed(schedule).items():
        index = place[op]
        if index not in starts:
            starts[index] = max((ends[place[needed]] for needed in before), default=0.0)
            ends[index] = starts[index] + costs.of(op)
    every = range(len(place))
    return Timeline(schedule=schedule, starts=tuple(starts[i] for i in every), ends=tuple(ends[i] for i in every))


# ---- processes -------------------------------------------------------------------------------------------------------


class _Processes:
    """One process for each block. Every process has a pipe that all others write to."""

    def __init__(self, plans: Sequence[list[Any]]):
        inboxes = [os.pipe() for _ in plans]
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for block, ops in enumerate(plans):
                outboxes = {peer: write for peer, (_, write) in enumerate(inboxes) if peer != block}
                plan = {"block": block, "inbox": inboxes[block][0], "outboxes": outboxes, "ops": ops}
                self.processes.append(_start(plan))
        except BaseException:
            self.close()
            raise
        finally:
            for read, write in inboxes:
                os.close(read)
                os.close(write)

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process."""
        for process in self.processes:
            process.kill()
            process.communicate()

    def step(self, start: float, patience: float) -> list[Any]:
        """Runs a step that starts at ``start``; returns the report of every process."""
        for block, process in enumerate(self.processes):
            try:
                _pipe(process.stdin).write(f"{start!r}\n".encode())
            except BrokenPipeError:
                raise ReplayError(f"the process of block {block} of a replay ended early") from None
        return [json.loads(line) for line in self.collect(patience)]

    def collect(self, patience: float) -> list[bytes]:
        """Waits for a line from every process; returns the lines."""
        deadline = time.monotonic() + patience
        lines = [b""] * len(self.processes)
        with selectors.DefaultSelector() as selector:
            for i, process in enumerate(self.processes):
                selector.register(_pipe(process.stdout), selectors.EVENT_READ, i)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise ReplayError(f"a replay did not end in {patience:.0f} s: ops wait for one another")
                for key, _ in ready:
                    piece = os.read(key.fd, 1 << 16)
                    if not piece:
                        raise ReplayError(f"the process of block {key.data} of a replay ended early")
                    lines[key.data] += piece
                    if piece.endswith(b"\n"):
                        selector.unregister(key.fileobj)
        return lines


def _start(plan: dict[str, Any]) -> subprocess.Popen[bytes]:
    file = Path(replay_process.__file__)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        pass_fds=[plan["inbox"], *plan["outboxes"].values()],
    )
    _pipe(process.stdin).write(json.dumps(plan).encode() + b"\n")
    return process


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
