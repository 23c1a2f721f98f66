"""Pipelines of ``diffusers`` as the start of a generator: its parts are read, and given back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from trial_runs import assert_same_tensors, save_untrained, write_tiny

from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.export import __main__ as export
from mmjax.recipe import Recipe

ORACLES = Path(__file__).parent / "oracles"
PYTHON = os.environ.get("ORACLE_PYTHON", sys.executable)
FLOW = {
    **{"_class_name": "FlowMatchEulerDiscreteScheduler", "_diffusers_version": "0.42.1", "use_dynamic_shifting": True},
    **{"max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02, "num_train_timesteps": 1000},
}
STABLE = {
    **{"_class_name": "PNDMScheduler", "beta_start": 0.001, "beta_end": 0.02, "beta_schedule": "linear"},
    **{"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "steps_offset": 1, "skip_prk_steps": True},
}
SETTINGS = ("Digits.draw=1.0", "painter/Layout.rank_offset=4", "Train.eval_samples=0", "Data.sequence_length=64")
OF_TRANSFORMER = (
    *("Model.generators={'painter': 'mmdit'}", "painter/MMDiT.queries=2", "llm/Decoder.width=12", *SETTINGS),
    *("llm/Decoder.heads=2", "llm/Decoder.kv_heads=2"),
)
OF_UNET = (
    "Model.generators={'painter': 'unet'}",
    "painter/UNet.queries=2",
    "painter/UNet.canvases=((8, 8),)",
    *SETTINGS,
)


def pipeline(folder: Path, denoiser: str, scheduler: Mapping[str, Any]) -> Path:
    """A pipeline's folder; that of a transformer has an autoencoder."""
    parts = {"transformer": ORACLES / "mmdit", "unet": ORACLES / "unet" / "tiny"}
    path = folder / "pipeline"
    shutil.copytree(parts[denoiser], path / denoiser)
    if denoiser == "transformer":
        shutil.copytree(ORACLES / "autoencoder" / "kl", path / "vae")
    (path / "scheduler").mkdir()
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    (path / "model_index.json").write_text(json.dumps({"_class_name": "QwenImagePipeline"}))
    return path


def with_transformer(folder: Path, *bindings: str) -> Recipe:
    path = folder / "pipeline"
    starts = (f"painter/Weights.path='{path}'", f"painter_projector/Weights.path='{path}'")
    return load_config([write_tiny(folder)], [*OF_TRANSFORMER, *starts, *bindings])


def with_unet(folder: Path, *bindings: str) -> Recipe:
    return load_config([write_tiny(folder)], [*OF_UNET, f"painter/Weights.path='{folder / 'pipeline'}'", *bindings])


def test_denoiser_scheduler_and_autoencoder_are_read(tmp_path: Path) -> None:
    path = pipeline(tmp_path, "transformer", FLOW)
    recipe = with_transformer(tmp_path, "painter/MMDiT.max_shift=0.8")
    node = recipe.model["painter"]
    settings = node.settings
    assert (settings.layers, settings.process, settings.sampler) == (2, "flow", "euler")
    assert (settings.dynamic_shift, settings.max_patches, settings.terminal_time) == (True, 8192, 0.02)
    assert settings.max_shift == 0.8  # one's own setting goes before the scheduler's
    assert recipe.folders == (str(path / "transformer"),)
    assert node.latents.autoencoder == str(path / "vae")
    assert with_transformer(tmp_path, "painter/Latents.autoencoder=''").model["painter"].latents.autoencoder == ""


def test_a_ddpms_scheduler_is_read_unless_the_noise_is_another_process(tmp_path: Path) -> None:
    pipeline(tmp_path, "unet", STABLE)
    settings = with_unet(tmp_path).model["painter"].settings
    assert (settings.process, settings.prediction, settings.sampler) == ("ddpm", "v", "ddim")
    assert (settings.betas, settings.beta_start, settings.zero_snr, settings.end_clean) == (
        "linear",
        0.001,
        True,
        False,
    )
    flow = with_unet(tmp_path, *(f"painter/UNet.{line}" for line in ("process='flow'", "prediction='velocity'")))
    assert (flow.model["painter"].settings.beta_start, flow.model["painter"].settings.sampler) == (0.00085, "euler")


