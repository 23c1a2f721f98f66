"""Pictures of a run: predictions beside their images, and curves. Drawn off screen, without pyplot's global state."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter
from matplotlib.transforms import Affine2D

from mmjax.schedule.text import text_width, wrapped

RIGHT, WRONG = "#1a7f37", "#c62828"
_RIGHT_FILL, _WRONG_FILL = "#eef8f0", "#fdeeee"
_INK, _GREY, _LINE = "#1f2328", "#59636e", "#d1d9e0"
_LOSS, _HELD_OUT = "#3d6fb4", "#b4513d"
_LOSSES = ("loss", "perplexity")
_ACCURACY = ("#1a7f37", "#c77d0a", "#8250df", "#0a7e8c")
_DPI = 150
_FONT: Any = {"font.family": "DejaVu Sans", "text.parse_math": False}  # a "$" in a question is a dollar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """One sample with what the model answered.

    Attributes:
      images: [h, w, c] arrays, c of 1, 3 or 4; floats in [0, 1] or bytes; `None` for one that cannot be read. There
        may be none.
      question: as asked; newlines count as spaces.
      answer: the right one.
      predicted: the model's; `None` where no model was asked, and the answer is shown without a verdict.
      ok: whether it counts as right.
      broken: which part of the sample cannot be read, and why; such a sample has no verdict either.
    """

    images: Sequence[Float[np.ndarray, "h w c"] | None]
    question: str
    answer: str
    predicted: str | None
    ok: bool
    broken: str = ""

    @property
    def judged(self) -> bool:
        """Whether the prediction is judged right or wrong; one without an answer, or of a broken sample, is not."""
        return self.predicted is not None and not self.broken


# Sizes in inches.
_CARD_WIDTH, _MARGIN, _PAD, _GAP = 3.6, 0.18, 0.14, 0.08
_TEXT_LINE, _SMALL_LINE, _ROW_HEIGHT, _TITLE = 0.185, 0.165, 0.62, 0.42
_ROOM, _MARK, _PLOT = _CARD_WIDTH - 2 * _PAD, 0.19, 6.0
# Points.
_SMALL, _VERDICT, _HEADING, _MARKED = 8.5, 12, 11, 7.5


def draw_predictions(
    items: Sequence[Prediction],
    path: str | Path | None = None,
    *,
    columns: int = 0,
    title: str = "",
    limit: int = 24,
) -> Figure:
    """Draws a contact sheet: one card per sample, its images at their true proportions.

    Cards follow one another along rows; those of a row are as high as its highest.
    Right answers are green, wrong ones red, all others grey.

    Args:
      items: the samples, drawn in this order: from left to right, row by row.
      path: where to write the picture, if anywhere; its suffix chooses the format (.png, .svg, .pdf).
      columns: cards of a row; 0 chooses.
      title: a line above the sheet; "n of m right" is added to it, where something is judged.
      limit: at most this many samples.

    Raises:
      ValueError: there is nothing to draw, or an image is not [h, w, c] with c of 1, 3 or 4.
    """
    shown = list(items)[:limit]
    if not shown:
        raise ValueError("no predictions to draw")
    columns = min(columns or min(4, math.ceil(math.sqrt(len(shown)))), len(shown))
    cards = [_Card(item) for item in shown]
    rows = [cards[first : first + columns] for first in range(0, len(cards), columns)]
    heights = [max(card.height for card in row) for row in rows]
    width = columns * _CARD_WIDTH + (columns + 1) * _MARGIN
    lines = _heading(title, [item.ok for item in shown if item.judged], width - 2 * _MARGIN)
    top = _TITLE + max(0, len(lines) - 1) * 0.2 if lines else _MARGIN
    height = top + sum(heights) + len(rows) * _MARGIN
    with rc_context(_FONT):
        figure = Figure(figsize=(width, height), facecolor="white")
        for number, line in enumerate(lines):
            _text(figure, _MARGIN + 0.02, height - 0.27 - 0.2 * number, line, size=_HEADING, bold=True)
        y = height - top
        for row, row_height in zip(rows, heights, strict=True):
            for column, card in enumerate(row):
                card.draw(figure, _MARGIN + column * (_CARD_WIDTH + _MARGIN), y, row_height)
            y -= row_height + _MARGIN
        return finished(figure, path)


def _heading(title: str, judged: Sequence[bool], width: float) -> list[str]:
    """The lines above a sheet; how many are right is never cut off."""
    count = f"{sum(judged)} of {len(judged)} right" if judged else ""
    lines = _wrap("  ·  ".join(filter(None, [title, count])), width, 3, size=_HEADING, bold=True)
    return [*_wrap(title, width, 2, size=_HEADING, bold=True), count] if count and len(lines) > 1 else lines


class _Card:
    """One sample's place on the sheet, measured before anything is drawn."""

    def __init__(self, item: Prediction) -> None:
        self.item = item
        self.images = [None if image is None else _pixels(image) for image in item.images]
        self.rows = _rows([1.6 if image is None else image.shape[1] / image.shape[0] for image in self.images])
        self.question = _wrap(item.question, _ROOM, 4)
        said = item.answer if item.predicted is None else item.predicted
        self.indent = _MARK if item.judged else 0.0
        answer = said if said.strip() else "(nothing)"
        self.verdict = [] if item.broken else _wrap(answer, _ROOM - self.indent, 3, size=_VERDICT, bold=True)
        wrong = item.judged and not item.ok
        self.answer = _wrap(f"right answer: {item.answer}", _ROOM, 3) if wrong else []
        if item.broken:
            self.answer = _wrap(f"cannot be read: {item.broken}", _ROOM, 3)
        rows = sum(height for _, height in self.rows) + _GAP * max(0, len(self.rows) - 1)
        self.height = (
            2 * _PAD
            + rows
            + (_GAP if self.rows else 0)
            + len(self.question) * _TEXT_LINE
            + 0.05
            + len(self.verdict) * (_TEXT_LINE + 0.06)
            + (len(self.answer) * _SMALL_LINE + 0.02 if self.answer else 0)
        )

    def draw(self, figure: Figure, left: float, top: float, height: float) -> None:
        color, fill = (RIGHT, _RIGHT_FILL) if self.item.ok else (WRONG, _WRONG_FILL)
        ink, mark = color, ("✓" if self.item.ok else "✗")
        if not self.item.judged:
            color, fill, ink, mark = _LINE, "white", _INK, ""
        _box(figure, left, top - height, _CARD_WIDTH, height, fill, color)
        y = top - _PAD
        index = 0
        for widths, row_height in self.rows:
            x = left + _PAD
            for width in widths:
                _image(figure, self.images[index], x, y - row_height, width, row_height)
                x += width + _GAP
                index += 1
            y -= row_height + _GAP
        x = left + _PAD
        for text in self.question:
            y -= _TEXT_LINE
            _text(figure, x, y + 0.04, text, size=_SMALL, color=_GREY)
        y -= 0.05
        for number, text in enumerate(self.verdict):
            y -= _TEXT_LINE + 0.06
            if mark and number == 0:  # it says it again for those who do not see red and green apart
                _text(figure, x, y + 0.06, mark, size=_VERDICT, color=ink, bold=True)
            _text(figure, x + self.indent, y + 0.06, text, size=_VERDICT, color=ink, bold=True)
        y -= 0.02
        for text in self.answer:
            y -= _SMALL_LINE
            _text(figure, x, y + 0.04, text, size=_SMALL)


