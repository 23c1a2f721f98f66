"""Vision towers of ``transformers``: their folders become ours and back, and our features are theirs.

``tests/oracles/make_vision.py`` made the folders and the features.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file
from spmd_runs import AXES, context, on_tp, slice_of

from mmjax.configurable import ConfigError
from mmjax.data.packing import Packer
from mmjax.data.types import Sample
from mmjax.models.module import run_layers
from mmjax.models.parameters import join_logical, split_logical
from mmjax.models.projector import weights as projector_weights
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.models.vit.module import VisionTransformer
from mmjax.models.vit.weights import FAMILIES, rows, settings, to_hf_config, unused
from mmjax.reference import encode_image
from mmjax.weights.table import assemble, expand, match

FOLDERS = Path(__file__).parents[1] / "oracles" / "vision"
NAMES = sorted({*FAMILIES.values(), "dinov2_giant", "dinov3_vit_gated"})
"""Folders, the last two of gated mlps."""
SIZES = ("native", "wide", "tall", "cut")
DEPTH, WIDTH, TOLERANCE = 3, 128, 2e-6


@cache
def folder(family: str) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The configuration, the tensors and the oracles."""
    path = FOLDERS / family
    oracles = dict(np.load(path / "oracles.npz"))
    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors"), oracles


@cache
def loaded(family: str, merge: int = 1) -> tuple[ViTConfig, dict[str, np.ndarray]]:
    """Settings and leaves by name in the module."""
    config, tensors, _ = folder(family)
    c = ViTConfig(**{**settings(config), "merge": merge})
    found = match(expand(rows(c, config["model_type"]), c.layers), tensors, unused(c))
    assert not found.missing and not found.unexpected
    shapes = {name: leaf.logical_shape for leaf in leaves(c) for name in leaf.names}
    assert {f"m/{name}" for name in found.places} == shapes.keys()
    read = {}
    for name, (key, view) in found.places.items():
        shape = shapes[f"m/{name}"]
        read[name] = view.read(tensors[key], shape, tuple(slice(None) for _ in shape))
    return c, read


def leaves(c: ViTConfig) -> list[Any]:
    return jax.tree.leaves(slice_of(VisionTransformer(c)).leaves())


