"""Chat templates: the text around the turns of a dialogue.

In every piece `{text}` stands for what is said and `{eos}` for the tokenizer's end token. Text from the data is never
searched for either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from mmjax.configurable import ConfigError, suggest

TEXT, EOS = "{text}", "{eos}"


@dataclass(frozen=True, kw_only=True)
class Template:
    """What goes around the turns of a dialogue.

    system: the system prompt, left out where there is none. question, answer: a turn's. What follows `{text}` in
    `answer` is learned with it; what precedes it is part of the prompt. A dialogue that does not end in
    `{eos}` gets one, learned.
    """

    system: str = "{text} "
    question: str = "{text} "
    answer: str = "{text}{eos}"

    def changed(self, field: str, pieces: Mapping[str, str]) -> Template:
        """This template with other `pieces`; `field` is the setting they are from. Raises ConfigError."""
        names = [piece.name for piece in fields(self)]
        for name, text in pieces.items():
            if name not in names:
                raise ConfigError(f"{field}={dict(pieces)!r}: a template has no {name!r}; {suggest(name, names)}")
            if text.count(TEXT) != 1:
                raise ConfigError(f"{field}[{name!r}]={text!r}: must have {TEXT} once, such as 'USER: {TEXT} '")
        return replace(self, **pieces)


TEMPLATES = {
    "plain": Template(),
    # Vicuna's, as LLaVA 1.5 uses it.
    "vicuna": Template(question="USER: {text} ", answer="ASSISTANT: {text}{eos}"),
    # Llama 2's.
    "llama2": Template(
        system="<<SYS>>\n{text}\n<</SYS>>\n\n", question="[INST] {text} [/INST] ", answer="{text} {eos}"
    ),
    "chatml": Template(
        system="<|im_start|>system\n{text}<|im_end|>\n",
        question="<|im_start|>user\n{text}<|im_end|>\n",
        answer="<|im_start|>assistant\n{text}<|im_end|>\n",
    ),
}
