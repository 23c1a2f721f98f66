"""UNets of `diffusers`: folders become ours and back, and outputs and gradients are equal.

``tests/oracles/make_unet.py`` made folders, outputs and gradients.
"""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file
from spmd_runs import AXES, on_tp, slice_of
from unet_inputs import CONFIGS, SD21, directions, inputs, parameter

from mmjax.attention.backends import Backend
from mmjax.configurable import ConfigError, from_preset
from mmjax.models.module import Module
from mmjax.models.parameters import join_logical
from mmjax.models.unet.config import UNetConfig
from mmjax.models.unet.layers import unet
from mmjax.models.unet.module import LatentUNet
from mmjax.models.unet.weights import rows, settings, to_hf_config, unused
from mmjax.weights.table import assemble, expand, match

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parents[1] / "oracles" / "unet"
NAMES = [
    ("tiny", "odd"),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (("tiny", "wide"), ("other", "odd"))),
]
TOLERANCE = 1e-4


@cache
def oracles() -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / "oracles.npz"))


def their_config(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "config.json").read_text())


def configured(name: str, **changes: Any) -> UNetConfig:
    return UNetConfig(**{**settings(their_config(name)), **changes})


def leaves(module: Module) -> list[Any]:
    return jax.tree.leaves(slice_of(module).leaves())


@cache
def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of our leaves by name in the module."""
    by_name = {name: leaf.logical_shape for leaf in leaves(LatentUNet(configured(name))) for name in leaf.names}
    return {leaf.removeprefix("m/"): shape for leaf, shape in by_name.items()}


@cache
def tensors(name: str) -> dict[str, np.ndarray]:
    """A folder's tensors, or those that its keys stand for."""
    if name == "tiny":
        return load_file(FOLDER / name / "diffusion_pytorch_model.safetensors")
    c = configured(name)
    zeros = {leaf: np.zeros(shape, np.float32) for leaf, shape in shapes(name).items()}
    return {key: parameter(key, x.shape) for key, x in assemble(expand(rows(c, ""), c.layers), zeros).items()}


@cache
def loaded(name: str) -> dict[str, np.ndarray]:
    """Our leaves by name in the module."""
    c = configured(name)
    found = match(expand(rows(c, ""), c.layers), tensors(name), unused(c))
    assert not found.missing and not found.unexpected
    assert found.places.keys() == shapes(name).keys()
    return {
        leaf: view.read(tensors(name)[key], shapes(name)[leaf], tuple(slice(None) for _ in shapes(name)[leaf]))
        for leaf, (key, view) in found.places.items()
    }


def stage_tree(name: str) -> tuple[Any, Any]:
    """A stage's parameters, and their specs."""
    module = LatentUNet(configured(name))
    structure = jax.tree.structure(slice_of(module).leaves())
    arrays = join_logical(leaves(module), {f"m/{leaf}": jnp.asarray(x) for leaf, x in loaded(name).items()})
    specs = [leaf.spec(AXES) for leaf in leaves(module)]
    return jax.tree.unflatten(structure, arrays), jax.tree.unflatten(structure, specs)


def close(ours: Any, theirs: Any, tolerance: float = TOLERANCE) -> bool:
    """Whether the largest difference is small beside the largest number."""
    return float(np.abs(np.asarray(ours) - theirs).max()) <= tolerance * float(np.abs(theirs).max())


