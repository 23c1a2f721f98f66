"""Losses of bf16 runs under different layouts, beside each other and beside fp32 on one device.

Layouts sum in different orders and bf16 rounds every sum to three digits, so curves part, and training amplifies the
differences. Two limits: the difference stays a small part of the fall of the loss, and two layouts differ from each
other hardly more than bf16 differs from fp32. A layout must not cost accuracy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mmjax.bench.rows import Row, at_most
from mmjax.config import load_config
from mmjax.config.shipped import CONFIGS
from mmjax.train.trainer import Trainer
from mmjax.viz.figures import finished

STEPS = 200
EXACT = "one device, fp32"
RUNS = {
    "homogeneous, bf16": ("digits_vlm_homogeneous.gin", "bfloat16"),
    "colocated, bf16": ("digits_vlm_colocated.gin", "bfloat16"),
    "non-colocated, bf16": ("digits_vlm.gin", "bfloat16"),
    EXACT: ("digits_vlm_one_device.gin", "float32"),
}
"""Configuration and compute dtype by case. Parameters and moments are fp32 everywhere."""
SMALLER = (
    "Train.global_batch=32",
    "Digits.images=(1, 1)",
    "Digits.digits=(1, 1)",
    "Digits.scale=(1.0, 1.0)",
    "Digits.aspect=(1.0, 1.0)",
    "Digits.turns=1",
    "Digits.curriculum=()",
    "Data.sequence_length=32",
    "vision/Packing.buckets=()",
    "Optimizer.warmup=20",
    "Train.eval_samples=0",
    "World.devices=8",
)
"""Bindings that make the task smaller: half the batch, one image of one digit; 200 steps are enough to learn it."""
LARGEST, MEAN = 0.03, 0.01
"""Limits on the largest and the mean difference of smoothed losses, as a share of the fall of the fp32 loss."""
RATIO = 1.5
"""Limit on the mean difference between two layouts over that between bf16 and fp32.