def _rows(aspects: Sequence[float]) -> list[tuple[list[float], float]]:
    """Fills rows of a card with images of these width:height ratios; gives each row's widths and height."""
    rows: list[list[float]] = []
    for aspect in aspects:
        row = rows[-1] if rows else []
        if not row or (sum(row) + aspect) * _ROW_HEIGHT + _GAP * len(row) > _ROOM:
            rows.append([aspect])
        else:
            row.append(aspect)
    sized = []
    for row in rows:
        height = min(_ROW_HEIGHT, (_ROOM - _GAP * (len(row) - 1)) / sum(row))
        sized.append(([aspect * height for aspect in row], height))
    return sized


def as_image(medium: np.ndarray, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Float[np.ndarray, "h w c"]:
    """An image as it was before it was normalised by `mean` and `std`; a recording [F, M] as its spectrogram: time to
    the right, pitch upwards, dark to bright."""
    if medium.ndim == 3:
        return medium * np.asarray(std, np.float32) + np.asarray(mean, np.float32) if len(mean) else medium
    low, high = float(medium.min()), float(medium.max())
    shares = (medium.T[::-1] - low) / max(high - low, 1e-6)
    return np.asarray(colormaps["magma"](shares))[:, :, :3].astype(np.float32)


def _pixels(image: np.ndarray) -> np.ndarray:
    """[h, w, c] in [0, 1] with c of 3 or 4."""
    image = np.asarray(image)
    if image.ndim != 3 or image.shape[2] not in (1, 3, 4) or 0 in image.shape:
        raise ValueError(f"an image has shape {image.shape}: [h, w, c] with c of 1, 3 or 4 is needed")
    scaled = image.astype(np.float32) / (255.0 if image.dtype == np.uint8 else 1.0)
    scaled = np.clip(np.nan_to_num(scaled), 0.0, 1.0)
    return np.repeat(scaled, 3, axis=2) if image.shape[2] == 1 else scaled


def _wrap(text: str, width: float, most: int, *, size: float = _SMALL, bold: bool = False) -> list[str]:
    """At most `most` lines of `width` inches; characters that no font draws become visible escapes."""
    text = " ".join(text.split())
    text = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
    lines = wrapped(text, width=0.98 * width, size=size, bold=bold)  # drawn characters are hinted, so a little wider
    if len(lines) > most:
        last = lines[most - 1]
        while last and text_width(f"{last} …", size, bold=bold) > 0.98 * width:
            last = last[:-1]
        lines = [*lines[: most - 1], last.rstrip() + " …"]
    return lines


def _box(figure: Figure, x: float, y: float, width: float, height: float, fill: str, edge: str) -> None:
    page_width, page_height = figure.get_size_inches()
    # Inches by way of the page, whose place changes where a notebook crops it.
    inches = Affine2D().scale(1 / page_width, 1 / page_height) + figure.transFigure
    box = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.07", facecolor=fill, edgecolor=edge,
        linewidth=1.1, transform=inches, zorder=-1,
    )  # fmt: skip
    figure.add_artist(box)


