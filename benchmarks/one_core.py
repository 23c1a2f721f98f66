"""Running a benchmark again on one core: there nothing overlaps, and a step cannot be faster than what it computes."""

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


def again_environment() -> dict[str, str]:
    """The environment for a process that must import this same mmjax, from any working directory."""
    root = str(Path(mmjax.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def again_on_one_core(name: str, rounds: int) -> Iterator[Row]:
    """The rows of benchmark ``name``, run by a process that has the first of this process's cores alone.

    A process of its own, since threads that exist already would keep their cores. Says so on stderr.

    Raises:
      SystemExit: with the process's status when it fails.
    """
    everything = os.sched_getaffinity(0)
    core = min(everything)
    print(f"{name}: runs in a process of its own on core {core} alone", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "mmjax.bench", name, "--json", f"--rounds={rounds}"]
    os.sched_setaffinity(0, {core})  # inherited by the process that is started
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=again_environment())
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
