"""A whole Gemma 4 from its folder: what transformers computes, and torch's gradients, under layouts.

``tests/oracles/make_gemma4.py`` made the folder, three sequences with no, one and four images of different sizes, and
their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qwen_oracle import MODULES, Oracle, apart, assert_packed_texts, opened, tokens_of
from safetensors.numpy import load_file
from trial_runs import assert_same_tensors, save_untrained, write_tiny

from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.packing import Packer
from mmjax.data.types import Sample
from mmjax.eval.evaluator import Evaluator
from mmjax.export.folders import export_folders
from mmjax.models.flops import parameter_count
from mmjax.models.pretrained import find_pretrained
from mmjax.parity.engine import check
from mmjax.recipe import Recipe
from mmjax.reference import encode_image, greedy, sample_logits
from mmjax.train.trainer import Trainer
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.parameters import find_leaves
from mmjax.weights.table import expand

FOLDER = Path(__file__).parent / "oracles" / "gemma" / "gemma4"
IMAGE, SIDE, IMAGES, LENGTH = 263, 12, 5, 180
FIXED = ("_bounds", "standard/", "layer_scalar")
"""Parts of the names of leaves that are buffers in transformers."""
Arrays = dict[str, np.ndarray]


@cache
def oracle() -> Oracle:
    return Oracle(*opened(FOLDER), dict(np.load(FOLDER / "values.npz")))


def sample_of(tokens: np.ndarray, images: list[np.ndarray], placeholder: int = IMAGE, *, is_asked: bool) -> Sample:
    """A sequence with the first images, which are taken from the list."""
    is_image, own = tokens == IMAGE, list[np.ndarray]()
    left = int(is_image.sum())
    while left:
        own.append(images.pop(0))
        left -= own[-1].shape[0] * own[-1].shape[1] // SIDE**2
    about: Any = {"question": "", "answer": "", "prompt": len(tokens), "media_tokens": {"vision": placeholder}}
    return Sample(
        tokens=np.where(is_image, placeholder, tokens).astype(np.int32),
        loss_weights=(~is_image & (np.arange(len(tokens)) > 0) & (not is_asked)).astype(np.float32),
        media={"vision": tuple(own)},
        **about,
    )


def samples(placeholder: int = IMAGE) -> list[Sample]:
    values = oracle().values
    images = [values[f"image_{number}"] for number in range(IMAGES)]
    return [sample_of(values[f"tokens_{number}"], images, placeholder, is_asked=False) for number in range(3)]


def prompt(placeholder: int = IMAGE) -> Sample:
    values = oracle().values
    return sample_of(values["prompt"], [values["image_0"], values["image_1"]], placeholder, is_asked=True)


def packed() -> Any:
    """All sequences in one row, all images in another."""
    model = oracle().model
    spec: Any = model.encoders["vision"].module.medium
    about: Any = {"microbatches": 1, "cells": 1, "pad": 0, "text": ((1, LENGTH),), "sequence_length": LENGTH}
    packer = Packer(encoders={"vision": replace(spec, buckets=((1, 198),))}, mask=model.llm.mask, **about)
    return packer.microbatch(samples(), 3)


# ---- what transformers computes --------------------------------------------------------------------------------------


def test_packed_images_have_their_tokens_and_packed_texts_their_values() -> None:
    of, batch = oracle(), packed()
    tokens = tokens_of(of, batch)
    for number in range(IMAGES):
        seen = of.values[f"seen_{number}"]
        starts = range(tokens.shape[1] - len(seen) + 1)
        assert min(apart(tokens[0, start : start + len(seen)], seen) for start in starts) < 5e-6
    assert_packed_texts(of, batch, tokens, 1, bound=1e-5)


def test_the_dense_reference_is_transformers_too() -> None:
    of = oracle()
    node, image = of.model.nodes["vision"], of.values["image_0"]
    assert node.projector
    tokens, _ = encode_image(of.leaves, "vision", node.config, image, projector=node.projector)
    assert apart(tokens, of.values["seen_0"]) < 5e-6
    assert apart(sample_logits(of.leaves, of.model, samples()[2]), of.values["logits_2"]) < 1e-5


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_parameters_are_counted() -> None:
    tensors = load_file(FOLDER / "model.safetensors")
    assert sum(parameter_count(oracle().model).values()) == sum(tensor.size for tensor in tensors.values())


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("text_config", {"sliding_window": 5}, "config.json: sliding_window=5: mmjax shows an image's 6 tokens"),
        ("text_config", {"use_bidirectional_attention": "all"}, "config.json: use_bidirectional_attention='all'"),
        ("vision_config", {"rms_norm_eps": 1e-5}, "config.json: rms_norm_eps=1e-05: mmjax has 1e-06"),
    ],
)
def test_what_ours_has_not_is_named(part: str, changes: dict[str, Any], message: str) -> None:
    theirs = dict(WeightsFolder.open(str(FOLDER)).config)
    theirs[part] = {**theirs[part], **changes}
    with pytest.raises(ConfigError) as refusal:
        for family in MODULES.values():
            family.config(**find_pretrained(family, theirs).fields())
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


def test_small_models_are_causal_for_images_too() -> None:
    theirs = dict(WeightsFolder.open(str(FOLDER)).config)
    assert (oracle().model.llm.mask, oracle().model.llm.full_causal) == ("gemma3", True)
    theirs["text_config"] = {**theirs["text_config"], "use_bidirectional_attention": None}
    fields = find_pretrained(MODULES["llm"], theirs).fields()
    assert (fields["mask"], fields["full_causal"]) == ("causal", False)


# ---- runs ------------------------------------------------------------------------------------------------------------

LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "one device": ("llm/Layout.tp=1", "vision/Layout.dp=1", "vision/Layout.rank_offset=0"),
    "tp, pp and split backward": (
        *("llm/Layout.tp=2", "llm/Layout.pp=2", "Train.schedule='zb-h1'"),
        *("vision/Layout.dp=1", "vision/Layout.tp=2", "vision/Layout.pp=2", "vision/Layout.rank_offset=4"),
    ),
    "cp of both": (
        *("llm/Layout.tp=1", "llm/Layout.cp=2"),
        *("vision/Layout.dp=1", "vision/Layout.cp=2", "vision/Layout.rank_offset=2"),
    ),
    "nested": (
        *("llm/Layout.tp=2", "llm/Layout.pp=2", "Train.schedule='nested'", "Train.microbatches=4"),
        *("Train.global_batch=12", "vision/Layout.dp=1", "vision/Layout.tp=2", "vision/Layout.lanes=2"),
        "vision/Layout.rank_offset=0",
    ),
}
RUNS = pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "nested"])


def configured(folder: Path, layout: tuple[str, ...]) -> Recipe:
    """The tiny configuration, whose model begins with the folder."""
    path = write_tiny(folder)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(("vision/ViT", "llm/Decoder", "Packing"))))
    settings = (
        f"Model.weights={str(FOLDER)!r}",
        *("Data.sequence_length=96", "Train.eval_samples=0", "Train.clip_norm=0.0", "Train.global_batch=3"),
        *("Train.microbatches=1", "llm/Packing.buckets=((3, 96),)", "vision/Packing.buckets=((3, 216),)"),
    )
    return load_config([path], [*settings, *layout])


@pytest.mark.long
@RUNS
def test_loss_and_gradients_are_those_of_torch(layout: str, tmp_path: Path) -> None:
    config = configured(tmp_path, LAYOUTS[layout])
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        batch = trainer.parts.packer.microbatch(samples(trainer.parts.tokenizer.media_token("vision")), 3)
        count = float(np.sum(np.asarray(batch.inputs["llm"]["weights"])))
        counts = {"llm": count, "llm_tokens": 1.0, "vision": 1.0}
        loss, _ = trainer.executor.step(trainer.parts.runs.signed([batch]), counts).fetch()
        states = {name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}
        b1 = config.model.optimizers["llm"].b1
    assert loss == pytest.approx(float(oracle().values["loss"]), rel=2e-6)
    got = {name.removeprefix("adam_m/"): leaf / (1 - b1) for name, leaf in states.items() if name.startswith("adam_m/")}
    want = gradients_of({name: leaf.shape for name, leaf in got.items()})
    fixed = got.keys() - want.keys()
    assert len(want) > 60 and fixed and all(any(part in name for part in FIXED) for name in fixed)
    assert not any(np.abs(got[name]).any() for name in fixed)
    for name, leaf in want.items():
        bound = 1e-4 * max(np.abs(leaf).max(), 1e-3)
        np.testing.assert_allclose(got[name], leaf, rtol=0, atol=bound, err_msg=name)


def gradients_of(shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Torch's gradients by the names of our leaves, through the tables; buffers have none."""
    folder, found, theirs = WeightsFolder.open(str(FOLDER)), {}, dict(np.load(FOLDER / "gradients.npz"))
    for module, family in MODULES.items():
        part = find_pretrained(family, folder.config)
        config = family.config(**part.fields())
        local = {name.partition("/")[2]: shape for name, shape in shapes.items() if name.startswith(f"{module}/")}
        table = expand(part.rows(config), getattr(config, "layers", 0))
        prefixes: Any = {"prefixes": part.key_prefixes, "other_prefixes": part.other_prefixes}
        for leaf, (key, view) in find_leaves(folder, module, table, local, **prefixes).items():
            if key in theirs:
                found[leaf] = view.read(theirs[key], shapes[leaf], tuple(slice(0, size) for size in shapes[leaf]))
    return found


