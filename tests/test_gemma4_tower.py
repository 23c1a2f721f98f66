"""Gemma 4's vision tower and embedder: what transformers computes of images of several sizes, and torch's gradients.

``tests/oracles/make_gemma4_tower.py`` made the folders: one of products with bounds, one of standardised features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from qwen_oracle import MODULES, Oracle, apart, leaf_shapes, stages
from safetensors.numpy import load_file
from trial_runs import assert_same_tensors, save_untrained, write_tiny

from mmjax.config import load_config
from mmjax.configurable import ConfigError, from_preset
from mmjax.data.packing import Packer
from mmjax.data.types import Sample
from mmjax.export.folders import export_folders
from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import Submesh
from mmjax.models.flops import parameter_count
from mmjax.models.graph import multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.parameters import join_logical
from mmjax.models.pretrained import find_pretrained
from mmjax.models.vit.config import ViTConfig
from mmjax.models.vit.weights import rows, settings, to_hf_config, unused
from mmjax.parity.engine import check
from mmjax.recipe import Recipe
from mmjax.reference import encode_image
from mmjax.train.trainer import Trainer
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.parameters import find_leaves
from mmjax.weights.table import assemble, expand, match

FOLDERS = Path(__file__).parent / "oracles" / "gemma4_tower"
KINDS = ("bounded", "standard")
ALL = pytest.mark.parametrize("kind", KINDS)
TOWER = ("vision", "vision_projector")
IMAGES, PLACEHOLDER = 5, 7
Arrays = dict[str, np.ndarray]


@cache
def oracle(kind: str) -> Oracle:
    """The tower in front of a language model of the width of the folder's."""
    folder = WeightsFolder.open(str(FOLDERS / kind))
    configs = {name: MODULES[name].config(**find_pretrained(MODULES[name], folder.config).fields()) for name in TOWER}
    llm = DecoderConfig(layers=1, width=16, heads=2, kv_heads=2, head_dim=0, mlp=16, vocab=8)
    model = multimodal({"vision": configs["vision"]}, llm, projectors={"vision": configs["vision_projector"]})
    leaves = read(kind, model, folder.tensor)
    return Oracle(model, leaves, dict(np.load(FOLDERS / kind / "values.npz")))


def read(kind: str, model: Any, tensor: Any) -> Arrays:
    """The tower's leaves from the tensors that a function gives by key."""
    folder, shapes, leaves = WeightsFolder.open(str(FOLDERS / kind)), leaf_shapes(model), {}
    for module in TOWER:
        begins, found = f"{module}/", find_pretrained(MODULES[module], folder.config)
        places = find_leaves(
            folder,
            module,
            table_of(kind, module, model),
            {name.removeprefix(begins): shape for name, shape in shapes.items() if name.startswith(begins)},
            prefixes=found.key_prefixes,
            other_prefixes=found.other_prefixes,
        )
        for name, (key, view) in places.items():
            shape = shapes[name]
            if (source := tensor(key)) is not None:
                leaves[name] = view.read(source, shape, tuple(slice(None) for _ in shape))
    return leaves


def table_of(kind: str, module: str, model: Any) -> Any:
    folder, node = WeightsFolder.open(str(FOLDERS / kind)), model.nodes["vision"]
    config = node.config if module == "vision" else node.projector
    return expand(find_pretrained(MODULES[module], folder.config).rows(config), getattr(config, "layers", 0))


def packed(of: Oracle, width: int = 198) -> Arrays:
    """All images in one row."""
    images = tuple(of.values[f"image_{number}"] for number in range(IMAGES))
    medium: Any = of.model.encoders["vision"].module.medium
    spec = replace(medium, buckets=((1, width),))
    count = sum(spec.tokens(*image.shape[:2]) for image in images)
    packer = Packer(encoders={"vision": spec}, sequence_length=count, microbatches=1, cells=1, pad=0)
    about: Any = {"question": "", "answer": "", "prompt": 0, "media_tokens": {"vision": PLACEHOLDER}}
    text, weights = np.full(count, PLACEHOLDER, np.int32), np.ones(count, np.float32)
    batch = packer.microbatch([Sample(tokens=text, loss_weights=weights, media={"vision": images}, **about)], 1)
    return {**batch.inputs["vision"], "places": batch.inputs["llm"]["vision_index"][0]}


