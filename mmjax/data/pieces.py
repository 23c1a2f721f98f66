"""The pieces of a dialogue's text: text of the template and of the turns, with loss weights, and media between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mmjax.data.chat import BOS, EOS, SYSTEM, TEXT, Template
from mmjax.data.processor.inline_images import has_inline_images
from mmjax.data.processor.template import MEDIUM, FolderTemplate, Rendered
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.turns import USER, Turn, last_answer, last_question, without_literals
from mmjax.data.types import EncoderSpec


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of a dialogue.

    Attributes:
      kind: "text"; "medium"; "bos" or "eos"; "answer", an empty piece where the last answer begins.
      text: the text; the encoder's name for a medium.
      count: LLM tokens of a medium.
      weight: the loss weight of the text.
    """

    kind: str = "text"
    text: str = ""
    count: int = 0
    weight: float = 0.0

    def coded(self, tokenizer: Tokenizer) -> str | int:
        """The text of the piece ("" for an "answer"), or the id of its special token or of its encoder's placeholder.

        A "bos" is "" if the tokenizer has none.
        """
        if self.kind == "medium":
            return tokenizer.media_token(self.text)
        special = {"bos": tokenizer.bos, "eos": tokenizer.eos}.get(self.kind)
        return self.text if special is None else special


class Marks:
    """Puts marks for media into the text for a folder's template, and media in place of the marks in its output.

    Call `written` once for each turn, in order, and then `pieces`.
    """

    def __init__(self, tokenizer: Tokenizer, media: DialogueMedia, template: FolderTemplate):
        self._tokenizer, self._media, self._template = tokenizer, media, template
        self._image = tokenizer.token(template.image)
        self._queues: dict[str, list[Piece]] = {mark: [] for mark in (template.image, MEDIUM) if mark}

    def written(self, number: int) -> str:
        """The text of turn `number` (from 0) for the template.

        The folder's image token stands in place of images, and ``MEDIUM`` in place of other media. Raises ValueError if
        the turn's own text holds the image token.
        """
        image, text = self._template.image, ""
        for piece in self._media.of_turn(number):
            if piece.kind == "medium":
                mark = image if self._tokenizer.media_token(piece.text) == self._image else MEDIUM
                self._queues[mark].append(piece)
                text += mark
            elif mark := next((mark for mark in (image, *self._template.around) if mark and mark in piece.text), ""):
                raise ValueError(f"the text holds {mark}, which stands for an image")
            else:
                text += piece.text.replace(MEDIUM, "\N{REPLACEMENT CHARACTER}")
        if image and self._template.takes_parts(USER) and not has_inline_images(self._template.source):
            # In LLaVA's data an image stands on a separate line; a template with places for images writes line breaks.
            text = text.replace(f"{image}\n", image).replace(f"\n{image}", image)
        return text

    def pieces(self, rendered: Rendered) -> list[Piece]:
        """The pieces of the template's text. Raises ValueError if it has not exactly one place for each medium."""
        text, place, pieces = rendered.text, self._template.place, list[Piece]()
        split = re.compile(f"({'|'.join(map(re.escape, self._queues))})")
        ends = {0, len(text), rendered.answer, *(at for start, end, _ in rendered.learned for at in (start, end))}
        for begin, end in pairwise(sorted(ends)):
            pieces += [Piece(kind="answer")] if begin == rendered.answer else []
            weight = max((w for start, stop, w in rendered.learned if start <= begin and end <= stop), default=0.0)
            for at, part in enumerate(split.split(text[begin:end])):
                if at % 2 and not self._queues[part]:
                    raise ValueError(f"{place} writes more places of media than there are media")
                pieces.append(self._queues[part].pop(0) if at % 2 else Piece(text=part, weight=weight))
        if any(self._queues.values()):
            raise ValueError(f"{place} has no place for {sum(map(len, self._queues.values()))} of the media")
        return [*pieces, *([Piece(kind="answer")] if rendered.answer == len(text) else [])]