def image(family: str, size: str, block: int = 7) -> np.ndarray:
    """An image without what no patch covers, as the stride of a convolution leaves it out."""
    found = folder(family)[2][f"{size}/image"].astype(np.float32)
    height, width = (side // block * block for side in found.shape[:2])
    return found[:height, :width]


def packed(c: ViTConfig, images: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    """One row of several images."""
    spec = replace(VisionTransformer(c).medium, buckets=((1, WIDTH),))
    counts = sum(spec.tokens(*one.shape[:2]) for one in images)
    packer = Packer(encoders={"vision": spec}, sequence_length=counts, microbatches=1, cells=1, pad=0)
    text = np.full(counts, 7, np.int32)
    about: Any = {"question": "", "answer": "", "prompt": 0, "media_tokens": {"vision": 7}}
    sample = Sample(tokens=text, loss_weights=np.ones(counts, np.float32), media={"vision": images}, **about)
    batch = packer.microbatch([sample], 1)
    inputs = batch.inputs["vision"]
    tokens_N = batch.inputs["llm"]["vision_index"][0]
    places = inputs["positions"][0].reshape(-1, c.merge**2, 2)[tokens_N]
    assert (places >= 0).all(), "the LLM sees a class token"
    return inputs


def features(
    c: ViTConfig, read: dict[str, np.ndarray], inputs: dict[str, np.ndarray], tp: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Features behind the last layer and its norm, and those of the layer before it."""
    module = VisionTransformer(c)
    own = leaves(c)
    named: Any = {f"m/{name}": leaf for name, leaf in read.items()}
    tree = jax.tree.structure(slice_of(module).leaves())
    params = jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in join_logical(own, named)])
    specs = jax.tree.unflatten(tree, [leaf.spec(AXES) for leaf in own])

    def body(p: Any, given: Any) -> tuple[jax.Array, jax.Array]:
        here = context(module, **given)
        x, kept, _ = run_layers(module, p, here, module.embed(p, here), keep=[c.layers - 2])
        return module.end(p, here, x), kept[c.layers - 2]

    run = jax.jit(lambda p, given: on_tp(tp, body, p, given, specs=(specs, P()), out=(P(), P())))
    last, before = run(params, inputs)
    return np.asarray(last)[0], np.asarray(before)[0]


def gradients(
    c: ViTConfig, read: dict[str, np.ndarray], inputs: dict[str, np.ndarray], cotangent_TD: np.ndarray
) -> dict[str, np.ndarray]:
    """Gradients of leaves, by name, for a cotangent of the features of one image's tokens in their order."""
    module, own = VisionTransformer(c), leaves(c)
    tree = jax.tree.structure(slice_of(module).leaves())
    named: Any = {f"m/{name}": leaf for name, leaf in read.items()}
    params = jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in join_logical(own, named)])

    def body(p: Any, given: Any) -> jax.Array:
        here = context(module, **given)
        x, *_ = run_layers(module, p, here, module.embed(p, here))
        return jnp.sum(module.end(p, here, x)[0, : len(cotangent_TD)] * cotangent_TD)

    found = jax.jit(jax.grad(lambda p: on_tp(1, body, p, inputs, out=P())))(params)
    return {name.removeprefix("m/"): np.asarray(x) for name, x in split_logical(own, jax.tree.leaves(found)).items()}


def assert_theirs(family: str, c: ViTConfig, inputs: dict[str, np.ndarray], found: tuple[np.ndarray, ...]) -> None:
    """Requires each image's features to be those that transformers has for it alone."""
    first = c.special
    segments, positions = inputs["segments"][0], inputs["positions"][0]
    sizes = {image(family, size).shape: size for size in SIZES}
    for number in range(1, segments.max() + 1):
        own = segments == number
        is_patch = own & (positions[:, 0] >= 0)
        rows_, columns = positions[is_patch].max(axis=0) + 1
        size = sizes[rows_ * 7, columns * 7, 3]
        order = first + positions[is_patch] @ np.array([columns, 1])
        for ours_TD, name in zip(found, ("last", "before"), strict=True):
            theirs_TD = folder(family)[2][f"{size}/{name}"]
            bound = TOLERANCE * np.abs(theirs_TD).max()
            np.testing.assert_allclose(
                ours_TD[is_patch], theirs_TD[order], rtol=0, atol=bound, err_msg=f"{size} {name}"
            )
            if first:
                ours_GD = ours_TD[own & ~is_patch]
                np.testing.assert_allclose(ours_GD, theirs_TD[:first], rtol=0, atol=bound)


@pytest.mark.parametrize("family", NAMES)
def test_packed_images_of_several_sizes_have_their_features(family: str) -> None:
    c, read = loaded(family)
    inputs = packed(c, tuple(image(family, size) for size in SIZES))
    assert inputs["segments"].max() == len(SIZES)
    assert_theirs(family, c, inputs, features(c, read, inputs))


def test_an_image_of_the_tables_size_needs_no_interpolation() -> None:
    c, read = loaded("clip")
    c = replace(c, interpolate="none")
    inputs = packed(c, (image("clip", "native"),) * 2)
    assert_theirs("clip", c, inputs, features(c, read, inputs))


@pytest.mark.parametrize(("family", "padding"), [("clip", 3), ("dinov2_with_registers", 0), ("dinov3_vit", 3)])
def test_merged_patches_and_tp_have_the_same_features(family: str, padding: int) -> None:
    """With ``merge=2`` special tokens take whole LLM tokens' places: positions behind them are padding."""
    c, read = loaded(family, 2)
    inputs = packed(c, tuple(image(family, size) for size in ("native", "tall")))
    assert inputs["segments"][0, : c.special + padding].tolist() == [1] * c.special + [0] * padding
    assert_theirs(family, c, inputs, features(c, read, inputs, tp=2))


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("dinov2_with_registers", "dinov3_vit_gated") else pytest.mark.long)
        for name in NAMES
        if name.startswith("dinov") and name != "dinov2"
    ],
)
def test_gradients_are_those_of_torch(family: str) -> None:
    config, _, oracles = folder(family)
    c, read = loaded(family)
    found = gradients(c, read, packed(c, (image(family, "wide"),)), oracles["cotangent"])
    compared = 0
    for entry in expand(rows(c, config["model_type"]), c.layers):
        if (theirs := oracles.get(f"gradients/{entry.keys[0]}")) is not None:
            shape = read[entry.leaf].shape
            wanted = entry.view.read(theirs, shape, (slice(None),) * len(shape))
            bound = 1e-5 * np.abs(wanted).max() if not entry.leaf.endswith("k_bias") else 1e-5  # whose gradient is 0
            np.testing.assert_allclose(found[entry.leaf], wanted, rtol=0, atol=bound, err_msg=entry.leaf)
            compared += 1
    assert compared >= 19


@pytest.mark.parametrize("family", NAMES)
def test_the_dense_reference_has_their_features(family: str) -> None:
    c, read = loaded(family)
    named = {f"vision/{name}": leaf for name, leaf in read.items()}
    named |= {"vision_projector/kernel": np.eye(c.width), "vision_projector/bias": np.zeros(c.width)}
    projector = ProjectorConfig(kind="linear")
    got, _ = encode_image(named, "vision", c, image(family, "wide"), projector=projector)
    theirs = folder(family)[2]["wide/last"][c.special :]
    np.testing.assert_allclose(np.asarray(got), theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())


