"""The product's side of a comparison: a configuration assembled as training assembles it, run on given samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import jax
import numpy as np

from mmjax.config import Config
from mmjax.data.packing import Packer
from mmjax.data.types import StepBatch
from mmjax.mesh.layout import Layout
from mmjax.parity.compare import Leaves, Run, of_kind
from mmjax.parity.samples import Steps
from mmjax.pipeline.build import PlacedModel
from mmjax.run.assembly import assemble, place, signed


class Session:
    """A configuration ready to run: placed, traced and, once something runs, compiled.

    Attributes:
      config: what it was made from.
      parts: see ``Assembly``.
      placed, schedule, executor: its parts.
      batches: one per step.
    """

    def __init__(self, config: Config, packer: Packer, samples: Steps):
        """Assembles."""
        self.config, self.parts = config, assemble(config, packer)
        self.placed, self.schedule, self.executor = self.parts.placed, self.parts.schedule, self.parts.executor
        self.batches: list[StepBatch] = [packer.step(i, chosen) for i, chosen in enumerate(samples)]

    def start(self, report: Callable[[int, int, str], None] | None = None) -> Self:
        """Compiles and initialises."""
        self.executor.compile(report)
        self.executor.initialise(self.config.train.seed)
        return self

    def step(self, index: int) -> tuple[float, dict[str, float]]:
        """Loss and gradient norms of one step."""
        batch = self.batches[index]
        return self.executor.step([signed(part) for part in batch.microbatches], batch.denominator).fetch()

    def leaves(self) -> Leaves:
        """Every logical leaf, on the host."""
        return logical_leaves(self.placed, self.executor.states)

    def run(self, report: Callable[[int], None] = lambda done: None) -> Run:
        """Every step, ``report`` called with the number of steps done."""
        result = Run(losses=[], norms=[], leaves=[self.leaves()])
        for index in range(len(self.batches)):
            loss, norms = self.step(index)
            result.losses.append(loss)
            result.norms.append(norms)
            result.leaves.append(self.leaves())
            report(index + 1)
        return result


def logical_leaves(placed: PlacedModel, states: Mapping[str, Any]) -> Leaves:
    """Logical leaves of all stages' states, on the host."""
    result: Leaves = {}
    for name, stage in placed.stages.items():
        for leaf, value in stage.state.to_logical(states[name]).items():
            assert leaf not in result, f"{leaf} is held by two stages"
            result[leaf] = np.asarray(value)
    return result


def initial_parameters(config: Config, packer: Packer) -> Leaves:
    """The parameters that the configuration's seed gives on one device, by logical name without ``params/``."""
    layouts = dict.fromkeys(config.layouts, Layout())
    placed = place(replace(config, layouts=layouts), packer).placed
    key = jax.random.key(config.train.seed)
    states = {name: stage.state.initialise(key) for name, stage in placed.stages.items()}
    return of_kind(logical_leaves(placed, states), "params")
