"""The first steps of ``configs/digits_vlm_one_device.gin`` as a user trains it, beside the losses of a CPU."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from mmjax.bench.gpu.job import Job
from mmjax.bench.gpu.kept import kept, values_of
from mmjax.bench.gpu.parity import matmul_precision
from mmjax.config import config_of_values, load_config
from mmjax.config.shipped import CONFIGS
from mmjax.recipe import Recipe
from mmjax.train.trainer import Trainer

FILE = "digits_vlm_one_device.gin"
STEPS, FEW = 50, 10
LIMITS = {FEW: 1e-4, STEPS: 2e-2}
"""Limit on the largest relative difference of a loss, by number of steps. Training amplifies rounding."""


def run(job: Job) -> None:
    """Trains with products in fp32, whose losses have to agree with the kept ones, and as XLA chooses (TF32 on a GPU).

    Notes losses and seconds of each.
    """
    expected = kept()["digits"]
    recipe = config_of_values(expected["config"])
    steps = 2 if job.small else STEPS
    precisions = ("highest",) if job.small else ("highest", "")
    for precision in job.while_time(precisions, lambda precision: precision or "as XLA chooses", reserve=1.2):
        with matmul_precision(precision):
            losses, timings = train(recipe, steps)
        gaps = [abs(a - b) / abs(b) for a, b in zip(losses, expected["losses"], strict=False)]
        within = {str(few): max(gaps[:few]) for few in LIMITS if few <= steps}
        way = precision or "as XLA chooses"
        job.note(**{way: {"losses": losses, "within": within or {str(steps): max(gaps)}, **timings}})
        if precision:
            for few, limit in LIMITS.items():
                job.check(f"losses of {min(few, steps)} steps", max(gaps[:few]) <= limit)


def train(recipe: Recipe, steps: int) -> tuple[list[float], dict[str, float]]:
    """Trains ``steps`` steps, 2 or more, without a run directory.

    Returns:
      The loss of each step, and "first_step_seconds", set-up and compilation included, and "step_seconds", the mean of
      the later ones.
    """
    start, ends = time.perf_counter(), list[float]()
    with Trainer(recipe, style="silent") as trainer:
        losses = list[float]()
        for step in (1, steps):
            losses += trainer.train(step).losses
            ends.append(time.perf_counter())
    each = statistics.fmean([ends[1] - ends[0]]) / max(1, steps - 1)
    return losses, {"first_step_seconds": ends[0] - start, "step_seconds": each}


def expected() -> dict[str, Any]:
    """The kept results: {"config": values of the configuration, "losses": its losses on this CPU}."""
    config = trained_config()
    return {"config": values_of(config), "losses": train(config, STEPS)[0]}


def trained_config() -> Recipe:
    """The configuration of ``FILE``, without evaluation and data workers, on one device of any platform."""
    recipe = load_config([CONFIGS / FILE])
    return replace(
        recipe,
        train=replace(recipe.train, eval_samples=0, eval_every=0),
        data=recipe.data.with_settings(workers=0),
        world=replace(recipe.world, platform="", devices=1),
    )
