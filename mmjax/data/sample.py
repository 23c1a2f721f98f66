"""Makes a `Sample` of text and media: puts the media in their places in the text, and weights the tokens to learn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from mmjax.data.chat import TEMPLATES, Template, require_writable
from mmjax.data.derived import in_text, with_media
from mmjax.data.pieces import Count, DialogueMedia, Marks, Piece, written_pieces
from mmjax.data.processor.template import FolderTemplate
from mmjax.data.tiles import arrange, token_count
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.turns import ASSISTANT, Turn, Turns, as_turns, is_prompt, last_answer, last_question
from mmjax.data.types import EncoderSpec, Sample, SampleMeta, Tiled

Sizes = Mapping[str, Sequence[tuple[int, ...]]]
"""Sizes of media by encoder, without channels; sides are multiples of spec.block."""


@dataclass(frozen=True, kw_only=True)
class EncodedDialogue:
    """A dialogue as tokens.

    Attributes:
      tokens: token ids, with placeholders expanded.
      weights: the loss weight of each token.
      prompt: number of tokens before the last answer; see `last_answer`.
      prompt_tokens: the tokens of the prompt, where they differ from the first `prompt` tokens; see `Sample`.
      before: number of media before the last answer, by encoder.
      answer: the last answer as the template writes it, where it is more than the turn's text.
      lead: text of the template at the start of the answer's tokens: a token may begin with the blank before a word.
      tail: text of the template after the answer, up to the end token.
    """

    tokens: list[int]
    weights: list[float]
    prompt: int
    lead: str
    tail: str
    prompt_tokens: Sequence[int] = ()
    before: Mapping[str, int] = field(default_factory=dict)
    answer: str = ""


def encode_dialogue(
    tokenizer: Tokenizer,
    encoders: Mapping[str, EncoderSpec],
    counts: Mapping[str, Sequence[Count]],
    turns: Turns,
    *,
    template: Template | FolderTemplate = TEMPLATES["plain"],
    system: str = "",
    tools: Sequence[Any] = (),
    makers: Sequence[str] = (),
) -> EncodedDialogue:
    """Encodes a dialogue about media as a whole. A token is learned if it contains a learned character.

    Each mark of an encoder ("<image>", "<recording>") in the turns is replaced by the next medium of that encoder, and
    "<video>" by the next video: a temporal patch behind the other, its time before each.
    Media without a mark come before the first question, encoder by encoder, each after its number ("1:"), so that a
    question can name it. A folder's template writes no numbers, and decides about line breaks around images. A dialogue
    begins with bos if the tokenizer has one, and its last answer ends with an end token. Answers, and the text of
    `template` after them, are learned with the weights of their turns; media are never learned.

    A dialogue without an answer at its end is a prompt: its tokens end where the answer begins, and none is learned.

    Args:
      tokenizer: the tokenizer, such as `make_tokenizer("", ["vision"])`.
      encoders: specs of encoders and generators, by name.
      counts: number of LLM tokens of each medium, by encoder: {"vision": [64, 64]}; a `Timed` for a video.
      turns: `Turn`s in order; a pair of texts is a question and its answer. There is at least one.
      template: writes the text around the turns, such as TEMPLATES["vicuna"].
      system: the system prompt; "" for none.
      tools: descriptions, as JSON objects, of the tools that the model may call; only a folder's template writes them.
      makers: the generator of each medium that is to be made, in the order of their marks; () for one generator.

    Returns:
      `.tokens` (ids, a placeholder for each token of a medium), `.weights` (the loss weight of each), `.prompt` (number
      of tokens before the last answer), and texts of the template, see `EncodedDialogue`.

    Raises:
      ValueError: there are more marks than media, or the template does not take the dialogue.
    """
    turns = as_turns(turns)
    if isinstance(template, FolderTemplate):
        encode = partial(_encode_by_folder, tokenizer, encoders, template=template, system=system, tools=tools)
        return encode(counts, turns, makers=makers, generation_prompt=is_prompt(turns))
    require_writable(template, turns, tools)
    if is_prompt(turns):
        # A blank before the answer belongs to the answer's first token, as in training.
        turns = (*turns, Turn(role=ASSISTANT, text="a"))
        encoded = encode_dialogue(tokenizer, encoders, counts, turns, template=template, system=system, makers=makers)
        return _prompt(encoded)
    media = DialogueMedia(encoders, counts, turns, makers)
    pieces = written_pieces(media, turns, template, system)
    encoded = _encode_pieces(tokenizer, encoders, pieces, begins=True, end=turns[-1].weight)
    return replace(encoded, tail=template.ending, before=media.before)


def _prompt(encoded: EncodedDialogue) -> EncodedDialogue:
    """The part of a dialogue before its last answer, as a prompt."""
    return replace(encoded, tokens=encoded.tokens[: encoded.prompt], weights=[0.0] * encoded.prompt)


def _encode_by_folder(
    tokenizer: Tokenizer,
    encoders: Mapping[str, EncoderSpec],
    counts: Mapping[str, Sequence[Count]],
    turns: tuple[Turn, ...],
    *,
    template: FolderTemplate,
    system: str,
    tools: Sequence[Any],
    makers: Sequence[str],
    generation_prompt: bool,
) -> EncodedDialogue:
    """Encodes a dialogue with a folder's template; see `encode_dialogue` and `FolderTemplate.render`."""
    media = DialogueMedia(encoders, counts, turns, makers)
    marks = Marks(tokenizer, media, template)
    written = [replace(turn, text=marks.written(number)) for number, turn in enumerate(turns)]
    rendered = template.render(written, system=system, tools=tools, generation_prompt=generation_prompt)
    pieces = marks.pieces(rendered)
    encoded = _encode_pieces(tokenizer, encoders, pieces, begins=template.begins, end=turns[-1].learned)
    if generation_prompt:
        return replace(_prompt(encoded), lead=rendered.lead, tail=rendered.tail, before=media.before)
    lead = encoded.lead
    encoded = replace(encoded, lead=rendered.lead, tail=rendered.tail, answer=rendered.answer_text, before=media.before)
    # Tokens before an answer depend on it in only two ways: they reach into it, or they are a run of blanks.
    is_joined = bool(lead) or rendered.text[: rendered.answer][-2:].isspace()
    if last_answer(turns) and (rendered.apart or is_joined):
        before = {name: sizes[: encoded.before.get(name, 0)] for name, sizes in counts.items()}
        before = {name: sizes for name, sizes in before.items() if sizes}
        cut = turns[: last_answer(turns)]
        encode = partial(_encode_by_folder, tokenizer, encoders, template=template, system=system, tools=tools)
        first = makers[: sum(len(before.get(name, ())) for name in dict.fromkeys(makers))]
        prompt_tokens = encode(before, cut, makers=first, generation_prompt=True).tokens
        if prompt_tokens != encoded.tokens[: encoded.prompt]:
            return replace(encoded, prompt_tokens=prompt_tokens)
    return replace(encoded, lead=lead + rendered.lead)


