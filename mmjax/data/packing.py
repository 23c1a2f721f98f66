"""From samples to the static arrays of one step: cells, encoder rows, buckets, index maps.

A cell holds equally many consecutive LLM rows and the encoder rows of exactly their images, so packing never crosses
a cell. Nothing here knows what an encoder encodes: an encoder is a name and an `EncoderSpec`.

Legend: B LLM rows of a microbatch, S sequence length, R encoder rows of a microbatch, T patches per encoder row,
P patch edge, C channels, N patches of one image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmjax.configurable import ConfigError
from mmjax.data.types import EncoderSpec, Microbatch, Sample, StepBatch, WorstCase


def patchify(image: np.ndarray, spec: EncoderSpec) -> tuple[np.ndarray, np.ndarray]:
    """Patches [N, P*P*C] float32 and their (row, column) [N, 2] int32 of an image [h, w, C].

    Each merge × merge block of patches is contiguous; blocks are row-major, and so are the patches inside a block and
    the pixels inside a patch (channels last). Raises ValueError when the size is not a multiple of patch * merge.
    """
    height, width, channels = image.shape
    if height % spec.block or width % spec.block:
        raise ValueError(f"image of {height}x{width} pixels: pad it to multiples of patch * merge = {spec.block}")
    rows, columns, k, p = height // spec.block, width // spec.block, spec.merge, spec.patch
    blocks = image.reshape(rows, k, p, columns, k, p, channels).transpose(0, 3, 1, 4, 2, 5, 6)
    patches_NE = np.ascontiguousarray(blocks.reshape(-1, p * p * channels), np.float32)
    grid = np.indices((rows * k, columns * k), np.int32).reshape(2, rows, k, columns, k)
    return patches_NE, np.ascontiguousarray(grid.transpose(1, 3, 2, 4, 0).reshape(-1, 2))


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

    rows_per_cell: LLM rows of a cell, one sample each. Packing images of at most p patches into rows of T needs at
    most ceil(images / floor(T / p)) rows: a row is left only when it holds floor(T / p) images or more.

    Raises ConfigError when given buckets, `sequence_length` or an encoder's grid are too small for the worst case, so
    that a run fails at its start and not hours later.
    """
    if worst.tokens > sequence_length:
        raise ConfigError(
            f"Data.sequence_length={sequence_length} is too short for samples of up to {worst.tokens} tokens: "
            f"set it to at least {worst.tokens}"
        )
    for name, spec in encoders.items():
        side = worst.sides.get(name, 0)
        if spec.grid and side > spec.grid:
            raise ConfigError(
                f"{name}/ViT.grid={spec.grid}: an image may be {side} patches long, beyond the learned positions; "
                f"scale images down to {spec.grid * spec.patch} pixels, or train with grid={side} or positions='rope2d'"
            )
    return {name: _fill(name, spec, worst, rows_per_cell) for name, spec in encoders.items()}


def _fill(name: str, spec: EncoderSpec, worst: WorstCase, rows_per_cell: int) -> EncoderSpec:
    images, largest = worst.images.get(name, 0) * rows_per_cell, worst.patches.get(name, 0)
    if not spec.buckets:
        return replace(spec, buckets=((max(1, images), max(largest, spec.merge**2)),))
    for _, width in spec.buckets:
        if width % spec.merge**2:
            raise ConfigError(
                f"{name}/Packing.buckets={spec.buckets}: patches must be multiples of merge² = {spec.merge**2}"
            )
    if not any(width >= largest and rows * (width // max(1, largest)) >= images for rows, width in spec.buckets):
        width = max([width for _, width in spec.buckets if width >= largest], default=largest)
        fits = (-(-images // (width // largest)), width)
        raise ConfigError(
            f"{name}/Packing.buckets={spec.buckets} must hold {images} images of {largest} patches a cell: add {fits}"
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
        counts = {"samples": len(samples), "images": sum(len(i) for s in samples for i in s.media.values())}
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
        images = [[image for sample in cell for image in sample.media.get(name, ())] for cell in cells]
        bucket, places = self._choose_bucket(name, spec, images, least)
        rows, width = spec.buckets[bucket]
        total = rows * len(cells)
        patches_RTE = np.zeros((total, width, spec.patch**2 * spec.channels), np.float32)
        segments_RT = np.zeros((total, width), np.int32)
        positions_RT2 = np.zeros((total, width, 2), np.int32)
        for cell, cell_places in enumerate(places):
            order = sorted(range(len(cell_places)), key=lambda i: cell_places[i])
            in_row: dict[int, int] = {}
            for item in order:
                row, start = cell_places[item]
                in_row[row] = in_row.get(row, 0) + 1
                patches_NE, at_N2 = patchify(images[cell][item], spec)
                span = (cell * rows + row, slice(start, start + len(patches_NE)))
                patches_RTE[span], positions_RT2[span], segments_RT[span] = patches_NE, at_N2, in_row[row]
            starts = [(row * width + start) // spec.merge**2 for row, start in cell_places]
            _index_cell(name, spec, cells[cell], starts, index_BS[cell * rows_per_cell :])
        return {"patches": patches_RTE, "segments": segments_RT, "positions": positions_RT2}, bucket

    def _choose_bucket(
        self, name: str, spec: EncoderSpec, images: Sequence[Sequence[np.ndarray]], least: int
    ) -> tuple[int, list[list[tuple[int, int]]]]:
        """The smallest bucket from `least` on that every cell fits into; per cell the (row, offset) of each image."""
        sizes = [[spec.patches(*image.shape[:2]) for image in cell] for cell in images]
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
        wanted = f"{needed} rows of {spec.buckets[-1][1]} patches" if needed else f"an image of {largest} patches"
        raise ConfigError(
            f"{name}/Packing.buckets={spec.buckets} cannot hold {wanted} in a cell: add a larger (rows, patches) pair"
        )


def _index_cell(
    name: str, spec: EncoderSpec, samples: Sequence[Sample], starts: Sequence[int], out: np.ndarray
) -> None:
    """Writes into `out` [≥ rows, S], the LLM rows of a cell, where each placeholder's token is in the cell's tokens.

    starts: for each image of the cell, in order, the index of its first merged token.
    """
    left = iter(starts)
    for row, sample in enumerate(samples):
        counts = [spec.tokens(*image.shape[:2]) for image in sample.media.get(name, ())]
        found = [token for count, start in zip(counts, left, strict=False) for token in range(start, start + count)]
        where = np.flatnonzero(sample.placeholders(name))
        if len(where) != len(found):
            raise ValueError(f"{sample.question!r}: {len(where)} {name} placeholders for {len(found)} tokens")
        out[row, where] = found