def tokens_and_gradients(of: Oracle, tp: int, inputs: Arrays) -> tuple[np.ndarray, Arrays]:
    """The tokens of all images, and the gradients of the oracle's loss by leaf."""
    stage, submesh = stages(of.model)["vision"], Submesh.of(Layout(tp=tp), tuple(range(tp)), jax.devices()[:tp])
    axes, params, specs, own = submesh.axes, {}, {}, {}
    for part in stage.slices:
        own[part.module], tree = jax.tree.flatten(part.leaves())
        named: Any = {leaf: jnp.asarray(value) for leaf, value in of.leaves.items()}
        params[part.module] = jax.tree.unflatten(tree, join_logical(own[part.module], named))
        specs[part.module] = jax.tree.unflatten(tree, [leaf.spec(axes) for leaf in own[part.module]])
    places = inputs["places"]
    given = {name: inputs[name] for name in stage.inputs}

    def tokens_of(params: Any) -> Any:
        def body(params: Any, given: Any) -> Any:
            return stage.give(params, given, stage.forward(params, given, {}, axes, 1)[0], axes)

        out = submesh.spread.activation(inside=True)
        return jax.shard_map(body, mesh=submesh.mesh, in_specs=(specs, P()), out_specs=out)(params, given)[0, places]

    weights = np.concatenate([of.values[f"weights_{number}"] for number in range(IMAGES)])
    loss = lambda params: jnp.sum(tokens_of(params) * weights)  # noqa: E731
    gradients = jax.jit(jax.grad(loss))(params)
    named = {}
    for module, leaves in own.items():
        for leaf, value in zip(leaves, jax.tree.leaves(gradients[module]), strict=True):
            pieces = [value] if leaf.layers is None else list(value)
            named |= {name: np.asarray(piece) for name, piece in zip(leaf.names, pieces, strict=True)}
    return np.asarray(jax.jit(tokens_of)(params)), named


def wanted_gradients(kind: str) -> Arrays:
    theirs = dict(np.load(FOLDERS / kind / "gradients.npz"))
    return read(kind, oracle(kind).model, lambda key: theirs.get(key))


def assert_gradients(got: Mapping[str, Any], kind: str) -> None:
    """Requires torch's gradients, and none of what is fixed."""
    want = wanted_gradients(kind)
    assert len(want) == 42
    for name, leaf in want.items():
        assert apart(got[name], leaf) < 1e-4, name
    fixed = got.keys() - want.keys()
    assert len(fixed) == (21 if kind == "bounded" else 2)
    assert not any(np.abs(got[name]).any() for name in fixed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "tp"),
    [
        *(("bounded", 1), ("standard", 2)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("bounded", 2), ("standard", 1))),
    ],
)
def test_packed_images_have_the_tokens_and_gradients_of_torch(kind: str, tp: int) -> None:
    of = oracle(kind)
    tokens, gradients = tokens_and_gradients(of, tp, packed(of))
    assert apart(tokens, np.concatenate([of.values[f"tokens_{number}"] for number in range(IMAGES)])) < 5e-6
    assert_gradients(gradients, kind)


@pytest.mark.long
@ALL
def test_the_dense_reference_has_them_too(kind: str) -> None:
    of = oracle(kind)
    node = of.model.nodes["vision"]
    settings_of_projector = node.projector
    assert settings_of_projector

    def loss(leaves: Any) -> Any:
        total = jnp.zeros(())
        for number in range(IMAGES):
            image = of.values[f"image_{number}"]
            tokens, _ = encode_image(leaves, "vision", node.config, image, projector=settings_of_projector)
            total += jnp.sum(tokens * of.values[f"weights_{number}"])
        return total

    assert node.projector
    for number in range(IMAGES):
        image = of.values[f"image_{number}"]
        tokens, _ = encode_image(of.leaves, "vision", node.config, image, projector=node.projector)
        assert apart(tokens, of.values[f"tokens_{number}"]) < 5e-6
    assert_gradients(jax.grad(loss)({name: jnp.asarray(leaf) for name, leaf in of.leaves.items()}), kind)


@ALL
def test_tensors_go_in_and_out_bit_for_bit(kind: str) -> None:
    """Bounds, means and scales among them; of a folder of the tower alone too."""
    of, written = oracle(kind), {}
    for module in TOWER:
        leaves = {name.removeprefix(f"{module}/"): leaf for name, leaf in of.leaves.items()}
        written |= assemble(table_of(kind, module, of.model), leaves)
    tensors = load_file(FOLDERS / kind / "model.safetensors")
    wanted = {key: tensor for key, tensor in tensors.items() if not key.startswith("model.language_model.")}
    assert written.keys() == wanted.keys()
    for key, tensor in wanted.items():
        np.testing.assert_array_equal(written[key], tensor, strict=True)
    c = of.model.nodes["vision"].config
    alone = {key.removeprefix("model.vision_tower.") for key in wanted if "vision_tower" in key}
    found = match(expand(rows(c, "gemma4_vision"), c.layers), alone, unused(c))
    assert not found.missing and not found.unexpected
    theirs = WeightsFolder.open(str(FOLDERS / kind)).config["vision_config"]
    ours = to_hf_config(c)
    assert ours == {**{key: theirs.get(key) for key in ours}, "architectures": ["Gemma4VisionModel"]}
    assert settings(theirs) == {**settings(ours)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 16}, "config.json: head_dim=16: mmjax has heads that divide hidden_size (24) equally: 12"),
        ({"num_key_value_heads": 1}, "config.json: num_key_value_heads=1: mmjax has as many as query heads (2)"),
        ({"attention_bias": True}, "config.json: attention_bias=True: mmjax has no biases in this tower"),
        ({"hidden_activation": "relu"}, "config.json: hidden_activation='relu': "),
        ({"rope_parameters": {"rope_type": "yarn"}}, "config.json: rope_type='yarn': "),
        ({"rms_norm_eps": 1e-5}, "config.json: rms_norm_eps=1e-05: mmjax has 1e-06 alone in the norm of a projector"),
    ],
)
def test_what_a_tower_has_not_is_named(changes: dict[str, Any], message: str) -> None:
    theirs = dict(WeightsFolder.open(str(FOLDERS / "bounded")).config)
    theirs["vision_config"] = {**theirs["vision_config"], **changes}
    with pytest.raises(ConfigError) as refusal:
        for module in TOWER:
            find_pretrained(MODULES[module], theirs).fields()
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


