"""A run in Python: ``build(recipe)`` gives a ``Run``, which forecasts, checks, trains, evaluates and exports."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmjax.recipe import Recipe, validate
from mmjax.recipe.targets import require_targets

if TYPE_CHECKING:  # a run that only plans needs no JAX
    from mmjax.eval.report import EvalReport
    from mmjax.generate.answers import Answer
    from mmjax.parity.engine import CheckReport
    from mmjax.plan.choice import PlannedRecipe
    from mmjax.train.dry_run import DryRun
    from mmjax.train.results import TrainResult
    from mmjax.train.trainer import OnStep


class Run:
    """A recipe that agrees with itself, and everything that can be done with it.

    Attributes:
      recipe: the recipe.
      run_dir: the directory that it was trained in last; ``None`` before.
    """

    def __init__(self, recipe: Recipe, run_dir: str | os.PathLike[str] | None = None):
        """Checks the recipe; arguments and errors are those of ``build``."""
        validate(recipe)
        require_targets(recipe)
        self.recipe, self.run_dir = recipe, Path(run_dir) if run_dir else None

    # ---- before training ---------------------------------------------------------------------------------------------

    def forecast(self) -> DryRun:
        """Traces the run: memory a device, programs, compile time and bubble. Compiles nothing, and needs no device.

        Raises:
          ConfigError: the data do not fit the recipe.
        """
        from mmjax.train.dry_run import dry_run

        return dry_run(self.recipe)

    def plan(self, accelerator: str, devices: int = 0) -> PlannedRecipe:
        """Chooses layouts, microbatches and schedule with the shortest step. Needs no device.

        Args:
          accelerator: kind of the devices, such as "h100".
          devices: their number; 0 for as many as the recipe's layouts need.

        Raises:
          ConfigError: the accelerator is unknown, or a setting does not fit the data.
          DoesNotFit: no layout fits the devices' memory.
        """
        from mmjax.plan.choice import plan_recipe

        return plan_recipe(self.recipe, {accelerator: devices})

    def check(self, steps: int = 3) -> CheckReport | None:
        """Compares the layouts with one device, on a shrunk model; all processes call it.

        Returns:
          Differences and their limits in the first process; ``None`` in others.

        Raises:
          ConfigError: the data do not fit the recipe, or there are too few virtual devices.
        """
        from mmjax.parity.engine import check

        return check(self.recipe, steps)

    # ---- training ----------------------------------------------------------------------------------------------------

    def train(
        self,
        steps: int | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        callbacks: Sequence[OnStep] = (),
        style: str = "auto",
    ) -> TrainResult:
        """Trains; goes on from the newest checkpoint of the directory if it has one.

        Args:
          steps: optimizer steps in all, which the schedule of the learning rate ends with; by default the recipe's. A
            warm-up that is not shorter becomes the same share of these steps as it was of the recipe's.
          run_dir: where everything is written; ``None`` writes nothing.
          callbacks: functions that are called after each step, with its number and its figures by the names of
            ``metrics.jsonl``, such as "loss".
          style: the style of the progress display: "auto", "bar", "lines" or "silent"; see ``Progress``.

        Raises:
          ConfigError: the recipe does not fit the devices here or the run that is in the directory.
          CheckpointError: the directory holds a checkpoint of another model.
        """
        from mmjax.train.trainer import Trainer

        if steps is not None:
            self.recipe = self.recipe.with_steps(steps)
        self.run_dir = Path(run_dir) if run_dir else self.run_dir
        with Trainer(self.recipe, self.run_dir, style, callbacks=callbacks) as trainer:
            return trainer.train()

    # ---- after training ----------------------------------------------------------------------------------------------

    def evaluate(self, data: str | os.PathLike[str] = "", count: int = 0, style: str = "auto") -> EvalReport:
        """Answers held-out samples with the newest checkpoint, and compares them.

        Args:
          data: a folder of images with a data.jsonl in place of the held-out samples.
          count: the number of samples; 0 for as many as the recipe evaluates, or the whole folder.
          style: the style of the progress display: "auto", "bar", "lines" or "silent"; see ``Progress``.

        Raises:
          ConfigError: there is no checkpoint, or the folder does not fit.
          ValueError: the run has no directory.
        """
        from mmjax.eval.report import evaluate

        return evaluate(self.recipe, self._trained(), os.fspath(data), count, style)

    def generate(
        self, dialogues: Sequence[Sequence[Mapping[str, Any]]], *, media: str = ".", limit: int = 64
    ) -> list[Answer]:
        """Answers the last message of each dialogue with the newest checkpoint, token by token.

        Args:
          dialogues: messages with "role" and "content", as chat templates have them.
          media: the folder that names of images and recordings start from.
          limit: the most tokens of an answer.

        Returns:
          One answer for each dialogue, in their order.

        Raises:
          ConfigError: there is no checkpoint, or a message or a medium cannot be read.
          ValueError: the run has no directory.
        """
        from mmjax.generate.answers import generate

        messages = [[dict(message) for message in dialogue] for dialogue in dialogues]
        return generate(self.recipe, str(self._trained()), messages, media=media, limit=limit, named="dialogues")

    def export(self, out: str | os.PathLike[str], format: str = "orbax", *, step: int = 0) -> Path:
        """Writes the parameters of a checkpoint.

        Args:
          out: the directory to make.
          format: "orbax" (all modules), "safetensors" (folders as ``save_pretrained`` writes them) or "peft".
          step: the checkpoint's; 0 for the newest.

        Returns:
          The directory.

        Raises:
          ConfigError: there is no such checkpoint, ``out`` exists, or the run has nothing in that format.
          ValueError: the run has no directory.
        """
        from mmjax.export.formats import export

        export(self._trained(), Path(out), format, step, allow_code=self.recipe.allow_code)
        return Path(out)

    def _trained(self) -> Path:
        if self.run_dir is None:
            raise ValueError("the run has no directory; call train(run_dir=…), or build(recipe, run_dir=…)")
        return self.run_dir


def build(recipe: Recipe, run_dir: str | os.PathLike[str] | None = None) -> Run:
    """Checks a recipe and returns its run; nothing is placed on a device before a method, such as `train`, needs it.

    Args:
      recipe: all settings of the run, such as `load_config(["run.gin"])`.
      run_dir: the directory of a run of this recipe that was trained already; None for a new one.

    Raises:
      ConfigError: two settings contradict each other; one line that names the field, its value and a legal one.
    """
    return Run(recipe, run_dir)
