"""``python -m mmjax.launch -n 4 [--devices_per_process=2] -m mmjax.train --gin_file=F …``: N processes on this host.

Each process gets its number and the coordinator's address in its environment. The output of all is printed line by
line, with the number in front. If one fails, the launcher reports it, stops the others, and starts all again if that
may help. It never imports JAX.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mmjax.configurable import ConfigError
from mmjax.flags import FOLLOWED, INTERRUPTED, REFUSED, TOO, Flag, entry, one_line_errors, parse_flags
from mmjax.restarts import MOST, Restarts, grace_of, is_training

USAGE = "python -m mmjax.launch -n N [--devices_per_process=D] -m mmjax.train"
FLAGS = (
    Flag(name="n", doc="how many processes, such as 2."),
    Flag(
        name="devices_per_process",
        doc="devices of each: virtual ones on CPU; on GPUs the first D of the host for process 0, and so on. "
        "Unless given, a CPU process gets its share of what the layouts need, and sees every GPU.",
        default=0,
    ),
    Flag(
        name="max_restarts",
        doc="how often in a row all are started again after a crash that left no newer checkpoint and no further step; "
        f"{MOST} for mmjax.train and 0 for other commands unless given.",
    ),
)
GRACE = 8.0
"""Seconds after the failure of one process until the others are killed, if they have not ended before."""
MARGIN = 20.0
"""Seconds beyond `Checkpoint.grace_seconds` between SIGTERM and killing a process. It should end by itself before that,
and clusters wait longer."""
PAUSE = 1.0
"""Seconds between an end and the next start."""
_NEWS = 3.0
"""Seconds of ``GRACE`` before SIGTERM, in which the other processes may still report errors."""
_LAST_LINES = 8
_POLL = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command in several processes of this host; returns the exit status of the first that failed, or 0.

    Args:
      argv: the arguments, without the program's name, such as ["-n", "2", "-m", "mmjax.train",
        "--gin_file=digits_vlm"]; by default this process's.
    """
    with one_line_errors():
        count, devices, max_restarts, command = _parse(sys.argv[1:] if argv is None else list(argv))
        restarts = Restarts(command, max_restarts)
    with _Job(count, devices, grace_of(command)) as job:
        status = job.run(command)
        while not job.stopping:
            again, line = restarts.again(status)
            job.say(line)
            if not again:
                break
            status = job.run(restarts.command) if job.pause() else INTERRUPTED
        return status


def _parse(argv: list[str]) -> tuple[int, int, int, list[str]]:
    """Parses the launcher's command line.

    Returns:
      Number of processes, devices of each, restarts in a row without progress, and the command without Python.

    Raises:
      ConfigError: something is missing or out of range.
    """
    at = min((argv.index(word) for word in ("-m", "mmjax") if word in argv), default=len(argv))
    flag_words, command = argv[:at], argv[at:]
    if command[:1] == ["mmjax"] and len(command) > 1:
        command = ["-m", f"mmjax.{command[1]}", *command[2:]]
    if flag_words and Path(flag_words[-1]).name.startswith("python"):  # the command as it is written for one process
        flag_words = flag_words[:-1]
    if len(command) < 2 and not {"-h", "--help"} & set(flag_words):
        raise ConfigError(f"-m is missing: name what to run; write {USAGE}")
    flag_words = [f"--{word[1:]}" if word == "-n" or word.startswith("-n=") else word for word in flag_words]
    values = parse_flags(flag_words, FLAGS, USAGE, make_help=_help).values
    count, devices = str(values["n"]), int(values["devices_per_process"])
    if not count:
        raise ConfigError(f"-n is missing: give the number of processes, such as 2; write {USAGE}")
    if not count.isdecimal() or not int(count):
        raise ConfigError(f"-n={count}: must be an integer of 1 or more, such as 2")
    if devices < 0:
        raise ConfigError(f"--devices_per_process={devices}: must be 1 or more, such as 2")
    max_restarts = str(values["max_restarts"]) or str(MOST if is_training(command) else 0)
    if not max_restarts.isdecimal():
        raise ConfigError(f"--max_restarts={max_restarts}: must be an integer of 0 or more, such as {MOST}")
    return int(count), devices, int(max_restarts), command


def _help() -> str:
    """The text that ``--help`` prints."""
    lines = [entry("  " + ("-n" if flag.name == "n" else f"--{flag.name}"), flag.doc) for flag in FLAGS]
    return "\n".join([f"usage: {USAGE} --gin_file=F ...", "", *lines, entry("  -m", "what to run, and its flags.")])


@dataclass
class _Child:
    """A process of the launch and its last lines on stderr."""

    number: int
    process: subprocess.Popen[bytes]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    readers: list[threading.Thread] = field(default_factory=list)

    @property
    def followed(self) -> bool:
        """Whether it has ended because another process has; it repeats the status of a refused one."""
        status = self.process.returncode
        return status == FOLLOWED or (status == REFUSED and any(line.endswith(TOO) for line in list(self.last_lines)))


