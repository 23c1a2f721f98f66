"""Makes a `Sample` of text and media: puts the media in their places in the text, and marks the tokens to learn."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mmjax.data.chat import TEMPLATES, Template, require_writable
from mmjax.data.pieces import DialogueMedia, Marks, Piece, written_pieces
from mmjax.data.processor.template import FolderTemplate
from mmjax.data.tiles import arrange, token_count
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.turns import ASSISTANT, Turn, Turns, as_turns, is_prompt, last_answer, last_question
from mmjax.data.types import EncoderSpec, Sample, SampleMeta, Tiled

Sizes = Mapping[str, Sequence[tuple[int, ...]]]
"""Sizes of media by encoder, without channels; sides are multiples of spec.block."""


@dataclass(frozen=True, kw_only=True)
class Laid:
    """A dialogue as tokens.

    Attributes:
      tokens: token ids, with placeholders expanded.
      weights: the loss weight of each token.
      prompt: number of tokens before those of the last answer; see `last_answer`.
      asked: the tokens that a model is to answer, where they are others than those; see `Sample`.
      before: by encoder, how many of its media come before the last answer.
      answer: the last answer as the template writes it, where it is more than the turn's text.
      lead: text of the template at the start of the answer's tokens: a token may begin with the blank before a word.
      tail: text of the template after the answer, up to the end token.
    """

    tokens: list[int]
    weights: list[float]
    prompt: int
    lead: str
    tail: str
    asked: Sequence[int] = ()
    before: Mapping[str, int] = field(default_factory=dict)
    answer: str = ""


def layout_tokens(
    tokenizer: Tokenizer,
    encoders: Mapping[str, EncoderSpec],
    counts: Mapping[str, Sequence[int]],
    turns: Turns,
    *,
    template: Template | FolderTemplate = TEMPLATES["plain"],
    system: str = "",
    tools: Sequence[Any] = (),
) -> Laid:
    """Encodes a dialogue about media as a whole. A token is learned if it has a character that is to be learned.

    Each mark of an encoder ("<image>", "<recording>") in the turns is replaced by its next medium. Media without a mark
    come before the first question, encoder by encoder, each after its number ("1:"), so that a question can name it
    and its start can be found; a folder's template has no numbers, and a new line between an image and text is its own
    affair. A dialogue begins with bos where the tokenizer has one, and its last answer ends with an end token. Answers,
    and what `template` puts after them, are learned with the weights of their turns; media never are.

    A dialogue without an answer at its end is a prompt: its tokens end where the answer begins, and none is learned.

    Args:
      tokenizer: the tokenizer.
      encoders: specs of encoders and generators.
      counts: LLM tokens of each medium, by encoder.
      turns: the turns.
      template: the text around them.
      system: the system prompt.
      tools: descriptions of the tools that the model may call.

    Raises:
      ValueError: there are more marks than media, or the template does not take the dialogue.
    """
    turns = as_turns(turns)
    if isinstance(template, FolderTemplate):
        return _by_folder(tokenizer, encoders, counts, turns, template, system, tools, asks=is_prompt(turns))
    require_writable(template, turns, tools)
    if is_prompt(turns):
        # A blank before the answer belongs to the answer's first token, as it does where the model learns.
        turns = (*turns, Turn(role=ASSISTANT, text="a"))
        laid = layout_tokens(tokenizer, encoders, counts, turns, template=template, system=system)
        return _prompt(laid)
    media = DialogueMedia(encoders, counts, turns)
    laid = _laid(tokenizer, encoders, written_pieces(media, turns, template, system), begins=True, end=turns[-1].weight)
    return replace(laid, tail=template.ending, before=media.before)


def _prompt(laid: Laid) -> Laid:
    return replace(laid, tokens=laid.tokens[: laid.prompt], weights=[0.0] * laid.prompt)


def _by_folder(
    tokenizer: Tokenizer,
    encoders: Mapping[str, EncoderSpec],
    counts: Mapping[str, Sequence[int]],
    turns: tuple[Turn, ...],
    template: FolderTemplate,
    system: str,
    tools: Sequence[Any],
    *,
    asks: bool,
) -> Laid:
    """A dialogue as a folder's template writes it; see `layout_tokens`. `asks`: whether an answer is still to come."""
    media = DialogueMedia(encoders, counts, turns)
    marks = Marks(tokenizer, media, template)
    written = [replace(turn, text=marks.written(number)) for number, turn in enumerate(turns)]
    rendered = template.render(written, system=system, tools=tools, asks=asks)
    laid = _laid(tokenizer, encoders, marks.pieces(rendered), begins=template.begins, end=turns[-1].learned)
    if asks:
        return replace(_prompt(laid), lead=rendered.lead, tail=rendered.tail, before=media.before)
    lead = laid.lead
    laid = replace(laid, lead=rendered.lead, tail=rendered.tail, answer=rendered.said, before=media.before)
    # Tokens before an answer depend on it in two ways alone: they reach into it, or they are a run of blanks.
    is_joined = bool(lead) or rendered.text[: rendered.answer][-2:].isspace()
    if last_answer(turns) and (rendered.apart or is_joined):
        before = {name: sizes[: laid.before.get(name, 0)] for name, sizes in counts.items()}
        before = {name: sizes for name, sizes in before.items() if sizes}
        cut = turns[: last_answer(turns)]
        asked = _by_folder(tokenizer, encoders, before, cut, template, system, tools, asks=True).tokens
        if asked != laid.tokens[: laid.prompt]:
            return replace(laid, asked=asked)
    return replace(laid, lead=lead + rendered.lead)


