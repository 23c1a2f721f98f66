"""Figures of a configuration's data: lengths, packing, waste by bucket, and simulated steps by method of reordering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from mmjax.assembly.assembly import plan
from mmjax.assembly.buckets import with_buckets
from mmjax.assembly.epochs import with_steps
from mmjax.assembly.latents import Decoders
from mmjax.assembly.orders import order_of
from mmjax.assembly.parts import Assembly
from mmjax.assembly.samples import open_source
from mmjax.data.lengths import figures_of, lengths_of
from mmjax.data.packing import Packer
from mmjax.data.plan import StepPlan
from mmjax.data.reorder import METHODS
from mmjax.data.sources.left_out import LeftOut
from mmjax.data.sources.mixture import Mixture
from mmjax.data.types import SampleMeta
from mmjax.models.config import LLM
from mmjax.recipe import Recipe
from mmjax.schedule.timeline import shown
from mmjax.viz.answers import draw_answers
from mmjax.viz.figures import finished

_COLORS = {"none": "#59636e", "disttrain": "#c77d0a", "best": "#3d6fb4"}
_SAMPLES = 12
_SHORT = 18
"""Characters of a module's name in a picture."""


@dataclass(frozen=True, kw_only=True)
class BucketUse:
    """How a static shape was used.

    Attributes:
      rows: rows of a cell.
      width: positions of a row.
      count: how many microbatches had this shape.
      real: positions of these microbatches that were no padding.
      all: all positions of these microbatches.
    """

    rows: int
    width: int
    count: int
    real: int
    all: int

    @property
    def waste(self) -> float:
        """Share of positions that were padding."""
        return 1 - self.real / self.all if self.all else 0.0


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Figures of the first steps of a run.

    Attributes:
      steps: how many steps.
      samples: how many samples all of them have.
      lengths: lengths of all segments by module: patches of each medium, tokens of each sample.
      media: how many media each sample has, by encoder or generator.
      used: use of the buckets, by method of reordering and by module.
      makespans: simulated length of each step, by method, in forwards of the costliest stage.
      bubbles: simulated bubble of each step, by method.
      imbalances: cost of the fullest cell over that of the mean cell in each step, by method.
      configured: the method that the configuration names.
      chosen: a line about the buckets of each module for which a number of buckets is configured.
      left_out: the records that cannot be used, of each dataset that has some.
      max_broken: ``Data.max_broken``.
    """

    steps: int
    samples: int
    lengths: Mapping[str, Sequence[int]]
    media: Mapping[str, Sequence[int]]
    used: Mapping[str, Mapping[str, Sequence[BucketUse]]]
    makespans: Mapping[str, Sequence[float]]
    bubbles: Mapping[str, Sequence[float]]
    imbalances: Mapping[str, Sequence[float]]
    configured: str
    chosen: Sequence[str] = ()
    left_out: Sequence[LeftOut] = ()
    max_broken: float = 1.0

    @property
    def mostly_broken(self) -> bool:
        """Whether a run would be refused because too many records of a dataset cannot be used."""
        return any(records.share > self.max_broken for records in self.left_out)

    def efficiency(self, method: str, module: str) -> float:
        """Share of a module's positions that are no padding, with samples reordered by ``method`` of ``METHODS``."""
        uses = self.used[method][module]
        return sum(use.real for use in uses) / max(1, sum(use.all for use in uses))

    def numbers(self) -> dict[str, Any]:
        """As JSON, with the names that the attributes have; lengths and media are summed up by ``figures_of``.

        "reorder" has by method "efficiency" and "buckets" by module, and the means of "makespan", "bubble" and
        "imbalance". "left_out" is by dataset.
        """
        return {
            "steps": self.steps,
            "samples": self.samples,
            "lengths": {name: figures_of(lengths) for name, lengths in self.lengths.items()},
            "media": {name: figures_of(counts) for name, counts in self.media.items()},
            "reorder": {
                method: {
                    "efficiency": {module: self.efficiency(method, module) for module in used},
                    "buckets": {
                        module: [{**vars(use), "waste": use.waste} for use in uses] for module, uses in used.items()
                    },
                    "makespan": float(np.mean(self.makespans[method])),
                    "bubble": float(np.mean(self.bubbles[method])),
                    "imbalance": float(np.mean(self.imbalances[method])),
                }
                for method, used in self.used.items()
            },
            "configured": self.configured,
            "chosen": list(self.chosen),
            "left_out": {
                records.source: {
                    "records": len(records.faults),
                    "scanned": records.scanned,
                    "reasons": [{"count": reason.count, "first": reason.first._asdict()} for reason in records.reasons],
                }
                for records in self.left_out
            },
        }

    def describe(self) -> Iterator[str]:
        """Yields the lines of a text for a terminal."""
        yield from self._left_out()
        yield f"{self.samples} samples in {self.steps} steps"
        yield f"{'':24}{'count':>10}{'mean':>10}{'median':>10}{'90%':>10}{'99%':>10}{'most':>10}"
        numbers = {f"{name} {_unit(name)}": lengths for name, lengths in self.lengths.items()}
        numbers |= {f"{name} media a sample": counts for name, counts in self.media.items()}
        for name, values in numbers.items():
            figures = figures_of(values)
            yield f"{name:24}{figures['count']:>10.0f}" + "".join(
                f"{figures[key]:>10.1f}" for key in ("mean", "median", "p90", "p99", "most")
            )
        yield ""
        modules = list(self.used[METHODS[0]])
        yield f"{'Data.reorder':14}{'step':>9}{'bubble':>9}{'imbalance':>11}" + "".join(f"{m:>14}" for m in modules)
        for method in METHODS:
            means = [float(np.mean(figures[method])) for figures in (self.makespans, self.bubbles, self.imbalances)]
            filled = "".join(f"{self.efficiency(method, module):>14.1%}" for module in modules)
            mark = " (configured)" if method == self.configured else ""
            yield f"{method:14}{means[0]:>9.2f}{means[1]:>9.1%}{means[2]:>11.2f}{filled}{mark}"
        yield "step: simulated, in forwards of the costliest stage; of each module, the share of positions that is real"
        yield ""
        yield from self.chosen
        for module, uses in self.used[self.configured].items():
            for use in uses:
                shape = f"{module} {use.rows}x{use.width} a cell"
                yield f"{shape:32}{use.count:>6} microbatches{use.waste:>9.1%} padding"

    def _left_out(self) -> Iterator[str]:
        for records in self.left_out:
            counts = f"{len(records.faults)} of {records.scanned}"
            yield f"{records.source}: {counts} records cannot be used and are left out"
            for reason in records.reasons:
                yield f"{reason.count:>8} × {reason.first}"
            if records.share > self.max_broken:
                yield f"these are more than Data.max_broken={self.max_broken!r} allows: a run is refused"
            yield ""


