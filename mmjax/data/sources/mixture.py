"""A `Source` (see `mmjax.data.loader`) of one dataset or several, shuffled and mixed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from mmjax.configurable import require
from mmjax.data.sources.mixing import Mixing, held_out, in_turn, kept_in
from mmjax.data.sources.prepared import PreparedRecords
from mmjax.data.types import Sample, SampleMeta, WorstCase


class Mixture:
    """Samples by index: for split "train" shuffled epochs mixed by weight, for "test" the held-out records in turn.

    A source that holds nothing out is evaluated on all its records. quotas: samples of each source in a block, see
    `Mixing`.
    """

    def __init__(self, sources: Sequence[PreparedRecords], quotas: Sequence[int], *, seed: int, split: str):
        self.sources, self.split = tuple(sources), split
        self._held = [_held(source) for source in sources]
        own = [len(source) - len(held) for source, held in zip(sources, self._held, strict=True)]
        self._mixing = Mixing(own, quotas, seed)
        tested = [len(held) or len(source) for source, held in zip(sources, self._held, strict=True)]
        self._length = sum(own) if split == "train" else sum(tested)
        self._order = in_turn(tested) if split != "train" else None

    @property
    def identity(self) -> str:
        """A digest of the counts and places of all records. It does not depend on the files' names."""
        return " ".join(source.identity for source in self.sources)

    def __len__(self) -> int:
        return self._length

    def record(self, index: int) -> tuple[PreparedRecords, int]:
        """The source of sample `index`, and the number of its record there."""
        if self._order is None:
            number, at = self._mixing(index)
            return self.sources[number], kept_in(self._held[number], at)
        number, at = (int(column[index]) for column in self._order)
        held = self._held[number]
        return self.sources[number], int(held[at]) if len(held) else at

    def meta(self, index: int) -> SampleMeta:
        """The metadata of sample `index`, from the index of its source."""
        source, record = self.record(index)
        return source.meta(record)

    def sample(self, index: int, media: Collection[str] | None = None, learned: bool = True) -> Sample:
        """Sample `index`, with the media of the encoders `media` alone (by default of all)."""
        source, record = self.record(index)
        return source.sample(record, media, learned)

    def worst_case(self) -> WorstCase:
        """The largest counts over all records of all sources, held out or not."""
        cases = [source.worst_case() for source in self.sources]

        def largest(field: str) -> dict[str, int]:
            found: dict[str, int] = {}
            for case in cases:
                for name, count in getattr(case, field).items():
                    found[name] = max(count, found.get(name, 0))
            return found

        return WorstCase(
            tokens=max(case.tokens for case in cases),
            media=largest("media"),
            patches=largest("patches"),
            sides=largest("sides"),
        )


def _held(source: PreparedRecords) -> np.ndarray:
    """The usable records that are held out; the choice does not depend on which records are unusable.

    Raises ConfigError.
    """
    index, count = source.index, source.config.held_out
    held = np.flatnonzero(np.isin(index.numbers, held_out(index.scanned, count)))
    fix = f"of {len(index)} usable records some must be left to train on; set it to {len(index) // 10}"
    require(len(held) < len(index), f"{source.name}/Source.held_out", count, fix)
    fix = f"none of the records that it holds out can be used; set it to {index.scanned // 10} or to 0"
    require(not count or len(held) > 0, f"{source.name}/Source.held_out", count, fix)
    return held
