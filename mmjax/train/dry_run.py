"""A forecast of a run that needs no device: layout, memory, programs, compile time and the planned bubble."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.assembly.assembly import plan
from mmjax.assembly.epochs import with_steps
from mmjax.assembly.parts import Assembly
from mmjax.assembly.samples import open_source
from mmjax.data.packing import Packer
from mmjax.data.source import Source
from mmjax.data.split import busiest_over_mean
from mmjax.eval.evaluator import Evaluator
from mmjax.flags import counted
from mmjax.mesh import gpu
from mmjax.mesh.spmd import Program
from mmjax.pipeline.memory import Memory, memory_by_stage, most_loaded
from mmjax.pipeline.peak import Peak, fullest
from mmjax.pipeline.place import PlacedModel
from mmjax.pipeline.single.executor import SingleExecutor
from mmjax.recipe import Recipe
from mmjax.recipe.advice import advise
from mmjax.recipe.device_defaults import with_earlier_defaults
from mmjax.schedule.dispatch import dispatch_table
from mmjax.schedule.graph import show_ranks
from mmjax.schedule.timeline import draw_timeline
from mmjax.viz.layout import draw_layout

COMPILE_SECONDS: Mapping[str, float] = {
    "step": 11.0, "B": 1.9, "F": 1.8, "W": 0.6, "infer": 0.8, "update": 0.8, "reduce": 0.5, "prepare": 0.3,
    "B+reduce": 2.4, "W+reduce": 1.1,
}  # fmt: skip
"""Seconds of one CPU core to trace and compile a program of each kind: means over the digits configurations on CPU.

