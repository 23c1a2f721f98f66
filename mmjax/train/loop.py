"""The steps of a run, and the checkpoints, evaluations and profiles between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax

from mmjax.assembly.parts import Assembly
from mmjax.checkpoint import Checkpointer
from mmjax.data.batches import Batches
from mmjax.data.types import NoBatchError, StepBatch
from mmjax.eval.scores import describe, figures
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.finite import NonFiniteError
from mmjax.pipeline.one_program import OneProgramExecutor
from mmjax.progress import Progress
from mmjax.recipe import Recipe
from mmjax.train.best import BestEvaluation
from mmjax.train.following import Following
from mmjax.train.interrupt import Stopped, StopRequest
from mmjax.train.metrics import MetricsWriter
from mmjax.train.profile_window import ProfileWindow
from mmjax.train.results import PendingStep, TrainResult, watch_end
from mmjax.train.run_state import RunState
from mmjax.train.scoring import Scoring
from mmjax.train.soundness import Soundness
from mmjax.train.throughput import Throughput

OnStep = Callable[[int, Mapping[str, Any]], None]
"""Called after each step with its number and its figures, by the names of ``metrics.jsonl``."""


@dataclass(kw_only=True)
class TrainLoop:
    """One call of ``Trainer.train``. A step is dispatched before the results of the one before it are fetched.

    Attributes:
      recipe: the settings of the run.
      parts: model, data, schedule and executor.
      executor: runs the steps.
      state: parameters and moments, and the steps done.
      scoring: evaluates.
      soundness: counts updates that were skipped.
      following: knows what the process is doing, and how busy each rank is.
      profile: records some steps.
      best: the best evaluation so far.
      throughput: computes rates of a step.
      checkpointer: says when a checkpoint is due; ``None`` writes none.
      callbacks: functions that are called after each step.
      note_broken: records the samples of a batch that could not be read.
      last: the step to end after.
      writer: writes ``metrics.jsonl``; ``None`` writes nothing.
      progress: shows steps and messages.
      result: is filled on the way.
    """

    recipe: Recipe
    parts: Assembly
    executor: Executor | OneProgramExecutor
    state: RunState
    scoring: Scoring
    soundness: Soundness
    following: Following
    profile: ProfileWindow
    best: BestEvaluation
    throughput: Throughput
    checkpointer: Checkpointer | None
    callbacks: Sequence[OnStep]
    note_broken: Callable[[StepBatch], None]
    last: int
    writer: MetricsWriter | None
    progress: Progress
    result: TrainResult
    _stop: StopRequest = field(init=False)
    _clock: ThreadPoolExecutor = field(init=False)
    _pending: PendingStep | None = field(init=False, default=None)
    _last_end: float = field(init=False, default=0.0)

    def run(self, batches: Batches) -> None:
        """Trains until step ``last``, or until ``Train.patience`` or a request to stop ends the run.

        Raises:
          NoBatchError: no data server gives a batch.
          NonFiniteError: see ``Trainer.train``.
        """
        world = self.parts.world
        self._stop = StopRequest(world.total if world.processes > 1 else None)
        self._clock, reader = (ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("clock", "reader"))
        with self._stop, self._clock, reader:
            try:
                if self._evaluation_due() and self._lacks_evaluation():
                    # The run was stopped between a checkpoint and its evaluation.
                    self.following.enter("evaluation", self.state.step)
                    self._score(draw=False)
                self.profile.enter(self.state.step, self.progress.message)
                self._last_end = time.perf_counter()
                while self.state.step < self.last and not self.result.ending:
                    self._step(batches, reader)
            except Stopped:
                self.result.interrupted = True
                batches.interrupt()
                self.progress.message(f"interrupted after step {self.state.step}: saving a checkpoint")
                self._finish()
                self.following.enter("checkpoint", self.state.step)
                self.state.save()
            except NonFiniteError:
                self._finish()
                raise
            except NoBatchError:
                self._finish()
                if world.processes == 1:  # of several, the others do not stand at this step
                    self.state.save()
                raise
            finally:
                self.profile.close(self.progress.message)

    def _step(self, batches: Batches, reader: ThreadPoolExecutor) -> None:
        """Dispatches a step, finishes the one before it, and acts where something is due."""
        begun = time.perf_counter()
        self.following.enter("data", self.state.step + 1)
        batch = self._stop.result(reader.submit(next, batches))
        self.note_broken(batch)
        data = {"data_wait_s": time.perf_counter() - begun, "data_origin": batches.origin}
        dispatched = self._dispatch(batch, data)
        self._finish_and_hear()
        self._pending, self.state.step = dispatched, batch.step + 1
        self.soundness.require_updates()
        if self._due():
            self._finish_and_hear()
            self._visit()

    def _dispatch(self, batch: StepBatch, data: Mapping[str, Any]) -> PendingStep:
        try:
            with jax.profiler.StepTraceAnnotation("train", step_num=batch.step + 1):
                signed = self.parts.runs.signed(batch.microbatches)
                out = self.following.step(batch.step + 1, lambda: self.executor.step(signed, batch.divisors))
        except NonFiniteError as error:
            raise NonFiniteError(f"step {batch.step + 1}: {error}") from None
        return PendingStep(
            step=batch.step + 1,
            result=out,
            batch=batch,
            data=data,
            ended=watch_end(out, self._clock),
            stop_answer=self._stop.ask(),
        )

    def _finish_and_hear(self) -> None:
        """Finishes the pending step, and hears whether all processes agreed to stop; the next ``check`` acts on it."""
        pending = self._pending
        self._finish()
        self._stop.hear(pending and pending.stop_answer)

    def _finish(self) -> None:
        """Fetches the figures of the pending step and writes them down."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        now = pending.ended.result()
        seconds, self._last_end = now - self._last_end, now
        self.following.observe(seconds)
        # All earlier steps have been finished here, so every skipped update is counted.
        row = pending.row(self.parts, self.throughput, seconds, updates=pending.step - 1 - self.state.skipped)
        self.result.losses.append(row["loss"])
        if row["skipped"]:
            self.state.skipped += 1
            self.progress.message(
                f"step {pending.step}: gradients are not finite, the update is skipped ({self.state.skipped} so far)"
            )
        self.soundness.add_update(pending.step, skipped=bool(row["skipped"]))
        row["skipped"] = self.state.skipped
        row |= self.following.columns()
        if self.writer:
            self.writer.write(row)
        for on_step in self.callbacks:
            on_step(pending.step, row)
        self.progress.update(pending.step, loss=row["loss"], tokens_per_s=row["tokens_per_s"])

    # ---- between steps -----------------------------------------------------------------------------------------------

    def _due(self) -> bool:
        step = self.state.step
        return step == self.last or self._evaluation_due() or self._checkpoint_due() or self.profile.due(step)

    def _evaluation_due(self) -> bool:
        every, step = self.recipe.train.eval_every, self.state.step
        return bool(every and step) and step % every == 0

    def _lacks_evaluation(self) -> bool:
        return self.checkpointer is not None and not self.scoring.is_evaluated(self.state.step)

    def _checkpoint_due(self) -> bool:
        return self.checkpointer is not None and self.checkpointer.due(self.state.step)

    def _visit(self) -> None:
        """Acts between steps where it is due: saves a checkpoint, evaluates, ends or begins a profile."""
        step = self.state.step
        final = step == self.last
        self.soundness.require_updates()
        self.profile.leave(step, self.progress.message)
        if final or self._checkpoint_due():
            self.following.enter("checkpoint", step)
            self.state.save()
        if self.scoring.evaluator and (final or self._evaluation_due()):
            self.following.enter("evaluation", step)
            self._score(draw=final or self.best.is_last_chance)
            self.result.ending = self.best.ending
            if self.result.ending:
                self.following.enter("checkpoint", step)
                self.state.save()
        if not final:
            self.profile.enter(step, self.progress.message)
        self._last_end = time.perf_counter()

    def _score(self, *, draw: bool) -> None:
        step = self.state.step
        scored = self.scoring.attempt(self.executor.states, step, draw=draw, check=self._stop.check_together)
        self.result.take(scored)
        if scored.plain:
            if self.best.add(step, figures(scored.plain, scored.swapped)):
                self.state.save()
            self.progress.message(f"step {step}: {describe(scored.plain, scored.swapped)}")
        self.result.scores_shown = bool(scored.plain)
