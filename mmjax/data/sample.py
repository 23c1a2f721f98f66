"""Makes a `Sample` of text and media: puts the media in their places in the text, and marks the tokens to learn."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from mmjax.data.chat import BOS, EOS, SYSTEM, TEMPLATES, TEXT, Template
from mmjax.data.processor.inline_images import has_inline_images
from mmjax.data.processor.template import MEDIUM, FolderTemplate, Rendered
from mmjax.data.tiles import arrange, token_count
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import EncoderSpec, Sample, SampleMeta, Tiled

Turns = Sequence[tuple[str, str]]
"""Questions and answers of a dialogue, in order."""
Sizes = Mapping[str, Sequence[tuple[int, ...]]]
"""Sizes of media by encoder, without channels; sides are multiples of spec.block."""


@dataclass(frozen=True, kw_only=True)
class Laid:
    """A dialogue as tokens.

    Attributes:
      tokens: token ids, with placeholders expanded.
      weights: the loss weight of each token.
      prompt: number of tokens before those of the last answer.
      asked: the tokens that a model is to answer, where they are others than those; see `Sample`.
      lead: text of the template at the start of the answer's tokens: a token may begin with the blank before a word.
      tail: text of the template after the answer, up to the end token.
    """

    tokens: list[int]
    weights: list[float]
    prompt: int
    lead: str
    tail: str
    asked: Sequence[int] = ()


def layout_tokens(
    tokenizer: Tokenizer,
    encoders: Mapping[str, EncoderSpec],
    counts: Mapping[str, Sequence[int]],
    turns: Turns,
    *,
    template: Template | FolderTemplate = TEMPLATES["plain"],
    system: str = "",
) -> Laid:
    """Encodes a dialogue about media as a whole. A token is learned if it has a character that is to be learned.

    Each mark of an encoder ("<image>", "<recording>") in the turns is replaced by its next medium. Media without a mark
    come before the first question, encoder by encoder, each after its number ("1:"), so that a question can name it
    and its start can be found; a folder's template has no numbers, and a new line between an image and text is its own
    affair. A dialogue begins with bos where the tokenizer has one, and its last answer ends with an end token. Answers,
    and what `template` puts after them, are learned; media never are.

    Args:
      tokenizer: the tokenizer.
      encoders: specs of encoders and generators.
      counts: LLM tokens of each medium, by encoder.
      turns: questions and answers.
      template: the text around them.
      system: the system prompt.

    Raises:
      ValueError: there are more marks than media, or a folder's template does not take the dialogue.
    """
    media = _Media(encoders, counts, turns)
    if isinstance(template, FolderTemplate):
        marks = _Marks(tokenizer, media, template)
        rendered = template.render([(marks.written(q), marks.written(a)) for q, a in turns], system=system)
        laid = _laid(tokenizer, marks.pieces(rendered), begins=template.begins)
        laid = replace(laid, lead=laid.lead + rendered.lead, tail=rendered.tail)
        if not rendered.apart:
            return laid
        *before, (question, answer) = turns
        seen = {name: own[: len(own) - answer.count(encoders[name].mark)] for name, own in counts.items()}
        asked = layout_prompt(tokenizer, encoders, seen, before, question, template=template, system=system)
        return replace(laid, asked=asked)
    laid = _laid(tokenizer, _pieces(media, turns, template, system), begins=True)
    return replace(laid, tail=template.ending)


def layout_prompt(
    tokenizer: Tokenizer,
    encoders: Mapping[str, EncoderSpec],
    counts: Mapping[str, Sequence[int]],
    turns: Turns,
    asked: str,
    *,
    template: Template | FolderTemplate = TEMPLATES["plain"],
    system: str = "",
) -> list[int]:
    """The tokens of a dialogue whose last question, `asked`, a model is to answer; see `layout_tokens`."""
    if not isinstance(template, FolderTemplate):
        # A blank before the answer belongs to the answer's first token, as it does where the model learns.
        turns = (*turns, (asked, "a"))
        laid = layout_tokens(tokenizer, encoders, counts, turns, template=template, system=system)
        return laid.tokens[: laid.prompt]
    media = _Media(encoders, counts, (*turns, (asked, "")))
    marks = _Marks(tokenizer, media, template)
    said = [(marks.written(q), marks.written(a)) for q, a in turns]
    rendered = template.render(said, asked=marks.written(asked), system=system)
    laid = _laid(tokenizer, marks.pieces(rendered), begins=template.begins)
    return laid.tokens[: laid.prompt]


def _laid(tokenizer: Tokenizer, pieces: Sequence[_Piece], *, begins: bool) -> Laid:
    """The pieces of a dialogue as tokens; `begins` puts bos in front where they do not begin with it."""
    coded = tokenizer.encode_whole([piece.coded(tokenizer) for piece in pieces])
    starts_N, ends_N = coded.spans[:, 0], np.maximum(coded.spans[:, 0] + 1, coded.spans[:, 1])
    starts_N, ends_N = np.minimum([starts_N, ends_N], len(coded.text))
    to_learn = np.cumsum([0, *np.repeat([piece.learned for piece in pieces], np.diff(coded.starts))])
    weights_N = (to_learn[ends_N] > to_learn[starts_N]).astype(float)
    copies_N = np.ones(len(coded.ids), int)
    media = [piece for piece in pieces if piece.kind == "medium"]
    places = np.isin(coded.ids, [tokenizer.media_token(p.text) for p in media])
    if np.count_nonzero(places) != len(media):
        raise ValueError("the text holds a token that stands for an image or a recording")
    copies_N[places] = [p.count for p in media]
    # The last answer begins with the first token that reaches beyond this character.
    begin = int(coded.starts[max(at for at, piece in enumerate(pieces) if piece.kind == "answer")])
    first = int(np.count_nonzero(np.logical_and.accumulate(ends_N <= begin)))
    tokens, weights = np.repeat(coded.ids, copies_N).tolist(), np.repeat(weights_N, copies_N).tolist()
    prompt = int(copies_N[:first].sum())
    if begins and tokenizer.bos is not None and tokens[:1] != [tokenizer.bos]:
        tokens, weights, prompt = [tokenizer.bos, *tokens], [0.0, *weights], prompt + 1
    if not set(tokens[prompt:]) & set(tokenizer.stops):
        tokens, weights = [*tokens, tokenizer.eos], [*weights, 1.0]
    lead = coded.text[int(ends_N[first - 1]) if first else 0 : begin]
    return Laid(tokens=tokens, weights=weights, prompt=prompt, lead=lead, tail="")


def answer_text(tokenizer: Tokenizer, sample: Sample, said: Sequence[int]) -> str:
    """The text of a model's answer to `sample`, from the tokens with which the model continues the prompt."""
    said, stop = list(said), sample.tail.strip()
    ending = tokenizer.token(stop) if stop else None
    said = said[: said.index(ending)] if ending in said else said
    prompt = sample.tokens[: sample.prompt].tolist()
    # A token's text depends on those before it: the first one of a text may lack its blank.
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *said])
    text = whole[len(before) :] if whole.startswith(before) else tokenizer.decode(said)
    # A tokenizer that keeps no blanks writes one of its own between words.
    blank = sample.lead.isspace() and text[:1].isspace()
    text = text[1:] if blank and not text.startswith(sample.lead) else text.removeprefix(sample.lead)
    return text.partition(stop)[0] if stop else text.removesuffix(sample.tail)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A piece of a dialogue.

    Attributes:
      kind: "text"; "medium"; "bos" or "eos"; "answer", an empty piece where an answer begins.
      text: the text; the encoder's name for a medium.
      count: LLM tokens of a medium.
      learned: whether the text is learned.
    """

    kind: str = "text"
    text: str = ""
    count: int = 0
    learned: bool = False

    def coded(self, tokenizer: Tokenizer) -> str | int:
        """Its text, or the id of its special token."""
        if self.kind == "medium":
            return tokenizer.media_token(self.text)
        special = {"bos": tokenizer.bos, "eos": tokenizer.eos}.get(self.kind)
        return self.text if special is None else special


class _Marks:
    """Puts marks for media into the text that a folder's template is given, and media in place of those it writes."""

    def __init__(self, tokenizer: Tokenizer, media: _Media, template: FolderTemplate):
        self._tokenizer, self._media, self._template = tokenizer, media, template
        self._image = tokenizer.token(template.image)
        self._first = [piece for piece in media.unmarked() if piece.kind == "medium"]
        self._queues: dict[str, list[_Piece]] = {mark: [] for mark in (template.image, MEDIUM) if mark}

    def written(self, text: str) -> str:
        """A turn's text, the folder's image token in place of its images, ``MEDIUM`` of other media."""
        image, found = self._template.image, ""
        for piece in [*self._first, *self._media.placed(text, learned=False)]:
            if piece.kind == "medium":
                mark = image if self._tokenizer.media_token(piece.text) == self._image else MEDIUM
                self._queues[mark].append(piece)
                found += mark
            elif image and image in piece.text:
                raise ValueError(f"the text holds {image}, which stands for an image")
            else:
                found += piece.text.replace(MEDIUM, "\N{REPLACEMENT CHARACTER}")
        self._first = []
        if image and "user" in self._template.habits.parts and not has_inline_images(self._template.source):
            # LLaVA's data have a line of its own for an image; a template that has places for images writes its own.
            found = found.replace(f"{image}\n", image).replace(f"\n{image}", image)
        return found

    def pieces(self, rendered: Rendered) -> list[_Piece]:
        """The pieces of the text that the template wrote. Raises ValueError if it has not a place for each medium."""
        text, place, found = rendered.text, self._template.place, list[_Piece]()
        split = re.compile(f"({'|'.join(map(re.escape, self._queues))})")
        ends = {0, len(text), rendered.answer, *(at for span in rendered.learned for at in span)}
        for begin, end in pairwise(sorted(ends)):
            found += [_Piece(kind="answer")] if begin == rendered.answer else []
            learned = any(start <= begin and end <= stop for start, stop in rendered.learned)
            for at, part in enumerate(split.split(text[begin:end])):
                if at % 2 and not self._queues[part]:
                    raise ValueError(f"{place} writes more places of media than there are media")
                found.append(self._queues[part].pop(0) if at % 2 else _Piece(text=part, learned=learned))
        if any(self._queues.values()):
            raise ValueError(f"{place} has no place for {sum(map(len, self._queues.values()))} of the media")
        return [*found, *([_Piece(kind="answer")] if rendered.answer == len(text) else [])]


