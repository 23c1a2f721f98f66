"""LLaVA-OneVision from its folder: tiles, rows with newlines and resizing, as transformers and torch compute them.

``tests/oracles/make_onevision.py`` made the folder, five sequences with no, one and two images, and what torch gives.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from first_step import assert_gradients, first_step
from PIL import Image
from safetensors.numpy import load_file
from tiled_folders import COVERED, IMAGE, LAYOUTS, SEQUENCES, TiledFolder
from trial_runs import assert_same_tensors

from mmjax.assembly.model import build_model
from mmjax.config import load_config, operative_config
from mmjax.configurable import ConfigError
from mmjax.data.tiles import NEWLINE, arrange, token_count
from mmjax.data.types import EncoderSpec, Sample
from mmjax.eval.evaluator import Evaluator
from mmjax.export.folders import export_folders
from mmjax.models.families import FAMILIES, PROJECTOR
from mmjax.models.graph import MultimodalModel
from mmjax.models.pretrained import find_pretrained
from mmjax.models.projector.config import ProjectorConfig
from mmjax.parity.engine import check
from mmjax.reference import sample_logits
from mmjax.reference.encoders import encode
from mmjax.reference.tiles import in_rows
from mmjax.train.trainer import Trainer
from mmjax.weights.folder import read_config
from mmjax.weights.table import expand, match

FOLDER = Path(__file__).parent / "oracles" / "onevision"
SETTINGS = (
    *("Data.sequence_length=128", "Train.eval_samples=0", "Train.clip_norm=0.0", "Train.global_batch=6"),
    *("Train.microbatches=1", "llm/Packing.buckets=((3, 128),)", "vision/Packing.buckets=((6, 160),)"),
)


OURS = TiledFolder(FOLDER, SETTINGS)
configured, images, sample, leaves_of = OURS.configured, OURS.images, OURS.sample, OURS.leaves_of


@pytest.fixture(scope="module")
def values() -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / "values.npz"))


@dataclass(frozen=True)
class Begun:
    """A run on one device that was saved before its first step."""

    run: Path
    model: MultimodalModel
    leaves: dict[str, np.ndarray]
    placeholder: int


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    folder = tmp_path_factory.mktemp("onevision")
    config, run = configured(folder, *LAYOUTS["one device"]), folder / "run"
    with Trainer(config, run, style="silent") as trainer:
        trainer.state.step = 1
        trainer.save()
        leaves = {name.removeprefix("params/"): np.asarray(leaf) for name, leaf in trainer.leaves().items()}
        tokenizer = trainer.parts.tokenizer
    (run / "config.gin").write_text(operative_config(config))
    return Begun(run, build_model(config, tokenizer), leaves, tokenizer.media_token("vision"))


def test_an_image_has_as_many_tokens_as_the_processor_counts(values: dict[str, np.ndarray]) -> None:
    """From sizes alone; and each token of the whole image, and of the tiles that are not resized, once."""
    spec = EncoderSpec(patch=4, channels=3, newline=True, most_tiles=3)
    for number in range(SEQUENCES):
        own = images(values, number)
        media = [1 + tiled.grid[0] * tiled.grid[1] for tiled in own]
        counts = [token_count(spec, [(COVERED, COVERED)] * n, tiled) for n, tiled in zip(media, own, strict=True)]
        assert sum(counts) == (values[f"tokens_{number}"] == IMAGE).sum()
        places = arrange(spec, [(4, 4)] * sum(media), own)
        assert places.index.shape == places.shares.shape == (sum(counts), 4)
        np.testing.assert_allclose(places.shares.sum(axis=1), 1, rtol=1e-6)
        assert places.index.max(initial=-1) < 16 * sum(media)
        newlines = (places.index == NEWLINE).all(axis=1)
        assert newlines.sum() == {0: 5, 1: 0, 2: 2, 3: 12, 4: 6}[number] and (places.index[~newlines] >= 0).all()
        assert places.index[:16, 0].tolist() == list(range(16 * bool(own)))


def picture_tokens(begun: Begun, own: Sample) -> np.ndarray:
    """What stands at the places of a sample's images, by the reference."""
    found, left = [np.zeros((0, 24))], list(own.media["vision"])
    for tiled in own.tiled["vision"]:
        media = [left.pop(0) for _ in range(1 + tiled.grid[0] * tiled.grid[1])]
        tokens = [encode(begun.leaves, "vision", begun.model, medium)[0] for medium in media]
        newline = jnp.asarray(begun.leaves["vision_projector/newline"])
        found.append(np.asarray(in_rows(tokens, (4, 4), tiled.grid, tiled.size, newline, 3)))
    return np.concatenate(found)


