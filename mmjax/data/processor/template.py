"""A folder's chat template: Jinja in a sandbox, which turns a dialogue into text.

The template is foreign code. It sees only strings, lists and dicts, cannot change them, and stops at limits.
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
"""The mark of a medium in the text of a turn. Unicode reserves this character and the next two: no text has them."""
_PROBE = "probe"

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of the reasoning of a message, in data and in templates."""
_STAND_IN = Turn(role=ASSISTANT, text="a")
_MARKS = (_LEARN, _STOP)

Message = dict[str, Any]
Span = tuple[int, int]
Learned = tuple[int, int, float]
"""The first learned character, the character after the last, and the loss weight."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A dialogue as a template writes it.

    Attributes:
      text: the text. ``FolderTemplate.image`` and ``MEDIUM`` stand for the media, in their order.
      learned: the learned spans of characters, with their loss weights.
      answer: the first character of the last answer; the length of the text if that is still to be generated.
      apart: whether the template writes the dialogue before that answer differently if it ends there.
      answer_text: the text of that answer, where it is more than the text of the turn.
      lead: generated text before the answer, such as a blank.
      tail: text after the answer, up to the end token.
    """

    text: str
    learned: tuple[Learned, ...]
    answer: int
    apart: bool = False
    answer_text: str = ""
    lead: str = ""
    tail: str = ""


