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
    """Starts no backend itself: each process has to, with XLA's flags and without compiled programs of another."""
    found = list[dict[str, Any]]()
    for index in range(TIMES):
        file = job.folder / f"deterministic_{index}.json"
        command = [sys.executable, "-m", "mmjax.bench.gpu.one", f"{__name__}:train", str(file), "600"]
        subprocess.run(command, env=dict(os.environ), check=True)
        found.append(_read(file))
        job.note(processes=found)
    job.check("bit for bit", len({one["state"] for one in found}) == 1 and found[0]["losses"] == found[1]["losses"])


def _read(file: Path) -> dict[str, Any]:
    import json

    found = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    return found


def train(job: Job) -> None:
    """Some steps in bf16, and a digest of every bit of the state."""
    from dataclasses import replace

    from mmjax.bench.gpu.kept import kept
    from mmjax.bench.gpu.parity import session
    from mmjax.config import config_of_values

    config = config_of_values(next(iter(kept()["parity"].values()))["config"])
    config = replace(config, world=replace(config.world, compilation_cache="none"))
    one = session(config, "bfloat16", deterministic=True).start()
    found = one.run()
    digest = hashlib.sha256()
    for name, leaf in sorted(found.leaves[-1].items()):
        digest.update(name.encode() + leaf.tobytes())
    job.note(losses=found.losses, state=digest.hexdigest(), xla_flags=os.environ.get("XLA_FLAGS", ""))
