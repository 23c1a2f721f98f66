"""Qwen-Image's transformer of ``diffusers``: its folder becomes our generator and back, and predicts what it predicts.

``tests/oracles/make_mmdit.py`` made the folder, the inputs, the predictions and their gradients.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from spmd_runs import AXES, on_tp, slice_of

from mmjax.configurable import ConfigError, preset_values
from mmjax.data.packing import Packer
from mmjax.data.patches import patchify, unpatchify
from mmjax.data.types import EncoderSpec, Sample
from mmjax.mesh.spread import Axes
from mmjax.models.context import Context
from mmjax.models.families import FAMILIES, PROJECTOR
from mmjax.models.mmdit.config import MMDiTConfig
from mmjax.models.mmdit.module import DoubleStreamTransformer
from mmjax.models.mmdit.weights import settings, to_hf_config
from mmjax.models.module import run_layers
from mmjax.models.parameters import ModuleSlice, Part, join_logical, split_logical
from mmjax.models.pretrained import find_pretrained
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.projector.layers import Projector, project
from mmjax.reference.arithmetic import dense_leaves
from mmjax.reference.mmdit import double_stream_velocity
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.table import assemble, expand, match

FOLDER = Path(__file__).parents[1] / "oracles" / "mmdit"
CASES = ("wide", "tall", "edit")
TOLERANCE = 1e-4
"""Of the largest number of an array."""
NAMES = ("m", "m_projector")


@cache
def oracles() -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / "oracles.npz"))


@cache
def folder() -> WeightsFolder:
    return WeightsFolder.open(str(FOLDER))


def configured(queries: int) -> tuple[MMDiTConfig, ProjectorConfig]:
    families = (FAMILIES["mmdit"], PROJECTOR)
    fields, of_projector = (find_pretrained(family, folder().config).fields() for family in families)
    return MMDiTConfig(**fields, queries=queries), ProjectorConfig(**of_projector)


def slices(c: MMDiTConfig, projector: ProjectorConfig) -> tuple[ModuleSlice, ModuleSlice]:
    """The module and its projector, each in one stage."""
    condition = folder().config["joint_attention_dim"]
    make = lambda rngs: Projector(condition, 0, c.width, rngs, norm=projector.norm)  # noqa: E731
    return slice_of(DoubleStreamTransformer(c)), ModuleSlice("m_projector", parts=(Part(make),))


def entries_of(name: str, c: MMDiTConfig, projector: ProjectorConfig) -> Any:
    family, config = (FAMILIES["mmdit"], c) if name == "m" else (PROJECTOR, projector)
    return expand(find_pretrained(family, folder().config).rows(config), c.layers)


def read(tensors: Any = None) -> dict[str, np.ndarray]:
    """Leaves of module and projector by name, from the folder, or from tensors with its keys."""
    c, projector = configured(4)
    leaves: dict[str, np.ndarray] = {}
    for name, part in zip(NAMES, slices(c, projector), strict=True):
        shapes = {leaf: each.logical_shape for each in jax.tree.leaves(part.leaves()) for leaf in each.names}
        matches = match(entries_of(name, c, projector), folder().tensors)
        assert not matches.missing
        assert {f"{name}/{leaf}" for leaf in matches.places} == shapes.keys()
        for leaf, (key, view) in matches.places.items():
            shape = shapes[f"{name}/{leaf}"]
            tensor = tensors.get(key, np.zeros(view.shape_of(shape))) if tensors else folder().tensor(key)
            leaves[f"{name}/{leaf}"] = view.read(tensor, shape, tuple(slice(0, size) for size in shape))
    return leaves


def inputs_of(case: str) -> dict[str, np.ndarray]:
    """Host inputs of a case: patches as the data side cuts them, and positions in all of its pictures."""
    values = {key.removeprefix(f"{case}/"): value for key, value in oracles().items() if key.startswith(f"{case}/")}
    spec = EncoderSpec(patch=2, channels=4)
    rows, queries = values["mask"].shape
    patches, positions = [], [np.full((rows, queries, 3), -1, np.int32)]
    for number in range(sum(key.startswith("latents") for key in values)):
        cut = [patchify(x.transpose(1, 2, 0), spec) for x in values[f"latents{number}"]]
        patches.append(np.stack([x for x, _ in cut]))
        places = np.pad(np.stack([at for _, at in cut]), ((0, 0), (0, 0), (1, 0)), constant_values=number)
        positions.append(places)
    inputs = {"patches": np.concatenate(patches, axis=1), "positions": np.concatenate(positions, axis=1)}
    used = np.ones(inputs["patches"].shape[:2], bool)
    inputs["segments"] = np.concatenate([values["mask"], used], axis=1).astype(np.int32)
    inputs["times"] = np.where(used, values["times"][:, None], 0).astype(np.float32)
    if len(patches) == 1:
        inputs["positions"] = inputs["positions"][..., 1:]
    return inputs


@cache
def predict(case: str, *, tp: int = 1, sp: bool = False) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Predicted patches, and gradients by leaf, of "patches" and of "hidden"."""
    (c, projector), hidden = configured(oracles()[f"{case}/mask"].shape[1]), oracles()[f"{case}/hidden"]
    module, inputs = DoubleStreamTransformer(c), inputs_of(case)
    made, loaded, axes = slices(c, projector), read(), Axes(sp=("tp",) if sp else ())
    leaves = [jax.tree.leaves(part.leaves()) for part in made]
    trees = [jax.tree.structure(part.leaves()) for part in made]
    params = {
        name: jax.tree.unflatten(tree, join_logical(of_part, cast(Any, loaded)))
        for name, tree, of_part in zip(NAMES, trees, leaves, strict=True)
    }
    specs = {
        name: jax.tree.unflatten(tree, [leaf.spec(AXES) for leaf in of_part])
        for name, tree, of_part in zip(NAMES, trees, leaves, strict=True)
    }

    def body(p: Any, hidden: jax.Array, patches: jax.Array, inputs: Any) -> jax.Array:
        here = Context.of(axes, {**inputs, "patches": patches}, module.mask)
        x = module.embed(p["m"], here)
        condition_RND = project(p["m_projector"], 1, AXES, hidden, projector)
        room = ((0, 0), (0, patches.shape[1]), (0, 0))
        x = x.at[:, :-1].add(here.split_sp(jnp.pad(condition_RND, room)))
        x, _, _ = run_layers(module, p["m"], here, x)
        return module.predict(p["m"], here, module.end(p["m"], here, x))

    others = {name: value for name, value in inputs.items() if name != "patches"}
    count = oracles()[f"{case}/predicted"].shape[1]

    def run(p: Any, hidden: Any, patches: Any) -> jax.Array:
        shared = P(None, axes.sp)
        out = on_tp(tp, body, p, hidden, patches, others, specs=(specs, P(), P(), P()), out=shared)
        return out[:, :count]

    direction = in_our_order(oracles()[f"{case}/direction"])
    value, pull = jax.vjp(jax.jit(run), params, jnp.asarray(hidden), jnp.asarray(inputs["patches"]))
    d_params, d_hidden, d_patches = jax.jit(pull)(jnp.asarray(direction))
    gradients = {"hidden": np.asarray(d_hidden), "patches": np.asarray(d_patches)}
    for part, name in zip(made, NAMES, strict=True):
        gradients |= {
            leaf: np.asarray(value)
            for leaf, value in split_logical(jax.tree.leaves(part.leaves()), jax.tree.leaves(d_params[name])).items()
        }
    return np.asarray(value), gradients


