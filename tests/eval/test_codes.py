"""The share of codes that a generator predicts rightly: the same under any layout, and as the whole model has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from trial_runs import REPOSITORY

from mmjax.config import load_config
from mmjax.eval.report import evaluate
from mmjax.eval.scores import Evaluation, describe, figures
from mmjax.mesh.layout import Layout
from mmjax.recipe import Recipe
from mmjax.train.metrics import read_metrics
from mmjax.train.trainer import Trainer

SMALL = (
    *("Train.steps=3", "Train.global_batch=8", "Train.eval_samples=12", "Train.log_every=1", "Train.predictions=2"),
    *("llm/Decoder.layers=2", "llm/Decoder.width=16", "llm/Decoder.mlp=24", "vision/ViT.width=16", "vision/ViT.mlp=24"),
    *("talker/Decoder.width=16", "talker/Decoder.mlp=24", "Data.workers=0", "Digits.digits=(1, 2)"),
)


def small(*bindings: str) -> Recipe:
    return load_config([REPOSITORY / "configs/digits_speak.gin"], [*SMALL, *bindings])


def test_codes_are_a_figure_of_their_own() -> None:
    plain = Evaluation(answers=("1",), exact_match=1.0, character_accuracy=1.0, code_accuracy=0.931)
    assert figures(plain, {})["code_accuracy"] == 0.931
    assert describe(plain, {}) == "exact match 100.0%, characters right 100.0%, codes right 93.1%"
    assert "code_accuracy" not in figures(replace(plain, code_accuracy=None), {})


@pytest.mark.long
def test_codes_are_right_alike_under_any_layout(tmp_path: Path) -> None:
    recipe = small()
    with Trainer(recipe, tmp_path, style="silent") as trainer:
        result = trainer.train()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["loss"] for row in rows] == pytest.approx([row["llm/loss"] + row["talker/loss"] for row in rows])
    assert all(row[f"{part}/grad_norm"] > 0 for row in rows for part in ("talker", "talker_projector", "vision"))
    (row,) = read_metrics(tmp_path / "eval.jsonl")
    assert result.evaluation and 0 < row["code_accuracy"] < 1
    layouts = {"llm": Layout(), "vision": Layout(), "talker": Layout(tp=2, pp=2, rank_offset=1)}
    other = evaluate(replace(recipe, model=recipe.model.with_layouts(layouts)), tmp_path, style="silent").evaluation
    assert other.code_accuracy == pytest.approx(row["code_accuracy"], abs=1e-3)
