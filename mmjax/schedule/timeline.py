"""Timelines for people: a picture, and a trace for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import colorsys
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from mmjax.schedule.graph import WORLD, show_ranks
from mmjax.schedule.ops import COPY_KINDS, Op, occupied_ranks, occupied_resources
from mmjax.schedule.simulate import Timeline
from mmjax.schedule.text import wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#2f6db5", "#e07b29", "#3a9a5b", "#8a5cc2", "#c9405b", "#1f9aa8", "#a0792c", "#6b7280")
_ONCE = {"prepare": "#d9d4c7", "reduce": "#f2c14e", "norm": "#4b4b4b", "update": "#9c8f73"}
_COMMUNICATION = "#b9c0c8"
_INK = "#22272e"
_IDLE = "#f1f2f4"
_BOX = 0.72
"""Height of a box as a share of its row; arrows have the rest."""


# ---- the picture -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Ranks that run the same stages; the first is drawn for all."""

    stages: tuple[str, ...]
    ranks: tuple[int, ...]


def draw_timeline(
    timeline: Timeline, path: str | PathLike[str] | None = None, *, source: str = "simulated", unit: str = ""
) -> Figure:
    """A picture of `timeline`, which a notebook shows by itself; also written to `path` if there is one.

    timeline: a schedule with times, such as `simulate(schedule, costs)`.
    path: its suffix chooses the format (.png, .svg, .pdf).
    source: where the times come from; it stands in the title. unit: the unit of the times, if it is not seconds.

    A row for the ranks of a stage submesh (or of the submeshes' common part, where they overlap), a colour for each
    module: light is forward, dark backward, in between the weights' part of a split one, the number is the microbatch.
    Thin arrows are moves, stripes below a row copies to and from the host and pulls of parameters. Touches no global
    state of matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = _rows(timeline)
    boxes = [end - start for op, (start, end) in timeline.spans.items() if op.kind in "FBW" and end > start]
    slots = timeline.makespan / sorted(boxes)[len(boxes) // 4] if boxes else 1
    busiest = max(sum(end > start for _, start, end in timeline.for_rank(row.ranks[0])) for row in rows)
    # Room for the shorter boxes, but not where a stage is so small that it can have none.
    width = min(max(9.0, min(2.5 + 0.24 * slots, 2.5 + 1.0 * busiest)), 40.0)
    figure = Figure(figsize=(width, 1.6 + 0.62 * len(rows)), dpi=130)
    figure.set_layout_engine("constrained", h_pad=0.08)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    scale, unit = _draw_frame(axes, timeline, rows, unit)
    _set_title(figure, timeline, source=source, scale=scale, unit=unit)
    for y, row in enumerate(rows):
        _draw_row(axes, timeline, row, y, inches=(width - 2.2) / (timeline.makespan or 1))
    _draw_moves(axes, timeline, rows, width)
    _draw_legend(figure, timeline)
    if path is not None:
        figure.savefig(path, facecolor="white")
    return figure


def module_colour(module: str, modules: Sequence[str]) -> str:
    """The colour "#rrggbb" of a module in pictures, by its place in `modules`, which has it: `StageGraph.modules`.

    Both have names: `module_colour("llm", ("vision", "llm"))`.
    """
    return _COLOURS[modules.index(module) % len(_COLOURS)]


def light(colour: str, part: float = 0.62) -> str:
    """A light shade of a colour "#rrggbb", in the same form, `part` of the way to white: 0 is the colour, 1 white."""
    hue, lightness, saturation = colorsys.rgb_to_hls(*_rgb(colour))
    red, green, blue = colorsys.hls_to_rgb(hue, lightness + part * (1 - lightness), saturation)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _rows(timeline: Timeline) -> list[_Row]:
    graph = timeline.schedule.graph
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in graph.ranks:
        groups.setdefault(graph.stages_on(rank), []).append(rank)
    place = {stage.name: i for i, stage in enumerate(graph.topological)}
    # Sorted by the last stage of a group: submeshes that an encoder spans stay in the order of the LLM's stages.
    order = sorted(groups, key=lambda stages: [(lane, place[name]) for name, lane in reversed(stages)])
    return [_Row(stages=tuple(name for name, _ in stages), ranks=tuple(groups[stages])) for stages in order]


def _draw_frame(axes: Axes, timeline: Timeline, rows: list[_Row], unit: str) -> tuple[float, str]:
    """Draws scales and labels; returns the number of units in a second, and the unit."""
    span = timeline.makespan or 1.0
    scale, unit = (1.0, unit) if unit else _unit(timeline.makespan)
    axes.set_xlim(0, span)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8, color=_INK)
    right = axes.secondary_yaxis("right")
    bubbles = [sum(timeline.bubbles[rank] for rank in row.ranks) / len(row.ranks) for row in rows]
    right.set_yticks(range(len(rows)), [f"idle {bubble:.0%}" for bubble in bubbles], fontsize=8, color="#6b7280")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x * scale:g}")
    axes.set_xlabel(f"time [{unit}]", fontsize=8, color=_INK)
    axes.tick_params(axis="x", labelsize=8, colors=_INK)
    for side in (axes, right):
        side.tick_params(axis="y", length=0)
        for spine in side.spines.values():
            spine.set_visible(False)
    return scale, unit


def _set_title(figure: Figure, timeline: Timeline, *, source: str, scale: float, unit: str) -> None:
    schedule = timeline.schedule
    stages = _counted(len(schedule.graph.stages), "stage")
    set_title(
        figure,
        f"{schedule.name}, {source}:",
        f"{stages} × {_counted(schedule.microbatches, 'microbatch', 'es')},",
        f"makespan {timeline.makespan * scale:.4g} {unit},",
        f"bubble {timeline.bubble:.1%}",
    )


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural * (count != 1)}"


def set_title(figure: Figure, *parts: str, size: float = 11) -> None:
    """Sets the title of a figure of matplotlib: the parts, one behind the other, on lines that fit into its width.

    `set_title(figure, "1f1b, simulated:", "makespan 3 s")`. A part that does not fit behind another begins a new line.
    size: of the text, in points.
    """
    lines = wrapped(*parts, width=0.97 * figure.get_figwidth(), size=size)
    figure.suptitle("\n".join(lines), x=0.015, ha="left", fontsize=size, color=_INK)


_LONGEST, _LINES = 30, 4
"""The most characters of a line, and lines of stages, in the margin beside a row."""


def shown(name: str, most: int = _LONGEST) -> str:
    """A name; with more than `most` characters its two ends around "…", `most` characters together."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}"


