"""Encoders whose media follow from those of other modules.

An encoder of latents sees the pictures that a generator learns to make, and behind each those that it is made from.

An encoder of another encoder's tokens has a segment for each sample with media: the tokens of all of these, one medium
after another. Its tokens take the places of the media in the text, one for each token that it reads.

Legend: N tokens of a segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from mmjax.attention.language import Rules
from mmjax.data.types import EncoderSpec, SampleMeta, WorstCase

MEDIA_RULES = Rules.parse("all sees all before; all sees all in item")
"""The mask rules of such encoders: a token sees the tokens of its own medium, and of media before it."""


def with_media(specs: Mapping[str, EncoderSpec]) -> dict[str, EncoderSpec]:
    """The specs of encoders and generators that have media of their own, in their order.

    Left out are those whose media follow from other modules'. specs: by name, {"vision": EncoderSpec(…)}.
    """
    return {name: spec for name, spec in specs.items() if not spec.follows}


def in_text(specs: Mapping[str, EncoderSpec]) -> dict[str, EncoderSpec]:
    """The specs of encoders and generators whose media have placeholders in the text, in their order.

    Left out are encoders that read other encoders' tokens, and generators of codes. specs: by name, {"vision":
    EncoderSpec(…)}.
    """
    return {name: spec for name, spec in specs.items() if spec.in_text}


def first_encoder(specs: Mapping[str, EncoderSpec], name: str) -> str:
    """The encoder of the media whose tokens reach the encoder ``name``; itself if it has media of its own.

    "vision" for a "resampler" whose spec has ``reads=(("vision", ""),)``. specs: by name, with all encoders of the
    chain.
    """
    while specs[name].derived:
        name = specs[name].reads[0][0]
    return name


def token_counts(spec: EncoderSpec, grids: Sequence[tuple[int, ...]]) -> list[int]:
    """Number of tokens of each medium, from its patches along every axis.

    [64] for ``grids`` [(16, 16)] if ``spec.merge`` is 2.
    """
    return [spec.queries or prod(grid) // spec.patches_per_token for grid in grids]


def completed(meta: SampleMeta, specs: Mapping[str, EncoderSpec]) -> SampleMeta:
    """The metadata with a segment for each encoder of another one's tokens; ``meta`` itself if there is nothing to add.

    A medium of such an encoder is the sample's media as one: its "patches" are the tokens of the first encoder. So
    ``grids["resampler"]`` is ((128,),) for two images of 64 tokens. A sample without media of the first encoder gets
    none.

    Media of an encoder of latents are in pixels of latents, on its canvases.

    specs: all encoders and generators by name, {"vision": EncoderSpec(…), "resampler": EncoderSpec(…)}.
    """
    grids, canvases = dict(meta.grids), dict(meta.canvases)
    for name, spec in specs.items():
        if spec.derived and name not in grids and (media := meta.grids.get(first := first_encoder(specs, name))):
            grids[name] = ((sum(token_counts(specs[first], media)),),)
        if spec.encodes in meta.grids and name not in grids:
            grids[name] = _encoded(meta, spec.encodes, specs[spec.encodes].patch)
            canvases[name] = tuple(map(spec.canvas, grids[name]))
    return meta if len(grids) == len(meta.grids) else replace(meta, grids=grids, canvases=canvases)


def _encoded(meta: SampleMeta, generator: str, patch: int) -> tuple[tuple[int, ...], ...]:
    """Sides in pixels of latents of the pictures that an encoder of latents sees, of a generator's patches."""
    drawn = meta.grids[generator]
    references = meta.references.get(generator, ((),) * len(drawn))
    grids = (grid for medium, behind in zip(drawn, references, strict=True) for grid in (medium, *behind))
    return tuple(tuple(side * patch for side in grid) for grid in grids)


def completed_worst(worst: WorstCase, specs: Mapping[str, EncoderSpec]) -> WorstCase:
    """The bounds with those of encoders of other encoders' tokens: a segment of the most media and tokens.

    ``media["resampler"]`` is 1, ``patches["resampler"]`` the most tokens of a sample's media together.

    Args:
      worst: bounds for encoders with media of their own, such as ``source.worst_case()``.
      specs: all encoders and generators by name, {"vision": EncoderSpec(…), "resampler": EncoderSpec(…)}.
    """
    media, patches, sides = dict(worst.media), dict(worst.patches), dict(worst.sides)
    for name, spec in specs.items():
        if spec.derived and (first := first_encoder(specs, name)) in worst.media:
            media[name], sides[name] = 1, worst.media[first]
            patches[name] = worst.media[first] * (worst.patches[first] // specs[first].patches_per_token)
        if spec.encodes in worst.media:
            generator = specs[spec.encodes]
            media[name] = worst.media[spec.encodes] * (1 + generator.references)
            patches[name] = worst.patches[spec.encodes] * generator.patch**2
    return replace(worst, media=media, patches=patches, sides=sides)


def medium_numbers(specs: Mapping[str, EncoderSpec], name: str, meta: SampleMeta) -> np.ndarray:
    """The number, from 0, of the medium that each token of a segment is of: int32 [N], for the encoder ``name``.

    [0, 0, 0, 0, 1, 1] for an image of 4 tokens and one of 2. N counts the tokens of all the sample's media that reach
    it.

    Args:
      specs: encoders and generators by name, {"vision": EncoderSpec(…)}.
      name: an encoder, such as one that reads the tokens of "vision".
      meta: metadata of a sample with such media.
    """
    first = first_encoder(specs, name)
    counts = token_counts(specs[first], meta.grids[first])
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)
