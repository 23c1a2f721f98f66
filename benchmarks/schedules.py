"""Every schedule, and the baselines that papers compare with, on three workloads: simulated, and measured.

A workload is a vision and an audio encoder before an LLM, on as many ranks as there are processes: one a rank, whose
ops sleep for their modelled time (``benchmarks.replay``). A method is a schedule on a placement
(``mmjax.schedule.placements``). All methods have the same ranks and the same layers. Placements differ in the number of
ranks of each module, or of stages that encoders are fused into; each method gets the fastest placement in simulation.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.simulate import MOST_ERROR, MOST_REPEATS, error, shortest
from mmjax.bench.rows import Row, at_most
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import PARAMETER_COPIES, Schedule
from mmjax.schedule.placements import Placement, TimedModule, apart, colocated_stages, in_pipeline, replicated, spanning
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs, Timeline, simulate

RANKS = 6
MICROBATCHES = 8
MS = 1e-3
LAYER, MOVE, ONCE, COPY = 3.5 * MS, 3 * MS, 5 * MS, 25 * MS
"""Seconds of a layer's forward on one rank, a move, a once-a-step op, and of an offload or a reload."""

COLOURS = {False: "#2f6db5", True: "#b9c0c8"}
"""Colours of bars, by whether they are a baseline's."""
INK, LEAST_COLOUR = "#22272e", "#c9405b"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Modules that are trained together: encoders and an LLM."""

    name: str
    encoders: tuple[TimedModule, ...]
    llm: TimedModule

    @property
    def least(self) -> float:
        """Seconds of a step in which no rank is ever idle and nothing is computed twice."""
        work = 0.0
        for module in (*self.encoders, self.llm):
            backward = 2.0 if module.trainable else 0.0
            work += module.layers * module.seconds * (1 + backward) * (sum(module.factors) or MICROBATCHES)
        return work / RANKS


def _workload(name: str, layers: tuple[int, int, int], *, frozen: bool = False, uneven: bool = False) -> Workload:
    factors = (0.4, 1.6, 0.7, 1.9, 0.3, 1.2, 0.5, 1.4)
    modules = [
        TimedModule(name=module, layers=n, seconds=LAYER)
        for module, n in zip(("vision", "audio", "llm"), layers, strict=True)
    ]
    vision, audio = (replace(module, trainable=not frozen) for module in modules[:2])
    if uneven:
        vision, audio = replace(vision, factors=factors), replace(audio, factors=factors[::-1])
    return Workload(name=name, encoders=(vision, audio), llm=modules[2])


WORKLOADS = (
    _workload("balanced", (12, 6, 18)),
    _workload("frozen encoders", (24, 12, 18), frozen=True),
    _workload("uneven encoders", (12, 6, 18), uneven=True),
)
"""Equally many layers for each rank; encoders without backward, twice as deep; microbatches of unequal costs."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A schedule on a placement.

    Attributes:
      name: shown in the row.
      schedule, window: see ``make_schedule``.
      placements: the placements that it may have on a workload.
      baseline: whether it is a baseline.
      offload: whether encoders' parameters are offloaded in the LLM's phase.
    """

    name: str
    schedule: str
    placements: Callable[[Workload], Iterable[Placement]]
    window: int = 0
    baseline: bool = False
    offload: bool = False

    def best(self, workload: Workload) -> tuple[Schedule, Costs]:
        """The schedule and costs of the placement that is shortest in simulation."""
        schedules = [self._on(placement) for placement in self.placements(workload)]
        return min(schedules, key=lambda pair: simulate(*pair).makespan)

    def _on(self, placement: Placement) -> tuple[Schedule, Costs]:
        graph, costs = placement.graph, placement.costs(MICROBATCHES, move=MOVE, once=ONCE)
        if self.offload:
            graph, costs = _offloaded(graph, [module.name for module in placement.encoders], costs)
        schedule = make_schedule(self.schedule, graph, MICROBATCHES, costs, window=self.window)
        return schedule, costs.split_as(schedule.graph)


def _offloaded(graph: StageGraph, modules: Sequence[str], costs: Costs) -> tuple[StageGraph, Costs]:
    stages = tuple(replace(stage, offload=stage.module in modules) for stage in graph.stages)
    copies = {(kind, stage.name, False): COPY for stage in stages if stage.offload for kind in PARAMETER_COPIES}
    return replace(graph, stages=stages), replace(costs, seconds={**costs.seconds, **copies})


def _apart(workload: Workload, chunks: int = 1) -> Iterator[Placement]:
    """Every split of the ranks among modules, one or more for each."""
    names = [module.name for module in (*workload.encoders, workload.llm)]
    for split in itertools.product(range(1, RANKS), repeat=len(names)):
        if sum(split) == RANKS:
            yield apart(workload.encoders, workload.llm, dict(zip(names, split, strict=True)), chunks=chunks)


def _spanning(workload: Workload) -> list[Placement]:
    return [spanning(workload.encoders, workload.llm, RANKS)]


def _in_pipeline(workload: Workload) -> list[Placement]:
    return [in_pipeline(workload.encoders, workload.llm, RANKS)]


def _colocated(workload: Workload) -> list[Placement]:
    return [colocated_stages(workload.encoders, workload.llm, RANKS, n) for n in range(1, RANKS)]


def _replicated(workload: Workload) -> list[Placement]:
    return [replicated(workload.encoders, workload.llm, RANKS)]


METHODS = (
    Method(name="1f1b", schedule="1f1b", placements=_apart),
    Method(name="gpipe", schedule="gpipe", placements=_apart),
    Method(name="eager-1f1b", schedule="eager-1f1b", placements=_apart),
    Method(name="zb-h1", schedule="zb-h1", placements=_apart),
    Method(name="interleaved, 2 chunks", schedule="interleaved", placements=lambda w: _apart(w, 2)),
    Method(name="three-phase", schedule="three-phase", placements=_spanning),
    Method(name="three-phase, windows of 4", schedule="three-phase", placements=_spanning, window=4),
    Method(name="three-phase, offload", schedule="three-phase", placements=_spanning, offload=True),
    Method(name="all encoders first", schedule="encoders-first", placements=_apart, baseline=True),
    Method(name="encoders in the pipeline", schedule="1f1b", placements=_in_pipeline, baseline=True),
    Method(name="encoders colocated", schedule="1f1b", placements=_colocated, baseline=True),
    Method(name="encoders replicated", schedule="1f1b", placements=_replicated, baseline=True),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The simulated and the measured step of a method on a workload."""

    workload: Workload
    method: Method
    simulated: Timeline
    measured: Timeline

    @property
    def in_flight(self) -> tuple[int, int]:
        """The most microbatches in flight in any stage of an encoder, and of the LLM."""
        peaks, llm = self.measured.in_flight, self.workload.llm.name
        of_llm = {node.name for node in self.measured.schedule.graph.stages if node.module == llm}
        return max(n for s, n in peaks.items() if s not in of_llm), max(n for s, n in peaks.items() if s in of_llm)

    @property
    def ranks(self) -> str:
        """Ranks of each module, such as "vision 2, audio 1, llm 3"."""
        graph = self.simulated.schedule.graph
        ranks = {m: {r for n in graph.stages if n.module == m for r in n.ranks} for m in graph.modules}
        return ", ".join(f"{module} {len(ranks_of_module)}" for module, ranks_of_module in ranks.items())


