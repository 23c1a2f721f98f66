"""The toy by several real processes, one case after the other: their start costs more than a case.

``python -m mmjax.launch -n 2 --devices_per_process=4 -m several_toys FOLDER [CASE …]`` writes a file for each case
there, which ``results`` reads.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import parity
import test_toy_steps
import toy

from mmjax.config.flags import run_command
from mmjax.mesh.layout import Layout
from mmjax.mesh.process_group import find_processes
from mmjax.mesh.processes import is_first, join
from mmjax.pipeline import zero
from mmjax.pipeline.config import OffloadConfig
from mmjax.pipeline.straight import StraightExecutor

# Of two processes the first has ranks 0-3, of four each has two: the LLM's stages are on different ones.
PIPELINED = {"eye": Layout(dp=2), "ear": Layout(dp=2, rank_offset=6), "llm": Layout(tp=2, pp=2, rank_offset=2)}
WIDE = {"eye": Layout(tp=2), "ear": Layout(dp=2, rank_offset=6), "llm": Layout(tp=2, pp=2, rank_offset=2)}
CHUNKED = {**PIPELINED, "llm": Layout(tp=2, pp=2, chunks=2, rank_offset=2)}
# The first of four processes has no rank: a run refuses that, an executor need not.
BEHIND = {"eye": Layout(rank_offset=2), "ear": Layout(rank_offset=3), "llm": Layout(tp=2, pp=2, rank_offset=4)}
# Each copy of the eye is on processes of its own.
COPIES = {
    "eye": Layout(copies=2, dp=2, rank_offset=2),
    "ear": Layout(dp=2, rank_offset=6),
    "llm": Layout(tp=2, pp=2, rank_offset=2),
}
# The lanes of the eye are on processes of their own, which have its parameters in shards.
PULLING = {**PIPELINED, "eye": Layout(dp=2, lanes=2, rank_offset=2, shard="parameters", gather="pull")}
PARAMETERS, OPTIMIZER = OffloadConfig(parameters=True), OffloadConfig(optimizer=True)


@dataclass(frozen=True, kw_only=True)
class Case(test_toy_steps.Case):
    """A way to run the toy; the new fields are those of ``Settings`` and a schedule's window."""

    route: str = "leader"
    window: int = 0
    offloads: Mapping[str, OffloadConfig] = field(default_factory=dict)


CASES = {
    "copies": Case(layouts=COPIES, clip_norm=0.4, decay=0.1, padded=True),
    "1f1b, sliced": Case(layouts=WIDE, route="sliced", clip_norm=0.4, decay=0.1, padded=True),
    "interleaved": Case(layouts=CHUNKED, schedule="interleaved", buckets=(1, 2, 1, 1), clip_norm=0.4, padded=True),
    "zb-h1": Case(layouts=PIPELINED, schedule="zb-h1", clip_norm=0.4, decay=0.1, padded=True),
    "zb-h1, chunks, sliced, eye frozen": Case(
        layouts=CHUNKED, schedule="zb-h1", route="sliced", buckets=(1, 2, 1, 1), frozen=("eye",)
    ),
    "three phases, instances, offloaded": Case(
        layouts=test_toy_steps.GROUPS,
        schedule="three-phase",
        window=2,
        buckets=(1, 2, 2, 1),
        offloads={"eye": OffloadConfig(parameters=True, optimizer=True), "llm": OPTIMIZER},
        clip_norm=0.4,
        decay=0.1,
    ),
    "three phases, masters offloaded, ear frozen": Case(
        layouts={**test_toy_steps.GROUPS, "eye": Layout(dp=4, tp=2, optimizer_instances=4)},
        schedule="three-phase",
        offloads={"eye": PARAMETERS, "ear": OPTIMIZER},
        frozen=("ear",),
    ),
    "encoders first, offloaded": Case(layouts=PIPELINED, schedule="encoders-first", offloads={"eye": PARAMETERS}),
    "encoders first, ranks 0 and 1 idle": Case(layouts=BEHIND, schedule="encoders-first", clip_norm=0.4),
    "two losses, zb-h1": Case(layouts=test_toy_steps.HAND_DEEP, schedule="zb-h1", hand=0.3, clip_norm=0.4, decay=0.1),
    "lanes pull": Case(layouts=PULLING, schedule="nested", buckets=(1, 2, 2, 1), clip_norm=0.4, decay=0.1, padded=True),
    "lanes pull, encoders first, eye frozen": Case(
        layouts=PULLING, schedule="encoders-first", buckets=(1, 2, 1, 1), frozen=("eye",), padded=True
    ),
    "eager": Case(layouts=PIPELINED, schedule="eager-1f1b", frozen=("llm",)),
    "one program, instances": Case(
        layouts={name: Layout(dp=4, tp=2, optimizer_instances=2) for name in toy.MODULES},
        run=StraightExecutor,
        buckets=(2, 2),
        clip_norm=0.4,
    ),
}


def steps(case: Case, small: int) -> dict[str, Any]:
    """Losses, norms and leaves by step; ``small`` is ``zero.SMALL``."""
    found: dict[str, Any] = {}
    with mock.patch.object(zero, "SMALL", small):
        settings: dict[str, Any] = {"clip_norm": case.clip_norm, "route": case.route, "offloads": case.offloads}
        settings["hand"] = case.hand
        model = toy.placed(case.layouts, toy.optimizers(case.frozen, case.decay), **settings)
        executor = toy.executor(model, len(case.buckets), case.schedule, case.run, window=case.window)
        executor.compile()
        for step in range(toy.STEPS):
            parts = toy.batch(step, case.buckets)
            loss, norms = executor.step(parts, toy.denominators(model, parts)).fetch()
            found[f"{step}/loss"] = loss
            found |= {f"{step}/norm/{module}": norm for module, norm in norms.items()}
            found |= {f"{step}/leaf/{name}": leaf for name, leaf in toy.logical(model, executor.states).items()}
    return found


def results(folder: Path, name: str) -> list[tuple[float, dict[str, float], toy.Leaves]]:
    """Of each step loss, norms and leaves."""
    with np.load(folder / f"{name}.npz") as file:
        found = dict(file)
    part = lambda prefix: {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}  # noqa: E731
    return [
        (
            float(found[f"{step}/loss"]),
            {module: float(norm) for module, norm in part(f"{step}/norm/").items()},
            part(f"{step}/leaf/"),
        )
        for step in range(toy.STEPS)
    ]


def main() -> int:
    join(find_processes({}))
    folder, *names = sys.argv[1:]
    for name in names or CASES:
        case = CASES[name]
        found = steps(case, 1 if case.padded else zero.SMALL)
        if is_first():
            np.savez(Path(folder) / f"{name}.npz", **found)
            print(name, flush=True)
    return 0


if __name__ == "__main__":
    assert parity.DEVICES == 8
    run_command(main)
