"""``Train.deterministic`` in two processes of the same program: every parameter and moment is the same, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

from mmjax.bench.gpu.job import Job
from mmjax.mesh.gpu import DETERMINISTIC_FLAGS, NO_MERGING, TRITON

TIMES = 2
OTHER_FLAGS = (
    (*DETERMINISTIC_FLAGS, NO_MERGING),
    ("--xla_gpu_exclude_nondeterministic_ops=true", "--xla_gpu_autotune_level=0", TRITON, NO_MERGING),
    ("--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=0", NO_MERGING),
    ("--xla_gpu_deterministic_ops=true", TRITON, NO_MERGING),
    ("--xla_gpu_autotune_level=0", TRITON, NO_MERGING),
)
"""Flags of XLA, one set a run, that tell which of them keeps a deterministic step from running.

XLA says of --xla_gpu_deterministic_ops that it implies --xla_gpu_exclude_nondeterministic_ops and no autotuning.
"""


def run(job: Job) -> None:
    """Runs ``train`` in two processes, and notes and compares their findings.

    This process starts no backend: each of them has XLA's flags, and compiles its own programs. Where the step does not
    run, ``other_flags`` has what each set of ``OTHER_FLAGS`` gives in two processes.
    """
    processes = list[dict[str, Any]]()
    for _ in range(TIMES):
        processes.append(_findings(job, "train", ()))
        job.note(processes=processes)
        if "error" in processes[-1]:
            _try_other_flags(job)
            raise RuntimeError(processes[-1]["error"])
    job.check("bit for bit", _alike(processes))


def _try_other_flags(job: Job) -> None:
    attempts = list[dict[str, Any]]()
    for flags in OTHER_FLAGS:
        attempt: dict[str, Any] = {"xla_flags": " ".join(flags)}
        attempts.append(attempt)
        findings = [_findings(job, "train_with_flags_of_environment", flags)]
        if "error" in findings[0]:
            attempt["error"] = findings[0]["error"]
        else:
            findings.append(_findings(job, "train_with_flags_of_environment", flags))
            attempt["bit for bit"] = _alike(findings)
        job.note(other_flags=attempts)


def _alike(processes: list[dict[str, Any]]) -> bool:
    return all(
        process.get("state") == processes[0]["state"] and process["losses"] == processes[0]["losses"]
        for process in processes
    )


def _findings(job: Job, function: str, flags: tuple[str, ...]) -> dict[str, Any]:
    """The notes of a process that calls the function, with its "error" where it failed."""
    file = job.folder / "deterministic.json"
    command = [sys.executable, "-m", "mmjax.bench.gpu.section_process", f"{__name__}:{function}", str(file), "600"]
    environment = dict(os.environ, **({"XLA_FLAGS": " ".join(flags)} if flags else {}))
    status = subprocess.run(command, env=environment, check=False).returncode
    findings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.unlink(missing_ok=True)
    return findings if status == 0 else {"error": f"ended with status {status}", **findings}


def train(job: Job) -> None:
    """Trains a few steps in bf16; notes ``losses``, ``xla_flags`` and ``state``, a digest of every bit of the state."""
    _train(job, deterministic=True)


def train_with_flags_of_environment(job: Job) -> None:
    """The same without ``Train.deterministic``, so that flags are those of the environment."""
    _train(job, deterministic=False)


def _train(job: Job, *, deterministic: bool) -> None:
    from dataclasses import replace

    from mmjax.bench.gpu.kept import kept
    from mmjax.bench.gpu.parity import session
    from mmjax.config import config_of_values

    recipe = config_of_values(next(iter(kept()["parity"].values()))["config"])
    recipe = replace(recipe, world=replace(recipe.world, compilation_cache="none"))
    traced = session(recipe, "bfloat16", deterministic=deterministic).start()
    outcome = traced.run()
    digest = hashlib.sha256()
    for name, leaf in sorted(outcome.leaves[-1].items()):
        digest.update(name.encode() + leaf.tobytes())
    job.note(losses=outcome.losses, state=digest.hexdigest(), xla_flags=os.environ.get("XLA_FLAGS", ""))