def _label(row: _Row) -> str:
    """The stages of a row and its ranks, on lines short enough for a margin."""
    lines = [""]
    for stage in row.stages:
        longer = ", ".join(filter(None, [lines[-1], shown(stage)]))
        lines = [*lines[:-1], longer] if len(longer) <= _LONGEST else [*lines, shown(stage)]
    if len(lines) > _LINES:
        lines = [*lines[: _LINES - 1], f"… {lines[-1]}"]
    return "\n".join([*filter(None, lines), f"rank{'s' * (len(row.ranks) > 1)} {show_ranks(row.ranks)}"])


def _unit(seconds: float) -> tuple[float, str]:
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 1:
            return scale, unit
    return (1e6, "µs") if seconds else (1.0, "s")


def _draw_row(axes: Axes, timeline: Timeline, row: _Row, y: int, *, inches: float) -> None:
    """Draws the boxes of one row; `inches` per second decide which boxes have room for a number."""
    low = y - _BOX / 2
    axes.broken_barh([(0, timeline.makespan)], (low, _BOX), facecolors=_IDLE, zorder=1)
    spans = [item for item in timeline.for_rank(row.ranks[0]) if item[2] > item[1]]
    fills = [_fill(timeline, op) for op, _, _ in spans]
    axes.broken_barh(
        [(start, end - start) for _, start, end in spans],
        (low, _BOX),
        facecolors=fills,
        edgecolors="white",
        linewidth=0.5 if inches * timeline.makespan < 30 else 0.3,
        zorder=2,
    )
    copies = [(op, *timeline.span(op)) for op in _copies(timeline, row.ranks[0])]
    axes.broken_barh(  # beside the ranks' ops: a stripe between two rows
        [(start, end - start) for _, start, end in copies],
        (y + _BOX / 2 + 0.03, 0.09),
        facecolors=[_fill(timeline, op) for op, _, _ in copies],
        zorder=2,
    )
    for (op, start, end), fill in zip(spans, fills, strict=True):
        text = str(op.microbatch)
        room = (end - start) * inches * 72 / (0.62 * len(text) + 0.15)  # the largest font size in points that fits
        if op.kind in "FBW" and room >= 4:
            ink = "white" if _dark(fill) else _INK
            where = ((start + end) / 2, y)
            axes.annotate(text, where, ha="center", va="center", fontsize=min(8.0, room), color=ink, zorder=3)


