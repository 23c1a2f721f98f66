"""Tries every boundary and collective before the first step, the initializer's last act, and names slow links.

The first use of a link also sets it up (above all NCCL's communicators), so it is not timed. If nothing arrives, the
run ends with a line that names both sides of the link. Source: Zhang et al., "DistTrain", §3.

Each process takes part in the trials that touch its devices, in the same order everywhere. The processes of a trial
meet before it, so a process that is busy with an earlier trial is never taken for a link that is down.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from mmjax.config.flags import NEWS
from mmjax.mesh.config import WorldConfig
from mmjax.mesh.process_group import give_up, has_peers
from mmjax.mesh.processes import barrier, gather_texts
from mmjax.mesh.spmd import Program
from mmjax.mesh.world import World
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.link_trials import LinkTrial, link_trials, programs_of
from mmjax.pipeline.one_program import OneProgramExecutor
from mmjax.schedule.graph import show_ranks
from mmjax.train.files import RunFiles

TIMES = 3
"""Timed uses of a link; the fastest counts."""
SLOW = 4.0
"""A link is named as slow if similar links' median rate is more than this many times its own."""
SIZES = 4.0
"""Links are similar if they are of one kind, both inside a process or both between processes, and their bytes differ by
no more than this factor."""
LARGE = 1 << 20
"""Bytes from which a link counts as large, and bandwidth decides over its time. Below that latency does, and a gather
has one for each of its arrays."""
NOTICEABLE = {True: 2e-3, False: 5e-2}
"""Seconds that a slow link must lose, large (True) or small (False): on a busy host links differ by less by chance."""


class WarmUpError(RuntimeError):
    """A boundary or collective failed or took too long; one line names it, its ranks and processes."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A trial that was run.

    Attributes:
      name, kind, bytes, ends: see `LinkTrial`.
      processes: for each end, the processes that have its ranks.
      seconds: time in the process that waited longest.
      like: median rate of similar links in GB/s; 0 where there are none.
    """

    name: str
    kind: str
    bytes: int
    ends: tuple[tuple[int, ...], ...]
    processes: tuple[tuple[int, ...], ...]
    seconds: float
    like: float = 0.0

    @property
    def rate(self) -> float:
        """GB/s (1e9 bytes)."""
        return self.bytes / self.seconds / 1e9

    @property
    def slow(self) -> bool:
        """Whether it is much slower than similar links."""
        lost = self.seconds - self.bytes / (self.like * 1e9) if self.like else 0.0
        return lost > NOTICEABLE[self.bytes >= LARGE] and self.rate * SLOW < self.like


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """The results of all trials.

    Attributes:
      links: every trial, in order.
      boundaries: how many boundaries were tried; both directions count as one.
      collectives: how many collectives were tried.
      hosts: the host name of each process.
    """

    links: tuple[Link, ...]
    boundaries: int
    collectives: int
    hosts: tuple[str, ...]

    def lines(self) -> list[str]:
        """A summary in one line, and a line for each slow link; nothing where nothing was tried."""
        if not self.links:
            return []
        longest = max(self.links, key=lambda link: link.seconds)
        counts = f"{_count(self.boundaries, 'boundary', 'boundaries')}, {_count(self.collectives, 'collective')}"
        lines = [
            f"warm-up: {counts}; slowest {longest.name}, {longest.seconds * 1e3:.3g} ms at {longest.rate:.2g} GB/s"
        ]
        for link in (link for link in self.links if link.slow):
            where = _where(link.ends, link.processes, self.hosts)
            beside = f"{link.rate:.2g} GB/s where its like have {link.like:.2g} GB/s"
            lines.append(f"warm-up: {link.name} is slow: {beside}, {where}")
        return lines

    def numbers(self) -> dict[str, Any]:
        """The content of ``warm_up.json``: "hosts" by process, and "links", a list of dicts of their figures."""
        return {
            "hosts": list(self.hosts),
            "links": [
                {
                    "name": link.name,
                    "kind": link.kind,
                    "bytes": link.bytes,
                    "seconds": link.seconds,
                    "gigabytes_per_s": link.rate,
                    "like_gigabytes_per_s": link.like or None,
                    "slow": link.slow,
                    "ranks": [list(end) for end in link.ends],
                    "processes": [list(end) for end in link.processes],
                }
                for link in self.links
            ],
        }


class Initializer:
    """Tries the links of an executor's steps, once."""

    def __init__(self, config: WorldConfig, world: World, executor: Executor | OneProgramExecutor):
        """Plans the trials of this world's links; none where `is_wanted` says so. Runs nothing."""
        self._config, self._world = config, world
        self._trials = link_trials(executor) if is_wanted(config, world) else ()

    def programs(self) -> list[Program]:
        """The programs of the trials, which this process has to compile before they run; [] without trials."""
        return programs_of(self._trials)

    def __call__(self, files: RunFiles | None) -> list[str]:
        """Runs the trials and writes `warm_up.json`; returns lines about the results, none when called again.

        All processes call it; `files` are the run directory's in the process that writes them, else `None`.

        Raises:
          WarmUpError: see `warm_up`.
        """
        trials, self._trials = self._trials, ()
        if not trials:
            return []
        results = warm_up(trials, self._world, self._config.warm_up_seconds)
        if files:
            files.write("warm_up.json", json.dumps(results.numbers(), indent=1))
        return results.lines()


