"""``python -m mmjax.bench peer``: steps of mmjax, PyTorch and compiled PyTorch, taken in turn on the same machine.

Each system has a process of its own, so that pools of threads do not mix. All read one folder of weights and one file
of dialogues, which are made here. A ratio of times is worth nothing unless the systems compute the same, so the losses
of the first steps are compared first.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.one_core import checkout_environment, cores
from benchmarks.peer.model import SIZES, SMALL, write_dialogues, write_model
from benchmarks.peer.protocol import Settings, System, has_modules
from mmjax.attention.settings import DTYPES
from mmjax.bench.rows import Row, Target, at_least, at_most
from mmjax.configurable import ConfigError, one_of, require

FIRST_STEPS = 4
"""Steps whose losses are compared."""
OURS, EAGER, COMPILED = "mmjax", "torch eager", "torch.compile"
TARGETS: Mapping[str, Target] = {EAGER: at_least(1.0), COMPILED: at_least(0.9)}
"""Targets of mmjax's speed over another system's, in fp32."""
LOSSES = {"float32": 1e-5, "bfloat16": 2e-2}
"""Limits on the relative differences of losses."""
OPS = 8
"""Kinds of operations that are shown of each system."""
Steps = Mapping[str, Sequence[Mapping[str, float]]]
"""Loss and times of steps, by system."""


def bench_peer(rounds: int, small: bool, dtype: str, threads: int, python: str) -> Iterator[Row]:
    """Yields how far losses are apart, speeds of mmjax over the others, times of steps, and where they go.

    Args:
      rounds: timed steps of each system.
      small: a model that takes no time: tries the path, and has no targets for speed.
      dtype: of the computation, a value of ``Train.dtype``.
      threads: cores of each process; on a GPU they are the host's.
      python: a Python with torch and transformers; "" stands for this one.

    Raises:
      ConfigError: a flag is wrong, or that Python lacks one of them.
    """
    one_of("--dtype", dtype, DTYPES)
    require(1 <= threads <= cores(), "--threads", threads, f"must be 1 to {cores()}, the cores of this process")
    if not has_modules(python or sys.executable, ("torch", "transformers")):
        fix = "run `pip install -e '.[peer]'` in the checkout, or name a Python that has them with --python"
        raise ConfigError(f"--python={python!r}: {python or 'this Python'} lacks torch or transformers; {fix}")
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        folder, dialogues, sizes = Path(home) / "model", Path(home) / "dialogues.npz", SMALL if small else SIZES
        write_model(sizes, folder)
        write_dialogues(sizes, FIRST_STEPS, dialogues)
        settings = Settings(folder=str(folder), dialogues=str(dialogues), dtype=dtype, threads=threads)
        systems = {name: stack.enter_context(system) for name, system in _started(settings, python).items()}
        first = {name: [system.step() for _ in range(FIRST_STEPS)] for name, system in systems.items()}
        yield from _loss_rows(first, dtype)
        yield from _time_rows(_in_turn(systems, rounds), {} if small or dtype != "float32" else TARGETS)
        for name, system in systems.items():
            seconds = system.ops()
            for kind in list(seconds)[:OPS]:
                yield Row(bench="peer", case=f"{name}: {_shortened(kind)}", value=1e3 * seconds[kind], unit="ms a step")


def _started(settings: Settings, python: str) -> Mapping[str, System]:
    """The systems, each in a process that is bound to the same cores."""
    environment = checkout_environment() | {"OMP_NUM_THREADS": str(settings.threads)}
    everything = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(everything)[: settings.threads])  # inherited by the processes that are started
    try:
        torch, module = python or sys.executable, "benchmarks.peer.torch_process"
        return {
            OURS: System(sys.executable, "benchmarks.peer.mmjax_process", settings, environment),
            EAGER: System(torch, module, settings, environment),
            COMPILED: System(torch, module, replace(settings, compiled=True), environment),
        }
    finally:
        os.sched_setaffinity(0, everything)


def _in_turn(systems: Mapping[str, System], rounds: int) -> Steps:
    steps: dict[str, list[Mapping[str, float]]] = {name: [] for name in systems}
    for number in range(rounds):
        for name in sorted(systems, reverse=bool(number % 2)):  # none of them always follows the same one
            steps[name].append(systems[name].step())
    return steps


def _loss_rows(steps: Steps, dtype: str) -> Iterator[Row]:
    for name in TARGETS:
        pairs = [(ours["loss"], peer["loss"]) for ours, peer in zip(steps[OURS], steps[name], strict=True)]
        apart = max(abs(ours - peer) / abs(peer) for ours, peer in pairs)
        case = f"losses of {FIRST_STEPS} steps beside {name}, relative"
        yield Row(bench="peer", case=case, value=apart, unit="difference", target=at_most(LOSSES[dtype]))


def _time_rows(steps: Steps, targets: Mapping[str, Target]) -> Iterator[Row]:
    for name in TARGETS:
        for key, words in (("seconds", ""), ("processor_seconds", ", processor time")):
            pairs = zip(steps[OURS], steps[name], strict=True)
            ratio = median(peer[key] / ours[key] for ours, peer in pairs)
            target = targets.get(name) if key == "seconds" else None
            yield Row(bench="peer", case=f"speed of mmjax over {name}{words}", value=ratio, unit="ratio", target=target)
    for name, measured in steps.items():
        for key, words in (("seconds", "a step"), ("processor_seconds", "processor time of a step")):
            value = median(step[key] for step in measured)
            yield Row(bench="peer", case=f"{name}: {words}", value=value, unit="s")


def _shortened(kind: str) -> str:
    """The name of a kind of operations, without the signs and keys of compiled graphs' names."""
    words = kind.strip("# ")
    return words if len(words) <= 40 else f"{words[:37]}..."
