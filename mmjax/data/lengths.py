"""Lengths of samples and media, and figures of them: how many, the mean, and percentiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mmjax.data.types import SampleMeta

FIGURES = ("count", "mean", "median", "p90", "p99", "most")


def figures_of(lengths: Sequence[int]) -> dict[str, float]:
    """The `FIGURES` of some lengths, by name; all zero if there are none.

    A percentile is one of the lengths: the smallest for which that share of all lengths is not larger.
    """
    own = sorted(lengths) or [0]
    at = lambda share: float(own[math.ceil(share * len(own)) - 1])  # noqa: E731
    figures = (len(lengths), math.fsum(own) / len(own), at(0.5), at(0.9), at(0.99), float(own[-1]))
    return dict(zip(FIGURES, figures, strict=True))


def lengths_of(metas: Sequence[SampleMeta], media: Iterable[str]) -> dict[str, list[int]]:
    """Lengths by module: patches of media by encoder or generator, tokens of samples under "llm"."""
    return {name: [n for meta in metas for n in meta.lengths(name)] for name in ("llm", *media)}