Layers are scanned, so larger models take about as long.
"""
COMPILE_RANGE = 0.7, 2.5
"""Factors of these seconds on other CPUs, idle and busy. Of accelerators nothing is known: their programs are tuned."""
PLAIN_SECONDS = 0.1
"""Seconds of one CPU core for a program of any other kind."""
_COLUMNS = 16
_LOOKED_AT = 4
"""Microbatches in which the work of ranks of cp is counted."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A forecast of a run.

    Attributes:
      recipe: the run's configuration, with the devices' defaults that were chosen.
      parts: its parts, traced without devices.
      memory: memory of each of a stage's devices, by stage; for a program per op, or one that loops over microbatches.
      rank: the most loaded device.
      most: memory of that device, each kind at its own peak.
      peak: the op during which a device holds most; ``None`` where one program runs the step on all lanes, since all
        devices then hold the same.
      programs: how many programs there are, by kind.
      processes: processes of the run.
      imbalance: by module with cp, the attended pairs of the fullest rank over those of the mean rank, in the first
        microbatches.
    """

    recipe: Recipe
    parts: Assembly
    memory: Mapping[str, Memory]
    rank: int
    most: Memory
    peak: Peak | None
    programs: Mapping[str, int]
    processes: int = 1
    imbalance: Mapping[str, float] = field(default_factory=dict)

    @property
    def compile_seconds(self) -> tuple[float, float] | None:
        """Least and most seconds to compile everything for CPU devices; ``None`` for accelerators.

        They are CPU times by kind of program, over how many compile at a time, and suppose an empty cache.
        """
        if self.recipe.world.platform not in ("", "cpu"):
            return None
        total = sum(count * COMPILE_SECONDS.get(kind, PLAIN_SECONDS) for kind, count in self.programs.items())
        seconds = total / min(8, os.cpu_count() or 1, max(1, sum(self.programs.values())))
        least, most = COMPILE_RANGE
        return round(least * seconds, 1), round(most * seconds, 1)

    def as_json(self) -> dict[str, Any]:
        """Every figure as JSON, as ``--dry_run --json`` prints it; sizes in bytes, times in seconds, shares in [0, 1].

        By name: "devices", "processes", "layouts" and "buckets" by module, "stages" by stage, "in_flight",
        "most_loaded", "fullest" (or ``None``), "programs", "bucket_combinations", "compile_seconds" ([least, most] or
        ``None``), "schedule", "planned_bubble", "cp_imbalance", "choices" (lines about settings that were chosen for
        GPUs) and "advice".
        """
        stages, report = self.parts.placed.stages, self.parts.report
        return {
            "devices": self.parts.world.size,
            "processes": self.processes,
            "layouts": {name: asdict(layout) for name, layout in self.recipe.model.layouts.items()},
            "stages": {
                name: {
                    "ranks": list(stages[name].submesh.ranks),
                    "in_flight": report.in_flight[name],
                    "residual_bytes": report.residual_bytes[name],
                    "memory": _figures(memory),
                }
                for name, memory in self.memory.items()
            },
            "in_flight": dict(report.in_flight),
            "most_loaded": {"rank": self.rank, "memory": _figures(self.most)},
            "fullest": self.peak and {"rank": self.peak.rank, "op": str(self.peak.op), "bytes": self.peak.bytes},
            "programs": dict(self.programs),
            "buckets": {name: list(map(list, buckets)) for name, buckets in self._buckets.items()},
            "bucket_combinations": len(self.parts.shapes),
            "compile_seconds": self.compile_seconds,
            "schedule": self.parts.schedule.name,
            "planned_bubble": self.parts.planned.bubble,
            "cp_imbalance": dict(self.imbalance),
            "choices": list(self.parts.choices),
            "advice": list(advise(self.recipe)),
        }

    def draw(self, folder: str | Path) -> None:
        """Writes ``layout.png`` and ``timeline.png`` into a folder."""
        draw_layout(self.recipe.model.layouts, Path(folder) / "layout.png")
        source, unit = "planned with nominal costs", "forwards of the costliest stage"
        draw_timeline(self.parts.planned, Path(folder) / "timeline.png", source=source, unit=unit)

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """Everything as text of several lines for a terminal."""
        lines = [f"{name}: {layout.describe()}" for name, layout in self.recipe.model.layouts.items()]
        if gpu.will_start(self.recipe.world.platform):
            lines.append(gpu.describe_planned(deterministic=self.recipe.train.deterministic))
        lines += [
            *self.parts.choices,
            *advise(self.recipe),
            "",
            *layout_text(self.parts.placed, self.parts.world.size),
            "",
        ]
        lines += [*self._table(), self._most_loaded(), ""]
        lines += [str(dispatch_table(self.parts.schedule)), "", self._programs(), self._bubble(), *self._shared()]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        """Memory of a device: of each stage, or of the one program, whose devices all hold the same."""
        stages = self.parts.placed.stages
        if self.peak:
            rows = {name: (stages[name].submesh.ranks, memory) for name, memory in self.memory.items()}
        else:
            rows = {"step": (self.parts.schedule.graph.ranks, self.most)}
        return _table(rows)

    def _most_loaded(self) -> str:
        if not self.peak:
            return (
                f"one program: every device holds {show_bytes(self.most.total)}, blocks that fit any of its stages; "
                "parameters, gradients and activations are among its temporaries"
            )
        names = ", ".join(name for name, stage in self.parts.placed.stages.items() if self.rank in stage.submesh.ranks)
        return (
            f"most loaded: rank {self.rank} ({names}) with {show_bytes(self.most.total)}, each kind at its own peak\n"
            f"fullest moment: {self.peak.op}, rank {self.peak.rank} with {show_bytes(self.peak.bytes)}"
        )

    @property
    def _buckets(self) -> dict[str, tuple[tuple[int, int], ...]]:
        packer = self.parts.packer
        return {name: packer.buckets_of(name) for name in packer.bucket_counts}

    def _programs(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.programs.items())
        buckets = "; ".join(
            f"{name} {' '.join(f'{rows}x{width}' for rows, width in buckets)}"
            for name, buckets in self._buckets.items()
        )
        programs = counted(sum(self.programs.values()), "program")
        return (
            f"{programs} ({kinds}) for {counted(len(self.parts.shapes), 'combination')} of buckets "
            f"({buckets} rows x positions a cell)\n{self._compile_time()}"
        )

    def _compile_time(self) -> str:
        if not self.compile_seconds:
            return "compile time: unknown (an accelerator's programs are tuned while they are compiled)"
        least, most = self.compile_seconds
        return (
            f"compile time: {least:.0f} to {most:.0f} s for CPU devices where nothing is cached (by kind of program, "
            "shared among the cores; an accelerator's programs are tuned besides)"
        )

    def _shared(self) -> list[str]:
        """How evenly the ranks of cp share the attention of rows."""
        ranks = {name: self.parts.packer.splits[name].ranks for name in self.imbalance}
        return [
            f"{name}: attention over {ranks[name]} ranks of cp, fullest / mean {ratio:.3f} (Layout.cp_tokens="
            f"{self.parts.packer.splits[name].method!r}, pairs of the first microbatches)"
            for name, ratio in self.imbalance.items()
        ]

    def _bubble(self) -> str:
        planned, schedule = self.parts.planned, self.parts.schedule
        waiting = f", {self.processes} processes that wait for each other" if schedule.graph.waits else ""
        return (
            f"planned bubble: {planned.bubble:.1%} ({schedule.name}, {schedule.microbatches} microbatches{waiting}, "
            "simulated with nominal costs)"
        )


def dry_run(recipe: Recipe, *, device_memory: float = 0.0, processes: int = 1) -> DryRun:
    """Traces a run for devices that need not be here. Starts no backend, compiles nothing and writes nothing.

    The result has the `memory` of a device of each stage, numbers of `programs` by kind, and `str` gives a report.

    Args:
      recipe: the configuration, as `load_config(["run.gin"])` gives it.
      device_memory: bytes of a GPU, for defaults that depend on it where the run would be on GPUs; 0 for an H100's.
      processes: processes of the run, with as many devices each; on GPUs senders wait for receivers between them.

    Raises:
      ConfigError: a part of the configuration does not fit another.
    """
    source = open_source(recipe, split="train")
    recipe = with_steps(recipe, source)
    parts = plan(recipe, source, device_memory=device_memory, processes=processes)
    recipe = with_earlier_defaults(recipe, parts.recipe).recipe
    memory = memory_by_stage(parts.placed, parts.schedule, parts.shapes.values())
    if isinstance(parts.executor, SingleExecutor):
        rank, most = parts.schedule.graph.ranks[0], parts.executor.memory()
        peak = None
    else:
        rank, most = most_loaded(parts.placed, memory)
        peak = fullest(parts.placed, parts.schedule, parts.shapes.values())
    programs = [*parts.executor.programs()]
    if recipe.train.eval_samples:
        programs += Evaluator(parts).predictor.programs()
    return DryRun(
        recipe=recipe,
        parts=parts,
        memory=memory,
        rank=rank,
        most=most,
        peak=peak,
        programs=count_kinds(programs),
        processes=processes,
        imbalance=_imbalance(recipe, parts.packer, source),
    )


def _imbalance(recipe: Recipe, packer: Packer, source: Source) -> dict[str, float]:
    """Work of attention of the fullest rank of cp over the mean, by module, in the first step's first microbatches."""
    if all(split.ranks == 1 for split in packer.splits.values()):
        return {}
    metas = [source.meta(index) for index in range(recipe.train.global_batch)]
    works = [packer.context_work(plan) for plan in packer.plan(0, metas).microbatches[:_LOOKED_AT]]
    return {name: busiest_over_mean(np.concatenate([work[name] for work in works])) for name in works[0]}


