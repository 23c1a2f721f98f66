"""Buckets, the static shapes of a module's cells: checks configured ones, or chooses them from the data.

A bucket is (rows per cell, positions per row). Its compute counts whole rows, attention included. In a configuration
its rows are those of a microbatch, whatever the layouts (see `per_cell`). To choose buckets, each microbatch of some
steps goes into the cheapest bucket that holds its fullest cell; the buckets with the least total compute win. One of
the buckets holds the worst case, so that no step can fail.

Legend: N microbatches of these steps, W widths, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from mmjax.configurable import ConfigError
from mmjax.data.first_fit import rows_needed
from mmjax.data.packing import Packer
from mmjax.data.plan import MicrobatchPlan
from mmjax.data.reorder import StepOrder
from mmjax.data.split import UNSPLIT, Split
from mmjax.data.types import EncoderSpec, SampleMeta, WorstCase

Bucket = tuple[int, int]
Count = TypeVar("Count", int, np.ndarray)
_NONE: Mapping[str, float] = MappingProxyType({})
_WIDTHS, _HEIGHTS = 8, 32
"""The most candidates: widths from sizes of segments, and as many from sizes of cells; numbers of rows per width."""
_TIMES = (1, 2, 4)
"""Widths that hold this many of the largest segments are candidates."""
_STEPS, _SAMPLES = (16, 64), 8_192
"""The data read to choose buckets: the least and the most steps, and about this many samples in between."""
_NEVER = np.iinfo(np.int64).max
"""The number of rows that stands for a segment wider than the row."""


def compute(bucket: Bucket, pairs: float) -> float:
    """Compute of a cell of this (rows, positions per row) shape, in units of a position's.

    compute((4, 256), 0.0) is 1024.0.

    pairs: compute of a pair of positions in one row, in the same unit, such as 0.001. A row of width w has w² pairs.
    """
    rows, width = bucket
    return rows * (width + pairs * width * width)


# ---- configured buckets ----------------------------------------------------------------------------------------------


def per_cell(buckets: Sequence[Bucket], cells: int) -> tuple[Bucket, ...]:
    """(rows per cell, positions per row) shapes from shapes of a microbatch with `cells` cells.

    Rows are divided by `cells` and rounded up; duplicates are removed, and the order stays: ((8, 256), (7, 256)) are
    ((4, 256),) for 2 cells.
    """
    return tuple(dict.fromkeys((-(-rows // cells), width) for rows, width in buckets))


def per_microbatch(buckets: Sequence[Bucket], cells: int) -> tuple[Bucket, ...]:
    """(rows of a microbatch, positions per row) shapes from shapes of its `cells` cells, in the same order.

    Rows are multiplied by `cells`: ((4, 256),) is ((8, 256),) for 2 cells.
    """
    return tuple((rows * cells, width) for rows, width in buckets)


def fill_buckets(
    encoders: Mapping[str, EncoderSpec],
    worst: WorstCase,
    *,
    rows_per_cell: int,
    sequence_length: int,
    pairs: Mapping[str, float] = _NONE,
) -> dict[str, EncoderSpec]:
    """Copies of `encoders` with buckets, cheapest first. Each has a bucket that holds any batch of the source.

    If no configured bucket does, one is added, since the rows that a cell needs depend on the layouts. Packing media of
    at most p patches into rows of T needs at most ceil(media / floor(T / p)) rows, since first fit opens a row only
    when the others hold floor(T / p) media or more. An encoder without configured buckets gets one, with a row for each
    medium, or for as many as `EncoderSpec.abreast`.

    Args:
      encoders: specs by name, {"vision": EncoderSpec(…)}, whose `buckets` are the configured (rows per cell, patches
        per row) pairs, such as ((8, 256),); () for none.
      worst: the source's worst case, `source.worst_case()`.
      rows_per_cell: samples of a cell.
      sequence_length: tokens of an LLM row.
      pairs: by module, the compute of a pair of positions of one row relative to a position's, such as {"vision":
        0.001}; 0 for a module that is missing.

    Raises:
      ConfigError: `sequence_length` or an encoder's learned positions are too small for the worst case, or the width
        of a bucket is no multiple of the patches of a token.
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
    return {
        name: _with_buckets(name, spec, worst, rows_per_cell=rows_per_cell, pairs=pairs.get(name, 0.0))
        for name, spec in encoders.items()
    }