def inspect(recipe: Recipe, steps: int) -> Inspection:
    """Computes figures of the first `steps` steps of a run: lengths, use of buckets, simulated steps. Needs no device.

    recipe: the configuration, as `load_config(["run.gin"])` gives it.

    Raises:
      ConfigError: two settings contradict each other, or the data cannot be read.
    """
    source, chosen = open_source(recipe, split="train"), list[str]()
    recipe = with_buckets(with_steps(recipe, source), source, say=chosen.append)
    parts = plan(recipe, source)
    size = recipe.train.global_batch
    metas_by_step = [
        parts.packer.completed([source.meta(step * size + i) for i in range(size)]) for step in range(steps)
    ]
    every = [meta for metas in metas_by_step for meta in metas]
    lengths = lengths_of(every, parts.packer.encoders)
    by_method: dict[str, dict[str, Any]] = {"used": {}, "makespans": {}, "bubbles": {}, "imbalances": {}}
    for method in METHODS:
        figures = _steps(recipe, parts, method, metas_by_step)
        for name, value in figures.items():
            by_method[name][method] = value
    return Inspection(
        steps=steps,
        samples=len(every),
        lengths=lengths,
        media={name: [len(meta.grids.get(name, ())) for meta in every] for name in parts.packer.encoders},
        configured=recipe.data.settings.reorder,
        chosen=tuple(chosen),
        left_out=source.left_out() if isinstance(source, Mixture) else (),
        max_broken=recipe.data.settings.max_broken,
        **by_method,
    )


def _steps(
    recipe: Recipe, parts: Assembly, method: str, metas_by_step: Sequence[Sequence[SampleMeta]]
) -> dict[str, Any]:
    """Use of buckets, and simulated figures of each step, with samples reordered by `method`."""
    order, packer = order_of(recipe, parts, method), parts.packer
    plans, makespans, bubbles, imbalances = [], [], [], []
    for step, metas in enumerate(metas_by_step):
        reordered = order(metas, packer)
        ordered = [metas[i] for i in reordered.order]
        plans.append(packer.plan(step, ordered))
        timeline = order.timeline(ordered, packer)
        makespans.append(timeline.makespan)
        bubbles.append(timeline.bubble)
        imbalances.append(reordered.figures["imbalance_nominal"])
    used = {module: _uses(packer, plans, module) for module in (LLM, *packer.encoders)}
    return {"used": used, "makespans": makespans, "bubbles": bubbles, "imbalances": imbalances}


