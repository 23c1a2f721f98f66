"""From text and images to a `Sample`: where the images go in the text, and which tokens are learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import EncoderSpec, Sample

IMAGE_MARK = "<image>"


def layout_tokens(
    tokenizer: Tokenizer, encoder: str, image_tokens: Sequence[int], turns: Sequence[tuple[str, str]]
) -> tuple[list[int], list[float], int]:
    """Tokens, loss weights and the length of the last prompt of a dialogue about images.

    image_tokens: LLM tokens of each image. An image takes the place of each "<image>" in the first question; those
    without a mark come first, each after its number ("1:"), so that a question can name it and its start can be found.
    A turn is `question answer eos`; only answers and their eos are learned.
    """
    mark = tokenizer.media_token(encoder)
    pieces = turns[0][0].split(IMAGE_MARK)
    if len(pieces) - 1 > len(image_tokens):
        marks = len(pieces) - 1
        raise ValueError(f"question {turns[0][0]!r} has {marks} {IMAGE_MARK} marks for {len(image_tokens)} images")
    before = len(image_tokens) - (len(pieces) - 1)
    texts = [f"{number + 1}:" for number in range(before)] + pieces
    tokens = [tokenizer.bos]
    for text, count in zip(texts, [*image_tokens, 0], strict=True):
        tokens += tokenizer.encode(text) + [mark] * count
    weights, prompt = [0.0] * len(tokens), 0
    for number, (question, answer) in enumerate(turns):
        opening = tokenizer.encode((question if number else "") + " ")
        closing = [*tokenizer.encode(answer), tokenizer.eos]
        prompt = len(tokens) + len(opening)
        tokens += opening + closing
        weights += [0.0] * len(opening) + [1.0] * len(closing)
    return tokens, weights, prompt


def build_sample(
    tokenizer: Tokenizer,
    encoder: str,
    spec: EncoderSpec,
    images: Sequence[np.ndarray],
    turns: Sequence[tuple[str, str]],
    labels: Sequence[str] = (),
) -> Sample:
    """A `Sample` of `images` ([h, w, C] float32 each, h and w multiples of spec.block) and question–answer `turns`."""
    counts = [spec.tokens(*image.shape[:2]) for image in images]
    tokens, weights, prompt = layout_tokens(tokenizer, encoder, counts, turns)
    return Sample(
        tokens=np.asarray(tokens, np.int32),
        loss_weights=np.asarray(weights, np.float32),
        media={encoder: tuple(images)} if images else {},
        question=turns[-1][0],
        answer=turns[-1][1],
        prompt=prompt,
        labels=tuple(labels),
        media_tokens={encoder: tokenizer.media_token(encoder)},
    )


def prompt_only(sample: Sample) -> Sample:
    """`sample` up to where the model answers its last question; decoding continues from here."""
    return replace(sample, tokens=sample.tokens[: sample.prompt], loss_weights=sample.loss_weights[: sample.prompt])


def swap_images(tokenizer: Tokenizer, encoder: str, spec: EncoderSpec, samples: Sequence[Sample]) -> list[Sample]:
    """Each sample's last question and answer with the images of the next sample (the last takes the first's).

    A model that looks at the images must fail on these; one that guesses from the text will not notice.
    """
    swapped = []
    for own, other in zip(samples, [*samples[1:], *samples[:1]], strict=True):
        turns = ((own.question, own.answer),)
        swapped.append(build_sample(tokenizer, encoder, spec, other.media.get(encoder, ()), turns, other.labels))
    return swapped
