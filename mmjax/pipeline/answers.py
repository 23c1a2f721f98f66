"""The answers of one round of rows during generation: the rows still open, and the host inputs of their next tokens.

Shapes: B rows, T tokens of a prompt's row, A axes of a position.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from mmjax.models.config import LLM
from mmjax.models.sampling import SamplingParams
from mmjax.pipeline.config import Sampling
from mmjax.pipeline.decode import CHOICE, ORDER
from mmjax.pipeline.place import InputShapes
from mmjax.pipeline.walker import Signature

Batch = Sequence[tuple[Signature, InputShapes]]
"""For each microbatch its buckets, and its host inputs by module, then by name."""


@dataclass
class Answer:
    """An answer so far.

    Attributes:
      tokens: its tokens, without the stop token.
      logprobs: their log-probabilities under the model.
      ended: whether the answer is complete.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False


class Answers:
    """Answers to prompts, one a row.

    Attributes:
      answers: answers by microbatch and row.
    """

    def __init__(
        self,
        batch: Batch,
        starts: Sequence[np.ndarray],
        *,
        limit: int,
        stops: Collection[int],
        sampling: Sampling,
        room: int,
        words: Mapping[str, int] | None = None,
    ):
        """Starts with empty answers.

        Args:
          batch, starts, limit, stops, sampling: see ``Predictor.generate``.
          room: capacity of a row in tokens.
          words: the mask's words of a generated token, by name of the host input.
        """
        self.answers = [[Answer() for _ in start] for start in starts]
        self._batch, self._starts = batch, [np.asarray(start, np.int32) for start in starts]
        self._limit, self._stops, self._sampling, self._room = limit, frozenset(stops), sampling, room
        self._words = words or {}
        self._open = [(start > 0) & (limit > 0) for start in self._starts]
        self._tokens = [np.zeros(len(start), np.int32) for start in self._starts]
        self._count = 0
        self._next_positions = [
            _first_positions(inputs[LLM], start) for (_, inputs), start in zip(batch, starts, strict=True)
        ]

    @property
    def done(self) -> bool:
        """Whether all answers are complete."""
        return not any(is_open.any() for is_open in self._open)

    def add(self, tokens: Sequence[np.ndarray], logprobs: Sequence[np.ndarray]) -> None:
        """Adds the next token of every row, ``[B]`` for each microbatch; complete answers do not change."""
        self._count += 1
        for m, answers in enumerate(self.answers):
            for row in np.flatnonzero(self._open[m]):
                token = int(tokens[m][row])
                is_stop = token in self._stops
                if not is_stop:
                    answers[row].tokens.append(token)
                    answers[row].logprobs.append(float(logprobs[m][row]))
                is_full = self._starts[m][row] + self._count > self._room
                answers[row].ended = is_stop or bool(is_full) or self._count >= self._limit
                self._open[m][row] = not answers[row].ended
            self._tokens[m] = np.asarray(tokens[m], np.int32)

    def first(self) -> list[tuple[Signature, InputShapes]]:
        """The batch of the prompts, whose LLM inputs have ``SamplingParams`` of the tokens after them as ``CHOICE``."""
        return [
            (signature, {**inputs, LLM: {**inputs[LLM], CHOICE: self._choice(np.maximum(start - 1, 0))}})
            for (signature, inputs), start in zip(self._batch, self._starts, strict=True)
        ]

    def following(self) -> list[tuple[Signature, InputShapes]]:
        """The batch of the tokens that were added last: LLM inputs ``[B, 1]``, with ``ORDER`` and ``CHOICE``.

        Rows with complete answers are padding.
        """
        return [(signature, {LLM: self._row_inputs(m)}) for m, (signature, _) in enumerate(self._batch)]

    def _row_inputs(self, m: int) -> dict[str, Any]:
        prompt, start, is_open = self._batch[m][1][LLM], self._starts[m], self._open[m]
        # No other module has tokens at these positions.
        empty = {name: -1 if name.endswith("_index") else self._words.get(name, 0) for name in prompt}
        token_inputs: dict[str, Any] = {
            n: np.full((len(start), 1, *a.shape[2:]), empty[n], a.dtype) for n, a in prompt.items()
        }
        token_inputs["tokens"][:, 0] = np.where(is_open, self._tokens[m], 0)
        token_inputs["segments"][:, 0] = is_open * prompt["segments"][:, 0]
        if "positions" in token_inputs:
            places = self._next_positions[m] + self._count - 1
            token_inputs["positions"][:] = places.reshape(-1, *[1] * (token_inputs["positions"].ndim - 1))
        # A complete row writes to no cache: the position is out of range.
        token_inputs[ORDER] = np.where(is_open, start + self._count - 1, self._room).astype(np.int32)[:, None]
        token_inputs[CHOICE] = self._choice(np.zeros_like(start))
        return token_inputs

    def _choice(self, last: np.ndarray) -> SamplingParams:
        rows, sampling = len(last), self._sampling

        def per_row(value: float, dtype: Any) -> Any:
            return np.full(rows, value, dtype)

        return SamplingParams(
            last=cast(Any, last.astype(np.int32)),
            temperature=per_row(sampling.temperature, np.float32),
            top_p=per_row(sampling.top_p, np.float32),
            seed=per_row(sampling.seed, np.uint32),
            number=per_row(self._count, np.int32),
        )


def _first_positions(inputs: Mapping[str, np.ndarray], starts: np.ndarray) -> np.ndarray:
    """The position of the first token after each prompt: one more than the prompt's largest on any axis."""
    if "positions" not in inputs:
        return np.zeros(len(starts), np.int32)
    positions = np.asarray(inputs["positions"])
    flat = positions.reshape(*positions.shape[:2], -1).max(axis=2)
    inside = np.arange(flat.shape[1]) < np.asarray(starts)[:, None]
    return np.where(inside, flat + 1, 0).max(axis=1).astype(np.int32)
