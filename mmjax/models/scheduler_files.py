"""Settings of schedulers of ``diffusers``, the files ``scheduler/scheduler_config.json``, and back. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmjax.configurable import ConfigError, one_of
from mmjax.models.diffusion import Diffusion
from mmjax.weights.pipelines import SCHEDULER, SCHEDULER_FILE, Pipeline

_FLOW = "FlowMatchEulerDiscreteScheduler"
_SAMPLERS = {
    _FLOW: "euler",
    "DDIMScheduler": "ddim",
    "DPMSolverMultistepScheduler": "dpm++",
    "DDPMScheduler": "ddim",
    "PNDMScheduler": "ddim",
    "EulerDiscreteScheduler": "ddim",
}
"""The sampler of each class; of the last three, whose noise process alone is read, it is DDIM."""
_PREDICTIONS = {"epsilon": "noise", "v_prediction": "v", "sample": "sample"}
_FLOW_KEYS = {
    "shift": ("shift", 1.0),
    "use_dynamic_shifting": ("dynamic_shift", False),
    "base_shift": ("base_shift", 0.5),
    "max_shift": ("max_shift", 1.15),
    "base_image_seq_len": ("base_patches", 256),
    "max_image_seq_len": ("max_patches", 4096),
    "shift_terminal": ("terminal_time", None),
}
"""Our setting and their default, by key of a flow."""
_DDPM_KEYS = {
    "num_train_timesteps": ("train_steps", 1000),
    "beta_start": ("beta_start", 0.0001),
    "beta_end": ("beta_end", 0.02),
    "beta_schedule": ("betas", "linear"),
    "rescale_betas_zero_snr": ("zero_snr", False),
    "steps_offset": ("steps_offset", 0),
}
"""The same of a ddpm."""
_SPACINGS = {"DPMSolverMultistepScheduler": "linspace", "EulerDiscreteScheduler": "linspace"}
"""The default of "timestep_spacing" by class, where it is not "leading"."""
_ENDS_CLEAN = {"PNDMScheduler": False}
"""The default of "set_alpha_to_one" by class, where it is not True."""
_CLIPS = ("DDIMScheduler", "DDPMScheduler")
"""Classes that clip the medium that they predict, unless "clip_sample" is False."""
_ALONE: Mapping[str, tuple[Any, ...]] = {
    "trained_betas": (None,),
    "thresholding": (False,),
    "solver_order": (2,),
    "algorithm_type": ("dpmsolver++",),
    "solver_type": ("midpoint",),
    "euler_at_final": (False,),
    "use_karras_sigmas": (False, None),
    "use_exponential_sigmas": (False, None),
    "use_beta_sigmas": (False, None),
    "use_lu_lambdas": (False, None),
    "use_flow_sigmas": (False, None),
    "final_sigmas_type": ("zero",),
    "lambda_min_clipped": (float("-inf"),),
    "variance_type": (None, "fixed_small", "fixed_large"),
    "invert_sigmas": (False,),
    "time_shift_type": ("exponential",),
    "stochastic_sampling": (False,),
    "interpolation_type": ("linear",),
    "timestep_type": ("discrete",),
}
"""The values of further keys with which a scheduler does what ours do."""


def scheduler_settings(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of ``Diffusion`` that a scheduler's file sets, by name: {"process": "ddpm", "prediction": "v", …}.

    Args:
      config: the content of ``scheduler_config.json``.
      name: the file, for errors.

    Raises:
      ConfigError: the scheduler, or a value of it, is none that mmjax has.
    """
    kind = str(config.get("_class_name", ""))
    one_of(f"{name}: _class_name", kind, _SAMPLERS)
    for key, legal in _ALONE.items():
        if key in config and config[key] not in legal:
            raise ConfigError(f"{name}: {key}={config[key]!r}: mmjax's samplers have {legal[0]!r} alone")
    if kind == _FLOW:
        read = {field: config.get(key, default) for key, (field, default) in _FLOW_KEYS.items()}
        read["terminal_time"] = read["terminal_time"] or 0.0
        if read["dynamic_shift"]:
            read["shift"] = 1.0
        return {"process": "flow", "prediction": "velocity", "sampler": "euler", **read}
    prediction = config.get("prediction_type", "epsilon")
    one_of(f"{name}: prediction_type", prediction, _PREDICTIONS)
    clips = config.get("clip_sample", kind in _CLIPS)
    return {
        "process": "ddpm",
        "prediction": _PREDICTIONS[prediction],
        "sampler": _SAMPLERS[kind],
        "spacing": config.get("timestep_spacing", _SPACINGS.get(kind, "leading")),
        "end_clean": config.get("set_alpha_to_one", _ENDS_CLEAN.get(kind, True)),
        "clip": float(config.get("clip_sample_range", 1.0)) if clips and _SAMPLERS[kind] == "ddim" else 0.0,
        **{field: config.get(key, default) for key, (field, default) in _DDPM_KEYS.items()},
    }


def pipeline_settings(pipeline: Pipeline) -> dict[str, Any]:
    """The fields of ``Diffusion`` that a pipeline's scheduler sets, by name; {} if the pipeline has none.

    Raises:
      ConfigError: the scheduler is none that mmjax has; the message names the file in the pipeline.
    """
    config = pipeline.scheduler()
    return scheduler_settings(config, f"{SCHEDULER}/{SCHEDULER_FILE}") if config else {}


def changed_scheduler(config: Mapping[str, Any], settings: Diffusion) -> dict[str, Any]:
    """The content of a scheduler's file with these settings: equal to ``config`` where it has them already.

    Args:
      config: the file's content before; {} for a new one.
      settings: the settings.
    """
    written = scheduler_config(settings)
    if not config:
        return written
    before = scheduler_settings(config, SCHEDULER_FILE)
    if all(getattr(settings, field) == value for field, value in before.items()):
        return dict(config)
    kind = str(config["_class_name"])
    return {**config, **written, "_class_name": kind if _SAMPLERS[kind] == settings.sampler else written["_class_name"]}


def scheduler_config(settings: Diffusion) -> dict[str, Any]:
    """The content of ``scheduler_config.json`` for these settings; ``scheduler_settings`` reads the same of it."""
    kind = next(kind for kind, sampler in _SAMPLERS.items() if sampler == settings.sampler)
    keys = _FLOW_KEYS if settings.process == "flow" else _DDPM_KEYS
    written = {"_class_name": kind, **{key: getattr(settings, field) for key, (field, _) in keys.items()}}
    if settings.process == "flow":
        return written | {"num_train_timesteps": 1000, "shift_terminal": settings.terminal_time or None}
    prediction = next(theirs for theirs, ours in _PREDICTIONS.items() if ours == settings.prediction)
    written |= {"prediction_type": prediction, "timestep_spacing": settings.spacing}
    if settings.sampler != "ddim":
        return written
    clips = {"clip_sample": settings.clip > 0, "clip_sample_range": settings.clip or 1.0}
    return written | {"set_alpha_to_one": settings.end_clean, **clips}
