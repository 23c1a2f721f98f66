"""A folder's chat template: Jinja in a sandbox, which turns a dialogue into text.

The template is code from elsewhere. It sees strings, lists and dicts alone, can change none, and ends at limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.data.processor.files import TOKENIZER, find_chat_template, has_tokenizer, is_processor
from mmjax.data.processor.sandbox import LEARN as _LEARN
from mmjax.data.processor.sandbox import STOP as _STOP
from mmjax.data.processor.sandbox import compiled as _compiled
from mmjax.data.processor.special import AddedToken, read_special_tokens
from mmjax.json_files import read_object

MEDIUM = "\ufdd4"
"""Stands for a medium in the text of a turn. Unicode keeps this character and the next two free: no text has them."""
_PROBE = "probe"

Message = dict[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A dialogue as a template writes it.

    Attributes:
      text: the text. ``FolderTemplate.image`` and ``MEDIUM`` stand for the media, in their order.
      learned: the characters from and to which the model learns.
      answer: the first character of what the model says last; the length of the text where that is not said yet.
      apart: whether a dialogue that ends with the last question is written in another way than the text has it.
      lead: what the model says before the text of its last answer, such as a blank.
      tail: what follows that text, up to the end token.
    """

    text: str
    learned: tuple[Span, ...]
    answer: int
    apart: bool = False
    lead: str = ""
    tail: str = ""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What a template does with messages, found out by trying.

    Attributes:
      parts: the roles whose content is a list of parts; elsewhere it is a string.
      strips: whether blanks around an answer are removed.
    """

    parts: frozenset[str]
    strips: bool


@dataclass(frozen=True, kw_only=True)
class FolderTemplate:
    """The chat template of a folder.

    Attributes:
      place: its file, for messages.
      source: its text.
      tokens: special tokens by the names that it has for them, such as ("bos_token", "<s>").
      image: the text of the folder's image token; "" without one.
      begins: whether a dialogue that does not begin with bos gets one.
    """

    place: str
    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    image: str = ""
    begins: bool = False

    def said(self, text: str) -> str:
        """A turn's text as it goes into the dialogue."""
        return text.strip() if self.habits.strips else text

    @property
    def habits(self) -> Habits:
        """What the template does with a message."""
        return _habits(self)

    def render(self, turns: Sequence[tuple[str, str]], *, asked: str | None = None, system: str = "") -> Rendered:
        """A dialogue as text.

        Args:
          turns: questions and answers, with ``image`` in place of each image, and ``MEDIUM`` in place of each medium
            that the folder has no token for.
          asked: a last question without an answer; the text ends where the answer begins.
          system: the system prompt.

        Raises:
          ValueError: the template refuses the dialogue.
          ConfigError: what it writes for an answer cannot be told apart from the rest.
        """
        messages = self._messages(turns, asked, system)
        if asked is not None:
            text = self._text(messages, prompt=True)
            return Rendered(text=text, learned=(), answer=len(text))
        marked = self._text(messages, keep_marks=True)
        text, spans = _without_marks(marked)
        before = self._text(messages[:-1], prompt=True)
        spans = self._with_ends(spans, text) if spans else self._spans(messages, text)
        apart = not text.startswith(before)
        answer = spans[-1][0] if apart else len(before)
        said = self.said(turns[-1][1])
        at = max(text.find(said, answer), answer)
        lead, tail = text[answer:at], text[at + len(said) :] if text.startswith(said, at) else text[at:]
        tail = tail.split(dict(self.tokens).get("eos_token") or MEDIUM)[0]
        return Rendered(text=text, learned=tuple(spans), answer=answer, apart=apart, lead=lead, tail=tail)

    def _with_ends(self, spans: Sequence[Span], text: str) -> list[Span]:
        """What is marked, with the end token behind it: without it a model would not learn to stop."""
        end = dict(self.tokens).get("eos_token", "")
        found = (re.compile(rf"\s*{re.escape(end)}").match(text, stop) if end else None for _, stop in spans)
        return [(start, own.end() if own else stop) for (start, stop), own in zip(spans, found, strict=True)]

    def _spans(self, messages: Sequence[Message], whole: str) -> list[Span]:
        """What each answer adds to the text before it; ``whole`` is the text of all messages.

        Where the text of the first turns is not what ``whole`` begins with, since a template may write earlier turns
        in another way, it is the answer's own text and the end token.
        """
        spans, apart = list[Span](), list[Span]()
        for number in (at for at, message in enumerate(messages) if message["role"] == "assistant"):
            before = self._text(messages[:number], prompt=True)
            through = whole if number == len(messages) - 1 else self._text(messages[: number + 1])
            if through.startswith(before) and whole.startswith(through):
                spans.append((len(before), len(through)))
            else:
                apart = apart or self._with_ends(self._own_texts(messages, whole), whole)
                spans.append(apart[len(spans)])
        return spans

    def _own_texts(self, messages: Sequence[Message], whole: str) -> list[Span]:
        """Where ``whole`` has the text of each answer. Raises ConfigError where marks around them change it."""
        marked = [
            {**one, "content": _between_marks(one["content"], self.said)} if one["role"] == "assistant" else one
            for one in messages
        ]
        text, spans = _without_marks(self._text(marked, keep_marks=True))
        if text == whole and len(spans) == sum(one["role"] == "assistant" for one in messages):
            return spans
        what = "writes earlier turns in another way when later ones follow, so answers cannot be told apart"
        fix = "put {% generation %} around them in it, or name another Source.template"
        raise ConfigError(f"Source.template='folder': {self.place} {what}; {fix}")

    def _messages(self, turns: Sequence[tuple[str, str]], asked: str | None, system: str) -> list[Message]:
        parts = self.habits.parts
        said = [("system", system)] if system else []
        for question, answer in turns:
            said += [("user", question), ("assistant", answer)]
        said += [("user", asked)] if asked is not None else []
        return [{"role": role, "content": self._content(text, role in parts)} for role, text in said]

    def _content(self, text: str, parts: bool) -> Any:
        text = text.replace(_LEARN, "\N{REPLACEMENT CHARACTER}").replace(_STOP, "\N{REPLACEMENT CHARACTER}")
        if not parts:
            return text
        found: list[dict[str, str]] = []
        for number, piece in enumerate(text.split(self.image) if self.image else [text]):
            found += [{"type": "image"}] if number else []
            found += [{"type": "text", "text": piece}] if piece else []
        return found or [{"type": "text", "text": ""}]

    def _text(self, messages: Sequence[Message], *, prompt: bool = False, keep_marks: bool = False) -> str:
        import jinja2

        try:
            text = _compiled(self.source, self.place).render(
                messages=list(messages), add_generation_prompt=prompt, tools=None, documents=None, **dict(self.tokens)
            )
        except ConfigError:
            raise
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.place} refuses the dialogue: {error}") from None
        except (TypeError, LookupError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{self.place} fails on the dialogue ({type(error).__name__}: {error})") from None
        return text if keep_marks else text.replace(_LEARN, "").replace(_STOP, "")


def read_template(folder: str) -> FolderTemplate:
    """The chat template of a folder with a tokenizer. Raises ConfigError if it has none, or none that can be read."""
    field = "Source.template='folder'"
    if not folder or not Path(folder).is_dir():
        raise ConfigError(
            f"{field}: Data.tokenizer={folder!r} is no folder; name one with a chat template, or a template"
        )
    source, name = find_chat_template(folder)
    if not source or not has_tokenizer(folder):
        lacks = "chat template" if not source else TOKENIZER
        raise ConfigError(
            f"{field}: the folder Data.tokenizer={folder!r} has no {lacks}; name a template, such as 'chatml'"
        )
    special, place = read_special_tokens(folder), str(Path(folder) / name)
    _compiled(source, place)
    image = _token_text(folder, special.image, special.added) if special.image is not None else ""
    tokens = tuple(sorted(special.given.items()))
    return FolderTemplate(place=place, source=source, tokens=tokens, image=image, begins=is_processor(folder))


def _token_text(folder: str, number: int, added: Sequence[AddedToken]) -> str:
    """The text of a token of the folder's, which may also list it as ``added`` beside its tokenizer; "" for none."""
    listed = read_object(Path(folder) / TOKENIZER).get("added_tokens") or ()
    texts = {token.id: token.text for token in added} | {token.get("id"): token["content"] for token in listed}
    return texts.get(number, "")


def _between_marks(content: Any, said: Callable[[str], str]) -> Any:
    """The content of a message with marks around its text, blanks left out that the template leaves out."""
    if isinstance(content, str):
        return f"{_LEARN}{said(content)}{_STOP}"
    return [{**part, "text": _between_marks(part["text"], said)} if "text" in part else part for part in content]


def _without_marks(text: str) -> tuple[str, list[Span]]:
    """The text without the marks around what is generated, and the characters between them."""
    spans, at, begin, kept = [], 0, 0, []
    for piece in re.split(f"([{_LEARN}{_STOP}])", text):
        if piece == _LEARN:
            begin = at
        elif piece == _STOP:
            spans.append((begin, at))
        else:
            kept.append(piece)
            at += len(piece)
    return "".join(kept), spans


@lru_cache(maxsize=16)
def _habits(template: FolderTemplate) -> Habits:
    parts: set[str] = set()

    def message(role: str, text: str, in_parts: bool) -> Message:
        return {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}

    def written(*said: tuple[str, str, bool]) -> str:
        try:
            return template._text([message(*one) for one in said])
        except ConfigError:
            raise
        except ValueError:
            return ""

    def try_parts(role: str, *before: tuple[str, str, bool], after: tuple[tuple[str, str, bool], ...] = ()) -> None:
        as_text, as_parts = (written(*before, (role, _PROBE, own), *after) for own in (False, True))
        # Where both are read, text that has no images is a string, as it is in the data of language models.
        if _PROBE in as_parts and "'type'" not in as_parts and (template.image or _PROBE not in as_text):
            parts.add(role)

    try_parts("user")
    asked = ("user", "x", "user" in parts)
    try_parts("assistant", asked)
    try_parts("system", after=(asked,))
    strips = f" {_PROBE} " not in written(asked, ("assistant", f" {_PROBE} ", "assistant" in parts))
    return Habits(parts=frozenset(parts), strips=strips)
