"""SIGKILLs of a run with running means: it goes on, also under another layout, and draws the same from a seed."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from painted_runs import DIT, UNET, write_painted
from PIL import Image
from trial_runs import Command, assert_same_leaves, leaves, train_flags

from mmjax.parity.compare import of_kind, relative
from mmjax.train.metrics import read_metrics

STEPS = 12
MEANS = (
    *("Optimizer.ema=0.8", "Optimizer.learning_rate=0.002", f"Train.steps={STEPS}"),
    *("Checkpoint.every=2", "Checkpoint.keep=9"),
)
GENERATORS = {
    "dit": (DIT, ("painter/Layout.pp=1", "painter/Layout.dp=2", "llm/Layout.pp=1", "llm/Layout.tp=2")),
    "unet": (UNET, ("painter/Layout.tp=2", "painter/Layout.sp=False", "llm/Layout.pp=1", "llm/Layout.dp=2")),
}
"""The configuration of each generator, and another layout."""


def run_command(name: str, flags: Sequence[str], output: Path, until: Callable[[Command], bool] | None = None) -> None:
    """Runs a command to its end, or kills it where ``until`` holds."""
    command = Command(name, flags, output)
    try:
        if until is None:
            assert command.end(900) == 0, command.text()
        else:
            command.wait_for(lambda: until(command), 900)
            command.send(signal.SIGKILL)
            assert command.end() == -signal.SIGKILL, command.text()
        command.assert_nothing_left()
    finally:
        command.stop()


def pictures(run: Path, out: Path, changes: Sequence[str] = ()) -> np.ndarray:
    """Levels of what a run draws of two prompts from seed 3."""
    prompts = out.with_suffix(".jsonl")
    prompts.write_text(
        "".join(json.dumps([{"role": "user", "content": text}]) + "\n" for text in ("red", "a blue one"))
    )
    flags = [f"--run_dir={run}", f"--messages={prompts}", "--generate_size=8x8", "--samples=2", "--seed=3"]
    run_command("generate", [*flags, f"--out={out}", *gin(changes)], out.with_suffix(".log"))
    names = ["1-1.png", "1-2.png", "2-1.png", "2-2.png"]
    assert sorted(path.name for path in out.iterdir()) == names
    return np.stack([np.asarray(Image.open(out / name)).astype(int) for name in names])


def gin(bindings: Sequence[str]) -> list[str]:
    return [f"--gin.{binding}" for binding in bindings]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", GENERATORS)
def test_kills_change_no_sample(name: str, tmp_path: Path) -> None:
    """Killed within steps and while a checkpoint is written; resumed under the same layout, then under another one."""
    generator, elsewhere = GENERATORS[name]
    config, rng = write_painted(tmp_path, generator), random.Random(name)
    whole, killed, moved = (tmp_path / kind for kind in ("whole", "killed", "moved"))
    run_command("train", [*train_flags(config, whole), *gin(MEANS)], tmp_path / "whole.log")

    def after(step: int, run: Path) -> Callable[[Command], bool]:
        """Whether so many steps are over, and a checkpoint is finished: it is written beside the steps behind it."""
        rows, checkpoints = run / "metrics.jsonl", run / "checkpoints"

        def reached(_: Command) -> bool:
            saved = any(path.name.isdigit() for path in checkpoints.glob("*"))
            return saved and rows.exists() and len(read_metrics(rows)) >= step

        return reached

    def saving(run: Path) -> Callable[[Command], bool]:
        return lambda _: any((run / "checkpoints").glob("*.orbax-checkpoint-tmp"))

    for run, changes in ((killed, ()), (moved, elsewhere)):
        first, later = [*train_flags(config, run), *gin(MEANS)], [*train_flags(config, run), *gin((*MEANS, *changes))]
        run_command("train", first, tmp_path / "1.log", saving(run))
        run_command("train", later, tmp_path / "2.log", after(rng.randint(4, STEPS - 3), run))
        run_command("train", later, tmp_path / "3.log")
        assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [*range(1, STEPS + 1)]
        assert "continuing after step" in (tmp_path / "3.log").read_text()

    ends = {run: leaves(run, STEPS) for run in (whole, killed, moved)}
    assert_same_leaves(ends[killed], ends[whole])
    means = {run: of_kind(named, "ema") for run, named in ends.items()}
    assert any(leaf.startswith("painter/") for leaf in means[whole])
    assert relative(means[moved], means[whole]) < 1e-4
    drawn = {run: pictures(run, tmp_path / f"{run.name}-drawn") for run in ends}
    assert drawn[whole].std() > 5
    np.testing.assert_array_equal(drawn[killed], drawn[whole])
    np.testing.assert_allclose(drawn[moved], drawn[whole], atol=1)
    np.testing.assert_allclose(pictures(whole, tmp_path / "whole-elsewhere", elsewhere), drawn[whole], atol=1)