def _uses(packer: Packer, plans: Sequence[StepPlan], module: str) -> list[BucketUse]:
    counts, real = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for part in (part for step in plans for part in step.microbatches):
        if module == LLM:
            shape = (part.llm.rows_per_cell, part.llm.width)
            filled = sum(meta.tokens for meta in part.metas)
        else:
            shape = packer.buckets_of(module)[part.bucket[module]]
            filled = sum(prod(grid) for meta in part.metas for grid in meta.grids.get(module, ()))
        counts[shape] += 1
        real[shape] += filled
    # Also shapes that no microbatch had: each is compiled.
    for shape in packer.buckets_of(module):
        counts[shape] += 0
    return [
        BucketUse(rows=rows, width=width, count=n, real=real[rows, width], all=n * rows * width * packer.cells)
        for (rows, width), n in sorted(counts.items(), key=lambda item: item[0][0] * item[0][1])
    ]


def _unit(module: str) -> str:
    return "tokens a sample" if module == LLM else "patches a medium"


def draw(inspection: Inspection, path: str | Path | None = None) -> Figure:
    """Draws lengths, efficiency, buckets and simulated steps, one below the other.

    Args:
      inspection: the figures, as `inspect(recipe, steps)` computes them.
      path: the picture, if one is to be written; its suffix chooses the format (.png, .svg, .pdf).
    """
    modules = list(inspection.lengths)
    count = sum(len(uses) for uses in inspection.used[inspection.configured].values())
    heights = [2.6, max(2.6, 0.5 + 0.15 * count), 2.6]
    size = 3.6 * max(3, len(modules)), sum(heights)
    figure = Figure(figsize=size, dpi=110, facecolor="white", layout="constrained")
    parts: Any = figure.subfigures(3, 1, height_ratios=heights)
    top, middle, bottom = parts
    for axes, module in zip(np.atleast_1d(top.subplots(1, len(modules))), modules, strict=True):
        _draw_lengths(axes, module, inspection.lengths[module])
    left, right = middle.subplots(1, 2)
    _draw_efficiency(left, inspection, modules)
    _draw_waste(right, inspection, modules)
    panels = (
        ("simulated step", inspection.makespans),
        ("bubble", inspection.bubbles),
        ("imbalance", inspection.imbalances),
    )
    for axes, (title, series) in zip(bottom.subplots(1, 3), panels, strict=True):
        _draw_steps(axes, title, series)
        if title == "bubble":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return finished(figure, path)


def _draw_lengths(axes: Axes, module: str, lengths: Sequence[int]) -> None:
    axes.hist(lengths, bins=min(30, max(1, len(set(lengths)))), color=_COLORS["best"])
    axes.set_title(f"{shown(module, _SHORT)}: {_unit(module)}", fontsize=9)
    axes.set_ylabel("samples" if module == LLM else "media", fontsize=8)


def _draw_efficiency(axes: Axes, inspection: Inspection, modules: Sequence[str]) -> None:
    for number, method in enumerate(METHODS):
        places = np.arange(len(modules)) + 0.27 * (number - 1)
        shares = [inspection.efficiency(method, module) for module in modules]
        axes.bar(places, shares, 0.25, color=_COLORS[method], label=method)
    axes.set_xticks(range(len(modules)), [shown(module, _SHORT) for module in modules], fontsize=7)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title("positions that are real", fontsize=9)
    axes.legend(fontsize=7)


def _draw_waste(axes: Axes, inspection: Inspection, modules: Sequence[str]) -> None:
    uses = [(module, use) for module in modules for use in inspection.used[inspection.configured][module]]
    for place, (_, use) in enumerate(uses):
        filled = use.count * (1 - use.waste)
        axes.barh(place, filled, color=_COLORS[inspection.configured])
        axes.barh(place, use.count - filled, left=filled, color="#d1d9e0")
    axes.set_yticks(
        range(len(uses)), [f"{shown(module, _SHORT)} {use.rows}x{use.width}" for module, use in uses], fontsize=7
    )
    axes.invert_yaxis()
    axes.set_title(f"microbatches by bucket, grey: padding ({inspection.configured})", fontsize=9)


def _draw_steps(axes: Axes, title: str, series: Mapping[str, Sequence[float]]) -> None:
    for method in METHODS:
        values = series[method]
        axes.plot(range(1, len(values) + 1), values, marker=".", color=_COLORS[method], label=method)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("step", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(0.5, max(map(len, series.values())) + 0.5)
    axes.set_ylim(0, 1.1 * max(axes.get_ylim()[1], 1e-9))


def draw_samples(recipe: Recipe, path: str | Path | None = None) -> Figure:
    """Draws the first training samples, 12 or a batch of them, with media, questions and answers.

    Writes the picture to `path`, such as "samples.png", where one is given. Raises ConfigError if the data cannot be
    read.

    recipe: the configuration, as `load_config(["run.gin"])` gives it.
    """
    source = open_source(recipe, split="train")
    samples = [source.sample(index) for index in range(min(_SAMPLES, recipe.train.global_batch))]
    shown, _ = Decoders.of(recipe).shown(samples, ())
    return draw_answers(shown, None, path, title="training samples")
