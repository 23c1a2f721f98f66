"""Lengths of samples and media, and their statistics: count, mean, and percentiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mmjax.data.types import SampleMeta

FIGURES = ("count", "mean", "median", "p90", "p99", "most")


def figures_of(lengths: Sequence[int]) -> dict[str, float]:
    """The statistics of some lengths: "count", "mean", "median", "p90", "p99" and "most"; all 0 if there are none.

    A percentile is one of the lengths: the smallest for which that share of all lengths is not larger.
    """
    ascending = sorted(lengths) or [0]

    def percentile(share: float) -> float:
        return float(ascending[math.ceil(share * len(ascending)) - 1])

    mean, most = math.fsum(ascending) / len(ascending), float(ascending[-1])
    figures = (len(lengths), mean, percentile(0.5), percentile(0.9), percentile(0.99), most)
    return dict(zip(FIGURES, figures, strict=True))


def lengths_of(metas: Sequence[SampleMeta], media: Iterable[str]) -> dict[str, list[int]]:
    """Lengths by module: under "llm" the tokens of each sample, under each name of `media` the patches of each medium.

    Such as {"llm": [96, 80], "vision": [64, 64, 16]}, in the order of `metas`.

    media: names of encoders and generators; a list is empty if no sample has media of that name.
    """
    return {name: [n for meta in metas for n in meta.lengths(name)] for name in ("llm", *media)}