def _copies(timeline: Timeline, rank: int) -> Iterator[Op]:
    """The copies to and from the host of a rank, and the gathers by which it pulls parameters."""
    graph = timeline.schedule.graph
    for op in timeline.schedule.for_rank(rank):
        if op.kind in COPY_KINDS or ("pull", rank, False) in occupied_resources(graph, op):
            yield op


def _fill(timeline: Timeline, op: Op) -> str:
    if op.kind in _ONCE:
        return _ONCE[op.kind]
    if op.kind in ("pack", "move", "unpack", "gather"):
        return _COMMUNICATION
    graph = timeline.schedule.graph
    colour = module_colour(graph.stage(op.stage).module, graph.modules)
    return {"F": light(colour), "W": light(colour, 0.3)}.get(op.kind, colour)


def _rgb(colour: str) -> tuple[float, float, float]:
    return int(colour[1:3], 16) / 255, int(colour[3:5], 16) / 255, int(colour[5:7], 16) / 255


def _dark(colour: str) -> bool:
    red, green, blue = _rgb(colour)
    return 0.3 * red + 0.59 * green + 0.11 * blue < 0.6


def _draw_moves(axes: Axes, timeline: Timeline, rows: list[_Row], width: float) -> None:
    """Draws an arrow for each move, from the edge of the sender's row to the edge of the receiver's."""
    graph = timeline.schedule.graph
    # An op on several rows is drawn at the row with the fewest other stages.
    lanes = {(stage.name, lane): set(stage.ranks_of(lane)) for stage in graph.stages for lane in range(stage.lanes)}
    home = {
        (name, lane): min((len(row.stages), y) for y, row in enumerate(rows) if not ranks.isdisjoint(row.ranks))[1]
        for (name, lane), ranks in lanes.items()
    }
    arrows: list[tuple[float, float, float, float]] = []
    for op, (start, end) in timeline.spans.items():
        if op.kind != "move":
            continue
        edge = graph.edge(op.edge)
        source, target = (edge.dst, edge.src) if op.backward else (edge.src, edge.dst)
        tail, head = (
            home[end, 0 if op.microbatch < 0 else graph.stage(end).lane(op.microbatch)] for end in (source, target)
        )
        if tail != head:
            step = _BOX / 2 if head > tail else -_BOX / 2
            arrows.append((start, tail + step, end - start, head - tail - 2 * step))
    if not arrows:
        return
    x, y, dx, dy = zip(*arrows, strict=True)
    thickness = 0.9 / 72 / width  # points, as a part of the figure's width
    style = {"headwidth": 5, "headlength": 6, "headaxislength": 5, "color": _INK, "alpha": 0.55}
    axes.quiver(x, y, dx, dy, angles="xy", scale_units="xy", scale=1, units="width", width=thickness, zorder=4, **style)


def _draw_legend(figure: Figure, timeline: Timeline) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    graph = timeline.schedule.graph
    handles: list[Patch | Line2D] = []
    for module in graph.modules:
        stages = [stage for stage in graph.stages if stage.module == module]
        kinds = {"F": "forward"}
        kinds |= {"B": "backward"} if any(stage.backward for stage in stages) else {}
        kinds |= {"W": "weights"} if any(stage.split for stage in stages) else {}
        copied = any(stage.offload or stage.stashes for stage in stages)
        kinds |= {"offload": "copies to and from the host"} if copied else {}
        for kind, text in kinds.items():
            name = f"{shown(module)} {text}"
            handles.append(Patch(facecolor=_fill(timeline, Op(kind, stages[0].name)), label=name))
    kinds = {op.kind for op, (start, end) in timeline.spans.items() if end > start and occupied_ranks(graph, op)}
    handles += [Patch(facecolor=colour, label=kind) for kind, colour in _ONCE.items() if kind in kinds]
    if kinds & {"pack", "move", "unpack", "gather"} or any(stage.gather for stage in graph.stages):
        handles.append(Patch(facecolor=_COMMUNICATION, label="communication"))
    handles.append(Patch(facecolor=_IDLE, edgecolor="#d0d4d9", linewidth=0.5, label="idle"))
    if any(op.kind == "move" for op in timeline.schedule.ops):
        handles.append(Line2D([], [], color=_INK, alpha=0.55, linewidth=0.9, marker=">", markersize=3, label="move"))
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, int(figure.get_figwidth() / max(1.45, 0.55 + 0.065 * longest)))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False, handlelength=1.4
    )


