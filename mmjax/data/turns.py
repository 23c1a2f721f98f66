"""The turns of a dialogue, and the marks in their texts that stand for media."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
LITERAL = "\ufdd5"
"""A character inside marks that are mere text. Unicode reserves it: no text has it."""
MEANINGFUL = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys that are part of an answer: a template that does not write them would teach another answer."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of a dialogue.

    Attributes:
      role: "user", "assistant", "system", or another role that a folder's template takes, such as "tool".
      text: its text; `<image>` and `<recording>` in it mark the places of media.
      weight: the loss weight of an answer; 0 for an answer that is only context.
      keys: the other keys of the message, such as `tool_calls`, which a folder's template receives unchanged.
    """

    role: str
    text: str
    weight: float = 1.0
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_answer(self) -> bool:
        """Whether it is an answer of the model."""
        return self.role == ASSISTANT

    @property
    def learned(self) -> float:
        """The loss weight of its tokens: `weight` of an answer, else 0."""
        return self.weight if self.is_answer else 0.0

    @property
    def meaningful(self) -> tuple[str, ...]:
        """The names in `MEANINGFUL` for which `keys` has a value other than an empty one."""
        return tuple(key for key in MEANINGFUL if self.keys.get(key))


Turns = Sequence[Turn | tuple[str, str]]
"""Turns in order; a pair is a question and its answer."""


def as_turns(turns: Iterable[Turn | tuple[str, str]]) -> tuple[Turn, ...]:
    """The same turns, with a `Turn` of the user and one of the assistant in place of each (question, answer) pair."""
    result: list[Turn] = []
    for turn in turns:
        if isinstance(turn, Turn):
            result.append(turn)
        else:
            question, answer = turn
            result += [Turn(role=USER, text=question), Turn(role=ASSISTANT, text=answer)]
    return tuple(result)


def is_prompt(turns: Sequence[Turn]) -> bool:
    """Whether the dialogue, of at least one turn, ends before an answer, which is to be generated."""
    return not turns[-1].is_answer


def last_answer(turns: Sequence[Turn]) -> int:
    """The place in `turns`, from 0, of the last learned answer, or of the last answer if none is learned.

    3 for two questions with their answers, 4 turns. For a prompt, the place that the answer will have: `len(turns)`.
    """
    answers = [number for number, turn in enumerate(turns) if turn.is_answer]
    if is_prompt(turns) or not answers:
        return len(turns)
    return max((number for number in answers if turns[number].weight > 0), default=answers[-1])


def last_question(turns: Sequence[Turn]) -> str:
    """The text of the user's last turn before the last answer; "" without one."""
    before = turns[: last_answer(turns)]
    return next((turn.text for turn in reversed(before) if turn.role == USER), "")


def as_text(text: str, mark: str) -> str:
    """The text with each `mark`, such as "<image>", changed so that it does not stand for a medium.

    A character that Unicode reserves, U+FDD5, is put behind the mark's first character; `without_literals` removes it.
    """
    return text.replace(mark, f"{mark[0]}{LITERAL}{mark[1:]}")


def without_literals(text: str) -> str:
    """The inverse of `as_text`: the text as it was before marks in it were changed; other texts are returned as they
    are.
    """
    return text.replace(LITERAL, "")
