"""Values that are not finite end a run before a checkpoint of them takes the place of a good one."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trial_runs import ALONE, STEPS, assert_same_leaves, leaves, write_tiny

from mmjax.checkpoint import Checkpointer, find_parameters
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.pipeline.finite import NonFiniteError
from mmjax.train.__main__ import main
from mmjax.train.files import RunFiles
from mmjax.train.metrics import read_metrics
from mmjax.train.soundness import Soundness
from mmjax.train.trainer import Trainer


def spoil(trainer: Trainer, kind: str = "params", leaf: str = "llm/layers/000/attn/q") -> None:
    """Puts a NaN into one value of the state, as a bad update or a bad memory cell does."""
    named = trainer.leaves()
    name = f"{kind}/{leaf}"
    named[name] = named[name].at[(3,) + (1,) * (named[name].ndim - 1)].set(jnp.nan)
    trainer.state.take(named)


@pytest.mark.long
def test_updates_that_are_skipped_end_the_run(
    tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameter that spoils them is named; the same command goes on from the last good checkpoint."""
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    before = Checkpointer(run / "checkpoints").steps()
    flags = [f"--gin_file={write_tiny(tmp_path, Train_max_skipped=2)}", f"--run_dir={run}"]
    flags += [f"--gin.{binding}" for binding in ALONE if not binding.startswith("Checkpoint")]
    flags += ["--gin.Checkpoint.every=10"]
    plain = Trainer.compile

    def spoilt(self: Trainer) -> None:
        plain(self)
        spoil(self)

    monkeypatch.setattr(Trainer, "compile", spoilt)
    assert main(flags) == 1
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("error")]
    assert line.startswith(
        f"error: step {STEPS + 2}: gradients are not finite, 2 updates in a row are skipped (Train.max_skipped=2); "
        "params/llm/layers/000/attn/q is not finite (nan at [3, 1"
    )
    assert "Traceback" not in err
    assert out.splitlines()[-1].endswith(f"the same command continues after step {STEPS}")
    assert Checkpointer(run / "checkpoints").steps() == before
    rows = read_metrics(run / "metrics.jsonl")
    assert [(row["step"], row["skipped"]) for row in rows[STEPS:]] == [(STEPS + n, n) for n in (1, 2, 3)]


def test_a_value_that_is_not_finite_is_named_and_never_saved(tiny_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    with Trainer(load_config([write_tiny(tmp_path)], ALONE), run, style="silent") as trainer:
        assert trainer.step == STEPS and trainer._soundness.first_unsound() == ""
        good = {name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}
        assert_same_leaves(good, leaves(run, STEPS))
        trainer.state.step += 1
        for kind, leaf in (("adam_v", "llm/layers/001/mlp/up"), ("params", "vision/layers/000/attn/q")):
            spoil(trainer, kind, leaf)
            with pytest.raises(NonFiniteError) as caught:
                trainer.save()
            message = f"step {STEPS + 1}: {kind}/{leaf} is not finite (nan at [3, 1"
            assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
        assert trainer.latest_checkpoint() == STEPS


def test_only_updates_in_a_row_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmjax.train.soundness.first_nonfinite", lambda placed, states: "")
    for most, ends in ((2, [6]), (3, []), (0, [])):
        ended, soundness = [], Soundness(None, dict, max_skipped=most)  # type: ignore[arg-type]
        for step, skipped in enumerate((True, False, True, False, True, True, False), start=1):
            soundness.add_update(step, skipped=skipped)
            try:
                soundness.require_updates()
            except NonFiniteError as error:
                assert f"step {step}: " in str(error) and "all parameters are finite" in str(error)
                ended.append(step)
        assert ended == ends


@pytest.mark.long
def test_a_folder_with_a_value_that_is_not_finite_is_no_start(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = find_parameters([str(tiny_run)])[str(tiny_run)]
    plain = type(saved).read

    def spoilt(self, *args, **about) -> dict[str, jax.Array]:
        return {name: leaf.at[0].set(jnp.inf) for name, leaf in plain(self, *args, **about).items()}

    monkeypatch.setattr(type(saved), "read", spoilt)
    config = load_config([write_tiny(tmp_path)], [*ALONE, f"Checkpoint.init_from={str(tiny_run)!r}"])
    with pytest.raises(ConfigError, match=rf"parameters of {tiny_run}.*: params/.* is not finite \(inf at \[0"):
        Trainer(config, tmp_path / "run", style="silent")


def test_a_picture_that_cannot_be_drawn_ends_no_run(tmp_path: Path) -> None:
    said: list[str] = []
    files = RunFiles(tmp_path, said.append)

    def draw(path: Path) -> None:
        path.write_text("half of it")
        raise ValueError("cannot convert float NaN to integer")

    files.draw("curves.png", draw)
    assert said == [
        f"{tmp_path}/curves.png cannot be written (it cannot be drawn: cannot convert float NaN to integer); "
        "training goes on"
    ]
    assert len(files.unwritten) == 1 and not list(tmp_path.iterdir())
