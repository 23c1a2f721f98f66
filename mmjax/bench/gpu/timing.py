"""Times of device work, and differences of results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def seconds(run: Callable[[], Any], *, rounds: int = 5, least: float = 0.05, most: int = 50) -> float:
    """Seconds of one call: the median over rounds of up to ``most`` calls in a row that take about ``least`` seconds.

    The first call, which may compile, does not count. Each round waits for the result of its last call.
    """
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    calls = max(1, min(most, round(least / max(time.perf_counter() - start, 1e-6))))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        out = [run() for _ in range(calls)][-1]
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls)
        del out
    return statistics.median(times)


def apart(got: Any, want: Any) -> float:
    """‖got − want‖ / ‖want‖ over all leaves of two trees of arrays with the same structure, in float64."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    arrays = [(np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)) for a, b in pairs]
    gap = sum(float(np.sum(np.square(a - b))) for a, b in arrays)
    return float(np.sqrt(gap / sum(float(np.sum(np.square(b))) for _, b in arrays)))