def _image(figure: Figure, pixels: np.ndarray | None, x: float, y: float, width: float, height: float) -> None:
    """An image, or a crossed frame where there is none."""
    page_width, page_height = figure.get_size_inches()
    axes = figure.add_axes((x / page_width, y / page_height, width / page_width, height / page_height))
    if pixels is None:
        axes.plot([0, 1, np.nan, 0, 1], [0, 1, np.nan, 1, 0], color=_LINE, linewidth=0.8)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
    else:
        # Small images keep their pixels; photographs are smoothed.
        axes.imshow(pixels, interpolation="nearest" if max(pixels.shape[:2]) <= 160 else "antialiased", aspect="auto")
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_color(_LINE)
        side.set_linewidth(0.8)


def _text(figure: Figure, x: float, y: float, text: str, *, size: float, color: str = _INK, bold: bool = False) -> None:
    page_width, page_height = figure.get_size_inches()
    figure.text(
        x / page_width, y / page_height, text, fontsize=size, color=color, weight="bold" if bold else "normal",
        ha="left", va="baseline",
    )  # fmt: skip


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
      metrics_rows: rows of `metrics.jsonl`: `step`, `loss` (`None` where it was not finite).
      eval_rows: rows of `eval.jsonl`: `step`, the held-out samples' `loss`, and accuracies in [0, 1] such as
        `exact_match`, `character_accuracy`.
      path: where to write the picture, if anywhere; its suffix chooses the format.
      title: a line above.
      marks: what changed at a step, such as the data of a curriculum, after which the loss rises.

    Where no row has a finite loss, the picture says so.
    """
    losses = _series(metrics_rows, "loss")
    series = {name: _series(eval_rows, name) for name in _names(eval_rows) if name not in _LOSSES}
    accuracies = {name: points for name, points in series.items() if len(points)}
    panel = any(len(points) > 1 for points in accuracies.values())
    with rc_context(_FONT):
        figure = Figure(figsize=(7.2, 5.6 if panel else 3.4), facecolor="white", layout="constrained")
        axes = figure.subplots(2 if panel else 1, 1, sharex=True, squeeze=False)[:, 0]
        if title:
            lines = _wrap(title, 0.96 * figure.get_figwidth(), 3, size=_HEADING, bold=True)
            figure.suptitle("\n".join(lines), fontsize=_HEADING, fontweight="bold", color=_INK, x=0.02, ha="left")
        _draw_loss(axes[0], losses, _series(eval_rows, "loss"))
        shown = {at: text for at, text in marks.items() if len(losses) and losses[0, 0] < at <= losses[-1, 0]}
        _draw_marks(axes[0], shown)
        _draw_marks(axes[-1], dict.fromkeys(shown, ""))
        if panel:
            _draw_accuracies(axes[1], accuracies)
        elif accuracies:
            last = ", ".join(f"{name.replace('_', ' ')} {points[-1, 1]:.1%}" for name, points in accuracies.items())
            lines = _wrap(f"held out: {last}", _PLOT, 4)
            axes[0].set_title("\n".join(lines), fontsize=_SMALL, color=_INK, loc="left")
        axes[-1].set_xlabel("step")
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(losses) == 1:
            axes[-1].set_xlim(losses[0, 0] - 1, losses[0, 0] + 1)
        return finished(figure, path)


def _draw_loss(axes: Axes, losses: np.ndarray, held_out: np.ndarray) -> None:
    _style(axes, "loss")
    if not len(losses):
        axes.text(0.5, 0.5, "no finite loss", ha="center", va="center", transform=axes.transAxes, color=_GREY)
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
        axes.legend(loc="best", frameon=False, fontsize=8.5, labelcolor=_INK)
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
        axes.axvline(step, color=_GREY, linewidth=0.8, linestyle=":")
        left = (step - first) / (last - first)
        room, before = _PLOT * max(left, 1 - left), left > 0.5 and text_width(text, _MARKED) > _PLOT * (1 - left)
        axes.annotate(
            "".join(_wrap(text, room, 1, size=_MARKED)), (step, 1.0), xycoords=("data", "axes fraction"),
            xytext=(-3 if before else 3, -2), textcoords="offset points", ha="right" if before else "left",
            va="top", fontsize=_MARKED, color=_GREY, annotation_clip=False,
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
    axes.legend(loc="best", frameon=False, fontsize=8.5, labelcolor=_INK)


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
    axes.set_ylabel(label, color=_INK)
    axes.grid(axis="y", color=_LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.tick_params(colors=_GREY, labelsize=8.5, length=3)
    for name, side in axes.spines.items():
        side.set_visible(name in ("left", "bottom"))
        side.set_color(_LINE)


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


def finished(figure: Figure, path: str | Path | None) -> Figure:
    """The figure, which a notebook shows by itself; also written to `path` where one is given."""
    FigureCanvasAgg(figure)
    if path is None:
        return figure
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A new name first: somebody may be looking at the old picture.
    new = path.with_name(f".{path.name}.new")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # it draws a box for it, which says as much
        figure.savefig(new, dpi=_DPI, format=path.suffix.lstrip(".") or "png")
    new.replace(path)
    return figure
