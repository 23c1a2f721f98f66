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
