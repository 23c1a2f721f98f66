"""The model's answers to samples: evaluation by free-running greedy decoding, with their media and exchanged ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from mmjax.assembly.latents import Drawings
from mmjax.assembly.packers import bucket_shapes
from mmjax.assembly.parts import PlacedRun
from mmjax.checkpoint import Checkpointer
from mmjax.configurable import ConfigError
from mmjax.data.log_mel import LogMel
from mmjax.data.sample import answer_text, drawing_prompt, is_wordless, loss_weight, prompt_only
from mmjax.data.tasks.records import Sources
from mmjax.data.tasks.task import Task
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import EncoderSpec, Sample, SampleMeta
from mmjax.eval.rounds import Rounds
from mmjax.eval.scores import Evaluation, score
from mmjax.models.config import LLM
from mmjax.models.diffusion import Diffusion
from mmjax.pipeline.answers import Answer
from mmjax.pipeline.config import Sampling
from mmjax.pipeline.predict import GREEDY, Predictor
from mmjax.pipeline.stage_state import State
from mmjax.pipeline.state_shapes import group_of_leaf

_RECORDS = Sources()
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Levels of noise at which an evaluation has losses of generators."""
Meet = Callable[[], None]
"""A function called before each round on the devices; it may raise to end the evaluation."""


def require_checkpoint(run_dir: str | Path) -> None:
    """Raises `ConfigError` where `run_dir` has no checkpoint, before any device is used."""
    if not any((Path(run_dir) / "checkpoints").glob("[0-9]*")):
        raise ConfigError(
            f"--run_dir={str(run_dir)!r} has no checkpoint yet: train with --gin_file={Path(run_dir) / 'config.gin'}"
        )


def load_parameters(parts: PlacedRun, run_dir: str | Path) -> tuple[int, Mapping[str, State]]:
    """The step of the newest readable checkpoint of `run_dir`, and its parameters on the devices of `parts`.

    They are the states of this process's stages, by name such as "llm.0", without moments; of modules with
    `Optimizer.ema` they are the running means. All processes call it.

    parts: a model on its devices, as `place(recipe)` gives it for the run's recipe, under any layout.

    Raises:
      ConfigError: there is no checkpoint.
      CheckpointError: the checkpoint is of another model.
    """
    stages = parts.placed.stages.values()
    targets = {name: aval for stage in stages for name, aval in stage.state.prediction_avals().items()}
    restored = Checkpointer(Path(run_dir) / "checkpoints").restore_latest(targets, group=group_of_leaf)
    if restored is None:
        raise ConfigError(f"--run_dir={str(run_dir)!r} has no checkpoint yet: train with its config.gin")
    local = parts.placed.local_stages
    return restored.step, {n: stage.state.parameters_from_logical(restored.leaves) for n, stage in local.items()}