def _pieces(media: _Media, turns: Turns, template: Template, system: str) -> list[_Piece]:
    turns = [(template.said(question), template.said(answer)) for question, answer in turns]
    begin = _around(template.system, [_Piece(text=system)]) if system else []
    pieces: list[_Piece] = [] if SYSTEM in template.question else begin
    unmarked = media.unmarked()
    for number, (question, answer) in enumerate(turns):
        asked = [*(unmarked if number == 0 else []), *media.placed(question, learned=False)]
        pieces += _around(template.question, asked, begin if number == 0 else [])
        before, after = template.answer.split(TEXT)
        pieces += [*_marked(before), _Piece(kind="answer"), *media.placed(answer, learned=True)]
        pieces += _marked(after, learned=True)
    return pieces


class _Media:
    """Hands out the media of a dialogue in the order in which its text has them."""

    def __init__(self, encoders: Mapping[str, EncoderSpec], counts: Mapping[str, Sequence[int]], turns: Turns):
        self._by_mark = {encoders[name].mark: name for name in counts}
        # Marks of encoders without media here are mere text.
        self._split = re.compile(f"({'|'.join(map(re.escape, self._by_mark))})") if self._by_mark else None
        self._left = {name: list(own) for name, own in counts.items()}
        self._marks = {name: sum(part.count(mark) for t in turns for part in t) for mark, name in self._by_mark.items()}
        for mark, name in self._by_mark.items():
            if self._marks[name] > len(counts[name]):
                what = f"{self._marks[name]} {mark} marks for {len(counts[name])} {encoders[name].medium}s"
                raise ValueError(f"question {turns[0][0]!r} has {what}")

    def unmarked(self) -> list[_Piece]:
        """The media beyond the marks, each after its number."""
        pieces: list[_Piece] = []
        for name, own in self._left.items():
            while len(own) > self._marks[name]:
                pieces += [_Piece(text=f"{len(pieces) // 2 + 1}:"), _Piece(kind="medium", text=name, count=own.pop(0))]
        return pieces

    def placed(self, text: str, *, learned: bool) -> list[_Piece]:
        """`text` with the next media in place of its marks."""
        pieces: list[_Piece] = []
        for at, part in enumerate(self._split.split(text) if self._split else [text]):
            name = self._by_mark[part] if at % 2 else ""
            medium = _Piece(kind="medium", text=name, count=self._left[name].pop(0)) if name else None
            pieces.append(medium or _Piece(text=part, learned=learned))
        return pieces


