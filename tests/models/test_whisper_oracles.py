"""Whisper of ``transformers``: its folder becomes our encoder and back, and we hear what it hears.

``tests/oracles/make_whisper.py`` made the folder, the frames and the hidden states.
"""

from __future__ import annotations

import math
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
from trial_runs import write_tiny

from mmjax.config import load_config, operative_config
from mmjax.configurable import ConfigError
from mmjax.data.log_mel import LogMel
from mmjax.models.module import run_layers
from mmjax.models.parameters import join_logical
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.whisper.config import WhisperConfig
from mmjax.models.whisper.module import Whisper
from mmjax.models.whisper.weights import rows, settings, to_hf_config, unused
from mmjax.reference import encode_recording
from mmjax.weights.folder import read_config, read_extractor
from mmjax.weights.table import assemble, expand, match

FOLDER = Path(__file__).parents[1] / "oracles" / "whisper"
NAMES = ("whole", "short", "brief", "long")
TOLERANCE = 1e-5
STEP = 9


@cache
def oracles() -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / "oracles.npz"))


@cache
def configured() -> WhisperConfig:
    theirs = {**read_config(str(FOLDER)), "extractor": read_extractor(str(FOLDER))}
    return WhisperConfig(**settings(theirs), merge=2)


@cache
def loaded() -> dict[str, np.ndarray]:
    """Leaves by name in the module."""
    c, tensors = configured(), load_file(FOLDER / "model.safetensors")
    found = match(expand(rows(c, "whisper"), c.layers), tensors, unused(c))
    assert not found.missing and not found.unexpected
    shapes = {name: leaf.logical_shape for leaf in leaves(c) for name in leaf.names}
    assert {f"m/{name}" for name in found.places} == shapes.keys()
    assert sum(math.prod(shape) for shape in shapes.values()) == Whisper(c).parameters()
    read = {}
    for name, (key, view) in found.places.items():
        shape = shapes[f"m/{name}"]
        read[name] = view.read(tensors[key], shape, tuple(slice(None) for _ in shape))
    return read


def leaves(c: WhisperConfig) -> list[Any]:
    return jax.tree.leaves(slice_of(Whisper(c)).leaves())


def frames(name: str, log_mel: LogMel) -> np.ndarray:
    """Our frames of a recording."""
    return log_mel(oracles()[f"{name}/samples"] / 128.0, 4)


