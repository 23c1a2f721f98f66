"""``python -m mmjax.launch -n 4 [--devices_per_process=2] -m mmjax.train --gin_file=F …``: N processes on this host.

Each process gets its number, and the address where they meet, in its environment. Their output is printed line by line,
with the number in front. If one fails, the launcher says which and why, and stops the others. It never imports JAX.
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
from mmjax.flags import FOLLOWED, INTERRUPTED, Flag, entry, one_line_errors, parse_flags

USAGE = "python -m mmjax.launch -n N [--devices_per_process=D] -m mmjax.train"
FLAGS = (
    Flag(name="n", doc="how many processes, such as 2."),
    Flag(
        name="devices_per_process",
        doc="devices of each: virtual ones on CPU; on GPUs the first D of the host for process 0, and so on. "
        "Unless given, a CPU process gets its share of what the layouts need, and sees every GPU.",
        default=0,
    ),
)
GRACE = 8.0
"""Seconds that the other processes have to end, by themselves or after SIGTERM, before they are killed."""
_NEWS = 3.0
"""Seconds of ``GRACE`` before SIGTERM, in which they may still report what they know."""
_LAST_LINES = 8
_POLL = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the processes; the exit status is that of the first that failed, or 0."""
    with one_line_errors():
        count, each, command = _parse(sys.argv[1:] if argv is None else list(argv))
    with _Job(count, each, command) as job:
        return job.wait()


def _parse(argv: list[str]) -> tuple[int, int, list[str]]:
    """Number of processes, devices of each, and the command without Python.

    Raises:
      ConfigError: something is missing or out of range.
    """
    at = argv.index("-m") if "-m" in argv else len(argv)
    own, command = argv[:at], argv[at:]
    if own and Path(own[-1]).name.startswith("python"):  # the command as it is written for one process
        own = own[:-1]
    if len(command) < 2 and not {"-h", "--help"} & set(own):
        raise ConfigError(f"-m is missing: name what to run; write {USAGE}")
    own = [f"--{word[1:]}" if word == "-n" or word.startswith("-n=") else word for word in own]
    values = parse_flags(own, FLAGS, USAGE, helped=_help).values
    count, each = str(values["n"]), int(values["devices_per_process"])
    if not count:
        raise ConfigError(f"-n is missing: give the number of processes, such as 2; write {USAGE}")
    if not count.isdecimal() or not int(count):
        raise ConfigError(f"-n={count}: must be an integer of 1 or more, such as 2")
    if each < 0:
        raise ConfigError(f"--devices_per_process={each}: must be 1 or more, such as 2")
    return int(count), each, command


def _help() -> str:
    """The text that ``--help`` prints."""
    lines = [entry("  " + ("-n" if flag.name == "n" else f"--{flag.name}"), flag.doc) for flag in FLAGS]
    return "\n".join([f"usage: {USAGE} --gin_file=F ...", "", *lines, entry("  -m", "what to run, and its flags.")])


@dataclass
class _Child:
    """One process and its last lines on stderr."""

    number: int
    process: subprocess.Popen[bytes]
    last: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    readers: list[threading.Thread] = field(default_factory=list)


class _Job:
    """The processes of one launch, from their start to their end."""

    def __init__(self, count: int, each: int, command: Sequence[str]):
        self._width, self._asked, self._lock = len(str(count - 1)), 0, threading.Lock()
        self._previous = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        self._children: list[_Child] = []
        port = free_port()
        try:
            for number in range(count):
                self._children.append(self._start(number, _environment(number, count, each, port), command))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(list(self._children), GRACE)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _start(self, number: int, environment: dict[str, str], command: Sequence[str]) -> _Child:
        # A group of its own: Ctrl-C reaches the launcher alone, which passes it on once.
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
                    child.last.append(text)
                with self._lock, contextlib.suppress(BrokenPipeError):
                    out.write(f"[{child.number:>{self._width}}] {text}\n")
                    out.flush()

    def wait(self) -> int:
        """Waits for all processes; if one fails, says so and stops the others. Returns the exit status."""
        noticed = None
        while running := [child for child in self._children if child.process.poll() is None]:
            failed = self._failed()
            # Processes that ended because another one did may be seen first; that one is named, if it shows up in time.
            if failed and (failed.process.returncode != FOLLOWED or (noticed and time.monotonic() > noticed + _NEWS)):
                break
            # Python may lose a Ctrl-C: a process that has not got it would wait for those that are gone.
            if self._asked and any(child.process.returncode for child in self._children):
                break
            noticed = noticed or (time.monotonic() if failed else None)
            time.sleep(_POLL)
        if (failed := self._failed()) and not self._asked:
            _drain(failed)
            self._say(failed, failed.process.returncode)
            self._end(running, GRACE)
            return _shell(failed.process.returncode)
        self._end(running, GRACE)
        statuses = [_shell(child.process.returncode) for child in self._children]
        return INTERRUPTED if self._asked and any(statuses) else max(statuses)

    def _failed(self) -> _Child | None:
        """A process that failed, if possible one that did not just follow another; None after Ctrl-C."""
        ended = [child for child in self._children if child.process.poll() and not self._asked]
        return min(ended, key=lambda child: child.process.returncode == FOLLOWED, default=None)

    def _say(self, child: _Child, status: int) -> None:
        why = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        lines = [f"launch: process {child.number} {why}; stopping the others"]
        if child.last:
            lines += ["launch: its last words:", *(f"  {line}" for line in child.last)]
        with self._lock:
            print("\n".join(lines), file=sys.stderr, flush=True)

    def _stop(self, number: int, _frame: object) -> None:
        """Passes Ctrl-C on; the second one, or SIGTERM, ends everything."""
        self._asked += 1
        hard = self._asked > 1 or number == signal.SIGTERM
        for child in self._children:
            if hard:
                _signal(child, signal.SIGTERM)
            else:  # not to its data workers, which leave Ctrl-C to it but may be about to start
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(signal.SIGINT)
        if hard:
            threading.Thread(target=self._end, args=(list(self._children), GRACE), daemon=True).start()

    def _end(self, children: Sequence[_Child], grace: float) -> None:
        """Ends processes that still run: waits for them, then sends SIGTERM, then SIGKILL."""
        started = time.monotonic()
        for after, number in ((_NEWS, signal.SIGTERM), (grace, signal.SIGKILL)):
            while any(child.process.poll() is None for child in children) and time.monotonic() < started + after:
                time.sleep(_POLL)
            for child in children:
                if child.process.poll() is None:
                    _signal(child, number)
        for child in children:
            child.process.wait()
            _signal(child, signal.SIGKILL)  # what it has left behind, such as data workers
            _drain(child)


def free_port() -> int:
    """A port of this host that nobody listens on at the moment."""
    with socket.socket() as chosen:
        chosen.bind(("", 0))
        return chosen.getsockname()[1]


def _environment(number: int, count: int, each: int, port: int) -> dict[str, str]:
    own = {
        "MMJAX_COORDINATOR": f"127.0.0.1:{port}",
        "MMJAX_NUM_PROCESSES": str(count),
        "MMJAX_PROCESS_ID": str(number),
    }
    if each:
        own["JAX_NUM_CPU_DEVICES"] = str(each)
        own["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(number * each + i) for i in range(each))
    return {**os.environ, **own}


def _signal(child: _Child, number: signal.Signals) -> None:
    """Sends a signal to a process and to all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)


def _drain(child: _Child) -> None:
    for reader in child.readers:
        reader.join(1.0)


def _shell(status: int) -> int:
    """The exit status in the form of a shell: 128 plus the signal's number for a process that a signal ended."""
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
