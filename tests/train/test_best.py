"""The best checkpoint is kept, exported and found again; training ends where evaluations have stopped to get better."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest
from trial_runs import ALONE, write_tiny

from mmjax.checkpoint import CheckpointConfig, Checkpointer
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.eval.scores import Evaluation, figures
from mmjax.export.__main__ import main as export_command
from mmjax.export.checkpoints import best_step
from mmjax.recipe import Recipe
from mmjax.train.__main__ import main
from mmjax.train.best import BestEvaluation
from mmjax.train.scoring import Scored, Scoring
from mmjax.train.trainer import Trainer


def rows(metric: str, *values: float | None) -> list[dict[str, float | int | None]]:
    return [{"step": 10 * number, metric: value} for number, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("metric", "values", "wanted"),
    [
        ("loss", (3.0, 2.0, 2.0, 2.5), 20),
        ("perplexity", (3.0, None, 2.0), 30),
        ("loss", (None, None), 10),
        ("exact_match", (0.1, 0.4, 0.4, 0.2), 20),
        ("swapped_vision_digit_accuracy", (0.0, 0.1), 20),
        ("exact_match", (), None),
    ],
)
def test_the_best_is_the_first_of_equals_in_the_figures_own_direction(
    metric: str, values: tuple[float | None, ...], wanted: int | None
) -> None:
    found = BestEvaluation(metric, rows=[*rows(metric, *values), {"step": 99, "failure": "no memory"}])
    assert found.step == wanted
    assert found.step_among([10, 99]) == (10 if values else None)


def test_patience_counts_evaluations_that_are_not_better() -> None:
    evaluations, endings = BestEvaluation("loss", patience=2), []
    for step, loss in enumerate((3.0, 3.1, 2.9, 2.9, float("nan"), 1.0), start=1):
        last_chance = evaluations.is_last_chance
        better = evaluations.add(step, {"loss": loss})
        assert better == (step in (1, 3, 6)) and (last_chance or not evaluations.ending)
        endings.append(evaluations.ending)
    assert [bool(ending) for ending in endings] == [False, False, False, False, True, False]
    assert endings[4] == (
        "loss was best after step 3 (2.9), and 2 evaluations since have not been better (Train.patience)"
    )
    forever = BestEvaluation("loss", rows=rows("loss", *range(20)))
    assert not forever.ending and not forever.is_last_chance
    assert not BestEvaluation("").add(1, {"loss": 1.0})


def test_the_best_checkpoint_is_never_rotated_away(tmp_path: Path) -> None:
    values = {1: 3.0, 2: 1.0, 3: 2.0, 5: 2.0, 6: 0.5}
    evaluations = BestEvaluation("loss")
    kept: list[list[int]] = []
    with Checkpointer(tmp_path, CheckpointConfig(keep=2), best=evaluations.step_among) as checkpointer:
        for step in range(1, 8):
            if step in values:
                evaluations.add(step, {"loss": values[step]})
            checkpointer.save(step, {"params/llm/a": jnp.zeros(1)})
            checkpointer.wait()
            kept.append(checkpointer.steps())
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7]]


def scored(monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> list[tuple[int, bool]]:
    """Makes evaluations give these losses; returns the steps at which they are made, and whether they are drawn."""
    made: list[tuple[int, bool]] = []

    def attempt(self: Scoring, states: object, step: int, draw: bool = False, check: object = None) -> Scored:
        made.append((step, draw))
        plain = Evaluation(answers=(), exact_match=0.0, character_accuracy=0.0, loss=losses[step], unit="digit")
        assert self._files
        self._files.add_evaluation({"step": step} | figures(plain, {}))
        return Scored(plain=plain)

    monkeypatch.setattr(Scoring, "attempt", attempt)
    return made


def configured(folder: Path, *more: str) -> Recipe:
    bindings = (*ALONE, "Train.eval_samples=2", "Train.eval_every=2", "Checkpoint.every=3", "Checkpoint.keep=1")
    return load_config([write_tiny(folder)], [*bindings, "Checkpoint.best='loss'", *more])


@pytest.mark.long
def test_a_run_keeps_the_best_and_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = scored(monkeypatch, {2: 3.0, 4: 1.0, 5: 2.0, 6: 1.5, 8: 0.5})
    run, config = tmp_path / "run", configured(tmp_path, "Train.patience=2")
    with Trainer(config, run, style="silent") as trainer:
        assert not trainer.train(steps=5).ending
    ending = "loss was best after step 4 (1), and 2 evaluations since have not been better (Train.patience)"
    with Trainer(config, run, style="silent") as trainer:
        result = trainer.train()
        assert (result.step, result.ending) == (6, ending)
    assert made == [(2, False), (4, False), (5, True), (6, True)]  # predictions are drawn where it may be the end
    assert Checkpointer(run / "checkpoints").steps() == [4, 6] and best_step(run) == 4
    assert export_command([f"--run_dir={run}", f"--out={tmp_path / 'out'}", "--best"]) == 0
    assert "of step 4 in" in capsys.readouterr().out
    # The same command says so again and trains nothing; more patience goes on, and finds a better one.
    assert main([f"--gin_file={run / 'config.gin'}", f"--run_dir={run}"]) == 0
    assert f"ended after step 6: {ending}" in capsys.readouterr().out and len(made) == 4
    with Trainer(configured(tmp_path, "Train.patience=3"), run, style="silent") as trainer:
        assert not trainer.train(steps=8).ending
    assert Checkpointer(run / "checkpoints").steps() == [8] and best_step(run) == 8


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    for bindings, message in (
        (["Checkpoint.best='los'"], r"^Checkpoint.best='los': .*'loss'"),
        (["Checkpoint.best='drawing_accuracy'"], "^Checkpoint.best='drawing_accuracy'"),
        (["Checkpoint.best='loss'", "Train.eval_samples=0"], "nothing is evaluated; set Train.eval_samples to 180"),
        (["Train.patience=2"], "name the figure that has to get better in Checkpoint.best"),
        (["Train.patience=2", "Checkpoint.best='loss'", "Train.eval_every=0"], "set Train.eval_every to a number of"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config([write_tiny(tmp_path)], bindings)
    load_config([write_tiny(tmp_path)], ["Checkpoint.best='swapped_vision_digit_accuracy'", "Train.patience=1"])
