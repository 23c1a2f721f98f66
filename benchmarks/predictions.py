"""Predicted step times against real ones: layouts of the digits model on two devices that are two cores.

A device is a process that has a core to itself, like a GPU; moves and collectives go over gloo. The two are profiled,
every layout's step is estimated from the profile as the planner does it, and then the layouts train in turn and are
timed. No measurement of a layout enters its prediction, and nothing is fitted. Programs are compiled cheaply, both in
the profile and in training, since compiling takes most of the time.

Layouts differ as they do on GPUs: in idle time (pipelines of few microbatches, encoders and LLM of unequal times), in
communication (tp, dp), and in the number of devices.
"""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.one_core import checkout_environment, cores
from mmjax.assembly.samples import open_source
from mmjax.bench.rows import Row, at_least, at_most
from mmjax.config import load_config
from mmjax.config.shipped import CONFIGS
from mmjax.configurable import ConfigError
from mmjax.mesh.layout import Layout
from mmjax.plan.planned import rows_by_candidate
from mmjax.plan.work import read_work
from mmjax.planner.candidates import COLOCATED, HOMOGENEOUS, NON_COLOCATED, Candidate
from mmjax.planner.choose import PlanChoice
from mmjax.planner.estimate import Estimate
from mmjax.planner.measured import MeasuredClock
from mmjax.planner.profile_file import Profile, parse_profile
from mmjax.recipe import Recipe

CONFIGURATION = "digits_vlm_one_device.gin"
DEVICES = 2
BINDINGS = (f"World.devices={DEVICES}", "Train.eval_samples=0", "vision/Packing.buckets=((11, 168),)")
"""Bindings; with one bucket, every microbatch of a step has the planned shape."""
APART = 1.15
"""Factor by which predictions of a pair of layouts must differ for the pair to count."""
LEAST_CORRELATION, MOST_OVER_BEST = 0.8, 1.10


def configuration() -> Recipe:
    """The configuration of all layouts."""
    return load_config([CONFIGS / CONFIGURATION], BINDINGS)


@functools.cache
def candidates() -> dict[str, Candidate]:
    """Layouts of all modes but nested, with other tp, dp, pp and microbatches, by name."""
    rank_0, rank_1, two_stages = Layout(), Layout(rank_offset=1), Layout(pp=2)
    pairs: list[tuple[str, Layout, Layout, tuple[int, ...], str]] = [
        (HOMOGENEOUS, rank_0, rank_0, (4, 16), "1f1b"),
        (HOMOGENEOUS, Layout(dp=2), Layout(dp=2), (2, 4, 8), "1f1b"),
        (HOMOGENEOUS, Layout(tp=2), Layout(tp=2), (4,), "1f1b"),
        (HOMOGENEOUS, rank_0, two_stages, (2, 4, 8), "1f1b"),
        (HOMOGENEOUS, rank_0, Layout(pp=2, layers=(1, 2)), (8,), "1f1b"),
        (COLOCATED, Layout(dp=2), Layout(tp=2), (4,), "1f1b"),
        (COLOCATED, Layout(tp=2), Layout(dp=2), (4,), "1f1b"),
        (COLOCATED, Layout(dp=2), two_stages, (4, 8), "three-phase"),
        (NON_COLOCATED, rank_1, rank_0, (1, 2, 4, 8, 16), "1f1b"),
    ]
    by_name = {}
    for mode, vision, llm, counts, schedule in pairs:
        for count in counts:
            layouts = {"vision": vision, "llm": llm}
            candidate = Candidate(mode=mode, layouts=layouts, microbatches=count, schedule=schedule)
            by_name[f"{mode}, {candidate.describe()}, {count} microbatches"] = candidate
    return by_name


def bench_predictions(rounds: int) -> Iterator[Row]:
    """Yields predicted and measured steps of every layout, the agreement of their orders, and the choice's cost."""
    if cores() < DEVICES:
        raise ConfigError(f"bench predictions: has {cores()} core, and needs one for each of {DEVICES} devices")
    two_devices, one_device = _measured(DEVICES, rounds), _measured(1, rounds)
    measured = two_devices["seconds"] | one_device["seconds"]
    estimates = estimates_of(parse_profile(two_devices["profile"]))
    predicted = {name: estimate.seconds for name, estimate in estimates.items()}
    for name in predicted:
        for quantity, value, unit in (
            ("predicted", predicted[name], "s"),
            ("measured", measured[name], "s"),
            ("predicted / measured", predicted[name] / measured[name], "ratio"),
        ):
            yield Row(bench="predictions", case=f"{name}: {quantity}", value=value, unit=unit)
    pairs, agreement = rank_correlation(predicted, measured, APART)
    yield Row(bench="predictions", case="pairs predicted more than 15 % apart", value=pairs, unit="")
    case, target = "rank correlation (Kendall) over these pairs", at_least(LEAST_CORRELATION)
    yield Row(bench="predictions", case=case, value=agreement, unit="", target=target)
    ranked = sorted(estimates.values(), key=lambda estimate: estimate.seconds)
    best = PlanChoice(devices=DEVICES, estimates=ranked).best  # of nearly equal estimates, the one on fewest devices
    chosen = next(measured[name] for name, estimate in estimates.items() if estimate is best)
    case, target = "the layout that is chosen / the best measured", at_most(MOST_OVER_BEST)
    value = chosen / min(measured.values())
    yield Row(bench="predictions", case=case, value=value, unit="ratio", target=target)


def estimates_of(profile: Profile) -> dict[str, Estimate]:
    """The estimate of every layout, by name."""
    config = configuration()
    source = open_source(config, split="train")
    work, clock, rows_of = read_work(config, source), MeasuredClock(profile=profile), rows_by_candidate(config, source)
    return {
        name: Estimate(work=work, clock=clock, candidate=candidate, rows=rows_of(candidate))
        for name, candidate in candidates().items()
    }


def _measured(devices: int, rounds: int) -> dict[str, Any]:
    """The measurements of `devices` processes with a device each; their output goes to stderr.

    Raises:
      SystemExit: one of them failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        launch = [sys.executable, "-m", "mmjax.launch", f"-n={devices}", "--devices_per_process=1"]
        command = [*launch, "-m", "benchmarks.measured_layouts", str(out), str(rounds)]
        status = subprocess.run(command, stdout=sys.stderr, env=checkout_environment(), check=False).returncode
        if status:
            raise SystemExit(status)
        return json.loads(out.read_text(encoding="utf-8"))


def rank_correlation(predicted: Mapping[str, float], measured: Mapping[str, float], apart: float) -> tuple[int, float]:
    """Number of pairs predicted at least a factor `apart` apart, and Kendall's rank correlation over them.

    The correlation is the number of pairs measured in the predicted order, minus the number in the reverse order, over
    all counted pairs; 0 without pairs.
    """
    order = 0
    count = 0
    for first, second in itertools.combinations(predicted, 2):
        low, high = sorted((first, second), key=predicted.__getitem__)
        if predicted[high] < apart * predicted[low]:
            continue
        count += 1
        order += (measured[high] > measured[low]) - (measured[high] < measured[low])
    return count, order / count if count else 0.0
