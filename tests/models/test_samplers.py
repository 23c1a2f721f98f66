"""Samplers make of noise what the schedulers of diffusers make of it, whose files are read and written."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from trial_runs import REPOSITORY

from mmjax.configurable import ConfigError
from mmjax.models.diffusion import Diffusion
from mmjax.models.samplers import PatchNoise
from mmjax.models.scheduler_files import scheduler_config, scheduler_settings

ORACLE = dict(np.load(REPOSITORY / "tests/oracles/samplers.npz"))
CONFIGS: dict[str, dict[str, Any]] = json.loads(str(ORACLE["configs"]))


def diffusion(name: str) -> Diffusion:
    """The settings that the scheduler's file of a case says."""
    config = CONFIGS[name]
    made = Diffusion(**scheduler_settings(config, name), steps=config["steps"], eta=config["eta"])
    made.check_diffusion("DiT")
    return made


def predicted(x: np.ndarray, share: np.ndarray) -> np.ndarray:
    """The predictor of the oracle."""
    return (0.6 * x + 0.3 * (x * x - 1) * share - 0.2).astype(np.float32)


def microbatch(noise: np.ndarray, pictures: int = 2) -> dict[str, np.ndarray]:
    """Host inputs of rows with so many pictures, and padding behind them."""
    rows, count, _ = noise.shape
    segments = np.repeat(np.arange(1, pictures + 1), count // pictures)[None].repeat(rows, 0)
    padded = np.pad(noise, ((0, 0), (0, 2), (0, 0)))
    return {
        "patches": padded,
        "segments": np.pad(segments, ((0, 0), (0, 2))).astype(np.int32),
        "times": np.zeros(padded.shape[:2], np.float32),
        "index": np.arange(rows * 4).reshape(rows, 4),
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_the_path_from_noise_is_the_schedulers(name: str) -> None:
    settings, noise = diffusion(name), ORACLE["noise"]
    told, times, passed = [], [], microbatch(noise)
    scale = settings.noising.time_scale

    def predict(inputs: Any) -> list[np.ndarray]:
        (of_one,) = inputs
        np.testing.assert_array_equal(of_one["index"], passed["index"])
        assert of_one["times"].dtype == np.float32 and of_one["patches"].dtype == np.float32
        told.append(of_one["patches"][:, : noise.shape[1]])
        times.append(of_one["times"])
        return [predicted(of_one["patches"], of_one["times"][..., None] / scale)]

    if settings.eta:
        fresh = [np.random.default_rng([33, step]).standard_normal(noise.shape, np.float32) for step in range(99)]
        updates, x = settings.drawing.updates(passed | {"patches": noise}, noise=fresh.__getitem__), noise
        for step in range(settings.steps):
            times.append(np.full(passed["times"].shape, updates.time(step)))
            told.append(x)
            x = updates(step, x, predicted(x, np.asarray(updates.time(step) / scale)))
        told.append(x)
    else:
        (last,) = settings.drawing.draw([passed], predict)
        told.append(last[:, : noise.shape[1]])
    wanted = ORACLE[f"{name}: told"]
    np.testing.assert_array_equal(told[0], noise)
    for got, want in zip(told[1:], wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    shown = [time[0, 0] * (1 if scale > 1 else 1000) for time in times]
    np.testing.assert_allclose(shown, ORACLE[f"{name}: times"], rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith("flow")])
def test_mixtures_and_targets_are_the_schedulers(name: str) -> None:
    process, oracle = diffusion(name).noising, ORACLE
    kept = process.signal_shares if "dpm v, trailing" not in name else np.append(process.signal_shares[:-1], 2.0**-24)
    np.testing.assert_allclose(kept, oracle[f"{name}: kept"], rtol=1e-4, atol=1e-7)
    if f"{name}: v" not in oracle:
        return
    learned = replace(process, prediction="v")
    for row, time in enumerate((3, process.train_steps // 2)):
        medium, noise = oracle["medium"][row], oracle["noise"][row]
        np.testing.assert_allclose(learned.mixture(medium, noise, time), oracle[f"{name}: mixed"][row], atol=1e-5)
        np.testing.assert_allclose(learned.target(medium, noise, time), oracle[f"{name}: v"][row], atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_schedulers_file_is_written_back(name: str) -> None:
    settings = scheduler_settings(CONFIGS[name], name)
    assert scheduler_settings(scheduler_config(Diffusion(**settings)), name) == settings
    assert settings.keys() <= {field.name for field in fields(Diffusion)}


def test_schedulers_that_mmjax_has_not_are_refused() -> None:
    for change, named in (
        ({"_class_name": "LCMScheduler"}, "_class_name='LCMScheduler'"),
        ({"thresholding": True}, "thresholding=True"),
        ({"solver_order": 3}, "solver_order=3"),
        ({"prediction_type": "flow_prediction"}, "prediction_type='flow_prediction'"),
        ({"use_karras_sigmas": True}, "use_karras_sigmas=True"),
    ):
        with pytest.raises(ConfigError, match=f"scheduler.json: {named}"):
            scheduler_settings({**CONFIGS["dpm noise"], **change}, "scheduler.json")


def test_published_files_are_read() -> None:
    """Stable Diffusion 2.1 (v, DDIM), 2.1-base (noise, PNDM) and Qwen-Image."""
    linear = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
    stable = {**linear, "clip_sample": False, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1}
    v = scheduler_settings({**stable, "_class_name": "DDIMScheduler", "prediction_type": "v_prediction"}, "x")
    base = scheduler_settings({**stable, "_class_name": "PNDMScheduler"}, "x")
    assert (v["prediction"], base["prediction"]) == ("v", "noise")
    assert {**v, "prediction": ""} == {**base, "prediction": ""}
    assert (v["sampler"], v["clip"], v["end_clean"], v["steps_offset"]) == ("ddim", 0.0, False, 1)
    assert Diffusion(**{**v, "prediction": "velocity", "process": "flow", "sampler": "euler"}).betas == "scaled_linear"
    qwen = {"_class_name": "FlowMatchEulerDiscreteScheduler", "max_image_seq_len": 8192, "max_shift": 0.9}
    flow = scheduler_settings({**qwen, "use_dynamic_shifting": True, "shift_terminal": 0.02}, "x")
    assert (flow["dynamic_shift"], flow["max_patches"], flow["terminal_time"]) == (True, 8192, 0.02)


def test_the_shift_of_a_picture_is_that_of_its_own_patches() -> None:
    """In a row of several pictures each has the times that it has alone."""
    sampler = diffusion("flow, by patches").drawing
    segments = np.array([[1] * 2 + [2] * 6 + [0]], np.int32)
    patches = np.zeros((1, 9, 4), np.float32)
    row = {"segments": segments, "patches": patches, "times": np.zeros((1, 9), np.float32)}
    seen = []
    sampler.draw([row], lambda inputs: [seen.append(inputs[0]["times"][0]) or patches])  # type: ignore[func-returns-value]
    for step, times in enumerate(seen):
        want = [sampler.flow_times(2)[step]] * 2 + [sampler.flow_times(6)[step]] * 6
        np.testing.assert_allclose(times[:8], want, rtol=1e-6)
    assert not np.allclose(sampler.flow_times(2), sampler.flow_times(6), rtol=1e-4)


def test_fresh_noise_belongs_to_a_patch_not_to_its_place() -> None:
    noise = np.random.default_rng(0).standard_normal((2, 3, 4), np.float32)
    first, moved = PatchNoise(noise), PatchNoise(noise[::-1, ::-1])
    steps = np.stack([first(step) for step in range(200)])
    np.testing.assert_array_equal(steps[:, ::-1, ::-1], np.stack([moved(step) for step in range(200)]))
    assert abs(steps.mean()) < 0.05 and abs(steps.std() - 1) < 0.05
    assert len(np.unique(steps)) > 0.99 * steps.size