def _laid(
    tokenizer: Tokenizer, encoders: Mapping[str, EncoderSpec], pieces: Sequence[Piece], *, begins: bool, end: float
) -> Laid:
    """The pieces of a dialogue as tokens.

    Args:
      tokenizer: the tokenizer.
      encoders: specs of encoders and generators.
      pieces: the pieces.
      begins: whether bos is put in front where they do not begin with it.
      end: the loss weight of an end token that is put behind them.
    """
    coded = tokenizer.encode_whole([piece.coded(tokenizer) for piece in pieces])
    starts_N, ends_N = coded.spans[:, 0], np.maximum(coded.spans[:, 0] + 1, coded.spans[:, 1])
    starts_N, ends_N = np.minimum([starts_N, ends_N], len(coded.text))
    weights_N = np.zeros(len(coded.ids))
    for weight in sorted({piece.weight for piece in pieces if piece.weight}):
        is_learned = [piece.weight == weight for piece in pieces]
        to_learn = np.cumsum([0, *np.repeat(is_learned, np.diff(coded.starts))])
        weights_N[to_learn[ends_N] > to_learn[starts_N]] = weight
    copies_N = np.ones(len(coded.ids), int)
    media = [piece for piece in pieces if piece.kind == "medium"]
    places = np.isin(coded.ids, [tokenizer.media_token(name) for name in encoders])
    if np.count_nonzero(places) != len(media):
        raise ValueError("the text holds a token that stands for an image or a recording")
    copies_N[places] = [p.count for p in media]
    # The last answer begins with the first token that reaches beyond this character.
    begin = int(coded.starts[next(at for at, piece in enumerate(pieces) if piece.kind == "answer")])
    first = int(np.count_nonzero(np.logical_and.accumulate(ends_N <= begin)))
    tokens, weights = np.repeat(coded.ids, copies_N).tolist(), np.repeat(weights_N, copies_N).tolist()
    prompt = int(copies_N[:first].sum())
    if begins and tokenizer.bos is not None and tokens[:1] != [tokenizer.bos]:
        tokens, weights, prompt = [tokenizer.bos, *tokens], [0.0, *weights], prompt + 1
    if not set(tokens[prompt:]) & set(tokenizer.stops):
        tokens, weights = [*tokens, tokenizer.eos], [*weights, end]
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


def build_meta(tokenizer: Tokenizer, encoders: Mapping[str, EncoderSpec], sizes: Sizes, turns: Turns) -> SampleMeta:
    """The metadata of the `Sample` that `build_sample` makes of media of these `sizes` and the same `turns`."""
    laid = layout_tokens(tokenizer, encoders, _counts(encoders, sizes), turns)
    sizes = {name: own for name, own in sizes.items() if len(own)}
    weight = loss_weight(np.asarray(laid.weights, np.float32))
    return SampleMeta.of(encoders, sizes, tokens=len(laid.tokens), weight=weight)


def meta_of(sample: Sample, encoders: Mapping[str, EncoderSpec]) -> SampleMeta:
    """The metadata of a sample that has all its media."""
    sizes = {name: [medium.shape[:-1] for medium in own] for name, own in sample.media.items()}
    learned, weight = int(np.count_nonzero(sample.loss_weights)), loss_weight(sample.loss_weights)
    return SampleMeta.of(encoders, sizes, tokens=len(sample.tokens), weight=weight, learned=learned)


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
    turns = as_turns(turns)
    opened = {name: [medium.shape[:-1] for medium in own] for name, own in media.items()}
    # The order of encoders is that of the media in the text.
    sizes = {name: opened.get(name, own) for name, own in sizes.items()} if sizes else opened
    laid = layout_tokens(tokenizer, encoders, _counts(encoders, sizes), turns)
    return Sample(
        tokens=np.asarray(laid.tokens, np.int32),
        loss_weights=np.asarray(laid.weights, np.float32),
        media={name: tuple(own) for name, own in media.items() if len(own)},
        question=last_question(turns),
        answer=turns[last_answer(turns)].text,
        prompt=laid.prompt,
        prompt_media=laid.before,
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
    tokens = sample.asked if len(sample.asked) else sample.tokens[: sample.prompt]
    media = {name: arrays[: sample.prompt_media.get(name, len(arrays))] for name, arrays in sample.media.items()}
    tiled = {name: _tiled(images, len(media.get(name, ()))) for name, images in sample.tiled.items()}
    none = np.zeros(len(tokens), np.float32)
    return replace(sample, tokens=tokens, loss_weights=none, prompt=len(tokens), media=media, tiled=tiled)


def _tiled(images: Sequence[Tiled], count: int) -> tuple[Tiled, ...]:
    """The images that the first `count` media are of: each is a medium, and its tiles are more of them."""
    ends = np.cumsum([1 + image.grid[0] * image.grid[1] for image in images])
    return tuple(images[: int(np.count_nonzero(ends <= count))])


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