@dataclass(frozen=True, kw_only=True)
class FolderTemplate:
    """The chat template of a folder.

    Attributes:
      place: its file, for messages.
      source: its text.
      tokens: names of special tokens in the template, and their texts, such as ("bos_token", "<s>").
      image, video: the texts of the folder's image token and of its video token; "" without one.
      around_patch: the texts of the tokens before and behind a temporal patch; "" for none.
      around_image: texts of the tokens before and behind an image's, which its processor adds; () for none.
      begins_image: whether the template writes the first of these in an image's place, and lines stand around them;
        others write ``image``.
      begins: whether a dialogue that does not begin with bos gets one.
    """

    place: str
    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    image: str = ""
    video: str = ""
    around_patch: tuple[str, str] = ("", "")
    around_image: tuple[str, ...] = ()
    begins_image: bool = False
    begins: bool = False

    def formatted(self, text: str) -> str:
        """A turn's text as the template writes it: without blanks around it if the template removes them."""
        return text.strip() if _strips(self) else text

    def takes_parts(self, role: str) -> bool:
        """Whether it takes a message of this role as a list of parts, not as a string."""
        return _takes_parts(self, role)

    def reads(self, key: str) -> bool:
        """Whether it reads a key of messages, or ``tools``."""
        return not _words(self.source).isdisjoint(REASONING if key in REASONING else (key,))

    def render(
        self, turns: Sequence[Turn], *, system: str = "", tools: Sequence[Any] = (), generation_prompt: bool = False
    ) -> Rendered:
        """A dialogue as text.

        Args:
          turns: the turns, with ``image`` in place of each image, ``video`` in place of each video, and ``MEDIUM`` in
            place of each medium without a token of the folder.
          system: the system prompt.
          tools: descriptions of the tools that the model may call.
          generation_prompt: whether the text ends with the beginning of an answer, which is to be generated.

        Raises:
          ValueError: the template refuses the dialogue, or does not write a part of it.
          ConfigError: the text of an answer cannot be located in the text of the dialogue.
        """
        self._require_reads(turns, tools)
        dialogue = _Messages(self, turns, system, tools)
        if generation_prompt:
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
          messages: dicts with "role", "content" (a string or a list of parts, see `takes_parts`) and any other keys.
          tools: descriptions of tools.
          prompt: whether the text ends with the beginning of an answer.
          keep_marks: whether to keep the marks around generated text.

        Raises:
          ValueError: the template refuses them.
          ConfigError: the template exceeds its limits for a short dialogue.
        """
        import jinja2

        try:
            text = _compiled(self.source, self.place).render(
                messages=list(messages),
                add_generation_prompt=prompt,
                tools=list(tools) or None,
                documents=None,
                **dict(self.tokens),
            )
        except ConfigError:
            raise
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.place} refuses the dialogue: {error}") from None
        except (TypeError, LookupError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{self.place} fails on the dialogue ({type(error).__name__}: {error})") from None
        if self.around_image:
            first, last = self.around_image
            image = f"{first}{self.image}{last}"
            text = text.replace(first, f"\n\n{image}\n\n") if self.begins_image else text.replace(self.image, image)
        return text if keep_marks else text.replace(_LEARN, "").replace(_STOP, "")


class _Messages:
    """The messages of a dialogue; it locates the answers in a template's text of them."""

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
        types = {self._template.image: "image", self._template.video: "video"}
        marks = "|".join(re.escape(mark) for mark in types if mark)
        parts: list[dict[str, str]] = []
        for piece in re.split(f"({marks})", text) if marks else [text]:
            part = {"type": types[piece]} if piece in types else {"type": "text", "text": piece}
            parts += [part] if piece else []
        return parts or [{"type": "text", "text": ""}]

    def text(self, count: int | None = None, *, prompt: bool = False, keep_marks: bool = False) -> str:
        """The text of the first ``count`` turns, by default of all; see ``FolderTemplate.text``."""
        end, key = None if count is None else self._before + count, (count, prompt, keep_marks)
        if key not in self._texts:
            self._texts[key] = self._template.text(
                self._messages[:end], tools=self._tools, prompt=prompt, keep_marks=keep_marks
            )
        return self._texts[key]

    def spans(self) -> list[Learned]:
        """The spans of the learned answers. Raises ValueError, and ConfigError if they cannot be located."""
        text, marked = _without_marks(self.text(keep_marks=True))
        if not marked:
            return [self._span(number, text) for number, turn in enumerate(self._turns) if turn.learned]
        weights = [turn.weight for turn in self._turns if turn.is_answer]
        if len(set(weights)) > 1:
            weights = self._weights(len(marked))
        spans = self._with_ends(marked, text)
        return [(*span, w) for span, w in zip(spans, weights * len(spans), strict=False) if w]

    def _weights(self, count: int) -> list[float]:
        """The weight of each of ``count`` spans that the template marks as generated."""
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
        """The spans, each extended by an end token that follows: without it a model would not learn to stop."""
        end = dict(self._template.tokens).get("eos_token", "")
        ends = (re.compile(rf"\s*{re.escape(end)}").match(text, stop) if end else None for _, stop in spans)
        return [(start, end.end() if end else stop) for (start, stop), end in zip(spans, ends, strict=True)]

    def _span(self, number: int, full_text: str) -> Learned:
        """The span of an answer in ``full_text``, the text of all turns.

        It is the text that the answer adds to the turns before it. A template may write earlier turns differently when
        later ones follow; then it is the part of ``full_text`` that changes with the text of the answer.
        """
        weight, before = self._turns[number].weight, self._prompt(number)
        through = full_text if number == len(self._turns) - 1 else self.text(number + 1)
        if before is not None and through.startswith(before) and full_text.startswith(through):
            return len(before), len(through), weight
        messages = [*self._messages]
        messages[self._before + number] = self._message(Turn(role=ASSISTANT, text=_LEARN))
        text = self._template.text(messages, tools=self._tools, keep_marks=True)
        start = _shared(full_text, text)
        stop = len(full_text) - _shared(full_text[start:][::-1], text[start:][::-1])
        # An answer begins after its header, also if reasoning follows the header.
        header = before[len(self.text(number)) :] if before is not None and number else ""
        at = full_text.rfind(header, 0, start + len(header)) if header else -1
        start = min(start, at + len(header)) if at >= 0 else start
        if text.count(_LEARN) != 1 or not self._is_written(number, full_text[start:stop]):
            raise self._not_apart()
        return (*self._with_ends([(start, stop)], full_text)[0], weight)

    def _prompt(self, number: int) -> str | None:
        """The text before an answer; None where the template refuses a dialogue that begins with an answer."""
        try:
            return self.text(number, prompt=True)
        except ValueError as error:
            if number or isinstance(error, ConfigError):
                raise
            return None

    def _is_written(self, number: int, text: str) -> bool:
        """Whether ``text`` contains the answer; an answer with images counts as contained."""
        answer, marks = self._template.formatted(self._turns[number].text), (self._template.image, self._template.video)
        return answer in text or any(mark and mark in answer for mark in marks)

    def _not_apart(self) -> Exception:
        cause = "writes earlier turns in another way when later ones follow, so answers cannot be told apart"
        if any(turn.keys or turn.role not in (USER, ASSISTANT, SYSTEM) for turn in self._turns):
            return ValueError(f"{self._template.place} {cause}")
        fix = "put {% generation %} around them in it, or name another Source.template"
        return ConfigError(f"Source.template='folder': {self._template.place} {cause}; {fix}")

    def last_span(self, answer: int) -> Learned:
        """The span of the last answer."""
        text, marked = _without_marks(self.text(keep_marks=True))
        return (*marked[-1], 1.0) if marked else self._span(answer, text)

    def last(self, full_text: str, learned: Sequence[Learned], answer: int) -> Rendered:
        """The dialogue as its template writes it, with ``answer`` as the number of the last answer."""
        turn, before = self._turns[answer], self._prompt(answer)
        apart = before is None or not full_text.startswith(before)
        begin, stop = (learned[-1][0] if learned else 0) if apart else len(before or ""), len(full_text)
        end = dict(self._template.tokens).get("eos_token") or MEDIUM
        if turn.meaningful:
            answer_text = full_text[begin:stop].split(end)[0]
            return Rendered(text=full_text, learned=tuple(learned), answer=begin, apart=apart, answer_text=answer_text)
        answer_text = self._template.formatted(turn.text)
        at = max(full_text.find(answer_text, begin), begin)
        lead, tail = full_text[begin:at], full_text[at:].removeprefix(answer_text)
        return Rendered(
            text=full_text, learned=tuple(learned), answer=begin, apart=apart, lead=lead, tail=tail.split(end)[0]
        )