def hidden(inputs: dict[str, np.ndarray], tp: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Features behind the first layer, and behind the last norm."""
    c = configured()
    module, own = Whisper(c), leaves(c)
    tree = jax.tree.structure(slice_of(module).leaves())
    named: Any = {f"m/{name}": leaf for name, leaf in loaded().items()}
    params = jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in join_logical(own, named)])
    specs = jax.tree.unflatten(tree, [leaf.spec(AXES) for leaf in own])

    def body(p: Any, given: Any) -> tuple[jax.Array, jax.Array]:
        here = context(module, **given)
        x, kept, _ = run_layers(module, p, here, module.embed(p, here), keep=[0])
        return kept[0], module.end(p, here, x)

    run = jax.jit(lambda p, given: on_tp(tp, body, p, given, specs=(specs, P()), out=(P(), P())))
    first, last = run(params, inputs)
    return np.asarray(first)[0], np.asarray(last)[0]


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())


@pytest.mark.parametrize("name", NAMES)
def test_frames_are_those_of_the_feature_extractor(name: str) -> None:
    """Of recordings as long as the encoder hears, shorter, shorter than a frame's window, and longer."""
    log_mel = Whisper(configured()).medium.log_mel
    assert log_mel is not None and log_mel.chunk == 100
    # theirs keeps the spectrum in complex64
    np.testing.assert_allclose(frames(name, log_mel), oracles()[f"{name}/frames"], rtol=0, atol=5e-6)
    for mels in (80, 128) if name == "short" else ():
        got = frames(name, replace(log_mel, mels=mels))[::STEP]
        np.testing.assert_allclose(got, oracles()[f"{name}/frames{mels}"], rtol=0, atol=5e-6)


def test_unpadded_frames_are_the_padded_ones_before_the_end() -> None:
    """The last few see what is beyond it: its mirror image there, silence here."""
    log_mel = Whisper(replace(configured(), pad=False)).medium.log_mel
    assert log_mel is not None
    for name in ("short", "whole"):
        got, theirs = frames(name, log_mel), oracles()[f"{name}/frames"]
        assert len(got) == {"short": 44, "whole": 100}[name]
        np.testing.assert_allclose(got[:-4], theirs[: len(got) - 4], rtol=0, atol=5e-6)


@pytest.mark.parametrize("tp", [1, 2])
def test_packed_recordings_have_their_hidden_states(tp: int) -> None:
    """Three recordings in a row, with padding between and behind them."""
    places = np.arange(50)
    blank = np.zeros(3, int)
    segments = np.concatenate([places * 0 + 1, blank, places * 0 + 2, places * 0 + 3, blank])
    positions = np.concatenate([places, blank, places, places, blank])
    patches = np.full((len(segments), 40), 9.0, np.float32)
    names = ("whole", "short", "long")
    log_mel = Whisper(configured()).medium.log_mel
    assert log_mel is not None
    for number, name in enumerate(names, 1):
        patches[segments == number] = frames(name, log_mel).reshape(50, 40)
    given = {"patches": patches, "segments": segments.astype(np.int32), "positions": positions[:, None]}
    first, last = hidden({key: value[None] for key, value in given.items()}, tp)
    for number, name in enumerate(names, 1):
        assert_close(first[segments == number], oracles()[f"{name}/first"])
        assert_close(last[segments == number], oracles()[f"{name}/last"])


def test_the_dense_reference_has_their_hidden_states() -> None:
    c = replace(configured(), merge=1)
    named = {f"audio/{name}": leaf for name, leaf in loaded().items()}
    named |= {"audio_projector/kernel": np.eye(c.width), "audio_projector/bias": np.zeros(c.width)}
    got, _ = encode_recording(named, "audio", c, oracles()["short/frames"], projector=ProjectorConfig(kind="linear"))
    assert_close(np.asarray(got), oracles()["short/last"])


def test_tensors_go_in_and_out_bit_for_bit() -> None:
    c, tensors = configured(), load_file(FOLDER / "model.safetensors")
    written = assemble(expand(rows(c, "whisper"), c.layers), loaded())
    assert written.keys() == {key for key in tensors if key.startswith("model.encoder.")}
    for key, tensor in written.items():
        np.testing.assert_array_equal(tensor, tensors[key], strict=True)


@pytest.mark.parametrize("prefix", ["encoder.", ""])
def test_folders_without_the_language_head_have_shorter_keys(prefix: str) -> None:
    keys = load_file(FOLDER / "model.safetensors")
    own = [key.replace("model.encoder.", prefix) for key in keys if ".encoder." in key]
    c = configured()
    found = match(expand(rows(c, "whisper"), c.layers), [*own, "decoder.layer_norm.weight"], unused(c))
    assert not found.missing and not found.unexpected
    wrong = match(expand(rows(c, "whisper"), c.layers), [*own, "encoder.layers.0.self_attn.k_proj.bias"], unused(c))
    assert wrong.unexpected == ("encoder.layers.0.self_attn.k_proj.bias",)


def test_settings_are_those_of_the_folder_and_back() -> None:
    c = configured()
    assert (c.layers, c.width, c.heads, c.mlp, c.mels, c.length) == (2, 16, 2, 24, 20, 50)
    assert (c.window, c.hop, c.sample_rate, c.norm_eps, c.pad) == (400, 160, 16000, 1e-5, True)
    theirs, config = to_hf_config(c), read_config(str(FOLDER))
    assert all(config[key] == value for key, value in theirs.items() if key != "architectures")
    assert settings(theirs) == settings(config)
    assert to_hf_config(replace(c, pad=False)) == theirs
    with pytest.raises(ConfigError, match="Whisper: OpenAI's models have other settings"):
        to_hf_config(replace(c, k_bias=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "wav2vec2"}, "config.json: model_type='wav2vec2': legal: 'whisper'"),
        ({"activation_function": "relu"}, "config.json: activation_function='relu': did you mean 'gelu'?"),
        ({"extractor": {"sampling_rate": 8000}}, "preprocessor_config.json: sampling_rate=8000: mmjax has 16000 alone"),
        ({"extractor": {"feature_size": 80}}, "preprocessor_config.json: feature_size=80: mmjax has 20 alone"),
        ({"extractor": {"chunk_length": 30}}, "preprocessor_config.json: chunk_length=30: the encoder has positions"),
    ],
)
def test_what_ours_has_not_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        settings({**read_config(str(FOLDER)), **changes})
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


def test_padded_recordings_are_whole_llm_tokens() -> None:
    with pytest.raises(ConfigError, match=r"Whisper\.merge=4: must divide Whisper\.length, .* \(50\), such as 5"):
        replace(configured(), merge=4)


def test_a_folder_proposes_the_padding_and_decides_the_rest(tmp_path: Path) -> None:
    path = write_tiny(tmp_path)
    own = ["Model.encoders={'vision': 'vit', 'audio': 'whisper'}", f"audio/Weights.path={str(FOLDER)!r}"]
    own += ["audio/Layout.rank_offset=4", "audio/Whisper.merge=5"]
    config = load_config([path], own)
    assert config.model["audio"].settings == replace(configured(), merge=5)
    assert not load_config([path], [*own, "audio/Whisper.pad=False"]).model["audio"].settings.pad
    with pytest.raises(ConfigError, match=r"audio/Whisper\.edges='silent': .* has 'reflected'; leave the setting out"):
        load_config([path], [*own, "audio/Whisper.edges='silent'"])
    saved = tmp_path / "config.gin"
    saved.write_text(operative_config(config).replace(str(FOLDER), "moved away"))
    again = load_config([saved])
    assert all(again.model[name].settings == node.settings for name, node in config.model.nodes.items())