@pytest.mark.parametrize("family", NAMES)
def test_tensors_go_in_and_out_bit_for_bit(family: str) -> None:
    config, tensors, _ = folder(family)
    c, read = loaded(family)
    written = assemble(expand(rows(c, config["model_type"]), c.layers), read)
    assert set(written) <= set(tensors)
    for key, tensor in written.items():
        np.testing.assert_array_equal(tensor, tensors[key], strict=True)
    theirs = to_hf_config(c)
    # SigLIP's image has two pixels that no patch covers, and its folder a head that pools, which no leaf is of.
    changed = {"image_size": 28, "vision_use_head": False} if family == "siglip" else {}
    changed |= {"hidden_act": "silu"} if c.gated else {}  # which DINOv2's gated mlp has whatever the folder says
    assert theirs == {key: config.get(key) for key in theirs} | {k: v for k, v in changed.items() if k in theirs}
    assert settings(theirs) == settings(config)


@pytest.mark.parametrize("family", NAMES)
def test_features_of_an_inner_layer_need_no_layer_behind_it(family: str) -> None:
    config, tensors, _ = folder(family)
    c = ViTConfig(**settings(config, -2))
    assert (c.layers, c.last_norm) == (2, False)
    # As part of a model with text the same keys have a prefix.
    kind = config["model_type"]
    prefix = {"vit": "vit.", "dinov3_vit": "model."}.get(kind, f"{kind}." if "dino" in kind else "vision_model.")
    for keys in (tensors, [prefix + key for key in tensors]):
        found = match(expand(rows(c, config["model_type"]), c.layers), keys, unused(c))
        assert not found.missing and not found.unexpected
    assert ViTConfig(**settings(config, 2)) == c
    assert settings(config, -1)["layers"] == DEPTH and not settings(config, -1)["last_norm"]


def test_settings_of_a_model_with_text_are_its_vision_config() -> None:
    nested = {"model_type": "siglip", "vision_config": {"model_type": "siglip_vision_model", "image_size": 384}}
    assert settings(nested)["grid"] == 24
    nested = {"model_type": "clip", "vision_config": {"patch_size": 14, "image_size": [336, 336]}}
    assert ViTConfig(**settings(nested, -2)).grid == 24
    # LLaVA says which features it takes; those behind the last layer but one need that layer alone.
    part = {"model_type": "clip_vision_model", "num_hidden_layers": 24}
    for whole, layers in (({}, 23), ({"vision_feature_layer": -1}, 24), ({"vision_feature_layer": 5}, 5)):
        found = settings({**part, "whole": {"model_type": "llava", **whole}})
        assert (found["layers"], found["last_norm"], found["merge"]) == (layers, False, 1)


def test_a_projector_has_the_activation_of_its_folder() -> None:
    assert ProjectorConfig(**projector_weights.settings({})).activation == "gelu_exact"
    assert projector_weights.settings({"projector_hidden_act": "gelu_pytorch_tanh"})["activation"] == "gelu"
    for wrong in ({"projector_hidden_act": "relu"}, {"multimodal_projector_bias": False}):
        with pytest.raises(ConfigError, match=f"config.json: {next(iter(wrong))}="):
            projector_weights.settings(wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "swin"}, "config.json: model_type='swin': legal: 'clip'"),
        ({"model_type": "vit", "qkv_bias": False}, "config.json: qkv_bias=False: mmjax has True alone"),
        (
            {"model_type": "dinov3_vit", "value_bias": False},
            "config.json: value_bias=False: mmjax has a bias of queries and values, or of neither",
        ),
        ({"model_type": "dinov3_vit", "mlp_bias": False}, "config.json: mlp_bias=False: mmjax has True alone"),
        (
            {"model_type": "dinov3_vit", "whole": {"model_type": "llava"}},
            "config.json: model_type='dinov3_vit': mmjax gives the LLM no registers",
        ),
        ({"hidden_act": "relu"}, "config.json: hidden_act='relu': "),
        ({"whole": {"vision_feature_layer": [-2, -5]}}, "config.json: vision_feature_layer=[-2, -5]: "),
        ({"whole": {"vision_feature_select_strategy": "full"}}, "config.json: vision_feature_select_strategy='full'"),
        ({"image_size": [28, 35]}, "config.json: image_size=[28, 35]: ours are squares"),
    ],
)
def test_what_ours_has_not_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        settings({**folder("dinov2")[0], **changes})
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)
    with pytest.raises(ConfigError, match="vision_feature_layer=-4: the tower has 3 layers; use -3 to 3, not 0"):
        settings(folder("dinov2")[0], -4)
