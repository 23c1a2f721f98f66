"""Steps of strongly uneven digits under each way to reorder samples: simulated, and measured.

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
from mmjax.bench.rows import Row, at_least, at_most
from mmjax.build.assembly import build_packer, open_source, order_of, place, with_buckets
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
    """Some steps under one way to reorder.

    Attributes:
      plans: the plan of each step, which says where samples lie.
      simulated: the simulated timeline of each step, in seconds.
    """

    plans: tuple[StepPlan, ...]
    simulated: tuple[Timeline, ...]

    @property
    def seconds(self) -> float:
        """The mean simulated step."""
        return sum(one.makespan for one in self.simulated) / len(self.simulated)

    def padding(self, positions: str) -> float:
        """Share of the "vision_patches" or "llm_tokens" that is padding."""
        real, padded = (sum(one.counts[name] for one in self.plans) for name in (positions, f"{positions}_padded"))
        return 1 - real / padded

    def measured(self, repeats: int) -> float:
        """The mean measured step; a machine only adds time, so the shortest of some counts for each."""
        found = (shortest(one.schedule, costs_of(one), one.makespan, repeats) for one in self.simulated)
        return sum(one.makespan for one in found) / len(self.simulated)


def bench_uneven(rounds: int) -> Iterator[Row]:
    """Steps and padding of each way; and how much longer "none" and "disttrain" take than "best"."""
    spans: dict[str, tuple[float, float]] = {}
    for method, result in results().items():
        measured = result.measured(min(rounds, MOST_REPEATS))
        spans[method] = result.seconds, measured
        yield _row(f"step, simulated, {method}", result.seconds / MS, "ms")
        yield _row(f"step, measured, {method}", measured / MS, "ms")
        off = error(measured, result.seconds)
        yield replace(_row(f"difference, {method}", off, "%"), target=at_most(MOST_ERROR))
        for positions in ("vision_patches", "llm_tokens"):
            yield _row(f"{positions} that are padding, {method}", 100 * result.padding(positions), "%")
    for method in METHODS[:-1]:
        for number, how in enumerate(("simulated", "measured")):
            gain = spans[method][number] / spans["best"][number]
            yield replace(_row(f"{method} / best, {how}", gain, "×"), target=at_least(1.0))


def results() -> Mapping[str, Result]:
    """The same steps by way to reorder."""
    config = load_config([CONFIGS / "digits_vlm.gin"], UNEVEN)
    source, size = open_source(config, split="train"), config.train.global_batch
    tokenizer = tokenizer_of(config.data, config.model.media)
    found, parts = dict[str, Result](), None
    for method in METHODS:
        own = with_buckets(replace(config, data=replace(config.data, reorder=method)), source)
        packer = build_packer(own, tokenizer, source=source)
        parts = parts or place(own, packer, World.planned(own.world.devices))  # all have the first one's unit of time
        order = order_of(own, parts, method)
        plans, timelines = [], []
        for step in range(STEPS):
            given = [source.meta(step * size + sample) for sample in range(size)]
            metas = [given[sample] for sample in order(given, packer).order]
            plans.append(packer.plan(step, metas))
            timelines.append(order.timeline(metas, packer))
        found[method] = Result(plans=tuple(plans), simulated=tuple(timelines))
    scale = SECONDS / found["none"].seconds
    return {
        method: replace(one, simulated=tuple(_scaled(t, scale) for t in one.simulated)) for method, one in found.items()
    }


def _scaled(timeline: Timeline, scale: float) -> Timeline:
    costs = costs_of(timeline)
    overrides = {key: scale * seconds for key, seconds in costs.overrides.items()}
    return simulate(timeline.schedule, Costs(seconds=costs.seconds, overrides=overrides))


def _row(case: str, value: float, unit: str) -> Row:
    return Row(bench="reorder", case=f"uneven digits: {case}", value=value, unit=unit)
