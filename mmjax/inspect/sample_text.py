"""The text of samples as the model reads it, with marks around learned text: for a look at templates and masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TextIO

from rich.console import Console
from rich.text import Text

from mmjax.assembly.model import encoder_specs
from mmjax.assembly.samples import open_source
from mmjax.data.loader import tokenizer_of
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import EncoderSpec, Sample
from mmjax.recipe import Recipe

LEARNED, MEDIUM, TEXT = "bold green", "cyan", "dim"
"""Styles on a terminal."""


@dataclass(frozen=True)
class Span:
    """A run of tokens of a sample.

    Attributes:
      text: their text; of media tokens the medium and how many there are, such as "<image \u00d7576>".
      learned: whether the model learns to say them: their loss weight is above 0.
      medium: whether they are placeholders of media.
    """

    text: str
    learned: bool = False
    medium: bool = False


def spans_of(sample: Sample, tokenizer: Tokenizer, encoders: Mapping[str, EncoderSpec]) -> Iterator[Span]:
    """Yields the runs of a sample's tokens that are learned, are not, or stand for media, in order.

    Args:
      sample: the sample, as ``Source.sample`` gives it; its media are not read.
      tokenizer: the tokenizer of its tokens, such as ``plan(recipe).tokenizer``.
      encoders: specs of all encoders and generators by name, as ``encoder_specs(recipe)`` gives them.

    Yields:
      Such as ``Span("<image ×576>", medium=True)`` and ``Span("7", learned=True)``; texts together are the sample's.
    """
    media = {number: "video" for number in sample.video_tokens.values()}
    media |= {number: encoders[name].mark.strip("<>") for name, number in sample.media_tokens.items()}
    kinds = [media.get(int(token)) or bool(w > 0) for token, w in zip(sample.tokens, sample.loss_weights, strict=True)]
    read, text_before = list[int](), ""
    for kind, indices in groupby(range(len(kinds)), key=kinds.__getitem__):
        tokens = sample.tokens[[*indices]].tolist()
        if isinstance(kind, str):
            yield Span(f"<{kind} \u00d7{len(tokens)}>", medium=True)
            continue
        # A token's text depends on those before it, such as the blank before a word.
        read += tokens
        text = tokenizer.shown(read)
        extends = text.startswith(text_before)
        yield Span(text.removeprefix(text_before) if extends else tokenizer.shown(tokens), learned=kind)
        text_before = text


def first_samples(recipe: Recipe, count: int) -> Iterator[tuple[Sample, list[Span]]]:
    """Yields the first ``count`` training samples of a configuration, no medium opened, with their spans.

    A pair for each: the sample, and a list of ``Span``, runs of its tokens that are learned, are not, or are media's.
    recipe: the configuration, as ``load_config(["run.gin"])`` gives it.

    Raises:
      ConfigError: the data cannot be read.
    """
    tokenizer = tokenizer_of(recipe.data.settings, recipe.model.media)
    source, specs = open_source(recipe, split="train"), encoder_specs(recipe)
    for index in range(count):
        sample = source.sample(index, media=())
        yield sample, [*spans_of(sample, tokenizer, specs)]


def write_samples(recipe: Recipe, count: int, file: TextIO | None = None) -> None:
    """Writes the text of the first ``count`` training samples, to standard output unless to ``file``.

    Learned text is green on a terminal, and elsewhere between "[[" and "]]". Raises ConfigError if the data cannot be
    read.

    Args:
      recipe: the configuration, as ``load_config(["run.gin"])`` gives it.
      count: how many samples.
      file: an open text file; ``None`` is standard output.
    """
    console = Console(file=file, soft_wrap=True, highlight=False, markup=False, emoji=False)
    marks = "in green" if console.is_terminal else "between [[ and ]]"
    console.print(f"\ntext of the first samples; what the model learns to say is {marks}")
    for number, (sample, spans) in enumerate(first_samples(recipe, count)):
        learned = int((sample.loss_weights > 0).sum())
        console.print(f"\nsample {number}: {learned} of {len(sample.tokens)} tokens are learned")
        console.print(_styled(spans) if console.is_terminal else _marked(spans))


def _styled(spans: Sequence[Span]) -> Text:
    return Text.assemble(*((s.text, MEDIUM if s.medium else LEARNED if s.learned else TEXT) for s in spans))


def _marked(spans: Sequence[Span]) -> str:
    return "".join(f"[[{span.text}]]" if span.learned else span.text for span in spans)
