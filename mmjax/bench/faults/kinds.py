"""The faults: how each is caused in a run that trains, and the pattern of the line that names it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mmjax.bench.faults.trial import EVERY, FaultFailure, FaultTrial
from mmjax.bench.soak.forked import Process, program
from mmjax.launch import free_port

AT = 2 * EVERY + 1
"""The step after which faults from outside happen: one step after the second checkpoint."""
MIB = 1 << 20
DISK = 24 * MIB
"""Bytes of the small disk."""
_SERVER_START = 120.0
_SERVER_LINE = r"data server \S+:"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault.

    Attributes:
      doc: the fault in words.
      line: pattern of the line that names it; ``{process}`` stands for the faulty process.
      inside: name in ``faulty.FAULTS`` of a fault inside the faulty process; empty for a fault from outside.
      inject: causes a fault from outside, in a trial that has started; returns its time, by ``time.time``. The
        functions below wait for step ``AT`` first, and raise ``FaultFailure`` where the run does not come to it.
      around: a context in which the run is trained, such as a small disk; yields further bindings.
      settings: further bindings of the run, such as ("Train.max_skipped=2",).
      layout: further bindings that change losses; the run without a fault has them too.
      restarted: whether steps after the last checkpoint may be lost.
    """

    doc: str
    line: str
    inside: str = ""
    inject: Callable[[FaultTrial], float] | None = None
    around: Callable[[FaultTrial], contextlib.AbstractContextManager[tuple[str, ...]]] | None = None
    settings: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    restarted: bool = True


def _signalled(trial: FaultTrial, number: signal.Signals) -> float:
    trial.wait_for_step(AT)
    now = trial.now()
    os.kill(trial.process(), number)
    return now


def kill(trial: FaultTrial) -> float:
    """SIGKILL to process 1; see ``Fault.inject``."""
    return _signalled(trial, signal.SIGKILL)


def stop(trial: FaultTrial) -> float:
    """SIGSTOP to process 1, for ever; see ``Fault.inject``."""
    return _signalled(trial, signal.SIGSTOP)


def terminate(trial: FaultTrial) -> float:
    """SIGTERM to the launcher, as a cluster sends it; see ``Fault.inject``."""
    trial.wait_for_step(AT)
    now = trial.now()
    os.kill(trial.command.pid, signal.SIGTERM)
    return now


def kill_worker(trial: FaultTrial) -> float:
    """SIGKILL to a data worker of process 0; see ``Fault.inject``."""
    trial.wait_for_step(AT)
    now = trial.now()
    os.kill(trial.worker(), signal.SIGKILL)
    return now