@pytest.mark.long
def test_the_reference_gives_the_features_and_logits_of_transformers(
    values: dict[str, np.ndarray], begun: Begun
) -> None:
    """The reference puts pictures together from tiles as arrays: it knows nothing of places."""
    for number in (0, 2):  # resized, and whole beside another
        own = sample(values, number, begun.placeholder)
        features = picture_tokens(begun, own)
        wanted = values[f"features_{number}"]
        np.testing.assert_allclose(features, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
        logits = np.asarray(sample_logits(begun.leaves, begun.model, own), np.float64)
        wanted = values[f"logits_{number}"]
        np.testing.assert_allclose(logits[-3:], wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
        sums = np.log(np.exp(logits).sum(axis=1))
        text = np.flatnonzero(own.loss_weights[1:])
        said = (logits[text, own.tokens[text + 1]] - sums[text]) - values[f"logprobs_{number}"][text]
        assert np.abs(said).max() < 1e-4


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.long] if number else []) for number, name in enumerate(LAYOUTS)]
)
def test_loss_and_gradients_are_those_of_torch(layout: str, values: dict[str, np.ndarray], tmp_path: Path) -> None:
    config = configured(tmp_path, *LAYOUTS[layout])
    assert (
        config.model.projectors["vision"].settings.newline
        and config.model.projectors["vision"].settings.most_tiles == 3
    )
    step = first_step(config, tmp_path / "run", partial(OURS.samples, values), rows=6)
    assert step.loss == pytest.approx(float(values["loss"]), rel=2e-6)
    shapes = {name: leaf.shape for name, leaf in step.gradients.items()}
    want = leaves_of(config, dict(np.load(FOLDER / "gradients.npz")), shapes)
    assert step.gradients.keys() == want.keys() and "vision_projector/newline" in want and len(want) > 60
    # A ulp in the features of large weights is 3e-5 in every gradient; the order of sums in attention decides.
    assert_gradients(step.gradients, want, bound=1e-4, least=3e-3)


@pytest.mark.long
def test_out_of_in_is_the_same_folder(begun: Begun) -> None:
    made = export_folders(begun.run, begun.run.parent / "out")
    assert made.without == () and list(made.tensors) == [str(begun.run.parent / "out")]
    assert_same_tensors(begun.run.parent / "out" / "model.safetensors", FOLDER / "model.safetensors")
    assert "image_newline" in load_file(FOLDER / "model.safetensors")
    assert json.loads((begun.run.parent / "out" / "config.json").read_text()) == read_config(str(FOLDER))


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_as_the_reference_does(layout: str, tmp_path: Path) -> None:
    """Of new values, with pictures that are resized and some that are not."""
    own = ("Train.microbatches=2", "Data.sequence_length=512", "llm/Packing.buckets=()", "vision/Packing.buckets=()")
    report = check(configured(tmp_path, *LAYOUTS[layout], *own), 2, style="silent")
    assert report and report.ok, report


@pytest.mark.parametrize(
    "prefixes",
    [
        {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower.", "": "model."},
        {"vision_tower.": "vision_tower.vision_model."},
    ],
    ids=["today's", "older"],
)
def test_keys_of_all_folders_are_known(prefixes: Mapping[str, str], tmp_path: Path) -> None:
    """``save_pretrained`` writes older keys; models in memory, and folders on the Hub, have others."""
    config, theirs = configured(tmp_path, *LAYOUTS["one device"]), read_config(str(FOLDER))
    keys, taken = set[str](), set[str]()
    for key in load_file(FOLDER / "model.safetensors"):
        prefix = next((old for old in prefixes if key.startswith(old)), None)
        keys.add(key if prefix is None else prefixes[prefix] + key.removeprefix(prefix))
    parts: dict[str, Any] = dict(config.model.parts)
    for part in parts.values():
        pretrained = find_pretrained(part.family, theirs)
        matches = match(expand(pretrained.rows(part.settings), getattr(part.settings, "layers", 0)), keys)
        assert not matches.missing
        taken |= {key for key, _ in matches.places.values()}
    assert {key for key in keys - taken if "post_layernorm" not in key} == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_aspect_ratio": "anyres"}, "config.json: vision_aspect_ratio='anyres': mmjax has anyres_max_ and a"),
        ({"vision_feature_select_strategy": "default"}, "config.json: vision_feature_select_strategy='default': mmjax"),
    ],
)
def test_what_ours_has_not_is_named(changes: dict[str, Any], message: str) -> None:
    theirs = {**read_config(str(FOLDER)), **changes}
    with pytest.raises(ConfigError) as refusal:
        for family in (PROJECTOR, FAMILIES["vit"]):
            find_pretrained(family, theirs).fields()
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("vision/Projector.newline=False",), "vision/Projector.newline=False"),
        (("vision/Projector.most_tiles=4",), "vision/Projector.most_tiles=4"),
    ],
)
def test_settings_of_the_folder_stand(settings: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(tmp_path, *LAYOUTS["one device"], *settings)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"most_tiles": 9}, "Projector.most_tiles=9: bounds the picture of Projector.newline"),
        ({"newline": True, "inject": (0,)}, "Projector.inject=(0,): places that are newlines have no tokens"),
    ],
)
def test_projectors_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        ProjectorConfig(**wrong)
    assert str(refusal.value).startswith(message)


