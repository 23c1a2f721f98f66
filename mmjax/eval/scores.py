"""Scores of a model's answers and drawings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmjax.assembly.latents import Drawings
from mmjax.data.log_mel import LogMel
from mmjax.data.sample import is_wordless
from mmjax.data.tasks.records import Sources
from mmjax.data.tasks.task import Task
from mmjax.data.types import Sample


@dataclass(frozen=True)
class Evaluation:
    """Answers, drawings and scores of some samples.

    Attributes:
      answers: the model's answer to each sample.
      exact_match: share of samples whose answer equals the right one.
      character_accuracy: share of the right answers' characters that the model gave in the right place.
      kinds: exact match by kind of question, where the samples have kinds.
      drawings: for each sample, the media that each generator drew, where a drawing was asked for.
      drawing_accuracy: share of the units to be drawn that are recognised in the drawings; `None` without any, or where
        the task does not read drawings.
      loss: weighted cross-entropy of the text per unit of loss weight, under teacher forcing; `None` where it was
        not asked for, or no token has a loss weight.
      unit: the unit that answers are compared by, see `Task`.
      code_accuracy: share of the codes of spoken answers that are predicted rightly, under teacher forcing; `None`
        without any.
      scores: the task's own scores, see `Task`; each is the mean over samples, in [0, 1].
      level_losses: the mean squared error of predictions by generator, and by level of noise in 0…1, as text; {} where
        it was not asked for, or nothing is to be made.
    """

    answers: tuple[str, ...]
    exact_match: float
    character_accuracy: float
    kinds: Mapping[str, float] = field(default_factory=dict)
    drawings: tuple[Drawings, ...] = ()
    drawing_accuracy: float | None = None
    loss: float | None = None
    unit: str = "character"
    code_accuracy: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    level_losses: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def perplexity(self) -> float | None:
        """Perplexity of a token of the text; `None` without a loss."""
        return None if self.loss is None else math.exp(min(self.loss, _MOST))


_RECORDS = Sources()
_LEVEL_LOSSES = "_losses"
"""The end of the names of losses by level of noise."""
_SILENT: Mapping[str, LogMel] = {}
_MOST = 700.0
"""The largest loss whose exponential is taken: it is still a finite float."""


def score(
    samples: Sequence[Sample],
    answers: Sequence[str],
    drawings: Sequence[Drawings] = (),
    loss: float | None = None,
    task: Task = _RECORDS,
    *,
    code_accuracy: float | None = None,
    level_losses: Mapping[str, Mapping[str, float]] | None = None,
    log_mels: Mapping[str, LogMel] = _SILENT,
) -> Evaluation:
    """Scores answers against the right ones, character by character and by the task's own scores, and drawings.

    Args:
      samples: the samples, such as those of `held_out(recipe, 100)`.
      answers: the model's answer to each sample, in their order, such as "7".
      drawings: for each sample, in their order, the media [h, w, C] that each generator drew, {"image": (medium,)}; or
        () for none.
      loss: kept as `Evaluation.loss`.
      task: the task that the samples are from, `recipe.data.origin`.
      code_accuracy: kept as `Evaluation.code_accuracy`.
      level_losses: kept as `Evaluation.level_losses`.
      log_mels: how recordings become frames, by generator of recordings.

    Returns:
      Shares in [0, 1], `exact_match` and `character_accuracy`, and the arguments; all shares are 0 without samples. A
      sample whose right answer is a picture alone counts for neither.
    """
    right = [a == s.answer for s, a in zip(samples, answers, strict=True)]
    in_words = [not is_wordless(sample) for sample in samples]
    total = sum(len(s.answer) for s in samples)
    matches = sum(x == y for s, a in zip(samples, answers, strict=True) for x, y in zip(s.answer, a, strict=False))
    by_kind: dict[str, list[bool]] = {}
    for sample, ok in zip(samples, right, strict=True):
        if sample.kind:
            by_kind.setdefault(sample.kind, []).append(ok)
    return Evaluation(
        answers=tuple(answers),
        exact_match=sum(map(all, zip(right, in_words, strict=True))) / max(1, sum(in_words)),
        character_accuracy=matches / max(1, total),
        kinds={kind: sum(correct) / len(correct) for kind, correct in sorted(by_kind.items())},
        drawings=tuple(drawings),
        drawing_accuracy=_recognised(samples, drawings, task, log_mels),
        loss=loss,
        unit=task.unit,
        code_accuracy=code_accuracy,
        scores=_task_scores(samples, answers, task),
        level_losses=level_losses or {},
    )


def _task_scores(samples: Sequence[Sample], answers: Sequence[str], task: Task) -> dict[str, float]:
    """The means of the task's own scores; {} without any sample."""
    pairs = list(zip(samples, answers, strict=True))
    return {name: sum(share(*pair) for pair in pairs) / len(pairs) for name, share in task.scores.items() if pairs}


