"""A folder's chat template: Jinja in a sandbox, which turns a dialogue into text.

The template is code from elsewhere. It sees strings, lists and dicts alone, can change none, and ends at limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmjax.configurable import ConfigError
from mmjax.data.processor.files import TOKENIZER, find_chat_template, has_tokenizer, is_processor
from mmjax.data.processor.sandbox import LEARN as _LEARN
from mmjax.data.processor.sandbox import STOP as _STOP
from mmjax.data.processor.sandbox import compiled as _compiled
from mmjax.data.processor.special import AddedToken, read_special_tokens
from mmjax.data.turns import ASSISTANT, SYSTEM, USER, Turn, last_answer
from mmjax.json_files import read_object

MEDIUM = "\ufdd4"
"""Stands for a medium in the text of a turn. Unicode keeps this character and the next two free: no text has them."""
_PROBE = "probe"

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that data and templates have for the thoughts of a message."""
_STAND_IN = Turn(role=ASSISTANT, text="a")
_MARKS = (_LEARN, _STOP)

Message = dict[str, Any]
Span = tuple[int, int]
Learned = tuple[int, int, float]
"""The first character that is learned, the one after the last, and the loss weight."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A dialogue as a template writes it.

    Attributes:
      text: the text. ``FolderTemplate.image`` and ``MEDIUM`` stand for the media, in their order.
      learned: the characters from and to which the model learns, with their loss weight.
      answer: the first character that the model says in its last answer; the length of the text where that is still to
        come.
      apart: whether a dialogue that ends before that answer is written in another way than the text has it.
      said: the text of that answer, where it is more than the text of the turn.
      lead: text that the model says before it, such as a blank.
      tail: text that follows it, up to the end token.
    """

    text: str
    learned: tuple[Learned, ...]
    answer: int
    apart: bool = False
    said: str = ""
    lead: str = ""
    tail: str = ""


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
        return text.strip() if _strips(self) else text

    def takes_parts(self, role: str) -> bool:
        """Whether it takes a message of this role as a list of parts; else as a string."""
        return _takes_parts(self, role)

    def reads(self, key: str) -> bool:
        """Whether it reads a key of messages, or ``tools``."""
        return not _words(self.source).isdisjoint(REASONING if key in REASONING else (key,))

    def render(
        self, turns: Sequence[Turn], *, system: str = "", tools: Sequence[Any] = (), asks: bool = False
    ) -> Rendered:
        """A dialogue as text.

        Args:
          turns: the turns, with ``image`` in place of each image, and ``MEDIUM`` in place of each medium that the
            folder has no token for.
          system: the system prompt.
          tools: descriptions of the tools that the model may call.
          asks: whether an answer is still to come; the text then ends where it begins.

        Raises:
          ValueError: the template refuses the dialogue, or does not write a part of it.
          ConfigError: what it writes for an answer cannot be told apart from the rest.
        """
        self._require_reads(turns, tools)
        dialogue = _Messages(self, turns, system, tools)
        if asks:
            text, ended = dialogue.text(prompt=True), _Messages(self, [*turns, _STAND_IN], system, tools)
            last = ended.last(ended.text(), [ended.last_span(len(turns))], len(turns))
            return Rendered(text=text, learned=(), answer=len(text), lead=last.lead, tail=last.tail)
        return dialogue.last(dialogue.text(), dialogue.spans(), last_answer(turns))

    def _require_reads(self, turns: Sequence[Turn], tools: Sequence[Any]) -> None:
        if tools and not self.reads("tools"):
            raise ValueError(f"it has tools, and {self.place} does not write them")
        for number, turn in enumerate(turns, 1):
            for key in turn.meaningful:
                if not self.reads(key):
                    raise ValueError(f"turn {number} has {key}, and {self.place} does not write it")
            if turn.role not in (USER, ASSISTANT, SYSTEM) and not _takes_role(self, turn.role):
                raise ValueError(f"turn {number} is from {turn.role!r}, and {self.place} has no such role")

    def text(
        self, messages: Sequence[Message], *, tools: Sequence[Any] = (), prompt: bool = False, keep_marks: bool = False
    ) -> str:
        """The text of messages.

        Args:
          messages: the messages.
          tools: descriptions of tools.
          prompt: whether the beginning of an answer follows.
          keep_marks: whether the marks around generated text stay.

        Raises:
          ValueError: the template refuses them.
        """
        import jinja2

        about = {"add_generation_prompt": prompt, "tools": list(tools) or None, "documents": None}
        try:
            text = _compiled(self.source, self.place).render(messages=list(messages), **about, **dict(self.tokens))
        except ConfigError:
            raise
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.place} refuses the dialogue: {error}") from None
        except (TypeError, LookupError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{self.place} fails on the dialogue ({type(error).__name__}: {error})") from None
        return text if keep_marks else text.replace(_LEARN, "").replace(_STOP, "")


class _Messages:
    """The messages of a dialogue, and where a template writes each answer."""

    def __init__(self, template: FolderTemplate, turns: Sequence[Turn], system: str, tools: Sequence[Any]):
        self._template, self._turns, self._tools = template, turns, _clean(list(tools), *_MARKS, MEDIUM)
        prompt = [Turn(role=SYSTEM, text=system)] if system else []
        clean = [
            replace(turn, text=_clean(turn.text, *_MARKS), keys=_clean(dict(turn.keys), *_MARKS, MEDIUM))
            for turn in (*prompt, *turns)
        ]
        self._before, self._messages = len(prompt), [self._message(turn) for turn in clean]
        self._texts: dict[tuple[int | None, bool, bool], str] = {}

    def _message(self, turn: Turn) -> Message:
        # An answer that is tool calls alone has no parts.
        parts = self._template.takes_parts(turn.role) and bool(turn.text or not turn.meaningful)
        content = self._parts(turn.text) if parts else turn.text
        message = {"role": turn.role, "content": content, **_with_reasoning(turn.keys)}
        return {key: value for key, value in message.items() if value is not None}

    def _parts(self, text: str) -> list[dict[str, str]]:
        parts: list[dict[str, str]] = []
        for number, piece in enumerate(text.split(self._template.image) if self._template.image else [text]):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": piece}] if piece else []
        return parts or [{"type": "text", "text": ""}]

    def text(self, count: int | None = None, *, prompt: bool = False, keep_marks: bool = False) -> str:
        """The text of the first ``count`` turns, by default of all; other arguments as for the template's."""
        end, key = None if count is None else self._before + count, (count, prompt, keep_marks)
        if key not in self._texts:
            about: Any = {"tools": self._tools, "prompt": prompt, "keep_marks": keep_marks}
            self._texts[key] = self._template.text(self._messages[:end], **about)
        return self._texts[key]

    def spans(self) -> list[Learned]:
        """Where the answers stand that are learned. Raises ValueError, and ConfigError where that is not to be seen."""
        text, marked = _without_marks(self.text(keep_marks=True))
        if not marked:
            return [self._span(number, text) for number, turn in enumerate(self._turns) if turn.learned]
        weights = [turn.weight for turn in self._turns if turn.is_answer]
        if len(set(weights)) > 1:
            weights = self._weights(len(marked))
        spans = self._with_ends(marked, text)
        return [(*span, w) for span, w in zip(spans, weights * len(spans), strict=False) if w]

    def _weights(self, count: int) -> list[float]:
        """The weight of each of ``count`` stretches that the template marks as generated."""
        weights: list[float] = []
        for number, turn in enumerate(self._turns, 1):
            ends = len(_without_marks(self.text(number, keep_marks=True))[1])
            weights += [turn.learned] * (ends - len(weights))
        if len(weights) != count:
            raise ValueError(
                f"{self._template.place} marks other answers when later turns follow: weights have no place"
            )
        return weights

    def _with_ends(self, spans: Sequence[Span], text: str) -> list[Span]:
        """Spans with the end token behind them: without it a model would not learn to stop."""
        end = dict(self._template.tokens).get("eos_token", "")
        ends = (re.compile(rf"\s*{re.escape(end)}").match(text, stop) if end else None for _, stop in spans)
        return [(start, end.end() if end else stop) for (start, stop), end in zip(spans, ends, strict=True)]

    def _span(self, number: int, whole: str) -> Learned:
        """The text that an answer adds to the turns before it; ``whole`` is the text of all turns.

        Where the text of the first turns is not the beginning of ``whole``, since a template may write earlier turns in
        another way, it is the part of ``whole`` that is another one when the answer is.
        """
        weight, before = self._turns[number].weight, self._prompt(number)
        through = whole if number == len(self._turns) - 1 else self.text(number + 1)
        if before is not None and through.startswith(before) and whole.startswith(through):
            return len(before), len(through), weight
        messages = [*self._messages]
        messages[self._before + number] = self._message(Turn(role=ASSISTANT, text=_LEARN))
        text = self._template.text(messages, tools=self._tools, keep_marks=True)
        start = _shared(whole, text)
        stop = len(whole) - _shared(whole[start:][::-1], text[start:][::-1])
        # An answer begins behind its header, whatever thoughts follow that.
        header = before[len(self.text(number)) :] if before is not None and number else ""
        at = whole.rfind(header, 0, start + len(header)) if header else -1
        start = min(start, at + len(header)) if at >= 0 else start
        if text.count(_LEARN) != 1 or not self._is_written(number, whole[start:stop]):
            raise self._not_apart()
        return (*self._with_ends([(start, stop)], whole)[0], weight)

    def _prompt(self, number: int) -> str | None:
        """The text before an answer; None where the template writes no dialogue that begins with one."""
        try:
            return self.text(number, prompt=True)
        except ValueError as error:
            if number or isinstance(error, ConfigError):
                raise
            return None

    def _is_written(self, number: int, text: str) -> bool:
        """Whether ``text`` holds the answer; one with images is written with more than its text."""
        answer, image = self._template.said(self._turns[number].text), self._template.image
        return answer in text or bool(image and image in answer)

    def _not_apart(self) -> Exception:
        what = "writes earlier turns in another way when later ones follow, so answers cannot be told apart"
        if any(turn.keys or turn.role not in (USER, ASSISTANT, SYSTEM) for turn in self._turns):
            return ValueError(f"{self._template.place} {what}")
        fix = "put {% generation %} around them in it, or name another Source.template"
        return ConfigError(f"Source.template='folder': {self._template.place} {what}; {fix}")

    def last_span(self, answer: int) -> Learned:
        """Where the last answer stands."""
        text, marked = _without_marks(self.text(keep_marks=True))
        return (*marked[-1], 1.0) if marked else self._span(answer, text)

    def last(self, whole: str, learned: Sequence[Learned], answer: int) -> Rendered:
        """The dialogue as its template writes it, with ``answer`` as the number of the last answer."""
        turn, before = self._turns[answer], self._prompt(answer)
        apart = before is None or not whole.startswith(before)
        begin, stop = (learned[-1][0] if learned else 0) if apart else len(before or ""), len(whole)
        end = dict(self._template.tokens).get("eos_token") or MEDIUM
        if turn.meaningful:
            said = whole[begin:stop].split(end)[0]
            return Rendered(text=whole, learned=tuple(learned), answer=begin, apart=apart, said=said)
        said = self._template.said(turn.text)
        at = max(whole.find(said, begin), begin)
        lead, tail = whole[begin:at], whole[at + len(said) :] if whole.startswith(said, at) else whole[at:]
        return Rendered(
            text=whole, learned=tuple(learned), answer=begin, apart=apart, lead=lead, tail=tail.split(end)[0]
        )


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


def _shared(text: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(text), len(other)))


