"""Evaluation by free-running greedy decoding: what the model reads, and what it reads when images are exchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.assembly import Assembly, signed
from mmjax.data.sample import prompt_only
from mmjax.data.types import Sample
from mmjax.pipeline.predict import Predictor
from mmjax.pipeline.stage_state import State


@dataclass(frozen=True)
class Evaluation:
    """What came out.

    Attributes:
      answers: what the model said, by sample.
      exact_match: share of samples whose answer is right to the letter.
      digit_accuracy: share of the right answers' characters that the model gave at their place.
    """

    answers: tuple[str, ...]
    exact_match: float
    digit_accuracy: float


def score(samples: Sequence[Sample], answers: Sequence[str]) -> Evaluation:
    """Compares answers with the samples'; a missing or superfluous character shifts nothing."""
    right = sum(a == s.answer for s, a in zip(samples, answers, strict=True))
    total = sum(len(s.answer) for s in samples)
    found = sum(x == y for s, a in zip(samples, answers, strict=True) for x, y in zip(s.answer, a, strict=False))
    return Evaluation(tuple(answers), right / max(1, len(samples)), found / max(1, total))


class Evaluator:
    """Decodes samples with the parameters of a run, on the run's devices."""

    def __init__(self, assembly: Assembly):
        """Traces the forward programs for the run's microbatch shapes."""
        self.assembly, packer = assembly, assembly.packer
        self.rows = next(iter(assembly.shapes.values()))["llm"]["tokens"].shape[0]
        self.predictor = Predictor(assembly.placed, assembly.shapes, packer.microbatches)

    def answers(self, states: Mapping[str, State], samples: Sequence[Sample]) -> list[str]:
        """The model's answer to each sample's last question."""
        packer, result = self.assembly.packer, []
        self.predictor.load(states)
        per_call = self.rows * packer.microbatches
        for first in range(0, len(samples), per_call):
            result += self._call(samples[first : first + per_call])
        self.predictor.unload()
        return result

    def evaluate(self, states: Mapping[str, State], samples: Sequence[Sample]) -> Evaluation:
        """Answers and their scores."""
        return score(samples, self.answers(states, samples))

    def _call(self, samples: Sequence[Sample]) -> list[str]:
        tokenizer, packer = self.assembly.tokenizer, self.assembly.packer
        prompts = [prompt_only(sample) for sample in samples]
        limit = 1 + max(len(tokenizer.encode(sample.answer)) for sample in samples)
        batch, starts = [], []
        for index in range(packer.microbatches):
            part = prompts[index * self.rows : (index + 1) * self.rows]
            batch.append(signed(packer.microbatch(part, self.rows)))
            lengths = [len(prompt.tokens) for prompt in part]
            starts.append(np.asarray(lengths + [0] * (self.rows - len(part))))
        generated = self.predictor.generate(batch, starts, limit, tokenizer.eos)
        flat = [row for rows in generated for row in rows]
        # Rows fill microbatches in order, so the first len(samples) rows are the samples'.
        return [tokenizer.decode(tokens) for tokens in flat[: len(samples)]]
