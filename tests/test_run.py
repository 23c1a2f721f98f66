"""Recipes and runs in Python: they are those of gin, and the script of the documentation runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_finetune import write_folder, write_icons
from trial_runs import REPOSITORY, leaves, write_tiny

import mmjax as mm
from mmjax.config import load_config, load_run_config, operative_config
from mmjax.generate.answers import generate
from mmjax.recipe import Recipe
from mmjax.train.metrics import read_metrics

LANGUAGE_MODEL = Path(__file__).parent / "oracles" / "llm" / "qwen2"
SCRIPT = REPOSITORY / "examples" / "finetune.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Qwen2-VL as ``save_pretrained`` writes it."""
    return write_folder("qwen2_vl", tmp_path)


def tuned(folder: Path, data: Path) -> Recipe:
    """The recipe of the documentation, small."""
    qwen = mm.from_hf(folder)
    return mm.Recipe(
        model=qwen.replace(
            vision=qwen["vision"].frozen().at(mm.Layout(dp=4, rank_offset=4)),
            llm=qwen["llm"].with_lora(rank=4).at(mm.Layout(tp=2, pp=2)),
        ),
        data=mm.messages(data, length=128, batch=16),
        schedule=mm.one_f_one_b(microbatches=2),
        optimizer=mm.adamw(1e-5, weight_decay=0.1),
        world=mm.WorldConfig(platform="cpu"),
    )


def test_a_recipe_in_python_is_that_of_gin(folder: Path, tmp_path: Path) -> None:
    """Every setting, those that the folder decides too: template, rules for images, dtype of what is frozen."""
    data = write_icons(tmp_path / "icons", messages=True)
    gin = load_config(
        [],
        [
            *(f"Model.weights={str(folder)!r}", "Data.sources={'messages': 1.0}"),
            *(f"messages/Source.path={str(data)!r}", "Data.sequence_length=128", "World.platform=cpu"),
            *("Train.global_batch=16", "Train.microbatches=2", "vision/Layout.dp=4", "vision/Layout.rank_offset=4"),
            *("llm/Layout.tp=2", "llm/Layout.pp=2", "llm/Lora.rank=4", "llm/Optimizer.frozen=True"),
            *("vision/Optimizer.frozen=True", "Optimizer.learning_rate=1e-5", "Optimizer.weight_decay=0.1"),
        ],
    )
    python = tuned(folder, data)
    assert python.model["vision"].optimizer.frozen_dtype == gin.model["vision"].optimizer.frozen_dtype != ""
    assert python.data.sources == gin.data.sources and python.data.sources["messages"].template == "folder"
    assert python == replace(gin, model=replace(gin.model, nodes={**gin.model.nodes, "llm": python.model.llm}))
    llm = replace(python.model.llm, optimizer=gin.model.llm.optimizer)
    # A frozen module's own rate and decay are read by nobody.
    assert llm == gin.model.llm and python.model.llm.optimizer.frozen_dtype == gin.model.llm.optimizer.frozen_dtype


def test_a_recipe_in_python_is_read_again_from_its_run(folder: Path, tmp_path: Path) -> None:
    recipe, path = tuned(folder, write_icons(tmp_path / "icons", messages=True)), tmp_path / "config.gin"
    path.write_text(operative_config(recipe))
    assert load_config([path]) == recipe


@pytest.mark.parametrize("family", ["llava", "text alone"])
def test_other_folders_are_models_too(family: str, tmp_path: Path) -> None:
    """A whole LLaVA; and a language model alone, which has no encoder and so no images."""
    if family == "llava":
        place = write_folder("llava", tmp_path)
    else:
        place = tmp_path / "text"
        shutil.copytree(LANGUAGE_MODEL, place)
    model = mm.from_hf(place)
    assert model.encoders == (("vision",) if family == "llava" else ())
    assert all(model.folder(part) == str(place) for part in model.parts)
    data = mm.messages(tmp_path / "none.jsonl", length=64, batch=8)
    recipe = mm.Recipe(model=model, data=data, schedule=mm.one_f_one_b(2), optimizer=mm.adamw(1e-3))
    path = tmp_path / "config.gin"
    path.write_text(operative_config(recipe))
    assert load_config([path]) == recipe


