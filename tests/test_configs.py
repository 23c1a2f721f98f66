"""Four of the configurations are one training run on four layouts; another sees and hears."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from PIL import Image
from trial_runs import REPOSITORY, SMALL_EARS, SMALL_HANDS, assert_same_leaves, flatten, write_tiny

from mmjax.assembly.buckets import build_packer
from mmjax.checkpoint import Checkpointer
from mmjax.config import load_config
from mmjax.data.tokenizer import make_tokenizer
from mmjax.eval.report import evaluate
from mmjax.export.parameters import export_run
from mmjax.mesh.layout import Layout
from mmjax.recipe import Recipe
from mmjax.recipe.advice import advise
from mmjax.train.metrics import read_metrics
from mmjax.train.trainer import Trainer

CONFIGS = REPOSITORY / "configs"
LAYOUTS = {
    "digits_vlm": {"llm": Layout(tp=2, pp=2), "vision": Layout(dp=4, rank_offset=4)},
    "digits_vlm_colocated": {"llm": Layout(dp=4, tp=2), "vision": Layout(dp=8)},
    "digits_vlm_homogeneous": {"llm": Layout(dp=2, tp=2, pp=2), "vision": Layout(dp=2, tp=2)},
    "digits_vlm_one_device": {"llm": Layout(), "vision": Layout()},
}
GRAPHS = ("digits_clip", "digits_redraw", "digits_speak")
"""Models with edges of their own."""
OTHERS = [name for name in LAYOUTS if name != "digits_vlm_one_device"]
TOLERANCE = 2e-4  # relative, of the loss: fp32 sums in another order


def load(name: str, *bindings: str) -> Recipe:
    return load_config([CONFIGS / f"{name}.gin"], bindings)


def placed(recipe: Recipe, layouts: Mapping[str, Layout]) -> Recipe:
    """The recipe under other layouts."""
    return dataclasses.replace(recipe, model=recipe.model.with_layouts(layouts))


def test_every_file_is_a_configuration_or_a_part_of_one() -> None:
    assert {path.stem for path in CONFIGS.glob("digits*.gin")} == {
        *LAYOUTS,
        *GRAPHS,
        "digits",
        "digits_valm",
        "digits_draw",
        "digits_moe",
        "digits_say",
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_loads_from_any_directory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(name)
    assert config.model.layouts == LAYOUTS[name]
    assert config.devices == (1 if name == "digits_vlm_one_device" else 8)
    assert advise(config) == ()  # no device and no row is wasted
    tokenizer = make_tokenizer(config.data.settings.tokenizer, tuple(config.model.encoders))
    packer = build_packer(config, tokenizer)  # raises where the buckets cannot hold the largest batch
    assert packer.encoders["vision"].buckets
    relative = Path(os.path.relpath(CONFIGS / f"{name}.gin", tmp_path))
    assert load_config([relative]) == config


@pytest.mark.long
def test_three_modules_in_three_layouts() -> None:
    config = load("digits_valm")
    assert config.model.layouts == {
        "vision": Layout(dp=2, rank_offset=4),
        "audio": Layout(pp=2, rank_offset=6),
        "llm": Layout(dp=2, pp=2),
    }
    assert advise(config) == () and set(config.data.task.kinds(1, 1)) == {"read", "hear", "both"}
    packer = build_packer(config, make_tokenizer("", tuple(config.model.encoders)))
    assert all(len(spec.buckets) == 2 for spec in packer.encoders.values()) and not packer.text


def test_encoders_and_generator_nested_in_the_llm() -> None:
    config, spread = load("digits_draw"), Layout(dp=2, lanes=4)
    assert config.model.layouts == {"vision": spread, "audio": spread, "llm": Layout(pp=4, tp=2), "painter": spread}
    assert config.train.schedule == "nested" and config.train.microbatches == 2 * spread.lanes and advise(config) == ()
    packer = build_packer(config, make_tokenizer("", tuple(config.model.encoders)))
    assert all(len(spec.buckets) == 1 for spec in packer.encoders.values())  # each costs every lane its programs


@pytest.mark.long
def test_a_tiny_model_sees_and_hears(tmp_path: Path) -> None:
    with Trainer(load("digits_valm", *SMALL_EARS), tmp_path, style="silent") as trainer:
        result = trainer.train()
    assert result.step == 6 and result.losses[-1] < result.losses[0]
    assert result.evaluation is not None and set(result.swapped) == {"vision", "audio"}
    (row,) = read_metrics(tmp_path / "eval.jsonl")
    assert set(row["kinds"]) == set(row["swapped_vision_kinds"]) == set(row["swapped_audio_kinds"])
    assert {"swapped_vision_digit_accuracy", "swapped_audio_digit_accuracy"} < set(row)
    assert set(row["kinds"]) <= {"read", "hear", "both", "same"}
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["media_per_s"] * row["step_time_s"] for row in rows] == pytest.approx([32.0] * 6)
    assert all(row[f"{module}/grad_norm"] > 0 for row in rows for module in ("audio", "audio_projector", "vision"))
    with Image.open(tmp_path / "predictions.png") as picture:
        assert min(picture.size) > 200


@pytest.mark.long
def test_a_tiny_model_draws(tmp_path: Path) -> None:
    """Through training, evaluation, a checkpoint, an export of that, and an evaluation on one device."""
    config = load("digits_draw", *SMALL_HANDS)
    assert (
        config.model["painter"].layout == Layout(dp=4, lanes=2)
        and config.model["llm"].layout.pp == 2
        and advise(config) == ()
    )
    with Trainer(config, tmp_path, style="silent") as trainer:
        result = trainer.train()
        named = {name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}
    parameters = {name.removeprefix("params/"): leaf for name, leaf in named.items() if name.startswith("params/")}
    assert export_run(tmp_path, tmp_path / "exported").leaves == len(parameters)
    tree = ocp.load(str(tmp_path / "exported"))
    assert {"painter", "painter_projector"} < set(tree)
    assert_same_leaves(flatten(tree), parameters)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["loss"] for row in rows] == pytest.approx([row["llm/loss"] + row["painter/loss"] for row in rows])
    assert rows[-1]["painter/loss"] < rows[0]["painter/loss"]
    assert all(row[f"{module}/grad_norm"] > 0 for row in rows for module in ("painter", "painter_projector", "vision"))
    (row,) = read_metrics(tmp_path / "eval.jsonl")
    assert "drawing_accuracy" in row and result.evaluation is not None
    drawn = [own["painter"] for own in result.evaluation.drawings if own]
    assert drawn and all(one.shape == (8, 8, 1) and np.isfinite(one).all() for media in drawn for one in media)
    with Image.open(tmp_path / "predictions.png") as picture:
        assert min(picture.size) > 200
    plain = dataclasses.replace(config.train, schedule="1f1b")
    alone = dataclasses.replace(placed(config, dict.fromkeys(config.model, Layout())), train=plain)
    other = evaluate(alone, tmp_path, style="silent").evaluation
    assert other.drawing_accuracy == row["drawing_accuracy"]
    for one, two in zip(result.evaluation.drawings, other.drawings, strict=True):
        for name in one:
            np.testing.assert_allclose(one[name], two[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", OTHERS)
def test_only_layouts_differ(name: str) -> None:
    one = load("digits_vlm_one_device")
    assert placed(load(name), one.model.layouts) == one


def losses(recipe: Recipe, steps: int) -> np.ndarray:
    with Trainer(recipe, style="silent") as trainer:
        return np.array(trainer.train(steps).losses)


@cache
def tiny_losses(name: str, folder: Path) -> np.ndarray:
    """Eight steps of the tiny model on the configuration's layouts."""
    bindings = ["Train.global_batch=16", "Train.steps=8", "Train.eval_samples=0"]
    config = load_config([write_tiny(folder)], bindings)
    return losses(placed(config, load(name).model.layouts), 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs")


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_a_tiny_model_has_the_same_losses(name: str, folder: Path) -> None:
    one, other = tiny_losses("digits_vlm_one_device", folder), tiny_losses(name, folder)
    assert len(one) == 8 and one[-1] < 0.8 * one[0]
    np.testing.assert_allclose(other, one, rtol=TOLERANCE)


@cache
def real_losses(name: str) -> np.ndarray:
    return losses(load(name, "Train.dtype=float32", "Train.eval_samples=0"), 50)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", OTHERS)
def test_the_same_losses(name: str) -> None:
    one, other = real_losses("digits_vlm_one_device"), real_losses(name)
    assert len(one) == 50 and one[-1] < 0.8 * one[0]
    np.testing.assert_allclose(other, one, rtol=TOLERANCE)


# ---- a checkpoint of each goes on under each

# The real files, smaller by flags: their layouts, schedule and optimizer, and moments that differ from zero when saved.
SHRUNK = (
    *("Train.steps=7", "Train.global_batch=16", "Train.eval_samples=0", "Train.dtype=float32", "Checkpoint.every=0"),
    *("Data.workers=0", "Data.sequence_length=72"),
    *("Digits.digits=(1, 2)", "Digits.distortion=0.0", "Digits.curriculum=()"),
    *("vision/ViT.layers=1", "vision/ViT.width=16", "vision/ViT.mlp=32", "vision/ViT.heads=4"),
    *("llm/Decoder.layers=2", "llm/Decoder.width=16", "llm/Decoder.mlp=32", "vision/Packing.buckets=()"),
    *("Optimizer.warmup=2",),
)
SAVED, LAST = 3, 7
CONTINUED = 1e-5  # relative, of the loss, against the undisturbed run on one device


def state(trainer: Trainer) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_checkpoint_of_each_configuration_goes_on_under_each(folder: Path) -> None:
    configs = {name: load(name, *SHRUNK) for name in LAYOUTS}
    assert {name: config.model.layouts for name, config in configs.items()} == LAYOUTS
    with Trainer(configs["digits_vlm_one_device"], style="silent") as trainer:
        undisturbed = np.array(trainer.train().losses)
    assert len(undisturbed) == LAST and len(set(undisturbed)) == LAST

    saved: dict[str, dict[str, np.ndarray]] = {}
    for name, config in configs.items():
        with Trainer(config, folder / name, style="silent") as trainer:
            np.testing.assert_allclose(trainer.train(SAVED).losses, undisturbed[:SAVED], rtol=CONTINUED, err_msg=name)
            saved[name] = state(trainer)
    moments = [leaf for name, leaf in saved["digits_vlm"].items() if name.startswith("adam_v/")]
    assert moments and all(leaf.any() for leaf in moments)

    for target, config in configs.items():
        with Trainer(config, style="silent") as trainer:  # its programs are compiled once, for all four checkpoints
            for source in configs:
                with Checkpointer(folder / source / "checkpoints", report=pytest.fail) as checkpointer:
                    trainer.state.restore(checkpointer)
                about = f"{source} under {target}"
                assert trainer.step == SAVED, about
                assert_same_leaves(state(trainer), saved[source])
                losses = trainer.train().losses
                np.testing.assert_allclose(losses, undisturbed[SAVED:], rtol=CONTINUED, err_msg=about)