@contextlib.contextmanager
def ends_where_down() -> Iterator[None]:
    """A context for the first step of a command: a `WarmUpError` ends the process, and its peers, with its line.

    Its value is None: `with ends_where_down(): …`. Other exceptions pass through.
    """
    try:
        yield
    except WarmUpError as error:
        if has_peers():
            time.sleep(NEWS)
        sys.stdout.flush()
        give_up(str(error))  # at once: a thread may wait for ever


def is_wanted(config: WorldConfig, world: World) -> bool:
    """Whether a run tries its links, by the setting `World.warm_up`: "on", "off" or "auto".

    With "auto" it does where they can be slow or down, unlike those of one process's virtual devices.

    Args:
      config: has the setting, `recipe.world`.
      world: the devices, such as `place(recipe).world`.
    """
    if config.warm_up == "auto":
        return world.size > 1 and (world.processes > 1 or world.platform != "cpu")
    return config.warm_up == "on"


_numbers = itertools.count()
"""Numbers warm-ups, alike in all processes: each meeting needs a unique name, also where several worlds are tried."""


def warm_up(trials: Sequence[LinkTrial], world: World, seconds: float) -> WarmUp:
    """Runs the trials that touch this process's devices, one after another; every process has to call it.

    Args:
      trials: a trial for each direction of each boundary and for each collective, the same in every process, such as
        `link_trials(executor)`; their programs are compiled.
      world: the devices, such as `place(recipe).world`.
      seconds: the longest that a trial may take.

    Raises:
      WarmUpError: a trial failed, or did not end in time; the thread that waits for it is left behind.
    """
    hosts, number = gather_texts(socket.gethostname()), next(_numbers)
    processes = [tuple(_processes(world, end) for end in trial.ends) for trial in trials]
    seconds_here: list[float | None] = []
    for index, (trial, ends) in enumerate(zip(trials, processes, strict=True)):
        if world.local_ranks.isdisjoint(trial.ranks):
            seconds_here.append(None)
            continue
        barrier(f"warm-up/{number}/{index}", {process for end in ends for process in end})
        try:
            seconds_here.append(_within(seconds, lambda trial=trial: _timed(trial)))
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            where = _where(trial.ends, ends, hosts)
            raise WarmUpError(f"warm-up: {trial.name}, {where}: {reason}") from error
    seconds_by_process = [json.loads(answer) for answer in gather_texts(json.dumps(seconds_here))]
    links = [
        Link(
            name=trial.name,
            kind=trial.kind,
            bytes=trial.bytes,
            ends=trial.ends,
            processes=ends,
            seconds=max(times[index] for times in seconds_by_process if times[index] is not None),
        )
        for index, (trial, ends) in enumerate(zip(trials, processes, strict=True))
    ]
    crossed = {trial.name.rpartition(" ")[0] for trial in trials if trial.is_boundary}
    return WarmUp(
        links=compared(links),
        boundaries=len(crossed),
        collectives=sum(not trial.is_boundary for trial in trials),
        hosts=tuple(hosts),
    )


def compared(links: Sequence[Link]) -> tuple[Link, ...]:
    """The links in their order, each with ``like``, the median rate in GB/s of the similar ones; 0.0 without any.

    Similar links are of one kind and about as many bytes, and both or neither between processes. links: results of
    trials, such as ``warm_up(…).links``.
    """
    result = []
    for link in links:
        rates = [peer.rate for peer in links if peer is not link and _alike(link, peer)]
        result.append(replace(link, like=statistics.median(rates) if rates else 0.0))
    return tuple(result)


def _alike(first: Link, second: Link) -> bool:
    """Whether two links are similar, see ``SIZES``."""
    within = [len({process for end in link.processes for process in end}) == 1 for link in (first, second)]
    ratio = max(first.bytes, second.bytes) / max(1, min(first.bytes, second.bytes))
    return first.kind == second.kind and within[0] == within[1] and ratio <= SIZES


def _timed(trial: LinkTrial) -> float:
    """Seconds of the fastest of `TIMES` uses, after a first one whose result is checked."""
    if not trial.arrived(jax.block_until_ready(trial.send(trial.make()))):
        raise RuntimeError("what arrived is not what was sent")
    best = math.inf
    for _ in range(TIMES):
        payload = jax.block_until_ready(trial.make())
        begin = time.perf_counter()
        jax.block_until_ready(trial.send(payload))
        best = min(best, time.perf_counter() - begin)
    return best


def _within(seconds: float, work: Callable[[], float]) -> float:
    """The result of `work`, which cannot be interrupted: it runs in a thread, which is left behind if it hangs.

    Raises:
      TimeoutError: `work` took longer than `seconds`.
    """
    results: list[float] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="warm-up", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"nothing arrived in {seconds:g} s (World.warm_up_seconds)")
    return results[0]


# ---- names -----------------------------------------------------------------------------------------------------------


def _processes(world: World, ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({world.devices[rank].process_index for rank in ranks}))


def _where(ends: Sequence[tuple[int, ...]], processes: Sequence[tuple[int, ...]], hosts: Sequence[str]) -> str:
    """The ranks at each end with their processes: "rank 0 of process 0 on a to ranks 2–3 of process 1 on b"."""
    sides = []
    for ranks, numbers in zip(ends, processes, strict=True):
        names = ", ".join(f"{process} on {hosts[process]}" for process in numbers)
        sides.append(f"{_ranks(ranks)} of process{'es' * (len(numbers) > 1)} {names}")
    return " to ".join(sides)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {show_ranks(ranks)}"


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
