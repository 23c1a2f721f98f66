"""From text and media to a `Sample`: where the media go in the text, and which tokens are learned."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import EncoderSpec, Sample, SampleMeta

Turns = Sequence[tuple[str, str]]
"""Questions and answers of a dialogue, in order."""
Sizes = Mapping[str, Sequence[tuple[int, ...]]]
"""Of media by encoder, without channels: multiples of spec.block."""


def layout_tokens(
    tokenizer: Tokenizer, encoders: Mapping[str, EncoderSpec], counts: Mapping[str, Sequence[int]], turns: Turns
) -> tuple[list[int], list[float], int]:
    """Tokens, loss weights and the length of the last prompt of a dialogue about media.

    counts: LLM tokens of each medium, by encoder. A medium takes the place of each mark of its encoder ("<image>",
    "<recording>") in the first question; those without a mark come first, encoder by encoder, each after its number
    ("1:"), so that a question can name it and its start can be found.
    A turn is `question answer eos`; only answers and their eos are learned.
    """
    texts, places = _pieces(encoders, counts, turns[0][0])
    tokens = [tokenizer.bos]
    for text, (name, count) in zip(texts, [*places, ("", 0)], strict=True):
        tokens += tokenizer.encode(text) + [tokenizer.media_token(name)] * count if count else tokenizer.encode(text)
    weights, prompt = [0.0] * len(tokens), 0
    for number, (question, answer) in enumerate(turns):
        opening = tokenizer.encode((question if number else "") + " ")
        closing = [*tokenizer.encode(answer), tokenizer.eos]
        prompt = len(tokens) + len(opening)
        tokens += opening + closing
        weights += [0.0] * len(opening) + [1.0] * len(closing)
    return tokens, weights, prompt


def _pieces(
    encoders: Mapping[str, EncoderSpec], counts: Mapping[str, Sequence[int]], question: str
) -> tuple[list[str], list[tuple[str, int]]]:
    """The texts between media (one more than there are media), and each medium's encoder and LLM tokens."""
    by_mark = {encoders[name].mark: name for name in counts}
    # Marks of encoders without media here are mere text.
    found = re.split(f"({'|'.join(map(re.escape, by_mark))})", question) if by_mark else [question]
    marked = [by_mark[mark] for mark in found[1::2]]
    left = {name: list(own) for name, own in counts.items()}
    texts: list[str] = []
    places: list[tuple[str, int]] = []
    for name, own in left.items():
        marks = marked.count(name)
        if marks > len(own):
            spec = encoders[name]
            raise ValueError(f"question {question!r} has {marks} {spec.mark} marks for {len(own)} {spec.medium}s")
        while len(own) > marks:
            texts.append(f"{len(texts) + 1}:")
            places.append((name, own.pop(0)))
    return texts + found[::2], places + [(name, left[name].pop(0)) for name in marked]


def build_meta(tokenizer: Tokenizer, encoders: Mapping[str, EncoderSpec], sizes: Sizes, turns: Turns) -> SampleMeta:
    """The metadata of the `Sample` that `build_sample` makes of media of these `sizes` and the same `turns`."""
    tokens, weights, _ = layout_tokens(tokenizer, encoders, _counts(encoders, sizes), turns)
    grids = {name: tuple(encoders[name].grid(*size) for size in own) for name, own in sizes.items() if len(own)}
    return SampleMeta(tokens=len(tokens), weight=loss_weight(np.asarray(weights, np.float32)), grids=grids)


def meta_of(sample: Sample, encoders: Mapping[str, EncoderSpec]) -> SampleMeta:
    """The metadata of a sample that has all its media."""
    grids = {
        name: tuple(encoders[name].grid(*medium.shape[:-1]) for medium in own) for name, own in sample.media.items()
    }
    return SampleMeta(tokens=len(sample.tokens), weight=loss_weight(sample.loss_weights), grids=grids)


def disagreement(sample: Sample, meta: SampleMeta, media: Collection[str], encoders: Mapping[str, EncoderSpec]) -> str:
    """In what a sample with the media of the encoders `media` is not what its metadata say; "" where it is.

    A sample that could not be read has loss weights of zero and keeps its metadata.
    """
    found = meta_of(sample, encoders)
    pairs: list[tuple[str, object, object]] = [("tokens", found.tokens, meta.tokens)]
    if found.weight:
        pairs.append(("of loss weight", found.weight, meta.weight))
    for name, spec in encoders.items():
        patches = sum(meta.patches.get(name, ()))
        pairs.append((f"{name} placeholders", int(sample.placeholders(name).sum()), patches // spec.patches_per_token))
        if name in media:
            pairs.append((f"{name} patches", found.grids.get(name, ()), meta.grids.get(name, ())))
    return next((f"{own} {what}, not {said}" for what, own, said in pairs if own != said), "")


def loss_weight(weights: np.ndarray) -> float:
    """What a sample adds to the denominator: the first token is predicted from nothing."""
    return float(weights[1:].sum())


def _counts(encoders: Mapping[str, EncoderSpec], sizes: Sizes) -> dict[str, list[int]]:
    return {name: [encoders[name].tokens(*size) for size in own] for name, own in sizes.items()}


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
    """A `Sample` of media by encoder (float32, sides multiples of spec.block) and question–answer `turns`.

    sizes: of all media, for encoders whose own are not opened. kind: of the last question. labels: what is to be read
    or heard in each medium.
    """
    opened = {name: [medium.shape[:-1] for medium in own] for name, own in media.items()}
    # The order of encoders is that of the media in the text.
    sizes = {name: opened.get(name, own) for name, own in sizes.items()} if sizes else opened
    tokens, weights, prompt = layout_tokens(tokenizer, encoders, _counts(encoders, sizes), turns)
    return Sample(
        tokens=np.asarray(tokens, np.int32),
        loss_weights=np.asarray(weights, np.float32),
        media={name: tuple(own) for name, own in media.items() if len(own)},
        question=turns[-1][0],
        answer=turns[-1][1],
        prompt=prompt,
        kind=kind,
        labels={name: tuple(own) for name, own in (labels or {}).items()},
        media_tokens={name: tokenizer.media_token(name) for name in sizes},
    )


def prompt_only(sample: Sample) -> Sample:
    """`sample` up to where the model answers its last question; decoding continues from here."""
    return replace(sample, tokens=sample.tokens[: sample.prompt], loss_weights=sample.loss_weights[: sample.prompt])


def swap_media(
    tokenizer: Tokenizer, encoders: Mapping[str, EncoderSpec], samples: Sequence[Sample], encoder: str
) -> list[Sample]:
    """Each sample's last question and answer with the next sample's media of `encoder` (the last takes the first's).

    A model that looks at (or listens to) them must fail on these; one that guesses from the rest will not notice.
    """
    swapped = []
    for own, other in zip(samples, [*samples[1:], *samples[:1]], strict=True):
        # What a generator is to draw stays too.
        media = {name: (other if name == encoder else own).media.get(name, ()) for name in own.media_tokens}
        labels = {name: (other if name == encoder else own).labels.get(name, ()) for name in own.media_tokens}
        turns = ((own.question, own.answer),)
        swapped.append(build_sample(tokenizer, encoders, media, turns, labels=labels, kind=own.kind))
    return swapped
