"""The model's answers to samples: evaluation by free-running greedy decoding, with their media and exchanged ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mmjax.checkpoint import Checkpointer
from mmjax.config import Config
from mmjax.configurable import ConfigError
from mmjax.data.loader import Source
from mmjax.data.sample import answer_text, loss_weight, prompt_only, swap_media
from mmjax.data.tasks.registry import SOURCES, Task
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import Sample, SampleMeta
from mmjax.models.config import LLM
from mmjax.pipeline.answers import Said
from mmjax.pipeline.config import Sampling
from mmjax.pipeline.predict import GREEDY, Predictor
from mmjax.pipeline.stage_state import State
from mmjax.run.assembly import open_source
from mmjax.run.model import encoder_specs
from mmjax.run.parts import PlacedRun
from mmjax.run.pictures import Prediction, as_image, draw_predictions
from mmjax.run.rounds import Rounds

Drawings = Mapping[str, tuple[np.ndarray, ...]]
"""Media [h, w, C] drawn for one sample, by generator; values in the range that is learned."""
Meet = Callable[[], None]
"""A function called before each round on the devices; it may raise to end the evaluation."""


@dataclass(frozen=True)
class Evaluation:
    """Answers, drawings and scores of some samples.

    Attributes:
      answers: the model's answer to each sample.
      exact_match: share of samples whose answer is right to the letter.
      character_accuracy: share of the right answers' characters that the model gave in the right place.
      kinds: exact match by kind of question, where the samples have kinds.
      drawings: for each sample, the media that each generator drew, where a drawing was asked for.
      drawing_accuracy: share of the units to be drawn that are recognised in the drawings; `None` without any, or where
        the task does not read drawings.
      loss: weighted cross-entropy of the text per unit of loss weight, under teacher forcing; `None` where it was
        not asked for, or no token has a loss weight.
      unit: what right answers are made of, see `Task`.
    """

    answers: tuple[str, ...]
    exact_match: float
    character_accuracy: float
    kinds: Mapping[str, float] = field(default_factory=dict)
    drawings: tuple[Drawings, ...] = ()
    drawing_accuracy: float | None = None
    loss: float | None = None
    unit: str = "character"

    @property
    def perplexity(self) -> float | None:
        """Perplexity of a token of the text; `None` without a loss."""
        return None if self.loss is None else math.exp(min(self.loss, _MOST))


_MOST = 700.0
"""The largest loss whose exponential is taken: it is still a finite float."""


def score(
    samples: Sequence[Sample],
    answers: Sequence[str],
    drawings: Sequence[Drawings] = (),
    loss: float | None = None,
    task: Task = SOURCES,
) -> Evaluation:
    """Scores answers against the right ones, character by character, and drawings by the task's reader.

    Args:
      samples: the samples.
      answers: the model's answer to each sample.
      drawings: the drawings for each sample, or none at all.
      loss: see `Evaluation`.
      task: what the samples are of.
    """
    right = [a == s.answer for s, a in zip(samples, answers, strict=True)]
    total = sum(len(s.answer) for s in samples)
    found = sum(x == y for s, a in zip(samples, answers, strict=True) for x, y in zip(s.answer, a, strict=False))
    by_kind: dict[str, list[bool]] = {}
    for sample, ok in zip(samples, right, strict=True):
        if sample.kind:
            by_kind.setdefault(sample.kind, []).append(ok)
    return Evaluation(
        answers=tuple(answers),
        exact_match=sum(right) / max(1, len(samples)),
        character_accuracy=found / max(1, total),
        kinds={kind: sum(own) / len(own) for kind, own in sorted(by_kind.items())},
        drawings=tuple(drawings),
        drawing_accuracy=_recognised(samples, drawings, task),
        loss=loss,
        unit=task.unit,
    )


def _recognised(samples: Sequence[Sample], drawings: Sequence[Drawings], task: Task) -> float | None:
    if (read := task.read_drawing()) is None:
        return None
    pairs = [
        (label, read(drawing, len(label)))
        for sample, drawn in zip(samples, drawings, strict=bool(drawings))
        for name, own in drawn.items()
        for label, drawing in zip(sample.labels.get(name, ()), own, strict=False)
    ]
    total = sum(len(label) for label, _ in pairs)
    return sum(a == b for pair in pairs for a, b in zip(*pair, strict=True)) / total if total else None


def figures(plain: Evaluation, swapped: Mapping[str, Evaluation]) -> dict[str, Any]:
    """The columns of `eval.jsonl` for an evaluation; `swapped` is by the encoder whose media were exchanged."""
    row: dict[str, Any] = {"exact_match": plain.exact_match}
    if plain.loss is not None:
        row |= {"loss": plain.loss, "perplexity": plain.perplexity}
    for prefix, found in (("", plain), *((f"swapped_{encoder}_", found) for encoder, found in swapped.items())):
        row[f"{prefix}{plain.unit}_accuracy"] = found.character_accuracy
        if len(found.kinds) > 1:
            row[f"{prefix}kinds"] = dict(found.kinds)
    return row | ({} if plain.drawing_accuracy is None else {"drawing_accuracy": plain.drawing_accuracy})


def describe(plain: Evaluation, swapped: Mapping[str, Evaluation]) -> str:
    """An evaluation in one line."""
    right = f"{plain.unit}s right"
    parts = [f"exact match {show('exact_match', plain.exact_match)}"]
    if len(plain.kinds) > 1:
        parts[0] += f" ({show('kinds', plain.kinds)})"
    parts.append(f"{right} {show(right, plain.character_accuracy)}")
    if plain.drawing_accuracy is not None:
        parts.append(f"{plain.unit}s recognised in drawings {show('', plain.drawing_accuracy)}")
    if plain.loss is not None:
        parts += [f"{name} {show(name, getattr(plain, name))}" for name in ("loss", "perplexity")]
    for name, other in swapped.items():
        kinds = f" ({show('kinds', other.kinds)})" if len(other.kinds) > 1 else ""
        parts.append(f"with {name}'s media exchanged {right} {show(right, other.character_accuracy)}{kinds}")
    return ", ".join(parts)


def show(name: str, value: Any) -> str:
    """A figure of `eval.jsonl` for people: a share as "12.3%", a loss as "1.234", shares by kind as "read 90.0%, …"."""
    if isinstance(value, Mapping):
        return ", ".join(f"{kind} {show(kind, own)}" for kind, own in value.items())
    return f"{value:.4g}" if name in ("loss", "perplexity") else f"{value:.1%}"


def held_out(config: Config, count: int) -> list[Sample]:
    """The first `count` evaluation samples, the same in every run of a configuration; fewer where there are fewer.

    Samples that cannot be read are left out, since they have nothing to answer, unless there are no others.
    """
    source, count = _asked(config, count)
    samples = [source.sample(index) for index in range(count)]
    return [sample for sample in samples if sample.loss_weights.any()] or samples


def held_out_metas(config: Config, count: int) -> list[SampleMeta]:
    """Metadata of the first `count` evaluation samples, unreadable ones included; no medium is opened."""
    source, count = _asked(config, count)
    return [source.meta(index) for index in range(count)]


def _asked(config: Config, count: int) -> tuple[Source, int]:
    source = open_source(config, split="test")
    return source, min(count, len(source)) if isinstance(source, Sized) else count


def exchanged(config: Config, tokenizer: Tokenizer, samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """The samples with media exchanged between them, by the encoder whose media these are.

    Empty for fewer than two samples, and for a task that does not ask for it: exchanged media of a folder may not fit
    its bounds.
    """
    if not config.data.origin.exchanges or len(samples) < 2:
        return {}
    specs, names = encoder_specs(config), dict.fromkeys(name for sample in samples for name in sample.media_tokens)
    return {name: swap_media(tokenizer, specs, samples, name) for name in names if not specs[name].drawn}


def draw_answers(
    samples: Sequence[Sample],
    answers: Sequence[str] | None,
    path: str | Path | None = None,
    *,
    title: str = "",
    drawings: Sequence[Drawings] = (),
) -> Figure:
    """Draws samples, their media beside question, answer and prediction; also to `path` where one is given.

    Images have the colours that they had before they were normalised. Where `drawings` are given, the model's drawings
    for a sample come after its media. Without `answers` nothing is judged.
    """
    said = answers if answers is not None else [None] * len(samples)
    items = [
        Prediction(
            images=(*_shown(sample), *(as_image((one + 1) / 2) for own in drawn.values() for one in own)),
            question=sample.question,
            answer=sample.answer,
            predicted=answer,
            ok=answer == sample.answer,
            broken=": ".join(sample.broken[1:3]),
        )
        for sample, answer, drawn in zip(samples, said, drawings or [{}] * len(samples), strict=True)
    ]
    return draw_predictions(items, path, title=title)


def _shown(sample: Sample) -> list[np.ndarray | None]:
    """The media that the model sees or hears, as images; `None` for a blank one, which could not be read.

    Media that are to be drawn are left out.
    """
    media = [medium for name, own in sample.media.items() if name not in sample.noise for medium in own]
    blank = [bool(sample.broken) and not medium.any() for medium in media]
    return [None if no else as_image(own, *sample.normalised) for own, no in zip(media, blank, strict=True)]


def as_evaluated(config: Config) -> Config:
    """The configuration without reordering, which only changes how long a training step takes."""
    return replace(config, data=replace(config.data, reorder="none"))


def require_checkpoint(run_dir: str | Path) -> None:
    """Raises `ConfigError` where `run_dir` has no checkpoint, before any device is touched."""
    if not any((Path(run_dir) / "checkpoints").glob("[0-9]*")):
        raise ConfigError(
            f"--run_dir={str(run_dir)!r} has no checkpoint yet: train with --gin_file={Path(run_dir) / 'config.gin'}"
        )


def load_parameters(parts: PlacedRun, run_dir: str | Path) -> tuple[int, Mapping[str, State]]:
    """The step of the newest readable checkpoint of `run_dir`, and its parameters by stage, on the stage's devices.

    Raises:
      ConfigError: there is none.
      CheckpointError: it is of another model.
    """
    stages = parts.placed.stages.values()
    avals = {name: aval for stage in stages for name, aval in stage.state.logical_avals().items()}
    targets = {name: aval for name, aval in avals.items() if name.startswith("params/")}
    restored = Checkpointer(Path(run_dir) / "checkpoints").restore_latest(targets, prefix="params/")
    if restored is None:
        raise ConfigError(f"--run_dir={str(run_dir)!r} has no checkpoint yet: train with its config.gin")
    local = parts.placed.local_stages
    return restored.step, {n: stage.state.parameters_from_logical(restored.leaves) for n, stage in local.items()}


class Evaluator:
    """Decodes samples with the parameters of a run, on the run's devices."""

    def __init__(self, parts: PlacedRun, task: Task = SOURCES, room: int = 0):
        """Traces the forward programs for the run's microbatch shapes.

        Args:
          parts: the run.
          task: what its samples are of.
          room: see `Predictor`.

        Raises:
          ConfigError: the LLM's mask shows tokens later ones, so it writes no text.
        """
        self.parts, self.task, packer = parts, task, parts.packer
        # Each prompt needs a row of its own with room for the answer: the widest bucket.
        shapes = {s: i for s, i in parts.shapes.items() if not packer.text or dict(s)[LLM] == packer.widest}
        self.rounds = Rounds(packer, parts.samples)
        self.predictor = Predictor(parts.placed, shapes, packer.microbatches, room)
        self.predictor.require_no_later()

    def answers(
        self,
        states: Mapping[str, State],
        samples: Sequence[Sample],
        report: Callable[[int], None] = lambda done: None,
        meet: Meet = lambda: None,
    ) -> list[str]:
        """The model's answer to each sample's last question.

        Args:
          states: parameters by stage.
          samples: the samples.
          report: called after each round with the number of samples answered so far.
          meet: called before each round on the devices; may raise.
        """
        # As many tokens as the longest right answer with its end token has, over all samples: so no answer depends on
        # which samples share its round.
        limit = max((int(np.count_nonzero(one.loss_weights[one.prompt :])) for one in samples), default=1)
        said = self.write(states, samples, limit=limit, report=report, meet=meet)
        return [answer_text(self.parts.tokenizer, one, own.tokens) for one, own in zip(samples, said, strict=True)]

    def write(
        self,
        states: Mapping[str, State],
        samples: Sequence[Sample],
        *,
        limit: int,
        sampling: Sampling = GREEDY,
        report: Callable[[int], None] = lambda done: None,
        meet: Meet = lambda: None,
        heard: Callable[[int, Sequence[Said]], None] = lambda first, said: None,
    ) -> list[Said]:
        """The tokens with which the model continues each sample's prompt, up to an end token.

        Args:
          states: parameters by stage.
          samples: the samples.
          limit: the most tokens of an answer.
          sampling: how tokens are chosen.
          report: see `answers`.
          meet: see `answers`.
          heard: called after each token of a round with the number of its first sample and the answers so far.
        """
        stops, result = stop_tokens(self.parts.tokenizer, samples), list[Said]()
        with self._lent(states, meet):
            for asked, own in self.rounds([prompt_only(sample) for sample in samples]):
                meet()
                first, places = len(result), own.places
                tell = lambda said, first=first, places=places: heard(first, [said[m][row] for m, row in places])  # noqa: E731
                said = self.predictor.generate(own.batch, own.starts, limit, stops, sampling, tell)
                result += [said[m][row] for m, row in places]
                assert len(result) == first + len(asked)
                report(len(result))
        return result

    def evaluate(
        self, states: Mapping[str, State], samples: Sequence[Sample], meet: Meet = lambda: None, loss: bool = False
    ) -> Evaluation:
        """Answers, drawings and scores, and the loss where `loss` is set; other arguments as for `answers`."""
        answers = self.answers(states, samples, meet=meet)
        drawings = self.drawings(states, samples, meet)
        return score(samples, answers, drawings, self.loss(states, samples, meet) if loss else None, self.task)

    def loss(self, states: Mapping[str, State], samples: Sequence[Sample], meet: Meet = lambda: None) -> float | None:
        """The loss of the text under teacher forcing, see `Evaluation`; `None` without any loss weight."""
        total, weight = 0.0, sum(loss_weight(sample.loss_weights) for sample in samples)
        if not weight:
            return None
        with self._lent(states, meet):
            for _, own in self.rounds(samples):
                meet()
                total += sum(float(rows.sum(dtype=np.float64)) for rows in self.predictor.losses(own.batch))
        return total / weight

    def drawings(
        self, states: Mapping[str, State], samples: Sequence[Sample], meet: Meet = lambda: None
    ) -> list[Drawings]:
        """Media that the generators draw, for each sample; empty for one without noise to start from."""
        result: list[Drawings] = [{} for _ in samples]
        asked = [index for index, sample in enumerate(samples) if sample.noise]
        if not asked:
            return result
        packer, left = self.parts.packer, iter(asked)
        with self._lent(states, meet):
            for own, packed in self.rounds([prompt_only(_from_noise(samples[index])) for index in asked]):
                meet()
                drawn: list[dict[str, tuple[np.ndarray, ...]]] = [{} for _ in own]
                for name, patches in self.predictor.draw(packed.batch).items():
                    first = 0
                    for plan, rows in zip(packed.plans, patches, strict=True):
                        for sample, media in packer.media(name, plan, rows).items():
                            drawn[first + sample][name] = media
                        first += len(plan.metas)
                for one in drawn:
                    result[next(left)] = one
        return result

    @contextmanager
    def _lent(self, states: Mapping[str, State], meet: Meet) -> Iterator[None]:
        """A context in which the predictor holds the parameters of `states`."""
        meet()
        try:
            self.predictor.load(states)
            yield
        finally:
            self.predictor.unload()


def room_for(metas: Sequence[SampleMeta], most: int) -> int:
    """Tokens that a row needs for the prompt of each sample and the longest right answer of all; `most` at most."""
    longest = max((meta.tokens for meta in metas), default=most)
    answer = max((meta.learned or math.ceil(meta.weight) for meta in metas), default=0)
    return min(most, longest + answer)


def stop_tokens(tokenizer: Tokenizer, samples: Sequence[Sample]) -> frozenset[int]:
    """The tokens that end an answer: the tokenizer's, and the one that the template puts behind every answer."""
    tails = {sample.tail.strip() for sample in samples}
    ending = tokenizer.token(tails.pop()) if len(tails) == 1 and all(tails) else None
    return frozenset((*tokenizer.stops, *(() if ending is None else (ending,))))


def _from_noise(sample: Sample) -> Sample:
    """The sample with pure noise (time 1) in place of the media to be drawn."""
    return replace(sample, times={name: (1.0,) * len(own) for name, own in sample.times.items()})
