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
from mmjax.data.split import Pointers
from mmjax.data.types import Microbatch, SampleMeta, StepBatch

OPENED = ("patches", "tokens", "targets", "times", "weights", "latent_noise", "latent_shares")
"""Inputs of an encoder or a generator that need its media opened (see `patch_shapes`)."""


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
      axes: numbers of a token's position; with several, they depend on the places of media in the text.
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
      apart: whether each sample has a separate LLM row, for generation.
      pointers: the inputs that point at tokens in other modules' rows.
    """

    metas: tuple[SampleMeta, ...]
    samples_per_cell: int
    cells: int
    llm: TextPlan
    encoders: Mapping[str, EncoderPlan]
    apart: bool = False
    pointers: tuple[Pointers, ...] = ()

    @property
    def bucket(self) -> dict[str, int]:
        """Index of the static shape, by module: encoders and generators, and "llm" where its rows are packed."""
        indices = {name: part.bucket for name, part in self.encoders.items()}
        return indices if self.llm.bucket is None else {**indices, "llm": self.llm.bucket}

    def cell(self, cell: int) -> range:
        """The samples of cell number `cell`, as places in `metas`; an empty range for a cell without samples."""
        return cell_range(cell, self.samples_per_cell, len(self.metas))

    def segments(self, module: str, cell: int) -> list[int]:
        """Positions that each of a module's segments in a cell takes.

        "llm" has a segment for each sample, an encoder or generator for each medium.
        """
        return [n for sample in self.cell(cell) for n in self.metas[sample].segments(module)]

    def media(self, encoder: str, cell: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """The media of `encoder` in a cell: (sample, number in that sample, patches along every axis) of each.

        A sample is its place in `metas`.
        """
        samples = ((sample, self.metas[sample].grids.get(encoder, ())) for sample in self.cell(cell))
        return [(sample, number, grid) for sample, grids in samples for number, grid in enumerate(grids)]

    def learned(self, process_rows: ProcessRows | None) -> frozenset[int]:
        """The samples whose loss weights are in `process_rows` (``None``: all), by their place in `metas`."""
        cells = wanted_cells(process_rows, "llm", "weights", self.cells)
        return frozenset(sample for cell in cells for sample in self.cell(cell))

    def needed(self, process_rows: ProcessRows | None) -> dict[int, frozenset[str]]:
        """The samples needed to fill `process_rows` (``None``: all): for each, the encoders whose media must be opened.

        Keys are places in `metas`, ascending. A sample has an empty set if only its text is needed.
        """
        # The LLM's segments follow from lengths alone, and so do positions of a single axis.
        named = (
            *(["positions"] if self.llm.axes > 1 else []),
            "tokens",
            "targets",
            "weights",
            *WORDS,
            *(f"{name}_shares" for name in self.encoders),
        )
        texts = {cell for name in named for cell in wanted_cells(process_rows, "llm", name, self.cells)}
        # The place of a medium's token is read in the text, also by the process that sends the token.
        for pointer in self.pointers:
            reading = (pointer.module, pointer.name), (pointer.source, send_list(pointer.module))
            texts |= {cell for pair in reading for cell in wanted_cells(process_rows, *pair, self.cells)}
        encoders_of: dict[int, set[str]] = {sample: set() for cell in texts for sample in self.cell(cell)}
        for name in self.encoders:
            for cell in {c for key in OPENED for c in wanted_cells(process_rows, name, key, self.cells)}:
                for sample, _, _ in self.media(name, cell):
                    encoders_of.setdefault(sample, set()).add(name)
        return {sample: frozenset(encoders_of[sample]) for sample in sorted(encoders_of)}


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """All microbatches of a step; `denominators` and `counts` as in `StepBatch`."""

    step: int
    microbatches: tuple[MicrobatchPlan, ...]
    denominators: Mapping[str, float]
    counts: Mapping[str, int]

    def batch(self, filled: Sequence[Microbatch]) -> StepBatch:
        """The step's batch; `filled` has the microbatch of each plan in `microbatches`, in order."""
        return StepBatch(
            step=self.step,
            microbatches=tuple(filled),
            denominators=dict(self.denominators),
            counts=dict(self.counts),
        )


def cell_range(cell: int, per_cell: int, count: int) -> range:
    """The numbers of the samples, of `count`, that are in cell number `cell`, with `per_cell` samples in a cell.

    All count from 0: cell 1 of 3 samples in cells of 2 has range(2, 3). A cell behind the last sample is empty.
    """
    return range(min(cell * per_cell, count), min((cell + 1) * per_cell, count))


def patches_of(meta: SampleMeta, encoder: str) -> int:
    """Number of patches of all of a sample's media of one encoder; 0 if it has none."""
    return sum(prod(grid) for grid in meta.grids.get(encoder, ()))
