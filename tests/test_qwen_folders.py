"""Qwen2-VL and Qwen2.5-VL from their folders: what transformers computes, and torch's gradients, under layouts.

``tests/oracles/make_qwen.py`` made the folders, three sequences with no, one and four images, and their values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file
from trial_runs import write_tiny

from mmjax.config import load_config, operative_config
from mmjax.configurable import ConfigError, from_preset
from mmjax.data.packing import Packer
from mmjax.data.types import Sample
from mmjax.eval.evaluator import Evaluator
from mmjax.export.folders import export_folders
from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import Submesh
from mmjax.models.families import FAMILIES, PROJECTOR
from mmjax.models.flops import parameter_count
from mmjax.models.graph import MultimodalModel, multimodal
from mmjax.models.llama.layers import logits
from mmjax.models.parameters import join_logical
from mmjax.models.pretrained import find_pretrained
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.stage_model import StageModel
from mmjax.models.vocabulary import cross_entropy
from mmjax.parity.engine import check
from mmjax.recipe import Recipe
from mmjax.reference import encode_image, greedy, sample_logits
from mmjax.train.trainer import Trainer
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.parameters import find_leaves
from mmjax.weights.table import assemble, expand

FOLDERS = Path(__file__).parent / "oracles" / "qwen"
KINDS = ("qwen2_vl", "qwen2_5_vl")
BOTH = pytest.mark.parametrize("kind", KINDS)
IMAGE, LENGTH = 263, 104
MODULES: Mapping[str, Any] = {"vision": FAMILIES["vit"], "vision_projector": PROJECTOR, "llm": FAMILIES["llama"]}
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Oracle:
    """A folder's model, its parameters by leaf, and what transformers computed."""

    model: MultimodalModel
    leaves: Arrays
    values: Arrays

    @property
    def images(self) -> list[np.ndarray]:
        return [self.values[f"image_{number}"] for number in range(5)]


def opened(folder: Path) -> tuple[MultimodalModel, Arrays]:
    """The model of a folder, and its leaves."""
    theirs = WeightsFolder.open(str(folder))
    found = {name: find_pretrained(family, theirs.config) for name, family in MODULES.items()}
    configs = {name: family.config(**found[name].fields()) for name, family in MODULES.items()}
    model = multimodal(
        {"vision": configs["vision"]}, configs["llm"], projectors={"vision": configs["vision_projector"]}
    )
    parts = [part for stage in stages(model).values() for part in stage.slices]
    leaves = {}
    for part in parts:
        shapes = {
            name.removeprefix(f"{part.module}/"): own.logical_shape
            for own in jax.tree.leaves(part.leaves())
            for name in own.names
        }
        own, config = found[part.module], configs[part.module]
        table = expand(own.rows(config), getattr(config, "layers", 0))
        places = find_leaves(
            theirs,
            part.module,
            table,
            shapes,
            prefixes=own.key_prefixes,
            other_prefixes=own.other_prefixes,
            unused=own.weights.unused(config),
        )
        for leaf, (key, view) in places.items():
            shape = shapes[leaf.removeprefix(f"{part.module}/")]
            leaves[leaf] = view.read(theirs.tensor(key), shape, tuple(slice(None) for _ in shape))
    return model, leaves


def stages(model: MultimodalModel) -> dict[str, StageModel]:
    """Each module in one stage."""
    return {stage.module: stage for stage in model.stages({name: Layout() for name in model.nodes})}


@cache
def oracle(kind: str) -> Oracle:
    return Oracle(*opened(FOLDERS / kind), dict(np.load(FOLDERS / kind / "values.npz")))


def samples(values: Mapping[str, np.ndarray], placeholder: int = IMAGE) -> list[Sample]:
    """The sequences; a token counts unless it is an image's."""
    images, found = [values[f"image_{number}"] for number in range(5)], []
    for number in range(3):
        found.append(sample_of(values[f"tokens_{number}"], images, placeholder))
    return found


def sample_of(tokens: np.ndarray, images: list[np.ndarray], placeholder: int = IMAGE) -> Sample:
    """A sequence with the first images, which are taken from the list."""
    is_image, own, left = tokens == IMAGE, [], int((tokens == IMAGE).sum())
    while left:
        own.append(images.pop(0))
        left -= own[-1].shape[0] * own[-1].shape[1] // 64
    about: Any = {"question": "", "answer": "", "prompt": len(tokens), "media_tokens": {"vision": placeholder}}
    return Sample(
        tokens=np.where(is_image, placeholder, tokens).astype(np.int32),
        loss_weights=(~is_image).astype(np.float32),
        media={"vision": tuple(own)},
        **about,
    )


