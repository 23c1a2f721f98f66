"""Chat templates: the text around the turns of a dialogue.

In every piece `{text}` stands for the turn's text, and `{bos}` and `{eos}` for the tokenizer's first and last token. In
a question, `{system}` marks the place of the system prompt. Text from the data is never searched for these marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mmjax.configurable import ConfigError, suggest
from mmjax.data.turns import ASSISTANT, USER, Turn
from mmjax.data.turns import SYSTEM as SYSTEM_ROLE

TEXT, BOS, EOS, SYSTEM = "{text}", "{bos}", "{eos}", "{system}"
PIECES = ("system", "question", "answer")


@dataclass(frozen=True, kw_only=True)
class Template:
    """The text around the turns of a dialogue.

    A dialogue without `{bos}` at its start gets one; a dialogue whose last answer has no end token gets one, which is
    learned.

    Attributes:
      system: around the system prompt; left out where there is none. It comes first, or in the first question at
        `{system}`.
      question: around each question.
      answer: around each answer. Text after `{text}` is learned with the answer; text before it is part of the prompt.
      strip: whether to remove blanks around questions and answers.
    """

    system: str = "{text} "
    question: str = "{text} "
    answer: str = "{text}{eos}"
    strip: bool = False

    def changed(self, field: str, pieces: Mapping[str, str]) -> Template:
        """A copy of this template with other `pieces`, by name: "system", "question" or "answer".

        Raises ConfigError for another name, or for marks that a piece cannot have; the message names the setting
        `field`, such as "Source.pieces".
        """
        for name, text in pieces.items():
            if name not in PIECES:
                raise ConfigError(f"{field}={dict(pieces)!r}: a template has no {name!r}; {suggest(name, PIECES)}")
            if text.count(TEXT) != 1:
                raise ConfigError(f"{field}[{name!r}]={text!r}: must have {TEXT} once, such as 'USER: {TEXT} '")
            if text.count(SYSTEM) > (name == "question"):
                raise ConfigError(f"{field}[{name!r}]={text!r}: only a question may have {SYSTEM}, and once")
        return replace(self, **pieces)

    def formatted(self, text: str) -> str:
        """A turn's text as the template writes it: without blanks around it if `strip` is set."""
        return text.strip() if self.strip else text

    @property
    def ending(self) -> str:
        """The text of `answer` after `{text}`, up to the end token; it is learned with the answer."""
        return self.answer.split(TEXT)[1].split(EOS)[0]


def require_writable(template: Template, turns: Sequence[Turn], tools: Sequence[Any] = ()) -> None:
    """Raises ValueError unless the pieces of `template` can write all turns. There is at least one turn.

    They cannot write tools, roles other than "user", "assistant" and "system", or the keys "tool_calls",
    "function_call", "reasoning_content", "reasoning" and "thinking" of a turn. A template whose `question` has
    "{system}" takes questions and answers in turn, a question first.

    Args:
      template: one of `TEMPLATES`, such as TEMPLATES["vicuna"], or another `Template`.
      turns: the dialogue, such as (Turn(role="user", text="hello"), Turn(role="assistant", text="hi")).
      tools: descriptions of tools; with any, the error is raised.
    """
    fix = "which the template of a folder alone can write (Source.template='folder')"
    if tools:
        raise ValueError(f"it has tools, {fix}")
    for number, turn in enumerate(turns, 1):
        if turn.role not in (USER, ASSISTANT, SYSTEM_ROLE):
            raise ValueError(f"turn {number} is from {turn.role!r}, {fix}")
        if turn.meaningful:
            raise ValueError(f"turn {number} has {turn.meaningful[0]}, {fix}")
        if turn.role == SYSTEM_ROLE and not template.system.replace(TEXT, "").strip():
            raise ValueError(f"turn {number} is from 'system', and the template has no mark for it but at the start")
    if SYSTEM in template.question:
        roles = [turn.role for turn in turns]
        alternate = all(role != following for role, following in pairwise(roles))
        if roles[0] != USER or SYSTEM_ROLE in roles or not alternate:
            raise ValueError("the template takes questions and answers in turn, from a question on")


TEMPLATES = {
    "plain": Template(),
    # Vicuna's, as LLaVA 1.5 uses it.
    "vicuna": Template(question="USER: {text} ", answer="ASSISTANT: {text}{eos}"),
    # Llama 2's.
    "llama2": Template(
        system="<<SYS>>\n{text}\n<</SYS>>\n\n",
        question="{bos}[INST] {system}{text} [/INST]",
        answer=" {text} {eos}",
        strip=True,
    ),
    "chatml": Template(
        system="<|im_start|>system\n{text}<|im_end|>\n",
        question="<|im_start|>user\n{text}<|im_end|>\n",
        answer="<|im_start|>assistant\n{text}<|im_end|>\n",
    ),
}
