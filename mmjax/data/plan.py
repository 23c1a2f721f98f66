"""The plan of a step, made before any medium is opened: a pure function of its samples' metadata.

All processes of a run make the same plan and fill in the rows that they need (see `Packer.fill`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mmjax.attention.language import WORDS
from mmjax.data.process_rows import ProcessRows, wanted_cells
from mmjax.data.send_lists import send_list
from mmjax.data.types import Microbatch, SampleMeta, StepBatch

OPENED = ("patches", "targets", "times", "weights")
"""Inputs of an encoder or a generator that its media are opened for (see `patch_shapes`)."""


@dataclass(frozen=True, kw_only=True)
class EncoderPlan:
    """The media of one encoder in one microbatch.

    Attributes:
      bucket: index of the static shape.
      places: per cell, the (row, offset) of each medium in order of appearance, rows counted within the cell.
    """

    bucket: int
    places: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, kw_only=True)
class TextPlan:
    """The LLM rows of one microbatch.

    Attributes:
      rows_per_cell: rows of a cell.
      width: tokens of a row.
      places: the (row, offset) of each sample, rows counted within the microbatch.
      bucket: index of the static shape; None where there is a single one, with a row for each sample.
      axes: numbers of a token's position; with several they follow from where media stand in the text.
    """

    rows_per_cell: int
    width: int
    places: tuple[tuple[int, int], ...]
    bucket: int | None = None
    axes: int = 1


@dataclass(frozen=True, kw_only=True)
class MicrobatchPlan:
    """The places of all samples and media of one microbatch.

    Attributes:
      metas: metadata of its samples, cell by cell.
      samples_per_cell: samples of a cell; later cells may have fewer or none.
      cells: number of cells.
      llm: the LLM rows.
      encoders: the rows of each encoder and generator.
      apart: whether each sample has an LLM row of its own, to be answered.
    """

    metas: tuple[SampleMeta, ...]
    samples_per_cell: int
    cells: int
    llm: TextPlan
    encoders: Mapping[str, EncoderPlan]
    apart: bool = False

    @property
    def bucket(self) -> dict[str, int]:
        """Index of each encoder's static shape; and the LLM's, where it has several."""
        own = {name: part.bucket for name, part in self.encoders.items()}
        return own if self.llm.bucket is None else {**own, "llm": self.llm.bucket}

    def cell(self, cell: int) -> range:
        """The samples of a cell, by their place in `metas`."""
        return cell_range(cell, self.samples_per_cell, len(self.metas))

    def segments(self, module: str, cell: int) -> list[int]:
        """Positions that each of a module's segments in a cell takes."""
        return [n for sample in self.cell(cell) for n in self.metas[sample].segments(module)]

    def media(self, encoder: str, cell: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """The media of `encoder` in a cell: sample, number in that sample, and patches along every axis."""
        grids = ((sample, self.metas[sample].grids.get(encoder, ())) for sample in self.cell(cell))
        return [(sample, number, grid) for sample, own in grids for number, grid in enumerate(own)]

    def learned(self, own: ProcessRows | None) -> frozenset[int]:
        """The samples whose loss weights are in the rows of `own`."""
        cells = wanted_cells(own, "llm", "weights", self.cells)
        return frozenset(sample for cell in cells for sample in self.cell(cell))

    def needed(self, own: ProcessRows | None) -> dict[int, frozenset[str]]:
        """The samples that are needed to fill the rows of `own`, each with the encoders whose media are needed."""
        # The LLM's segments follow from lengths alone, and so do positions that are places.
        named = (
            *(["positions"] if self.llm.axes > 1 else []),
            "tokens",
            "targets",
            "weights",
            *WORDS,
            *(f"{name}_{what}" for name in self.encoders for what in ("index", "shares")),
        )
        texts = {cell for name in named for cell in wanted_cells(own, "llm", name, self.cells)}
        # Where a token goes is read in the text, also by who sends it.
        for name in self.encoders:
            reading = (name, "index"), (name, send_list("llm")), ("llm", send_list(name))
            texts |= {cell for pair in reading for cell in wanted_cells(own, *pair, self.cells)}
        found: dict[int, set[str]] = {sample: set() for cell in texts for sample in self.cell(cell)}
        for name in self.encoders:
            for cell in {c for key in OPENED for c in wanted_cells(own, name, key, self.cells)}:
                for sample, _, _ in self.media(name, cell):
                    found.setdefault(sample, set()).add(name)
        return {sample: frozenset(found[sample]) for sample in sorted(found)}


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """All microbatches of a step; `denominators` and `counts` as in `StepBatch`."""

    step: int
    microbatches: tuple[MicrobatchPlan, ...]
    denominators: Mapping[str, float]
    counts: Mapping[str, int]

    def batch(self, filled: Sequence[Microbatch]) -> StepBatch:
        """The step's batch, its microbatches filled in."""
        given = {"denominators": dict(self.denominators), "counts": dict(self.counts)}
        return StepBatch(step=self.step, microbatches=tuple(filled), **given)


def cell_range(cell: int, per_cell: int, count: int) -> range:
    """Which of `count` samples are in a cell of `per_cell`."""
    return range(min(cell * per_cell, count), min((cell + 1) * per_cell, count))


def patches_of(meta: SampleMeta, encoder: str) -> int:
    """All patches of a sample's media of one encoder."""
    return sum(prod(grid) for grid in meta.grids.get(encoder, ()))
