"""Entries of mmjax as processes forked from one that has imported everything and started no backend.

A start costs milliseconds instead of seconds of imports. Each process leads a group of its own, so that a signal
reaches all that it has started.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mmjax import jax_compat

ENTRIES = ("train", "eval", "export")
HEAVY = ("mmjax.train.trainer", "mmjax.eval.evaluator", "mmjax.viz.predictions", "matplotlib.pyplot", "grain.python")
CRASHED = 70
"""Exit status after an unhandled exception."""
_POLL = 0.02


def preload() -> None:
    """Imports the modules of forked processes into this one, and sets its environment: CPU, cheap compilation."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("MPLBACKEND", "agg")
    jax_compat.compile_cheaply()
    for name in ENTRIES:
        importlib.import_module(f"mmjax.{name}.__main__")
    for name in HEAVY:  # entries import them after parsing flags
        importlib.import_module(name)


def entry(name: str, flags: Sequence[str]) -> Callable[[], object]:
    """A function that runs ``python -m mmjax.<name>`` with these flags in the process that calls it, and ends it.

    ``name`` is one of ``ENTRIES``.
    """
    from mmjax.config.flags import run_command

    main = importlib.import_module(f"mmjax.{name}.__main__").main
    return lambda: run_command(lambda: main(list(flags)))


def program(flags: Sequence[str]) -> Callable[[], object]:
    """A function that replaces the process that calls it by Python with these flags, such as ["-m", "mmjax.launch"].

    It is for programs that start processes.
    """
    return lambda: os.execv(sys.executable, [sys.executable, *flags])


class Process:
    """A forked process.

    Attributes:
      log: file of its output.
      pid: its process id, and that of its group.
      status: its exit status once it has ended, negative after a signal.
    """

    def __init__(self, work: Callable[[], object], log: Path, environment: Mapping[str, str] | None = None):
        """Forks a process that calls ``work``; its result, or the code of its ``SystemExit``, is the exit status.

        A result that is false is status 0, and an exception ``CRASHED``.

        Args:
          work: called in the forked process.
          log: file that output and errors are appended to.
          environment: variables to add to this process's.
        """
        self.log, self.status = log, None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks; no backend has been started in this process
            self.pid = os.fork()
        if not self.pid:
            _run_forked(work, log, environment or {})
        with contextlib.suppress(OSError):  # parent and child both do it: one of them is first
            os.setpgid(self.pid, self.pid)

    def poll(self) -> int | None:
        """The exit status, negative after a signal; ``None`` while it runs. Does not wait."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status: int | None = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> int | None:
        """Waits up to ``seconds`` for the end; the exit status, or ``None`` as soon as ``until`` holds before it.

        Raises:
          TimeoutError: neither happened in time; the process is killed.
        """
        end = time.monotonic() + seconds
        while self.poll() is None and not until():
            if time.monotonic() > end:
                self.signal(signal.SIGKILL)
                raise TimeoutError(f"no end after {seconds:.0f} s")
            time.sleep(_POLL)
        return self.status

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its group; after SIGKILL it waits for the end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        if number == signal.SIGKILL and self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def text(self) -> str:
        """The output of the process so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def _run_forked(work: Callable[[], object], log: Path, environment: Mapping[str, str]) -> None:
    """Runs ``work`` in the forked process and ends the process; never returns."""
    status: object = CRASHED
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # A tool that captures output may have replaced both by files of its own.
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # without the soak's handler
        status = work() or 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status if isinstance(status, int) else CRASHED)
