"""Benchmarks by name. Each takes a number of rounds and yields rows; it imports what it measures when it runs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from mmjax.benches.rows import Row

BENCHES = {"layouts": "mmjax.benches.layouts:bench_layouts"}
"""Where each benchmark is, as "module:function"."""


def run_bench(name: str, rounds: int) -> Iterator[Row]:
    """The rows of one benchmark."""
    module, _, function = BENCHES[name].partition(":")
    return getattr(importlib.import_module(module), function)(rounds)
