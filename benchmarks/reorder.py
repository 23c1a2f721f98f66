"""Reordering at MMScale's setting: the time it takes, and the simulated gain.

Huang et al., "MMScale", table 3: 1,920 samples a step over 30, 60 and 120 dp ranks, twelve pipeline stages. The samples
come from `workloads/laion_like.json`. The time of an encoder stage is proportional to their patches, and on average
equal to that of an LLM stage, whose backward takes twice its forward.

The same samples in nested pipelines, where the encoder is spread over the LLM's ranks: the gain of an order by units
over none, and over one that is made for the encoder as the first stage of 1F1B, which knows no units.

Times are processor time of the one working thread, the least of several rounds: on a shared machine this comes closest
to the time on a quiet one. The simulator is that of the schedules.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.uneven import bench_uneven
from benchmarks.workloads import laion_like
from mmjax.bench.rows import Row, Target, at_least, at_most
from mmjax.data.reorder import METHODS, Order, Pipeline, balanced, greedy, least_load
from mmjax.data.reorder.chain import Chain

PP = 12
RANKS = (30, 60, 120)
_FEW = ((2, 8), (4, 6), (4, 8), (8, 8))
"""(stages, microbatches) of the pipelines whose orders are all tried."""


_NESTED = ((12, 64, 30, 1), (12, 60, 8, 4), (4, 32, 60, 1), (4, 32, 15, 1), (4, 32, 15, 4))
"""(LLM stages, microbatches, dp ranks, forward of the encoder over that of an LLM stage) of nested pipelines."""


def bench_reorder(rounds: int) -> Iterator[Row]:
    """Yields times and gains for 30, 60 and 120 ranks and in nested pipelines; short pipelines beside all their orders;
    and measured steps."""
    patches = laion_like.read()
    for dp in RANKS:
        yield from _at(patches / patches.mean(), dp, rounds)
    for case in _NESTED:
        yield from _nested(patches / patches.mean(), case)
    yield from _exhaustive(rounds)
    yield from bench_uneven(rounds)


def _at(sizes: np.ndarray, dp: int, rounds: int) -> Iterator[Row]:
    microbatches = len(sizes) // dp
    rows, seconds = [microbatches] * dp, {"encoder": np.outer(sizes, (1.0, 2.0))}
    pipeline, in_step_pipeline = (
        _pipeline(len(sizes), microbatches, dp, together=in_step) for in_step in (False, True)
    )
    intra = least(lambda: greedy(sizes, rows), 4 * rounds)
    yield _row(f"dp {dp}: intra", 1e3 * intra, "ms", at_most(0.8))
    inter = least(lambda: pipeline.reorder(seconds, "disttrain"), rounds) - intra
    yield _row(f"dp {dp}: inter, disttrain, a rank", 1e3 * max(0.0, inter) / dp, "ms", at_most(1.0))
    best = least(lambda: pipeline.reorder(seconds, "best"), rounds)
    yield _row(f"dp {dp}: best, all ranks", 1e3 * best, "ms", at_most(20.0))
    bound = least_load(sizes, rows)
    for name, groups in (("disttrain", greedy(sizes, rows)), ("best", balanced(sizes, rows))):
        load = max(float(sizes[group].sum()) for group in groups)
        yield _row(
            f"dp {dp}: largest load over its bound, {name}",
            load / bound,
            "×",
            at_most(1.01) if name == "best" else None,
        )
    for suffix, each_pipeline in (("", pipeline), (", ranks in step", in_step_pipeline)):
        spans = {method: each_pipeline.makespan(seconds, each_pipeline.reorder(seconds, method)) for method in METHODS}
        for method in METHODS:
            over_bound = spans[method] / each_pipeline.bound(seconds)
            yield _row(f"dp {dp}: makespan over its bound, {method}{suffix}", over_bound, "×")
        yield _row(f"dp {dp}: none / best{suffix}", spans["none"] / spans["best"], "×", at_least(1.15))
        yield _row(f"dp {dp}: disttrain / best{suffix}", spans["disttrain"] / spans["best"], "×", at_least(1.0))
    for method in METHODS:
        encoder = padding(sizes, in_step_pipeline.reorder(seconds, method))
        yield _row(f"dp {dp}: encoder compute that is padding, {method}", 100 * encoder, "%")
        # All stages but one are the LLM's, whose rows are full; each computes as much as the encoder without padding.
        padded = encoder / (1 - encoder)
        target = at_most(5.0) if method == "best" else None
        yield _row(f"dp {dp}: compute that is padding, {method}", 100 * padded / (PP + padded), "%", target)


def padding(sizes: np.ndarray, order: Order) -> float:
    """The share of padding in the encoder's compute, if each microbatch is padded to its largest rank."""
    loads_RM = np.array([[sizes[list(samples)].sum() for samples in rank] for rank in order])
    return float(1 - loads_RM.sum() / (loads_RM.max(axis=0).sum() * len(loads_RM)))


