"""``Train.deterministic`` in two processes of the same program: every parameter and moment is the same, bit for bit."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mmjax.bench.gpu.job import Job

TIMES = 2


def run(job: Job) -> None:
    """Runs ``train`` in two processes, and notes and compares their findings.

    This process starts no backend: each of them has XLA's flags, and compiles its own programs.
    """
    processes = list[dict[str, Any]]()
    for index in range(TIMES):
        file = job.folder / f"deterministic_{index}.json"
        command = [sys.executable, "-m", "mmjax.bench.gpu.section_process", f"{__name__}:train", str(file), "600"]
        subprocess.run(command, env=dict(os.environ), check=True)
        processes.append(_read(file))
        job.note(processes=processes)
    job.check(
        "bit for bit",
        len({process["state"] for process in processes}) == 1 and processes[0]["losses"] == processes[1]["losses"],
    )


def _read(file: Path) -> dict[str, Any]:
    import json

    findings = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    return findings


def train(job: Job) -> None:
    """Trains a few steps in bf16; notes ``losses``, ``xla_flags`` and ``state``, a digest of every bit of the state."""
    from dataclasses import replace

    from mmjax.bench.gpu.kept import kept
    from mmjax.bench.gpu.parity import session
    from mmjax.config import config_of_values

    recipe = config_of_values(next(iter(kept()["parity"].values()))["config"])
    recipe = replace(recipe, world=replace(recipe.world, compilation_cache="none"))
    traced = session(recipe, "bfloat16", deterministic=True).start()
    outcome = traced.run()
    digest = hashlib.sha256()
    for name, leaf in sorted(outcome.leaves[-1].items()):
        digest.update(name.encode() + leaf.tobytes())
    job.note(losses=outcome.losses, state=digest.hexdigest(), xla_flags=os.environ.get("XLA_FLAGS", ""))