def test_the_order_of_a_step_is_part_of_the_recipe() -> None:
    model = mm.load_config(["digits_vlm"]).model
    for schedule, expected in (
        (mm.gpipe(8), ("gpipe", 8, "1f1b", 0)),
        (mm.interleaved(8), ("interleaved", 8, "1f1b", 0)),
        (mm.zb_h1(4), ("zb-h1", 4, "1f1b", 0)),
        (mm.three_phase(8, window=4), ("three-phase", 8, "1f1b", 4)),
        (mm.nested(2, inner="zb-h1"), ("nested", 2, "zb-h1", 0)),
    ):
        train = mm.Recipe(model=model, schedule=schedule, train=mm.TrainConfig(seed=3)).train
        assert (train.schedule, train.microbatches, train.inner, train.window, train.seed) == (*expected, 3)


def test_an_optimizer_of_ones_own_stays() -> None:
    model = mm.ModelSpec.of(
        mm.encoder("vision", mm.ViTConfig()).trained(mm.adamw(0.5)), mm.language_model(mm.DecoderConfig())
    )
    recipe = mm.Recipe(model=model.replace(llm=model["llm"].frozen()), optimizer=mm.adamw(0.25, warmup=3))
    rates = {name: (part.learning_rate, part.frozen) for name, part in recipe.model.optimizers.items()}
    assert rates == {"vision": (0.5, False), "vision_projector": (0.25, False), "llm": (0.25, True)}


def test_fewer_steps_have_a_shorter_warm_up() -> None:
    model = mm.ModelSpec.of(
        mm.encoder("vision", mm.ViTConfig()).trained(mm.adamw(0.5, warmup=1)), mm.language_model(mm.DecoderConfig())
    )
    recipe = mm.Recipe(model=model, optimizer=mm.adamw(0.25, warmup=20), train=mm.TrainConfig(steps=100, epochs=2.0))
    shorter = recipe.with_steps(10)
    assert (shorter.train.steps, shorter.train.epochs) == (10, 0.0)
    assert {name: part.warmup for name, part in shorter.model.optimizers.items()} == {
        "vision": 1,
        "vision_projector": 2,
        "llm": 2,
    }
    assert recipe.with_steps(100).model == recipe.model


def test_a_mixture_has_each_dataset() -> None:
    parts = {name: mm.messages(f"{name}.jsonl", length=64, batch=8) for name in ("left", "right")}
    both = mm.mixture(parts, {"left": 0.7, "right": 0.3})
    recipe = mm.Recipe(model=mm.load_config(["digits_vlm"]).model, data=both)
    assert recipe.data.settings.sources == {"left": 0.7, "right": 0.3} and recipe.train.global_batch == 8
    assert {name: source.path for name, source in recipe.data.sources.items()} == {
        "left": "left.jsonl",
        "right": "right.jsonl",
    }
    with pytest.raises(ValueError, match="give each its share"):
        mm.mixture(parts, {"left": 1.0})


def test_wrong_recipes_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    data = write_icons(tmp_path / "icons", messages=True)
    recipe = tuned(folder, data)
    with pytest.raises(mm.ConfigError, match=r"^llm/Layout\.tp=3: must divide"):
        mm.build(replace(recipe, model=recipe.model.replace(llm=recipe.model.llm.at(mm.Layout(tp=3)))))
    with pytest.raises(ValueError, match="no module 'visoin'; use one of vision, llm"):
        recipe.model.replace(visoin=recipe.model["vision"])
    with pytest.raises(ValueError, match="no module 'visoin'; use one of vision, llm"):
        recipe.model.with_layouts({"visoin": mm.Layout()})
    with pytest.raises(ValueError, match="no part 'llm_projector'; use one of vision, vision_projector, llm, llm_lora"):
        recipe.model.with_optimizers({"llm_projector": mm.adamw(1e-3)})
    with pytest.raises(ValueError, match="vision: DecoderConfig is no settings of encoders; use ViTConfig"):
        mm.encoder("vision", mm.DecoderConfig())
    with pytest.raises(ValueError, match="llm: it has no projector"):
        recipe.model.llm.with_projector(hidden=8)
    with pytest.raises(ValueError, match="the run has no directory"):
        mm.build(recipe).evaluate()
    with pytest.raises(mm.ConfigError, match=r"^--weights=.*no_folder"):
        mm.from_hf(tmp_path / "no_folder")


