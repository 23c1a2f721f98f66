"""A picture of layouts: which module, stage and replica each device works for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM
from mmjax.schedule.timeline import light, module_colour, shown
from mmjax.viz.figures import finished

_INK, _GREY, _IDLE = "#1f2328", "#59636e", "#f1f2f4"
_WIDEST = 40.0
"""Inches. Beyond that many ranks the boxes become narrower and lose their text."""


def draw_layout(layouts: Mapping[str, Layout], path: str | Path | None = None) -> Figure:
    """A picture of `layouts`, which a notebook shows by itself; also written to `path` where one is given.

    A row for each module, a column for each rank. A frame is a stage submesh, named by the pipeline stages on it; a box
    is one device's part in it, named by its indices in the degrees above one. Boxes above each other share a device.

    Args:
      layouts: by module name, such as {"vision": Layout(dp=4), "llm": Layout(tp=2, pp=2)}.
      path: the picture, if one is to be written; its suffix chooses the format (.png, .svg, .pdf).

    Raises:
      ValueError: there is no layout.
    """
    if not layouts:
        raise ValueError("no layouts to draw")
    modules = sorted(layouts, key=lambda module: module == LLM)  # the LLM below what feeds it
    ranks = max(layout.rank_offset + layout.size for layout in layouts.values())
    margin = max(1.6, 0.5 + 0.085 * max(len(shown(module)) for module in modules))
    width = min(max(6.0, margin + 0.85 * ranks), _WIDEST)
    figure = Figure(figsize=(width, 0.75 + 0.95 * len(modules)), dpi=110, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    _draw_frame(axes, modules, layouts, ranks)
    inches = (width - margin) / ranks
    for y, module in enumerate(modules):
        for rank in set(range(ranks)) - set(layouts[module].ranks):
            axes.add_patch(_box(rank - 0.42, y - 0.36, 0.84, 0.54, _IDLE, "none"))
        _draw_module(axes, y, module, layouts[module], module_colour(module, modules), inches)
    return finished(figure, path)


def _draw_frame(axes: Axes, modules: list[str], layouts: Mapping[str, Layout], ranks: int) -> None:
    axes.set_xlim(-0.6, ranks - 0.4)
    axes.set_ylim(len(modules) - 0.5, -0.6)
    labels = [f"{shown(module)}\n{_degrees(layouts[module])}" for module in modules]
    axes.set_yticks(range(len(modules)), labels, fontsize=9, color=_INK)
    step = max(1, ranks // 32)
    axes.set_xticks(range(0, ranks, step), [str(rank) for rank in range(0, ranks, step)], fontsize=9, color=_GREY)
    axes.set_xlabel("rank", fontsize=9, color=_GREY)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _degrees(layout: Layout) -> str:
    degrees = layout.describe().partition(" on ")[0]
    return degrees.replace(" ", " · ") if "=" in degrees else degrees


def _draw_module(axes: Axes, y: int, module: str, layout: Layout, colour: str, inches: float) -> None:
    for stage in range(layout.pp):
        first = layout.stage_ranks(stage)[0]
        stages = ", ".join(str(chunk) for chunk in range(stage, layout.stages, layout.pp))
        axes.add_patch(_box(first - 0.48, y - 0.42, layout.stage_size - 0.04, 0.84, "none", colour))
        size = min(8.0, 12 * inches * layout.stage_size)
        most = int(inches * layout.stage_size * 72 / (0.66 * size))  # characters that fit into the frame
        name = f"{shown(module, max(3, most - len(stages) - 1))}.{stages}"
        _text(axes, first - 0.4, y + 0.31, name, colour, "left", size)
        for rank in layout.stage_ranks(stage):
            axes.add_patch(_box(rank - 0.42, y - 0.36, 0.84, 0.54, light(colour), "none"))
            lines = _indices(layout, rank - first)
            _text(axes, rank, y - 0.09, lines, _INK, "center", min(8.0, 12 * inches))


def _indices(layout: Layout, place: int) -> str:
    """The indices of a stage's rank number `place` in the degrees above one: "dp 1" over "tp 0"."""
    sizes = {"lane": layout.lanes, "copy": layout.copies, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp}
    indices = []
    for name in reversed(sizes):
        place, index = divmod(place, sizes[name])
        if sizes[name] > 1:
            indices.append(f"{name} {index}")
    return "\n".join(reversed(indices))


def _text(axes: Axes, x: float, y: float, text: str, colour: str, align: str, size: float) -> None:
    if size >= 4:
        axes.text(x, y, text, fontsize=size, color=colour, ha=align, va="center")


def _box(x: float, y: float, width: float, height: float, fill: str, edge: str) -> FancyBboxPatch:
    style = "round,pad=0,rounding_size=0.06"
    return FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=fill, edgecolor=edge, linewidth=1.2)
