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

VIDEO = "<video>"
"""The mark of a video in the text of a turn."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A video's tokens.

    Attributes:
      count: LLM tokens of a temporal patch.
      patches: number of its temporal patches.
      seconds: the time of each temporal patch, which stands before it in the text; () where times are positions.
    """

    count: int
    patches: int
    seconds: tuple[float, ...] = ()


Count = int | Timed
"""LLM tokens of a medium, or of a video, which is one or more media."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of a dialogue.

    Attributes:
      kind: "text"; "medium"; "video", whose temporal patches are media; "bos" or "eos"; "answer", an empty piece where
        the last answer begins.
      text: the text; the encoder's name for a medium or a video.
      count: LLM tokens of a medium.
      timed: the tokens of a video; of a medium those of the video that it is a temporal patch of.
      weight: the loss weight of the text.
    """

    kind: str = "text"
    text: str = ""
    count: int = 0
    timed: Timed | None = None
    weight: float = 0.0

    def coded(self, tokenizer: Tokenizer) -> str | int:
        """The text of the piece ("" for an "answer"), or the id of its special token or of its encoder's placeholder.

        A "bos" is "" if the tokenizer has none.
        """
        if self.kind == "medium":
            return tokenizer.video_token(self.text) if self.timed else tokenizer.media_token(self.text)
        special = {"bos": tokenizer.bos, "eos": tokenizer.eos}.get(self.kind)
        return self.text if special is None else special


class Marks:
    """Puts marks for media into the text for a folder's template, and media in place of the marks in its output.

    Call `written` once for each turn, in order, and then `pieces`.
    """

    def __init__(self, tokenizer: Tokenizer, media: DialogueMedia, template: FolderTemplate):
        self._tokenizer, self._media, self._template = tokenizer, media, template
        self._image = tokenizer.token(template.image)
        self._queues: dict[str, list[Piece]] = {mark: [] for mark in (template.image, template.video, MEDIUM) if mark}

    def written(self, number: int) -> str:
        """The text of turn `number` (from 0) for the template.

        The folder's image token stands in place of images, its video token in place of videos, and ``MEDIUM`` in place
        of other media. Raises ValueError if the turn's own text holds one of these tokens.
        """
        image, text = self._template.image, ""
        literals = (image, self._template.video, *self._template.around_image)
        for piece in self._media.of_turn(number):
            if piece.kind in ("medium", "video"):
                is_seen = self._tokenizer.media_token(piece.text) == self._image
                token = self._template.video if piece.kind == "video" else image
                mark = token if is_seen and token else MEDIUM
                self._queues[mark].append(piece)
                text += mark
            elif literal := next((mark for mark in literals if mark and mark in piece.text), ""):
                medium = "a video" if literal == self._template.video else "an image"
                raise ValueError(f"the text holds {literal}, which stands for {medium}")
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
                if at % 2:
                    pieces += temporal_patches(self._queues[part].pop(0), self._template.around_patch)
                else:
                    pieces.append(Piece(text=part, weight=weight))
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
        of_turn = media.of_turn(number, numbered=True, transform=template.formatted)
        inside = [piece for of_medium in of_turn for piece in temporal_patches(of_medium)]
        if turn.is_answer:
            before, after = template.answer.split(TEXT)
            pieces += [*_marked(before), *([Piece(kind="answer")] if number == last else []), *inside]
            pieces += _marked(after, weight=turn.weight)
        elif turn.role == USER:
            pieces += _around(template.question, inside, begin if number == first else [])
        else:
            pieces += _around(template.system, inside)
    return pieces


def temporal_patches(piece: Piece, around: tuple[str, str] = ("", "")) -> list[Piece]:
    """The pieces of a video: for each temporal patch its time, such as "<0.5 seconds>", and its medium.

    Texts ``around`` stand before and behind each medium. Where times are positions there are media alone. Any other
    piece is returned alone.
    """
    if piece.kind != "video":
        return [piece]
    assert piece.timed
    begin, end = around
    medium = Piece(kind="medium", text=piece.text, count=piece.timed.count, timed=piece.timed)
    if not piece.timed.seconds:
        return [medium] * piece.timed.patches
    by_patch = ((Piece(text=f"<{time:.1f} seconds>{begin}"), medium, Piece(text=end)) for time in piece.timed.seconds)
    return [of_patch for pieces in by_patch for of_patch in pieces if of_patch.kind == "medium" or of_patch.text]


