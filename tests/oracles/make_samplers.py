"""Makes ``samplers.npz``: what the schedulers of ``diffusers`` make of noise with a fixed predictor.

    python tests/oracles/make_samplers.py

It needs torch and diffusers, which mmjax does not. The predictor is arithmetic that a test repeats. For each case the
file has the timesteps at which it is called, and the patches after every step; for a ddpm also a mixture, a v and the
shares of the medium.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch

OUT = Path(__file__).with_name("samplers.npz")
SD: dict[str, Any] = {
    **{"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"},
    "steps_offset": 1,
}
DDIM: dict[str, Any] = {**SD, "clip_sample": False, "set_alpha_to_one": False}
QWEN: dict[str, Any] = {
    **{"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192},
    "shift_terminal": 0.02,
}
V: dict[str, Any] = {"prediction_type": "v_prediction"}
CASES: dict[str, tuple[str, dict[str, Any], int, float]] = {
    # The scheduler, its settings, the number of steps, and eta.
    "ddim noise": ("DDIMScheduler", DDIM, 7, 0.0),
    "ddim noise, eta": ("DDIMScheduler", DDIM, 7, 0.6),
    "ddim v, trailing, zero": (
        "DDIMScheduler", {**DDIM, **V, "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}, 6, 0.0,
    ),
    "ddim sample, cosine, clipped": (
        "DDIMScheduler", {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "sample",
                          "timestep_spacing": "linspace"}, 5, 0.0,
    ),
    "ddim linear": ("DDIMScheduler", {"num_train_timesteps": 50, "clip_sample": False}, 50, 1.0),
    "dpm noise": ("DPMSolverMultistepScheduler", SD, 8, 0.0),
    "dpm v, leading": ("DPMSolverMultistepScheduler", {**SD, **V, "timestep_spacing": "leading"}, 20, 0.0),
    "dpm v, trailing, zero": (
        "DPMSolverMultistepScheduler",
        {**SD, **V, "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}, 6, 0.0,
    ),
    "dpm sample, one step": ("DPMSolverMultistepScheduler", {**SD, "prediction_type": "sample"}, 1, 0.0),
    "flow": ("FlowMatchEulerDiscreteScheduler", {}, 6, 0.0),
    "flow, shifted": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}, 6, 0.0),
    "flow, by patches": ("FlowMatchEulerDiscreteScheduler", QWEN, 8, 0.0),
}  # fmt: skip
SHAPE = (2, 6, 4)
PATCHES = 3
"""Patches of a picture in the test; the flow's shift follows from their number."""


def predicted(x: Any, time: float) -> Any:
    """What the predictor says of patches at a time in 0…1."""
    return 0.6 * x + 0.3 * (x * x - 1) * time - 0.2


def main() -> None:
    rng, arrays = np.random.default_rng(33), dict[str, np.ndarray]()
    arrays["noise"] = rng.standard_normal(SHAPE, np.float32)
    arrays["medium"] = rng.uniform(-1, 1, SHAPE).astype(np.float32)
    configs = {}
    for name, (kind, settings, steps, eta) in CASES.items():
        scheduler = getattr(diffusers, kind)(**settings)
        x, told = torch.from_numpy(arrays["noise"]), []
        is_flow = kind.startswith("Flow")
        if is_flow:
            base, most = (scheduler.config.base_image_seq_len, scheduler.config.max_image_seq_len)
            slope = (scheduler.config.max_shift - scheduler.config.base_shift) / (most - base)
            mu = PATCHES * slope + scheduler.config.base_shift - slope * base  # pipelines' calculate_shift
            sigmas = np.linspace(1.0, 1 / steps, steps)
            scheduler.set_timesteps(sigmas=sigmas, mu=mu if settings.get("use_dynamic_shifting") else None)
        else:
            scheduler.set_timesteps(steps)
            arrays[f"{name}: kept"] = scheduler.alphas_cumprod.numpy()
            times = torch.tensor([3, scheduler.config.num_train_timesteps // 2])
            medium, noise = torch.from_numpy(arrays["medium"]), torch.from_numpy(arrays["noise"])
            if hasattr(scheduler, "get_velocity"):
                arrays[f"{name}: mixed"] = scheduler.add_noise(medium, noise, times).numpy()
                arrays[f"{name}: v"] = scheduler.get_velocity(medium, noise, times).numpy()
        for step, timestep in enumerate(scheduler.timesteps):
            share = float(timestep) / scheduler.config.num_train_timesteps
            more = {}
            if eta:
                fresh = np.random.default_rng([33, step]).standard_normal(SHAPE, np.float32)
                more = {"eta": eta, "variance_noise": torch.from_numpy(fresh)}
            x = scheduler.step(predicted(x, share), timestep, x, **more).prev_sample
            told.append(x.numpy())
        arrays[f"{name}: times"] = scheduler.timesteps.numpy()
        arrays[f"{name}: told"] = np.stack(told)
        configs[name] = {
            **{key: value for key, value in scheduler.config.items() if key != "lambda_min_clipped"},
            **{"_class_name": kind, "steps": steps, "eta": eta},
        }
    arrays["configs"] = np.asarray(json.dumps(configs))
    arrays["versions"] = np.asarray(json.dumps({"torch": torch.__version__, "diffusers": diffusers.__version__}))
    np.savez_compressed(OUT, **arrays)  # pyright: ignore[reportArgumentType]
    print(OUT.stat().st_size)


if __name__ == "__main__":
    main()