def packed(of: Oracle) -> Any:
    """All sequences in one row, all images in another."""
    spec: Any = of.model.encoders["vision"].module.medium
    about: Any = {"microbatches": 1, "cells": 1, "pad": 0, "text": ((1, LENGTH),), "sequence_length": LENGTH}
    axes = of.model.nodes["llm"].module.position_axes
    packer = Packer(encoders={"vision": replace(spec, buckets=((1, 160),))}, axes=axes, **about)
    return packer.microbatch(samples(of.values), 3)


def run(of: Oracle, module: str, inputs: Arrays, carry: Mapping[str, Any], tp: int, then: Any, shared: Any) -> Any:
    """``then(params, axes, features)`` of a module's stage over ``tp`` ranks, which share tokens where `shared`."""
    stage, submesh = stages(of.model)[module], Submesh.of(Layout(tp=tp), tuple(range(tp)), jax.devices()[:tp])
    axes = submesh.axes
    params, specs = {}, {}
    for part in stage.slices:
        own, tree = jax.tree.flatten(part.leaves())
        named: Any = {leaf: jnp.asarray(value) for leaf, value in of.leaves.items()}
        params[part.module] = jax.tree.unflatten(tree, join_logical(own, named))
        specs[part.module] = jax.tree.unflatten(tree, [leaf.spec(axes) for leaf in own])

    def body(params: Any, inputs: Any, carry: Any) -> Any:
        return then(stage, params, inputs, axes, stage.forward(params, inputs, carry, axes, 1)[0])

    given = {name: inputs[name] for name in stage.inputs}
    out_specs = jax.tree.map(lambda own: submesh.spread.activation(inside=own), shared)
    mapped = jax.shard_map(body, mesh=submesh.mesh, in_specs=(specs, P(), P()), out_specs=out_specs)
    return jax.jit(mapped)(params, given, carry)


def tokens_of(of: Oracle, batch: Any, tp: int = 1) -> jax.Array:
    """The image tokens of the packed row."""
    give = lambda stage, p, inputs, axes, x: stage.give(p, inputs, x, axes)  # noqa: E731
    return run(of, "vision", batch.inputs["vision"], {}, tp, give, shared=True)


def apart(got: Any, want: np.ndarray) -> float:
    """The largest difference as a share of the largest value."""
    assert np.shape(got) == want.shape
    return float(np.abs(np.asarray(got) - want).max() / np.abs(want).max())


# ---- what transformers computes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "tp"), [("qwen2_vl", 1), ("qwen2_5_vl", 2)])
def test_packed_images_have_their_tokens_and_packed_texts_their_values(kind: str, tp: int) -> None:
    """Images of five sizes, most of them cut by windows at their edges; texts with four, one and none of them."""
    of = oracle(kind)
    batch = packed(of)
    tokens = tokens_of(of, batch, tp)
    segments, positions = batch.inputs["vision"]["segments"][0], batch.inputs["vision"]["positions"][0]
    sides = {segment: tuple(positions[segments == segment].max(axis=0) + 1) for segment in range(1, 6)}
    for number, image in enumerate(of.images):
        rows, columns = image.shape[0] // 4, image.shape[1] // 4
        (segment,) = [own for own, found in sides.items() if found == (rows, columns)]
        here = np.flatnonzero(segments == segment)[::4] // 4
        assert apart(tokens[0, here], of.values[f"merged_{number}"]) < 2e-6, number

    def then(stage: Any, p: Any, inputs: Any, axes: Any, x: Any) -> Any:
        said = cross_entropy(logits(p["llm"], of.model.llm, axes, x), inputs["targets"], axes)
        return x, -said

    given = batch.inputs["llm"]
    hidden, logprobs = run(of, "llm", given, {"vision.0": tokens}, tp, then, shared=(True, False))
    for number in range(3):
        own = (given["segments"][0] == segment for segment in (1, 2, 3))
        (here,) = [one for one in own if np.array_equal(given["tokens"][0, one], of.values[f"tokens_{number}"])]
        assert apart(hidden[0, here], of.values[f"hidden_{number}"]) < 1e-5, number
        assert apart(logprobs[0, here][:-1], of.values[f"logprobs_{number}"]) < 1e-5, number


