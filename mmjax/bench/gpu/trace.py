"""A profiler's trace of one step: device time by kernel, and by the line of source of a kernel."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

MOST = 25
"""The most rows of a table."""
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_OP = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_METADATA, _CALLS = re.compile(r"metadata=\{([^}]*)\}"), re.compile(r"calls=%?([\w.\-]+)")
_FIELD = re.compile(r'(op_name|source_file|source_line|stack_frame_id)="?([^"\s}]+)"?')
_FRAMEWORK = ("/jax/", "/flax/", "/optax/", "<frozen")


def traced_events(run: Callable[[], Any], folder: Path) -> list[dict[str, Any]]:
    """The events, as Perfetto's JSON has them, of the profiler's trace of one call of ``run``, its second.

    Args:
      run: waits for its results itself.
      folder: a folder for the trace, which is emptied before and removed after. If the trace is not large, it stays
        beside ``folder`` as trace.json.gz.
    """
    run()
    shutil.rmtree(folder, ignore_errors=True)
    with jax.profiler.trace(str(folder), create_perfetto_trace=True):
        run()
    file = next(folder.rglob("perfetto_trace.json.gz"))
    with gzip.open(file, "rt", encoding="utf-8") as text:
        read = json.load(text)
    if file.stat().st_size < 12 << 20:
        shutil.copy(file, folder.with_name("trace.json.gz"))
    shutil.rmtree(folder, ignore_errors=True)
    return read["traceEvents"] if isinstance(read, dict) else read


def kernels_of(events: Iterable[Mapping[str, Any]], hlo: str) -> dict[str, Any]:
    """Seconds of device time: "seconds" in all, and "by_kernel", "by_op" and "by_place" in the source, largest first.

    ``events`` are those of ``traced_events``, ``hlo`` is the text of the compiled program. A kernel is an event that
    names its HLO instruction. Other events of a GPU's streams count as ``other``.
    """
    origin = origins(hlo)
    by_kernel = {name.replace(".", "_").replace("-", "_"): name for name in origin}  # as XLA names its own kernels
    total, tables = 0.0, {name: defaultdict[str, float](float) for name in ("by_kernel", "by_place", "by_op")}
    for event in on_device(list(events)):
        seconds, arguments = event.get("dur", 0.0) / 1e6, event.get("args", {})
        instruction = str(arguments.get("hlo_op") or by_kernel.get(str(event["name"]), ""))
        source = origin.get(instruction, {})
        total += seconds
        tables["by_kernel"][str(event["name"])[:120]] += seconds
        tables["by_place"][source.get("place", "other")] += seconds
        tables["by_op"][source.get("op", instruction or "other")] += seconds
    return {"seconds": total, **{name: most(table, MOST) for name, table in tables.items()}}


def most(seconds: Mapping[str, float], count: int | None = None) -> dict[str, float]:
    """The ``count`` largest entries, or all for ``None``, in descending order."""
    return dict(sorted(seconds.items(), key=lambda item: -item[1])[:count])


def on_device(events: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Events of kernels, without loops and calls, whose events contain those of the kernels inside."""
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name" and e.get("ph") == "M"}
    lines = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name" and e.get("ph") == "M"
    }
    complete = [e for e in events if e.get("ph") == "X"]
    on_gpu = [
        e
        for e in complete
        if "GPU" in str(names.get(e["pid"])) and str(lines.get((e["pid"], e["tid"]), "")).startswith("Stream")
    ]
    kernels = on_gpu or [e for e in complete if "hlo_op" in e.get("args", {})]
    return [
        e for e in kernels if not str(e.get("args", {}).get("hlo_op", "")).startswith(("while", "call", "conditional"))
    ]


