"""Encoders of latents: weights of autoencoders' folders, and pictures on canvases beside whole pictures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from mmjax.configurable import from_preset
from mmjax.models.autoencoder.layers import encode
from mmjax.models.autoencoder.model import Autoencoder
from mmjax.models.latent_encoder import weights
from mmjax.models.latent_encoder.config import LatentEncoderConfig
from mmjax.models.latent_encoder.layers import OnCanvases
from mmjax.models.latent_encoder.module import LatentEncoder
from mmjax.models.module import Module
from mmjax.models.parameters import declarations
from mmjax.models.traced_flops import traced_work
from mmjax.weights.folder import WeightsFolder
from mmjax.weights.table import expand, match

FOLDERS = Path(__file__).parents[1] / "oracles" / "autoencoder"
KINDS = ("kl", "kl_shifted", "qwen_image")


def settings(kind: str) -> LatentEncoderConfig:
    folder = WeightsFolder.open(str(FOLDERS / kind))
    return LatentEncoderConfig(**weights.settings(folder.config))


def parameters(kind: str, module: Module) -> dict[str, Any]:
    """The parameters of the only layer, by the weights table."""
    folder, c = WeightsFolder.open(str(FOLDERS / kind)), module.config
    (group,) = module.groups
    shapes = {f"layers/000/{path}": leaf.shape for path, leaf in declarations(group.create).items()}
    found = match(expand(weights.rows(c, ""), 1), folder.tensors, weights.unused(c))
    assert found.places.keys() == shapes.keys() and not found.missing and not found.unexpected
    leaves = {
        leaf.removeprefix("layers/000/"): view.read(
            folder.tensor(key), shapes[leaf], (slice(None),) * len(shapes[leaf])
        )
        for leaf, (key, view) in found.places.items()
    }
    return traverse_util.unflatten_dict(leaves, sep="/")


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_on_a_canvas_gets_what_it_gets_alone(kind: str) -> None:
    """From tensors of the folder by their table, beside the autoencoder's own reading and whole pictures."""
    vae, module = Autoencoder.read(str(FOLDERS / kind)), LatentEncoder(settings(kind))
    p, factor = parameters(kind, module), vae.config.factor
    sizes = ((4, 6), (6, 2))
    rng = np.random.default_rng(0)
    pictures = [rng.standard_normal((h * factor, w * factor, 3)).astype(np.float32) for h, w in sizes]
    # What is beyond a picture must not matter.
    canvas, inside = rng.standard_normal((2, 8 * factor, 8 * factor, 3)), np.zeros((2, 8 * factor, 8 * factor), bool)
    for number, picture in enumerate(pictures):
        height, width = picture.shape[:2]
        canvas[number, :height, :width], inside[number, :height, :width] = picture, True
    passes = OnCanvases(jnp.asarray(inside), len(vae.config.widths))
    on_canvases = encode(module.config.autoencoder, p, jnp.asarray(canvas, jnp.float32), passes)
    for number, (picture, (h, w)) in enumerate(zip(pictures, sizes, strict=True)):
        for actual, wanted in zip(on_canvases, vae.encode(picture[None]), strict=True):
            np.testing.assert_allclose(actual[number, :h, :w], wanted[0], atol=1e-5 * np.abs(wanted).max())


def test_work_grows_with_places_and_with_their_pairs() -> None:
    """FLOPs of a picture of four by four places, which is none of the squares that are traced, counted by hand."""
    module = LatentEncoder(settings("kl"))
    assert traced_work(module).per_square == 4 * module.config.widths[-1]
    leaves = declarations(module.groups[0].create)
    products = 0
    for path, leaf in leaves.items():
        if path.endswith("kernel"):
            level = int(path.split("level")[1][0]) + ("resample" in path) if "level" in path else 2
            level = 0 if "conv_in" in path else level
            products += 2 * math.prod(leaf.shape) * 16 * 4 ** (2 - level)
    assert module.forward_flops([16]) == products + 16**2 * 4 * module.config.widths[-1]


def test_presets_are_those_of_autoencoders() -> None:
    published = from_preset(LatentEncoderConfig, "sd-2.1")
    assert published.patch == 8 and published.width == 8 and published.patch_values == 192
    assert 34e6 < LatentEncoder(published).parameters() < 35e6