class DialogueMedia:
    """Hands out the media of a dialogue in the order in which its text has them.

    Args:
      encoders: specs of encoders and generators, by name.
      counts: number of LLM tokens of each medium, by encoder; a `Timed` for a video.
      turns: the turns.
      makers: the generator of each medium that is to be made, in the order of their marks; () for one generator.

    Attributes:
      first_question: the number of the user's first turn, from 0; media without a mark come there.

    Raises:
      ValueError: there are more marks than media, or media without a mark would come after one with a mark.
    """

    def __init__(
        self,
        encoders: Mapping[str, EncoderSpec],
        counts: Mapping[str, Sequence[Count]],
        turns: Sequence[Turn],
        makers: Sequence[str] = (),
    ):
        self._turns, self._names, self._by_mark = turns, tuple(counts), _by_mark(encoders, counts, makers)
        # Marks of encoders without media here are mere text.
        self._split = re.compile(f"({'|'.join(map(re.escape, self._by_mark))})") if self._by_mark else None
        self.first_question = next((number for number, turn in enumerate(turns) if turn.role == USER), 0)
        self._unmarked, self._left = dict[str, list[_Medium]](), dict[str, list[_Medium]]()
        for mark, tokens in self._by_mark.items():
            marks = sum(turn.text.count(mark) for turn in turns)
            if marks > len(tokens):
                named = (spec.medium for name, spec in encoders.items() if name in counts and spec.mark == mark)
                medium = "video" if mark == VIDEO else next(named)
                described = f"{marks} {mark} marks for {len(tokens)} {medium}s"
                raise ValueError(f"question {without_literals(last_question(turns))!r} has {described}")
            self._unmarked[mark], self._left[mark] = tokens[: len(tokens) - marks], tokens[len(tokens) - marks :]
            if self._unmarked[mark] and any(mark in turn.text for turn in turns[: self.first_question]):
                raise ValueError(f"{mark} stands before the first question, where media without a mark are")

    @property
    def before(self) -> dict[str, int]:
        """Number of media of each encoder before the last answer, by the encoders of `counts`; a video is one."""
        turns, before = self._turns[: last_answer(self._turns)], dict.fromkeys(self._names, 0)
        for mark, media in self._by_mark.items():
            count = sum(turn.text.count(mark) for turn in turns) + len(self._unmarked[mark])
            for name, _ in media[:count]:
                before[name] += 1
        return before

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
            unmarked = (medium for media in self._unmarked.values() for medium in media)
            for at, medium in enumerate(unmarked, 1):
                pieces += [Piece(text=f"{at}:")] if numbered else []
                pieces.append(_piece(medium))
        text = transform(turn.text)
        for at, part in enumerate(self._split.split(text) if self._split else [text]):
            if at % 2:
                pieces.append(_piece(self._left[part].pop(0)))
            else:
                pieces.append(Piece(text=without_literals(part), weight=turn.learned))
        return pieces


_Medium = tuple[str, Count]
"""The encoder or generator of a medium, and the medium's tokens."""


def _by_mark(
    encoders: Mapping[str, EncoderSpec], counts: Mapping[str, Sequence[Count]], makers: Sequence[str]
) -> dict[str, list[_Medium]]:
    """The media of each mark in their order in the text; arguments as of `DialogueMedia`."""
    by_mark = dict[str, list[_Medium]]()
    for name, of_encoder in counts.items():
        by_mark.setdefault(encoders[name].mark, [])
        for count in of_encoder:
            by_mark.setdefault(VIDEO if isinstance(count, Timed) else encoders[name].mark, []).append((name, count))
    if makers:
        remaining = {name: iter(counts[name]) for name in counts}
        by_mark[encoders[makers[0]].mark] = [(name, next(remaining[name])) for name in makers]
    return by_mark


def _piece(medium: _Medium) -> Piece:
    """The piece of a medium or a video."""
    name, count = medium
    if isinstance(count, Timed):
        return Piece(kind="video", text=name, timed=count)
    return Piece(kind="medium", text=name, count=count)


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
