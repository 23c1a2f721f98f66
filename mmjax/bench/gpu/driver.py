"""Runs the sections one after another, each in a process with a time limit, and puts together what they find."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import mmjax
from mmjax.bench.gpu.job import write_json
from mmjax.bench.gpu.sections import MACHINE, MEMORY, Section
from mmjax.configurable import ConfigError

RESULTS, LOG = "results.json", "log.txt"
KILL_SECONDS = 5.0
"""Seconds that a process has to end after it was asked to."""
_MANAGED = ("TF_FORCE_UNIFIED_MEMORY", "XLA_PYTHON_CLIENT_ALLOCATOR")


class Driver:
    """One run of ``bench gpu``.

    Attributes:
      results: what is in the file, brought up to date after every section.
    """

    def __init__(self, folder: Path, *, small: bool, seconds: float):
        """``seconds`` is the deadline of everything, from now on."""
        self._folder, self._small, self._start = folder, small, time.monotonic()
        self._end = self._start + seconds
        folder.mkdir(parents=True, exist_ok=True)
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        about = {"mmjax": mmjax.__version__, "started": started, "small": small, "seconds": seconds}
        self.results: dict[str, Any] = {**about, "machine": {}, "sections": {}}

    def run(self, sections: Sequence[Section], machine: Section = MACHINE) -> Iterator[tuple[str, dict[str, Any]]]:
        """Runs them, and gives the name and the findings of each when it has ended.

        Raises:
          ConfigError: there is no accelerator, and shapes are not small.
        """
        with open(self._folder / LOG, "w", encoding="utf-8") as log, _ends_at_sigterm():
            self.results["machine"] = found = self._section(machine, sections, log)
            self._write()
            if not self._small and found.get("platform") in (None, "cpu"):
                seen = found.get("device") or found.get("error") or found["status"]
                raise ConfigError(f"bench gpu: JAX finds no accelerator here ({seen}); add --small to try it on a CPU")
            yield machine.name, found
            for index, section in enumerate(sections):
                found = self._left_out(section) or self._section(section, sections[index + 1 :], log)
                self.results["sections"][section.name] = found
                self._write()
                yield section.name, found

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._start

    def _left_out(self, section: Section) -> dict[str, Any] | None:
        missing = [name for name in section.needs if not importlib.util.find_spec(name)]
        return {"status": "left out", "missing": missing} if missing else None

    def _section(self, section: Section, later: Sequence[Section], log: IO[str]) -> dict[str, Any]:
        limit = max(0.0, self._end - time.monotonic() - sum(other.seconds for other in later))
        limit = max(limit, min(section.seconds, self._end - time.monotonic()))
        if limit <= 0:
            return {"status": "out of time", "seconds": 0.0, "limit": 0.0}
        file = self._folder / f"{section.name}.json"
        file.unlink(missing_ok=True)
        log.write(f"\n==== {section.name} (at most {limit:.0f} s)\n")
        log.flush()
        command = [sys.executable, "-m", "mmjax.bench.gpu.one", section.where, str(file), f"{limit:.0f}"]
        start = time.monotonic()
        code = _run(command + ["small"] * self._small, environment(section.environment), log, limit)
        took = round(time.monotonic() - start, 1)
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        file.unlink(missing_ok=True)
        return {"status": _status(code, found), "seconds": took, "limit": round(limit, 1), **found}

    def _write(self) -> None:
        self.results["elapsed"] = self.elapsed
        write_json(self._folder / RESULTS, self.results)


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a section's process; device memory is taken with plain allocations, never managed."""
    given = {name: value for name, value in os.environ.items() if name not in _MANAGED}
    if (share := given.get(MEMORY)) and float(share) > 1:
        del given[MEMORY]
    root = str(Path(mmjax.__file__).resolve().parents[1])
    paths = [root, *filter(None, given.get("PYTHONPATH", "").split(os.pathsep))]
    return {**given, **own, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}


def _run(command: Sequence[str], env: Mapping[str, str], log: IO[str], limit: float) -> int | None:
    """Runs the command and returns its exit status. At the limit it ends the whole process group and returns None."""
    about: Any = {"env": env, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, start_new_session=True, **about)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(KILL_SECONDS)


def _status(code: int | None, found: Mapping[str, Any]) -> str:
    if code is None:
        return "out of time"
    if code:
        return "failed" if code > 0 else f"failed: {signal.Signals(-code).name}"
    return "ok" if all(found.get("checks", {}).values()) else "wrong"


@contextlib.contextmanager
def _ends_at_sigterm() -> Iterator[None]:
    """Meanwhile a request to end ends the section at work too."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