def _around(piece: str, inside: Sequence[_Piece], system: Sequence[_Piece] = ()) -> list[_Piece]:
    before, after = piece.split(TEXT)
    return [*_marked(before, system), *inside, *_marked(after, system)]


def _marked(text: str, system: Sequence[_Piece] = (), *, learned: bool = False) -> list[_Piece]:
    """The pieces of a template's text, special tokens and the system prompt in place of their marks."""
    pieces: list[_Piece] = []
    for part in _MARKS.split(text):
        if part == SYSTEM:
            pieces += system
        else:
            pieces.append(_Piece(kind=_KINDS.get(part, "text"), text="" if part in _KINDS else part, learned=learned))
    return pieces


_KINDS = {BOS: "bos", EOS: "eos"}
_MARKS = re.compile(f"({'|'.join(map(re.escape, (*_KINDS, SYSTEM)))})")


def build_meta(tokenizer: Tokenizer, encoders: Mapping[str, EncoderSpec], sizes: Sizes, turns: Turns) -> SampleMeta:
    """The metadata of the `Sample` that `build_sample` makes of media of these `sizes` and the same `turns`."""
    laid = layout_tokens(tokenizer, encoders, _counts(encoders, sizes), turns)
    sizes = {name: own for name, own in sizes.items() if len(own)}
    weight = loss_weight(np.asarray(laid.weights, np.float32))
    return SampleMeta.of(encoders, sizes, tokens=len(laid.tokens), weight=weight)