@BOTH
def test_positions_may_be_large_and_of_three_axes(kind: str) -> None:
    of = oracle(kind)
    tokens, positions = of.values["far_tokens"], of.values["far_positions"]
    about = {"tokens": tokens, "targets": tokens, "segments": np.ones(12), "weights": np.ones(12)}
    row = {name: np.asarray(value, np.int32)[None] for name, value in about.items()}
    row |= {"positions": positions[None].astype(np.int32), "vision_index": np.full((1, 12), -1, np.int32)}
    none = {"vision.0": jnp.zeros((1, 1, 32))}

    def then(stage: Any, p: Any, inputs: Any, axes: Any, x: Any) -> Any:
        return jax.lax.psum(logits(p["llm"], of.model.llm, axes, x), axes.tp)  # of one rank

    found = run(of, "llm", row, none, 1, then, shared=False)[0]
    assert apart(found, of.values["far_logits"]) < 2e-5


@pytest.mark.parametrize("kind", [KINDS[1], pytest.param(KINDS[0], marks=pytest.mark.long)])
def test_the_dense_reference_is_transformers_too(kind: str) -> None:
    of = oracle(kind)
    (*_, sample), image = samples(of.values), of.images[0]
    vit, projector = of.model.nodes["vision"].config, of.model.nodes["vision"].projector
    assert projector
    tokens, _ = encode_image(of.leaves, "vision", vit, image, projector=projector)
    assert apart(tokens, of.values["merged_0"]) < 2e-6
    assert apart(sample_logits(of.leaves, of.model, sample), of.values["logits_2"]) < 1e-5


# ---- folders ---------------------------------------------------------------------------------------------------------


@BOTH
def test_parameters_are_counted(kind: str) -> None:
    tensors = load_file(FOLDERS / kind / "model.safetensors")
    assert sum(parameter_count(oracle(kind).model).values()) == sum(tensor.size for tensor in tensors.values())


@BOTH
def test_tensors_go_in_and_out_bit_for_bit(kind: str) -> None:
    """Every one of them, from leaves."""
    of, written = oracle(kind), {}
    theirs = WeightsFolder.open(str(FOLDERS / kind))
    for module, family in MODULES.items():
        own = of.model.nodes["vision"].projector if family is PROJECTOR else of.model.nodes[module].config
        table = expand(find_pretrained(family, theirs.config).rows(own), getattr(own, "layers", 0))
        begins = f"{module}/"
        leaves = {name.removeprefix(begins): leaf for name, leaf in of.leaves.items() if name.startswith(begins)}
        written |= assemble(table, leaves)
    tensors = load_file(FOLDERS / kind / "model.safetensors")
    assert written.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(written[key], tensor, strict=True)


