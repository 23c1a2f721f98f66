"""Gemma 3 and PaliGemma 2 from their folders: what transformers computes, and torch's gradients, under layouts.

``tests/oracles/make_gemma.py`` made the folders, three sequences with no, some and several images, and their values.
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

from mmjax.configurable import ConfigError, from_preset
from mmjax.data.packing import Packer
from mmjax.data.types import Sample
from mmjax.eval.evaluator import Evaluator
from mmjax.export.folders import export_folders
from mmjax.models.families import PROJECTOR
from mmjax.models.flops import parameter_count
from mmjax.models.graph import multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.pretrained import find_pretrained
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.parity.engine import check
from mmjax.recipe import Recipe
from mmjax.reference import encode_image, greedy, sample_logits
from mmjax.train.trainer import Trainer
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.table import assemble, expand

FOLDERS = Path(__file__).parent / "oracles" / "gemma"
KINDS = ("gemma3", "paligemma2")
ALL = pytest.mark.parametrize("kind", KINDS)
IMAGE, TOKENS, PATCHES = 263, {"gemma3": 9, "paligemma2": 16}, {"gemma3": 144, "paligemma2": 16}
LENGTH = 180


@cache
def oracle(kind: str) -> Oracle:
    return Oracle(*opened(FOLDERS / kind), dict(np.load(FOLDERS / kind / "values.npz")))


def sample_of(
    kind: str,
    tokens: np.ndarray,
    prompt: int,
    images: list[np.ndarray],
    placeholder: int = IMAGE,
    *,
    is_asked: bool = False,
) -> Sample:
    """A sequence with the first images, which are taken from the list; all behind its prompt but images is learned."""
    is_image = tokens == IMAGE
    taken = [images.pop(0) for _ in range(int(is_image.sum()) // TOKENS[kind])]
    learned = ~is_image & (np.arange(len(tokens)) >= prompt) & (not is_asked)
    about: Any = {"question": "", "answer": "", "prompt": len(tokens), "media_tokens": {"vision": placeholder}}
    return Sample(
        tokens=np.where(is_image, placeholder, tokens).astype(np.int32),
        loss_weights=learned.astype(np.float32),
        media={"vision": tuple(taken)},
        **about,
    )


def samples(kind: str, placeholder: int = IMAGE) -> list[Sample]:
    values = oracle(kind).values
    images = [values[f"image_{number}"] for number in range(5)]
    numbered = ((values[f"tokens_{number}"], int(values[f"prompt_{number}"])) for number in range(3))
    return [sample_of(kind, *sequence, images, placeholder) for sequence in numbered]


def packed(kind: str) -> Any:
    """All sequences in one row, all images in another."""
    model = oracle(kind).model
    spec: Any = model.encoders["vision"].module.medium
    about: Any = {"microbatches": 1, "cells": 1, "pad": 0, "text": ((1, LENGTH),), "sequence_length": LENGTH}
    encoders = {"vision": replace(spec, buckets=((1, 5 * PATCHES[kind]),))}
    packer = Packer(encoders=encoders, mask=model.llm.mask, **about)
    return packer.microbatch(samples(kind), 3)


# ---- what transformers computes --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("kind", "tp"), [("gemma3", 1), ("paligemma2", 2)])
def test_packed_images_have_their_tokens_and_packed_texts_their_values(kind: str, tp: int) -> None:
    of = oracle(kind)
    batch = packed(kind)
    tokens = tokens_of(of, batch, tp)
    for number in range(5):
        here = np.arange(TOKENS[kind]) + number * TOKENS[kind]
        differences = [apart(tokens[0, here], of.values[f"seen_{image}"]) for image in range(5)]
        assert min(differences) < 2e-6

    assert_packed_texts(of, batch, tokens, tp, bound=1e-5)


@ALL
def test_the_dense_reference_is_transformers_too(kind: str) -> None:
    of = oracle(kind)
    node, image = of.model.nodes["vision"], of.values["image_0"]
    assert node.projector
    tokens, _ = encode_image(of.leaves, "vision", node.config, image, projector=node.projector)
    assert apart(tokens, of.values["seen_0"]) < 2e-6
    assert apart(sample_logits(of.leaves, of.model, samples(kind)[2]), of.values["logits_2"]) < 1e-5


# ---- folders ---------------------------------------------------------------------------------------------------------


@ALL
def test_parameters_are_counted(kind: str) -> None:
    tensors = load_file(FOLDERS / kind / "model.safetensors")
    assert sum(parameter_count(oracle(kind).model).values()) == sum(tensor.size for tensor in tensors.values())


@ALL
def test_tensors_go_in_and_out_bit_for_bit(kind: str) -> None:
    of, written = oracle(kind), {}
    theirs = WeightsFolder.open(str(FOLDERS / kind))
    for module, family in MODULES.items():
        config: Any = of.model.nodes["vision"].projector if family is PROJECTOR else of.model.nodes[module].config
        table = expand(find_pretrained(family, theirs.config).rows(config), getattr(config, "layers", 0))
        begins = f"{module}/"
        leaves = {name.removeprefix(begins): leaf for name, leaf in of.leaves.items() if name.startswith(begins)}
        written |= assemble(table, leaves)
    tensors = load_file(FOLDERS / kind / "model.safetensors")
    assert written.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(written[key], tensor, strict=True)


_TOWER = dict(
    **dict(model_type="siglip_vision_model", hidden_size=1152, intermediate_size=4304, num_hidden_layers=27),
    **dict(num_attention_heads=16, patch_size=14, vision_use_head=False),
)
_GEMMA3 = dict(
    **dict(model_type="gemma3_text", sliding_window=1024, rope_scaling={"factor": 8.0, "rope_type": "linear"}),
    **dict(rms_norm_eps=1e-6, rope_theta=1000000.0, rope_local_base_freq=10000.0, vocab_size=262208),
)
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
PUBLISHED: Mapping[str, dict[str, Any]] = {
    name: {
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "text_config": {**_GEMMA3, **dict(zip(_SIZES, sizes, strict=True)), **more},
        "vision_config": {**_TOWER, "image_size": 896},
    }
    for name, sizes, more in (
        ("gemma3-4b", (2560, 10240, 34, 8, 4), {}),
        ("gemma3-12b", (3840, 15360, 48, 16, 8), {}),
        ("gemma3-27b", (5376, 21504, 62, 32, 16), {"head_dim": 128, "query_pre_attn_scalar": 168}),
    )
}
PUBLISHED["paligemma2-3b"] = {  # pyright: ignore[reportIndexIssue]
    "model_type": "paligemma",
    "projection_dim": 2304,
    "vision_config": {**_TOWER, "image_size": 224, "projection_dim": 2304},
    "text_config": dict(
        **dict(zip(_SIZES, (2304, 9216, 26, 8, 4), strict=True)),
        **dict(model_type="gemma2", vocab_size=257216, tie_word_embeddings=False, query_pre_attn_scalar=256),
    ),
}
"""What the ``config.json`` of published folders says of sizes."""
COUNTS = {
    "gemma3-4b": 4_300_079_472,
    "gemma3-12b": 12_187_325_040,
    "gemma3-27b": 27_432_406_640,
    "paligemma2-3b": 3_032_242_416,
}
"""Parameters of published folders; a tied table once."""


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_are_the_published_models(preset: str) -> None:
    tower = "siglip-so400m-14-896" if preset.startswith("gemma3") else "siglip-so400m-14-224"
    merge = {"merge": 4 if preset.startswith("gemma3") else 1}
    fields = {name: find_pretrained(family, PUBLISHED[preset]).fields() for name, family in MODULES.items()}
    llm = DecoderConfig(**fields["llm"])
    assert replace(llm, preset=preset) == from_preset(DecoderConfig, preset)
    vision = ViTConfig(**fields["vision"])
    assert replace(vision, preset=tower) == from_preset(ViTConfig, tower, **merge)
    projectors = {"vision": ProjectorConfig(**fields["vision_projector"])}
    model = multimodal({"vision": vision}, llm, projectors=projectors)
    assert sum(parameter_count(model).values()) == COUNTS[preset]


@pytest.mark.parametrize(
    ("kind", "part", "changes", "message"),
    [
        ("gemma3", "text_config", {"sliding_window": 8}, "config.json: sliding_window=8: mmjax shows an image's 9"),
        ("gemma3", "text_config", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "config.json: layer"),
        ("gemma3", "text_config", {"use_bidirectional_attention": True}, "config.json: use_bidirectional_attention=T"),
        ("gemma3", "text_config", {"hidden_activation": "relu"}, "config.json: hidden_activation='relu': "),
        (
            "gemma3",
            "",
            {"mm_tokens_per_image": 8},
            "config.json: mm_tokens_per_image=8: must be the square of a number",
        ),
        ("gemma3", "vision_config", {"layer_norm_eps": 1e-5}, "config.json: layer_norm_eps=1e-05: mmjax has 1e-06"),
        ("paligemma2", "text_config", {"model_type": "gemma"}, "config.json: model_type='gemma': mmjax knows llama"),
    ],
)
def test_what_ours_has_not_is_named(kind: str, part: str, changes: dict[str, Any], message: str) -> None:
    theirs = dict(WeightsFolder.open(str(FOLDERS / kind)).config)
    theirs |= {part: {**theirs[part], **changes}} if part else changes
    with pytest.raises(ConfigError) as refusal:
        for family in MODULES.values():
            family.config(**find_pretrained(family, theirs).fields())
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


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
}
RUNS = pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind in KINDS for layout in LAYOUTS])


def configured(folder: Path, kind: str, layout: tuple[str, ...]) -> Recipe:
    """The tiny configuration, whose model begins with a folder."""
    buckets = f"vision/Packing.buckets=((3, {4 * PATCHES[kind]}),)"
    return qwen_oracle.configured(folder, str(FOLDERS / kind), (buckets, *layout))


@pytest.mark.long
@RUNS
def test_loss_and_gradients_are_those_of_torch(kind: str, layout: str, tmp_path: Path) -> None:
    config = configured(tmp_path, kind, LAYOUTS[layout])
    step = first_step(config, tmp_path / "run", partial(samples, kind))
    assert step.loss == pytest.approx(float(oracle(kind).values["loss"]), rel=2e-6)
    theirs = {saved_key(key): tensor for key, tensor in np.load(FOLDERS / kind / "gradients.npz").items()}
    assert theirs.keys() == WeightsFolder.open(str(FOLDERS / kind)).tensors.keys()
    want = leaves_of_tensors(FOLDERS / kind, config, theirs, step.gradients)
    assert step.gradients.keys() == want.keys() and len(want) > 80
    assert_gradients(step.gradients, want, bound=2e-5)


def saved_key(key: str) -> str:
    """The name in the folder of a parameter of the model in memory."""
    key = key.removeprefix("model.")
    return key.replace("language_model.", "language_model.model.") if key.startswith("language_model.") else key


@pytest.mark.long
@ALL
def test_out_of_in_is_the_same_folder(kind: str, tmp_path: Path) -> None:
    """Bit for bit, under tp, pp and a split backward."""
    config = configured(tmp_path, kind, LAYOUTS["tp, pp and split backward"])
    save_untrained(config, tmp_path / "run")
    export_folders(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(tmp_path / "out" / "model.safetensors", FOLDERS / kind / "model.safetensors")
    assert (tmp_path / "out" / "config.json").read_bytes() == (FOLDERS / kind / "config.json").read_bytes()


@pytest.mark.long
@ALL
def test_the_dense_reference_says_what_transformers_says(kind: str) -> None:
    of = oracle(kind)
    images = [of.values[f"image_{number}"] for number in range(2)]
    prompt = sample_of(kind, of.values["prompt"], 0, images, is_asked=True)
    said = of.values["generated"].tolist()
    assert greedy(of.leaves, of.model, prompt, max_new=len(said), eos=-1) == said


@pytest.mark.long
@RUNS
def test_layouts_train_as_the_dense_reference_does(kind: str, layout: str, tmp_path: Path) -> None:
    # Rounding in an update of small embeddings, which are multiplied, changes the next gradients.
    found = check(configured(tmp_path, kind, LAYOUTS[layout]), steps=1, style="silent")
    assert found and found.ok, found


@pytest.mark.long
@ALL
def test_a_cache_says_what_transformers_says(kind: str, tmp_path: Path) -> None:
    """The language model in two stages; images and prompts see themselves while the prompt is read."""
    layout = ("vision/Layout.dp=1", "vision/Layout.rank_offset=4", "llm/Layout.pp=2", "llm/Layout.tp=2")
    values = oracle(kind).values
    said = values["generated"].tolist()
    with Trainer(configured(tmp_path, kind, layout), style="silent") as trainer:
        parts = trainer.parts
        images = [values[f"image_{number}"] for number in range(2)]
        placeholder = parts.tokenizer.media_token("vision")
        prompt = sample_of(kind, values["prompt"], 0, images, placeholder, is_asked=True)
        evaluator = Evaluator(parts, room=len(values["prompt"]) + len(said))
        ((_, own),) = evaluator.rounds([prompt])
        evaluator.predictor.load(trainer.executor.states)
        got = evaluator.predictor.generate(own.batch, own.starts, len(said), ())
    ((m, row),) = own.places
    assert got[m][row].tokens == said
