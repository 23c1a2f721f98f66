"""Runs that earlier versions began are continued, evaluated and exported by this one.

``old_runs/config`` was trained for two of four steps when a run's settings were one ``Config`` (before ADR 98), with
adapters, a frozen tower, chosen buckets and an optimizer on the host. Beside it are the figures of all four steps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmjax.config import differences, load_run_config, operative_config
from mmjax.eval.report import evaluate
from mmjax.export.parameters import export_run
from mmjax.train.metrics import read_metrics
from mmjax.train.trainer import Trainer

OLD = Path(__file__).parent / "old_runs"
VERSIONS = sorted(path.name for path in OLD.iterdir())
CLOSE = 1e-4
"""Relative; other processors round otherwise."""


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> Path:
    """The folder of a version."""
    return OLD / str(request.param)


@pytest.fixture
def run_dir(version: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run of a version."""
    yield Path(shutil.copytree(version / "run", tmp_path / "run"))


def evaluations(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of evaluations."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_setting_is_read_as_it_was_written(run_dir: Path) -> None:
    assert differences((run_dir / "config.gin").read_text(), operative_config(load_run_config(run_dir))) == {}


@pytest.mark.long
def test_an_old_run_goes_on_as_it_would_have(version: Path, run_dir: Path, tmp_path: Path) -> None:
    recipe = load_run_config(run_dir)
    with Trainer(recipe, run_dir, style="silent") as trainer:
        assert trainer.step == 2 and trainer.resumed and not trainer.chosen
        assert trainer.train().step == 4
    rows, expected = read_metrics(run_dir / "metrics.jsonl"), read_metrics(version / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in expected], rel=CLOSE)
    last, expected_last = evaluations(run_dir / "eval.jsonl")[-1], evaluations(version / "eval.jsonl")[-1]
    assert last == pytest.approx(expected_last, rel=CLOSE)
    report = evaluate(recipe, run_dir, style="silent")
    assert report.numbers()["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert export_run(run_dir, tmp_path / "out").step == 4
