"""Pictures of a run's losses and accuracies by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from mmjax.schedule.text import text_width
from mmjax.viz.figures import FONT, GREY, HEADING, INK, LINE, SMALL, finished, fitted_lines

_LOSS, _HELD_OUT = "#3d6fb4", "#b4513d"
_LOSSES = ("loss", "perplexity")
_ACCURACY = ("#1a7f37", "#c77d0a", "#8250df", "#0a7e8c")
_PLOT = 6.0
"""Inches of the axes' width."""
_MARKED = 7.5
"""Points."""


def draw_curves(
    metrics_rows: Sequence[Mapping[str, Any]],
    eval_rows: Sequence[Mapping[str, Any]] = (),
    path: str | Path | None = None,
    *,
    title: str = "",
    marks: Mapping[int, str] = MappingProxyType({}),
) -> Figure:
    """Draws the loss against the step and, below it, accuracies where there are several evaluations.

    The accuracies of a single evaluation are a line of text: three dots would have a panel to themselves.

    Args:
      metrics_rows: rows of `metrics.jsonl`, {"step": 10, "loss": 2.31}; `loss` is `None` where it was not finite.
      eval_rows: rows of `eval.jsonl`: `step`, the held-out samples' `loss`, and accuracies in [0, 1] such as
        `exact_match`, `character_accuracy`.
      path: where to write the picture, if anywhere; its suffix chooses the format.
      title: a line above; "" for none.
      marks: by step, what changed there, such as {500: "longer texts"}, after which the loss rises.

    Where no row has a finite loss, the picture says so.
    """
    losses = _series(metrics_rows, "loss")
    series = {name: _series(eval_rows, name) for name in _names(eval_rows) if name not in _LOSSES}
    accuracies = {name: points for name, points in series.items() if len(points)}
    panel = any(len(points) > 1 for points in accuracies.values())
    with rc_context(FONT):
        figure = Figure(figsize=(7.2, 5.6 if panel else 3.4), facecolor="white", layout="constrained")
        axes = figure.subplots(2 if panel else 1, 1, sharex=True, squeeze=False)[:, 0]
        if title:
            lines = fitted_lines(title, 0.96 * figure.get_figwidth(), 3, size=HEADING, bold=True)
            figure.suptitle("\n".join(lines), fontsize=HEADING, fontweight="bold", color=INK, x=0.02, ha="left")
        _draw_loss(axes[0], losses, _series(eval_rows, "loss"))
        shown = {at: text for at, text in marks.items() if len(losses) and losses[0, 0] < at <= losses[-1, 0]}
        _draw_marks(axes[0], shown)
        _draw_marks(axes[-1], dict.fromkeys(shown, ""))
        if panel:
            _draw_accuracies(axes[1], accuracies)
        elif accuracies:
            last = ", ".join(f"{name.replace('_', ' ')} {points[-1, 1]:.1%}" for name, points in accuracies.items())
            lines = fitted_lines(f"held out: {last}", _PLOT, 4)
            axes[0].set_title("\n".join(lines), fontsize=SMALL, color=INK, loc="left")
        axes[-1].set_xlabel("step")
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(losses) == 1:
            axes[-1].set_xlim(losses[0, 0] - 1, losses[0, 0] + 1)
        return finished(figure, path)


