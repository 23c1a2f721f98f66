"""Text in pictures, broken into lines by its width in inches: characters differ in width, so counting is not enough."""

from __future__ import annotations

import functools
import warnings


@functools.lru_cache(maxsize=8192)
def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """The width of a line in inches in matplotlib's own font; ``size`` in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box is drawn and measured in its place
        width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return width / 72


def wrapped(*parts: str, width: float, size: float, bold: bool = False) -> list[str]:
    """The parts, one behind the other, on as many lines of ``width`` inches as they need.

    A part that does not fit behind another begins a new line. A part that fits on no line is broken between words, and
    a word that fits on no line is cut. The result is [] where all parts are empty. ``size``: in points.
    """

    def fits(text: str) -> bool:
        return text_width(text, size, bold=bold) <= width

    lines = [""]
    for part in parts:
        for word in [part] if fits(part) else part.split():
            longer = f"{lines[-1]} {word}".lstrip()
            if fits(longer):
                lines[-1] = longer
                continue
            lines.append("")
            for character in word:
                if lines[-1] and not fits(lines[-1] + character):
                    lines.append("")
                lines[-1] += character
    return [line for line in lines if line]
