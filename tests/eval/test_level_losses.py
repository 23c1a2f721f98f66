"""An evaluation has losses of generators by level of noise, and a grid of their pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from painted_runs import painted_run
from PIL import Image
from trial_runs import leaves

from mmjax.assembly.model import build_model
from mmjax.config import load_run_config
from mmjax.data.loader import tokenizer_of
from mmjax.eval.__main__ import main
from mmjax.eval.samples import held_out
from mmjax.eval.scores import show
from mmjax.reference import loss_sums

DDPM = ("painter/DiT.process='ddpm'", "painter/DiT.prediction='v'", "painter/DiT.sampler='dpm++'")


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [(*DDPM, "painter/DiT.train_steps=40", "painter/DiT.min_snr=5.0"), pytest.param((), marks=pytest.mark.long)],
)
def test_losses_by_level_are_the_references(
    changes: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = painted_run(tmp_path, (*changes, "Train.eval_samples=2"))
    (row,) = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    assert main([f"--run_dir={run}", "--json", f"--out={tmp_path / 'out'}"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["painter_losses"] == pytest.approx(row["painter_losses"], rel=1e-6)

    recipe = load_run_config(run)
    model = build_model(recipe, tokenizer_of(recipe.data.settings, recipe.model.media))
    params = {name.removeprefix("params/"): leaf for name, leaf in leaves(run, 2).items() if name.startswith("params/")}
    samples, spec = held_out(recipe, 2), model.generators["painter"].medium
    assert spec and [*row["painter_losses"]] == ["0.1", "0.3", "0.5", "0.7", "0.9"]
    for level, loss in row["painter_losses"].items():
        time = float(level) if not changes else float(int(float(level) * 40))
        at_level = [replace(sample, times={"painter": (time,)}, dropped={}) for sample in samples]
        total = sum(float(loss_sums(params, model, sample)["painter/loss"]) for sample in at_level)
        weight = float(spec.process.weight(time))
        assert loss == pytest.approx(total / weight / sum(s.media["painter"][0].size for s in samples), rel=1e-4)

    for grid in (run / "drawings.png", tmp_path / "out" / "drawings.png"):
        sheet = np.asarray(Image.open(grid))
        assert sheet.shape == (2 * 66 - 2, 2 * 66 - 2, 3)
        np.testing.assert_array_equal(sheet[0, 0], sheet[63, 63])  # a target has one colour
    assert show("painter_losses", {"0.1": 0.5, "0.9": 1.25}) == "0.1 0.5, 0.9 1.25"
