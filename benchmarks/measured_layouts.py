"""One of the processes of `bench predictions`: a device with a core of its own, which profiles or trains layouts.

Started by `mmjax.launch` with where to write and how many rounds. Process 0 writes; as one process it takes layouts of
one device, and as two it makes the profile and takes layouts of two.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.predictions import candidates, configuration
from benchmarks.steps import Stepper
from mmjax import jax_compat
from mmjax.config.flags import run_command
from mmjax.mesh import company, processes
from mmjax.plan.planned import planned
from mmjax.profile.profiler import profile_of


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the measured seconds of this number of devices, and of more than one the profile, as JSON."""
    out, rounds = sys.argv[1:] if argv is None else argv
    found = company.find_processes(dict.fromkeys(company.NAMES, ""))
    own_core(found.index if found else 0)
    jax_compat.compile_cheaply()
    processes.join(found)
    config = configuration()
    devices = found.count if found else 1
    chosen = {name: one for name, one in candidates().items() if one.devices == devices}
    steps = {}
    for name, candidate in chosen.items():
        if processes.is_first():
            print(f"compiling {name}", flush=True)
        steps[name] = Stepper(planned(config, candidate))
    # Between two halves of the rounds, so that what slows the machine for a while slows neither alone.
    seconds = shortest(steps, -(-int(rounds) // 2))
    profile = profile_of(config).as_json() if devices > 1 else None
    again = shortest(steps, int(rounds) // 2)
    seconds = {name: min(one, again.get(name, one)) for name, one in seconds.items()}
    if processes.is_first():
        Path(out).write_text(json.dumps({"seconds": seconds, "profile": profile}), encoding="utf-8")
    return 0


def own_core(index: int) -> None:
    """Keeps this process, and the threads that it will start, to one of the cores that it may use."""
    if hasattr(os, "sched_setaffinity"):
        own = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {own[index % len(own)]})


def shortest(steps: Mapping[str, Stepper], rounds: int) -> dict[str, float]:
    """Seconds of the shortest step of each, taken in turn; a step lasts until the last process has ended it."""
    found = dict.fromkeys(steps, float("inf"))
    for _, (name, step) in itertools.product(range(rounds), steps.items()):
        processes.everyone_says("")
        start = time.perf_counter()
        step()
        took = time.perf_counter() - start
        found[name] = min(found[name], max(map(float, processes.everyone_says(repr(took)))))
    return found


if __name__ == "__main__":
    run_command(main)