def text_buckets(
    buckets: Sequence[Bucket],
    worst: WorstCase,
    *,
    samples_per_cell: int,
    sequence_length: int,
    pairs: float = 0.0,
) -> tuple[Bucket, ...]:
    """The LLM's buckets, cheapest first; if none holds a cell of the longest samples, one that does is added.

    Args:
      buckets: the configured (rows per cell, tokens per row) buckets, such as ((4, 1024),); the result, which has the
        same form, is () if there are none.
      worst: the source's worst case, `source.worst_case()`.
      samples_per_cell: the most samples of a cell.
      sequence_length: the most tokens of a row.
      pairs: compute of a pair of tokens in one row relative to a token's, such as 0.001; it decides which is cheaper.

    Raises:
      ConfigError: a bucket is wider than `sequence_length`.
    """
    for _, width in buckets:
        if width > sequence_length:
            raise ConfigError(
                f"llm/Packing.buckets: rows of {width} tokens are longer than Data.sequence_length={sequence_length}; "
                f"use {sequence_length}"
            )
    if not buckets:
        return ()
    return _with_room(
        buckets, most=samples_per_cell, largest=max(1, worst.tokens), least_width=sequence_length, pairs=pairs
    )


def _with_room(
    buckets: Sequence[Bucket], *, most: int, largest: int, least_width: int, pairs: float, alone: bool = False
) -> tuple[Bucket, ...]:
    """The buckets, cheapest first; if none holds `most` segments of `largest` positions, one that does is added.

    The added bucket is as wide as the widest bucket that holds a segment, or `least_width` if none does. ``alone``:
    whether each segment has a row to itself.
    """
    candidates = list(buckets)
    if not any(rows * _abreast(width, largest, alone=alone) >= most for rows, width in buckets):
        width = max([width for _, width in buckets if width >= largest], default=least_width)
        candidates.append((-(-most // _abreast(width, largest, alone=alone)), width))
    return tuple(sorted(candidates, key=lambda bucket: compute(bucket, pairs)))


def _abreast(width: int, largest: int, *, alone: bool) -> int:
    """Number of segments of `largest` positions in a row; at most 1 with `alone`."""
    return min(1, width // largest) if alone else width // largest


def _with_buckets(name: str, spec: EncoderSpec, worst: WorstCase, *, rows_per_cell: int, pairs: float) -> EncoderSpec:
    media = worst.media.get(name, 0) * rows_per_cell
    largest = _largest(name, spec, worst)
    if not spec.buckets:
        return replace(spec, buckets=((max(1, -(-media // spec.abreast)), spec.abreast * largest),))
    for _, width in spec.buckets:
        if width % spec.patches_per_token:
            merge, unit = "merge²" if spec.axes == 2 else "merge", spec.patches_per_token
            fix = f"must be multiples of {merge} = {unit}, such as {-(-width // unit) * unit}"
            raise ConfigError(f"{name}/Packing.buckets: rows of {width} patches {fix}")
        legal = [spec.prefix + prod(canvas) for canvas in spec.canvases]
        if legal and width not in legal:
            fix = f"hold none of the canvases {spec.canvases} behind {spec.queries} queries; use one of {legal}"
            raise ConfigError(f"{name}/Packing.buckets: rows of {width} positions {fix}")
    buckets = _with_room(spec.buckets, most=media, largest=largest, least_width=largest, pairs=pairs, alone=spec.alone)
    return replace(spec, buckets=buckets)


def _largest(name: str, spec: EncoderSpec, worst: WorstCase) -> int:
    """The most positions of a medium, or of its canvas."""
    if spec.canvases:
        return spec.prefix + prod(spec.canvases[-1])
    return spec.prefix + max(worst.patches.get(name, 0), spec.patches_per_token)


# ---- chosen buckets --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ChosenBuckets:
    """Buckets of a module and their padding.

    Attributes:
      buckets: the (rows per cell, positions per row) buckets, cheapest first.
      padding: share of padding, 0 to 1, in the compute of the microbatches that were read.
      alone: the same share if the last bucket were the only one.
      microbatches: number of microbatches that were read.
    """

    buckets: tuple[Bucket, ...]
    padding: float
    alone: float
    microbatches: int


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The cells of a module in some microbatches.

    Attributes:
      sizes: `sizes[microbatch][cell]` lists the number of positions of each segment.
      largest: the most positions of a segment.
      most: the most segments of a cell.
      widest: the largest width of a row; 0 = any.
      split: how rows are split over ranks, which rounds widths up.
      pairs: see `compute`.
      abreast: number of equal parts of a row, of which each has whole segments; widths and rows are those of parts.
      alone: whether each segment has a row to itself.
    """

    sizes: Sequence[Sequence[Sequence[int]]]
    largest: int
    most: int
    widest: int = 0
    split: Split = UNSPLIT
    pairs: float = 0.0
    abreast: int = 1
    alone: bool = False

    def whole_rows(self, parts: Count) -> Count:
        """A number of parts, or an array of numbers, rounded up to those of whole rows."""
        return -(-parts // self.abreast) * self.abreast

    @property
    def real(self) -> float:
        """Compute of all segments without padding, in the unit of `compute`; each segment attends to itself alone."""
        return sum(compute((1, n), self.pairs) for cells in self.sizes for cell in cells for n in cell)


def plan_some_steps(
    packer: Packer, meta: Callable[[int], SampleMeta], global_batch: int, order: StepOrder | None = None
) -> list[tuple[MicrobatchPlan, ...]]:
    """The plans of the microbatches of 16 to 64 steps of a run, fewer where a step has more samples.

    The steps are 0, 1, 3, 6, 10, …, denser at the beginning; they do not depend on where the run ends.

    Args:
      packer: packs the samples, such as `plan(recipe).packer`.
      meta: returns the metadata of a sample from its index, such as `Source.meta`.
      global_batch: samples of a step.
      order: reorders the samples of a step, as `step_order(recipe, parts)` gives it; by default they stay as they come.

    Returns:
      For each of these steps, ascending, a tuple with the plan of each of its microbatches.
    """
    plans = []
    for number in range(max(_STEPS[0], min(_STEPS[1], _SAMPLES // global_batch))):
        first = number * (number + 1) // 2 * global_batch
        metas = packer.completed([meta(first + sample) for sample in range(global_batch)])
        if order:
            metas = [metas[sample] for sample in order(metas).order]
        plans.append(packer.plan(0, metas).microbatches)
    return plans


def cells_of(parts: Iterable[Sequence[MicrobatchPlan]], module: str, *, together: bool) -> list[list[list[int]]]:
    """Positions of each segment of `module`, as in `Cells.sizes`: `result[microbatch][cell]` is a list of them.

    A microbatch with two cells of one sample each is [[96], [80]] for "llm".

    Args:
      parts: for each step, the plans of its microbatches, as `plan_some_steps` gives them.
      module: "llm", or the name of an encoder or generator.
      together: whether all cells of a step form one item of the result, as they share a bucket.
    """
    segments: list[list[list[int]]] = []
    for step in parts:
        of_step = [[part.segments(module, cell) for cell in range(part.cells)] for part in step]
        segments += [[cell for cells in of_step for cell in cells]] if together else of_step
    return segments


def cells_for(packer: Packer, worst: WorstCase, parts: Sequence[Sequence[MicrobatchPlan]], module: str) -> Cells:
    """The cells of `module` in the microbatches of some steps, and their bounds, for `choose`.

    Args:
      packer: the packer that planned them.
      worst: the source's worst case, `source.worst_case()`.
      parts: for each step, the plans of its microbatches, as `plan_some_steps` gives them.
      module: "llm", or the name of an encoder or generator.
    """
    per_cell = max((part.samples_per_cell for step in parts for part in step), default=1)
    sizes, pairs = cells_of(parts, module, together=packer.one_bucket), packer.pairs.get(module, 0.0)
    if module == "llm":
        return Cells(
            sizes=sizes,
            largest=worst.tokens,
            most=per_cell,
            widest=packer.sequence_length,
            split=packer.splits.get(module, UNSPLIT),
            pairs=pairs,
        )
    spec, media = packer.encoders[module], worst.media.get(module, 0)
    split = packer.splits.get(module, Split(unit=spec.patches_per_token))
    return Cells(
        sizes=sizes,
        largest=_largest(module, spec, worst),
        most=max(1, media * per_cell),
        split=split if spec.abreast == 1 else Split(unit=split.unit),
        pairs=pairs,
        abreast=spec.abreast,
        alone=spec.alone,
    )


def choose(cells: Cells, count: int) -> ChosenBuckets:
    """At most `count` buckets of least compute for `cells`, none wider than `cells.widest`. One holds the worst case.

    Dynamic programming searches only chains, in which each bucket holds all that a cheaper one holds. If all candidates
    have the same width, the best chain is also the best set. Candidates for widths come from `_widths`.

    cells: the cells of a module, as `cells_for(packer, worst, parts, "vision")` gives them.

    Returns:
      `.buckets`, (rows per cell, positions per row) pairs, cheapest first, such as ((4, 256), (4, 512)); the shares of
      padding in compute, 0 to 1, with them (`.padding`) and with the last alone (`.alone`); and `.microbatches`, the
      number that was read.
    """
    widths = _widths(cells)
    rows_NW = np.array([_rows(of_microbatch, widths, alone=cells.alone) for of_microbatch in cells.sizes], np.int64)
    rows_NW = rows_NW.reshape(-1, len(widths))
    wide_enough = rows_NW < _NEVER
    rows_NW[wide_enough] = cells.whole_rows(np.maximum(rows_NW[wide_enough], 1))
    best = shortest_chain(rows_NW, widths, tops=_tops(cells, widths), count=count, pairs=cells.pairs)
    real, padded = cells.real, _padded(rows_NW, widths, best, cells.pairs)
    alone = _padded(rows_NW, widths, best[-1:], cells.pairs)
    per_microbatch = sum(map(len, cells.sizes)) / max(1, len(cells.sizes))  # a bucket is the shape of every cell
    shares = [1 - real / (total * per_microbatch) if total else 0.0 for total in (padded, alone)]
    # Widths are not rounded here: the packer rounds them for its layout, which may change when a run goes on.
    parts = cells.abreast
    allowed = tuple((rows // parts, parts * min(width, cells.widest or width)) for rows, width in best)
    return ChosenBuckets(buckets=allowed, padding=shares[0], alone=shares[1], microbatches=len(cells.sizes))


def shortest_chain(
    rows_NW: np.ndarray, widths: Sequence[int], *, tops: Sequence[Bucket], count: int, pairs: float
) -> tuple[Bucket, ...]:
    """The chain of at most `count` buckets of least compute; each holds every microbatch that a cheaper one holds.

    Buckets are (rows, width) pairs, cheapest first. Widths are among `widths`.
    Ties go to fewer buckets, so the result is a pure function of its arguments.

    Args:
      rows_NW: int64, rows that each of N microbatches needs at each width; the largest int64 where a row of this width
        is too short for a segment.
      widths: the W widths, such as (256, 512).
      tops: buckets that hold every microbatch; the costliest bucket of the chain is one of them. Their widths are among
        `widths`.
      count: the most buckets.
      pairs: compute of a pair of positions in one row relative to a position's, see `compute`; 0.0 counts positions
        alone.
    """
    rows_NW, weight_N = np.unique(rows_NW, axis=0, return_counts=True)
    candidates = {*tops}
    for column, width in enumerate(widths):
        row_counts = np.unique(np.maximum(rows_NW[:, column], 1))  # a microbatch without segments has a shape too
        candidates |= {(int(rows), width) for rows in _spread_over(row_counts[row_counts < _NEVER], _HEIGHTS)}
    candidates = sorted(candidates, key=lambda bucket: (compute(bucket, pairs), bucket))
    costs_C = np.array([compute(bucket, pairs) for bucket in candidates])
    column_of = {width: column for column, width in enumerate(widths)}
    holds_CN = np.array([rows_NW[:, column_of[width]] <= rows for rows, width in candidates])
    holds_CN = holds_CN.reshape(len(candidates), -1)
    counts_C = holds_CN @ weight_N
    nested_CC = (holds_CN.astype(np.float32) @ (~holds_CN).T.astype(np.float32)) == 0
    nested_CC &= costs_C[:, None] < costs_C[None, :]
    # For each candidate: the least cost of a chain that ends with it, and the candidate before it in that chain.
    least_C, before = costs_C * counts_C, [np.full(len(candidates), -1)]
    for _ in range(count - 1):
        through_CC = least_C[:, None] + costs_C[None, :] * (counts_C[None, :] - counts_C[:, None])
        through_CC = np.where(nested_CC, through_CC, np.inf)
        at_C, best_C = through_CC.argmin(axis=0), through_CC.min(axis=0)
        before.append(np.where(best_C < least_C, at_C, -1))
        least_C = np.minimum(least_C, best_C)
    end = min((place for place, bucket in enumerate(candidates) if bucket in tops), key=lambda place: least_C[place])
    return tuple(candidates[place] for place in _walked(end, before))


def _walked(end: int, before: Sequence[np.ndarray]) -> list[int]:
    """The chain that ends at `end`. before: predecessors from each round; -1 where the previous round's is kept."""
    chain, place = [end], end
    for round_C in reversed(before):
        if round_C[place] >= 0:
            place = int(round_C[place])
            chain.insert(0, place)
    return chain


def _padded(rows_NW: np.ndarray, widths: Sequence[int], buckets: Sequence[Bucket], pairs: float) -> float:
    """Compute of one cell of each microbatch in the cheapest of `buckets` that holds it."""
    costs_NB = np.stack(
        [np.where(rows_NW[:, widths.index(w)] <= r, compute((r, w), pairs), np.inf) for r, w in buckets], axis=1
    )
    return float(costs_NB.min(axis=1).sum())


def _rows(cells: Sequence[Sequence[int]], widths: Sequence[int], *, alone: bool) -> list[int]:
    """The rows that the fullest of `cells` needs, for each width."""
    largest = max((n for cell in cells for n in cell), default=0)
    return [
        max(rows_needed(cell, width, alone=alone) for cell in cells) if largest <= width else _NEVER for width in widths
    ]


def _widths(cells: Cells) -> list[int]:
    """Candidates for the width of rows: sizes of segments, multiples of the largest one, and sizes of cells."""
    segments = np.unique([n for of_microbatch in cells.sizes for cell in of_microbatch for n in cell])
    if cells.alone:
        return sorted({*map(int, segments), cells.largest})
    wholes = np.unique([max(map(sum, of_microbatch)) for of_microbatch in cells.sizes])
    several = [cells.largest * times for times in _TIMES if times <= cells.most]
    rounded, widest = cells.split.rounded, cells.widest or several[-1]
    candidates = [
        cells.split.unit,
        *_spread_over(segments, _WIDTHS),
        *_spread_over(wholes[wholes <= widest], _WIDTHS),
        *several,
    ]
    candidates += [cells.widest] if cells.widest else []
    return sorted(width for width in {rounded(int(width)) for width in candidates} if 0 < width <= rounded(widest))


def _spread_over(values: np.ndarray, count: int) -> list[int]:
    """At most `count` of the rising `values`, evenly spaced by rank, the largest among them."""
    if not len(values):
        return []
    return values[np.unique(np.linspace(len(values) - 1, 0, min(count, len(values))).astype(int))].tolist()


def _tops(cells: Cells, widths: Sequence[int]) -> list[Bucket]:
    """The bucket that holds the worst case, for every width with which this is possible; see `fill_buckets`."""
    wide = (width for width in widths if width >= cells.largest)
    abreast = ((width, _abreast(width, cells.largest, alone=cells.alone)) for width in wide)
    return [(cells.whole_rows(-(-cells.most // per_row)), width) for width, per_row in abreast]