class _Job:
    """The processes of one launch, from their first start to their last end.

    Attributes:
      stopping: whether Ctrl-C or SIGTERM was received.
    """

    def __init__(self, count: int, devices: int, grace: float):
        """Starts nothing.

        Args:
          count: number of processes.
          devices: devices of each process; 0 leaves them to JAX.
          grace: seconds that processes may take to end after SIGTERM.
        """
        self._count, self._devices, self._grace = count, devices, grace
        self._width, self._lock = len(str(count - 1)), threading.Lock()
        self.stopping, self._interrupts, self._deadline = False, 0, 0.0
        self._previous = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        self._children: list[_Child] = []

    def run(self, command: Sequence[str]) -> int:
        """Starts all processes and waits for their end; returns the exit status."""
        self._children, port = [], free_port()
        for number in range(self._count):
            environment = _environment(number, self._count, self._devices, port)
            self._children.append(self._start(number, environment, command))
            if self.stopping:  # this process may have missed the signal; none has anything to save yet
                self._end(GRACE)
                return INTERRUPTED
        return self._wait()

    def pause(self) -> bool:
        """Waits before another start; returns False if a signal has cancelled it."""
        until = time.monotonic() + PAUSE
        while not self.stopping and time.monotonic() < until:
            time.sleep(_POLL)
        return not self.stopping

    def say(self, line: str) -> None:
        """Prints a line of the launcher's own, if there is one."""
        if line:
            with self._lock:
                print(f"launch: {line}", file=sys.stderr, flush=True)

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(GRACE)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _start(self, number: int, environment: dict[str, str], command: Sequence[str]) -> _Child:
        # In a process group of its own, so that Ctrl-C reaches the launcher alone, which passes it on once.
        process = subprocess.Popen(
            [sys.executable, "-u", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        child = _Child(number, process)
        for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert stream is not None
            reader = threading.Thread(target=self._copy, args=(child, stream, out), daemon=True)
            reader.start()
            child.readers.append(reader)
        return child

    def _copy(self, child: _Child, stream: IO[bytes], out: IO[str]) -> None:
        with stream:
            for line in iter(stream.readline, b""):
                text = line.decode(errors="replace").rstrip("\n")
                if out is sys.stderr:
                    child.last_lines.append(text)
                with self._lock, contextlib.suppress(BrokenPipeError):
                    out.write(f"[{child.number:>{self._width}}] {text}\n")
                    out.flush()

    def _wait(self) -> int:
        """Waits for all processes; if one fails, reports it and stops the others. Returns the exit status."""
        noticed_at = None
        while running := [child for child in self._children if child.process.poll() is None]:
            failed = self._failed()
            # A process that followed another one may be noticed first: waits a while for the cause.
            if failed and (not failed.followed or (noticed_at and time.monotonic() > noticed_at + _NEWS)):
                break
            # Python may lose a Ctrl-C: a process that has lost it would wait for the ended ones.
            if self._interrupts and any(child.process.returncode for child in self._children):
                break
            if self._deadline and time.monotonic() > self._deadline:
                names = ", ".join(str(child.number) for child in running)
                self.say(f"process {names} has not ended in time: killed")
                self._end(0.0)
                break
            noticed_at = noticed_at or (time.monotonic() if failed else None)
            time.sleep(_POLL)
        if failed := self._failed():
            _drain(failed)
            self._blame(failed, failed.process.returncode)
            self._end(GRACE)
            return _shell_status(failed.process.returncode)
        self._end(GRACE)
        statuses = [_shell_status(child.process.returncode) for child in self._children]
        return INTERRUPTED if self.stopping and any(statuses) else max(statuses)

    def _failed(self) -> _Child | None:
        """A failed process, if possible one that did not just follow another; None after Ctrl-C and SIGTERM."""
        ended = [child for child in self._children if child.process.poll() and not self.stopping]
        return min(ended, key=lambda child: child.followed, default=None)

    def _blame(self, child: _Child, status: int) -> None:
        if status == INTERRUPTED:
            self.say(f"process {child.number} was interrupted; stopping the others")
            return
        end = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        lines = [f"launch: process {child.number} {end}; stopping the others"]
        if child.last_lines:
            lines += ["launch: its last words:", *(f"  {line}" for line in child.last_lines)]
        with self._lock:
            print("\n".join(lines), file=sys.stderr, flush=True)

    def _stop(self, number: int, _frame: object) -> None:
        """Passes Ctrl-C and the first SIGTERM on. SIGTERM and a second Ctrl-C set a deadline for the processes."""
        if number == signal.SIGTERM and self._deadline:
            return
        self.stopping = True
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGTERM:
            self._deadline = time.monotonic() + self._grace + MARGIN
        elif self._interrupts > 1:
            self._deadline = time.monotonic() + GRACE
        for child in self._children:
            if child.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(number)

    def _end(self, grace: float) -> None:
        """Ends the processes that still run: waits, then sends SIGTERM, then SIGKILL."""
        children, started = self._children, time.monotonic()
        for after, number in ((min(_NEWS, grace), signal.SIGTERM), (grace, signal.SIGKILL)):
            while any(child.process.poll() is None for child in children) and time.monotonic() < started + after:
                time.sleep(_POLL)
            for child in children:
                if child.process.poll() is None:
                    _signal(child, number)
        for child in children:
            child.process.wait()
            _signal(child, signal.SIGKILL)  # ends processes that it has left behind, such as data workers
            _drain(child)


def free_port() -> int:
    """The number of a TCP port of this host that is free at the moment; it is not reserved."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def _environment(number: int, count: int, devices: int, port: int) -> dict[str, str]:
    variables = {
        "MMJAX_COORDINATOR": f"127.0.0.1:{port}",
        "MMJAX_NUM_PROCESSES": str(count),
        "MMJAX_PROCESS_ID": str(number),
    }
    if devices:
        variables["JAX_NUM_CPU_DEVICES"] = str(devices)
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(number * devices + i) for i in range(devices))
    return {**os.environ, **variables}


def _signal(child: _Child, number: signal.Signals) -> None:
    """Sends a signal to a process and to all processes that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)


def _drain(child: _Child) -> None:
    for reader in child.readers:
        reader.join(1.0)


def _shell_status(status: int) -> int:
    """The exit status as a shell reports it: 128 plus the signal's number for a process that a signal ended."""
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
