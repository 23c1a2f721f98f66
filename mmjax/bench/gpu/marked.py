"""The tests that want an accelerator, where the repository's tests are beside the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import mmjax
from mmjax.bench.gpu.job import Job

ROOT = Path(mmjax.__file__).resolve().parents[1]
_MARK = re.compile(r"^(@|pytestmark = )pytest\.mark\.gpu$", re.MULTILINE)


def run(job: Job) -> None:
    """Runs pytest on the files that have such tests, in a process that picks the accelerator itself.

    Notes its exit status, summary and failed tests, and checks that all pass.
    """
    files = marked_files(ROOT / "tests")
    job.note(files=[str(path.relative_to(ROOT)) for path in files])
    env = dict(os.environ)
    if not job.small:
        # The tests' own flags make CPU programs compile faster; a GPU's are to be as they are for everybody.
        env |= {"JAX_PLATFORMS": "cuda", "XLA_FLAGS": env.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=3"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    summary = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "")
    job.note(
        exit_status=done.returncode, summary=summary, failed=re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.M)
    )
    job.check("all pass", done.returncode == 0)


def marked_files(folder: Path) -> list[Path]:
    """The test files below a folder with a test that is marked ``gpu``, sorted."""
    return [path for path in sorted(folder.rglob("test_*.py")) if _MARK.search(path.read_text(encoding="utf-8"))]