# ---- the trace -------------------------------------------------------------------------------------------------------


def write_trace(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Write `timeline` to `path` in the Trace Event Format (JSON), times in µs.

    The trace has a process for each module (and "world" for the norm), with a thread for each of its ranks. Each move
    is a flow from sender to receiver; a move that occupies no rank also has its own span.

    Args:
      timeline: a schedule with times, such as `simulate(schedule, costs)`.
      path: the file, such as "trace.json"; it is replaced.
    """
    events = [*_names(timeline), *_slices(timeline), *_flows(timeline)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _processes(timeline: Timeline) -> dict[str, int]:
    return {module: pid for pid, module in enumerate((*timeline.schedule.graph.modules, WORLD), start=1)}


def _process(timeline: Timeline, stage: str) -> int:
    return _processes(timeline)[stage if stage == WORLD else timeline.schedule.graph.stage(stage).module]


def _names(timeline: Timeline) -> Iterator[dict]:
    graph = timeline.schedule.graph
    for module, pid in _processes(timeline).items():
        ranks = {r for s in graph.stages if s.module == module for r in s.ranks} if module != WORLD else graph.ranks
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": module}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for rank in sorted(ranks):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": {"name": f"rank {rank}"}}


def _slices(timeline: Timeline) -> Iterator[dict]:
    graph = timeline.schedule.graph
    for number, (op, (start, end)) in enumerate(timeline.spans.items()):
        common = {"name": str(op), "cat": op.kind, "args": {"stage": op.stage, "microbatch": op.microbatch}}
        stages = [graph.edge(op.edge).src, graph.edge(op.edge).dst] if op.kind == "move" else [op.stage]
        if not occupied_ranks(graph, op):
            span = {**common, "id": number, "pid": _process(timeline, op.stage), "tid": 0}
            yield {**span, "ph": "b", "ts": start * 1e6}
            yield {**span, "ph": "e", "ts": end * 1e6}
            continue
        for stage in stages:
            ranks = graph.ranks if stage == WORLD else graph.stage(stage).ranks_of(op.microbatch)
            for rank in occupied_ranks(graph, op) if op.kind == "gather" else ranks:
                place = {"pid": _process(timeline, stage), "tid": rank}
                yield {**common, **place, "ph": "X", "ts": start * 1e6, "dur": (end - start) * 1e6}


def _flows(timeline: Timeline) -> Iterator[dict]:
    graph, schedule = timeline.schedule.graph, timeline.schedule
    users = {before: op for op in timeline.schedule.ops for before in timeline.schedule.dependencies(op)}
    # A flow is bound to the box around its time. An op that takes no time has no box: then the op before or behind it
    # is used. No op comes before the pack of a tied weight, and so there is no flow.
    boxed = {op for op, (start, end) in timeline.spans.items() if end > start}
    for number, op in enumerate(timeline.schedule.ops):
        if op.kind != "move":
            continue
        (sender,), receiver = schedule.dependencies(op), users[op]
        while sender not in boxed and (before := schedule.dependencies(sender)):
            sender = before[0]
        while receiver not in boxed and receiver in users:
            receiver = users[receiver]
        if sender not in boxed:
            continue
        start, end = timeline.span(sender)
        for phase, end_op, time in (("s", sender, (start + end) / 2), ("f", receiver, timeline.span(receiver)[0])):
            place = {
                "pid": _process(timeline, end_op.stage),
                "tid": graph.stage(end_op.stage).ranks_of(op.microbatch)[0],
            }
            flow = {"ph": phase, "id": number, "name": "move", "cat": "move", "ts": time * 1e6, **place}
            yield {**flow, "bp": "e"} if phase == "f" else flow
