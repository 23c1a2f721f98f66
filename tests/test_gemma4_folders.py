"""Whole models of Gemma 4 from their folders: what transformers computes, and torch's gradients, under layouts.

``tests/oracles/make_gemma4.py`` made the folders, three sequences with no, one and four images of different sizes, and
their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qwen_oracle
from first_step import assert_gradients, first_step, leaves_of_tensors
from qwen_oracle import MODULES, Oracle, apart, assert_packed_texts, opened, tokens_of
from safetensors.numpy import load_file
from trial_runs import assert_same_tensors, save_untrained

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

FOLDERS = Path(__file__).parent / "oracles" / "gemma"
KINDS = ("gemma4", "gemma4_small")
BOUNDS = {"gemma4": 1e-5, "gemma4_small": 1e-4}
"""Largest differences from transformers as shares of the largest value; norms of small numbers make them larger."""
ALL = pytest.mark.parametrize("kind", KINDS)
IMAGE, SIDE, IMAGES, LENGTH = 263, 12, 5, 180
FIXED = ("_bounds", "standard/", "layer_scalar")
"""Parts of the names of leaves that are buffers in transformers."""
Arrays = dict[str, np.ndarray]


@cache
def oracle(kind: str) -> Oracle:
    return Oracle(*opened(FOLDERS / kind), dict(np.load(FOLDERS / kind / "values.npz")))


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


def samples(kind: str, placeholder: int = IMAGE) -> list[Sample]:
    values = oracle(kind).values
    images = [values[f"image_{number}"] for number in range(IMAGES)]
    return [sample_of(values[f"tokens_{number}"], images, placeholder, is_asked=False) for number in range(3)]


def prompt(kind: str, placeholder: int = IMAGE) -> Sample:
    values = oracle(kind).values
    return sample_of(values["prompt"], [values["image_0"], values["image_1"]], placeholder, is_asked=True)


def packed(kind: str) -> Any:
    """All sequences in one row, all images in another."""
    model = oracle(kind).model
    spec: Any = model.encoders["vision"].module.medium
    about: Any = {"microbatches": 1, "cells": 1, "pad": 0, "text": ((1, LENGTH),), "sequence_length": LENGTH}
    packer = Packer(encoders={"vision": replace(spec, buckets=((1, 198),))}, mask=model.llm.mask, **about)
    return packer.microbatch(samples(kind), 3)


# ---- what transformers computes --------------------------------------------------------------------------------------


@pytest.mark.long
@ALL
def test_packed_images_have_their_tokens_and_packed_texts_their_values(kind: str) -> None:
    of, batch = oracle(kind), packed(kind)
    tokens = tokens_of(of, batch)
    for number in range(IMAGES):
        seen = of.values[f"seen_{number}"]
        starts = range(tokens.shape[1] - len(seen) + 1)
        assert min(apart(tokens[0, start : start + len(seen)], seen) for start in starts) < 5e-6
    assert_packed_texts(of, batch, tokens, 1, bound=BOUNDS[kind])


@pytest.mark.long
@ALL
def test_the_dense_reference_is_transformers_too(kind: str) -> None:
    of = oracle(kind)
    node, image = of.model.nodes["vision"], of.values["image_0"]
    assert node.projector
    tokens, _ = encode_image(of.leaves, "vision", node.config, image, projector=node.projector)
    assert apart(tokens, of.values["seen_0"]) < 5e-6
    assert apart(sample_logits(of.leaves, of.model, samples(kind)[2]), of.values["logits_2"]) < BOUNDS[kind]


# ---- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@ALL
def test_parameters_are_counted(kind: str) -> None:
    tensors = load_file(FOLDERS / kind / "model.safetensors")
    assert sum(parameter_count(oracle(kind).model).values()) == sum(tensor.size for tensor in tensors.values())


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("text_config", {"sliding_window": 5}, "config.json: sliding_window=5: mmjax shows an image's 6 tokens"),
        ("text_config", {"use_bidirectional_attention": "all"}, "config.json: use_bidirectional_attention='all'"),
        ("vision_config", {"rms_norm_eps": 1e-5}, "config.json: rms_norm_eps=1e-05: mmjax has 1e-06"),
    ],
)
def test_what_ours_has_not_is_named(part: str, changes: dict[str, Any], message: str) -> None:
    theirs = dict(WeightsFolder.open(str(FOLDERS / "gemma4")).config)
    theirs[part] = {**theirs[part], **changes}
    with pytest.raises(ConfigError) as refusal:
        for family in MODULES.values():
            family.config(**find_pretrained(family, theirs).fields())
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


def test_small_models_are_causal_for_images_too() -> None:
    large, small = (oracle(kind).model.llm for kind in KINDS)
    assert (large.mask, large.full_causal, small.mask, small.full_causal) == ("gemma3", True, "causal", False)
    assert (small.per_layer_width, small.per_layer_media) == (16, 256)


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
SMALL_LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "one device": LAYOUTS["one device"],
    "tp and split backward": (
        *("llm/Layout.tp=2", "Train.schedule='zb-h1'"),
        *("vision/Layout.dp=1", "vision/Layout.tp=2", "vision/Layout.pp=2", "vision/Layout.rank_offset=2"),
    ),
    "cp of both": LAYOUTS["cp of both"],
}
"""A model whose layers read the embeddings is in one stage."""
ALL_LAYOUTS = {"gemma4": LAYOUTS, "gemma4_small": SMALL_LAYOUTS}
RUNS = pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind, layouts in ALL_LAYOUTS.items() for layout in layouts if layout != "nested"],
)


def configured(folder: Path, kind: str, layout: tuple[str, ...]) -> Recipe:
    """The tiny configuration, whose model begins with the folder."""
    return qwen_oracle.configured(folder, str(FOLDERS / kind), ("vision/Packing.buckets=((3, 216),)", *layout))


@pytest.mark.long
@RUNS
def test_loss_and_gradients_are_those_of_torch(kind: str, layout: str, tmp_path: Path) -> None:
    config = configured(tmp_path, kind, ALL_LAYOUTS[kind][layout])
    step = first_step(config, tmp_path / "run", partial(samples, kind))
    assert step.loss == pytest.approx(float(oracle(kind).values["loss"]), rel=2e-6)
    theirs = dict(np.load(FOLDERS / kind / "gradients.npz"))  # buffers have none
    want = leaves_of_tensors(FOLDERS / kind, config, theirs, step.gradients)
    fixed = step.gradients.keys() - want.keys()
    assert len(want) > 60 and fixed and all(any(part in name for part in FIXED) for name in fixed)
    assert not any(np.abs(step.gradients[name]).any() for name in fixed)
    assert_gradients(step.gradients, want, bound=1e-4)


@pytest.mark.long
@ALL
def test_out_of_in_is_the_same_folder(kind: str, tmp_path: Path) -> None:
    """Bit for bit, under tp, pp and a split backward."""
    config = configured(tmp_path, kind, [*ALL_LAYOUTS[kind].values()][1])
    save_untrained(config, tmp_path / "run")
    export_folders(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(tmp_path / "out" / "model.safetensors", FOLDERS / kind / "model.safetensors")
    assert (tmp_path / "out" / "config.json").read_bytes() == (FOLDERS / kind / "config.json").read_bytes()


@pytest.mark.long
@ALL
def test_the_dense_reference_says_what_transformers_says(kind: str) -> None:
    of = oracle(kind)
    said = of.values["generated"].tolist()
    assert greedy(of.leaves, of.model, prompt(kind), max_new=len(said), eos=-1) == said


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_as_the_dense_reference_does(layout: str, tmp_path: Path) -> None:
    """The large model; the small one is compared with torch under its layouts, and its text in tests/parity."""
    # Rounding in an update of small embeddings, which are multiplied, changes the next gradients.
    found = check(configured(tmp_path, "gemma4", LAYOUTS[layout]), steps=1, style="silent")
    assert found and found.ok, found


@pytest.mark.long
@ALL
def test_a_cache_says_what_transformers_says(kind: str, tmp_path: Path) -> None:
    """The large model in two stages; its images see themselves in layers with a window while the prompt is read."""
    stages = f"llm/Layout.pp={1 if kind == 'gemma4_small' else 2}"
    layout = ("vision/Layout.dp=1", "vision/Layout.rank_offset=4", stages, "llm/Layout.tp=2")
    values = oracle(kind).values
    said = values["generated"].tolist()
    with Trainer(configured(tmp_path, kind, layout), style="silent") as trainer:
        parts = trainer.parts
        evaluator = Evaluator(parts, room=len(values["prompt"]) + len(said))
        ((_, own),) = evaluator.rounds([prompt(kind, parts.tokenizer.media_token("vision"))])
        evaluator.predictor.load(trainer.executor.states)
        got = evaluator.predictor.generate(own.batch, own.starts, len(said), ())
    ((m, row),) = own.places
    assert got[m][row].tokens == said
