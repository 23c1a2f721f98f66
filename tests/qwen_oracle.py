"""Tiny models of Qwen-VL, and what transformers computed of them (``oracles/make_qwen.py``): read, packed and run.

Each folder has three sequences with no, one and four images, and their values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from trial_runs import write_tiny

from mmjax.config import load_config
from mmjax.data.packing import Packer
from mmjax.data.types import Sample
from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import Submesh
from mmjax.models.families import FAMILIES, PROJECTOR
from mmjax.models.graph import MultimodalModel, multimodal
from mmjax.models.llama.layers import logits
from mmjax.models.parameters import join_logical
from mmjax.models.pretrained import find_pretrained
from mmjax.models.stage_model import StageModel
from mmjax.models.vocabulary import cross_entropy
from mmjax.recipe import Recipe
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.parameters import find_leaves
from mmjax.weights.table import View, expand

FOLDERS = Path(__file__).parent / "oracles" / "qwen"
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
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
    configs = {
        name: family.config(**find_pretrained(family, theirs.config).fields()) for name, family in MODULES.items()
    }
    projectors = {"vision": configs["vision_projector"]}
    model = multimodal({"vision": configs["vision"]}, configs["llm"], projectors=projectors)
    shapes, leaves = leaf_shapes(model), {}
    for name, (key, view) in places_of(theirs, model).items():
        leaves[name] = view.read(theirs.tensor(key), shapes[name], tuple(slice(None) for _ in shapes[name]))
    return model, leaves


def leaf_shapes(model: MultimodalModel) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf of a model, by name. A projector's leaves lie in several stages."""
    parts = (part for stage in stages(model).values() for part in stage.slices)
    leaves = (leaf for part in parts for leaf in jax.tree.leaves(part.leaves()))
    return {name: leaf.logical_shape for leaf in leaves for name in leaf.names}


def places_of(folder: WeightsFolder, model: MultimodalModel) -> dict[str, tuple[str, View]]:
    """The key and the view of each leaf of a model in its folder, by name."""
    places, shapes = {}, leaf_shapes(model)
    for module, family in MODULES.items():
        found = find_pretrained(family, folder.config)
        config: Any = model.nodes["vision"].projector if family is PROJECTOR else model.nodes[module].config
        begins = f"{module}/"
        places |= find_leaves(
            folder,
            module,
            expand(found.rows(config), getattr(config, "layers", 0)),
            {name.removeprefix(begins): shape for name, shape in shapes.items() if name.startswith(begins)},
            prefixes=found.key_prefixes,
            other_prefixes=found.other_prefixes,
            unused=found.weights.unused(config),
        )
    return places


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
    """The image tokens of the packed row; behind them, along the last dimension, the outputs of inner layers."""
    give = lambda stage, p, inputs, axes, x: stage.give(p, inputs, x, axes)  # noqa: E731
    return run(of, "vision", batch.inputs["vision"], {}, tp, give, shared=True)


def apart(got: Any, want: np.ndarray) -> float:
    """The largest difference as a share of the largest value."""
    assert np.shape(got) == want.shape
    return float(np.abs(np.asarray(got) - want).max() / np.abs(want).max())


def assert_packed_texts(of: Oracle, batch: Any, tokens: jax.Array, tp: int, *, bound: float) -> None:
    """Hidden states and log-probabilities of three texts in one row are those of each alone, as the oracle has them."""

    def then(stage: Any, p: Any, inputs: Any, axes: Any, x: Any) -> Any:
        said = cross_entropy(logits(p["llm"], of.model.llm, axes, x), inputs["targets"], axes)
        return x, -said

    row = batch.inputs["llm"]
    hidden, logprobs = run(of, "llm", row, {"vision.0": tokens}, tp, then, shared=(True, False))
    segments = [row["segments"][0] == segment for segment in (1, 2, 3)]
    for number in range(3):
        text = of.values[f"tokens_{number}"]
        (here,) = [segment for segment in segments if np.array_equal(row["tokens"][0, segment], text)]
        assert apart(hidden[0, here], of.values[f"hidden_{number}"]) < bound, number
        assert apart(logprobs[0, here][:-1], of.values[f"logprobs_{number}"]) < bound, number


def configured(folder: Path, kind: str, layout: tuple[str, ...], start: str = "Model.weights") -> Recipe:
    """The tiny configuration, whose model, or the part that `start` names, begins with a folder."""
    path = write_tiny(folder)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(("vision/ViT", "llm/Decoder", "Packing"))))
    settings = (
        f"{start}={str(FOLDERS / kind)!r}",
        *("Data.sequence_length=96", "Train.eval_samples=0", "Train.clip_norm=0.0", "Train.global_batch=3"),
        *("Train.microbatches=1", "llm/Packing.buckets=((3, 96),)", "vision/Packing.buckets=((3, 160),)"),
    )
    return load_config([path], [*settings, *layout])


def folder_tensors(kind: str, gradients: Mapping[str, np.ndarray]) -> Arrays:
    """Torch's gradients by the keys of the folder, all of which have one."""
    renamed = old if kind.startswith("qwen2") else str
    tensors = {renamed(key): gradient for key, gradient in gradients.items()}
    if kind == "qwen3_5_moe":
        tensors = _by_expert(tensors)
    keys = WeightsFolder.open(str(FOLDERS / kind)).tensors
    assert tensors.keys() == {re.sub(r"\.experts\.\d+\.", ".experts.*.", key) for key in keys}
    return tensors


def _by_expert(tensors: Arrays) -> Arrays:
    """Gradients of stacks of experts, as one key for the tensors of all experts, which this folder has apart."""
    found: Arrays = {}
    for key, stack in tensors.items():
        begin, _, name = key.partition(".experts.")
        if name == "gate_up_proj":
            gate, up = np.split(stack, 2, axis=1)
            found |= {f"{begin}.experts.*.gate_proj.weight": gate, f"{begin}.experts.*.up_proj.weight": up}
        else:
            found[f"{begin}.experts.*.down_proj.weight" if name else key] = stack
    return found


def old(key: str) -> str:
    """The name in the folder of a parameter of the model in memory."""
    return key.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def sent_width(model: MultimodalModel) -> int:
    """The width of what the tower sends: tokens, and outputs of inner layers."""
    levels = len(model.levels("vision")) * model.nodes["vision"].module.merged_width
    return model.token_width("vision") + levels