def _encode_pieces(
    tokenizer: Tokenizer, encoders: Mapping[str, EncoderSpec], pieces: Sequence[Piece], *, begins: bool, end: float
) -> EncodedDialogue:
    """Encodes the pieces of a dialogue.

    Args:
      tokenizer: the tokenizer.
      encoders: specs of encoders and generators.
      pieces: the pieces.
      begins: whether to put bos in front if the pieces do not begin with it.
      end: the loss weight of an end token, if one is put after the pieces.
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
    shown = [token(name) for name in in_text(encoders) for token in (tokenizer.media_token, tokenizer.video_token)]
    places = np.isin(coded.ids, shown)
    if np.count_nonzero(places) != len(media):
        raise ValueError("the text holds a token that stands for an image, a video or a recording")
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
    return EncodedDialogue(tokens=tokens, weights=weights, prompt=prompt, lead=lead, tail="")


def answer_text(tokenizer: Tokenizer, sample: Sample, tokens: Sequence[int]) -> str:
    """The text of a model's answer to `sample`, up to the template's text after an answer.

    tokens: the ids with which the model continues the prompt, without the prompt; ids of `tokenizer.stops` in them
    become no text. tokenizer: the one that encoded `sample`.
    """
    tokens, stop = list(tokens), sample.tail.strip()
    ending = tokenizer.token(stop) if stop else None
    tokens = tokens[: tokens.index(ending)] if ending in tokens else tokens
    prompt = sample.tokens[: sample.prompt].tolist()
    # A token's text depends on the tokens before it: at the start of a text its blank may be missing.
    before, full_text = tokenizer.decode(prompt), tokenizer.decode([*prompt, *tokens])
    text = full_text[len(before) :] if full_text.startswith(before) else tokenizer.decode(tokens)
    # A tokenizer that keeps no blanks writes one between words.
    blank = sample.lead.isspace() and text[:1].isspace()
    text = text[1:] if blank and not text.startswith(sample.lead) else text.removeprefix(sample.lead)
    return text.partition(stop)[0] if stop else text.removesuffix(sample.tail)


def build_meta(tokenizer: Tokenizer, encoders: Mapping[str, EncoderSpec], sizes: Sizes, turns: Turns) -> SampleMeta:
    """The metadata of the `Sample` that `build_sample` makes of media of these `sizes` and the same `turns`.

    Args:
      tokenizer: the tokenizer, such as `make_tokenizer("", ["vision"])`.
      encoders: specs of encoders and generators, by name.
      sizes: by encoder, the size of each medium without channels, multiples of spec.block: {"vision": [(224, 224)]}.
      turns: as in `build_sample`, such as [("what is it?", "a cat")].

    Raises:
      ValueError: there are more marks than media.
    """
    encoded = encode_dialogue(tokenizer, encoders, _counts(encoders, sizes), turns)
    sizes = {name: sizes_of for name, sizes_of in sizes.items() if len(sizes_of)}
    weight = loss_weight(np.asarray(encoded.weights, np.float32))
    return SampleMeta.of(encoders, sizes, tokens=len(encoded.tokens), weight=weight)


def meta_of(sample: Sample, encoders: Mapping[str, EncoderSpec]) -> SampleMeta:
    """The metadata of a sample that has all its media, `learned` (number of tokens with a loss weight) among them.

    encoders: specs of encoders and generators, by name.
    """
    sizes = {name: [medium.shape[:-1] for medium in arrays] for name, arrays in sample.media.items()}
    learned, weight = int(np.count_nonzero(sample.loss_weights)), loss_weight(sample.loss_weights)
    references = {
        name: [[picture.shape[:-1] for picture in pictures] for pictures in of_media]
        for name, of_media in sample.references.items()
    }
    return SampleMeta.of(
        encoders, sizes, tokens=len(sample.tokens), weight=weight, learned=learned, references=references
    )


def disagreement(sample: Sample, meta: SampleMeta, media: Collection[str], encoders: Mapping[str, EncoderSpec]) -> str:
    """The first difference between a sample, opened with the media of the encoders `media`, and its metadata, in words.

    "63 vision placeholders, not 64": the sample has 63, and `meta` says 64. "" if there is none. A sample that could
    not be read has loss weights of zero and keeps its metadata. encoders: specs of encoders and generators, by name.
    """
    actual, encoders = meta_of(sample, encoders), with_media(encoders)
    pairs: list[tuple[str, object, object]] = [("tokens", actual.tokens, meta.tokens)]
    if actual.weight:
        pairs.append(("of loss weight", actual.weight, meta.weight))
    for name, spec in encoders.items():
        if spec.in_text:
            placeholders = len(arrange(spec, meta.grids.get(name, ()), sample.tiled.get(name, ())).index)
            pairs.append((f"{name} placeholders", int(sample.placeholders(name).sum()), placeholders))
        if name in media:
            pairs.append((f"{name} patches", actual.grids.get(name, ()), meta.grids.get(name, ())))
            followed = actual.references.get(name, ()), meta.references.get(name, ())
            pairs.append((f"{name} patches of references", *followed))
    return next((f"{value} {unit}, not {expected}" for unit, value, expected in pairs if value != expected), "")


def loss_weight(weights: np.ndarray) -> float:
    """A sample's part of the loss denominator: the sum of the weights of all tokens except the first.

    The first token is never predicted. weights: float [n], the weight of each token, such as `Sample.loss_weights`.
    """
    return float(weights[1:].sum())


def _counts(encoders: Mapping[str, EncoderSpec], sizes: Sizes) -> dict[str, list[int]]:
    """Number of LLM tokens of each medium that has a place in the text, by encoder."""
    return {
        name: [token_count(encoders[name], [size]) for size in sizes_of]
        for name, sizes_of in sizes.items()
        if encoders[name].in_text
    }


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
      tokenizer: the tokenizer, such as `make_tokenizer("", ["vision"])`.
      encoders: specs of encoders and generators, by name.
      media: media by encoder, float32, sides multiples of spec.block: {"vision": [image]}, images [h, w, C].
      turns: pairs of a question and its answer, or `Turn`s, with an answer at the end: [("what is <image>?", "a cat")].
        Media without a mark, such as "<image>", come before the first question.
      sizes: sizes of all media by encoder, without channels, if some encoders' media are not opened; its order of
        encoders is that of the text.
      labels: by encoder, the text that can be read or heard in each medium.
      kind: the kind of the last question.

    Raises:
      ValueError: there are more marks than media.
    """
    turns = as_turns(turns)
    opened = {name: [medium.shape[:-1] for medium in arrays] for name, arrays in media.items()}
    # The order of encoders is the order of the media in the text.
    sizes = {name: opened.get(name, unopened) for name, unopened in sizes.items()} if sizes else opened
    encoded = encode_dialogue(tokenizer, encoders, _counts(encoders, sizes), turns)
    return Sample(
        tokens=np.asarray(encoded.tokens, np.int32),
        loss_weights=np.asarray(encoded.weights, np.float32),
        media={name: tuple(arrays) for name, arrays in media.items() if len(arrays)},
        question=last_question(turns),
        answer=turns[last_answer(turns)].text,
        prompt=encoded.prompt,
        # An answer that is not there yet is not spoken.
        prompt_media={**encoded.before, **dict.fromkeys((name for name in sizes if encoders[name].codes), 0)},
        lead=encoded.lead,
        tail=encoded.tail,
        kind=kind,
        labels={name: tuple(texts) for name, texts in (labels or {}).items()},
        media_tokens={name: tokenizer.media_token(name) for name in sizes if encoders[name].in_text},
        video_tokens={name: tokenizer.video_token(name) for name in sizes if encoders[name].in_text},
        tiled={
            name: tuple(Tiled(size=(size[0], size[1])) for size in sizes_of)
            for name, sizes_of in sizes.items()
            if encoders[name].newline
        },
    )


