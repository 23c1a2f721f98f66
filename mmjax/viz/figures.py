"""Parts of every picture: colours, sizes and lines of text, and its file. Nothing opens a window or imports pyplot."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mmjax.schedule.text import text_width, wrapped

INK, GREY, LINE = "#1f2328", "#59636e", "#d1d9e0"
FONT: Any = {"font.family": "DejaVu Sans", "text.parse_math": False}  # a "$" in a question is a dollar
SMALL, HEADING = 8.5, 11
"""Sizes of text in points."""
_DPI = 150


def fitted_lines(text: str, width: float, most: int, *, size: float = SMALL, bold: bool = False) -> list[str]:
    """The text in at most `most` lines of `width` inches, in a font of `size` points; the last ends in "…" if cut.

    "" gives []. White space counts as one blank; characters that cannot be printed become escapes such as "\\x07".
    """
    text = " ".join(text.split())
    text = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
    lines = wrapped(text, width=0.98 * width, size=size, bold=bold)  # drawn characters are hinted, so a little wider
    if len(lines) > most:
        last = lines[most - 1]
        while last and text_width(f"{last} …", size, bold=bold) > 0.98 * width:
            last = last[:-1]
        lines = [*lines[: most - 1], last.rstrip() + " …"]
    return lines


def finished(figure: Figure, path: str | Path | None) -> Figure:
    """Returns the figure, which a notebook shows by itself; also writes it to `path` where one is given.

    The path's suffix chooses the format, .png without one; its folder is made. `path` is `None` to write nothing.
    """
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
