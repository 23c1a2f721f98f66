"""Steps of strongly uneven digits under each method of reordering samples: simulated, and measured.

The configuration is `digits_vlm.gin` with one to four images of one to six digits, up to three times as large. Samples
are packed into LLM rows, and both modules have buckets chosen from the data, for each way its own. What a microbatch
costs on a stage follows from its bucket and the FLOPs of the module, as a run's reordering has it. *Measured* is a real
process for each stage whose ops sleep for that time (``benchmarks.replay``): it says how long ops wait for one
another, and nothing about the speed of a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.replay import costs_of
from benchmarks.simulate import MOST_ERROR, MOST_REPEATS, MS, error, shortest
from mmjax.assembly.assembly import place
from mmjax.assembly.buckets import build_packer, with_buckets
from mmjax.assembly.orders import order_of
from mmjax.assembly.samples import open_source
from mmjax.bench.rows import Row, at_least, at_most
from mmjax.config import load_config
from mmjax.config.shipped import CONFIGS
from mmjax.data.loader import tokenizer_of
from mmjax.data.plan import StepPlan
from mmjax.data.reorder import METHODS
from mmjax.mesh.world import World
from mmjax.schedule.simulate import Costs, Timeline, simulate

UNEVEN = (
    "World.devices=8",
    "World.transport='device_put'",
    "Train.microbatches=16",
    "Digits.images=(1, 4)",
    "Digits.digits=(1, 6)",
    "Digits.scale=(1.0, 3.0)",
    "Digits.curriculum=()",
    "Data.sequence_length=640",
    "vision/Packing.buckets=4",
    "llm/Packing.buckets=4",
)
STEPS = 3
SECONDS = 1.0
"""Seconds of the mean step without reordering."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Some steps under one method of reordering.

    Attributes:
      plans: the plan of each step, with the place of each sample.
      simulated: the simulated timeline of each step, in seconds.
    """

    plans: tuple[StepPlan, ...]
    simulated: tuple[Timeline, ...]

    @property
    def seconds(self) -> float:
        """The mean simulated step."""
        return sum(timeline.makespan for timeline in self.simulated) / len(self.simulated)

    def padding(self, positions: str) -> float:
        """Share of the "vision_patches" or "llm_tokens" that is padding."""
        real, padded = (sum(plan.counts[name] for plan in self.plans) for name in (positions, f"{positions}_padded"))
        return 1 - real / padded

    def measured(self, repeats: int) -> float:
        """The mean measured step, each step the shortest of `repeats`, since noise only adds time."""
        steps = (
            shortest(timeline.schedule, costs_of(timeline), timeline.makespan, repeats) for timeline in self.simulated
        )
        return sum(step.makespan for step in steps) / len(self.simulated)


def bench_uneven(rounds: int) -> Iterator[Row]:
    """Yields steps and padding of each method, and the ratio of "none" and of "disttrain" to "best"."""
    spans: dict[str, tuple[float, float]] = {}
    for method, result in results().items():
        measured = result.measured(min(rounds, MOST_REPEATS))
        spans[method] = result.seconds, measured
        yield _row(f"step, simulated, {method}", result.seconds / MS, "ms")
        yield _row(f"step, measured, {method}", measured / MS, "ms")
        difference = error(measured, result.seconds)
        yield replace(_row(f"difference, {method}", difference, "%"), target=at_most(MOST_ERROR))
        for positions in ("vision_patches", "llm_tokens"):
            yield _row(f"{positions} that are padding, {method}", 100 * result.padding(positions), "%")
    for method in METHODS[:-1]:
        for number, kind in enumerate(("simulated", "measured")):
            gain = spans[method][number] / spans["best"][number]
            yield replace(_row(f"{method} / best, {kind}", gain, "×"), target=at_least(1.0))


def results() -> Mapping[str, Result]:
    """The same steps under each method of reordering, by method."""
    recipe = load_config([CONFIGS / "digits_vlm.gin"], UNEVEN)
    source, size = open_source(recipe, split="train"), recipe.train.global_batch
    tokenizer = tokenizer_of(recipe.data.settings, recipe.model.media)
    by_method, parts = dict[str, Result](), None
    for method in METHODS:
        method_config = with_buckets(replace(recipe, data=recipe.data.with_settings(reorder=method)), source)
        packer = build_packer(method_config, tokenizer, source=source)
        parts = parts or place(
            method_config, packer, World.planned(method_config.world.devices)
        )  # the first method's parts: one unit of time for all
        order = order_of(method_config, parts, method)
        plans, timelines = [], []
        for step in range(STEPS):
            original = [source.meta(step * size + sample) for sample in range(size)]
            metas = [original[sample] for sample in order(original, packer).order]
            plans.append(packer.plan(step, metas))
            timelines.append(order.timeline(metas, packer))
        by_method[method] = Result(plans=tuple(plans), simulated=tuple(timelines))
    scale = SECONDS / by_method["none"].seconds
    return {
        method: replace(result, simulated=tuple(_scaled(timeline, scale) for timeline in result.simulated))
        for method, result in by_method.items()
    }


def _scaled(timeline: Timeline, scale: float) -> Timeline:
    costs = costs_of(timeline)
    overrides = {key: scale * seconds for key, seconds in costs.overrides.items()}
    return simulate(timeline.schedule, Costs(seconds=costs.seconds, overrides=overrides))


def _row(case: str, value: float, unit: str) -> Row:
    return Row(bench="reorder", case=f"uneven digits: {case}", value=value, unit=unit)
