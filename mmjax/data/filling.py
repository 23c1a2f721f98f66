"""The arrays of a planned microbatch: tokens, media and where these stand in each other's rows.

What a process does not want is neither made nor held; see `own_rows`.

Legend: B LLM rows of a microbatch, S sequence length, R encoder rows of a microbatch, T patches per encoder row,
A axes of a medium.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from mmjax.attention.language import WORDS, Rules
from mmjax.data.mask_words import sample_words
from mmjax.data.mrope import sample_positions
from mmjax.data.patches import patch_inputs, patch_places, patch_shapes
from mmjax.data.plan import MicrobatchPlan
from mmjax.data.process_rows import PartialArray, ProcessRows, wanted_cells
from mmjax.data.send_lists import send_list
from mmjax.data.split import WHOLE, Pointers, Split
from mmjax.data.tiles import NEWLINE, Places, arrange
from mmjax.data.types import EncoderSpec, Sample


@dataclass(frozen=True, kw_only=True)
class Filling:
    """How the rows of a planned microbatch are filled.

    Attributes:
      encoders, splits, mask, pad, cells: see `Packer`.
      pointers: the inputs that hold places in other modules' rows.
    """

    encoders: Mapping[str, EncoderSpec]
    splits: Mapping[str, Split]
    pointers: tuple[Pointers, ...]
    mask: str
    pad: int
    cells: int

    def rows(
        self, module: str, plan: MicrobatchPlan, samples: Mapping[int, Sample], own: ProcessRows | None
    ) -> dict[str, PartialArray]:
        """The inputs of a module, by name, in wanted rows and those that others' are made of.

        Args:
          module: its name.
          plan: what stands where.
          samples: by place in the plan; those that are to be written.
          own: the rows that are wanted; `None` for all.
        """
        return self._llm_rows(plan, samples, own) if module == "llm" else self._encoder_rows(module, plan, samples, own)

    def _llm_rows(
        self, plan: MicrobatchPlan, samples: Mapping[int, Sample], own: ProcessRows | None
    ) -> dict[str, PartialArray]:
        shape = (plan.llm.rows_per_cell * plan.cells, plan.llm.width)
        values = {"tokens": self.pad, "targets": self.pad, "positions": 0, "segments": 0, "weights": 0}
        values |= {f"{name}_index": -1 for name in self._shown}
        blended = {name: self.encoders[name].blended for name in self._shown if self.encoders[name].blended > 1}
        values |= {f"{name}_shares": 0 for name in blended}
        deep = {f"{name}_{what}": (count,) for name, count in blended.items() for what in ("index", "shares")}
        deep |= {"positions": (plan.llm.axes,)} if plan.llm.axes > 1 else {}
        rules = Rules.parse(self.mask)
        words = WORDS if rules.kind == "words" else ()
        values |= dict.fromkeys(words, 0)
        arrays: dict[str, PartialArray] = {}
        for name, value in values.items():
            cells = self._llm_cells(name, plan.cells, own)
            dtype = np.float32 if name == "weights" or name.endswith("_shares") else np.int32
            dtype = np.uint32 if name in ("is", "attends") else dtype
            arrays[name] = PartialArray.full(cells, (*shape, *deep.get(name, ())), plan.cells, value, dtype)
        in_row: dict[int, int] = {}
        for (row, start), meta in sorted(zip(plan.llm.places, plan.metas, strict=True), key=lambda pair: pair[0]):
            in_row[row] = in_row.get(row, 0) + 1
            _write(arrays["segments"], row, slice(start, start + meta.tokens), in_row[row])
            if plan.llm.axes == 1:
                _write(arrays["positions"], row, slice(start, start + meta.tokens), np.arange(meta.tokens))
        for index, sample in samples.items():
            (row, start), n = plan.llm.places[index], len(sample.tokens)
            _write(arrays["tokens"], row, slice(start, start + n), sample.tokens)
            _write(arrays["targets"], row, slice(start, start + n - 1), sample.tokens[1:])
            _write(arrays["weights"], row, slice(start, start + n - 1), sample.loss_weights[1:])
            if plan.llm.axes > 1:
                grids = plan.metas[index].grids
                made = partial(sample_positions, sample, grids, self.encoders)
                _write(arrays["positions"], row, slice(start, start + n), made)
            if any(arrays[name].row(row) is not None for name in words):
                found = sample_words(rules, sample, plan.metas[index].grids, self.encoders)
                for name in words:
                    _write(arrays[name], row, slice(start, start + n), found[name])
        for name in self._shown:
            for _, sample, where, tokens in self._places(name, plan, samples):
                row, start = plan.llm.places[sample]
                if name in blended:
                    _write(arrays[f"{name}_index"], row, start + where, tokens.index)
                    _write(arrays[f"{name}_shares"], row, start + where, tokens.shares)
                else:
                    _write(arrays[f"{name}_index"], row, start + where, tokens.index[:, 0])
        return arrays

    def _llm_cells(self, name: str, cells: int, own: ProcessRows | None) -> Sequence[int]:
        """The cells whose rows of an input of the LLM are filled: the wanted ones; and those whose pointers are, where
        the input is these, or the order of the LLM's tokens follows from it."""
        if name == "segments":
            return range(cells)
        found, orders = {*wanted_cells(own, "llm", name, cells)}, name in self._ordered_by("llm")
        for one in self.pointers:
            if orders or (one.module, one.name) == ("llm", name):
                found |= self._pointing_cells(one, own)
        return sorted(found)

    def _pointing_cells(self, one: Pointers, own: ProcessRows | None) -> set[int]:
        """The cells whose pointers are filled: the wanted ones, and those whose lists are made of them."""
        made = wanted_cells(own, one.source, send_list(one.module), self.cells)
        return {*wanted_cells(own, one.module, one.name, self.cells), *made}

    def _ordered_by(self, module: str) -> frozenset[str]:
        """The inputs that the order of a module's tokens follows from, where tokens change places."""
        split = self.splits.get(module, WHOLE)
        return split.reads if split.permutes else frozenset()

    @property
    def _shown(self) -> list[str]:
        return shown(self.encoders)

    def _places(
        self, name: str, plan: MicrobatchPlan, samples: Mapping[int, Sample]
    ) -> Iterator[tuple[int, int, np.ndarray, Places]]:
        """For each sample that is here: cell, sample, its placeholders' places in its tokens, and the encoder's tokens
        that belong to them, by their places in the cell's flattened rows.

        Raises ValueError where the numbers of placeholders and of tokens differ.
        """
        spec, part = self.encoders[name], plan.encoders[name]
        width = spec.buckets[part.bucket][1]
        for cell in range(plan.cells):
            found: dict[int, list[int]] = {sample: [] for sample in plan.cell(cell)}
            for (sample, _, grid), (row, start) in zip(plan.media(name, cell), part.places[cell], strict=True):
                first = (row * width + start + spec.prefix) // spec.patches_per_token
                found[sample] += range(first, first + prod(grid) // spec.patches_per_token)
            for sample in sorted(found.keys() & samples.keys()):
                where = np.flatnonzero(samples[sample].placeholders(name))
                grids, images = plan.metas[sample].grids.get(name, ()), samples[sample].tiled.get(name, ())
                index, shares = arrange(spec, grids, images)
                if len(where) != len(index):
                    question = samples[sample].question
                    raise ValueError(f"{question!r}: {len(where)} {name} placeholders for {len(index)} tokens")
                tokens = np.append(np.asarray(found[sample], np.int32), np.int32(NEWLINE))
                yield cell, sample, where, Places(tokens[np.where(index < 0, -1, index)], shares)

    def _encoder_rows(
        self, name: str, plan: MicrobatchPlan, samples: Mapping[int, Sample], own: ProcessRows | None
    ) -> dict[str, PartialArray]:
        spec, part = self.encoders[name], plan.encoders[name]
        rows, width = spec.buckets[part.bucket]
        lead = (rows * plan.cells, width)

        def empty(input_: str, shape: tuple[int, ...], value: float = 0, dtype: Any = np.float32) -> PartialArray:
            whole = input_ in ("segments", *self._ordered_by(name))
            cells = range(plan.cells) if whole else wanted_cells(own, name, input_, plan.cells)
            return PartialArray.full(cells, shape, plan.cells, value, dtype)

        arrays = {
            "segments": empty("segments", lead, dtype=np.int32),
            "positions": empty("positions", (*lead, spec.axes), dtype=np.int32),
        }
        opened = {key: empty(key, (*lead, *shape)) for key, shape in patch_shapes(spec).items()}
        reading = {cell for key in opened for cell in wanted_cells(own, name, key, plan.cells)}
        for cell, places in enumerate(part.places):
            media, in_row = plan.media(name, cell), dict[int, int]()
            for item in sorted(range(len(places)), key=lambda i: places[i]):
                (row, start), (sample, number, grid) = places[item], media[item]
                in_row[row] = in_row.get(row, 0) + 1
                before = cell * rows + row, slice(start, start + spec.special)
                start += spec.prefix
                span = cell * rows + row, slice(start, start + prod(grid))
                for where in (before, span):
                    _write(arrays["segments"], *where, in_row[row])
                _write(arrays["positions"], *before, -1 - np.arange(spec.special)[:, None])
                _write(arrays["positions"], *span, lambda grid=grid: patch_places(grid, spec))
                if cell in reading:
                    made = patch_inputs(samples[sample], name, number, spec)
                    for key, values in made.items():
                        _write(opened[key], *span, values)
        arrays |= opened
        if spec.drawn:
            (one,) = (one for one in self.pointers if one.module == name)
            shape, cells = (lead[0], width // spec.patches_per_token), sorted(self._pointing_cells(one, own))
            arrays["index"] = PartialArray.full(cells, shape, plan.cells, -1)
            self._index(name, plan, samples, arrays["index"])
        return arrays

    def _index(self, name: str, plan: MicrobatchPlan, samples: Mapping[int, Sample], out: PartialArray) -> None:
        """Writes into `out` [R, T/merge**A] where each token's placeholder is in the LLM rows of its cell."""
        rows_per_cell, tokens_per_row = out.shape[0] // plan.cells, out.shape[1]
        for cell, sample, where, tokens in self._places(name, plan, samples):
            text_row, start = plan.llm.places[sample]
            numbers = tokens.index[:, 0]
            first = (text_row - cell * plan.llm.rows_per_cell) * plan.llm.width + start
            for row in np.unique(numbers // tokens_per_row):
                own = numbers // tokens_per_row == row
                _write(out, cell * rows_per_cell + int(row), numbers[own] % tokens_per_row, first + where[own])


def shown(encoders: Mapping[str, EncoderSpec]) -> list[str]:
    """The encoders, whose tokens replace their placeholders; a generator reads the LLM's output at its own."""
    return [name for name, spec in encoders.items() if not spec.drawn]


def _write(out: PartialArray, row: int, where: slice | np.ndarray, values: Any) -> None:
    """Writes `values` into a row, if it is wanted; only then are they made, where they are a function."""
    target = out.row(row)
    if target is not None:
        target[where] = values() if callable(values) else values