def count_kinds(programs: Sequence[Program]) -> dict[str, int]:
    """How many different programs there are by kind: {"F": 3, "B": 3, "update": 2, "pack": 2, "move": 2, "unpack": 2}.

    A kind is the kind of an op; a boundary's programs are its packs, moves and unpacks.

    programs: such as those of `executor.programs()`; one that is in it twice counts once.
    """
    unique = {id(program): program for program in programs}.values()
    return dict(Counter(_kind(program.name) for program in unique))


def _kind(name: str) -> str:
    """The op of a program by its name: "B llm.0", "llm.0->llm.1 forward unpack", "llm.0->llm.1 backward move 0-3"."""
    words = name.split()
    return next((word for word in words if word in ("pack", "move", "unpack")), words[0])


# ---- the layout ------------------------------------------------------------------------------------------------------


def _coordinates(placed: PlacedModel, name: str) -> dict[int, str]:
    """Each rank's place in the stage, such as "d0t1". Axes of degree one are left out."""
    layout = placed.layouts[placed.stages[name].model.module]
    cells = {}
    for place, rank in enumerate(placed.stages[name].submesh.ranks):
        group, within = divmod(place, layout.dp * layout.replica_size)
        dp, in_replica = divmod(within, layout.replica_size)
        cp, tp = divmod(in_replica, layout.tp)
        groups = ((f"l{group}", layout.lanes), (f"k{group}", layout.copies))
        shown = (*groups, (f"d{dp}", layout.dp), (f"c{cp}", layout.cp), (f"t{tp}", layout.tp))
        cells[rank] = "".join(text for text, degree in shown if degree > 1) or "all"
    return cells