class Evaluator:
    """Decodes samples with the parameters of a run, on the run's devices."""

    def __init__(self, parts: PlacedRun, task: Task = _RECORDS, room: int = 0):
        """Traces the forward programs for the run's microbatch shapes.

        Args:
          parts: the run.
          task: the task that the samples are from; `recipe.data.origin` for those of a recipe.
          room: tokens of a row, for prompt and answer; 0 for those of the widest row of prompts. See `room_for`.

        Raises:
          ConfigError: under the LLM's mask a token attends to later ones, so no text can be generated.
        """
        self.parts, self.task, packer = parts, task, parts.packer
        # Each prompt needs a row of its own with room for the answer: the widest bucket.
        runs = parts.runs.one_by_one
        shapes = runs.shapes(bucket_shapes(packer, parts.samples)) if packer.together else parts.shapes
        shapes = {s: i for s, i in shapes.items() if not packer.text or dict(s)[LLM] == packer.widest}
        self.rounds = Rounds(packer, parts.samples, runs)
        self.predictor = Predictor(parts.placed, shapes, packer.microbatches, room)
        self.predictor.require_no_later()

    def answers(
        self,
        states: Mapping[str, State],
        samples: Sequence[Sample],
        report: Callable[[int], None] = lambda done: None,
        meet: Meet = lambda: None,
    ) -> list[str]:
        """The text of the model's answer to each sample's last question, by greedy decoding; all processes call it.

        It is "" for a sample whose right answer is a picture alone.

        Args:
          states: the states of this process's stages by name, such as "llm.0"; only parameters are read.
          samples: the samples; right answers follow their prompts, and limit how long an answer is.
          report: called after each round with the number of samples answered so far.
          meet: called before each round on the devices; may raise.
        """
        # The length of the longest right answer of all samples, with its end token. So no answer depends on the samples
        # that share its round.
        in_words = [sample for sample in samples if not is_wordless(sample)]
        lengths = (int(np.count_nonzero(sample.loss_weights[sample.prompt :])) for sample in in_words)
        replies = iter(self.write(states, in_words, limit=max(lengths, default=1), report=report, meet=meet))
        return [
            "" if is_wordless(sample) else answer_text(self.parts.tokenizer, sample, next(replies).tokens)
            for sample in samples
        ]

    def write(
        self,
        states: Mapping[str, State],
        samples: Sequence[Sample],
        *,
        limit: int,
        sampling: Sampling = GREEDY,
        report: Callable[[int], None] = lambda done: None,
        meet: Meet = lambda: None,
        on_token: Callable[[int, Sequence[Answer]], None] = lambda first, replies: None,
    ) -> list[Answer]:
        """The tokens with which the model continues each sample's prompt, up to an end token, which is left out.

        Args:
          states: see `answers`.
          samples: the samples; tokens behind their prompts are not read.
          limit: the most tokens of an answer.
          sampling: how tokens are chosen.
          report: see `answers`.
          meet: see `answers`.
          on_token: called after each token of a round with the number of its first sample, from 0, and the answers so
            far to the samples of the round, in their order.
        """
        stops, result = stop_tokens(self.parts.tokenizer, samples), list[Answer]()
        with self._loaded(states, meet):
            for prompts, packed in self.rounds([prompt_only(sample) for sample in samples]):
                meet()
                first, in_order = len(result), partial(_by_sample, packed.places)
                replies = self.predictor.generate(
                    packed.batch,
                    packed.starts,
                    limit,
                    stops,
                    sampling,
                    lambda replies, first=first, in_order=in_order: on_token(first, in_order(replies)),
                )
                result += in_order(replies)
                assert len(result) == first + len(prompts)
                report(len(result))
        return result

    def evaluate(
        self, states: Mapping[str, State], samples: Sequence[Sample], meet: Meet = lambda: None, *, loss: bool = False
    ) -> Evaluation:
        """The evaluation of `samples`: answers, drawings and scores, and the loss where `loss` is set.

        See `answers` for the other arguments.
        """
        answers = self.answers(states, samples, meet=meet)
        drawings = self.drawings(states, samples, meet)
        text_loss = self.loss(states, samples, meet) if loss else None
        levels = self.level_losses(states, samples, meet) if loss else {}
        codes = self.code_accuracy(states, samples, meet)
        return score(
            samples,
            answers,
            drawings,
            text_loss,
            self.task,
            code_accuracy=codes,
            level_losses=levels,
            log_mels=self.log_mels,
        )

    @property
    def log_mels(self) -> dict[str, LogMel]:
        """How recordings become frames, by generator of recordings."""
        specs = self.parts.packer.encoders.items()
        return {name: spec.log_mel for name, spec in specs if spec.sounds and spec.log_mel}

    def code_accuracy(
        self, states: Mapping[str, State], samples: Sequence[Sample], meet: Meet = lambda: None
    ) -> float | None:
        """The share of codes that generators predict rightly from the right ones before; `None` without any codes.

        For `states` and `meet` see `answers`.
        """
        talkers = self.predictor.talkers
        spoken = [sample for sample in samples if any(len(sample.media.get(name, ())) for name in talkers)]
        count = sum(codes.size for sample in spoken for name in talkers for codes in sample.media.get(name, ()))
        if not count:
            return None
        right = 0.0
        with self._loaded(states, meet):
            for _, packed in self.rounds(spoken):
                meet()
                by_name = self.predictor.codes_right(packed.batch)
                right += sum(float(rows.sum(dtype=np.float64)) for of_one in by_name.values() for rows in of_one)
        return right / count

    def loss(self, states: Mapping[str, State], samples: Sequence[Sample], meet: Meet = lambda: None) -> float | None:
        """The loss of the text under teacher forcing, see `Evaluation`; `None` without any loss weight.

        For `states` and `meet` see `answers`.
        """
        total, weight = 0.0, sum(loss_weight(sample.loss_weights) for sample in samples)
        if not weight:
            return None
        with self._loaded(states, meet):
            for _, packed in self.rounds(samples):
                meet()
                total += sum(float(rows.sum(dtype=np.float64)) for rows in self.predictor.losses(packed.batch))
        return total / weight

    def level_losses(
        self, states: Mapping[str, State], samples: Sequence[Sample], meet: Meet = lambda: None
    ) -> dict[str, dict[str, float]]:
        """The mean squared error of predictions by generator and level of noise; {} without media to be made.

        A generator has it whose settings are ``Diffusion``, so that it predicts the targets of its noise process.

        Levels are the middles of five equal parts of a process's times, by their share of the last time, such as "0.1".
        Noise is the samples' own, and none is without its condition. For `states` and `meet` see `answers`.
        """
        noisy, encoders = [sample for sample in samples if sample.noise], self.parts.packer.encoders
        generators = self.parts.placed.model.generators
        names = [name for name in self.predictor.painters if isinstance(generators[name].config, Diffusion)]
        if not (noisy and names):
            return {}
        errors, counts = dict[str, np.ndarray](), dict[str, int]()
        with self._loaded(states, meet):
            for packed in zip(*(self.rounds(_at_level(noisy, level, encoders)) for level in LEVELS), strict=True):
                meet()
                batches = [of_level.batch for _, of_level in packed]
                for number, predicted in enumerate(self.predictor.predictions(names, batches)):
                    for name, predictions in predicted.items():
                        sums = errors.setdefault(name, np.zeros(len(LEVELS)))
                        for prediction, (_, inputs) in zip(predictions, batches[number], strict=True):
                            off = _errors(prediction, inputs[name]["targets"], inputs[name]["weights"])
                            sums[number] += np.square(off, dtype=np.float64).sum()
                            counts[name] = counts.get(name, 0) + (off.size if number == 0 else 0)
        return {
            name: {f"{level:g}": float(total) / counts[name] for level, total in zip(LEVELS, sums, strict=True)}
            for name, sums in errors.items()
            if counts[name]
        }

    def drawing_steps(self, samples: Sequence[Sample]) -> int:
        """The number of steps in which `drawings` draws for these samples, of all rounds and generators together."""
        rounds = -(-sum(bool(sample.noise) for sample in samples) // self.rounds.size)
        generators = self.parts.placed.model.generators
        return rounds * sum(getattr(generators[name].config, "steps", 1) for name in self.predictor.painters)

    def drawings(
        self,
        states: Mapping[str, State],
        samples: Sequence[Sample],
        meet: Meet = lambda: None,
        report: Callable[[], None] = lambda: None,
    ) -> list[Drawings]:
        """For each sample, the media [h, w, C] that each generator draws; {} for one without noise to start from.

        For `states` and `meet` see `answers`; `report` is called after each step of drawing.
        """
        result: list[Drawings] = [{} for _ in samples]
        indices = [index for index, sample in enumerate(samples) if sample.noise]
        if not indices:
            return result
        packer, remaining = self.parts.packer, iter(indices)
        with self._loaded(states, meet):
            noisy = [drawing_prompt(_from_noise(samples[index], packer.encoders)) for index in indices]
            for prompts, packed in self.rounds(noisy):
                meet()
                drawn: list[dict[str, tuple[np.ndarray, ...]]] = [{} for _ in prompts]
                for name, patches in self.predictor.draw(packed.batch, lambda name, done: report()).items():
                    first = 0
                    for plan, rows in zip(packed.plans, patches, strict=True):
                        for sample, media in packer.media(name, plan, rows).items():
                            noise = prompts[first + sample].noise[name]
                            drawn[first + sample][name] = tuple(
                                medium[: len(of_medium)] for medium, of_medium in zip(media, noise, strict=True)
                            )
                        first += len(plan.metas)
                for drawings in drawn:
                    result[next(remaining)] = drawings
        return result

    @contextmanager
    def _loaded(self, states: Mapping[str, State], meet: Meet) -> Iterator[None]:
        """A context in which the predictor holds the parameters of `states`."""
        meet()
        try:
            self.predictor.load(states)
            yield
        finally:
            self.predictor.unload()


def room_for(metas: Sequence[SampleMeta], most: int) -> int:
    """The number of tokens that a row needs for any of these samples' prompts and the longest right answer.

    It is the largest `meta.tokens` plus the largest `meta.learned`, also if they are of two samples; at most `most`.
    With `learned` 0, which is unknown, `meta.weight` stands for it, rounded up.

    Args:
      metas: metadata of the samples, such as those of `held_out_metas(recipe, 100)`; without any the result is `most`.
      most: the most tokens of a row, such as `packer.sequence_length`.
    """
    longest = max((meta.tokens for meta in metas), default=most)
    answer = max((meta.learned or math.ceil(meta.weight) for meta in metas), default=0)
    return min(most, longest + answer)


def stop_tokens(tokenizer: Tokenizer, samples: Sequence[Sample]) -> frozenset[int]:
    """Ids of the tokens that end an answer: the tokenizer's, and the one that the template puts after every answer.

    Args:
      tokenizer: the tokenizer, such as `plan(recipe).tokenizer`.
      samples: samples of one template, as `Source.sample` gives them; without any the tokenizer's ids are the result.
    """
    tails = {sample.tail.strip() for sample in samples}
    ending = tokenizer.token(tails.pop()) if len(tails) == 1 and all(tails) else None
    return frozenset((*tokenizer.stops, *(() if ending is None else (ending,))))


def _errors(prediction: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The errors of numbers that have a weight; weights are [R, T] of patches, or [R, T, P] of their frames."""
    shape = (*weights.shape, -1)
    is_learned = weights > 0
    return prediction.reshape(shape)[is_learned] - targets.reshape(shape)[is_learned]


def _by_sample(places: Sequence[tuple[int, int]], replies: Sequence[Sequence[Answer]]) -> list[Answer]:
    """The replies of a round in the order of its samples; `places` has the microbatch and row of each."""
    return [replies[microbatch][row] for microbatch, row in places]


def _at_level(samples: Sequence[Sample], level: float, encoders: Mapping[str, EncoderSpec]) -> list[Sample]:
    """The samples with all media to be made at one level of noise, each with its condition."""
    processes = {name: spec.process for name, spec in encoders.items()}
    return [
        replace(
            sample,
            times={name: (float(processes[name].time_at(level)),) * len(media) for name, media in sample.times.items()},
            dropped={},
        )
        for sample in samples
    ]


def _from_noise(sample: Sample, encoders: Mapping[str, EncoderSpec]) -> Sample:
    """The sample with pure noise in place of the media to be drawn, each with its condition."""
    times = {name: (encoders[name].process.pure,) * len(media) for name, media in sample.times.items()}
    return replace(sample, times=times, dropped={})
