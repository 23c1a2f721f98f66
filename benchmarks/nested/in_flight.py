"""Microbatches in flight by microbatches of a step, which nested schedules keep constant. Counted, not timed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.nested.models import GENERATION, LLM, PAINTER, UNDERSTANDING, VISION, WORKLOADS
from benchmarks.nested.systems import DEPTH, NESTED, NESTED_1F1B, ONE_RANK, OPTIMUS, SYSTEMS, modules_of, trials
from mmjax.schedule.validate import validate

MICROBATCHES = (8, 16, 32, 64, 128, 256)
SHOWN = (NESTED, NESTED_1F1B, OPTIMUS, ONE_RANK)
COLOURS = dict(zip(SHOWN, ("#c9405b", "#e07b29", "#2f6db5", "#6b7480"), strict=True))
STYLES = dict(zip(SHOWN, ("-", (0, (5, 2)), "-", (0, (1, 1.5))), strict=True))
_ENCODER, _LLM, _GENERATOR = (f"{module}.0" for module in (VISION, LLM, PAINTER))
PANELS = {
    (UNDERSTANDING.name, _ENCODER): "encoder",
    (GENERATION.name, _ENCODER): "encoder, with a generator",
    (GENERATION.name, _LLM): "LLM's first stage, with a generator",
    (GENERATION.name, _GENERATOR): "generator",
}
"""The counted stages by (model, stage), with their titles."""
Panel = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Count:
    """The most microbatches of a stage in flight at once, over all of its lanes.

    Attributes:
      system: name of the system.
      panel: a key of `PANELS`.
      microbatches: microbatches of the step.
      most: the count.
    """

    system: str
    panel: Panel
    microbatches: int
    most: int


def counts(microbatches: Sequence[int] = MICROBATCHES) -> list[Count]:
    """Counts by `validate` for each system's schedule of both models, with rows of equal cost."""
    all_counts = []
    shown = [system for system in SYSTEMS if system.name in SHOWN]
    for workload, system in itertools.product(WORKLOADS, shown):
        modules = modules_of(workload, workload.rows(1), lanes=system.lanes, even=True)
        for number in microbatches:
            trial = trials(system, modules, number, (DEPTH,), move=0.0)[0]
            most = validate(trial.timeline.schedule).in_flight
            for panel in (panel for panel in PANELS if panel[0] == workload.name):
                all_counts.append(Count(system=system.name, panel=panel, microbatches=number, most=most[panel[1]]))
    return sorted(all_counts, key=lambda count: (list(PANELS).index(count.panel), SHOWN.index(count.system)))


def table(counted: Iterable[Count], measured: Iterable[Count] = ()) -> str:
    """The counts in Markdown, a row for each stage and system, with measured counts in brackets."""
    measured_counts = {(count.system, count.panel, count.microbatches): count.most for count in measured}
    lines: dict[tuple[str, str], list[str]] = {}
    numbers = dict[int, None]()
    for count in counted:
        numbers[count.microbatches] = None
        live = measured_counts.get((count.system, count.panel, count.microbatches))
        cell = f"{count.most}" if live is None else f"{count.most} (measured {live})"
        lines.setdefault((PANELS[count.panel], count.system), []).append(cell)
    head = ["| stage | system |" + "".join(f" {n} |" for n in numbers), "|---|---|" + "---|" * len(numbers)]
    return "\n".join([*head, *(f"| {' | '.join((*key, *cells))} |" for key, cells in lines.items())])


def _points(counts: Sequence[Count], system: str, panel: Panel) -> list[tuple[int, int]]:
    """The points (microbatches of the step, most in flight) of a system's line in a panel."""
    return [(count.microbatches, count.most) for count in counts if (count.system, count.panel) == (system, panel)]


def draw(counted: Sequence[Count], path: str | os.PathLike[str], measured: Sequence[Count] = ()) -> None:
    """Draws a panel for each stage and a line for each system, with dots for measured counts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 3.9), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(PANELS), sharex=True, sharey=True)
    for axes, (panel, name) in zip(panels, PANELS.items(), strict=True):
        for system in SHOWN:
            line, dots = (_points(counts, system, panel) for counts in (counted, measured))
            style = {"color": COLOURS[system], "linestyle": STYLES[system], "linewidth": 1.8, "label": system}
            axes.plot(*zip(*line, strict=True), **style)
            if dots:
                axes.plot(*zip(*dots, strict=True), "o", color=COLOURS[system], markersize=5)
        axes.set_title(name, fontsize=10.5, loc="left")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(MICROBATCHES, [str(n) for n in MICROBATCHES])
        axes.set_yticks([2**k for k in range(9)], [str(2**k) for k in range(9)])
        axes.minorticks_off()
        axes.set_xlabel("microbatches of a step", fontsize=8.5)
        axes.grid(color="#d1d9e0", linewidth=0.6)
        axes.tick_params(labelsize=8.5, length=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].set_ylabel("most in flight, all lanes", fontsize=8.5)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(SHOWN), fontsize=8.5, frameon=False)
    figure.savefig(path, facecolor="white")
