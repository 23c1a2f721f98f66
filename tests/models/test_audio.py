"""The audio encoder: packed recordings are heard alone, in the stem and in the layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from spmd_runs import AXES, context, on_tp, slice_of

from mmjax import reference
from mmjax.configurable import ConfigError, from_preset
from mmjax.models.module import run_layers
from mmjax.models.parameters import ModuleSlice
from mmjax.models.whisper import layers
from mmjax.models.whisper.config import WhisperConfig
from mmjax.models.whisper.module import Whisper
from mmjax.reference import encoders

CONFIG = WhisperConfig(layers=2, width=16, heads=2, mlp=24, mels=3, merge=1, length=8)
# Three recordings that touch, then padding; two patches lie before a recording's first in another row.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 0, 0]])
PLACES = np.array([[0, 1, 2, 0, 1, 2, 3, 0, 0, 0]])
POSITIONS = pytest.mark.parametrize("positions", ["sinusoidal", "learned"])


def whole(c: WhisperConfig) -> ModuleSlice:
    return slice_of(Whisper(c), "audio")


@cache
def parameters(c: WhisperConfig) -> Any:
    fresh = whole(c).initialise(jax.random.key(0))
    # Biases start at 0: with those a missing one, or a convolution over features of silence, would not show.
    return jax.tree.map(lambda x: x + 0.3 * np.random.default_rng(x.size).normal(size=x.shape).astype("f4"), fresh)


@cache
def compiled(c: WhisperConfig, tp: int = 1) -> Any:
    def body(p: Any, patches: Any, segments: Any, positions: Any) -> jax.Array:
        module = Whisper(c)
        given = context(module, patches=patches, segments=segments, positions=positions[..., None])
        return module.end(p, given, run_layers(module, p, given, module.embed(p, given))[0])

    specs = (jax.tree.map(lambda leaf: leaf.spec(AXES), whole(c).leaves()), P(), P(), P())
    return jax.jit(lambda *args: on_tp(tp, body, *args, specs=specs))


def run(c: WhisperConfig, patches: np.ndarray, tp: int = 1) -> np.ndarray:
    return np.asarray(compiled(c, tp)(parameters(c), patches, SEGMENTS, PLACES))


def patches() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(1, 10, 2 * CONFIG.mels)).astype(np.float32)


def alone(c: WhisperConfig, frames: np.ndarray) -> np.ndarray:
    """A recording by itself, through the dense reference up to the last norm."""
    p = parameters(c)
    named: dict[str, jax.Array] = {}
    for path, x in jax.tree.leaves_with_path(p):
        name = "/".join(k.key for k in path)
        if name.startswith("layers/"):
            rest = name.removeprefix("layers/")
            named |= {f"audio/layers/{i:03d}/{rest}": jnp.asarray(row) for i, row in enumerate(x)}
        else:
            named[f"audio/{name}"] = jnp.asarray(x)
    x = encoders.convolve(named, "audio/conv1", jnp.asarray(frames), 1)
    x = encoders.convolve(named, "audio/conv2", x, 2)
    table = np.asarray(p["position"])[: len(x)] if c.positions == "learned" else reference.sinusoids(len(x), c.width)
    return np.asarray(encoders.encoder_layers(named, "audio", c, x + table.astype(np.float32))[0])


@pytest.mark.long
@POSITIONS
def test_packed_recordings_are_each_the_recording_alone(positions: str) -> None:
    c, x = replace(CONFIG, positions=positions), patches()
    packed = run(c, x)
    for segment in (1, 2, 3):
        own = SEGMENTS[0] == segment
        frames = x[0, own].reshape(-1, c.mels)
        np.testing.assert_allclose(packed[0, own], alone(c, frames), rtol=1e-4, atol=2e-5)


def test_a_recording_does_not_hear_its_neighbours() -> None:
    x = patches()
    before = run(CONFIG, x)
    for changed in (0, 1, 2, 3):
        y, own = x.copy(), SEGMENTS[0] == changed
        y[0, own] += 5
        after = run(CONFIG, y)
        np.testing.assert_array_equal(after[0, ~own], before[0, ~own])
        assert (after[0, own] != before[0, own]).any(axis=-1).all()


def test_convolutions_reach_one_frame_to_either_side() -> None:
    """Which positions a frame reaches through the stem: a convolution of 3 taps, then one in steps of 2."""
    c, p = CONFIG, parameters(CONFIG)
    segments, places = jnp.ones((1, 6), jnp.int32), jnp.arange(6)[None]
    x = np.random.default_rng(2).normal(size=(1, 6, 2 * c.mels)).astype(np.float32)
    stem = jax.jit(lambda x: layers.embed_frames(p, c, x, segments, places))
    before = np.asarray(stem(x))
    for frame in range(12):
        y = x.reshape(1, 12, c.mels).copy()
        y[0, frame] += 5
        moved = np.abs(np.asarray(stem(y.reshape(x.shape))) - before).max(axis=-1)[0] > 0
        # Position t hears frames 2t - 2 … 2t + 2.
        assert moved.tolist() == [2 * t - 2 <= frame <= 2 * t + 2 for t in range(6)]


def test_tp_changes_nothing() -> None:
    np.testing.assert_allclose(run(CONFIG, patches(), tp=2), run(CONFIG, patches()), rtol=1e-4, atol=1e-5)


def test_positions_are_whispers_sinusoids() -> None:
    got = np.asarray(layers._sinusoids(jnp.arange(5), 8))
    np.testing.assert_allclose(got, reference.sinusoids(5, 8), atol=1e-6)
    np.testing.assert_allclose(got[:, 0], np.sin(np.arange(5)), atol=1e-6)
    np.testing.assert_allclose(got[:, 7], np.cos(np.arange(5) / 10000), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, r"Whisper\.heads"),
        ({"positions": "rope"}, r"Whisper\.positions='rope'.*'learned'"),
        ({"width": 15, "heads": 1}, r"Whisper\.width=15.*even"),
        ({"window": 40, "hop": 80}, r"Whisper\.window=40: .* set it to 160"),
        ({"mels": 0}, r"Whisper\.mels"),
        ({"activation": "relu"}, r"Whisper\.activation"),
    ],
)
def test_illegal_settings_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)


def test_presets_have_known_shapes() -> None:
    large = from_preset(WhisperConfig, "whisper-large-v3")
    assert (large.layers, large.width, large.head_width, large.mels, large.sample_rate) == (32, 1280, 64, 128, 16000)
    # Published: 1.55 G parameters of encoder and decoder; the encoder alone is 637 M with 128 mels.
    assert 0.63e9 < Whisper(large).parameters() < 0.64e9
