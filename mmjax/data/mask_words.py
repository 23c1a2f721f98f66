"""The words of a sample's tokens, from which a mask decides which tokens attend (see ``attention.language``).

Legend: N tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from jaxtyping import Bool, Int

from mmjax.attention.language import Rules
from mmjax.data.derived import in_text, token_counts
from mmjax.data.tiles import arrange
from mmjax.data.types import EncoderSpec, Sample

Grids = Mapping[str, Sequence[tuple[int, ...]]]
"""Patches along every axis of each medium, by encoder, as ``SampleMeta.grids`` has them."""


def sample_words(
    rules: Rules, sample: Sample, grids: Grids, encoders: Mapping[str, EncoderSpec]
) -> dict[str, np.ndarray]:
    """The host inputs of a sample's tokens, by name: "is" and "attends" (uint32 [N]), and "items" (int32 [N]).

    Bit r of "is" says whether rule r of the mask has the token among its keys, bit r of "attends" among its queries.
    "items" are the numbers of ``sample_items``.

    Args:
      rules: the rules of the mask, such as ``Rules.parse("all sees all before; vision sees vision in item")``.
      sample: the sample; only the places of its media's tokens are read, not the media.
      grids: the patches of its media along every axis, as ``SampleMeta.grids`` has them: {"vision": ((16, 16),)}.
      encoders: the specs of encoders and generators, by name.

    Raises:
      ValueError: the sample has more placeholders than its media have tokens.
    """
    encoders = in_text(encoders)
    items_N = sample_items(sample, grids, encoders)
    is_N, attends_N = rules.words(token_kinds(sample, encoders), items_N)
    return {"is": is_N, "attends": attends_N, "items": items_N}


def token_kinds(sample: Sample, names: Mapping[str, object]) -> dict[str, Bool[np.ndarray, " N"]]:
    """The tokens of a sample that are of each kind: "prefix", "suffix", "text", "media", "all", and each of ``names``.

    names: a mapping whose keys are names of encoders and generators, such as specs by name; values are not read.

    The prefix ends at the first learned token, or at the last answer if that comes first. So a token of an earlier
    answer, which is learned too, does not see later tokens.
    """
    kinds = {name: sample.placeholders(name) for name in names}
    number_N = np.arange(len(sample.tokens))
    learned = np.flatnonzero(sample.loss_weights[1:] > 0) + 1  # nothing predicts the first
    kinds["prefix"] = number_N < min(sample.prompt, *learned[:1], len(number_N))
    kinds["all"] = number_N >= 0
    kinds["media"] = np.logical_or.reduce([kinds[name] for name in names]) if names else number_N < 0
    return kinds | {"text": ~kinds["media"], "suffix": ~kinds["prefix"]}


def sample_items(sample: Sample, grids: Grids, encoders: Mapping[str, EncoderSpec]) -> Int[np.ndarray, " N"]:
    """The number of each token's medium in its sample, from 1, int32; 0 for text. An image and its tiles are one.

    Media are numbered encoder by encoder, in the order of ``encoders``.

    Args:
      sample: the sample; only the places of its media's tokens are read, not the media.
      grids: the patches of its media along every axis, as ``SampleMeta.grids`` has them: {"vision": ((16, 16),)}.
      encoders: the specs of encoders and generators with placeholders in the text, by name.

    Raises:
      ValueError: the sample has more placeholders than its media have tokens.
    """
    items_N, number = np.zeros(len(sample.tokens), np.int32), 0
    for name, spec in encoders.items():
        counts = list(_token_counts(spec, grids.get(name, ()), sample, name))
        where = np.flatnonzero(sample.placeholders(name))
        if len(where) > sum(counts):  # fewer where a model has not drawn them yet
            raise ValueError(f"{sample.question!r}: {len(where)} {name} placeholders for {sum(counts)} tokens")
        items_N[where] = number + np.repeat(np.arange(1, len(counts) + 1), counts)[: len(where)]
        number += len(counts)
    return items_N


def _token_counts(spec: EncoderSpec, grids: Sequence[tuple[int, ...]], sample: Sample, name: str) -> list[int]:
    """Number of LLM tokens of each image, recording or drawing."""
    if not spec.newline:
        return token_counts(spec, grids)
    remaining, counts = list(grids), []
    for tiled in sample.tiled.get(name, ()):
        of_image, remaining = remaining[: 1 + prod(tiled.grid)], remaining[1 + prod(tiled.grid) :]
        counts.append(len(arrange(spec, of_image, [tiled]).index))
    return counts