def test_recordings_and_drawings_have_no_tiles() -> None:
    models = {
        "audio": "Model.encoders={'vision': 'vit', 'audio': 'whisper'}",
        "painter": "Model.generators={'painter': 'dit'}",
    }
    for name, model in models.items():
        with pytest.raises(
            ConfigError, match=f"{name}/Projector.newline=True: belongs to the tiles of images"
        ) as refusal:
            load_config([], [model, f"{name}/Projector.newline=True"])
        assert "\n" not in str(refusal.value)


@pytest.mark.long
def test_a_run_trains_on_files_as_the_folder_says(tmp_path: Path) -> None:
    """Images of a dataset become what the processor's rules in the folder, and its model's, make of them."""
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    grids = read_config(str(FOLDER))["image_grid_pinpoints"]
    rules = {"size": {"height": 17, "width": 17}, "image_grid_pinpoints": grids, "do_convert_rgb": True}
    rules |= {"image_processor_type": "LlavaOnevisionImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(rules))
    rows = []
    for number, sizes in enumerate((((50, 83),), (), ((20, 31), (44, 9)), ((39, 12),))):
        names = [f"{number}_{at}.png" for at in range(len(sizes))]
        for name, (height, width) in zip(names, sizes, strict=True):
            pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / name)
        rows.append({"images": names, "question": "<image>" * len(sizes) + "what?", "answer": str(number)})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = configured(
        tmp_path,
        *(f"Model.weights={str(folder)!r}", "Data.sources={'own': 1.0}", "Train.global_batch=4", "Train.steps=30"),
        *(f"own/Source.path={str(tmp_path / 'data.jsonl')!r}", f"Data.cache={str(tmp_path / 'cache')!r}"),
        *(LAYOUTS["one device"]),
    )
    own = config.data.sources["own"]
    assert (own.resize, own.size, own.alone) == ("anyres", (17, 17), True) and (2, 3) in own.grids
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        losses = trainer.train(12).losses
    assert losses[-1] < losses[0]


def test_newlines_have_no_place_among_rows_and_columns() -> None:
    with pytest.raises(ConfigError, match="newline=True: is no token of an image's rows and columns"):
        load_config(
            [], ["vision/Projector.newline=True", "llm/Decoder.head_dim=16", "llm/Decoder.rope_sections=(2, 3, 3)"]
        )


@pytest.mark.long
@pytest.mark.parametrize("layout", ["one device", "tp, pp and split backward"])
def test_generated_tokens_are_those_of_transformers(layout: str, values: dict[str, np.ndarray], tmp_path: Path) -> None:
    """64 greedy tokens behind each sequence, images of all sizes in front of them."""
    rows = ("llm/Packing.buckets=()", "Data.sequence_length=160")
    config = configured(tmp_path, *rows, *(s for s in LAYOUTS[layout] if "zb-h1" not in s))
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        placeholder = trainer.parts.tokenizer.media_token("vision")
        prompts = [sample(values, number, placeholder) for number in range(SEQUENCES)]
        asked = [replace(one, prompt=len(one.tokens)) for one in prompts]
        evaluator = Evaluator(trainer.parts)
        said = evaluator.write(trainer.executor.states, asked, limit=64)
    for number, one in enumerate(said):
        assert one.tokens == values[f"generated_{number}"].tolist()