def tear_checkpoint(trial: FaultTrial) -> float:
    """SIGKILL to all processes; then the largest file of the newest checkpoint loses its second half.

    Starts the command again, and returns the time of that. See ``Fault.inject``.
    """
    trial.wait_for_step(AT)
    trial.wait_for(lambda: trial.newest_checkpoint().name == f"{2 * EVERY:08}", "the second checkpoint")
    for number in range(trial.processes):
        os.kill(trial.process(number), signal.SIGSTOP)
    trial.command.signal(signal.SIGKILL)
    for pid in trial.members():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    files = [path for path in trial.newest_checkpoint().rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    trial.start()
    return trial.now()


@contextlib.contextmanager
def small_disk(trial: FaultTrial) -> Iterator[tuple[str, ...]]:
    """A context in which the run directory is a file system of ``DISK`` bytes, in a mount namespace that ends with it.

    Changes ``trial.run`` to a path by which this process reaches it; yields no bindings.

    Raises:
      FaultFailure: this process may not mount one.
    """
    trial.run.mkdir(parents=True, exist_ok=True)
    script = f"mount -t tmpfs -o size={DISK} tmpfs {trial.run} && echo mounted && exec cat"
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as holder:
        assert holder.stdin and holder.stdout
        if holder.stdout.readline() != b"mounted\n":
            raise FaultFailure("this process may not mount a file system")
        try:
            trial.run = Path(f"/proc/{holder.pid}/root{trial.run}")
            yield ()
        finally:
            holder.stdin.close()


def fill_disk(trial: FaultTrial) -> float:
    """Fills the run directory's file system until a checkpoint is not saved, then makes room; see ``Fault.inject``."""
    trial.wait_for_step(AT)
    now, ballast = trial.now(), trial.run / "ballast"
    with contextlib.suppress(OSError), open(ballast, "ab", buffering=0) as file:
        for size in (MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\1" * size) == size:
                    pass
    trial.wait_for_line("was not saved", now)
    ballast.unlink()
    return now


@contextlib.contextmanager
def data_server(trial: FaultTrial) -> Iterator[tuple[str, ...]]:
    """A context with a data server of the trial; yields the binding with its address. Sets ``trial.port``."""
    trial.port = free_port()
    start_server(trial)
    try:
        yield (f"Data.servers=('grpc://127.0.0.1:{trial.port}',)",)
    finally:
        for server in trial.servers:
            server.signal(signal.SIGKILL)


def start_server(trial: FaultTrial) -> None:
    """Starts a data server of the trial's configuration on ``trial.port``; returns when it serves.

    It becomes the last of ``trial.servers``.

    Raises:
      FaultFailure: the server has ended.
      TimeoutError: it does not serve in time.
    """
    flags = ["-u", "-m", "mmjax.serve", f"--gin_file={trial.folder / 'run.gin'}", f"--port={trial.port}", "--workers=1"]
    flags += [f"--gin.{setting}" for setting in trial.settings if not setting.startswith("Data.servers")]
    server = Process(program(flags), trial.folder / f"serve{len(trial.servers)}.log")
    trial.servers.append(server)
    server.wait(_SERVER_START, lambda: "serving on" in server.text)
    if server.status is not None:
        raise FaultFailure(f"no data server: see {server.log}")


def kill_server(trial: FaultTrial) -> float:
    """SIGKILL to the data server; another one starts when the run has noticed; see ``Fault.inject``."""
    trial.wait_for_step(AT)
    now = trial.now()
    trial.servers[-1].signal(signal.SIGKILL)
    trial.wait_for_line(_SERVER_LINE, now)
    start_server(trial)
    return now


KINDS = {
    "kill": Fault(doc="SIGKILL to process 1", line=r"process 1 was ended by SIGKILL", inject=kill),
    "terminate": Fault(doc="SIGTERM to the launcher", line=r"stopping|SIGTERM", inject=terminate),
    "stop": Fault(doc="SIGSTOP to process 1, for ever", line=r"process 1\b", inject=stop),
    "hang": Fault(
        doc="an op of process 1 never returns",
        line=r"process 1\b",
        inside="hang",
        settings=("World.hang_seconds=10",),
    ),
    "slow": Fault(
        doc="each forward of the encoder takes 0.3 s longer on the devices of process 1",
        line=r"\(vision\) takes \S+ × the median of its module",
        inside="slow",
        # The encoder on all ranks, without a collective in its forward: processes end it at different times.
        layout=("vision/Layout.dp=4", "vision/Layout.rank_offset=0", "llm/Layout.dp=2", "Train.lowering='ops'"),
        restarted=False,
    ),
    "nan": Fault(
        doc="a parameter of process 1 becomes NaN", line=r"not finite", inside="nan", settings=("Train.max_skipped=2",)
    ),
    "worker": Fault(doc="SIGKILL to a data worker", line=r"worker", inject=kill_worker),
    "disk": Fault(
        doc="the disk is full for a while", line=r"No space left", inject=fill_disk, around=small_disk, restarted=False
    ),
    "checkpoint": Fault(
        doc="SIGKILL to all, and half of a file of the newest checkpoint is gone",
        line=r"checkpoint.*(?:damaged|cannot be read|not whole|passed over|is used|older)",
        inject=tear_checkpoint,
    ),
    "server": Fault(
        doc="SIGKILL to the data server; another one takes its place",
        line=_SERVER_LINE,
        inject=kill_server,
        around=data_server,
        restarted=False,
    ),
}
"""Every fault, by name."""