@BOTH
def test_newer_keys_and_older_settings_are_the_same_model(kind: str, tmp_path: Path) -> None:
    """Keys as transformers has them in memory; and the text's settings among the whole model's, as the Hub has them."""
    tensors = load_file(FOLDERS / kind / "model.safetensors")
    new = {"model.": "model.language_model.", "visual.": "model.visual.", "lm_head.": "lm_head."}
    renamed = {new[(own := key.partition(".")[0] + ".")] + key.removeprefix(own): t for key, t in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    config = json.loads((FOLDERS / kind / "config.json").read_text())
    text, vision = config.pop("text_config"), config["vision_config"]
    rope = text.pop("rope_parameters")
    del text["model_type"], text["layer_types"], vision["model_type"], vision["rope_parameters"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text["rope_theta"], vision["in_chans"] = rope["rope_theta"], vision["in_channels"]
    (tmp_path / "config.json").write_text(json.dumps({**text, **config}))
    model, leaves = opened(tmp_path)
    assert {n: node.config for n, node in model.nodes.items()} == {
        n: node.config for n, node in oracle(kind).model.nodes.items()
    }
    assert model.nodes["vision"].projector == oracle(kind).model.nodes["vision"].projector
    for name, leaf in oracle(kind).leaves.items():
        np.testing.assert_array_equal(leaves[name], leaf, strict=True)


_TEXT_7B = dict(
    **dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, vocab_size=152064),
    **dict(
        num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=1000000.0, hidden_act="silu", tie_word_embeddings=False
    ),
    **dict(use_sliding_window=False, sliding_window=32768, max_window_layers=28, max_position_embeddings=32768),
    rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
)
_TOWER_7B = dict(depth=32, num_heads=16, in_chans=3, patch_size=14, spatial_merge_size=2, temporal_patch_size=2)
PUBLISHED = {
    "qwen2-vl-7b": {
        **_TEXT_7B,
        "model_type": "qwen2_vl",
        "vision_config": dict(_TOWER_7B, embed_dim=1280, mlp_ratio=4, hidden_size=3584),
    },
    "qwen2.5-vl-7b": {
        **_TEXT_7B,
        "model_type": "qwen2_5_vl",
        "vision_config": dict(
            **dict(_TOWER_7B, hidden_size=1280, intermediate_size=3420, out_hidden_size=3584, hidden_act="silu"),
            **dict(window_size=112, fullatt_block_indexes=[7, 15, 23, 31], tokens_per_second=2),
        ),
    },
}
"""What the ``config.json`` of published folders says of sizes."""


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_are_the_published_models(preset: str) -> None:
    for family in (FAMILIES["vit"], FAMILIES["llama"]):
        given = find_pretrained(family, PUBLISHED[preset]).fields()
        assert given.pop("head_dim", 128) == 128  # 3584 / 28, which presets leave open
        assert family.config(preset=preset, **given) == from_preset(family.config, preset)
    merger = ProjectorConfig(**find_pretrained(PROJECTOR, PUBLISHED[preset]).fields())
    norm = "layer" if preset == "qwen2-vl-7b" else "rms"
    assert merger == ProjectorConfig(hidden=5120, activation="gelu_exact", norm=norm)
    small = {**PUBLISHED[preset], "tie_word_embeddings": True}  # as the 2B has it
    assert find_pretrained(FAMILIES["llama"], small).fields()["tied"]


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("vision", {"rope_parameters": {"rope_type": "default"}}, "config.json: rope_type='default': "),
        ("vision", {"temporal_patch_size": [2, 2]}, "config.json: temporal_patch_size=[2, 2]: "),
        ("vision", {"hidden_act": "relu"}, "config.json: hidden_act='relu': "),
        ("vision", {"window_size": 7}, "config.json: window_size=7: must be 8 pixels or more"),
        ("text", {"rope_parameters": {"rope_type": "dynamic"}}, "config.json: rope_type='dynamic': "),
        ("text", {"rope_parameters": {"mrope_section": [1, 2, 3]}}, "Decoder.rope_sections=(1, 2, 3): must be three"),
    ],
)
def test_what_ours_has_not_is_named(part: str, changes: dict[str, Any], message: str) -> None:
    theirs = json.loads((FOLDERS / "qwen2_5_vl" / "config.json").read_text())
    theirs[f"{part}_config"] |= changes
    family = FAMILIES["vit" if part == "vision" else "llama"]
    with pytest.raises(ConfigError) as refusal:
        family.config(**find_pretrained(family, theirs).fields())
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


# ---- runs ------------------------------------------------------------------------------------------------------------

ONE_DEVICE = ("llm/Layout.tp=1", "vision/Layout.dp=1", "vision/Layout.rank_offset=0")
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "one device": ONE_DEVICE,
    "tp, pp and split backward": (
        *("llm/Layout.tp=2", "llm/Layout.pp=2", "Train.schedule='zb-h1'"),
        *("vision/Layout.dp=1", "vision/Layout.tp=2", "vision/Layout.pp=2", "vision/Layout.rank_offset=4"),
    ),
    "dp, unrolled": (
        *("llm/Layout.tp=1", "llm/Layout.dp=3", "Train.unroll=True"),
        *("vision/Layout.dp=3", "vision/Layout.rank_offset=3"),
    ),
}


def configured(folder: Path, kind: str, layout: tuple[str, ...]) -> Recipe:
    path = write_tiny(folder)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(("vision/ViT", "llm/Decoder", "Packing"))))
    settings = (
        f"Model.weights={str(FOLDERS / kind)!r}",
        *("Data.sequence_length=96", "Train.eval_samples=0", "Train.clip_norm=0.0", "Train.global_batch=3"),
        *("Train.microbatches=1", "llm/Packing.buckets=((3, 96),)", "vision/Packing.buckets=((3, 160),)"),
    )
    return load_config([path], [*settings, *layout])


def leaves_of_gradients(kind: str, recipe: Recipe, shapes: Mapping[str, Any]) -> Arrays:
    """Torch's gradients by the names of our leaves, through the tables."""
    folder = WeightsFolder.open(str(FOLDERS / kind))
    tensors = {old(key): own for key, own in np.load(FOLDERS / kind / "gradients.npz").items()}
    assert tensors.keys() == folder.tensors.keys()
    found = {}
    for module, shape_of in shapes.items():
        own = find_pretrained(MODULES[module], folder.config)
        settings = recipe.model.parts[module].settings
        table = expand(own.rows(settings), getattr(settings, "layers", 0))
        for leaf, (key, view) in find_leaves(
            folder, module, table, shape_of, prefixes=own.key_prefixes, other_prefixes=own.other_prefixes
        ).items():
            shape = shape_of[leaf.removeprefix(f"{module}/")]
            found[leaf] = view.read(tensors[key], shape, tuple(slice(0, n) for n in shape))
    return found


