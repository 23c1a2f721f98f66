"""The task of the parity study: images of three handwritten digits, and their captions. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar, cast

import numpy as np

import mmjax
from mmjax.configurable import configurable, not_negative, positive
from mmjax.data.source import Source
from mmjax.data.tasks.digits.source import load_digits, split_range
from mmjax.data.types import Sample, SampleMeta, WorstCase

DIGITS = 3
MOST_REMEMBERED = 200_000
"""Entries that stay in memory for the process's next run: the samples of a thousand steps, and their metadata."""
_remembered: dict[Hashable, object] = {}
T = TypeVar("T")


@configurable("Captions")
@dataclass(frozen=True, kw_only=True)
class CaptionsConfig:
    """Settings of the captions.

    order: number of the order in which a step's samples are summed; 0 leaves them as they are.
    batch: samples of a step; the same samples make each step in every order.
    """

    order: int = 0
    batch: int = 96

    def __post_init__(self) -> None:
        not_negative("Captions.order", self.order)
        positive("Captions.batch", self.batch)


class Captions(mmjax.Task):
    """Images of three digits side by side; the caption is the digits."""

    Config = CaptionsConfig

    @property
    def media(self) -> tuple[str, ...]:
        return ("image",)

    def open(self, context: mmjax.TaskContext) -> Source:
        blank = np.zeros((8, 8 * DIGITS, 1), np.float32)
        largest = mmjax.Example(images=[blank], turns=[("read", "0" * DIGITS)])
        first, last = split_range(context.split)
        examples = mmjax.Examples(context, _Row(first, last), largest=[largest])
        return InOrder(examples, key=(context.seed, context.split), order=self.config.order, batch=self.config.batch)


@dataclass(frozen=True)
class _Row:
    """Makes an example of the digits from index `first` to the one before `last`."""

    first: int
    last: int

    def __call__(self, rng: np.random.Generator) -> mmjax.Example:
        images, labels = load_digits()
        chosen = rng.integers(self.first, self.last, DIGITS)
        row = np.concatenate([images[index] for index in chosen], axis=1)[..., None]
        return mmjax.Example(images=[row], turns=[("read", "".join(str(labels[index]) for index in chosen))])


class InOrder:
    """The samples of a source, where those of each step stand in another order: a `Source`.

    Args:
      source: the samples.
      key: what they depend on beside their index; samples of equal keys are read once in a process.
      order: number of the order; 0 is the source's.
      batch: samples of a step.
    """

    def __init__(self, source: Source, *, key: tuple[int, str], order: int, batch: int):
        self.source, self.key, self.order, self.batch = source, key, order, batch

    def place(self, index: int) -> int:
        """The index in the source of sample `index`: of the same step."""
        step, place = divmod(index, self.batch)
        return step * self.batch + _permutation(self.order, step, self.batch)[place]

    def meta(self, index: int) -> SampleMeta:
        """See `Source.meta`."""
        at = self.place(index)
        return _once((self.key, at), lambda: self.source.meta(at))

    def sample(self, index: int, media: Collection[str] | None = None, *, learned: bool = True) -> Sample:
        """See `Source.sample`."""
        at, chosen = self.place(index), None if media is None else frozenset(media)
        return _once((self.key, at, chosen, learned), lambda: self.source.sample(at, chosen, learned=learned))

    def worst_case(self) -> WorstCase:
        """See `Source.worst_case`."""
        return self.source.worst_case()


@lru_cache(maxsize=4096)
def _permutation(order: int, step: int, batch: int) -> tuple[int, ...]:
    if not order:
        return tuple(range(batch))
    return tuple(int(index) for index in np.random.default_rng([order, step]).permutation(batch))


def _once(key: Hashable, make: Callable[[], T]) -> T:
    if len(_remembered) >= MOST_REMEMBERED:
        _remembered.clear()
    if key not in _remembered:
        _remembered[key] = make()
    return cast("T", _remembered[key])