def in_our_order(packed_RTE: np.ndarray) -> np.ndarray:
    """Packed latents, channel by channel, as patches, pixel by pixel."""
    rows, count, _ = packed_RTE.shape
    return packed_RTE.reshape(rows, count, 4, 4).swapaxes(2, 3).reshape(rows, count, 16)


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())


def assert_gradients_close(case: str, gradients: dict[str, np.ndarray]) -> None:
    assert_close(gradients["hidden"], oracles()[f"{case}/d_hidden"])
    assert_close(gradients["patches"], in_our_order(oracles()[f"{case}/d_sample"]))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_predictions_and_their_gradients_are_those_of_diffusers(case: str) -> None:
    """Rows that are no square, texts of several lengths, and a picture that another one is made from."""
    predicted, gradients = predict(case)
    assert_close(predicted, in_our_order(oracles()[f"{case}/predicted"]))
    height, width = oracles()[f"{case}/unpacked"].shape[2:]
    picture = unpatchify(predicted[0], (height // 2, width // 2), EncoderSpec(patch=2, channels=4))
    assert_close(picture.transpose(2, 0, 1), oracles()[f"{case}/unpacked"][0])
    assert_gradients_close(case, gradients)


def test_gradients_of_parameters_are_those_of_diffusers() -> None:
    """What the condition becomes in the last layer is not read: its weights' gradients are 0, or torch has none."""
    theirs = read({key.removeprefix("wide/d/"): value for key, value in oracles().items() if key.startswith("wide/d/")})
    _, gradients = predict("wide")
    of_mlp = ("mlp/up", "mlp/up_bias", "mlp/down", "mlp/down_bias")
    assert {name for name in theirs if not theirs[name].any()} == {
        f"m/layers/001/condition_{name}"
        for name in ("attn/q", "attn/q_bias", "attn/q_norm", "attn/o", "attn/o_bias", *of_mlp)
    }
    for name, gradient in theirs.items():
        assert_close(gradients[name], gradient)


@pytest.mark.long
@pytest.mark.parametrize("sp", [False, True])
def test_ranks_of_tp_predict_the_same(*, sp: bool) -> None:
    """With sequence parallelism ranks share the places of condition and picture, and each has the time's."""
    predicted, gradients = predict("edit", tp=2, sp=sp)
    assert_close(predicted, in_our_order(oracles()["edit/predicted"]))
    assert_gradients_close("edit", gradients)
    whole = predict("edit")[1]
    for name, gradient in gradients.items():
        assert_close(gradient, whole[name])


@pytest.mark.parametrize("case", ["wide", "tall"])
def test_the_dense_reference_predicts_the_same(case: str) -> None:
    """Of the first row, whose text is the longest."""
    (c, projector), named = configured(4), read()
    painter = {f"painter{leaf.removeprefix('m')}": value for leaf, value in named.items()}
    height, width = oracles()[f"{case}/unpacked"].shape[2:]
    predicted = double_stream_velocity(
        dense_leaves(painter),
        jnp.asarray(oracles()[f"{case}/hidden"][0]),
        jnp.asarray(inputs_of(case)["patches"][0]),
        jnp.asarray(oracles()[f"{case}/times"][0]),
        name="painter",
        dit=c,
        rows=height // 2,
        columns=width // 2,
        projector=projector,
    )
    assert_close(np.asarray(predicted), in_our_order(oracles()[f"{case}/predicted"])[0])


def test_a_folder_is_read_and_written_bit_for_bit() -> None:
    c, projector = configured(4)
    assert (c.layers, c.width, c.heads, c.mlp, c.channels) == (2, 16, 2, 64, 4)
    leaves, tensors = read(), {}
    for name in NAMES:
        of_part = {
            leaf.removeprefix(f"{name}/"): value for leaf, value in leaves.items() if leaf.startswith(f"{name}/")
        }
        tensors |= assemble(entries_of(name, c, projector), of_part)
    assert tensors.keys() == folder().tensors.keys()
    assert len({info.file for info in folder().tensors.values()}) == 3
    for key, tensor in tensors.items():
        info = folder().tensors[key]
        stored = folder().tensor(key)[tuple(slice(0, size) for size in info.shape)]
        assert tensor.dtype == stored.dtype and tensor.tobytes() == stored.tobytes()
    written = {"joint_attention_dim": folder().config["joint_attention_dim"], **to_hf_config(c)}
    assert written == {key: value for key, value in folder().config.items() if key != "_diffusers_version"}


@pytest.mark.long
def test_the_published_size_has_the_published_parameters() -> None:
    """The folder of Qwen-Image has 20,430,401,088 parameters, by the shapes of diffusers' model."""
    c = MMDiTConfig(**cast(dict[str, Any], preset_values(MMDiTConfig, "qwen-image")))
    projector = 3584 + 3584 * c.width + c.width
    assert DoubleStreamTransformer(c).parameters() + projector == 20_430_401_088


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zero_cond_t": True}, "config.json: zero_cond_t=True: mmjax has models without it"),
        ({"guidance_embeds": True}, "config.json: guidance_embeds=True: mmjax has models without it"),
        ({"use_layer3d_rope": True}, "config.json: use_layer3d_rope=True: mmjax has models without it"),
        ({"in_channels": 20}, "config.json: in_channels=20: mmjax has as many numbers in as out"),
        ({"_class_name": "FluxTransformer2DModel"}, "config.json: _class_name='FluxTransformer2DModel'"),
    ],
)
def test_models_that_cannot_be_computed_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings({**folder().config, **changes})
    assert str(caught.value).startswith(said)