def old(key: str) -> str:
    """The name in the folder of a parameter of the model in memory."""
    return key.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_torch(layout: str, tmp_path: Path) -> None:
    config = configured(tmp_path, "qwen2_vl", LAYOUTS[layout])
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        placeholder = trainer.parts.tokenizer.media_token("vision")
        values = oracle("qwen2_vl").values
        batch = trainer.parts.packer.microbatch(samples(values, placeholder), 3)
        assert batch.inputs["llm"]["positions"].shape == (3, 96, 3)
        count = float(np.sum(np.asarray(batch.inputs["llm"]["weights"])))
        result = trainer.executor.step(trainer.parts.runs.signed([batch]), {"llm": count, "vision": 1.0})
        loss, _ = result.fetch()
        held = {name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}
        b1 = config.model.optimizers["llm"].b1
    assert loss == pytest.approx(float(values["loss"]), rel=2e-6)
    got = {name.removeprefix("adam_m/"): leaf / (1 - b1) for name, leaf in held.items() if name.startswith("adam_m/")}
    shapes: dict[str, dict[str, Any]] = {}
    for name, leaf in got.items():
        module, _, own = name.partition("/")
        shapes.setdefault(module, {})[own] = leaf.shape
    want = leaves_of_gradients("qwen2_vl", config, shapes)
    assert got.keys() == want.keys() and len(want) > 80
    for name, leaf in want.items():
        # Torch in fp32 is up to 1e-5 away from itself in fp64 here.
        bound = 2e-5 * max(np.abs(leaf).max(), 1e-3)
        np.testing.assert_allclose(got[name], leaf, rtol=0, atol=bound, err_msg=name)


@pytest.mark.long
@BOTH
def test_out_of_in_is_the_same_folder(kind: str, tmp_path: Path) -> None:
    """Bit for bit, also the half of a patch's kernel that is for a video's second frame."""
    config = configured(tmp_path, kind, ONE_DEVICE)
    with Trainer(config, tmp_path / "run", style="silent") as trainer:
        assert trainer.started[0].startswith(f"vision, vision_projector, llm: parameters of {FOLDERS / kind} (")
        trainer.state.step = 1
        trainer.save()
    (tmp_path / "run" / "config.gin").write_text(operative_config(config))
    made = export_folders(tmp_path / "run", tmp_path / "out")
    assert made.without == () and list(made.tensors) == [str(tmp_path / "out")]
    want, got = (load_file(place / "model.safetensors") for place in (FOLDERS / kind, tmp_path / "out"))
    assert want.keys() == got.keys()
    for key, tensor in want.items():
        np.testing.assert_array_equal(got[key], tensor, strict=True)
    assert (tmp_path / "out" / "config.json").read_bytes() == (FOLDERS / kind / "config.json").read_bytes()


@pytest.mark.long
@BOTH
def test_the_dense_reference_says_what_transformers_says(kind: str) -> None:
    """Greedy decoding behind two images: positions go on behind the largest number so far."""
    of = oracle(kind)
    prompt = sample_of(of.values["prompt"], of.images)
    assert greedy(of.leaves, of.model, prompt, max_new=64, eos=-1) == of.values["generated"].tolist()


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@BOTH
def test_layouts_train_as_the_dense_reference_does(kind: str, layout: str, tmp_path: Path) -> None:
    found = check(configured(tmp_path, kind, LAYOUTS[layout]), style="silent")
    assert found and found.ok, found


@pytest.mark.long
@BOTH
def test_a_cache_says_what_transformers_says(kind: str, tmp_path: Path) -> None:
    """The language model in two stages; positions of new tokens have three equal axes."""
    layout = ("vision/Layout.dp=1", "vision/Layout.rank_offset=4", "llm/Layout.pp=2", "llm/Layout.tp=2")
    values = dict(np.load(FOLDERS / kind / "values.npz"))
    with Trainer(configured(tmp_path, kind, layout), style="silent") as trainer:
        parts = trainer.parts
        images = [values[f"image_{number}"] for number in range(5)]
        prompt = sample_of(values["prompt"], images, parts.tokenizer.media_token("vision"))
        evaluator = Evaluator(parts, room=len(values["prompt"]) + 64)
        ((_, own),) = evaluator.rounds([prompt])
        evaluator.predictor.load(trainer.executor.states)
        said = evaluator.predictor.generate(own.batch, own.starts, 64, ())
    ((m, row),) = own.places
    assert said[m][row].tokens == values["generated"].tolist()