def test_refused_in_one_line(tmp_path: Path) -> None:
    path = pipeline(tmp_path, "unet", {**STABLE, "_class_name": "LCMScheduler"})
    with pytest.raises(ConfigError, match=r"^painter/Weights.path=.*: scheduler/.*'LCMScheduler'.*name .*/unet alone"):
        with_unet(tmp_path)
    with pytest.raises(ConfigError, match=r"^Model.weights=.* is a pipeline of diffusers; name it in Weights.path of"):
        with_unet(tmp_path, f"Model.weights='{path}'")
    shutil.copytree(path / "unet", path / "transformer")
    with pytest.raises(ConfigError, match=r"^painter/Weights.path=.*with transformer/ and unet/; name one of them"):
        with_unet(tmp_path)
    shutil.rmtree(path / "transformer")
    shutil.rmtree(path / "unet")
    with pytest.raises(ConfigError, match=r"^painter/Weights.path=.*with no denoiser; get the model again"):
        with_unet(tmp_path)


def files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


@pytest.mark.long
def test_out_of_in_is_the_same_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All files are there again, tensors and settings are equal; what was set otherwise is in the scheduler."""
    path, out = pipeline(tmp_path, "transformer", FLOW), tmp_path / "out"
    without = "painter/Latents.autoencoder=''"  # digits are drawn as they are
    run = save_untrained(with_transformer(tmp_path, without), tmp_path / "run")
    assert run[0].startswith(f"painter, painter_projector: parameters of {path}/transformer (")
    argv = ["--format=safetensors", f"--run_dir={tmp_path / 'run'}"]
    assert export.main([*argv, f"--out={out}"]) == 1
    assert f"{out}/transformer: painter, painter_projector" in capsys.readouterr().out
    assert files(out) == files(path)
    for file in sorted((path / "transformer").glob("*.safetensors")):
        assert_same_tensors(out / "transformer" / file.name, file)
    assert json.loads((out / "scheduler" / "scheduler_config.json").read_text()) == FLOW
    shutil.rmtree(path)
    shutil.copytree(out, path)
    save_untrained(with_transformer(tmp_path, without, "painter/MMDiT.max_shift=0.8"), tmp_path / "again")
    assert export.main([*argv[:1], f"--run_dir={tmp_path / 'again'}", f"--out={tmp_path / 'changed'}"]) == 1
    scheduler = json.loads((tmp_path / "changed" / "scheduler" / "scheduler_config.json").read_text())
    assert {**scheduler, "max_shift": 0.9}.items() >= FLOW.items() and scheduler["max_shift"] == 0.8


LOADED = """
import sys, diffusers, numpy, torch
path, original, denoiser, scheduler = sys.argv[1:]
kind = {"transformer": diffusers.QwenImageTransformer2DModel, "unet": diffusers.UNet2DConditionModel}[denoiser]
first, second = (kind.from_pretrained(folder, subfolder=denoiser).state_dict() for folder in (path, original))
assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
kind = getattr(diffusers, scheduler)
made, was = (kind.from_pretrained(folder, subfolder="scheduler") for folder in (path, original))
if denoiser == "unet":
    assert made.config["beta_end"] == 0.03 and was.config["beta_end"] == 0.02
    assert made.config["prediction_type"] == "v_prediction" and made.config["rescale_betas_zero_snr"]
else:
    assert made.config == was.config
    made.set_timesteps(5, mu=0.7)
    assert abs(float(made.sigmas[-2]) - 0.02) < 1e-6
print("loaded")
"""


@pytest.mark.slow
@pytest.mark.parametrize("denoiser", ["transformer", "unet"])
def test_diffusers_loads_what_is_given_back(denoiser: str, tmp_path: Path) -> None:
    if subprocess.run([PYTHON, "-c", "import torch, diffusers"], capture_output=True, check=False).returncode:
        pytest.skip("neither this Python nor ORACLE_PYTHON has torch and diffusers")
    scheduler = FLOW if denoiser == "transformer" else {**STABLE, "_class_name": "DDIMScheduler"}
    path, out = pipeline(tmp_path, denoiser, scheduler), tmp_path / "out"
    without = "painter/Latents.autoencoder=''"
    recipe = with_transformer(tmp_path, without) if denoiser == "transformer" else None
    save_untrained(recipe or with_unet(tmp_path, "painter/UNet.beta_end=0.03"), tmp_path / "run")
    export.main(["--format=safetensors", f"--run_dir={tmp_path / 'run'}", f"--out={out}"])
    asked = [PYTHON, "-c", LOADED, str(out), str(path), denoiser, str(scheduler["_class_name"])]
    ran = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert ran.stdout == "loaded\n", ran.stderr[-2000:]