def test_rows_of_edits_are_the_inputs_of_diffusers() -> None:
    """What the data side makes of a picture and of the one that it is made from: packed latents and their places."""
    wanted, latents = inputs_of("edit"), [oracles()[f"edit/latents{number}"] for number in range(2)]
    count, queries = oracles()["edit/mask"].shape
    spec = EncoderSpec(
        **{"patch": 2, "channels": 4, "drawn": True, "special": queries, "queries": queries, "references": 1},
        buckets=((count, queries + wanted["patches"].shape[1]),),
    )
    packer = Packer(encoders={"m": spec}, sequence_length=count * queries, microbatches=1, cells=1, pad=0)
    made, seen = (tuple(x.transpose(1, 2, 0) for x in of_picture) for of_picture in latents)
    sample = Sample(
        tokens=np.full(count * queries, 9, np.int32),
        loss_weights=np.zeros(count * queries, np.float32),
        **{"media": {"m": made}, "question": "", "answer": "", "prompt": 0, "media_tokens": {"m": 9}},
        noise={"m": made},  # so that the mixture at any time is the picture
        times={"m": tuple(map(float, oracles()["edit/times"]))},
        references={"m": tuple((picture,) for picture in seen)},
    )
    inputs = packer.microbatch([sample], 1).inputs["m"]
    np.testing.assert_allclose(inputs["patches"], wanted["patches"], atol=1e-6)
    np.testing.assert_array_equal(inputs["positions"][:, queries:], wanted["positions"][:, queries:])
    np.testing.assert_array_equal(inputs["times"].max(axis=1), wanted["times"].max(axis=1))
