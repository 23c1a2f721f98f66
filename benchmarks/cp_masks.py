"""Random masks like those of Cornstarch's Figure 11: media in front of a text, in it, and packed samples.

The paper does not say how it draws its masks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from mmjax.attention.pairs import Intervals


def draw_mask(name: str, length: int, seed: int) -> Intervals:
    """A mask of type "EP", "EE" or "MP"."""
    return _DRAWN[name](length, np.random.default_rng(seed))


def prepended(length: int, rng: np.random.Generator) -> Intervals:
    """One to four media in front, then text. A medium attends to itself, text to all tokens before it."""
    media = _cuts(int(length * rng.uniform(0.2, 0.7)), int(rng.integers(1, 5)), rng)
    first, last = np.zeros(length, np.int64), np.arange(1, length + 1)
    _attend_within(first, last, media[:-1], media[1:])
    return Intervals(first, last)


def embedded(length: int, rng: np.random.Generator) -> Intervals:
    """Text with four to sixteen media in it, each attending to itself."""
    count = int(rng.integers(4, 17))
    cuts = _cuts(length, 2 * count, rng)
    first, last = np.zeros(length, np.int64), np.arange(1, length + 1)
    _attend_within(first, last, cuts[1::2], cuts[2::2])
    return Intervals(first, last)


def packed(length: int, rng: np.random.Generator) -> Intervals:
    """Four to twelve samples one behind the other, each a text with one to three media."""
    first, last = np.zeros(length, np.int64), np.arange(1, length + 1)
    ends = _cuts(length, int(rng.integers(4, 13)), rng)
    for begin, end in pairwise(ends):
        first[begin:end] = begin
        cuts = begin + _cuts(end - begin, 2 * int(rng.integers(1, 4)), rng)
        _attend_within(first, last, cuts[1::2], cuts[2::2])
    return Intervals(first, last)


def _cuts(length: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """The starts of `parts` parts of random lengths, and the end of the last one."""
    return np.concatenate([[0], np.sort(rng.integers(0, length + 1, parts - 1)), [length]])


def _attend_within(first: np.ndarray, last: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
    """Has the tokens of each piece attend to that piece."""
    for begin, end in zip(begins, ends, strict=True):
        first[begin:end], last[begin:end] = begin, end


_DRAWN: dict[str, Callable[[int, np.random.Generator], Intervals]] = {"EP": prepended, "EE": embedded, "MP": packed}
