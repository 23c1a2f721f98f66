"""The training run: steps, metrics, checkpoints, evaluation. ``python -m mmjax.train`` and notebooks both use it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import jax

from mmjax import sigterm
from mmjax.assembly.assembly import assemble
from mmjax.assembly.batches import batch_maker
from mmjax.assembly.buckets import added_buckets, with_buckets
from mmjax.assembly.data_state import describe_data, stored_records, with_known_records
from mmjax.assembly.epochs import describe_epochs, with_steps
from mmjax.assembly.samples import open_source
from mmjax.checkpoint import Checkpointer
from mmjax.configurable import require
from mmjax.data.batches import Batches, open_batches, require_access
from mmjax.data.sources.skipped import NAME as SKIPPED
from mmjax.data.sources.skipped import Fault, Skipped
from mmjax.data.types import Sample, StepBatch
from mmjax.eval.scores import Evaluation
from mmjax.flags import counted
from mmjax.mesh.processes import broadcast_text, is_first
from mmjax.mesh.spmd import Program
from mmjax.pipeline.compile import compile_all
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.finite import finite_ops
from mmjax.progress import Progress
from mmjax.recipe import Recipe, validate
from mmjax.recipe.device_defaults import with_earlier_defaults
from mmjax.train.best import BestEvaluation
from mmjax.train.files import RunFiles, recorded
from mmjax.train.following import Following
from mmjax.train.lock import RunLock
from mmjax.train.loop import OnStep, TrainLoop
from mmjax.train.metrics import read_metrics, require_sinks
from mmjax.train.profile_window import ProfileWindow
from mmjax.train.results import TrainResult
from mmjax.train.run_state import RunState
from mmjax.train.scoring import Scoring
from mmjax.train.soundness import Soundness
from mmjax.train.starts import Starts, find_starts, require_seed, run_begins
from mmjax.train.throughput import Throughput
from mmjax.train.warm_up import Initializer
from mmjax.viz.curves import draw_curves

_logger = logging.getLogger(__name__)


class Trainer:
    """One run in one directory. Use it as a context manager, or call ``close``. Scripts use ``mmjax.build`` instead.

    Attributes:
      recipe: the configuration, with the buckets and the devices' defaults that were chosen.
      chosen: lines about the buckets of each module for which a number of them is configured, if they were chosen now,
        about each bucket that had to be added, and about settings that were chosen for GPUs.
      data: lines about records that are left out, and about data that have changed since the last checkpoint.
      parts: model, data, schedule and executor.
      run_dir: where everything is written; ``None`` writes nothing.
      executor: runs the steps; has the arrays of the state.
      state: parameters and moments, and the steps done.
      scoring: evaluates.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_dir: str | Path | None = None,
        style: str = "auto",
        *,
        from_scratch: bool = False,
        watched: bool = False,
        callbacks: Sequence[OnStep] = (),
    ):
        """Places the model, and restores the last checkpoint of ``run_dir`` if there is one. Compiles nothing.

        Args:
          recipe: see ``load_config``.
          run_dir: made if missing.
          style: the style of the progress display; see ``Progress``.
          from_scratch: begins again where the directory has the steps of a run and no checkpoint.
          watched: whether this process is ended where training hangs; see ``World.hang_seconds``.
          callbacks: functions that are called after each step.

        Raises:
          ConfigError: the configuration does not fit the devices here or the run that is in the directory, or the
            directory cannot be written or is another process's, or it has steps and no checkpoint, or a module
            cannot start from the folder that it is to start from.
          CheckpointError: the run directory holds a checkpoint of another model.
        """
        self.recipe, self.style = recipe, style
        validate(recipe)  # it may have been changed by hand since it was loaded
        require_sinks(recipe.train.sinks)
        require_access(recipe.data.settings)
        sigterm.within(recipe.checkpoint.grace_seconds)
        # Of several processes the first alone writes the directory's files; checkpoints are written by all.
        self._files = RunFiles(run_dir, self._report) if run_dir and is_first() else None
        self.run_dir = Path(run_dir) if run_dir else None
        self._callbacks = callbacks
        self._skipped_path = self.run_dir / SKIPPED if self.run_dir else None
        self._broken = Skipped(path=self._skipped_path)
        self._progress: Progress | None = None
        self._checkpointer: Checkpointer | None = None
        with ExitStack() as opened:  # closed again where something below fails
            if self._files:
                opened.enter_context(RunLock(self._files.run_dir))
            if self.run_dir:
                note = self._files.journal.add if self._files else lambda step: None
                self._checkpointer = Checkpointer(
                    self.run_dir / "checkpoints",
                    recipe.checkpoint,
                    report=self._report,
                    committed=note,
                    best=lambda steps: self._best.step_among(steps),
                )
                opened.callback(self._checkpointer.close)
            begins = self._checkpointer is None or run_begins(
                self._files, self._checkpointer, from_scratch=from_scratch, say=self._report
            )
            starts = find_starts(recipe) if begins else Starts()
            newest = self._checkpointer.latest_metadata() if self._checkpointer else None
            if self._checkpointer and newest:
                require_seed(recipe, newest, self._checkpointer.directory.parent)  # before anything is compiled
            if not begins:
                self.recipe = recipe = with_known_records(recipe, newest)
            self._source = open_source(recipe, split="train", skipped=self._skipped_path)
            self.recipe = recipe = with_steps(recipe, self._source)
            records = stored_records(self._source)
            self.data = (*describe_data(recipe, self._source), *describe_epochs(recipe, self._source))
            self.recipe, self.chosen = self._with_choices()
            self.parts = assemble(self.recipe, source=self._source)
            self.recipe = recipe = self.parts.recipe
            self.chosen += (*self.parts.choices, *added_buckets(self.recipe, self.parts.packer))
            self.executor = self.parts.executor
            self._initializer = Initializer(recipe.world, self.parts.world, self.executor)
            self.scoring = Scoring(self.recipe, self.parts, self._files, self._report)
            self._soundness = Soundness(self.parts.placed, lambda: self.executor.states, recipe.train.max_skipped)
            self._profile = self._profile_window()
            self._following = Following(self.executor, recipe, self._report, self.run_dir, watched=watched)
            if recipe.train.debug_nans:
                assert isinstance(self.executor, Executor)
                opened.enter_context(finite_ops(self.executor))
            self.state = RunState(
                self.recipe, self.parts, self._soundness, checkpointer=self._checkpointer, records=records
            )
            self.state.start(starts, self._report)
            self._best, self._throughput = self._best_evaluation(), self._make_throughput()
            self._opened = opened.pop_all()

    def _with_choices(self) -> tuple[Recipe, tuple[str, ...]]:
        """The configuration with the run's recorded choices, and with buckets if it asks for a number of them.

        Returns:
          The configuration, and lines about both.
        """
        lines: list[str] = []
        before = recorded(self.run_dir, allow_code=self.recipe.allow_code) if self.run_dir else None
        earlier = with_earlier_defaults(self.recipe, before)
        recipe = with_buckets(earlier.recipe, self._source, say=lines.append, before=before)
        return recipe, (*lines, *earlier.lines)

    def _best_evaluation(self) -> BestEvaluation:
        """The best evaluation up to the step of the state."""
        train, best = self.recipe.train, self.recipe.checkpoint.best
        rows = [row for row in self._files.evaluations if row["step"] <= self.step] if self._files else []
        return BestEvaluation.agreed(best, train.patience, rows)

    def _make_throughput(self) -> Throughput:
        """The counts behind tokens/s and mfu."""
        model, peak = self.recipe.model, self.recipe.train.peak_tflops
        return Throughput(self.parts.placed.model, self.parts.world, model.frozen, peak)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step

    @property
    def skipped(self) -> int:
        """Steps whose update was skipped, since gradients were not finite."""
        return self.state.skipped

    @property
    def resumed(self) -> bool:
        """Whether the state was restored from a checkpoint of the run directory."""
        return self.state.resumed

    @property
    def started(self) -> tuple[str, ...]:
        """Lines about the origin of modules' parameters; none if all have new values, or are the last checkpoint's."""
        return self.state.started

    def __enter__(self) -> Trainer:
        if self._checkpointer:
            self._opened.enter_context(self._checkpointer)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Waits for a checkpoint that is being written, and unlocks the run directory; saves nothing."""
        self._opened.close()

    # ---- training ----------------------------------------------------------------------------------------------------

    def train(self, steps: int | None = None) -> TrainResult:
        """Trains until ``Train.steps`` (or ``steps`` in all) are done.

        Ctrl-C and SIGTERM finish the step, save a checkpoint and return; a second Ctrl-C raises ``KeyboardInterrupt``
        at once.
        Evaluates on the way and at the end as ``Train.eval_every`` and ``Train.eval_samples`` say.

        Args:
          steps: the step to end after, counted from the run's beginning; beyond ``Train.steps`` it counts as that.

        Raises:
          NoBatchError: no data server gives a batch.
          WarmUpError: before the first step, a boundary or collective is down; see ``World.warm_up``.
          NonFiniteError: ``Train.max_skipped`` updates in a row were skipped, or a parameter or moment is not finite
            where a checkpoint is due, which is not saved.
        """
        train, result = self.recipe.train, TrainResult(step=self.step, skipped=self.skipped)
        last = train.steps if steps is None else min(steps, train.steps)
        if ending := self._best.ending:
            result.ending, last = ending, min(self.step, last)
        if self.step < last:
            if self._files:
                self._files.begin(self.recipe, self.parts.planned, self.step)
            # The loader's processes start while programs are compiled.
            with self._loader(last) as batches, self._following:
                self.compile()
                self._train(batches, last, result)
        elif self.step == last and not self._is_evaluated():  # stopped after its last step
            result.take(self.scoring.attempt(self.executor.states, self.step, draw=True))
        if self._files and not result.interrupted:
            self._draw_curves()
        result.unwritten = self._unwritten()
        result.unusable = self._broken.count() if self._skipped_path else 0
        return result

    def _train(self, batches: Batches, last: int, result: TrainResult) -> None:
        writer = self._files.open_metrics(self.step, self.recipe.train.sinks) if self._files else None
        progress = Progress(last, "training", start=self.step, log_every=self.recipe.train.log_every, style=self.style)
        self._progress = progress
        loop = TrainLoop(
            recipe=self.recipe,
            parts=self.parts,
            executor=self.executor,
            state=self.state,
            scoring=self.scoring,
            soundness=self._soundness,
            following=self._following,
            profile=self._profile,
            best=self._best,
            throughput=self._throughput,
            checkpointer=self._checkpointer,
            callbacks=self._callbacks,
            note_broken=self._note_broken,
            last=last,
            writer=writer,
            progress=progress,
            result=result,
        )
        try:
            with progress:
                for line in self._initializer(self._files):
                    progress.message(line)
                loop.run(batches)
        finally:
            self._progress = None
            if writer:
                writer.close()
        result.step, result.skipped = self.step, self.skipped

    def _note_broken(self, batch: StepBatch) -> None:
        """Records the samples of a batch that could not be read: a data server may have found them."""
        if self._skipped_path:
            for source, *fault in batch.broken:
                self._broken.add(source, [Fault(*fault)])

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def held_out(self) -> list[Sample]:
        """The evaluation samples, the same in every run of a configuration; see ``Scoring.samples``."""
        return self.scoring.samples()

    def evaluate(self, draw: bool = False) -> tuple[Evaluation, dict[str, Evaluation]]:
        """Scores on held-out samples as they are, and with each encoder's media exchanged; appended to ``eval.jsonl``.

        Args:
          draw: whether ``predictions.png`` is drawn.

        Returns:
          The evaluation of the samples as they are, and the others by encoder; {} where media are not exchanged.

        Raises:
          ValueError: the configuration has no evaluation samples.
        """
        scored = self.scoring.evaluate(self.executor.states, self.step, draw=draw)
        assert scored.plain
        return scored.plain, dict(scored.swapped)

    def _is_evaluated(self) -> bool:
        return self.run_dir is None or self.scoring.is_evaluated(self.step)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def leaves(self) -> dict[str, jax.Array]:
        """The whole state as logical leaves by name; see ``RunState.leaves``."""
        return self.state.leaves()

    def latest_checkpoint(self) -> int | None:
        """The step of the newest checkpoint, after waiting for one that is being written; ``None`` without any."""
        if not self._checkpointer:
            return None
        self._checkpointer.wait()
        return self._checkpointer.latest_step()

    def save(self) -> None:
        """Writes a checkpoint of the state; nothing before the first step, or without a run directory.

        In a ``with`` of the trainer it is written in the background, and training may go on.

        Raises:
          NonFiniteError: a parameter or a moment is not finite, and nothing is written.
        """
        self.state.save()

    # ---- small parts -------------------------------------------------------------------------------------------------

    def _profile_window(self) -> ProfileWindow:
        steps = self.recipe.train.profile_steps
        require(bool(self.run_dir) or not steps, "Train.profile_steps", steps, "needs a run directory; set it to ()")
        return ProfileWindow(steps, (self.run_dir or Path()) / "profile", self.executor)

    def programs(self) -> list[Program]:
        """The different programs that this process compiles: of steps, of evaluations and of trials of links."""
        programs = [*self.executor.programs(), *self.scoring.programs(), *self._initializer.programs()]
        return list({id(program): program for program in programs}.values())

    def compile(self) -> None:
        """Compiles every program that is not compiled yet, several at a time; ``train`` does it by itself."""
        programs = self.programs()
        total = len(programs)
        with Progress(total, "compiling programs", log_every=max(1, total // 4), style=self.style) as progress:
            progress.message(f"tracing and compiling {counted(total, 'program')}")
            compile_all(programs, lambda done, _, __: progress.update(done))

    def _report(self, text: str) -> None:
        """Shows a line, in the first process; may be called from any thread."""
        if not is_first():
            return
        if self._progress:
            self._progress.message(text)
        else:
            _logger.warning(text)

    def _loader(self, last: int) -> Batches:
        spec, maker = batch_maker(self.recipe, self.parts, self._source)
        return open_batches(spec, maker, steps=last, start_step=self.step, report=self._report)

    def _draw_curves(self) -> None:
        assert self._files
        steps, evaluations = read_metrics(self._files.run_dir / "metrics.jsonl"), self._files.evaluations
        marks = self.recipe.data.origin.changes(self.recipe.train.global_batch)
        self._files.draw("curves.png", lambda path: draw_curves(steps, evaluations, path, marks=marks))

    def _unwritten(self) -> tuple[str, ...]:
        """Files that the run directory lacks after a last attempt to write them; process 0 tells all others."""
        if not self._checkpointer:
            return ()
        self._checkpointer.wait()
        failure = self._checkpointer.failure
        lacking = [f"the checkpoint of step {self.step} ({failure})"] if failure else []
        if self._files:
            self._files.flush()
            lacking = [*self._files.unwritten, *lacking]
        return tuple(json.loads(broadcast_text(json.dumps(lacking))))
