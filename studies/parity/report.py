"""The rows, tables and picture of ``docs/parity.md``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mmjax.bench.rows import Row
from studies.parity.bound import Compared, compared, orders_of, spread
from studies.parity.runs import RUNS, SPREADS, Degrees, Run
from studies.parity.stored import Stored, losses_of, stored

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUT = Path("runs/parity")
"""The folder of results unless ``--out`` names another."""
COLOURS = {"noncolocated": "#1f6feb", "colocated": "#d4730b", "homogeneous": "#1a7f37"}
CONTROL, OTHER = "#cf222e", "#8c959f"


def rows() -> Iterator[Row]:
    """A row a run, with the ranks that it needs."""
    for name, run in RUNS.items():
        yield Row(bench="parity", case=f"{name}: {run.describe()}", value=run.ranks, unit="ranks")


def tables(out: Path = OUT) -> dict[str, str]:
    """Tables in Markdown by name, of the results in a folder: "spreads", "layouts", "controls" and "steps"."""
    losses, checks = losses_of(out), stored(out, ".check.json")
    pairs = compared(losses)
    lines_by_table = {"spreads": _spreads(losses), "layouts": _layouts(pairs), "controls": _controls(pairs)}
    lines_by_table["steps"] = _checks(checks)
    return {name: "\n".join(lines) for name, lines in lines_by_table.items()}


def write_report(out: Path) -> str:
    """Writes the tables that have rows, and the picture, of a folder's results as its ``tables.md`` and ``curves.png``.

    Returns the tables.
    """
    filled = {name: table for name, table in tables(out).items() if table.count("\n") > 1}
    text = "\n\n".join(f"### {name}\n\n{table}" for name, table in filled.items())
    (out / "tables.md").write_text(text + "\n")
    draw(out, out / "curves.png")
    return text


def _spreads(losses: Mapping[str, list[float]]) -> Iterator[str]:
    yield f"| dtype, trained | steps | runs on one device | first loss → last | spread | bound ({SPREADS} spreads) |"
    yield "|---|---|---|---|---|---|"
    for name, run in RUNS.items():
        if run.name == run.reference and name in losses:
            curve, curves = losses[name], orders_of(run, losses)
            ends, width = f"{curve[0]:.3f} → {curve[-1]:.3f}", spread(curves)
            cells = (_protocol(run), len(curve), len(curves), ends, f"{width:.1e}", f"{SPREADS * width:.1e}")
            yield f"| {' | '.join(map(str, cells))} |"


def _protocol(run: Run) -> str:
    return f"{run.dtype}, {'projector and LLM' if run.trained else 'projector'}"


def _degrees(degrees: Degrees) -> str:
    return f"{degrees.tp}/{degrees.pp}/{degrees.dp}"


def _layouts(pairs: list[Compared]) -> Iterator[str]:
    yield "| run | LLM, tp/pp/dp | tower, tp/pp/dp | steps | largest difference | bound | within |"
    yield "|---|---|---|---|---|---|---|"
    for pair in pairs:
        run = pair.run
        if run.group == "layout":
            cells = (run.name, _degrees(run.llm), _degrees(run.vision), len(pair.gaps))
            yield f"| {' | '.join(map(str, cells))} | {_verdict(pair)} |"


def _verdict(pair: Compared) -> str:
    return f"{pair.largest:.1e} | {pair.bound:.1e} | {'yes' if pair.within else 'no'}"


def _controls(pairs: list[Compared]) -> Iterator[str]:
    yield "| control | trained | largest difference | bound | within |"
    yield "|---|---|---|---|---|"
    for pair in pairs:
        if pair.run.group == "control":
            yield f"| {pair.run.control} | {_protocol(pair.run).partition(', ')[2]} | {_verdict(pair)} |"


def _checks(checks: Mapping[str, Stored]) -> Iterator[str]:
    yield "| run | steps | loss | gradients | updates | moments | equal |"
    yield "|---|---|---|---|---|---|---|"
    for name, numbers in checks.items():
        cells = [f"{numbers[quantity]:.1e}" for quantity in ("loss", "grad", "update", "moments")]
        yield f"| {name} | {numbers['steps']} | {' | '.join(cells)} | {'yes' if numbers['ok'] else 'no'} |"


def draw(out: Path, path: Path) -> None:
    """Draws the losses of all runs in a folder, and below them their differences with the bound."""
    from matplotlib.figure import Figure

    from mmjax.viz.figures import finished

    losses = losses_of(out)
    cases = [run for name, run in RUNS.items() if name == run.reference and name in losses]
    figure = Figure(figsize=(2.6 * max(1, len(cases)), 4.2), layout="constrained")
    panels = figure.subplots(2, max(1, len(cases)), squeeze=False, sharex="col")
    for column, case in enumerate(cases):
        pairs = [pair for pair in compared(losses) if pair.run.reference == case.name]
        pairs.sort(key=lambda pair: pair.run.group != "control")  # behind the others
        upper, lower = panels[:, column]
        upper.set_title(_protocol(case), fontsize=9)
        _draw_losses(upper, case, losses, pairs)
        _draw_gaps(lower, pairs)
    panels[0, 0].set_ylabel("loss", fontsize=8)
    panels[1, 0].set_ylabel("difference from one device", fontsize=8)
    for panel in panels.flat:
        panel.tick_params(labelsize=7)
    finished(figure, path)


def _draw_losses(axes: Axes, case: Run, losses: Mapping[str, list[float]], pairs: list[Compared]) -> None:
    for curve in orders_of(case, losses):
        axes.plot(range(1, len(curve) + 1), curve, color=OTHER, linewidth=0.7)
    for pair in pairs:
        axes.plot(range(1, len(pair.gaps) + 1), losses[pair.run.name], color=_colour(pair.run), linewidth=0.7)


def _draw_gaps(axes: Axes, pairs: list[Compared]) -> None:
    """Differences on a logarithmic axis; those of 0 are left out."""
    for pair in pairs:
        shown = [(step, gap) for step, gap in enumerate(pair.gaps, start=1) if gap]
        axes.plot(*zip(*shown, strict=True), color=_colour(pair.run), linewidth=0.6) if shown else None
    if pairs and pairs[0].bound:
        axes.axhline(pairs[0].bound, color="black", linestyle="--", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xlabel("step", fontsize=8)


def _colour(run: Run) -> str:
    return CONTROL if run.control else COLOURS.get(run.name.rpartition("-")[2], OTHER)
