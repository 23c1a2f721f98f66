"""`Source`: samples by their number, as tasks and datasets give them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from mmjax.data.types import Sample, SampleMeta, WorstCase


class Source(Protocol):
    """Samples by index: the same index gives the same sample in every process. It is pickled to worker processes."""

    def meta(self, index: int) -> SampleMeta:
        """The metadata of sample `index`, without opening a medium; every process reads those of every sample."""
        ...

    def sample(self, index: int, media: Collection[str] | None = None, *, learned: bool = True) -> Sample:
        """Sample `index`, with the media of the encoders `media` alone (by default of all); no others are opened.

        `learned`: whether the loss weights are needed. A broken medium sets them to zero, so they may need all media
        opened.
        """
        ...

    def worst_case(self) -> WorstCase:
        """Bounds on every sample."""
        ...


class RememberedMeta:
    """A source that computes the metadata of each sample once, for a caller that asks for the same ones repeatedly."""

    def __init__(self, source: Source):
        """For the samples of ``source``, whose metadata stay in memory once they have been read."""
        self._source, self._metas = source, dict[int, SampleMeta]()

    def meta(self, index: int) -> SampleMeta:
        """See `Source.meta`."""
        if index not in self._metas:
            self._metas[index] = self._source.meta(index)
        return self._metas[index]

    def sample(self, index: int, media: Collection[str] | None = None, *, learned: bool = True) -> Sample:
        """See `Source.sample`."""
        return self._source.sample(index, media, learned=learned)

    def worst_case(self) -> WorstCase:
        """See `Source.worst_case`."""
        return self._source.worst_case()