def written_pieces(media: DialogueMedia, turns: Sequence[Turn], template: Template, system: str) -> list[Piece]:
    """The pieces of a dialogue as `template` writes it, with an "answer" piece where the last answer begins.

    A `Piece` has `kind` ("text", "medium", "bos", "eos" or "answer"), `text`, the encoder's name for a medium, the
    `count` of LLM tokens of a medium, and the loss `weight` of its text.

    Args:
      media: the media of the same turns, a new `DialogueMedia(encoders, counts, turns)`; they are handed out.
      turns: turns that `chat.require_writable` accepts.
      template: writes the text around the turns, such as TEMPLATES["vicuna"] of `mmjax.data.chat`.
      system: the system prompt; "" for none.
    """
    begin = _around(template.system, [Piece(text=system)]) if system else []
    pieces: list[Piece] = [] if SYSTEM in template.question else begin
    first, last = media.first_question, last_answer(turns)
    for number, turn in enumerate(turns):
        inside = media.of_turn(number, numbered=True, transform=template.formatted)
        if turn.is_answer:
            before, after = template.answer.split(TEXT)
            pieces += [*_marked(before), *([Piece(kind="answer")] if number == last else []), *inside]
            pieces += _marked(after, weight=turn.weight)
        elif turn.role == USER:
            pieces += _around(template.question, inside, begin if number == first else [])
        else:
            pieces += _around(template.system, inside)
    return pieces


class DialogueMedia:
    """Hands out the media of a dialogue in the order in which its text has them.

    Args:
      encoders: specs of encoders and generators, by name.
      counts: number of LLM tokens of each medium, by encoder.
      turns: the turns.

    Attributes:
      first_question: the number of the user's first turn, from 0; media without a mark come there.

    Raises:
      ValueError: there are more marks than media, or media without a mark would come after one with a mark.
    """

    def __init__(self, encoders: Mapping[str, EncoderSpec], counts: Mapping[str, Sequence[int]], turns: Sequence[Turn]):
        self._turns, self._by_mark = turns, {encoders[name].mark: name for name in counts}
        # Marks of encoders without media here are mere text.
        self._split = re.compile(f"({'|'.join(map(re.escape, self._by_mark))})") if self._by_mark else None
        self.first_question = next((number for number, turn in enumerate(turns) if turn.role == USER), 0)
        self._unmarked, self._left = dict[str, list[int]](), dict[str, list[int]]()
        for mark, name in self._by_mark.items():
            marks, tokens = sum(turn.text.count(mark) for turn in turns), list(counts[name])
            if marks > len(tokens):
                described = f"{marks} {mark} marks for {len(tokens)} {encoders[name].medium}s"
                raise ValueError(f"question {without_literals(last_question(turns))!r} has {described}")
            self._unmarked[name], self._left[name] = tokens[: len(tokens) - marks], tokens[len(tokens) - marks :]
            if self._unmarked[name] and any(mark in turn.text for turn in turns[: self.first_question]):
                raise ValueError(f"{mark} stands before the first question, where media without a mark are")

    @property
    def before(self) -> dict[str, int]:
        """Number of media of each encoder before the last answer, by the encoders of `counts`."""
        turns = self._turns[: last_answer(self._turns)]
        marks = {name: sum(turn.text.count(mark) for turn in turns) for mark, name in self._by_mark.items()}
        return {name: count + len(self._unmarked[name]) for name, count in marks.items()}

    def of_turn(
        self, number: int, *, numbered: bool = False, transform: Callable[[str], str] = lambda text: text
    ) -> list[Piece]:
        """The pieces of a turn's text, the next media in place of its marks. Call it once for each turn, in order.

        Args:
          number: the turn's number, from 0.
          numbered: whether to write its number before each medium without a mark.
          transform: changes the text.
        """
        turn, pieces = self._turns[number], list[Piece]()
        if number == self.first_question:
            unmarked = ((name, count) for name, counts in self._unmarked.items() for count in counts)
            for at, (name, count) in enumerate(unmarked, 1):
                pieces += [Piece(text=f"{at}:")] if numbered else []
                pieces.append(Piece(kind="medium", text=name, count=count))
        text = transform(turn.text)
        for at, part in enumerate(self._split.split(text) if self._split else [text]):
            name = self._by_mark[part] if at % 2 else ""
            medium = Piece(kind="medium", text=name, count=self._left[name].pop(0)) if name else None
            pieces.append(medium or Piece(text=without_literals(part), weight=turn.learned))
        return pieces


def _around(piece: str, inside: Sequence[Piece], system: Sequence[Piece] = ()) -> list[Piece]:
    before, after = piece.split(TEXT)
    return [*_marked(before, system), *inside, *_marked(after, system)]


def _marked(text: str, system: Sequence[Piece] = (), *, weight: float = 0.0) -> list[Piece]:
    """The pieces of a template's text, special tokens and the system prompt in place of their marks."""
    pieces: list[Piece] = []
    for part in _SPECIAL.split(text):
        if part == SYSTEM:
            pieces += system
        else:
            pieces.append(Piece(kind=_KINDS.get(part, "text"), text="" if part in _KINDS else part, weight=weight))
    return pieces


_KINDS = {BOS: "bos", EOS: "eos"}
_SPECIAL = re.compile(f"({'|'.join(map(re.escape, (*_KINDS, SYSTEM)))})")