_PUBLISHED: Mapping[str, dict[str, Any]] = {
    "gemma4-e4b": {"use_clipped_linears": True},
    "gemma4-31b": dict(
        **dict(hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, head_dim=72),
        **dict(num_key_value_heads=16, standardize=True, rope_parameters={"rope_theta": 100.0, "rope_type": "default"}),
    ),
}
"""What the ``vision_config`` of published folders says beside the defaults of transformers."""
COUNTS = {"gemma4-e4b": 167_365_056, "gemma4-31b": 569_550_384}
"""Parameters of these towers in transformers, buffers included."""


@pytest.mark.parametrize("preset", COUNTS)
def test_presets_are_the_published_towers(preset: str) -> None:
    c = ViTConfig(**settings({"model_type": "gemma4_vision", **_PUBLISHED[preset]}))
    assert replace(c, preset=preset) == from_preset(ViTConfig, preset)
    llm = DecoderConfig(layers=1, width=16, heads=2, kv_heads=2, head_dim=0, mlp=16, vocab=8)
    assert parameter_count(multimodal({"vision": c}, llm))["vision"] == COUNTS[preset]


# ---- runs ------------------------------------------------------------------------------------------------------------

LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "one device": ("llm/Layout.tp=1", "vision/Layout.dp=1", "vision/Layout.rank_offset=0"),
    "tp, pp and split backward": (
        *("llm/Layout.tp=2", "Train.schedule='zb-h1'"),
        *("vision/Layout.dp=1", "vision/Layout.tp=2", "vision/Layout.pp=2", "vision/Layout.rank_offset=2"),
    ),
    "cp and dp": (
        *("llm/Layout.tp=1", "llm/Layout.dp=2"),
        *("vision/Layout.dp=2", "vision/Layout.cp=3", "vision/Layout.rank_offset=2"),
    ),
}


def configured(folder: Path, kind: str, layout: tuple[str, ...]) -> Recipe:
    """The tiny configuration, whose tower and projector begin with a folder."""
    path = write_tiny(folder)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(("vision/ViT", "Packing"))))
    settings = [f"{module}/Weights.path={str(FOLDERS / kind)!r}" for module in TOWER]
    settings += ["Data.sequence_length=256", "Train.eval_samples=0", "llm/Decoder.width=16", "Train.steps=2"]
    return load_config([path], [*settings, *layout])


@pytest.mark.long
@ALL
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_as_the_dense_reference_does(kind: str, layout: str, tmp_path: Path) -> None:
    """From the folder's values, whose bounds many numbers reach."""
    # Rounding in an update moves a few numbers over a bound, where the next gradients jump.
    found = check(configured(tmp_path, kind, LAYOUTS[layout]), steps=1, style="silent")
    assert found and found.ok, found


@pytest.mark.long
@ALL
def test_training_changes_all_but_bounds_and_standards(kind: str, tmp_path: Path) -> None:
    """Weights decay, and an export before a step is the folder."""
    recipe = configured(tmp_path, kind, LAYOUTS["tp, pp and split backward"])
    fixed = {name: leaf for name, leaf in oracle(kind).leaves.items() if "_bounds" in name or "standard/" in name}
    assert len(fixed) == (21 if kind == "bounded" else 2) and recipe.model.optimizers["vision"].weight_decay
    with Trainer(recipe, tmp_path / "run", style="silent") as trainer:
        trainer.train()
        after = {name: np.asarray(leaf) for name, leaf in trainer.leaves().items()}
    for name, leaf in oracle(kind).leaves.items():
        assert np.array_equal(after[f"params/{name}"], leaf) == (name in fixed), name


@pytest.mark.long
@ALL
def test_out_of_in_is_the_same_folder(kind: str, tmp_path: Path) -> None:
    recipe = configured(tmp_path, kind, LAYOUTS["tp, pp and split backward"])
    save_untrained(recipe, tmp_path / "run")
    export_folders(tmp_path / "run", tmp_path / "out")
    assert_same_tensors(tmp_path / "out" / "model.safetensors", FOLDERS / kind / "model.safetensors")
