"""Step times of the digits configurations over the step time of the one-device program."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.steps import Stepper, in_turn
from mmjax.bench.rows import Row

CONFIGURATIONS = {
    "one device": "digits_vlm_one_device.gin",
    "colocated": "digits_vlm_colocated.gin",
    "homogeneous": "digits_vlm_homogeneous.gin",
    "non-colocated": "digits_vlm.gin",
}


def bench_layouts(rounds: int) -> Iterator[Row]:
    """Yields the step times on virtual devices over the step time of the one-device program."""
    steps = {case: Stepper(name) for case, name in CONFIGURATIONS.items()}
    times = in_turn(steps, rounds)
    base, *sharded_cases = times
    yield Row(bench="layouts", case=f"{base} step", value=statistics.median(times[base]), unit="s")
    for case in sharded_cases:
        ratio = statistics.median(a / b for a, b in zip(times[case], times[base], strict=True))
        yield Row(bench="layouts", case=f"{case} / {base}", value=ratio, unit="ratio")
