"""Results of a run: the numbers of a step, fetched while the next one runs, and how the run ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Executor as Threads
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from mmjax.assembly.parts import Assembly
from mmjax.data.types import StepBatch
from mmjax.eval.scores import Evaluation
from mmjax.pipeline.executor import StepResult
from mmjax.train.scoring import Scored
from mmjax.train.throughput import Throughput


@dataclass(frozen=True, kw_only=True)
class PendingStep:
    """A step whose results are fetched while the next one runs.

    Attributes:
      step: its number, from 1.
      result: see ``StepResult``.
      batch: its batch.
      data: columns about the batch's origin.
      ended: when its results were computed, in seconds of ``time.perf_counter``; see ``watch_end``.
      stop_answer: see ``StopRequest.ask``.
    """

    step: int
    result: StepResult
    batch: StepBatch
    data: Mapping[str, Any]
    ended: Future[float]
    stop_answer: jax.Array | None = None

    def row(self, parts: Assembly, throughput: Throughput, seconds: float, *, updates: int) -> dict[str, Any]:
        """Waits for the results; returns the step's columns of ``metrics.jsonl``, all but those of busy times.

        ``skipped`` is 1 where the update was skipped, else 0.

        Args:
          parts: the parts of the run.
          throughput: computes rates from the batch.
          seconds: how long the step took; above 0.
          updates: how often parameters were updated before it.
        """
        loss, norms = self.result.fetch()
        total = sum(norm**2 for norm in norms.values()) ** 0.5 if norms else None
        row: dict[str, Any] = {"step": self.step, "loss": loss, "grad_norm": total, "step_time_s": seconds}
        row |= throughput.measure(self.batch, seconds) | dict(self.batch.figures)
        row["bubble"] = parts.planned.bubble
        row["skipped"] = int(total is not None and not total < float("inf"))
        for stage in parts.placed.stages.values():
            for module, rate in stage.state.learning_rates.items():
                row[f"{module}/learning_rate"] = float(np.asarray(rate(updates)))
        losses = self.result.fetch_losses()
        row |= losses if len(losses) > 1 else {}
        return row | dict(self.data) | {f"{module}/grad_norm": norm for module, norm in norms.items()}


def watch_end(result: StepResult, threads: Threads) -> Future[float]:
    """The time of ``time.perf_counter`` at which a step's results are computed; a thread of ``threads`` waits for them.

    The dispatching thread would see them too late: it dispatches the next step first.

    Args:
      result: the results of a dispatched step, as an executor's ``step`` returns them.
      threads: an open pool, such as ``ThreadPoolExecutor(1)``.
    """
    return threads.submit(_ended, result)


def _ended(result: StepResult) -> float:
    jax.block_until_ready((result.losses, result.totals))
    return time.perf_counter()


@dataclass
class TrainResult:
    """How a run ended.

    Attributes:
      step: optimizer steps done.
      losses: the loss of each step of this call.
      skipped: steps whose gradients were not finite, over the whole run.
      evaluation: the last evaluation; ``None`` where it failed or there was none.
      swapped: by encoder, the same with its media exchanged between samples; empty where media are not exchanged.
      evaluation_failure: why the last evaluation has failed; empty if it has not.
      scores_shown: whether the progress display has shown them.
      interrupted: whether Ctrl-C or SIGTERM ended it.
      ending: why it ended before its last step, for ``Train.patience``; empty if it has not.
      unusable: how many samples could not be used so far; ``skipped.jsonl`` names them.
      unwritten: files that the run directory lacks because the disk was full, a line for each.
    """

    step: int = 0
    losses: list[float] = field(default_factory=list)
    skipped: int = 0
    evaluation: Evaluation | None = None
    swapped: Mapping[str, Evaluation] = field(default_factory=dict)
    evaluation_failure: str = ""
    scores_shown: bool = False
    interrupted: bool = False
    ending: str = ""
    unusable: int = 0
    unwritten: tuple[str, ...] = ()

    def take(self, scored: Scored) -> None:
        """Keeps an evaluation, or its failure, as the last one: changes the fields of evaluations."""
        self.evaluation, self.swapped, self.evaluation_failure = scored.plain, scored.swapped, scored.failure