def _draw_loss(axes: Axes, losses: np.ndarray, held_out: np.ndarray) -> None:
    _style(axes, "loss")
    if not len(losses):
        axes.text(0.5, 0.5, "no finite loss", ha="center", va="center", transform=axes.transAxes, color=GREY)
        return
    steps, values = losses[:, 0], losses[:, 1]
    noisy = len(values) > 50
    drawn = _smoothed(values, len(values) // 50) if noisy else values
    if noisy:
        axes.plot(steps, values, color=_LOSS, linewidth=0.7, alpha=0.35)
    axes.plot(steps, drawn, color=_LOSS, linewidth=1.8, marker="o" if len(values) == 1 else "", label="training")
    ends = [(drawn[-1], steps[-1], _LOSS)]
    if len(held_out):
        ends.append((held_out[-1, 1], held_out[-1, 0], _HELD_OUT))
        axes.plot(
            held_out[:, 0], held_out[:, 1], color=_HELD_OUT, linewidth=1.4, linestyle="--", marker="o", markersize=3.5,
            label="held out, text",
        )  # fmt: skip
        axes.legend(loc="best", frameon=False, fontsize=8.5, labelcolor=INK)
    values = np.concatenate([values, held_out[:, 1]])
    if values.min() > 0 and values.max() > 20 * values.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    for number, (value, at, color) in enumerate(sorted(ends)):
        # Of two that are close the lower stands below its point, and the upper above.
        apart = 0 if len(ends) == 1 else 10 * number - 5
        _end_label(axes, at, value, f"{value:.4g}", color, apart)


def _draw_marks(axes: Axes, marks: Mapping[int, str]) -> None:
    first, last = axes.get_xlim()
    for step, text in marks.items():
        axes.axvline(step, color=GREY, linewidth=0.8, linestyle=":")
        left = (step - first) / (last - first)
        room, before = _PLOT * max(left, 1 - left), left > 0.5 and text_width(text, _MARKED) > _PLOT * (1 - left)
        axes.annotate(
            "".join(fitted_lines(text, room, 1, size=_MARKED)), (step, 1.0), xycoords=("data", "axes fraction"),
            xytext=(-3 if before else 3, -2), textcoords="offset points", ha="right" if before else "left",
            va="top", fontsize=_MARKED, color=GREY, annotation_clip=False,
        )  # fmt: skip


def _draw_accuracies(axes: Axes, series: Mapping[str, np.ndarray]) -> None:
    _style(axes, "accuracy")
    axes.set_ylim(-0.02, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for (name, points), color in zip(series.items(), _ACCURACY * len(series), strict=False):
        marker = "o" if len(points) <= 40 else ""
        label = name.replace("_", " ")
        axes.plot(
            points[:, 0], points[:, 1], color=color, linewidth=1.8, marker=marker, markersize=3.5, label=label,
            clip_on=False,
        )  # fmt: skip
    lasts = sorted(series.values(), key=lambda points: points[-1, 1])
    spots = _spread([points[-1, 1] for points in lasts], 0.075)
    colors = dict(zip(series, _ACCURACY * len(series), strict=False))
    order = sorted(series, key=lambda name: series[name][-1, 1])
    for name, points, spot in zip(order, lasts, spots, strict=True):
        _end_label(axes, points[-1, 0], spot, f"{points[-1, 1]:.1%}", colors[name])
    axes.legend(loc="best", frameon=False, fontsize=8.5, labelcolor=INK)


def _spread(values: Sequence[float], gap: float) -> list[float]:
    """Rising values moved apart to at least `gap`, so that their labels do not overlap."""
    spots: list[float] = []
    for value in values:
        spots.append(max(value, spots[-1] + gap) if spots else value)
    over = max(0.0, spots[-1] - 1.03) if spots else 0.0
    return [spot - over for spot in spots]


def _end_label(axes: Axes, x: float, y: float, text: str, color: str, up: float = 0.0) -> None:
    axes.annotate(
        text, (x, y), xytext=(6, up), textcoords="offset points", va="center", fontsize=8.5, color=color,
        fontweight="bold", annotation_clip=False,
    )  # fmt: skip


def _style(axes: Axes, label: str) -> None:
    axes.set_ylabel(label, color=INK)
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.tick_params(colors=GREY, labelsize=8.5, length=3)
    for name, side in axes.spines.items():
        side.set_visible(name in ("left", "bottom"))
        side.set_color(LINE)


def _smoothed(values: np.ndarray, half: int) -> np.ndarray:
    """Mean over the neighbours within `half`, fewer at the ends."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """[n, 2] of step and value, where the value is a finite number."""
    points = [
        (row["step"], row[name])
        for row in rows
        if isinstance(row.get(name), int | float) and not isinstance(row[name], bool) and math.isfinite(row[name])
    ]
    return np.asarray(points, np.float64).reshape(-1, 2)


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row if name != "step"))
