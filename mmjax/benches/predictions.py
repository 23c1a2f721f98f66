"""Predicted step times against real ones: layouts of the digits model on this machine.

The machine is profiled, every layout's step is estimated from the profile as the planner does it, and then the layouts
train in turn. Nothing of a layout's own measurement is in its prediction, and nothing is fitted.

Virtual devices share the cores. A step is predicted as on one core, where it takes all of its work and idle stages cost
nothing, and it is measured in the processor time of all threads: that is what it takes on one core that nobody else
uses, and no other process changes it. Seconds on the clock, of however many cores were free, are in the rows too. What
differs between layouts is work: padding, tp, the number of ops. Programs are compiled cheaply, those of the profile and
those that train, since compiling is most of the time that this takes.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mmjax import jax_compat
from mmjax.benches.rows import Row, at_least, at_most
from mmjax.benches.steps import ALWAYS, Stepper, config_file
from mmjax.config import load_config
from mmjax.mesh.layout import Layout
from mmjax.planner.candidates import COLOCATED, HOMOGENEOUS, NON_COLOCATED
from mmjax.planner.choose import Choice
from mmjax.planner.estimate import Candidate, Estimate
from mmjax.planner.measured import MeasuredClock
from mmjax.run.assembly import open_source
from mmjax.run.planned import exact_rows, planned
from mmjax.run.profiler import profile_of
from mmjax.run.work import read_work

CONFIGURATION = "digits_vlm.gin"
BINDINGS = (*ALWAYS, "vision/Packing.buckets=((3, 168),)")
"""One bucket: every microbatch of a step has the shape that is planned for."""
APART = 1.15
"""Pairs whose predictions differ by less say nothing."""
LEAST_CORRELATION, MOST_OVER_BEST = 0.8, 1.10


def _candidate(mode: str, microbatches: int, vision: Layout, llm: Layout, schedule: str = "1f1b") -> Candidate:
    return Candidate(mode=mode, layouts={"vision": vision, "llm": llm}, microbatches=microbatches, schedule=schedule)


def candidates() -> list[Candidate]:
    """Layouts of all three modes with other tp, dp, pp and microbatches."""
    one, at = Layout(), lambda offset, **degrees: Layout(rank_offset=offset, **degrees)
    return [
        _candidate(HOMOGENEOUS, 4, one, one),
        _candidate(HOMOGENEOUS, 16, one, one),
        _candidate(HOMOGENEOUS, 4, Layout(dp=2), Layout(dp=2)),
        _candidate(HOMOGENEOUS, 4, Layout(tp=2), Layout(tp=2)),
        _candidate(HOMOGENEOUS, 16, Layout(tp=4), Layout(tp=4)),
        _candidate(HOMOGENEOUS, 8, Layout(dp=8), Layout(dp=8)),
        _candidate(HOMOGENEOUS, 4, Layout(tp=2, dp=2), Layout(tp=2, dp=2, pp=2)),
        _candidate(HOMOGENEOUS, 16, one, Layout(pp=3)),
        _candidate(COLOCATED, 4, Layout(dp=4), Layout(dp=2, tp=2)),
        _candidate(COLOCATED, 8, Layout(dp=8), Layout(dp=2, tp=4)),
        _candidate(COLOCATED, 4, Layout(dp=4), Layout(dp=2, pp=2), "three-phase"),
        _candidate(NON_COLOCATED, 4, at(1), one),
        _candidate(NON_COLOCATED, 16, at(1), one),
        _candidate(NON_COLOCATED, 4, at(4, dp=4), Layout(tp=2, pp=2)),
        _candidate(NON_COLOCATED, 32, at(3, pp=2), Layout(pp=3)),
        _candidate(NON_COLOCATED, 8, at(4, tp=4), Layout(tp=4)),
        _candidate(NON_COLOCATED, 2, at(2, dp=2), Layout(dp=2)),
    ]


def bench_predictions(rounds: int) -> Iterator[Row]:
    """Of every layout the predicted and the measured step; how well the order agrees, and what the best one costs."""
    if not jax_compat.backends_are_initialized():
        jax_compat.compile_cheaply()
    config = load_config([str(config_file(CONFIGURATION))], BINDINGS)
    source = open_source(config, split="train")
    profile, work = profile_of(config), read_work(config, source)
    yield Row(bench="predictions", case="devices that work at a time", value=profile.shared, unit="")
    clock = MeasuredClock(profile=replace(profile, shared=1.0))
    estimates, steps = dict[str, Estimate](), dict[str, Stepper]()
    for candidate in candidates():
        run = planned(config, candidate, source)
        rows = exact_rows(run, source)
        name = f"{candidate.mode}, {candidate.describe()}, {candidate.microbatches} microbatches"
        estimates[name] = Estimate(work=work, clock=clock, candidate=candidate, rows=rows)
        print(f"predictions: compiling {name}", file=sys.stderr, flush=True)
        steps[name] = Stepper(run)
    measured, walls = _shortest(steps, rounds)
    predicted = {name: estimate.seconds for name, estimate in estimates.items()}
    for name in predicted:
        for what, value, unit in (
            ("predicted", predicted[name], "s"),
            ("measured", measured[name], "s"),
            ("predicted / measured", predicted[name] / measured[name], "ratio"),
            ("on the clock", walls[name], "s"),
        ):
            yield Row(bench="predictions", case=f"{name}: {what}", value=value, unit=unit)
    pairs, agreement = rank_correlation(predicted, measured, APART)
    yield Row(bench="predictions", case="pairs predicted more than 15 % apart", value=pairs, unit="")
    case, target = "rank correlation (Kendall) over these pairs", at_least(LEAST_CORRELATION)
    yield Row(bench="predictions", case=case, value=agreement, unit="", target=target)
    ranked = sorted(estimates.values(), key=lambda one: one.seconds)
    best = Choice(devices=config.world.devices, estimates=ranked).best  # of those that are alike, on fewest devices
    chosen = next(measured[name] for name, estimate in estimates.items() if estimate is best)
    case, target = "the layout that is chosen / the best measured", at_most(MOST_OVER_BEST)
    value = chosen / min(measured.values())
    yield Row(bench="predictions", case=case, value=value, unit="ratio", target=target)


def _shortest(steps: Mapping[str, Stepper], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Least processor seconds, and least seconds on the clock, of each of several steps taken in turn."""
    processor, wall = dict.fromkeys(steps, float("inf")), dict.fromkeys(steps, float("inf"))
    for _, (name, step) in itertools.product(range(rounds), steps.items()):
        start, own = time.perf_counter(), time.process_time()
        step()
        processor[name] = min(processor[name], time.process_time() - own)
        wall[name] = min(wall[name], time.perf_counter() - start)
    return processor, wall


def rank_correlation(predicted: Mapping[str, float], measured: Mapping[str, float], apart: float) -> tuple[int, float]:
    """Pairs that are predicted at least `apart` times apart, and Kendall's rank correlation over them.

    That is the pairs measured in the predicted order less those in the other, over all of them; 0 without any.
    """
    order = 0
    count = 0
    for one, other in itertools.combinations(predicted, 2):
        low, high = sorted((one, other), key=predicted.__getitem__)
        if predicted[high] < apart * predicted[low]:
            continue
        count += 1
        order += (measured[high] > measured[low]) - (measured[high] < measured[low])
    return count, order / count if count else 0.0