def computed(name: str, case: str, tp: int = 1, **changes: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Output [B, C, H, W], and gradients of parameters, "sample" and "condition"."""
    c = configured(name, **changes)
    arrays = {key: jnp.asarray(x) for key, x in inputs(case, c.channels, c.width).items()}
    params, specs = stage_tree(name)

    def value(params: Any, sample: Any, condition: Any) -> tuple[jax.Array, jax.Array]:
        y = unet(
            jax.tree.map(lambda x: x[0], params["layers"]),
            c,
            sample.transpose(0, 2, 3, 1),
            arrays["timesteps"],
            condition,
            inside_BHW=jnp.ones((len(sample), *sample.shape[2:]), bool),
            used_BN=arrays["used"] > 0,
            axes=AXES,
            backend=Backend(),
        ).transpose(0, 3, 1, 2)
        return jnp.sum(y * arrays["cotangent"]), y

    def body(*args: Any) -> tuple[Any, jax.Array]:
        gradients, y = jax.grad(value, argnums=(0, 1, 2), has_aux=True)(*args)
        return gradients, y

    run = partial(on_tp, tp, body, specs=(specs, P(), P()), out=((specs, P(), P()), P()))
    (of_params, of_sample, of_condition), y = jax.jit(run)(params, arrays["sample"], arrays["condition"])
    named = {}
    for leaf, gradient in zip(leaves(LatentUNet(c)), jax.tree.leaves(of_params), strict=True):
        named[leaf.names[0].removeprefix("m/")] = np.asarray(gradient[0])
    return np.asarray(y), {**named, "sample": np.asarray(of_sample), "condition": np.asarray(of_condition)}


def assert_equal(name: str, case: str, y: np.ndarray, gradients: dict[str, np.ndarray]) -> None:
    place, c = f"{name}/{case}", configured(name)
    assert close(y, oracles()[f"{place}/output"])
    for key in ("sample", "condition"):
        assert close(gradients[key], oracles()[f"{place}/{key}"]), key
    of_leaves = {leaf: gradients[leaf] for leaf in shapes(name)}
    by_key = assemble(expand(rows(c, ""), c.layers), of_leaves)
    along = np.array([directions(key, by_key[key].shape) @ by_key[key].ravel() for key in sorted(by_key)])
    theirs = oracles()[f"{place}/parameters"]
    scale = np.array([np.linalg.norm(by_key[key]) for key in sorted(by_key)]) + TOLERANCE * np.abs(theirs).max()
    assert np.abs((along - theirs) / scale[:, None]).max() <= TOLERANCE


@pytest.mark.parametrize(("name", "case"), NAMES)
def test_output_and_gradients_equal_diffusers(name: str, case: str) -> None:
    assert_equal(name, case, *computed(name, case))


def test_recomputing_changes_nothing() -> None:
    assert_equal("tiny", "odd", *computed("tiny", "odd", remat="full"))


@pytest.mark.parametrize("name", ["tiny", pytest.param("other", marks=pytest.mark.long)])
def test_ranks_of_tp_change_nothing(name: str) -> None:
    """Of two ranks, with an even number of heads and with an odd one."""
    assert_equal(name, "odd", *computed(name, "odd", tp=2))


@pytest.mark.parametrize("name", CONFIGS)
def test_folder_in_and_out_is_bitwise(name: str) -> None:
    c = configured(name)
    written = assemble(expand(rows(c, ""), c.layers), loaded(name))
    assert written.keys() == tensors(name).keys()
    for key, tensor in written.items():
        assert tensor.dtype == tensors(name)[key].dtype and np.array_equal(tensor, tensors(name)[key]), key


@pytest.mark.parametrize("name", CONFIGS)
def test_configuration_in_and_out(name: str) -> None:
    c = configured(name)
    assert UNetConfig(**settings(to_hf_config(c))) == c
    theirs = their_config(name)
    differing = {key for key, value in to_hf_config(c).items() if theirs[key] != value}
    assert differing <= {"attention_head_dim"}  # of levels without attention


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_class_name", "UNet2DModel"),
        ("act_fn", "gelu"),
        ("dual_cross_attention", True),
        ("class_embed_type", "timestep"),
        ("addition_embed_type", "text_time"),
        ("resnet_time_scale_shift", "scale_shift"),
        ("down_block_types", ["DownBlock2D", "AttnDownBlock2D"]),
        ("up_block_types", ["CrossAttnUpBlock2D", "UpBlock2D"]),
        ("mid_block_type", "UNetMidBlock2D"),
        ("out_channels", 8),
        ("layers_per_block", [1, 2]),
        ("attention_head_dim", [2]),
        ("num_attention_heads", 4),
    ],
)
def test_other_configurations_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: {key}=") as error:
        settings({**their_config("tiny"), key: value})
    assert "\n" not in str(error.value)


def test_presets_are_published_models() -> None:
    c = from_preset(UNetConfig, "sd-2.1")
    theirs = settings({"_class_name": "UNet2DConditionModel", **SD21})
    assert LatentUNet(c).parameters() == 865_910_724
    assert theirs == {name: getattr(c, name) for name in theirs}
    assert LatentUNet(from_preset(UNetConfig, "sd-1.5")).parameters() == 859_520_964