def _nested(sizes: np.ndarray, case: tuple[int, int, int, int]) -> Iterator[Row]:
    """Yields the gain of each method's order, and of the best order for 1F1B, in a pipeline with a spread encoder."""
    stages, microbatches, dp, encoder = case
    rows = len(sizes) // (microbatches * dp)
    seconds = {"encoder": np.outer(sizes, (1.0, 2.0)) * encoder / rows}
    pipeline = _pipeline_of(Chain(llm=stages, schedule="nested"), sizes, microbatches=microbatches, dp=dp)
    chain = _pipeline_of(Chain(llm=stages - 1), sizes, microbatches=microbatches, dp=dp)
    orders = {method: pipeline.reorder(seconds, method) for method in METHODS}
    orders["best for 1F1B"] = chain.reorder(seconds, "best")
    spans = {name: pipeline.makespan(seconds, order) for name, order in orders.items()}
    label = f"nested, {stages} stages, dp {dp}, {rows} a row, encoder of {encoder:g}"
    for name, span in spans.items():
        yield _row(f"{label}: makespan over its bound, {name}, simulated", span / pipeline.bound(seconds), "×")
    for name in ("none", "disttrain", "best for 1F1B"):
        yield _row(f"{label}: {name} / best, simulated", spans[name] / spans["best"], "×", at_least(1.0))
    for name in ("none", "best"):
        yield _row(f"{label}: imbalance of units, {name}", pipeline.imbalance(seconds, orders[name]), "×")


def _pipeline_of(chain: Chain, sizes: np.ndarray, *, microbatches: int, dp: int) -> Pipeline:
    return chain.pipeline(samples=len(sizes), microbatches=microbatches, dp=dp, together=True)


def _exhaustive(rounds: int) -> Iterator[Row]:
    """Yields by method the mean percent above the best of all orders, for draws of lognormal sizes."""
    for stages, microbatches in _FEW:
        pipeline = _pipeline(microbatches, microbatches, 1, stages=stages)
        every = np.array(list(itertools.permutations(range(microbatches)))).T
        gaps: dict[str, list[float]] = {method: [] for method in METHODS}
        for seed in range(max(3, min(rounds, 10))):
            sizes = np.random.default_rng(seed).lognormal(size=microbatches)
            seconds = {"encoder": np.outer(sizes / sizes.mean(), (1.0, 2.0))}
            shortest = pipeline.recurrence.makespans(pipeline.sizes(seconds)[:, every]).min()
            for method in METHODS:
                gaps[method].append(pipeline.makespan(seconds, pipeline.reorder(seconds, method)) / shortest - 1)
        for method in METHODS:
            case = f"{microbatches} microbatches, {stages} stages: over the best order, {method}"
            yield _row(case, 100 * float(np.mean(gaps[method])), "%", at_most(1.0) if method == "best" else None)


def _pipeline(samples: int, microbatches: int, dp: int, *, stages: int = PP, together: bool = False) -> Pipeline:
    chain = Chain(llm=stages - 1, forward=1.0, backward=2.0)
    return chain.pipeline(samples=samples, microbatches=microbatches, dp=dp, together=together)


def least(run: Callable[[], object], rounds: int) -> float:
    """Processor seconds of the shortest of `rounds` runs, after a first run that does not count."""
    run()
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return min(times)


def _row(case: str, value: float, unit: str, target: Target | None = None) -> Row:
    return Row(bench="reorder", case=case, value=value, unit=unit, target=target)