def prompt_only(sample: Sample) -> Sample:
    """A copy of `sample` that ends where the answer to its last question begins, and decoding.

    It has no media behind that place, and its loss weights are 0. `answer` and other texts stay.
    """
    tokens = sample.prompt_tokens if len(sample.prompt_tokens) else sample.tokens[: sample.prompt]
    media = {name: arrays[: sample.prompt_media.get(name, len(arrays))] for name, arrays in sample.media.items()}
    counts = {name: len(arrays) for name, arrays in media.items()}
    references = {name: of_media[: counts.get(name, 0)] for name, of_media in sample.references.items()}
    tiled = {
        name: images[: _complete((1 + math.prod(image.grid) for image in images), counts.get(name, 0))]
        for name, images in sample.tiled.items()
    }
    times = {
        name: entries[: _complete((max(1, len(entry)) for entry in entries), counts.get(name, 0))]
        for name, entries in sample.video_times.items()
    }
    weights, prompt = np.zeros(len(tokens), np.float32), len(tokens)
    return replace(
        sample,
        tokens=tokens,
        loss_weights=weights,
        prompt=prompt,
        media=media,
        references=references,
        tiled=tiled,
        video_times=times,
    )


def drawing_prompt(sample: Sample) -> Sample:
    """A copy of `sample` to draw from: its prompt, as `prompt_only` gives it, with loss weights of 0.

    A sample with a picture in its last answer stays whole. The picture depends on the text before it alone.
    """
    makes = [sample.placeholders(name)[sample.prompt :] for name in sample.noise]
    if not any(places.any() for places in makes):
        return prompt_only(sample)
    return replace(sample, loss_weights=np.zeros(len(sample.tokens), np.float32))