def _recognised(
    samples: Sequence[Sample], drawings: Sequence[Drawings], task: Task, log_mels: Mapping[str, LogMel]
) -> float | None:
    def read(name: str, medium: np.ndarray, count: int) -> str:
        """The label that is recognised in a drawing, or in frames."""
        is_sound = name in log_mels
        return task.read_recording(medium, count, log_mels[name]) if is_sound else task.read_drawing(medium, count)

    if not task.reads_drawings:
        return None
    pairs = [
        (label, read(name, drawing, len(label)))
        for sample, drawn in zip(samples, drawings, strict=bool(drawings))
        for name, media in drawn.items()
        for label, drawing in zip(sample.labels.get(name, ()), media, strict=False)
    ]
    total = sum(len(label) for label, _ in pairs)
    return sum(a == b for pair in pairs for a, b in zip(*pair, strict=True)) / total if total else None


def figures(plain: Evaluation, swapped: Mapping[str, Evaluation]) -> dict[str, Any]:
    """The columns of `eval.jsonl` for an evaluation, without "step"; shares are in [0, 1].

    They are "exact_match", "<unit>_accuracy", such as "character_accuracy", and where there are any "loss" and
    "perplexity", "kinds" (exact match by kind), "drawing_accuracy", "code_accuracy",
    "swapped_<encoder>_<unit>_accuracy" and "swapped_<encoder>_kinds", the task's own scores by their names, and
    "<generator>_losses" by level of noise.

    Args:
      plain: the evaluation of the samples as they are, as `score` gives it.
      swapped: evaluations by the encoder whose media were exchanged, {"vision": score(…)}; {} for none.
    """
    row: dict[str, Any] = {"exact_match": plain.exact_match}
    if plain.loss is not None:
        row |= {"loss": plain.loss, "perplexity": plain.perplexity}
    variants = {f"swapped_{encoder}_": evaluation for encoder, evaluation in swapped.items()}
    for prefix, evaluation in {"": plain, **variants}.items():
        row[f"{prefix}{plain.unit}_accuracy"] = evaluation.character_accuracy
        if len(evaluation.kinds) > 1:
            row[f"{prefix}kinds"] = dict(evaluation.kinds)
    optional = {"drawing_accuracy": plain.drawing_accuracy, "code_accuracy": plain.code_accuracy}
    row |= {name: value for name, value in optional.items() if value is not None} | dict(plain.scores)
    return row | {f"{name}{_LEVEL_LOSSES}": dict(losses) for name, losses in plain.level_losses.items()}


def describe(plain: Evaluation, swapped: Mapping[str, Evaluation]) -> str:
    """An evaluation in one line, "exact match 12.3%, characters right 45.6%, …".

    Args:
      plain: the evaluation of the samples as they are, as `score` gives it.
      swapped: evaluations by the encoder whose media were exchanged, {"vision": score(…)}; {} for none.
    """
    right = f"{plain.unit}s right"
    parts = [f"exact match {show('exact_match', plain.exact_match)}"]
    if len(plain.kinds) > 1:
        parts[0] += f" ({show('kinds', plain.kinds)})"
    parts.append(f"{right} {show(right, plain.character_accuracy)}")
    if plain.drawing_accuracy is not None:
        parts.append(f"{plain.unit}s recognised in drawings {show('', plain.drawing_accuracy)}")
    if plain.code_accuracy is not None:
        parts.append(f"codes right {show('', plain.code_accuracy)}")
    parts += [f"{name.replace('_', ' ')} {show(name, value)}" for name, value in plain.scores.items()]
    if plain.loss is not None:
        parts += [f"{name} {show(name, getattr(plain, name))}" for name in ("loss", "perplexity")]
    for name, losses in plain.level_losses.items():
        parts.append(f"{name}'s loss by noise {show(name + _LEVEL_LOSSES, losses)}")
    for name, evaluation in swapped.items():
        kinds = f" ({show('kinds', evaluation.kinds)})" if len(evaluation.kinds) > 1 else ""
        parts.append(f"with {name}'s media exchanged {right} {show(right, evaluation.character_accuracy)}{kinds}")
    return ", ".join(parts)


def show(name: str, value: Any) -> str:
    """A figure of `eval.jsonl` for people: a share as "12.3%", "loss" as "1.234", shares by kind as "read 90.0%, …".

    `show("exact_match", 0.123)` is "12.3%". The name matters only for "loss", "perplexity" and losses by level of
    noise; all others are shares in [0, 1], or dicts of them by kind, {"read": 0.9}.
    """
    if name.endswith(_LEVEL_LOSSES):
        return ", ".join(f"{level} {show('loss', loss)}" for level, loss in value.items())
    if isinstance(value, Mapping):
        return ", ".join(f"{kind} {show(kind, share)}" for kind, share in value.items())
    return f"{value:.4g}" if name in ("loss", "perplexity") else f"{value:.1%}"
