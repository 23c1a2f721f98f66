"""Qwen2-VL and Qwen2.5-VL from their folders: what transformers computes, and torch's gradients, under layouts.

``tests/oracles/make_qwen.py`` made the folders, three sequences with no, one and four images, and their values.
"""

from __future__ import annotations

import json
import shutil
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

from mmjax.config import Config, load_config, operative_config
from mmjax.configurable import ConfigError
from mmjax.data.mrope import sample_positions
from mmjax.data.packing import Packer
from mmjax.data.sample import meta_of
from mmjax.data.types import Sample
from mmjax.export import export_folders
from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import Submesh
from mmjax.models.families import FAMILIES
from mmjax.models.flops import parameter_count
from mmjax.models.graph import MultimodalModel, multimodal
from mmjax.models.layers import cross_entropy
from mmjax.models.llama.layers import logits
from mmjax.models.parameters import join_logical
from mmjax.models.pretrained import find_pretrained
from mmjax.models.stage_model import StageModel
from mmjax.parity.engine import check
from mmjax.reference import encode_image, sample_logits
from mmjax.run.assembly import signed
from mmjax.run.trainer import Trainer
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.parameters import find_leaves
from mmjax.weights.table import expand

FOLDERS = Path(__file__).parent / "oracles" / "qwen"
KINDS = ("qwen2_vl", "qwen2_5_vl")
BOTH = pytest.mark.parametrize("kind", KINDS)
IMAGE, LENGTH = 263, 104
MODULES: Mapping[str, Any] = {"vision": FAMILIES["vit"], "vision_projector": None, "llm": FAMILIES["llama"]}
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
    configs = {
        name: (family.config if family else type(PROJECTOR))(**found[name].fields()) for name, family in MODULES.items()
    }
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
        about: Any = {"prefixes": own.begins, "others": own.others, "unused": own.weights.unused(config)}
        for leaf, (key, view) in find_leaves(theirs, part.module, table, shapes, **about).items():
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
    spec = replace(of.model.encoders["vision"].module.medium, buckets=((1, 160),))
    about: Any = {"microbatches": 1, "cells": 1, "pad": 0, "text": ((1, LENGTH),)}
    axes = of.model.nodes["llm"].module.position_axes
    return Packer(encoders={"vision": spec}, sequence_length=LENGTH, axes=axes, **about).microbatch(samples(of.values), 3)


def run(of: Oracle, module: str, inputs: Arrays, carry: Mapping[str, Any], tp: int, then: Any) -> Any:
    """``then(params, axes, features)`` of a module's stage over ``tp`` ranks."""
    stage = stages(of.model)[module]
    axes = Submesh.of(Layout(tp=tp), tuple(range(tp)), jax.devices()[:tp]).axes
    mesh = Submesh.of(Layout(tp=tp), tuple(range(tp)), jax.devices()[:tp]).mesh
    params, specs = {}, {}
    for part in stage.slices:
        own, tree = jax.tree.flatten(part.leaves())
        named: Any = {leaf: jnp.asarray(value) for leaf, value in of.leaves.items()}
        params[part.module] = jax.tree.unflatten(tree, join_logical(own, named))
        specs[part.module] = jax.tree.unflatten(tree, [leaf.spec(axes) for leaf in own])

    def body(params: Any, inputs: Any, carry: Any) -> Any:
        return then(stage, params, inputs, axes, stage.forward(params, inputs, carry, axes, 1))

    given = {name: inputs[name] for name in stage.inputs}
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(specs, P(), P()), out_specs=P())
    return jax.jit(mapped)(params, given, carry)


def tokens_of(of: Oracle, batch: Any, tp: int = 1) -> jax.Array:
    """The image tokens of the packed row."""
    give = lambda stage, p, inputs, axes, x: stage.give(p, inputs, x, axes)  # noqa: E731
    return run(of, "vision", batch.inputs["vision"], {}, tp, give)


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
    hidden, logprobs = run(of, "llm", given, {"vision.0": tokens}, tp, then)
    for number in range(3):
        own = (given["segments"][0] == segment for segment in (1, 2, 3))
        (here,) = [one for one in own if np.array_equal(given["tokens"][0, one], of.values[f"tokens_{number}"])]
        assert apart(hidden[0, here], of.values[f"hidden_{number}"]) < 1e-5, number
        assert apart(logprobs[0, here][:-1], of.values[f"logprobs_{number}"]) < 1e-5, number


@BOTH
def test_positions_are_those_of_transformers_and_of_the_reference(kind: str) -> None:
    """A text whose axes are far apart; at fp32, angles of 30,000 are known to 2e-3."""
    of = oracle(kind)
    tokens, positions = of.values["far_tokens"], of.values["far_positions"]
    about = {"tokens": tokens, "targets": tokens, "segments": np.ones(12), "weights": np.ones(12)}
    row = {name: np.asarray(value, np.int32)[None] for name, value in about.items()}
    row |= {"positions": positions[None].astype(np.int32), "vision_index": np.full((1, 12), -1, np.int32)}
    none = {"vision.0": jnp.zeros((1, 1, 32))}

    def then(stage: Any, p: Any, inputs: Any, axes: Any, x: Any) -> Any:
        return jax.lax.psum(logits(p["llm"], of.model.llm, axes, x), axes.tp)  # of one rank

    found = run(of, "llm", row, none, 1, then)[0]
    print("far", apart(found, of.values["far_logits"]))
    assert apart(found, of.values["far_logits"]) < 2e-3


PROJECTOR = multimodal({"vision": FAMILIES["vit"].config()}, FAMILIES["llama"].config()).nodes["vision"].projector