def results(rounds: int = MOST_REPEATS) -> Iterator[Result]:
    """Yields the results of every method on every workload; the shortest of up to three measured steps counts."""
    for workload, method in itertools.product(WORKLOADS, METHODS):
        schedule, costs = method.best(workload)
        simulated = simulate(schedule, costs)
        measured = shortest(schedule, costs, simulated.makespan, min(rounds, MOST_REPEATS))
        yield Result(workload=workload, method=method, simulated=simulated, measured=measured)


def bench_schedules(rounds: int) -> Iterator[Row]:
    """Yields for every method on every workload step and bubble, simulated and measured, and microbatches in flight."""
    for result in results(rounds):
        yield from rows(result)


def rows(result: Result) -> Iterator[Row]:
    """The rows of one result."""
    simulated, measured = result.simulated, result.measured
    difference = error(measured.makespan, simulated.makespan)
    for quantity, value, unit, target in (
        ("step, simulated", simulated.makespan / MS, "ms", None),
        ("step, measured", measured.makespan / MS, "ms", None),
        ("difference", difference, "%", at_most(MOST_ERROR)),
        ("bubble, simulated", 100 * simulated.bubble, "%", None),
        ("bubble, measured", 100 * measured.bubble, "%", None),
        ("in flight, encoders", result.in_flight[0], "", None),
        ("in flight, LLM", result.in_flight[1], "", None),
    ):
        name = f"{result.workload.name}, {result.method.name}: {quantity}"
        yield Row(bench="schedules", case=name, value=value, unit=unit, target=target)


