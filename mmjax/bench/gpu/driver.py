"""Runs the sections one after another, each in a process with a time limit, and collects their findings."""

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
from mmjax.bench.gpu.sections import MACHINE, MEMORY, XLA_FLAGS, Section
from mmjax.configurable import ConfigError

RESULTS, LOG = "results.json", "log.txt"
KILL_SECONDS = 5.0
"""Seconds between the request to end a process and the next stronger one."""
_MANAGED = ("TF_FORCE_UNIFIED_MEMORY", "XLA_PYTHON_CLIENT_ALLOCATOR")


class Driver:
    """One run of ``bench gpu``.

    Attributes:
      results: content of the results file, brought up to date after every section.
    """

    def __init__(self, folder: Path, *, small: bool, seconds: float):
        """Takes the folder for results, which is made.

        Args:
          folder: the folder.
          small: whether shapes are small enough for a CPU.
          seconds: from now on, the time of all sections together.
        """
        self._folder, self._small, self._start = folder, small, time.monotonic()
        self._end = self._start + seconds
        folder.mkdir(parents=True, exist_ok=True)
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        settings = {"mmjax": mmjax.__version__, "started": started, "small": small, "seconds": seconds}
        self.results: dict[str, Any] = {**settings, "machine": {}, "sections": {}}

    def run(self, sections: Sequence[Section], machine: Section = MACHINE) -> Iterator[tuple[str, dict[str, Any]]]:
        """Runs ``machine`` and the sections; yields the name and the findings of each when it has ended.

        Findings have a "status": "ok", "wrong" (a check failed), "failed", "out of time" or "left out" (a package is
        missing).

        Raises:
          ConfigError: there is no accelerator, and shapes are not small.
        """
        with open(self._folder / LOG, "w", encoding="utf-8") as log, _ends_at_sigterm():
            self.results["machine"] = findings = self._section(machine, sections, log)
            self._write()
            if not self._small and findings.get("platform") in (None, "cpu"):
                reason = findings.get("device") or findings.get("error") or findings["status"]
                raise ConfigError(
                    f"bench gpu: JAX finds no accelerator here ({reason}); add --small to try it on a CPU"
                )
            yield machine.name, findings
            for index, section in enumerate(sections):
                findings = self._left_out(section) or self._section(section, sections[index + 1 :], log)
                self.results["sections"][section.name] = findings
                self._write()
                yield section.name, findings

    @property
    def elapsed(self) -> float:
        """Seconds since the driver was created."""
        return time.monotonic() - self._start

    def _left_out(self, section: Section) -> dict[str, Any] | None:
        missing = [name for name in section.needs if not importlib.util.find_spec(name)]
        return {"status": "left out", "missing": missing} if missing else None

    def _section(self, section: Section, later: Sequence[Section], log: IO[str]) -> dict[str, Any]:
        limit = max(0.0, self._end - time.monotonic() - sum(section_after.seconds for section_after in later))
        limit = max(limit, min(section.seconds, self._end - time.monotonic()))
        if limit <= 0:
            return {"status": "out of time", "seconds": 0.0, "limit": 0.0}
        file = self._folder / f"{section.name}.json"
        file.unlink(missing_ok=True)
        log.write(f"\n==== {section.name} (at most {limit:.0f} s)\n")
        log.flush()
        command = [sys.executable, "-m", "mmjax.bench.gpu.section_process", section.where, str(file), f"{limit:.0f}"]
        start = time.monotonic()
        status = _run(command + ["small"] * self._small, environment(section.environment), log, limit)
        elapsed = round(time.monotonic() - start, 1)
        findings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        file.unlink(missing_ok=True)
        return {"status": _status(status, findings), "seconds": elapsed, "limit": round(limit, 1), **findings}

    def _write(self) -> None:
        self.results["elapsed"] = self.elapsed
        write_json(self._folder / RESULTS, self.results)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a section's process: this process's, with the section's ``variables``.

    A section's XLA flags follow those of this process. Device memory is taken with plain allocations, never as managed
    memory.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _MANAGED}
    if (share := inherited.get(MEMORY)) and float(share) > 1:
        del inherited[MEMORY]
    if XLA_FLAGS in variables:
        variables = {**variables, XLA_FLAGS: f"{inherited.get(XLA_FLAGS, '')} {variables[XLA_FLAGS]}".strip()}
    root = str(Path(mmjax.__file__).resolve().parents[1])
    paths = [root, *filter(None, inherited.get("PYTHONPATH", "").split(os.pathsep))]
    return {**inherited, **variables, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}


def _run(command: Sequence[str], env: Mapping[str, str], log: IO[str], limit: float) -> int | None:
    """Runs the command and returns its exit status. At the limit it ends the whole process group and returns None."""
    process = subprocess.Popen(
        command,
        start_new_session=True,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(KILL_SECONDS)


def _status(exit_status: int | None, findings: Mapping[str, Any]) -> str:
    if exit_status is None:
        return "out of time"
    if exit_status:
        return "failed" if exit_status > 0 else f"failed: {signal.Signals(-exit_status).name}"
    return "ok" if all(findings.get("checks", {}).values()) else "wrong"


@contextlib.contextmanager
def _ends_at_sigterm() -> Iterator[None]:
    """A context in which SIGTERM to this process also ends the running section."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
