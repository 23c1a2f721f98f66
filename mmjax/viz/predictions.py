"""Pictures of samples on cards, beside a model's answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.transforms import Affine2D

from mmjax.viz.figures import FONT, GREY, HEADING, INK, LINE, SMALL, finished, fitted_lines

RIGHT, WRONG = "#1a7f37", "#c62828"
_RIGHT_FILL, _WRONG_FILL = "#eef8f0", "#fdeeee"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """One sample with the model's answer.

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
_ROOM, _MARK = _CARD_WIDTH - 2 * _PAD, 0.19
_VERDICT = 12
"""Points."""


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
      items: the samples, drawn in this order: from left to right, row by row. Such as `Prediction(images=[image],
        question="Which digit?", answer="7", predicted="7", ok=True)`, with `predicted` None where there is no model.
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
    with rc_context(FONT):
        figure = Figure(figsize=(width, height), facecolor="white")
        for number, line in enumerate(lines):
            _text(figure, _MARGIN + 0.02, height - 0.27 - 0.2 * number, line, size=HEADING, bold=True)
        y = height - top
        for row, row_height in zip(rows, heights, strict=True):
            for column, card in enumerate(row):
                card.draw(figure, _MARGIN + column * (_CARD_WIDTH + _MARGIN), y, row_height)
            y -= row_height + _MARGIN
        return finished(figure, path)


def _heading(title: str, judged: Sequence[bool], width: float) -> list[str]:
    """The lines above a sheet; how many are right is never cut off."""
    count = f"{sum(judged)} of {len(judged)} right" if judged else ""
    lines = fitted_lines("  ·  ".join(filter(None, [title, count])), width, 3, size=HEADING, bold=True)
    return [*fitted_lines(title, width, 2, size=HEADING, bold=True), count] if count and len(lines) > 1 else lines


class _Card:
    """One sample's place on the sheet, measured before anything is drawn."""

    def __init__(self, item: Prediction) -> None:
        self.item = item
        self.images = [None if image is None else _pixels(image) for image in item.images]
        self.rows = _rows([1.6 if image is None else image.shape[1] / image.shape[0] for image in self.images])
        self.question = fitted_lines(item.question, _ROOM, 4)
        answer = item.answer if item.predicted is None else item.predicted
        self.indent = _MARK if item.judged else 0.0
        answer = answer if answer.strip() else "(nothing)"
        self.verdict = [] if item.broken else fitted_lines(answer, _ROOM - self.indent, 3, size=_VERDICT, bold=True)
        wrong = item.judged and not item.ok
        self.answer = fitted_lines(f"right answer: {item.answer}", _ROOM, 3) if wrong else []
        if item.broken:
            self.answer = fitted_lines(f"cannot be read: {item.broken}", _ROOM, 3)
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
            color, fill, ink, mark = LINE, "white", INK, ""
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
            _text(figure, x, y + 0.04, text, size=SMALL, color=GREY)
        y -= 0.05
        for number, text in enumerate(self.verdict):
            y -= _TEXT_LINE + 0.06
            if mark and number == 0:  # for readers who cannot tell red from green
                _text(figure, x, y + 0.06, mark, size=_VERDICT, color=ink, bold=True)
            _text(figure, x + self.indent, y + 0.06, text, size=_VERDICT, color=ink, bold=True)
        y -= 0.02
        for text in self.answer:
            y -= _SMALL_LINE
            _text(figure, x, y + 0.04, text, size=SMALL)


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
    """An image [h, w, c] as it was before it was normalised; a recording [F, M] as a picture [M, F, 3] in [0, 1].

    The picture is a spectrogram: time to the right, pitch upwards, dark to bright. Of a temporal patch the first frame
    is shown.

    Args:
      medium: the image, the temporal patch [h, w, frames * 3], or the recording of F frames and M mel bins.
      mean, std: a number for each channel of an image; () where it was not normalised.
    """
    if medium.ndim == 3:
        first_frame = len(mean) or 3
        medium = medium[..., :first_frame] if medium.shape[-1] >= 2 * first_frame else medium
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
        axes.plot([0, 1, np.nan, 0, 1], [0, 1, np.nan, 1, 0], color=LINE, linewidth=0.8)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
    else:
        # Small images keep their pixels; photographs are smoothed.
        axes.imshow(pixels, interpolation="nearest" if max(pixels.shape[:2]) <= 160 else "antialiased", aspect="auto")
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_color(LINE)
        side.set_linewidth(0.8)


def _text(figure: Figure, x: float, y: float, text: str, *, size: float, color: str = INK, bold: bool = False) -> None:
    page_width, page_height = figure.get_size_inches()
    figure.text(
        x / page_width, y / page_height, text, fontsize=size, color=color, weight="bold" if bold else "normal",
        ha="left", va="baseline",
    )  # fmt: skip
