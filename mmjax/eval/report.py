"""An evaluation of a run's newest checkpoint on held-out samples or on those of a folder."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmjax.flags import counted, importing
from mmjax.recipe import Recipe

if TYPE_CHECKING:  # see `importing`
    from mmjax.data.types import Sample
    from mmjax.eval.scores import Evaluation
USUAL_SAMPLES = 180
SHOWN = 8
"""Answers in the text of a report."""


@dataclass(frozen=True)
class EvalReport:
    """The results of an evaluation. As text it is a line of scores, and an answer below each question.

    Attributes:
      step: the checkpoint's step.
      samples: the samples that the model has answered.
      evaluation: the answers and their scores.
      swapped: by encoder, the scores with its media exchanged between samples; empty where media are not exchanged.
    """

    step: int
    samples: Sequence[Sample]
    evaluation: Evaluation
    swapped: Mapping[str, Evaluation]

    def __str__(self) -> str:
        from mmjax.eval.scores import describe

        answers = zip(self.samples, self.evaluation.answers, strict=True)
        lines = (f"  {sample.question!r}: {answer!r}, right is {sample.answer!r}" for sample, answer in answers)
        shown = list(itertools.islice(lines, SHOWN))
        more = [f"  and {counted(len(self.samples) - SHOWN, 'more sample')}"] if len(self.samples) > SHOWN else []
        return "\n".join([f"step {self.step}: {describe(self.evaluation, self.swapped)}", *shown, *more])

    def numbers(self) -> dict[str, Any]:
        """All figures by the names of `eval.jsonl`: "step", "samples" (how many), and those of `figures`."""
        from mmjax.eval.scores import figures

        return {"step": self.step, "samples": len(self.samples)} | figures(self.evaluation, self.swapped)


def evaluate(
    recipe: Recipe, run_dir: str | Path, data: str = "", count: int = 0, style: str = "auto", source: str = ""
) -> EvalReport:
    """Answers of the newest readable checkpoint of `run_dir` to held-out samples, or to those of the folder `data`.

    Args:
      recipe: the run's configuration, as `load_run_config(run_dir)` gives it, under any layout.
      run_dir: the run's directory, which only is read.
      data: a folder of images with a data.jsonl; empty for held-out samples.
      count: how many samples; 0 for as many as the run evaluates, or the whole folder.
      style: the style of the progress display: "auto", "bar", "lines" or "silent".
      source: the name in `Data.sources` whose template and preprocessing the folder's samples get; "" where all have
        the same.

    Raises:
      ConfigError: there is no checkpoint, or the folder or the devices do not fit.
      CheckpointError: the checkpoint is of another model.
    """
    with importing():
        from mmjax.assembly.assembly import place
        from mmjax.assembly.data_state import known_in
        from mmjax.data.sample import meta_of
        from mmjax.eval.evaluator import Evaluator, load_parameters, require_checkpoint, room_for
        from mmjax.eval.folder import for_folder
        from mmjax.eval.samples import as_evaluated, exchanged, held_out
        from mmjax.eval.scores import score
        from mmjax.pipeline.compile import compile_all
        from mmjax.progress import Progress

    require_checkpoint(run_dir)
    recipe = known_in(as_evaluated(recipe), run_dir)
    if data:
        recipe = for_folder(recipe, data, source)
    samples = held_out(recipe, count or (sys.maxsize if data else recipe.train.eval_samples or USUAL_SAMPLES))
    parts = place(recipe, trained=False)
    step, states = load_parameters(parts, run_dir)
    swapped = {} if data else exchanged(recipe, parts.tokenizer, samples)
    prompts = [*samples, *(sample for variants in swapped.values() for sample in variants)]
    metas = [meta_of(sample, parts.packer.encoders) for sample in prompts]
    evaluator = Evaluator(parts, room=room_for(metas, parts.packer.sequence_length))
    programs = evaluator.predictor.programs()
    with Progress(len({id(p) for p in programs}), "compiling programs", log_every=len(programs), style=style) as bar:
        compile_all(programs, lambda done, _, __: bar.update(done))
    with Progress(len(prompts), "answering", log_every=len(prompts), style=style) as bar:
        answers = evaluator.answers(states, prompts, bar.update)
    drawings, loss = evaluator.drawings(states, samples), evaluator.loss(states, samples)
    codes, levels = evaluator.code_accuracy(states, samples), evaluator.level_losses(states, samples)
    # First the answers to the samples as they are, then as many for each encoder whose media are exchanged.
    plain, *variants = [answers[at : at + len(samples)] for at in range(0, len(prompts), len(samples))]
    task = recipe.data.origin
    return EvalReport(
        step=step,
        samples=samples,
        evaluation=score(
            samples,
            plain,
            drawings,
            loss,
            task,
            code_accuracy=codes,
            level_losses=levels,
            log_mels=evaluator.log_mels,
        ),
        swapped={
            name: score(variant, replies, task=task)
            for (name, variant), replies in zip(swapped.items(), variants, strict=True)
        },
    )