def test_a_run_trains_evaluates_answers_and_exports(tmp_path: Path) -> None:
    """In one process; a second run of the same recipe goes on, and its numbers are those of the file."""
    recipe = mm.load_config([write_tiny(tmp_path)])
    run, seen = mm.build(recipe), dict[int, Mapping[str, Any]]()
    forecast = run.forecast()
    assert str(forecast) == forecast.describe() and "vision.0" in str(forecast)
    result = run.train(4, tmp_path / "run", callbacks=[seen.__setitem__], style="silent")
    assert result.step == 4 and list(seen) == [1, 2, 3, 4]
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["loss"] for row in steps] == [row["loss"] for row in seen.values()] == result.losses
    again = mm.build(recipe).train(6, tmp_path / "run", style="silent")
    assert again.step == 6 and len(again.losses) == 2
    report = mm.build(run.recipe, tmp_path / "run").evaluate(count=3, style="silent")
    assert report.step == 6 and len(report.samples) == 3
    first, *answers = str(report).splitlines()
    assert first.startswith("step 6: exact match ") and len(answers) == 3 and "right is" in answers[0]
    run.export(tmp_path / "out")
    assert {"llm", "vision", "vision_projector"} == {
        name.removeprefix("params/").partition("/")[0] for name in leaves(tmp_path / "run", 6) if "params/" in name
    }
    assert (tmp_path / "out").is_dir()


@pytest.mark.long
def test_a_plan_is_a_recipe(tmp_path: Path) -> None:
    recipe = mm.load_config([write_tiny(tmp_path)])
    planned = mm.build(recipe).plan("h100", devices=2)
    assert planned.recipe.devices <= 2 and str(planned).count("\n") > 2
    settings = planned.recipe.model["llm"].settings
    assert settings.remat == planned.choice.best.candidate.remat["llm"]
    assert replace(settings, remat=recipe.model["llm"].settings.remat) == recipe.model["llm"].settings
    mm.build(planned.recipe)


@pytest.mark.long
def test_a_run_answers_and_is_checked(tmp_path: Path) -> None:
    run = mm.build(mm.load_config([write_tiny(tmp_path)]))
    run.train(3, tmp_path / "run", style="silent")
    dialogues = [[{"role": "user", "content": "What digits are there?"}]]
    assert run.generate(dialogues, limit=4) == generate(
        load_run_config(tmp_path / "run"), tmp_path / "run", dialogues, limit=4
    )
    report = run.check(steps=2)
    assert report and report.ok


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_script_of_the_documentation_runs(folder: Path, tmp_path: Path) -> None:
    """Twenty steps on eight virtual devices; the folder that it writes has the adapters in its weights."""
    data = write_icons(tmp_path / "icons", messages=True)
    small = ("--steps=20", "--length=128", "--batch=16", "--microbatches=2", "--platform=cpu")
    command = [sys.executable, str(SCRIPT), str(folder), str(data), *small]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "vision: dp=4 on ranks 4-7" in done.stdout and "training 20/20" in done.stdout + done.stderr
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "tuned"))
    assert before.keys() == after.keys()
    changed = {key for key in before if not np.array_equal(before[key], after[key])}
    assert changed and all(
        "q_proj.weight" in key
        or "k_proj.weight" in key
        or "v_proj.weight" in key
        or "o_proj.weight" in key
        or "merger" in key
        for key in changed
    )