def layout_text(placed: PlacedModel, size: int, columns: int = _COLUMNS) -> list[str]:
    """The layout of a world of ``size`` ranks, in lines for a terminal: ranks are columns, stages are rows.

    A cell is the rank's place in the stage, such as "d0t1", or "." where it has none. In a world of more than four
    times as many ranks as ``columns`` a column is a group of ranks that are all of the same stages.

    Args:
      placed: the model on its devices, such as ``plan(recipe).placed``.
      size: number of ranks, such as ``recipe.devices``.
      columns: at most so many are side by side.
    """
    rows = {name: _coordinates(placed, name) for name in placed.stages}
    edges = [rank for stage in placed.stages.values() for rank in (stage.submesh.ranks[0], stage.submesh.ranks[-1] + 1)]
    group = math.gcd(*edges) if size > 4 * columns else 1
    left = max(len("rank"), *map(len, rows))
    width = max(len(str(size - 1)), *(len(text) for row in rows.values() for text in row.values())) + 1
    lines = [f"each column is {group} ranks: the first of them and its place"] if group > 1 else []
    shown = range(0, size, group)
    for first in range(0, len(shown), columns):
        ranks = shown[first : first + columns]
        lines.append(f"{'rank':{left}} " + "".join(f"{rank:>{width}}" for rank in ranks))
        for name, row in rows.items():
            if any(rank in row for rank in ranks):
                lines.append(f"{name:{left}} " + "".join(f"{row.get(rank, '.'):>{width}}" for rank in ranks))
    return lines


# ---- the table -------------------------------------------------------------------------------------------------------


def _table(stages: Mapping[str, tuple[tuple[int, ...], Memory]]) -> list[str]:
    """A table of the memory of one device of each stage, by kind. `stages` has the ranks and the memory of each."""
    kinds = ["parameters", "optimizer", "gradients", "activations", "temporaries", "total"]
    if any(memory.host for _, memory in stages.values()):
        kinds.append("host")
    rows = [("on each device", "ranks", *(f"~{kind}" if kind == "temporaries" else kind for kind in kinds))]
    for name, (ranks, memory) in stages.items():
        rows.append((name, show_ranks(ranks), *(show_bytes(getattr(memory, kind)) for kind in kinds)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            f"{text:<{w}}" if i < 2 else f"{text:>{w}}" for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def show_bytes(size: int) -> str:
    """A number of bytes as "1.5 GiB", "12 KiB", "100 B" or "0"."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:.0f} {name}"
    return f"{size} B" if size else "0"


def _figures(memory: Memory) -> dict[str, int]:
    kinds = {field.name: getattr(memory, field.name) for field in fields(Memory)}
    return kinds | {"activations": memory.activations, "total": memory.total}
