"""`Train.profile_steps`: whole steps, also of a run that continues in their midst."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from trial_runs import write_tiny

from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.train.trainer import Trainer


def events(run_dir: Path) -> list[dict]:
    """The events of the one trace in a run directory."""
    (trace,) = run_dir.glob("profile/**/perfetto_trace.json.gz")
    return json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


@pytest.mark.long
def test_the_steps_of_the_window_are_traced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = load_config([write_tiny(tmp_path, Train_profile_steps=(2, 3), Train_eval_every=0)])
    with Trainer(config, tmp_path / "run", style="lines") as trainer:
        trainer.train(steps=4)
    out = capfd.readouterr().err
    assert "profiling steps 2 to 3\n" in out
    where = tmp_path / "run" / "profile"
    assert f"profile in {where}: open its perfetto_trace.json.gz at https://ui.perfetto.dev" in out
    assert out.index("training 3/4") < out.index("profile in") < out.index("training 4/4")
    found = events(tmp_path / "run")
    steps = [e["args"]["step_num"] for e in found if e.get("name") == "train" and e.get("ph") == "X"]
    assert sorted(map(int, steps)) == [2, 3]
    ops = [e["name"] for e in found if str(e.get("name", "")).startswith("B vision.0")]
    assert sorted(ops) == [f"B vision.0 microbatch {m}" for m in (0, 0, 1, 1)]


@pytest.mark.slow
def test_a_run_that_is_past_the_window_traces_nothing(tmp_path: Path) -> None:
    config = load_config([write_tiny(tmp_path, Train_profile_steps=(1, 1), Train_eval_samples=0)])
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        trainer.train(steps=2)
    assert len(events(tmp_path / "run")) > 0
    for path in sorted((tmp_path / "run" / "profile").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        assert trainer.step == 2
        trainer.train(steps=3)
    assert not list((tmp_path / "run" / "profile").iterdir())


def test_a_trace_needs_a_run_directory(tmp_path: Path) -> None:
    config = load_config([write_tiny(tmp_path, Train_profile_steps=(1, 2))])
    with pytest.raises(ConfigError, match=r"Train.profile_steps=\(1, 2\): needs a run directory"):
        Trainer(config)
