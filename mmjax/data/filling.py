"""The arrays of a planned microbatch: tokens, media, and pointers between the modules' rows.

Rows that a process does not read are not made; see `process_rows`.

Legend: B LLM rows of a microbatch, S sequence length, R encoder rows of a microbatch, T patches per encoder row,
A axes of a medium.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import prod
from typing import Any

import numpy as np

from mmjax.attention.language import WORDS, Rules
from mmjax.data.derived import MEDIA_RULES, first_encoder, medium_numbers, token_counts
from mmjax.data.mask_words import sample_words
from mmjax.data.mrope import sample_positions
from mmjax.data.patches import (
    canvas_places,
    input_dtype,
    patch_inputs,
    patch_places,
    patch_shapes,
    picture_places,
    reference_patches,
)
from mmjax.data.plan import MicrobatchPlan
from mmjax.data.process_rows import PartialArray, ProcessRows, wanted_cells
from mmjax.data.send_lists import send_list
from mmjax.data.split import UNSPLIT, Pointers, Split
from mmjax.data.tiles import NEWLINE, Places, arrange
from mmjax.data.types import EncoderSpec, Sample, SampleMeta


@dataclass(frozen=True, kw_only=True)
class Filling:
    """Fills the rows of a planned microbatch.

    Attributes:
      encoders, splits, mask, pad, cells: see `Packer`.
      pointers: the inputs that point at tokens in other modules' rows.
    """

    encoders: Mapping[str, EncoderSpec]
    splits: Mapping[str, Split]
    pointers: tuple[Pointers, ...]
    mask: str
    pad: int
    cells: int

    def rows(
        self, module: str, plan: MicrobatchPlan, samples: Mapping[int, Sample], process_rows: ProcessRows | None
    ) -> dict[str, PartialArray]:
        """The inputs of a module, by name, in the wanted rows and in the rows from which other inputs are made.

        Names, shapes and dtypes are those of `Microbatch`; columns are not in the order of the ranks yet.

        Args:
          module: "llm", or the name of an encoder or generator.
          plan: the places of samples and media.
          samples: the samples to be written, by place in `plan.metas`.
          process_rows: the wanted rows; `None` for all.

        Raises:
          ValueError: a sample's placeholders and the tokens of its media differ in number.
        """
        if module == "llm":
            return self._llm_rows(plan, samples, process_rows)
        return self._encoder_rows(module, plan, samples, process_rows)

    def _llm_rows(
        self, plan: MicrobatchPlan, samples: Mapping[int, Sample], process_rows: ProcessRows | None
    ) -> dict[str, PartialArray]:
        shape = (plan.llm.rows_per_cell * plan.cells, plan.llm.width)
        values = {"tokens": self.pad, "targets": self.pad, "positions": 0, "segments": 0, "weights": 0}
        index_of = {pointer.source: pointer.name for pointer in self.pointers if pointer.module == "llm"}
        values |= {index_of[name]: -1 for name in self._shown}
        blended = {name: self.encoders[name].blended for name in self._shown if self.encoders[name].blended > 1}
        values |= {f"{name}_shares": 0 for name in blended}
        deep = {key: (count,) for name, count in blended.items() for key in (index_of[name], f"{name}_shares")}
        deep |= {"positions": (plan.llm.axes,)} if plan.llm.axes > 1 else {}
        rules = Rules.parse(self.mask)
        words = WORDS if rules.kind == "words" else ()
        values |= dict.fromkeys(words, 0)
        arrays: dict[str, PartialArray] = {}
        for name, value in values.items():
            cells = self._llm_cells(name, plan.cells, process_rows)
            dtype = np.float32 if name == "weights" or name.endswith("_shares") else np.int32
            dtype = np.uint32 if name in ("is", "attends") else dtype
            full_shape = (*shape, *deep.get(name, ()))
            arrays[name] = PartialArray.full(cells, full_shape, plan.cells, value=value, dtype=dtype)
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
                make_positions = partial(sample_positions, sample, grids, self.encoders)
                _write(arrays["positions"], row, slice(start, start + n), make_positions)
            if any(arrays[name].row(row) is not None for name in words):
                values_of = sample_words(rules, sample, plan.metas[index].grids, self.encoders)
                for name in words:
                    _write(arrays[name], row, slice(start, start + n), values_of[name])
        for name in self._shown:
            for _, sample, where, tokens in self._places(name, plan, samples):
                row, start = plan.llm.places[sample]
                if name in blended:
                    _write(arrays[index_of[name]], row, start + where, tokens.index)
                    _write(arrays[f"{name}_shares"], row, start + where, tokens.shares)
                else:
                    _write(arrays[index_of[name]], row, start + where, tokens.index[:, 0])
        return arrays

    def _llm_cells(self, name: str, cells: int, process_rows: ProcessRows | None) -> Sequence[int]:
        """The cells whose rows of input `name` of the LLM are filled.

        These are the wanted ones. If the input is a pointer, or determines the order of the LLM's tokens, the cells
        whose pointers are filled come in addition.
        """
        if name == "segments":
            return range(cells)
        filled, orders = {*wanted_cells(process_rows, "llm", name, cells)}, name in self._ordered_by("llm")
        for pointer in self.pointers:
            if orders or (pointer.module, pointer.name) == ("llm", name):
                filled |= self._pointing_cells(pointer, process_rows)
        return sorted(filled)

    def _pointing_cells(self, pointer: Pointers, process_rows: ProcessRows | None) -> set[int]:
        """The cells whose pointers are filled: the wanted ones, and those from which wanted send lists are made."""
        listed = wanted_cells(process_rows, pointer.source, send_list(pointer.module), self.cells)
        return {*wanted_cells(process_rows, pointer.module, pointer.name, self.cells), *listed}

    def _ordered_by(self, module: str) -> frozenset[str]:
        """The inputs that determine the order of a module's tokens, where tokens change places."""
        split = self.splits.get(module, UNSPLIT)
        return split.reads if split.permutes else frozenset()

    @property
    def _shown(self) -> list[str]:
        return shown(self.encoders)

    def _places(
        self, name: str, plan: MicrobatchPlan, samples: Mapping[int, Sample]
    ) -> Iterator[tuple[int, int, np.ndarray, Places]]:
        """For each of `samples`: its cell, its place, the placeholders of encoder `name` among its tokens, and their
        encoder tokens, as places in the cell's flattened rows.

        Tokens of an encoder that reads another one's are at the placeholders of the media.

        Raises ValueError where the numbers of placeholders and of tokens differ.
        """
        spec, first_name = self.encoders[name], first_encoder(self.encoders, name)
        for cell in range(plan.cells):
            tokens_of = self._tokens(name, plan, cell)
            if spec.codes:
                yield from self._spoken(cell, tokens_of, samples)
                continue
            for sample in sorted(tokens_of.keys() & samples.keys()):
                where = np.flatnonzero(samples[sample].placeholders(first_name))
                grids, images = plan.metas[sample].grids.get(name, ()), samples[sample].tiled.get(name, ())
                index, shares = arrange(spec, grids, images)
                if len(where) != len(index):
                    question = samples[sample].question
                    raise ValueError(f"{question!r}: {len(where)} {name} placeholders for {len(index)} tokens")
                tokens = np.append(np.asarray(tokens_of[sample], np.int32), np.int32(NEWLINE))
                yield cell, sample, where, Places(tokens[np.where(index < 0, -1, index)], shares)

    @staticmethod
    def _spoken(
        cell: int, tokens_of: Mapping[int, list[int]], samples: Mapping[int, Sample]
    ) -> Iterator[tuple[int, int, np.ndarray, Places]]:
        """As `_places` for a generator of codes: code j of n is at token floor(j * m / n) of the m tokens of the last
        answer.

        tokens_of: the places of codes in the cell's flattened rows, by sample.
        """
        for sample in sorted(tokens_of.keys() & samples.keys()):
            tokens = np.asarray(tokens_of[sample], np.int32)
            if len(tokens):
                prompt, length = samples[sample].prompt, len(samples[sample].tokens)
                where = prompt + np.arange(len(tokens)) * (length - prompt) // len(tokens)
                yield cell, sample, where, Places(tokens[:, None], np.ones((len(tokens), 1), np.float32))

    def _tokens(self, name: str, plan: MicrobatchPlan, cell: int) -> dict[int, list[int]]:
        """The places of an encoder's tokens in the cell's flattened rows, by sample, in the order of its media."""
        spec, part = self.encoders[name], plan.encoders[name]
        width = spec.buckets[part.bucket][1]
        tokens_of: dict[int, list[int]] = {sample: [] for sample in plan.cell(cell)}
        for (sample, _, grid), (row, start) in zip(plan.media(name, cell), part.places[cell], strict=True):
            first = (row * width + start + spec.prefix) // spec.patches_per_token
            first = row * spec.queries if spec.queries else first
            tokens_of[sample] += range(first, first + token_counts(spec, [grid])[0])
        return tokens_of

    def _encoder_rows(
        self, name: str, plan: MicrobatchPlan, samples: Mapping[int, Sample], process_rows: ProcessRows | None
    ) -> dict[str, PartialArray]:
        spec, part = self.encoders[name], plan.encoders[name]
        rows, width = spec.buckets[part.bucket]
        lead = (rows * plan.cells, width)

        def empty(input_: str, shape: tuple[int, ...], value: float = 0, dtype: Any = np.float32) -> PartialArray:
            in_all_cells = input_ in ("segments", *self._ordered_by(name))
            cells = range(plan.cells) if in_all_cells else wanted_cells(process_rows, name, input_, plan.cells)
            return PartialArray.full(cells, shape, plan.cells, value=value, dtype=dtype)

        arrays = {
            "segments": empty("segments", lead, dtype=np.int32),
            "positions": empty("positions", lead if spec.codes else (*lead, spec.position_axes), dtype=np.int32),
        }
        if spec.derived:
            arrays |= {word: empty(word, lead, dtype=np.int32 if word == "items" else np.uint32) for word in WORDS}
        shapes = {} if spec.derived else patch_shapes(spec)
        of_media = (lead[0], width - spec.prefix) if spec.queries else lead
        opened = {key: empty(key, (*of_media, *shape), dtype=input_dtype(key, spec)) for key, shape in shapes.items()}
        reading = {cell for key in opened for cell in wanted_cells(process_rows, name, key, plan.cells)}
        for cell, places in enumerate(part.places):
            media, in_row = plan.media(name, cell), dict[int, int]()
            for item in sorted(range(len(places)), key=lambda i: places[i]):
                (row, start), (sample, number, grid) = places[item], media[item]
                in_row[row] = in_row.get(row, 0) + 1
                before = cell * rows + row, slice(start, start + spec.special)
                place = cell * rows + row, media_places(spec, (rows, width), grid, start)
                span = cell * rows + row, media_places(spec, (rows, width), grid, start, first=spec.queries)
                for where in (before, span):
                    _write(arrays["segments"], *where, in_row[row])
                if spec.derived:
                    self._write_media(name, plan, sample, arrays, span)
                    continue
                if spec.codes:
                    _write(arrays["positions"], *span, np.arange(*grid))
                else:
                    _write(arrays["positions"], *before, -1 - np.arange(spec.special)[:, None])
                    _write(arrays["positions"], *span, lambda grid=grid: _numbered(patch_places(grid, spec), spec))
                if cell in reading:
                    for key, values in patch_inputs(samples[sample], name, number, spec).items():
                        _write(opened[key], *place, values)
                if followed := plan.metas[sample].references.get(name, ())[number : number + 1]:
                    self._write_references(spec, followed[0], span, arrays, segment=in_row[row])
                    if cell in reading:
                        patches_NE = reference_patches(samples[sample], name, number, spec)
                        behind = slice(prod(grid), prod(grid) + len(patches_NE))
                        _write(opened["patches"], place[0], behind, patches_NE)
                        if spec.encoder:
                            _write(opened["latent_shares"], place[0], behind, (1, 0))
        arrays |= opened
        for pointer in (pointer for pointer in self.pointers if pointer.module == name):
            cells = sorted(self._pointing_cells(pointer, process_rows))
            of_latents = pointer.source == spec.encoder
            tokens = (lead[0], spec.queries or width // spec.patches_per_token)
            shape = (*of_media, spec.patch**spec.axes) if of_latents else tokens
            arrays[pointer.name] = index = PartialArray.full(cells, shape, plan.cells, value=-1)
            if of_latents:
                self._index_latents(name, plan, index)
            elif spec.derived:
                self._index_media(name, pointer.source, plan, index)
            elif pointer.source == "llm":
                self._index(name, plan, samples, index)
            else:
                self._index_nearest(name, pointer.source, plan, samples, index)
        return arrays

    @staticmethod
    def _write_references(
        spec: EncoderSpec,
        grids: Sequence[tuple[int, ...]],
        span: tuple[int, slice | np.ndarray],
        arrays: Mapping[str, PartialArray],
        *,
        segment: int,
    ) -> None:
        """Writes positions and segments of the pictures that a picture is made from, behind its own places.

        Args:
          spec: the generator's spec.
          grids: the patches along every axis of each picture.
          span: the row and the places of the picture itself.
          arrays: the module's inputs.
          segment: the number of its segment.
        """
        row, places = span
        assert isinstance(places, slice)
        start = places.stop
        for number, grid in enumerate(grids, 1):
            behind = slice(start, start := start + prod(grid))
            _write(arrays["segments"], row, behind, segment)
            _write(arrays["positions"], row, behind, _numbered(patch_places(grid, spec), spec, number))

    def _write_media(
        self,
        name: str,
        plan: MicrobatchPlan,
        sample: int,
        arrays: Mapping[str, PartialArray],
        span: tuple[int, slice | np.ndarray],
    ) -> None:
        """Writes the number of each token's medium, and words by which it sees its own medium and those before.

        name: an encoder of another one's tokens, with a segment at ``span`` for the sample, a place in `plan.metas`.
        """
        numbers_N = medium_numbers(self.encoders, name, plan.metas[sample])
        is_N, attends_N = MEDIA_RULES.words({"all": numbers_N >= 0}, numbers_N + 1)
        words = {"is": is_N, "attends": attends_N, "items": numbers_N + 1, "positions": numbers_N[:, None]}
        for key, values in words.items():
            _write(arrays[key], *span, values)

    def _index_media(self, name: str, source: str, plan: MicrobatchPlan, out: PartialArray) -> None:
        """Writes into `out` [R, T] the place of each token of `source` that the encoder `name` reads."""
        rows, _ = self.encoders[name].buckets[plan.encoders[name].bucket]
        for cell in range(plan.cells):
            tokens_of = self._tokens(source, plan, cell)
            segments = zip(plan.media(name, cell), plan.encoders[name].places[cell], strict=True)
            for (sample, _, (count,)), (row, start) in segments:
                _write(out, cell * rows + row, slice(start, start + count), np.asarray(tokens_of[sample], np.int32))

    def _index_latents(self, name: str, plan: MicrobatchPlan, out: PartialArray) -> None:
        """Writes into `out` [R, T, P**2] the places of a latent's pixels, for each patch of the generator `name`.

        Patches are those of pictures that it makes, and of references behind them.
        """
        spec, part = self.encoders[name], plan.encoders[name]
        encoder, bucket = self.encoders[spec.encoder], spec.buckets[part.bucket]
        width = encoder.buckets[plan.encoders[spec.encoder].bucket][1]
        (canvas,) = (canvas for canvas in encoder.canvases if prod(canvas) == width)
        for cell in range(plan.cells):
            media = zip(plan.media(spec.encoder, cell), plan.encoders[spec.encoder].places[cell], strict=True)
            for (sample, number, grid), (row, start) in zip(plan.media(name, cell), part.places[cell], strict=True):
                references = len(plan.metas[sample].references.get(name, ((),) * (number + 1))[number])
                first, *behind = [
                    picture_places((encoder_row * width + canvas_places(sides, canvas)).reshape(sides), spec)
                    for (_, _, sides), (encoder_row, _) in islice(media, 1 + references)
                ]
                row += cell * bucket[0]
                _write(out, row, media_places(spec, bucket, grid, start), first)
                if behind:
                    after = np.concatenate(behind)
                    _write(out, row, slice(len(first), len(first) + len(after)), after)

    def _index_nearest(
        self, name: str, source: str, plan: MicrobatchPlan, samples: Mapping[int, Sample], out: PartialArray
    ) -> None:
        """Writes into `out` [R, T/merge**A] the token of an encoder's image that lies nearest to each token of a
        drawing, as both fill the same area: of the last image before the drawing in the text; -1 where there is none.
        """
        spec, image_spec, part = self.encoders[name], self.encoders[source], plan.encoders[name]
        rows, _ = spec.buckets[part.bucket]
        for cell in range(plan.cells):
            tokens_of = self._tokens(source, plan, cell)
            for (sample, number, grid), (row, start) in zip(plan.media(name, cell), part.places[cell], strict=True):
                images = plan.metas[sample].grids.get(source, ())
                last = self._image_before(name, source, number, plan.metas[sample], samples.get(sample))
                if last is None:
                    continue
                first = sum(token_counts(image_spec, images[:last]))
                sides = [[n // of.merge for n in g] for g, of in ((grid, spec), (images[last], image_spec))]
                tokens = np.asarray(tokens_of[sample][first:], np.int32)[_nearest(*sides)]
                place = start // spec.patches_per_token
                _write(out, cell * rows + row, slice(place, place + len(tokens)), tokens)

    def _image_before(self, name: str, source: str, number: int, meta: SampleMeta, sample: Sample | None) -> int | None:
        """The number of the last image of `source` in the text before drawing `number` of the generator `name`; `None`
        without one, or without the sample.
        """
        if sample is None:
            return None
        first = sum(token_counts(self.encoders[name], meta.grids[name][:number]))
        drawing = np.flatnonzero(sample.placeholders(name))[first]
        before = np.count_nonzero(sample.placeholders(source)[:drawing])
        ends = np.cumsum(token_counts(self.encoders[source], meta.grids.get(source, ())))
        return int(np.count_nonzero(ends <= before)) - 1 if len(ends) and ends[0] <= before else None

    def _index(self, name: str, plan: MicrobatchPlan, samples: Mapping[int, Sample], out: PartialArray) -> None:
        """Writes into `out`, [R, T/merge**A] or [R, queries], the place of each token's placeholder in the LLM rows of
        its cell.
        """
        rows_per_cell, tokens_per_row = out.shape[0] // plan.cells, out.shape[1]
        for cell, sample, where, tokens in self._places(name, plan, samples):
            text_row, start = plan.llm.places[sample]
            numbers, is_conditioned = (
                tokens.index[:, 0],
                self._is_conditioned(name, samples[sample], plan.metas[sample]),
            )
            first = (text_row - cell * plan.llm.rows_per_cell) * plan.llm.width + start
            for row in np.unique(numbers // tokens_per_row):
                in_row = (numbers // tokens_per_row == row) & is_conditioned
                _write(out, cell * rows_per_cell + int(row), numbers[in_row] % tokens_per_row, first + where[in_row])

    def _is_conditioned(self, name: str, sample: Sample, meta: SampleMeta) -> np.ndarray | bool:
        """Whether each token of the media that the generator `name` draws is given to it, bool [tokens]; True for all.

        A medium that is learned without its condition receives none of its tokens.
        """
        dropped = sample.dropped.get(name, ())
        return ~np.repeat(dropped, token_counts(self.encoders[name], meta.grids[name])) if any(dropped) else True


def media_places(
    spec: EncoderSpec, bucket: tuple[int, int], grid: tuple[int, ...], start: int, *, first: int = 0
) -> slice | np.ndarray:
    """The places of a medium's patches in its row, in the order of `patchify`: a slice, or int32 [N] on a canvas.

    Args:
      spec: the encoder or generator.
      bucket: (rows per cell, positions per row).
      grid: patches along every axis of the medium.
      start: the first place of its segment, 0 with `EncoderSpec.queries`.
      first: the first place of patches in a row with `EncoderSpec.queries`: 0 in arrays of patches alone.
    """
    if spec.queries:
        start = first - spec.prefix
    canvas = next((c for c in spec.canvases if prod(c) == bucket[1] - spec.prefix), None)
    if canvas:
        return first + canvas_places(grid, canvas)
    return slice(start + spec.prefix, start + spec.prefix + prod(grid))


def _numbered(places_NA: np.ndarray, spec: EncoderSpec, number: int = 0) -> np.ndarray:
    """Positions of patches: their places, behind the number of their picture where there may be several."""
    return np.pad(places_NA, ((0, 0), (1, 0)), constant_values=number) if spec.references else places_NA


def _nearest(target: Sequence[int], source: Sequence[int]) -> np.ndarray:
    """For each token of a grid of ``target`` (rows, columns) the nearest token of one of ``source``, row by row."""
    rows, columns = (
        np.minimum((np.arange(n) + 0.5) * m // n, m - 1).astype(np.int64) for n, m in zip(target, source, strict=True)
    )
    return (rows[:, None] * source[1] + columns).ravel()


def shown(encoders: Mapping[str, EncoderSpec]) -> list[str]:
    """The names in `encoders` of those whose tokens the LLM reads, in their order; `encoders` are specs by name.

    The tokens of an encoder replace its placeholders; a generator reads the LLM's output at its placeholders instead.
    So generators are left out, and encoders whose `text_index` is None.
    """
    return [name for name, spec in encoders.items() if not spec.drawn and spec.text_index is not None]


def _write(out: PartialArray, row: int, where: slice | np.ndarray, values: Any) -> None:
    """Writes `values` into a row, if the row is present. `values` may be a function; it is called only then."""
    target = out.row(row)
    if target is not None:
        target[where] = values() if callable(values) else values
