"""Running a benchmark again on one core, where nothing overlaps: a step takes at least the time of its ops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mmjax
from mmjax.bench.rows import Row


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def checkout_environment() -> dict[str, str]:
    """The environment of a process that imports this checkout's mmjax and benchmarks, from any working directory."""
    root = str(Path(mmjax.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def run_on_one_core(name: str, rounds: int) -> Iterator[Row]:
    """Yields the rows of benchmark ``name``, run by a process on the first of this process's cores.

    It is a new process, since threads that exist already would keep their cores. A line on stderr says so.

    Raises:
      SystemExit: with the process's status when it fails.
    """
    everything = os.sched_getaffinity(0)
    core = min(everything)
    print(f"{name}: runs in a process of its own on core {core} alone", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "mmjax.bench", name, "--json", f"--rounds={rounds}"]
    os.sched_setaffinity(0, {core})  # inherited by the process that is started
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=checkout_environment())
    finally:
        os.sched_setaffinity(0, everything)
    with process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield Row.from_json(json.loads(line))
        except BaseException:  # interrupted, or nobody reads on
            process.kill()
            raise
    if process.returncode not in (0, 1):  # 1: a target is missed, which the rows say
        raise SystemExit(process.returncode)
