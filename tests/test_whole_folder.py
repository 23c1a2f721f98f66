"""A whole model from its folder, LLaVA's: the loss and the gradients of transformers and torch, under layouts.

``tests/oracles/make_llava.py`` made the folder, three sequences with no, one and two images, and what torch gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trial_runs import assert_same_tensors, save_untrained, write_tiny

from mmjax.config import load_config
from mmjax.data.types import Sample
from mmjax.export.folders import export_folders
from mmjax.models.pretrained import find_pretrained
from mmjax.parity.engine import check
from mmjax.recipe import Recipe
from mmjax.train.trainer import Trainer
from mmjax.weights.folder import read_config
from mmjax.weights.table import expand, match

FOLDER = Path(__file__).parent / "oracles" / "llava"
IMAGE, TOKENS = 263, 16
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "one device": ("llm/Layout.tp=1", "vision/Layout.dp=1", "vision/Layout.rank_offset=0"),
    "tp, pp and split backward": (
        *("llm/Layout.tp=2", "llm/Layout.pp=2", "Train.schedule='zb-h1'"),
        *("vision/Layout.dp=1", "vision/Layout.tp=2", "vision/Layout.pp=2", "vision/Layout.rank_offset=4"),
    ),
    "dp, unrolled": (
        *("llm/Layout.tp=1", "llm/Layout.dp=3", "Train.unroll=True"),
        *("vision/Layout.dp=3", "vision/Layout.rank_offset=3"),
    ),
}
SETTINGS = (
    f"Model.weights={str(FOLDER)!r}",
    *("Data.sequence_length=96", "Train.eval_samples=0", "Train.clip_norm=0.0", "Train.global_batch=3"),
    *("Train.microbatches=1", "llm/Packing.buckets=((3, 96),)", "vision/Packing.buckets=((3, 64),)"),
)


def configured(folder: Path, layout: tuple[str, ...]) -> Recipe:
    path = write_tiny(folder)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(("vision/ViT", "llm/Decoder", "Packing"))))
    return load_config([path], [*SETTINGS, *layout])


def samples(values: Mapping[str, np.ndarray], placeholder: int) -> list[Sample]:
    """The sequences; a token counts unless it is an image's."""
    images, found = list(values["images"]), []
    for number in range(3):
        tokens = values[f"tokens_{number}"].astype(np.int32)
        is_image = tokens == IMAGE
        own = tuple(images.pop(0) for _ in range(is_image.sum() // TOKENS))
        about: Any = {"question": "", "answer": "", "prompt": 0, "media_tokens": {"vision": placeholder}}
        found.append(
            Sample(
                tokens=np.where(is_image, placeholder, tokens).astype(np.int32),
                loss_weights=(~is_image).astype(np.float32),
                media={"vision": own},
                **about,
            )
        )
    return found


def leaves_of_gradients(recipe: Recipe, tensors: Mapping[str, np.ndarray], shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Torch's gradients by the names of our leaves, through the tables."""
    found = {}
    for module, shape_of in shapes.items():
        part: Any = recipe.model.parts[module]
        table = find_pretrained(part.family, read_config(str(FOLDER))).rows(part.settings)
        matches = match(expand(table, getattr(part.settings, "layers", 0)), tensors)
        assert not matches.missing
        for leaf, (key, view) in matches.places.items():
            shape = shape_of[leaf]
            found[f"{module}/{leaf}"] = view.read(tensors[key], shape, tuple(slice(0, n) for n in shape))
    return found


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.long] if number else []) for number, name in enumerate(LAYOUTS)]
)
def test_loss_and_gradients_are_those_of_torch(layout: str, tmp_path: Path) -> None:
    config = configured(tmp_path, LAYOUTS[layout])
    assert config.model["vision"].settings.layers == 2 and config.model["llm"].settings.width == 24
    values, gradients = dict(np.load(FOLDER / "values.npz")), dict(np.load(FOLDER / "gradients.npz"))
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        assert trainer.started[0].startswith(f"vision, vision_projector, llm: parameters of {FOLDER} (")
        packer = trainer.parts.packer
        placeholder = trainer.parts.tokenizer.media_token("vision")
        batch = packer.microbatch(samples(values, placeholder), 3)
        count = float(np.sum(np.asarray(batch.inputs["llm"]["weights"])))
        divisors = {"llm": count, "vision": 1.0}
        result = trainer.executor.step(trainer.parts.runs.signed([batch]), divisors)
        loss, _ = result.fetch()
        held = {name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}
        b1 = config.model.optimizers["llm"].b1
    assert loss == pytest.approx(float(values["loss"]), rel=2e-6)
    got = {name.removeprefix("adam_m/"): leaf / (1 - b1) for name, leaf in held.items() if name.startswith("adam_m/")}
    shapes: dict[str, dict[str, Any]] = {}
    for name, leaf in got.items():
        module, _, own = name.partition("/")
        shapes.setdefault(module, {})[own] = leaf.shape
    want = leaves_of_gradients(config, gradients, shapes)
    assert got.keys() == want.keys() and len(want) > 60
    for name, leaf in want.items():
        bound = 1e-5 * max(np.abs(leaf).max(), 1e-3)
        np.testing.assert_allclose(got[name], leaf, rtol=0, atol=bound, err_msg=name)


def test_out_of_in_is_the_same_folder(tmp_path: Path) -> None:
    """Also what has no leaf: the layer behind the features, and the norm behind that."""
    config = configured(tmp_path, LAYOUTS["one device"])
    save_untrained(config, tmp_path / "run")
    made = export_folders(tmp_path / "run", tmp_path / "out")
    assert made.without == () and list(made.tensors) == [str(tmp_path / "out")]
    assert_same_tensors(tmp_path / "out" / "model.safetensors", FOLDER / "model.safetensors")
    assert (tmp_path / "out" / "config.json").read_bytes() == (FOLDER / "config.json").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_as_the_reference_does(layout: str, tmp_path: Path) -> None:
    found = check(configured(tmp_path, LAYOUTS[layout]), style="silent")
    assert found and found.ok, found