def meta_of(sample: Sample, encoders: Mapping[str, EncoderSpec]) -> SampleMeta:
    """The metadata of a sample that has all its media."""
    sizes = {name: [medium.shape[:-1] for medium in own] for name, own in sample.media.items()}
    return SampleMeta.of(encoders, sizes, tokens=len(sample.tokens), weight=loss_weight(sample.loss_weights))


def disagreement(sample: Sample, meta: SampleMeta, media: Collection[str], encoders: Mapping[str, EncoderSpec]) -> str:
    """How a sample, opened with the media of the encoders `media`, differs from its metadata; "" if it does not.

    A sample that could not be read has loss weights of zero and keeps its metadata.
    """
    found = meta_of(sample, encoders)
    pairs: list[tuple[str, object, object]] = [("tokens", found.tokens, meta.tokens)]
    if found.weight:
        pairs.append(("of loss weight", found.weight, meta.weight))
    for name, spec in encoders.items():
        wanted = len(arrange(spec, meta.grids.get(name, ()), sample.tiled.get(name, ())).index)
        pairs.append((f"{name} placeholders", int(sample.placeholders(name).sum()), wanted))
        if name in media:
            pairs.append((f"{name} patches", found.grids.get(name, ()), meta.grids.get(name, ())))
    return next((f"{own} {what}, not {said}" for what, own, said in pairs if own != said), "")


