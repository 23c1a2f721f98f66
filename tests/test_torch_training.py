"""Training under layouts that differ between modules gives the losses and the parameters of torch's AdamW.

``tests/oracles/make_training.py`` trained a tiny LLaVA and a tiny Qwen2.5-VL for twenty steps and kept what came out.

The bias of a key has a gradient of 0 but for rounding: it adds the same number to all scores of a query. Adam divides a
gradient by its size, so rounding moves such a bias by as much as a gradient would, in torch and here in other
directions. It changes no output, and is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trial_runs import write_tiny

from mmjax.config import load_config
from mmjax.data.types import Sample
from mmjax.recipe import Recipe
from mmjax.recipe.pretrained import folder_parameters
from mmjax.train.trainer import Trainer

ORACLES = Path(__file__).parent / "oracles"
FOLDERS = {"llava": ORACLES / "llava", "qwen2_5_vl": ORACLES / "qwen" / "qwen2_5_vl"}
IMAGE = 263
PATCHES = {"llava": 64, "qwen2_5_vl": 160}
"""Rows of the tower in a microbatch have so many."""
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "tp and pp beside tp and pp": (
        *("llm/Layout.tp=2", "llm/Layout.pp=2", "Train.schedule='zb-h1'"),
        *("vision/Layout.dp=1", "vision/Layout.tp=2", "vision/Layout.pp=2", "vision/Layout.rank_offset=4"),
    ),
    "dp beside dp and tp": (
        *("llm/Layout.tp=1", "llm/Layout.dp=3", "Train.unroll=True"),
        *("vision/Layout.dp=1", "vision/Layout.tp=2", "vision/Layout.rank_offset=3"),
    ),
    "the tower on the first stage": (
        *("llm/Layout.tp=2", "llm/Layout.pp=2"),
        *("vision/Layout.dp=1", "vision/Layout.tp=2", "vision/Layout.rank_offset=0"),
    ),
}
RENAMED = {
    "llava": {
        **{"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        **{"model.vision_tower.": "vision_tower.", "model.multi_modal_projector.": "multi_modal_projector."},
    },
    "qwen2_5_vl": {"model.visual.": "visual.", "model.language_model.": "model."},
}
"""Begins of names in memory, and in the folders."""
Arrays = Mapping[str, np.ndarray]


def oracle(name: str) -> tuple[Arrays, Mapping[str, Any]]:
    """What torch gave, and the settings of its run."""
    values = dict(np.load(ORACLES / "training" / f"{name}.npz"))
    return values, json.loads(str(values["settings"]))


def configured(folder: Path, name: str, layout: str, settings: Mapping[str, Any]) -> Recipe:
    path = write_tiny(folder)
    gone = ("vision/ViT", "llm/Decoder", "Packing")
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith(gone)))
    optimizer = ("learning_rate", "warmup", "weight_decay", "b1", "b2", "eps")
    about = (
        f"Model.weights={str(FOLDERS[name])!r}",
        *(f"Optimizer.{key}={settings[key]!r}" for key in optimizer),
        *(f"Train.{key}={settings[key]!r}" for key in ("steps", "clip_norm")),
        f"vision/Optimizer.learning_rate={settings['learning_rate']!r}",
        *("Optimizer.schedule='constant'", "Data.sequence_length=96", "Train.eval_samples=0", "Train.global_batch=3"),
        *("Train.microbatches=1", "llm/Packing.buckets=((3, 96),)", f"vision/Packing.buckets=((3, {PATCHES[name]}),)"),
    )
    return load_config([path], [*about, *LAYOUTS[layout]])


def images_of(name: str) -> list[np.ndarray]:
    values = np.load(FOLDERS[name] / "values.npz")
    return list(values["images"]) if name == "llava" else [values[f"image_{number}"] for number in range(5)]


def samples(name: str, tokens: list[np.ndarray], placeholder: int) -> list[Sample]:
    """Sequences with their images, which follow one another; a token is learned unless it is an image's."""
    images, pixels, made = images_of(name), 49 if name == "llava" else 64, list[Sample]()
    for ids in tokens:
        is_image, taken = ids == IMAGE, list[np.ndarray]()
        while sum(image.shape[0] * image.shape[1] for image in taken) < is_image.sum() * pixels:
            taken.append(images.pop(0))
        about: Any = {"question": "", "answer": "", "prompt": 0, "media_tokens": {"vision": placeholder}}
        made.append(
            Sample(
                tokens=np.where(is_image, placeholder, ids).astype(np.int32),
                loss_weights=(~is_image).astype(np.float32),
                media={"vision": tuple(taken)},
                **about,
            )
        )
    return made


def train(recipe: Recipe, name: str, values: Arrays, steps: int, folder: Path) -> tuple[list[float], Arrays]:
    """The losses of the first steps, and the parameters behind them."""
    losses = []
    with Trainer(recipe, folder / "run", style="silent") as trainer:
        placeholder = trainer.parts.tokenizer.media_token("vision")
        for step in range(steps):
            tokens = [values[f"tokens_{number}"][step].astype(np.int32) for number in range(3)]
            batch = trainer.parts.packer.microbatch(samples(name, tokens, placeholder), 3)
            count = float(np.sum(np.asarray(batch.inputs["llm"]["weights"])))
            result = trainer.executor.step(trainer.parts.runs.signed([batch]), {"llm": count, "vision": 1.0})
            losses.append(result.fetch()[0])
        held = {key: np.asarray(leaf) for key, leaf in trainer.leaves().items() if key.startswith("params/")}
    return losses, {key.removeprefix("params/"): leaf for key, leaf in held.items()}


def torch_leaves(name: str, recipe: Recipe, values: Arrays, ours: Arrays) -> dict[str, np.ndarray]:
    """Torch's parameters by the names of our leaves, through the tables."""
    (path,) = recipe.folders
    tensors = {old(name, key.removeprefix("parameter/")): leaf for key, leaf in values.items() if "parameter/" in key}
    places = folder_parameters(recipe, path, {name: leaf.shape for name, leaf in ours.items()}).places
    return {
        leaf: view.read(tensors[key], ours[leaf].shape, tuple(slice(0, size) for size in ours[leaf].shape))
        for leaf, (key, view) in places.items()
    }


def old(name: str, key: str) -> str:
    """The name in the folder of a parameter of the model in memory."""
    for begin, new in RENAMED[name].items():
        if key.startswith(begin):
            return new + key.removeprefix(begin)
    return key


def same(name: str, layout: str, steps: int, folder: Path) -> None:
    values, settings = oracle(name)
    config = configured(folder, name, layout, settings)
    losses, ours = train(config, name, values, steps, folder)
    np.testing.assert_allclose(losses, values["losses"][:steps], rtol=2e-6)
    if steps < settings["steps"]:
        return
    theirs = torch_leaves(name, config, values, ours)
    assert theirs.keys() == ours.keys()
    for leaf, want in theirs.items():
        if leaf.endswith(("attn/k_bias", "k/bias")):
            continue
        np.testing.assert_allclose(ours[leaf], want, rtol=0, atol=2e-5, err_msg=leaf)


@pytest.mark.long
def test_the_first_steps_give_torchs_losses(tmp_path: Path) -> None:
    same("llava", "dp beside dp and tp", 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FOLDERS)
def test_twenty_steps_give_torchs_losses_and_parameters(name: str, layout: str, tmp_path: Path) -> None:
    same(name, layout, 20, tmp_path)
