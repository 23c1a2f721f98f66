"""Autoencoders of ``diffusers``: their folders become ours and back; latents, pictures and gradients are theirs.

``tests/oracles/make_autoencoders.py`` made the folders and the oracles.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mmjax.configurable import ConfigError
from mmjax.models.autoencoder.config import AutoencoderConfig
from mmjax.models.autoencoder.layers import decode_whole, encode_whole, from_generator, to_generator
from mmjax.models.autoencoder.model import Autoencoder
from mmjax.models.autoencoder.parameters import slice_of
from mmjax.models.autoencoder.weights import rows, settings, to_config

ORACLES = Path(__file__).parents[1] / "oracles"
sys.path.insert(0, str(ORACLES))
import make_autoencoders as oracle  # noqa: E402  # pyright: ignore[reportMissingImports]

FILE = "diffusion_pytorch_model.safetensors"
TOLERANCE = 1e-5
"""Of the largest number."""


@cache
def read(kind: str) -> tuple[Autoencoder, dict[str, np.ndarray]]:
    """The autoencoder, and the oracles."""
    return Autoencoder.read(str(oracle.HERE / kind)), dict(np.load(oracle.HERE / kind / "oracles.npz"))


def inputs(kind: str, size: str) -> dict[str, np.ndarray]:
    return oracle.drawn(oracle.SIZES[size], read(kind)[0].config.latent_channels)


def require_equal(ours: Any, theirs: np.ndarray, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


@pytest.mark.parametrize("size", oracle.SIZES)
@pytest.mark.parametrize("kind", oracle.KINDS)
def test_latents_and_pictures_are_those_of_diffusers(kind: str, size: str) -> None:
    autoencoder, oracles = read(kind)
    drawn = inputs(kind, size)
    latents = autoencoder.encode(drawn["picture"])
    require_equal(latents.mean, oracles[f"{size}/mean"])
    require_equal(latents.log_variance, oracles[f"{size}/log_variance"])
    sample = latents.mean + np.exp(0.5 * latents.log_variance) * drawn["noise"]
    require_equal(autoencoder.decode(sample), oracles[f"{size}/decoded"])


@pytest.mark.long
@pytest.mark.parametrize("kind", oracle.WITH_GRADIENTS)
def test_gradients_are_those_of_diffusers(kind: str) -> None:
    """In fp64: in fp32 processors round gradients of pictures by more than the tolerance."""
    autoencoder, oracles = read(kind)
    c, drawn = autoencoder.config, inputs(kind, oracle.GRADIENTS)

    def loss(params: Any, picture: Any) -> Any:
        latents = encode_whole(c, params, picture)
        decoded = decode_whole(c, params, latents.sample(drawn["noise"]))
        divergence = latents.mean**2 + jnp.exp(latents.log_variance) - 1 - latents.log_variance
        return jnp.sum(decoded * drawn["cotangent"]) + 0.1 * 0.5 * jnp.sum(divergence)

    with jax.enable_x64(True):
        drawn, params = jax.tree.map(lambda x: np.asarray(x, np.float64), (drawn, autoencoder.params))
        gradients, of_picture = jax.jit(jax.grad(loss, (0, 1)))(params, drawn["picture"])
        gradients = jax.tree.map(np.asarray, gradients)
    require_equal(of_picture, oracles[f"{oracle.GRADIENTS}/d_picture"])
    leaves = replace(autoencoder, params=gradients).leaves()
    theirs = {key.removeprefix("gradient/"): value for key, value in oracles.items() if key.startswith("gradient/")}
    largest = max(np.abs(value).max() for value in theirs.values())
    seen = set()
    assert autoencoder.source
    for name, (key, view) in autoencoder.source.places.items():
        gradient = np.asarray(leaves[name])
        if key not in theirs:
            assert "/time/" in name  # single pictures do not meet it
            assert not gradient.any()
            continue
        expected = view.read(theirs[key], gradient.shape, (slice(None),) * gradient.ndim)
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=TOLERANCE * largest, err_msg=name)
        seen.add(key)
    assert seen == theirs.keys()


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_a_folder_is_written_as_it_was_read(kind: str, tmp_path: Path) -> None:
    read(kind)[0].write(tmp_path / "out")
    source = oracle.HERE / kind
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    theirs, ours = load_file(source / FILE), load_file(tmp_path / "out" / FILE)
    assert theirs.keys() == ours.keys()
    for key, tensor in theirs.items():
        assert tensor.dtype == ours[key].dtype
        assert tensor.tobytes() == ours[key].tobytes(), key


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "kl_shifted" else pytest.mark.long) for kind in oracle.KINDS]
)
def test_a_new_folder_has_the_tensors_and_settings_of_diffusers(kind: str, tmp_path: Path) -> None:
    c = read(kind)[0].config
    new = Autoencoder.new(c, seed=3)
    new.write(tmp_path / "new")
    theirs, ours = load_file(oracle.HERE / kind / FILE), load_file(tmp_path / "new" / FILE)
    assert {key: tensor.shape for key, tensor in theirs.items()} == {key: tensor.shape for key, tensor in ours.items()}
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    original = json.loads((oracle.HERE / kind / "config.json").read_text())
    assert {key: original[key] for key in config} == config
    again = Autoencoder.read(str(tmp_path / "new"))
    assert (again.config, again.identity) == (c, new.identity)
    assert Autoencoder.new(c, seed=4).identity != new.identity


def test_older_names_of_attention_are_read_and_kept(tmp_path: Path) -> None:
    autoencoder, _ = read("kl")
    tensors = load_file(oracle.HERE / "kl" / FILE)
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = {}
    for key, tensor in tensors.items():
        name = next((new for new in older if f".{new}." in key), "")
        renamed[key.replace(f".{name}.", f".{older[name]}.") if name else key] = tensor
    (tmp_path / "old").mkdir()
    save_file(renamed, tmp_path / "old" / FILE, {"format": "pt"})
    (tmp_path / "old" / "config.json").write_bytes((oracle.HERE / "kl" / "config.json").read_bytes())
    old = Autoencoder.read(str(tmp_path / "old"))
    assert old.identity == autoencoder.identity
    old.write(tmp_path / "out")
    assert load_file(tmp_path / "out" / FILE).keys() == renamed.keys()
    assert renamed.keys() != tensors.keys()


@pytest.mark.long
@pytest.mark.parametrize("kind", oracle.KINDS)
def test_tiles_equal_whole_pictures(kind: str) -> None:
    """Tiles of 8 pixels, of pictures whose sides are no multiples of it; a norm of each tile alone would differ."""
    whole = read(kind)[0]
    tiled = replace(whole, tile=8)
    rng = np.random.default_rng(0)
    pictures = rng.standard_normal((3, 20, 36, 3)).astype(np.float32)
    pictures[:, :8] += 3
    ours, theirs = tiled.encode(pictures), whole.encode(pictures)
    require_equal(ours.mean, theirs.mean)
    require_equal(ours.log_variance, theirs.log_variance)
    require_equal(tiled.decode(theirs.mean), whole.decode(theirs.mean))
    alone = whole.encode(pictures[:, :8, :8]).mean
    assert np.abs(alone - theirs.mean[:, :2, :2]).max() > 100 * TOLERANCE * np.abs(theirs.mean).max()


@pytest.mark.long
def test_attention_row_by_row_equals_attention_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    autoencoder = read("kl")[0]
    c, picture = autoencoder.config, inputs("kl", "wide")["picture"]

    def mean(params: Any) -> Any:
        return jnp.sum(jnp.sin(encode_whole(c, params, picture).mean))

    at_once = jax.jit(jax.grad(mean))(autoencoder.params)
    monkeypatch.setattr("mmjax.models.autoencoder.layers._AT_ONCE", 1)
    by_rows = jax.jit(jax.grad(mean))(autoencoder.params)
    ours, theirs = (jax.flatten_util.ravel_pytree(tree)[0] for tree in (by_rows, at_once))
    require_equal(ours, np.asarray(theirs))


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_what_a_generator_sees(kind: str) -> None:
    c = read(kind)[0].config
    latents = np.random.default_rng(1).standard_normal((2, 3, 2, c.latent_channels)).astype(np.float32)
    shift, scale = (np.asarray(c.means), 1 / np.asarray(c.deviations)) if c.means else (c.shift, c.scale)
    require_equal(to_generator(c, jnp.asarray(latents)), (latents - shift) * scale)
    require_equal(from_generator(c, to_generator(c, jnp.asarray(latents))), latents)


@pytest.mark.parametrize(("preset", "parameters"), [("sd-2.1", 83_653_863), ("qwen-image", 126_892_531)])
def test_parameters_of_published_models(preset: str, parameters: int) -> None:
    leaves = jax.tree.leaves(slice_of(AutoencoderConfig.of(preset)).leaves())
    assert sum(int(np.prod(leaf.logical_shape)) for leaf in leaves) == parameters


@pytest.mark.parametrize("preset", AutoencoderConfig.presets)
def test_every_leaf_has_a_row(preset: str) -> None:
    c = AutoencoderConfig.of(preset)
    leaves = {name.partition("/")[2] for leaf in jax.tree.leaves(slice_of(c).leaves()) for name in leaf.names}
    table = [row.leaf for row in rows(c)]
    assert sorted(table) == sorted(leaves)
    assert replace(settings(to_config(c)), preset=preset) == c


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("kl", {"_class_name": "AutoencoderTiny"}, "_class_name='AutoencoderTiny'"),
        ("kl", {"act_fn": "relu"}, "act_fn='relu'"),
        ("kl", {"down_block_types": ["AttnDownEncoderBlock2D"] * 3}, "down_block_types="),
        ("kl", {"latents_mean": [0.0] * 4}, "latents_mean="),
        ("kl", {"block_out_channels": [2, 4, 8]}, "of another shape"),
        ("kl", {"mid_block_add_attention": False}, "unexpected"),
        ("qwen_image", {"attn_scales": [1.0]}, "attn_scales="),
        ("qwen_image", {"temperal_downsample": [True, True]}, "missing"),
        ("qwen_image", {"latents_mean": [0.0]}, "means"),
    ],
)
def test_what_mmjax_cannot_compute_is_refused_in_one_line(
    kind: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = json.loads((oracle.HERE / kind / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    (tmp_path / FILE).write_bytes((oracle.HERE / kind / FILE).read_bytes())
    with pytest.raises(ConfigError, match=message) as error:
        Autoencoder.read(str(tmp_path))
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_sides_that_make_no_whole_latent_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 4"):
        read("kl")[0].encode(np.zeros((1, 10, 8, 3), np.float32))