def loss_weight(weights: np.ndarray) -> float:
    """A sample's part of the loss denominator: all weights but that of the first token, which is never predicted."""
    return float(weights[1:].sum())


def _counts(encoders: Mapping[str, EncoderSpec], sizes: Sizes) -> dict[str, list[int]]:
    return {name: [token_count(encoders[name], [size]) for size in own] for name, own in sizes.items()}


def build_sample(
    tokenizer: Tokenizer,
    encoders: Mapping[str, EncoderSpec],
    media: Mapping[str, Sequence[np.ndarray]],
    turns: Turns,
    *,
    sizes: Sizes | None = None,
    labels: Mapping[str, Sequence[str]] | None = None,
    kind: str = "",
) -> Sample:
    """A `Sample` of media and question–answer turns.

    Args:
      tokenizer: the tokenizer.
      encoders: specs of encoders and generators.
      media: media by encoder, float32, sides multiples of spec.block.
      turns: questions and answers.
      sizes: sizes of all media, where those of some encoders are not opened.
      labels: the text to be read or heard in each medium.
      kind: the kind of the last question.
    """
    opened = {name: [medium.shape[:-1] for medium in own] for name, own in media.items()}
    # The order of encoders is that of the media in the text.
    sizes = {name: opened.get(name, own) for name, own in sizes.items()} if sizes else opened
    laid = layout_tokens(tokenizer, encoders, _counts(encoders, sizes), turns)
    return Sample(
        tokens=np.asarray(laid.tokens, np.int32),
        loss_weights=np.asarray(laid.weights, np.float32),
        media={name: tuple(own) for name, own in media.items() if len(own)},
        question=turns[-1][0],
        answer=turns[-1][1],
        prompt=laid.prompt,
        lead=laid.lead,
        tail=laid.tail,
        kind=kind,
        labels={name: tuple(own) for name, own in (labels or {}).items()},
        media_tokens={name: tokenizer.media_token(name) for name in sizes},
        tiled={
            name: tuple(Tiled(size=(size[0], size[1])) for size in own)
            for name, own in sizes.items()
            if encoders[name].newline
        },
    )


def prompt_only(sample: Sample) -> Sample:
    """`sample` up to where the model answers its last question; decoding continues from here."""
    if len(sample.asked):
        none = np.zeros(len(sample.asked), np.float32)
        return replace(sample, tokens=sample.asked, loss_weights=none, prompt=len(sample.asked))
    return replace(sample, tokens=sample.tokens[: sample.prompt], loss_weights=sample.loss_weights[: sample.prompt])


def swap_media(
    tokenizer: Tokenizer, encoders: Mapping[str, EncoderSpec], samples: Sequence[Sample], encoder: str
) -> list[Sample]:
    """Each sample's last question and answer with the next sample's media of `encoder` (the last takes the first's).

    A model that looks at (or listens to) them must fail on these; one that guesses from the rest will not notice.
    """
    swapped = []
    for own, other in zip(samples, [*samples[1:], *samples[:1]], strict=True):
        # Targets of generators stay as they are too.
        media = {name: (other if name == encoder else own).media.get(name, ()) for name in own.media_tokens}
        labels = {name: (other if name == encoder else own).labels.get(name, ()) for name in own.media_tokens}
        turns = ((own.question, own.answer),)
        swapped.append(build_sample(tokenizer, encoders, media, turns, labels=labels, kind=own.kind))
    return swapped
