"""One of the processes of `bench predictions`: a device with a core of its own, which profiles or trains layouts.

`mmjax.launch` starts it with the path of the results and the number of rounds. Process 0 writes. One process trains
layouts of one device; two processes make the profile and train layouts of two devices.
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
from mmjax.mesh import process_group, processes
from mmjax.plan.planned import planned
from mmjax.profile.profiler import profile_of


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the seconds of the layouts of this number of devices, and the profile if it is not one, as JSON."""
    out, rounds = sys.argv[1:] if argv is None else argv
    group = process_group.find_processes(dict.fromkeys(process_group.NAMES, ""))
    pin_to_core(group.index if group else 0)
    jax_compat.compile_cheaply()
    processes.join(group)
    config = configuration()
    devices = group.count if group else 1
    device_candidates = {name: candidate for name, candidate in candidates().items() if candidate.devices == devices}
    steps = {}
    for name, candidate in device_candidates.items():
        if processes.is_first():
            print(f"compiling {name}", flush=True)
        steps[name] = Stepper(planned(config, candidate))
    # The profile is made between two halves of the rounds: a slow phase of the machine then affects both.
    seconds = shortest(steps, -(-int(rounds) // 2))
    profile = profile_of(config).as_json() if devices > 1 else None
    later_seconds = shortest(steps, int(rounds) // 2)
    seconds = {name: min(first, later_seconds.get(name, first)) for name, first in seconds.items()}
    if processes.is_first():
        Path(out).write_text(json.dumps({"seconds": seconds, "profile": profile}), encoding="utf-8")
    return 0


def pin_to_core(index: int) -> None:
    """Pins this process, and the threads that it will start, to one of the cores that it may use."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})


def shortest(steps: Mapping[str, Stepper], rounds: int) -> dict[str, float]:
    """Seconds of the shortest step of each layout, taken in turn; a step lasts until the last process has ended it."""
    least = dict.fromkeys(steps, float("inf"))
    for _, (name, step) in itertools.product(range(rounds), steps.items()):
        processes.gather_texts("")
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        least[name] = min(least[name], max(map(float, processes.gather_texts(repr(seconds)))))
    return least


if __name__ == "__main__":
    run_command(main)