def is_wordless(sample: Sample) -> bool:
    """Whether the answer to `sample` is a picture alone, without a word."""
    return not sample.answer and bool(sample.noise)


def _complete(media: Iterable[int], count: int) -> int:
    """The number of images and videos, of so many media each, whose media are all among the first `count`."""
    return sum(end <= count for end in itertools.accumulate(media))


def swap_media(
    tokenizer: Tokenizer, encoders: Mapping[str, EncoderSpec], samples: Sequence[Sample], encoder: str
) -> list[Sample]:
    """The last question and answer of each sample, with the next sample's media of `encoder` (cyclically).

    A model that uses these media must fail on such samples; one that guesses without them does not notice. Media of
    other encoders stay. Media without a mark in the question come before it.

    Args:
      tokenizer: the tokenizer of the samples.
      encoders: specs of encoders and generators, by name.
      samples: samples with all their media.
      encoder: the name of the encoder, such as "vision".

    Raises:
      ValueError: a question has more marks than media.
    """
    swapped = []
    for sample, following in zip(samples, [*samples[1:], *samples[:1]], strict=True):
        # Targets of generators are not swapped either.
        media = {name: (following if name == encoder else sample).media.get(name, ()) for name in sample.media_tokens}
        labels = {name: (following if name == encoder else sample).labels.get(name, ()) for name in sample.media_tokens}
        turns = ((sample.question, sample.answer),)
        swapped.append(build_sample(tokenizer, encoders, media, turns, labels=labels, kind=sample.kind))
    return swapped
