"""A `Source` (see `mmjax.data.loader`) of one dataset or several, shuffled and mixed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from mmjax.configurable import require
from mmjax.data.noise import with_noise
from mmjax.data.sources.known_records import KnownRecords, digest_of
from mmjax.data.sources.left_out import LeftOut
from mmjax.data.sources.mixing import Mixing, held_out, in_turn, nth_trained
from mmjax.data.sources.prepared import PreparedRecords
from mmjax.data.types import Sample, SampleMeta, WorstCase


class Mixture:
    """Samples by index: for split "train" shuffled epochs mixed by weight, for "test" the held-out records in turn.

    A source without held-out records is evaluated on all its records.

    Args:
      sources: the sources.
      quotas: number of samples of each source in a block, see `Mixing`.
      seed: the run's seed.
      split: "train" or "test".
      known: by source, the records that the run knows; its held-out records stay held out.

    Raises:
      ConfigError: `Source.held_out` leaves no records, or differs from the run's.
    """

    def __init__(
        self,
        sources: Sequence[PreparedRecords],
        quotas: Sequence[int],
        *,
        seed: int,
        split: str,
        known: Mapping[str, KnownRecords] | None = None,
    ):
        self.sources, self.split, self.seed, self._known = tuple(sources), split, seed, known or {}
        self._held_out = [_held_out_records(source, self._known.get(source.name)) for source in sources]
        counts = [(len(source), len(numbers)) for source, numbers in zip(sources, self._held_out, strict=True)]
        trained = [total - held_out for total, held_out in counts]
        self._mixing = Mixing(trained, quotas, seed)
        tested = [held_out or total for total, held_out in counts]
        self._length = sum(trained) if split == "train" else sum(tested)
        self._order = in_turn(tested) if split != "train" else None

    @property
    def identity(self) -> str:
        """A digest of the counts and places of all records. It does not depend on the files' names."""
        return " ".join(source.identity for source in self.sources)

    @property
    def held_out_identity(self) -> str:
        """A digest of the keys of the held-out records, source by source."""
        pairs = zip(self.sources, self._held_out, strict=True)
        return " ".join(digest_of(source.index.keys[numbers]) for source, numbers in pairs)

    def known(self) -> dict[str, KnownRecords]:
        """The records of each source now, by its name, for the checkpoints of the run."""
        pairs = zip(self.sources, self._held_out, strict=True)
        return {source.name: self._known_of(source, numbers) for source, numbers in pairs}

    def _known_of(self, source: PreparedRecords, numbers: np.ndarray) -> KnownRecords:
        keys, scanned = source.index.keys, source.index.scanned
        if before := self._known.get(source.name):
            return before.later(keys, scanned)
        return KnownRecords.at_start(keys, scanned, source.config.held_out, numbers)

    def count_held_out(self, name: str) -> tuple[int, int]:
        """Number of held-out records of a source: in the data now, and when the run began.

        Raises KeyError if the mixture was not made with known records of the source.
        """
        pairs = zip(self.sources, self._held_out, strict=True)
        now = sum(len(numbers) for source, numbers in pairs if source.name == name)
        return now, self._known[name].count_held_out

    def left_out(self) -> list[LeftOut]:
        """The records of each source that cannot be used; a source without any is left out."""
        every = [
            LeftOut(source=source.name, scanned=source.index.scanned, faults=source.index.left_out())
            for source in self.sources
        ]
        return [left_out for left_out in every if left_out.faults]

    def changes(self) -> dict[str, str]:
        """The differences between a source's records and the run's known ones, in words, by source that has changed."""
        compared = {
            source.name: self._known[source.name].change(source.index.keys, source.index.scanned)
            for source in self.sources
            if source.name in self._known
        }
        return {name: change for name, change in compared.items() if change}

    def __len__(self) -> int:
        return self._length

    def record(self, index: int) -> tuple[PreparedRecords, int]:
        """The source of sample `index`, and the place of its record among the source's usable records."""
        if self._order is None:
            number, at = self._mixing(index)
            return self.sources[number], nth_trained(self._held_out[number], at)
        number, at = (int(column[index]) for column in self._order)
        numbers = self._held_out[number]
        return self.sources[number], int(numbers[at]) if len(numbers) else at

    def meta(self, index: int) -> SampleMeta:
        """The metadata of sample `index`, from the index of its source."""
        source, record = self.record(index)
        return source.meta(record)

    def sample(self, index: int, media: Collection[str] | None = None, *, learned: bool = True) -> Sample:
        """Sample `index`, with the media of the encoders `media` alone (by default of all); see `Source`.

        Pictures to be made have noise and times, unless something of the record is broken.
        """
        source, record = self.record(index)
        sample = source.sample(record, media, learned=learned)
        counts = {name: len(grids) for name, grids in source.meta(record).grids.items()}
        return with_noise(sample, source.generators, counts, seed=self.seed, split=self.split, index=index)

    def worst_case(self) -> WorstCase:
        """The largest counts over all records of all sources, held out or not."""
        cases = [source.worst_case() for source in self.sources]

        def largest(field: str) -> dict[str, int]:
            most: dict[str, int] = {}
            for case in cases:
                for name, count in getattr(case, field).items():
                    most[name] = max(count, most.get(name, 0))
            return most

        least = dict[str, int]()
        for name in largest("media"):
            counts = [case.least.get(name, 0) for case in cases if case.media.get(name)]
            least |= {name: min(counts)} if all(counts) else {}
        return WorstCase(
            tokens=max(case.tokens for case in cases),
            media=largest("media"),
            patches=largest("patches"),
            sides=largest("sides"),
            least=least,
        )


def _held_out_records(source: PreparedRecords, known: KnownRecords | None) -> np.ndarray:
    """The numbers of the usable records that are held out: as the run has done since it began, or chosen for a new run.

    The choice does not depend on records that cannot be used. Raises ConfigError.
    """
    index, count = source.index, source.config.held_out
    field = f"{source.name}/Source.held_out"
    if known:
        fix = (
            f"the run has trained on all records but the {known.count} held out when it began; set it to {known.count}"
        )
        require(count == known.count, field, count, f"{fix} or begin another run")
        numbers = np.flatnonzero(known.is_held_out(index.keys))
        gone = "none of the records that the run holds out is in the data any more; put them back"
    else:
        numbers = np.flatnonzero(np.isin(index.numbers, held_out(index.scanned, count)))
        gone = f"none of the records that it holds out can be used; set it to {index.scanned // 10} or to 0"
    fix = f"of {len(index)} usable records some must be left to train on; set it to {len(index) // 10}"
    require(len(numbers) < len(index), field, count, fix)
    require(not count or len(numbers) > 0, field, count, gone)
    return numbers