def origins(hlo: str) -> dict[str, dict[str, str]]:
    """The origin of each HLO instruction with metadata: {"op": the JAX operation, "place": "file:line" or "other"}.

    Both begin with "backward " or "again " in a backward or in a forward that is computed again.
    """
    frames = _frames(hlo)
    by_instruction: dict[str, dict[str, str]] = {}
    for name, metadata in _metadata(hlo).items():
        fields = dict(_FIELD.findall(metadata))
        place = frames.get(fields.get("stack_frame_id", ""), "")
        if "source_file" in fields:
            place = f"{_short(fields['source_file'])}:{fields.get('source_line', '?')}"
        op = fields.get("op_name", "").rsplit("/", 1)[-1]
        direction = "again " if "rematted" in metadata else "backward " if "transpose(jvp" in metadata else ""
        by_instruction[name] = {"op": direction + op if op else name, "place": direction + place if place else "other"}
    return by_instruction


def _metadata(hlo: str) -> dict[str, str]:
    """Metadata by HLO instruction. A fusion without any takes the last metadata inside it."""
    by_instruction, calls, last_inside = dict[str, str](), dict[str, str](), dict[str, str]()
    computation = ""
    for line in hlo.splitlines():
        if opened := _COMPUTATION.match(line):
            computation = opened[1]
        elif op := _OP.match(line):
            metadata, called = _METADATA.search(line), _CALLS.search(line)
            if metadata and "op_name" in metadata[1]:
                by_instruction[op[1]] = last_inside[computation] = metadata[1]
            elif called:
                calls[op[1]] = called[1]
    return by_instruction | {name: last_inside[inner] for name, inner in calls.items() if inner in last_inside}


def _frames(hlo: str) -> dict[str, str]:
    """Places "file:line" by frame id, where the text has tables of files, functions, locations and frames."""

    def table(title: str) -> dict[str, str]:
        match = re.search(rf"^{title}\n((?:\d+ .*\n)+)", hlo, re.MULTILINE)
        return dict(line.split(" ", 1) for line in match[1].splitlines()) if match else {}

    files = {key: value.strip('"') for key, value in table("FileNames").items()}
    places, parents, where = table("FileLocations"), dict[str, str](), dict[str, str]()
    for key, value in table("StackFrames").items():
        fields = dict(re.findall(r"(\w+)=(\d+)", value))
        location = dict(re.findall(r"(\w+)=(\d+)", places.get(fields.get("file_location_id", ""), "")))
        where[key] = f"{files.get(location.get('file_name_id', ''), '?')}:{location.get('line', '?')}"
        parents[key] = fields.get("parent_frame_id", "0")
    return {key: _short(_innermost_frame(key, where, parents)) for key in where}


def _innermost_frame(key: str, where: Mapping[str, str], parents: Mapping[str, str]) -> str:
    """The innermost frame that is not in a framework."""
    visited = set[str]()
    while key in where and key not in visited:
        if not any(part in where[key] for part in _FRAMEWORK):
            return where[key]
        visited.add(key)
        key = parents[key]
    return "?"


def _short(path: str) -> str:
    """A path, shortened to begin at the package; or a file name."""
    return "mmjax/" + path.split("/mmjax/")[-1] if "/mmjax/" in path else path.rsplit("/", 1)[-1]


def draw_profile(kernels: Mapping[str, Any], path: Path, title: str) -> None:
    """Draws bars of the places and kernels that take most time, as shares of all device time.

    Args:
      kernels: the result of ``kernels_of``; its "seconds" are above 0.
      path: the picture to write.
      title: a line above.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 10), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, table) in zip(figure.subplots(2, 1), list(_tables(kernels)), strict=True):
        rows = list(table.items())[:18][::-1]
        shares = [100 * seconds / kernels["seconds"] for _, seconds in rows]
        axes.barh([label[-90:] for label, _ in rows], shares, color="#4477aa")
        axes.set_xlabel(f"% of {1e3 * kernels['seconds']:.3g} ms on the device, {name}")
        axes.tick_params(axis="y", labelsize=7)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _tables(kernels: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, float]]]:
    return (("by line of source", kernels["by_place"]), ("by kernel", kernels["by_kernel"]))