It is 1 where all four runs differ alike, and at most 2, where two layouts lie on either side of fp32.
"""
WINDOW = 9
"""Number of steps whose mean loss is compared: the noise of single batches is large, and the same in all runs."""

Curves = Mapping[str, Float[np.ndarray, " steps"]]
"""Loss of every step by case."""


def bench_bf16(rounds: int) -> Iterator[Row]:
    """Trains every case once, whatever ``rounds`` is: the same batches give the same losses again."""
    yield from rows(train())


def train(steps: int = STEPS) -> dict[str, Float[np.ndarray, " steps"]]:
    """Trains every case on the same batches, with gradients clipped at ``Train.clip_norm=1``.

    Raises:
      ConfigError: the configurations are missing, or there are not eight devices.
    """
    return {case: _losses(name, dtype, steps) for case, (name, dtype) in RUNS.items()}


def _losses(name: str, dtype: str, steps: int) -> Float[np.ndarray, " steps"]:
    bindings = [*SMALLER, f"Train.steps={steps}", f"Train.dtype='{dtype}'"]
    with Trainer(load_config([CONFIGS / name], bindings), style="silent") as trainer:
        return np.asarray(trainer.train().losses)


def rows(curves: Curves) -> Iterator[Row]:
    """The differences between layouts, beside those between bf16 and fp32, and the final losses."""
    between, from_fp32 = between_layouts(curves), from_exact(curves)
    smoothed_exact = smoothed(curves[EXACT])
    fall = curves[EXACT][0] - smoothed_exact[-1]
    yield _row("largest difference between two layouts", np.max(between) / fall, LARGEST)
    yield _row("mean difference between two layouts", np.mean(between) / fall, MEAN)
    for case, difference in from_fp32.items():
        yield _row(f"{case}: mean difference from fp32", np.mean(np.abs(difference)) / fall, MEAN)
    ratio = np.mean(between) / np.mean(np.abs(list(from_fp32.values())))
    yield _row("between layouts / between bf16 and fp32", ratio, RATIO, "ratio")
    yield Row(bench="bf16", case=f"{EXACT}: first loss", value=float(curves[EXACT][0]), unit="nats")
    for case, losses in curves.items():
        yield Row(bench="bf16", case=f"{case}: final loss", value=float(smoothed(losses)[-1]), unit="nats")


def _row(case: str, value: np.floating, target: float, unit: str = "of fall") -> Row:
    return Row(bench="bf16", case=case, value=float(value), unit=unit, target=at_most(target))


def smoothed(losses: Float[np.ndarray, " steps"]) -> Float[np.ndarray, " windows"]:
    """Means over ``WINDOW`` steps, or over all where there are fewer."""
    return np.convolve(losses, np.ones(min(WINDOW, len(losses))) / min(WINDOW, len(losses)), "valid")


def from_exact(curves: Curves) -> dict[str, Float[np.ndarray, " windows"]]:
    """Smoothed loss of every bf16 case minus the smoothed loss of fp32 on one device, in nats."""
    exact = smoothed(curves[EXACT])
    return {case: smoothed(losses) - exact for case, losses in curves.items() if case != EXACT}


def between_layouts(curves: Curves) -> Float[np.ndarray, "pairs windows"]:
    """The difference of smoothed losses between the bf16 cases, by pair, in nats."""
    pairs = itertools.combinations(from_exact(curves).values(), 2)
    return np.stack([np.abs(a - b) for a, b in pairs])


def draw(curves: Curves, path: str | Path | None = None) -> Figure:
    """Draws the loss of every case, and below it the differences that ``rows`` sums up; saves it to ``path`` if given.

    Raises:
      ValueError: there are fewer steps than a window of the mean.
    """
    steps = len(curves[EXACT])
    if steps < WINDOW:
        raise ValueError(f"{steps} steps: a picture needs at least {WINDOW}")
    middle = np.arange(steps - WINDOW + 1) + 1 + WINDOW // 2
    figure = Figure(figsize=(8.4, 6.4), dpi=130, facecolor="white", layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    colours = dict(zip(RUNS, ("#e07b29", "#3a9a5b", "#2f6db5", "#22272e"), strict=True))
    styles = dict(zip(RUNS, ("-", (0, (6, 3)), (0, (2, 2)), "-"), strict=True))  # the curves overlap
    order = [EXACT, *(case for case in RUNS if case != EXACT)]
    for case in order:
        width = 3.5 if case == EXACT else 1.4
        light = 0.3 if case == EXACT else 1.0
        upper.plot(range(1, steps + 1), curves[case], color=colours[case], linewidth=width, alpha=light,
                   linestyle=styles[case], label=case)  # fmt: skip
    for case, difference in from_exact(curves).items():
        lower.plot(middle, difference, color=colours[case], linewidth=1.4, label=f"{case} − fp32")
    apart = between_layouts(curves).max(axis=0)
    lower.fill_between(middle, apart, color="#9aa3ad", alpha=0.35, linewidth=0, label="largest between two layouts")
    lower.axhline(0, color="#22272e", linewidth=0.6)
    upper.set(ylabel="loss [nats]", yscale="log")
    upper.set_title(f"{steps} steps on the same batches, gradients clipped at 1", loc="left", fontsize=11)
    lower.set(xlabel="step", ylabel="difference [nats]")
    lower.set_title(f"means of {WINDOW} steps", loc="left", fontsize=9)
    for axes in (upper, lower):
        _style(axes)
    upper.legend(frameon=False, fontsize=8.5)
    lower.legend(frameon=False, fontsize=8.5, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    return finished(figure, path)


def _style(axes: Axes) -> None:
    axes.grid(axis="y", color="#d1d9e0", linewidth=0.6)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.margins(x=0.01)
    for name in ("top", "right"):
        axes.spines[name].set_visible(False)