def read_template(folder: str) -> FolderTemplate:
    """The chat template of a folder with a tokenizer. Raises ConfigError if it is missing or cannot be read.

    The result's `source` is the text of Jinja; `render(turns)` writes a dialogue.

    folder: the path of the folder, the value of `Data.tokenizer`.
    """
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
    numbers = (special.image, special.video, *special.around_patch)
    image, video, begin, end = _token_texts(folder, numbers, special.added)
    tokens = tuple(sorted(special.present.items()))
    around_image = tuple(_token_texts(folder, special.around_image, special.added))
    return FolderTemplate(
        place=place,
        source=source,
        tokens=tokens,
        image=image,
        video=video if image else "",
        around_patch=(begin, end),
        around_image=around_image,
        begins_image=special.begins_image,
        begins=is_processor(folder) and bool(name),
    )


def _token_texts(folder: str, numbers: Sequence[int | None], added: Sequence[AddedToken]) -> list[str]:
    """The texts of the tokens with these ids, in the folder's tokenizer or in ``added``; "" for none."""
    if not any(number is not None for number in numbers):
        return [""] * len(numbers)
    listed = read_object(Path(folder) / TOKENIZER).get("added_tokens") or ()
    texts = {token.id: token.text for token in added} | {token.get("id"): token["content"] for token in listed}
    return ["" if number is None else texts.get(number, "") for number in numbers]


def _shared(text: str, another: str) -> int:
    """The length of the common beginning of two texts."""
    pairs = enumerate(zip(text, another, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(text), len(another)))


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
    """The keys of a message, its reasoning under each key that templates read, as in transformers."""
    thoughts = next((keys[name] for name in REASONING if keys.get(name) is not None), None)
    return dict(keys) if thoughts is None else {"thinking": thoughts, **keys, "reasoning_content": thoughts}


def _without_marks(text: str) -> tuple[str, list[Span]]:
    """The text without the marks around generated text, and the spans that they enclosed."""
    spans, at, begin, pieces = [], 0, 0, []
    for piece in re.split(f"([{_LEARN}{_STOP}])", text):
        if piece == _LEARN:
            begin = at
        elif piece == _STOP:
            spans.append((begin, at))
        else:
            pieces.append(piece)
            at += len(piece)
    return "".join(pieces), spans


_CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)


@lru_cache(maxsize=16)
def _words(source: str) -> frozenset[str]:
    """All words of a template's code."""
    return frozenset(word for code in _CODE.findall(source) for word in re.findall(r"\w+", code))


def _try(template: FolderTemplate, *messages: tuple[str, str, bool]) -> str:
    """The template's text of (role, text, whether in parts) messages; "" if it refuses them."""
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
    as_text, as_parts = (_try(template, *before, (role, _PROBE, in_parts), *after) for in_parts in (False, True))
    # If the template reads both and has no images, text is a string, as in the data of language models.
    return _PROBE in as_parts and "'type'" not in as_parts and (bool(template.image) or _PROBE not in as_text)


@lru_cache(maxsize=64)
def _takes_role(template: FolderTemplate, role: str) -> bool:
    """Whether a template knows a role, or writes the name of any role."""
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
