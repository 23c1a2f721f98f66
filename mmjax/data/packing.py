"""From samples to the static arrays of one step: cells, encoder rows, buckets, index maps.

A cell holds equally many consecutive LLM rows and the encoder rows of exactly their media, so packing never crosses
a cell. Nothing here knows what an encoder encodes: an encoder is a name and an `EncoderSpec`.

Legend: B LLM rows of a microbatch, S sequence length, R encoder rows of a microbatch, T patches per encoder row,
E numbers in a patch, A axes of a medium, N patches of one medium.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmjax.configurable import ConfigError
from mmjax.data.types import EncoderSpec, Microbatch, Sample, StepBatch, WorstCase


def patchify(medium: np.ndarray, spec: EncoderSpec) -> tuple[np.ndarray, np.ndarray]:
    """Patches [N, E] float32 of a medium, and the place of each along every axis [N, A] int32.

    Each block of merge patches along every axis is contiguous; blocks are row-major, and so are the patches inside a
    block and the pixels inside a patch (channels last). Raises ValueError when a side is no multiple of patch * merge,
    or the medium has other axes or channels than the encoder's.
    """
    *size, channels = medium.shape
    if len(size) != spec.axes or channels != spec.channels:
        raise ValueError(f"{spec.medium} of shape {medium.shape}: {spec.axes} axes of {spec.channels} channels wanted")
    if any(side % spec.block for side in size):
        shown = "x".join(map(str, size))
        raise ValueError(f"{spec.medium} of {shown} {spec.unit}: pad it to multiples of patch * merge = {spec.block}")
    k, p, every = spec.merge, spec.patch, range(spec.axes)
    blocks = [side // spec.block for side in size]
    # Of every axis the block, the patch in it and the pixel in that; then all blocks, all patches, all pixels.
    cut = medium.reshape(*(n for block in blocks for n in (block, k, p)), channels)
    order = [3 * axis + level for level in range(3) for axis in every]
    patches_NE = np.ascontiguousarray(cut.transpose(*order, 3 * spec.axes).reshape(-1, spec.patch_values), np.float32)
    grid = np.indices([block * k for block in blocks], np.int32)
    places = grid.reshape(spec.axes, *(n for block in blocks for n in (block, k)))
    order = [1 + 2 * axis + level for level in range(2) for axis in every]
    return patches_NE, np.ascontiguousarray(places.transpose(*order, 0).reshape(-1, spec.axes))


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """Where each item goes, as (row, offset): largest first, each into the first row with room.

    Every size must be at most `capacity`. Ties keep the given order, so the result is a pure function of `sizes`.
    """
    free: list[int] = []
    places: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        row = next((r for r, room in enumerate(free) if room >= sizes[item]), len(free))
        if row == len(free):
            free.append(capacity)
        places[item] = (row, capacity - free[row])
        free[row] -= sizes[item]
    return places


def fill_buckets(
    encoders: Mapping[str, EncoderSpec], worst: WorstCase, *, rows_per_cell: int, sequence_length: int
) -> dict[str, EncoderSpec]:
    """`encoders` with buckets that hold every batch a source can make; () becomes one for the worst case.

    rows_per_cell: LLM rows of a cell, one sample each. Packing media of at most p patches into rows of T needs at
    most ceil(media / floor(T / p)) rows: a row is left only when it holds floor(T / p) media or more.

    Raises ConfigError when given buckets, `sequence_length` or an encoder's learned positions are too small for the
    worst case, so that a run fails at its start and not hours later.
    """
    if worst.tokens > sequence_length:
        raise ConfigError(
            f"Data.sequence_length={sequence_length} is too short for samples of up to {worst.tokens} tokens: "
            f"set it to at least {worst.tokens}"
        )
    for name, spec in encoders.items():
        side = worst.sides.get(name, 0)
        if spec.longest and side > spec.longest:
            article = "an" if spec.medium == "image" else "a"
            field = spec.bounded_by.rpartition(".")[2]
            raise ConfigError(
                f"{name}/{spec.bounded_by}={spec.longest}: {article} {spec.medium} may be {side} patches long, beyond "
                f"the learned positions; scale it down to {spec.longest * spec.patch} {spec.unit}, or train with "
                f"{field}={side} or positions='{spec.boundless}'"
            )
    return {name: _fill(name, spec, worst, rows_per_cell) for name, spec in encoders.items()}


def _fill(name: str, spec: EncoderSpec, worst: WorstCase, rows_per_cell: int) -> EncoderSpec:
    media, largest = worst.media.get(name, 0) * rows_per_cell, worst.patches.get(name, 0)
    if not spec.buckets:
        return replace(spec, buckets=((max(1, media), max(largest, spec.patches_per_token)),))
    for _, width in spec.buckets:
        if width % spec.patches_per_token:
            merge = "merge²" if spec.axes == 2 else "merge"
            raise ConfigError(
                f"{name}/Packing.buckets={spec.buckets}: patches must be multiples of {merge} = "
                f"{spec.patches_per_token}"
            )
    if not any(width >= largest and rows * (width // max(1, largest)) >= media for rows, width in spec.buckets):
        width = max([width for _, width in spec.buckets if width >= largest], default=largest)
        fits = (-(-media // (width // largest)), width)
        raise ConfigError(
            f"{name}/Packing.buckets={spec.buckets} must hold {media} {spec.medium}s of {largest} patches a cell: "
            f"add {fits}"
        )
    return replace(spec, buckets=tuple(sorted(spec.buckets, key=lambda bucket: bucket[0] * bucket[1])))


@dataclass(frozen=True, kw_only=True)
class Packer:
    """Packs the samples of a step. `encoders` must have their buckets set (see `fill_buckets`).

    cells: least common multiple of all modules' dp. microbatches: ops per step. sequence_length: tokens of an LLM row.
    one_bucket: all microbatches of a step share the largest bucket that one of them needs.
    """

    encoders: Mapping[str, EncoderSpec]
    sequence_length: int
    microbatches: int
    cells: int
    pad: int
    one_bucket: bool = False

    def __post_init__(self) -> None:
        for name, spec in self.encoders.items():
            if not spec.buckets:
                raise ConfigError(f"{name}/Packing.buckets=() is not filled in: call fill_buckets first")

    def step(self, step: int, samples: Sequence[Sample]) -> StepBatch:
        """The batch of `step`: microbatch m holds `samples[m*n:(m+1)*n]`, one LLM row each; empty rows fill up."""
        per = -(-len(samples) // self.microbatches)
        cut = [samples[m * per : (m + 1) * per] for m in range(self.microbatches)]
        parts = [self.microbatch(part, per) for part in cut]
        if self.one_bucket:
            largest = {name: max(part.bucket[name] for part in parts) for name in self.encoders}
            parts = [self._repacked(part, own, per, largest) for part, own in zip(parts, cut, strict=True)]
        counts = {"samples": len(samples), "media": sum(len(m) for s in samples for m in s.media.values())}
        counts["llm_tokens"] = sum(len(s.tokens) for s in samples)
        counts["llm_tokens_padded"] = sum(p.inputs["llm"]["tokens"].size for p in parts)
        for name in self.encoders:
            counts[f"{name}_patches"] = sum(int((p.inputs[name]["segments"] > 0).sum()) for p in parts)
            counts[f"{name}_patches_padded"] = sum(p.inputs[name]["segments"].size for p in parts)
        denominator = float(sum(float(s.loss_weights[1:].sum()) for s in samples))
        return StepBatch(step=step, microbatches=tuple(parts), denominator=denominator, counts=counts)

    def _repacked(self, part: Microbatch, samples: Sequence[Sample], rows: int, bucket: dict[str, int]) -> Microbatch:
        return part if part.bucket == bucket else self.microbatch(samples, rows, bucket)

    def microbatch(self, samples: Sequence[Sample], rows: int, at_least: Mapping[str, int] | None = None) -> Microbatch:
        """`samples` packed into at least `rows` LLM rows (rounded up to a multiple of `cells`).

        at_least: smallest bucket to use, per encoder; buckets are in rising order.
        """
        rows_per_cell = -(-max(rows, len(samples), 1) // self.cells)
        cells = [samples[c * rows_per_cell : (c + 1) * rows_per_cell] for c in range(self.cells)]
        llm = self._llm_rows(samples, rows_per_cell * self.cells)
        inputs, bucket = {"llm": llm}, {}
        for name, spec in self.encoders.items():
            index_BS = np.full_like(llm["tokens"], -1)
            inputs[name], bucket[name] = self._encoder_rows(
                name, spec, cells, rows_per_cell, index_BS, (at_least or {}).get(name, 0)
            )
            llm[f"{name}_index"] = index_BS
        return Microbatch(inputs=inputs, bucket=bucket)

    def _llm_rows(self, samples: Sequence[Sample], rows: int) -> dict[str, np.ndarray]:
        shape = (rows, self.sequence_length)
        arrays = {name: np.zeros(shape, np.int32) for name in ("positions", "segments")}
        arrays |= {name: np.full(shape, self.pad, np.int32) for name in ("tokens", "targets")}
        weights_BS = np.zeros(shape, np.float32)
        for row, sample in enumerate(samples):
            n = len(sample.tokens)
            strangers = sorted(set(sample.media) - set(self.encoders))
            if strangers:
                raise ConfigError(f"Model.encoders={sorted(self.encoders)} lack {strangers[0]!r}, which a sample has")
            if n > self.sequence_length:
                raise ConfigError(
                    f"Data.sequence_length={self.sequence_length} is too short for a sample of {n} tokens "
                    f"({sample.question!r}): set it to at least {n}"
                )
            arrays["tokens"][row, :n] = sample.tokens
            arrays["targets"][row, : n - 1] = sample.tokens[1:]
            arrays["positions"][row, :n] = np.arange(n)
            arrays["segments"][row, :n] = 1
            weights_BS[row, : n - 1] = sample.loss_weights[1:]
        return {**arrays, "weights": weights_BS}

    def _encoder_rows(
        self,
        name: str,
        spec: EncoderSpec,
        cells: Sequence[Sequence[Sample]],
        rows_per_cell: int,
        index_BS: np.ndarray,
        least: int,
    ) -> tuple[dict[str, np.ndarray], int]:
        """The encoder's arrays and bucket; fills `index_BS` at the placeholders of the same microbatch."""
        media = [[medium for sample in cell for medium in sample.media.get(name, ())] for cell in cells]
        bucket, places = self._choose_bucket(name, spec, media, least)
        rows, width = spec.buckets[bucket]
        total = rows * len(cells)
        patches_RTE = np.zeros((total, width, spec.patch_values), np.float32)
        segments_RT = np.zeros((total, width), np.int32)
        positions_RTA = np.zeros((total, width, spec.axes), np.int32)
        for cell, cell_places in enumerate(places):
            order = sorted(range(len(cell_places)), key=lambda i: cell_places[i])
            in_row: dict[int, int] = {}
            for item in order:
                row, start = cell_places[item]
                in_row[row] = in_row.get(row, 0) + 1
                patches_NE, at_NA = patchify(media[cell][item], spec)
                span = (cell * rows + row, slice(start, start + len(patches_NE)))
                patches_RTE[span], positions_RTA[span], segments_RT[span] = patches_NE, at_NA, in_row[row]
            starts = [(row * width + start) // spec.patches_per_token for row, start in cell_places]
            _index_cell(name, spec, cells[cell], starts, index_BS[cell * rows_per_cell :])
        return {"patches": patches_RTE, "segments": segments_RT, "positions": positions_RTA}, bucket

    def _choose_bucket(
        self, name: str, spec: EncoderSpec, media: Sequence[Sequence[np.ndarray]], least: int
    ) -> tuple[int, list[list[tuple[int, int]]]]:
        """The smallest bucket from `least` on that every cell fits into; per cell the (row, offset) of each medium."""
        sizes = [[spec.patches(*medium.shape[:-1]) for medium in cell] for cell in media]
        largest = max((n for cell in sizes for n in cell), default=0)
        needed = 0
        for bucket in range(least, len(spec.buckets)):
            rows, width = spec.buckets[bucket]
            if largest > width:
                continue
            places = [first_fit_decreasing(cell, width) for cell in sizes]
            needed = max((row + 1 for cell in places for row, _ in cell), default=0)
            if needed <= rows:
                return bucket, places
        one = f"an image of {largest} patches" if spec.medium == "image" else f"a recording of {largest} patches"
        wanted = f"{needed} rows of {spec.buckets[-1][1]} patches" if needed else one
        raise ConfigError(
            f"{name}/Packing.buckets={spec.buckets} cannot hold {wanted} in a cell: add a larger (rows, patches) pair"
        )


def _index_cell(
    name: str, spec: EncoderSpec, samples: Sequence[Sample], starts: Sequence[int], out: np.ndarray
) -> None:
    """Writes into `out` [≥ rows, S], the LLM rows of a cell, where each placeholder's token is in the cell's tokens.

    starts: for each medium of the cell, in order, the index of its first merged token.
    """
    left = iter(starts)
    for row, sample in enumerate(samples):
        counts = [spec.tokens(*medium.shape[:-1]) for medium in sample.media.get(name, ())]
        found = [token for count, start in zip(counts, left, strict=False) for token in range(start, start + count)]
        where = np.flatnonzero(sample.placeholders(name))
        if len(where) != len(found):
            raise ValueError(f"{sample.question!r}: {len(where)} {name} placeholders for {len(found)} tokens")
        out[row, where] = found
