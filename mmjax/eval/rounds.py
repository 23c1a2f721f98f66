"""Packs the samples of an evaluation into rounds. The samples of a round are decoded side by side, each in one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.assembly.compiled_runs import NO_RUNS, CompiledRuns
from mmjax.data.packing import Packer
from mmjax.data.plan import MicrobatchPlan
from mmjax.data.sample import meta_of
from mmjax.data.types import Sample, SampleMeta
from mmjax.pipeline.place import InputShapes
from mmjax.pipeline.walker import Signature


@dataclass(frozen=True, kw_only=True)
class Round:
    """Samples that are decoded side by side.

    Attributes:
      plans: the plan of each microbatch.
      batch: the bucket signature and inputs of each microbatch.
      places: the microbatch and the LLM row of each sample.
      starts: for each microbatch, the number of tokens of each LLM row, where its answer starts; 0 for an empty row.
    """

    plans: Sequence[MicrobatchPlan]
    batch: Sequence[tuple[Signature, InputShapes]]
    places: Sequence[tuple[int, int]]
    starts: Sequence[np.ndarray]


class Rounds:
    """Packs samples as training does, but gives each its own LLM row, with room for an answer at the end.

    A cell holds no more samples than a cell of training, and no more than the LLM's widest bucket has rows. So the
    buckets of training are large enough for these cells too.
    """

    def __init__(self, packer: Packer, samples: int, runs: CompiledRuns = NO_RUNS):
        """Takes ``packer``, ``samples`` and ``runs`` of a ``PlacedRun``: those of training."""
        per_cell = -(-samples // packer.cells)
        rows = packer.text[packer.widest][0] if packer.text else per_cell
        self.packer, self._each, self._runs = packer, min(per_cell, rows) * packer.cells, runs

    @property
    def size(self) -> int:
        """The most samples of a round."""
        return self._each * self.packer.microbatches

    def __call__(self, samples: Sequence[Sample]) -> Iterator[tuple[Sequence[Sample], Round]]:
        """Yields the samples of each round, and the round, which is packed when the iterator reaches it.

        Raises:
          ConfigError: a sample is too long.
        """
        for first in range(0, len(samples), self.size):
            round_samples = samples[first : first + self.size]
            yield round_samples, self._packed(round_samples)

    def plan(self, metas: Sequence[SampleMeta]) -> list[MicrobatchPlan]:
        """The plans of the microbatches of one round, of at most ``size`` samples; empty ones too.

        Raises:
          ConfigError: a sample is too long.
        """
        microbatches = [metas[m * self._each : (m + 1) * self._each] for m in range(self.packer.microbatches)]
        return [self.packer.plan_microbatch(microbatch, self._each, apart=True) for microbatch in microbatches]

    def require_room(self, metas: Sequence[SampleMeta]) -> None:
        """Requires that these samples can be packed.

        Raises:
          ConfigError: a sample is too long.
        """
        for first in range(0, len(metas), self.size):
            self.plan(metas[first : first + self.size])

    def _packed(self, samples: Sequence[Sample]) -> Round:
        plans = self.plan([meta_of(sample, self.packer.encoders) for sample in samples])
        places = [(m, row) for m, plan in enumerate(plans) for row, _ in plan.llm.places]
        starts = [np.zeros(plan.llm.rows_per_cell * plan.cells, np.int64) for plan in plans]
        for sample, (m, row) in zip(samples, places, strict=True):
            starts[m][row] = len(sample.tokens)
        microbatches = [dict(enumerate(samples[m * self._each : (m + 1) * self._each])) for m in range(len(plans))]
        filled = [self.packer.fill(plan, numbered) for plan, numbered in zip(plans, microbatches, strict=True)]
        return Round(plans=plans, batch=self._runs.signed(filled), places=places, starts=starts)