@pytest.mark.long
def test_out_of_in_is_the_same_folder(tmp_path: Path) -> None:
    """Bit for bit, under tp, pp and a split backward."""
    config = configured(tmp_path, LAYOUTS["tp, pp and split backward"])
    save_untrained(config, tmp_path / "run")
    export_folders(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(tmp_path / "out" / "model.safetensors", FOLDER / "model.safetensors")
    assert (tmp_path / "out" / "config.json").read_bytes() == (FOLDER / "config.json").read_bytes()


@pytest.mark.long
def test_the_dense_reference_says_what_transformers_says() -> None:
    of = oracle()
    said = of.values["generated"].tolist()
    assert greedy(of.leaves, of.model, prompt(), max_new=len(said), eos=-1) == said


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_as_the_dense_reference_does(layout: str, tmp_path: Path) -> None:
    # Rounding in an update of small embeddings, which are multiplied, changes the next gradients.
    found = check(configured(tmp_path, LAYOUTS[layout]), steps=1, style="silent")
    assert found and found.ok, found.numbers()


@pytest.mark.long
def test_a_cache_says_what_transformers_says(tmp_path: Path) -> None:
    """The language model in two stages; images see themselves in layers with a window while the prompt is read."""
    layout = ("vision/Layout.dp=1", "vision/Layout.rank_offset=4", "llm/Layout.pp=2", "llm/Layout.tp=2")
    values = oracle().values
    said = values["generated"].tolist()
    with Trainer(configured(tmp_path, layout), style="silent") as trainer:
        parts = trainer.parts
        evaluator = Evaluator(parts, room=len(values["prompt"]) + len(said))
        ((_, own),) = evaluator.rounds([prompt(parts.tokenizer.media_token("vision"))])
        evaluator.predictor.load(trainer.executor.states)
        got = evaluator.predictor.generate(own.batch, own.starts, len(said), ())
    ((m, row),) = own.places
    assert got[m][row].tokens == said
