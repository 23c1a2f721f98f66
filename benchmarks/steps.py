"""A digits configuration that is ready to step, for the benchmarks of whole steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mmjax.assembly.assembly import assemble, step_order
from mmjax.assembly.samples import open_source
from mmjax.attention.row_runs import MAX_RUNS
from mmjax.config import load_config
from mmjax.config.shipped import CONFIGS
from mmjax.data.loader import StepMaker
from mmjax.recipe import Recipe

ALWAYS = ("World.devices=8", "Train.eval_samples=0")
"""Bindings of every benchmark of steps."""


def in_turn(steps: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each of several steps by case, taken in turn so that noise affects all of them."""
    times: dict[str, list[float]] = {case: [] for case in steps}
    for _ in range(rounds):
        for case, step in steps.items():
            start = time.perf_counter()
            step()
            times[case].append(time.perf_counter() - start)
    return times


class Stepper:
    """Runs the same training step again and again.

    Attributes:
      parts: the parts of the run.
      executor: the executor of the steps.
      compile_seconds: processor time of lowering and compiling its programs, if nothing was cached.
    """

    def __init__(self, configuration: str | Recipe, bindings: Sequence[str] = ()):
        """Compiles, initialises and runs one step, so that later steps include no compilation.

        Args:
          configuration: file in ``configs``, or a configuration.
          bindings: changes of the file.
        """
        config = (
            configuration
            if isinstance(configuration, Recipe)
            else load_config([CONFIGS / configuration], [*ALWAYS, *bindings])
        )
        self.parts = assemble(config)
        self.executor = self.parts.executor
        start = time.process_time()
        self.executor.compile()
        self.compile_seconds = time.process_time() - start
        self.executor.initialise(config.train.seed)
        source = open_source(config, split="train")
        order = step_order(config, self.parts)
        make = StepMaker(source=source, packer=self.parts.packer, global_batch=config.train.global_batch, order=order)
        batch = make(0)
        self._microbatches, self._denominators = self.parts.runs.signed(batch.microbatches), batch.divisors
        self()

    def __call__(self) -> None:
        """One training step; returns when the new parameters and the loss are there."""
        self._run(self._microbatches)

    def at_most_memory(self) -> None:
        """One step of empty microbatches in the largest buckets, for which memory is promised."""
        signature, shapes = max(self.parts.shapes.items(), key=lambda item: item[0])
        empty = {
            m: {k: np.zeros(a.shape, a.dtype) for k, a in inputs.items() if k != MAX_RUNS}
            for m, inputs in shapes.items()
        }
        self._run([(signature, empty)] * len(self._microbatches))

    def _run(self, microbatches: list[Any]) -> None:
        result = self.executor.step(microbatches, self._denominators)
        jax.block_until_ready((self.executor.states, result.losses, result.totals))
