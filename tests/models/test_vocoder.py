"""Vocoders of folders of transformers, against torch; and log-mel frames as they read them."""

from __future__ import annotations

import json
import shutil
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mmjax.assembly.vocoders import Recording, Vocoders
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.log_mel import LogMel
from mmjax.models.vocoder.hifigan import HifiGan

FOLDER = Path(__file__).parents[1] / "oracles" / "vocoder"
VALUES = np.load(FOLDER / "values.npz")
BINDINGS = (
    *("Model.encoders={}", "Model.generators={'talker': 'sound-dit'}", "Data.sources={'mine': 1.0}"),
    *("mine/Source.path='data.json'", "talker/SoundDiT.mels=5", "talker/SoundDiT.sample_rate=4000"),
    *("talker/SoundDiT.window=40", "talker/SoundDiT.hop=10"),
)


def recipe(*changes: str) -> Any:
    return load_config([], [*BINDINGS, *changes])


def test_the_waveform_is_torchs() -> None:
    made = HifiGan.read(str(FOLDER)).waveform(VALUES["frames"])
    assert made.shape == VALUES["waveform"].shape and 0.05 < np.abs(made).max() < 0.999
    np.testing.assert_allclose(made, VALUES["waveform"], atol=1e-4 * np.abs(made).max())


def test_weight_norm_that_was_not_removed(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "folder")
    tensors = load_file(tmp_path / "folder" / "model.safetensors")
    for key in [key for key in tensors if key.endswith("weight")]:
        kernel, stem = tensors.pop(key), key.removesuffix("weight")
        tensors[f"{stem}weight_g"] = np.sqrt(np.square(kernel).sum((1, 2), keepdims=True))
        tensors[f"{stem}weight_v"] = 3 * kernel
    save_file(tensors, tmp_path / "folder" / "model.safetensors")
    made = HifiGan.read(str(tmp_path / "folder")).waveform(VALUES["frames"])
    np.testing.assert_allclose(made, VALUES["waveform"], atol=1e-4)


def test_frames_are_speecht5s() -> None:
    log_mel = LogMel(
        sample_rate=16000, window=1024, hop=256, mels=80, low=80.0, high=7600.0, log="log10", edges="reflected"
    )
    frames_FM = log_mel(VALUES["sound"])
    inner = len(frames_FM) - 4  # behind them the recording is mirrored at another sample
    np.testing.assert_allclose(frames_FM[:inner], VALUES["logs"][:inner], atol=2e-5)
    scaled = replace(log_mel, mean=-2.0, std=1.5)(VALUES["sound"])
    np.testing.assert_allclose(scaled[:inner], (VALUES["logs"][:inner] + 2) / 1.5, atol=2e-5)


def test_a_recording_of_a_run(tmp_path: Path) -> None:
    vocoders = Vocoders.of(recipe(f"talker/Vocoder.path={str(FOLDER)!r}"))
    frames_FM = (VALUES["frames"] + 2) / 2  # SoundDiT.mean and std
    made = vocoders.recording("talker", frames_FM)
    np.testing.assert_allclose(made.samples, VALUES["waveform"], atol=1e-4)
    assert Vocoders.of(recipe()).recording("talker", frames_FM).samples.shape == (70,)
    made.write(tmp_path / "a.wav")
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert file.getparams()[:4] == (1, 2, 4000, 70)
        levels = np.frombuffer(file.readframes(70), "<i2")
    np.testing.assert_allclose(levels / 32767, made.samples, atol=2e-5)
    Recording(np.asarray([2.0, -np.inf, np.nan]), 8).write(tmp_path / "b.wav")
    with wave.open(str(tmp_path / "b.wav")) as file:
        assert np.frombuffer(file.readframes(3), "<i2").tolist() == [32767, -32767, 0]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (("talker/SoundDiT.mels=6",), "'talker' has mels 6, and the vocoder 5; train with that, or name another"),
        (("talker/SoundDiT.hop=20",), "'talker' has hop 20, and the vocoder 10; train with that, or name another"),
        (("talker/SoundDiT.log='whisper'",), "'talker' makes frames of log='whisper'"),
    ],
)
def test_another_vocoder_than_the_frames(changes: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Vocoders.of(recipe(f"talker/Vocoder.path={str(FOLDER)!r}", *changes))
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_folders_of_other_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ConfigError, match=r"mmjax reads vocoders of the class SpeechT5HifiGan"):
        Vocoders.of(recipe(f"talker/Vocoder.path={str(tmp_path)!r}"))
    shutil.copytree(FOLDER, tmp_path / "folder")
    tensors = load_file(tmp_path / "folder" / "model.safetensors")
    tensors.pop("conv_post.bias")
    save_file(tensors, tmp_path / "folder" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"conv_post.bias must be \[1\], and the folder has none"):
        HifiGan.read(str(tmp_path / "folder"))
