"""The evaluations of a run on its held-out samples, on the way and at its end. A failed one does not end training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mmjax.assembly.latents import Decoders
from mmjax.assembly.parts import PlacedRun
from mmjax.data.types import Sample
from mmjax.eval.evaluator import Evaluator, Meet, room_for
from mmjax.eval.samples import exchanged, held_out, held_out_metas
from mmjax.eval.scores import Evaluation, figures
from mmjax.mesh.processes import broadcast_text
from mmjax.mesh.spmd import Program
from mmjax.pipeline.stage_state import State
from mmjax.recipe import Recipe
from mmjax.train.attempt import GivenUp, attempt
from mmjax.train.files import RunFiles
from mmjax.viz.answers import draw_answers
from mmjax.viz.grid import draw_grid, pairs_of

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The result of an evaluation, or why it failed.

    Attributes:
      plain: scores of the samples as they are; ``None`` where the evaluation failed.
      swapped: by encoder, scores with its media exchanged between samples; empty where media are not exchanged.
      failure: why it failed, in one line; "" where it did not.
    """

    plain: Evaluation | None = None
    swapped: Mapping[str, Evaluation] = field(default_factory=dict)
    failure: str = ""


class Scoring:
    """Evaluates a run, and writes the results into the run directory.

    Attributes:
      evaluator: ``None`` where ``Train.eval_samples`` is 0.
    """

    def __init__(self, recipe: Recipe, parts: PlacedRun, files: RunFiles | None, say: Callable[[str], None]):
        """Traces the programs of evaluation.

        Args:
          recipe: the run's configuration.
          parts: its model on its devices.
          files: the run directory's files, in the process that writes them.
          say: called with a line where an evaluation failed, once for each reason.

        Raises:
          ConfigError: a held-out sample is too long for the shapes of the run.
        """
        self.recipe, self.parts, self._files, self._say = recipe, parts, files, say
        self._said: set[str] = set()
        self.evaluator = None
        if recipe.train.eval_samples:
            metas = held_out_metas(recipe, recipe.train.eval_samples)
            # Samples with exchanged media may be longer than any held-out sample.
            room = 0 if recipe.data.origin.exchanges else room_for(metas, parts.packer.sequence_length)
            self.evaluator = Evaluator(parts, recipe.data.origin, room)
            self.evaluator.rounds.require_room(metas)

    def programs(self) -> list[Program]:
        """The programs of evaluations, which have to be compiled; [] where nothing is evaluated."""
        return self.evaluator.predictor.programs() if self.evaluator else []

    def samples(self) -> list[Sample]:
        """The ``Train.eval_samples`` held-out samples, or as many as there are; the same in every run."""
        return held_out(self.recipe, self.recipe.train.eval_samples)

    def evaluate(
        self, states: Mapping[str, State], step: int, *, draw: bool = False, meet: Meet = lambda: None
    ) -> Scored:
        """Scores of the samples as they are, and with each encoder's media exchanged; appended to ``eval.jsonl``.

        Args:
          states: the states of this process's stages by name, such as "llm.0"; only parameters are read.
          step: the step after which these are the parameters.
          draw: whether ``predictions.png`` is drawn.
          meet: see ``Evaluator.answers``.

        Raises:
          ValueError: the configuration has no evaluation samples.
        """
        if self.evaluator is None:
            raise ValueError("Train.eval_samples=0: there is nothing to evaluate; set it to 180")
        samples = self.samples()
        variants = exchanged(self.recipe, self.parts.tokenizer, samples)
        plain = self.evaluator.evaluate(states, samples, meet, loss=True)
        swapped = {name: self.evaluator.evaluate(states, variant, meet) for name, variant in variants.items()}
        if self._files:
            if draw and self.recipe.train.predictions:
                count = self.recipe.train.predictions
                shown, drawings = Decoders.of(self.recipe).shown(samples[:count], plain.drawings[:count])
                answers = plain.answers[:count]
                self._files.draw("predictions.png", lambda path: draw_answers(shown, answers, path, drawings=drawings))
                if pairs := pairs_of(shown, drawings):
                    self._files.draw("drawings.png", lambda path: draw_grid(pairs, path))
            # After the picture: a row says that the evaluation is complete.
            self._files.add_evaluation({"step": step} | figures(plain, swapped))
        return Scored(plain=plain, swapped=swapped)

    def attempt(
        self, states: Mapping[str, State], step: int, *, draw: bool = False, check: Callable[[], None] = lambda: None
    ) -> Scored:
        """Runs ``evaluate``; if it fails, all processes get the same reason, and training can go on.

        Args:
          states, step, draw: see ``evaluate``.
          check: called by all processes before each round; may raise ``Stopped``.

        Raises:
          Exception: it failed in the middle of work that several processes do together, and none of them can go on.
        """
        try:
            return attempt(lambda meet: self.evaluate(states, step, draw=draw, meet=meet), check)
        except GivenUp as error:
            failure = str(error)
            _logger.debug("step %d: the evaluation has failed", step, exc_info=error)
            if failure not in self._said:
                self._say(f"step {step}: the evaluation has failed, training goes on: {failure}")
                self._said.add(failure)
            if self._files:
                self._files.add_evaluation({"step": step, "failure": failure})
            return Scored(failure=failure)

    def is_evaluated(self, step: int) -> bool:
        """Whether ``eval.jsonl`` has the scores of a step, or nothing is evaluated; all processes have to call it."""
        rows = self._files.evaluations if self._files else []
        scored = any(row.get("step") == step and not row.get("failure") for row in rows)
        return self.evaluator is None or broadcast_text(str(int(scored))) == "1"