def markdown(all_results: Sequence[Result]) -> str:
    """The table of docs/benchmarks.md."""
    lines = [
        "| workload | way | ranks | step, simulated | step, measured | bubble, simulated | measured | in flight |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in all_results:
        lines.append(
            f"| {result.workload.name} | {result.method.name} | {result.ranks}"
            f" | {result.simulated.makespan / MS:.0f} ms"
            f" | {result.measured.makespan / MS:.0f} ms | {result.simulated.bubble:.0%} | {result.measured.bubble:.0%}"
            f" | {result.in_flight[0]}, {result.in_flight[1]} |"
        )
    return "\n".join(lines)


def draw(all_results: Sequence[Result], path: str | os.PathLike[str]) -> None:
    """Draws bars of the measured steps, a panel for each workload, with a mark at the simulated step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = [method.name for method in METHODS]
    figure = Figure(figsize=(12, 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(WORKLOADS), sharey=True, sharex=True)
    longest = max(result.measured.makespan for result in all_results) / MS
    for axes, workload in zip(panels, WORKLOADS, strict=True):
        by_method = {result.method.name: result for result in all_results if result.workload == workload}
        measured = [by_method[name].measured.makespan / MS for name in names]
        axes.axvline(workload.least / MS, color=LEAST_COLOUR, linewidth=1, linestyle="--", zorder=1)
        axes.barh(
            names, measured, color=[COLOURS[by_method[name].method.baseline] for name in names], height=0.68, zorder=2
        )
        marks = [by_method[name].simulated.makespan / MS for name in names]
        axes.plot(marks, names, "|", color=INK, markersize=13, markeredgewidth=1.6)
        for place, name in enumerate(names):
            text = f"{measured[place]:.0f} ms, idle {by_method[name].measured.bubble:.0%}"
            where = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(text, (measured[place], place), fontsize=7.5, color=INK, **where)
        axes.set_title(workload.name, fontsize=10.5, loc="left")
        axes.set_xlim(0, 1.42 * longest)
        axes.set_xlabel("step, measured [ms]", fontsize=8.5)
        axes.tick_params(labelsize=8.5, length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    panels[0].invert_yaxis()
    handles = [Patch(color=COLOURS[False], label="measured"), Patch(color=COLOURS[True], label="measured, baselines")]
    mark = Line2D([], [], color=INK, marker="|", linestyle="", markersize=13, markeredgewidth=1.6, label="simulated")
    least = Line2D([], [], color=LEAST_COLOUR, linewidth=1, linestyle="--", label="no rank ever idle")
    figure.legend(handles=[*handles, mark, least], loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    figure.savefig(Path(path), facecolor="white")