def _clean(value: Any, *characters: str) -> Any:
    """A value of JSON without these characters in any text."""
    if isinstance(value, str):
        for character in characters:
            value = value.replace(character, "\N{REPLACEMENT CHARACTER}")
        return value
    if isinstance(value, Mapping):
        return {_clean(key, *characters): _clean(item, *characters) for key, item in value.items()}
    return [_clean(item, *characters) for item in value] if isinstance(value, (list, tuple)) else value


def _with_reasoning(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a message with its thoughts under each name that templates have for them, as in transformers."""
    thoughts = next((keys[name] for name in REASONING if keys.get(name) is not None), None)
    return dict(keys) if thoughts is None else {"thinking": thoughts, **keys, "reasoning_content": thoughts}


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


_CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)


@lru_cache(maxsize=16)
def _words(source: str) -> frozenset[str]:
    """All words of a template that are no text of its own."""
    return frozenset(word for code in _CODE.findall(source) for word in re.findall(r"\w+", code))


def _try(template: FolderTemplate, *messages: tuple[str, str, bool]) -> str:
    """The text of (role, text, whether in parts); "" where the template refuses them."""
    try:
        return template.text(
            [
                {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}
                for role, text, in_parts in messages
            ]
        )
    except ConfigError:
        raise
    except ValueError:
        return ""


@lru_cache(maxsize=64)
def _takes_parts(template: FolderTemplate, role: str) -> bool:
    question = () if role == USER else (("user", "x", _takes_parts(template, USER)),)
    before, after = ((), question) if role == SYSTEM else (question, ())
    as_text, as_parts = (_try(template, *before, (role, _PROBE, own), *after) for own in (False, True))
    # Where both are read, text that has no images is a string, as it is in the data of language models.
    return _PROBE in as_parts and "'type'" not in as_parts and (bool(template.image) or _PROBE not in as_text)


@lru_cache(maxsize=64)
def _takes_role(template: FolderTemplate, role: str) -> bool:
    """Whether a template knows a role, or writes the name of any."""
    if role in _words(template.source):
        return True
    question, answer = (("user", "x", template.takes_parts(USER)), ("assistant", "y", template.takes_parts(ASSISTANT)))
    texts = [_try(template, question, answer, (name, _PROBE, template.takes_parts(name))) for name in (role, USER)]
    return all(_PROBE in text for text in texts) and role in texts[0] and role not in texts[1]


@lru_cache(maxsize=16)
def _strips(template: FolderTemplate) -> bool:
    """Whether a template removes blanks around an answer."""
    question = ("user", "x", template.takes_parts(USER))
    return f" {_PROBE} " not in _try(template, question, ("assistant", f" {_PROBE} ", template.takes_parts(ASSISTANT)))
