"""LLaVA-NeXT from its folder: tiles of every image and rows with newlines, as transformers and torch have them.

``tests/oracles/make_llava_next.py`` made the folder, five sequences with no, one and two images, and what torch gives.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from first_step import assert_gradients, first_step
from safetensors.numpy import load_file
from tiled_folders import COVERED, IMAGE, LAYOUTS, SEQUENCES, TiledFolder
from trial_runs import assert_same_tensors, save_untrained

from mmjax.configurable import ConfigError
from mmjax.data.tiles import token_count
from mmjax.data.types import EncoderSpec
from mmjax.eval.evaluator import Evaluator
from mmjax.export.folders import export_folders
from mmjax.models.families import FAMILIES, PROJECTOR
from mmjax.models.pretrained import find_pretrained
from mmjax.parity.engine import check
from mmjax.train.trainer import Trainer
from mmjax.weights.folder import read_config

FOLDER = Path(__file__).parent / "oracles" / "llava_next"
SETTINGS = (
    *("Data.sequence_length=240", "Train.eval_samples=0", "Train.clip_norm=0.0", "Train.global_batch=6"),
    *("Train.microbatches=1", "llm/Packing.buckets=((3, 240),)", "vision/Packing.buckets=((6, 240),)"),
)
OURS = TiledFolder(FOLDER, SETTINGS)


@pytest.fixture(scope="module")
def values() -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / "values.npz"))


def test_an_image_has_as_many_tokens_as_the_model_has_features(values: dict[str, np.ndarray]) -> None:
    spec = EncoderSpec(patch=4, channels=3, newline=True)
    for number in range(SEQUENCES):
        own = OURS.images(values, number)
        media = [1 + tiled.grid[0] * tiled.grid[1] for tiled in own]
        counts = [token_count(spec, [(COVERED, COVERED)] * n, tiled) for n, tiled in zip(media, own, strict=True)]
        assert sum(counts) == (values[f"tokens_{number}"] == IMAGE).sum()
        assert not own or min(media) > 1, "every image has tiles"


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_torch(layout: str, values: dict[str, np.ndarray], tmp_path: Path) -> None:
    config = OURS.configured(tmp_path, *LAYOUTS[layout])
    projector = config.model.projectors["vision"].settings
    assert projector.newline and projector.most_tiles == 0
    step = first_step(config, tmp_path / "run", partial(OURS.samples, values), rows=6)
    assert step.loss == pytest.approx(float(values["loss"]), rel=2e-6)
    shapes = {name: leaf.shape for name, leaf in step.gradients.items()}
    want = OURS.leaves_of(config, dict(np.load(FOLDER / "gradients.npz")), shapes)
    assert step.gradients.keys() == want.keys() and "vision_projector/newline" in want and len(want) > 55
    assert_gradients(step.gradients, want, bound=1e-4, least=3e-3)


@pytest.mark.long
def test_out_of_in_is_the_same_folder(tmp_path: Path) -> None:
    save_untrained(OURS.configured(tmp_path, *LAYOUTS["one device"]), tmp_path / "run")
    made = export_folders(tmp_path / "run", tmp_path / "out")
    assert made.without == () and list(made.tensors) == [str(tmp_path / "out")]
    assert_same_tensors(tmp_path / "out" / "model.safetensors", FOLDER / "model.safetensors")
    assert "image_newline" in load_file(FOLDER / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == read_config(str(FOLDER))


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_as_the_reference_does(layout: str, tmp_path: Path) -> None:
    own = ("Train.microbatches=2", "Data.sequence_length=512", "llm/Packing.buckets=()", "vision/Packing.buckets=()")
    report = check(OURS.configured(tmp_path, *LAYOUTS[layout], *own), 2, style="silent")
    assert report and report.ok, report


@pytest.mark.long
@pytest.mark.parametrize("layout", ["one device", "tp, pp and split backward"])
def test_generated_tokens_are_those_of_transformers(layout: str, values: dict[str, np.ndarray], tmp_path: Path) -> None:
    """64 greedy tokens behind each sequence, images of all sizes in front of them."""
    rows = ("llm/Packing.buckets=()", "Data.sequence_length=208")
    config = OURS.configured(tmp_path, *rows, *(s for s in LAYOUTS[layout] if "zb-h1" not in s))
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        placeholder = trainer.parts.tokenizer.media_token("vision")
        prompts = [OURS.sample(values, number, placeholder) for number in range(SEQUENCES)]
        asked = [replace(one, prompt=len(one.tokens)) for one in prompts]
        said = Evaluator(trainer.parts).write(trainer.executor.states, asked, limit=64)
    for number, one in enumerate(said):
        assert one.tokens == values[f"generated_{number}"].tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_feature_select_strategy": "full"}, "config.json: vision_feature_select_strategy='full': mmjax"),
        ({"vision_feature_layer": [-2, -1]}, "config.json: vision_feature_layer=[-2, -1]: mmjax takes the features of"),
        ({"multimodal_projector_bias": False}, "config.json: multimodal_projector_bias=False: mmjax has projectors"),
    ],
)
def test_what_ours_has_not_is_named(changes: dict[str, object], message: str) -> None:
    theirs = {**read_config(str(FOLDER)), **changes}
    with pytest.raises(ConfigError) as refusal:
        for family in (PROJECTOR, FAMILIES["vit"]):
            find_pretrained(family, theirs).fields()
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)
