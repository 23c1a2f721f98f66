"""Data plans of the digits configurations, from metadata alone, for every number of buckets and lowering of steps.

A run dies at a step without a plan, and so does every restart; so there must be no such step. A plan is also wrong if
its microbatches have several buckets where one program runs the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from mmjax.assembly.buckets import build_packer, with_buckets
from mmjax.assembly.packers import one_bucket
from mmjax.assembly.samples import open_source
from mmjax.bench.rows import Row, at_most
from mmjax.config import load_config
from mmjax.config.shipped import CONFIGS
from mmjax.configurable import ConfigError
from mmjax.data.config import PackingConfig
from mmjax.data.loader import tokenizer_of
from mmjax.data.packing import Packer
from mmjax.data.source import Source
from mmjax.data.types import SampleMeta
from mmjax.recipe import Recipe

NUMBERS = (1, 3, 6)
DATA = {
    "digits": (
        "digits_vlm.gin",
        "digits_vlm_colocated.gin",
        "digits_vlm_homogeneous.gin",
        "digits_vlm_one_device.gin",
    ),
    "digits and calls": ("digits_valm.gin",),
    "digits to draw": ("digits_draw.gin",),
}
"""Configurations by their data. Configurations with the same data have the same samples."""
_REMEMBERED = 2**15


@dataclass(kw_only=True)
class PlanResults:
    """Results over many steps.

    Attributes:
      wrong: number of steps without a plan or with a wrong one.
      seconds: seconds that all plans took.
    """

    wrong: int = 0
    seconds: float = 0.0


def bench_data_plans(rounds: int, steps: int) -> Iterator[Row]:
    """Yields for each configuration the number of steps without a plan, and the mean time of a plan."""
    for names in DATA.values():
        for case, results in plan_all(names, steps).items():
            yield _row(f"{case}: without a plan", results.wrong, "steps", 0)
            yield _row(f"{case}: a plan", 1e3 * results.seconds / steps, "ms")


def _row(case: str, value: float, unit: str, most: float | None = None) -> Row:
    return Row(bench="data-plans", case=case, value=value, unit=unit, target=None if most is None else at_most(most))


def plan_all(names: Sequence[str], steps: int) -> Mapping[str, PlanResults]:
    """Plans the first steps of configurations that have the same samples; returns results by case."""
    configs = {name: load_config([CONFIGS / name]) for name in names}
    first_config = next(iter(configs.values()))
    source = open_source(first_config, split="train")
    source.meta = lru_cache(_REMEMBERED)(source.meta)  # buckets are chosen from some of the steps
    packers = dict(pair for name, config in configs.items() for pair in _packers(name, config, source))
    results, batch_size = {case: PlanResults() for case in packers}, first_config.train.global_batch
    for step in range(steps):
        metas = [source.meta(step * batch_size + sample) for sample in range(batch_size)]
        for case, packer in packers.items():
            start = time.perf_counter()
            results[case].wrong += not _plans(packer, step, metas)
            results[case].seconds += time.perf_counter() - start
    return results


def _packers(name: str, recipe: Recipe, source: Source) -> Iterator[tuple[str, Packer]]:
    tokenizer = tokenizer_of(recipe.data.settings, recipe.model.media)
    for number in (None, *NUMBERS):
        packing = {module: PackingConfig(buckets=number) for module in recipe.model} if number else {}
        with_chosen_buckets = with_buckets(replace(recipe, model=recipe.model.with_packing(packing)), source)
        for lowering in ("ops",) if one_bucket(recipe) else ("ops", "single"):
            lowered = replace(with_chosen_buckets, train=replace(with_chosen_buckets.train, lowering=lowering))
            packer = build_packer(lowered, tokenizer, one_bucket=one_bucket(lowered), source=source)
            buckets = f"buckets={number}" if number else "its buckets"
            yield f"{name.removesuffix('.gin')}, {buckets}, {'one program' if packer.one_bucket else 'ops'}", packer


def _plans(packer: Packer, step: int, metas: Sequence[SampleMeta]) -> bool:
    """Whether a step has a plan that its executor takes."""
    try:
        parts = packer.plan(step, metas).microbatches
    except ConfigError:
        return False
    return not packer.one_bucket or all(part.bucket == parts[0].bucket for part in parts)
