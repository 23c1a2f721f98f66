"""The arrays of a batch: their places in one block of bytes, and the arrays that every batch of a run must have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmjax.data import tree
from mmjax.data.packing import Packer
from mmjax.data.process_rows import PartialArray, ProcessRows, turn_of
from mmjax.data.send_lists import longest_lists
from mmjax.data.types import Microbatch, StepBatch

ALIGNMENT = 64
"""Every array starts in the block at a multiple of so many bytes."""
MOST_TEXT = 4096
"""Characters of a name or a reason."""
DTYPE_KINDS = "biuf"
"""Kinds of the dtypes that arrays of a batch may have: booleans, integers and floats."""


class BadBatchError(ValueError):
    """A server sent something else than the requested batch; the message says why it is wrong."""


@dataclass(frozen=True, kw_only=True)
class BatchOffsets:
    """The offsets of a batch's arrays in its block.

    Attributes:
      batch: the batch as JSON (see `tree`); an array's place in it is [dtype, shape, offset].
      arrays: (array, offset in bytes) pairs, in the order of their offsets.
      size: bytes of the block.
    """

    batch: Any
    arrays: tuple[tuple[np.ndarray, int], ...]
    size: int


def place_arrays(batch: StepBatch) -> BatchOffsets:
    """Gives every array of `batch` an offset in one block, in bytes, a multiple of `ALIGNMENT` (64); copies nothing.

    batch: a step's batch, as `next(open_batches(…))` or a `StepMaker` gives it.

    Returns:
      `.arrays`, a tuple of (array, offset) pairs with ascending offsets; `.size`, bytes of the block; and `.batch`, the
      batch as JSON, in which [dtype, shape, offset], such as ["<f4", [2, 3], 64], stands for each array.

    Raises TypeError for an array that has neither booleans, integers nor floats.
    """
    arrays: list[tuple[np.ndarray, int]] = []
    size = 0

    def place(array: np.ndarray) -> list[Any]:
        nonlocal size
        if array.dtype.kind not in DTYPE_KINDS:
            raise TypeError(f"an array of {array.dtype} is not sent")
        offset = size
        arrays.append((array, offset))
        size = -(-(offset + array.nbytes) // ALIGNMENT) * ALIGNMENT
        return [array.dtype.str, list(array.shape), offset]

    return BatchOffsets(batch=tree.write(batch, place), arrays=tuple(arrays), size=size)


class BatchShape:
    """Dtypes and shapes of the arrays that every batch of a run must have, known before the first batch arrives.

    Args:
      packer: the run's packer.
      global_batch: samples of a step.
      process_rows: the requested rows; all by default.
    """

    def __init__(self, packer: Packer, global_batch: int, process_rows: ProcessRows | None = None):
        self._packer, self._rows, self._process_rows = packer, -(-global_batch // packer.microbatches), process_rows
        self._arrays_by_bucket: dict[Any, _Arrays] = {}
        self._totals = packer.plan(0, ())
        self.most_bytes = self._most_bytes()
        """Bytes of the block of the largest batch."""

    def check(self, batch: StepBatch, step: int) -> None:
        """Raises BadBatchError unless `batch` is of `step` and has the arrays that a batch of this run has."""
        if batch.step != step:
            raise BadBatchError(f"it is the batch of step {batch.step}")
        parts = batch.microbatches
        if not isinstance(parts, tuple) or not all(isinstance(part, Microbatch) for part in parts):
            raise BadBatchError(f"its microbatches are {parts!r:.80}")
        if len(parts) != self._packer.microbatches:
            raise BadBatchError(f"it has {len(parts)} microbatches, not {self._packer.microbatches}")
        for number, microbatch in enumerate(parts):
            self._check_bucket(microbatch.bucket, f"microbatch {number}")
            expected, received = self._expected(microbatch.bucket, number), _described(microbatch.inputs)
            if expected != received:
                raise BadBatchError(f"microbatch {number}: {_difference(expected, received)}")
        _check_numbers("denominators", batch.denominators, self._totals.denominators)
        _check_numbers("counts", batch.counts, self._totals.counts)
        _check_numbers("figures", batch.figures, batch.figures)
        self._check_broken(batch.broken)

    def _check_broken(self, broken: Any) -> None:
        """Requires at most one broken sample per sample of the step, with short texts, since they go into a file.

        Raises BadBatchError.
        """
        legal = isinstance(broken, tuple) and len(broken) <= self._rows * self._packer.microbatches
        for sample in broken if legal else ():
            legal = legal and isinstance(sample, tuple) and [type(text) for text in sample] == [str] * 5
            legal = legal and max(map(len, sample)) <= MOST_TEXT
        if not legal:
            raise BadBatchError(f"its broken samples are {broken!r:.80}, not names and reasons")

    def _check_bucket(self, bucket: Any, place: str) -> None:
        counts = self._packer.bucket_counts
        legal = isinstance(bucket, dict) and bucket.keys() == counts.keys()
        legal = legal and all(isinstance(at, int) and 0 <= at < counts[name] for name, at in bucket.items())
        if not legal:
            raise BadBatchError(f"{place} has buckets {bucket!r:.80}")

    def _expected(self, bucket: dict[str, int], microbatch: int) -> _Arrays:
        process_rows = turn_of(self._process_rows, microbatch)
        key = (id(process_rows), *sorted(bucket.items()))
        if key not in self._arrays_by_bucket:
            self._arrays_by_bucket[key] = _described(self._empty(bucket, process_rows).inputs)
        return self._arrays_by_bucket[key]

    def _most_bytes(self) -> int:
        """Bytes of the largest batch: each module in its largest bucket, which need not be the costliest (last) one.

        Send lists count in all cells, since their length depends on the buckets of two modules.
        """
        counts, most, inputs_by_bucket = self._packer.bucket_counts, dict[str, int](), []
        for rank in range(max(counts.values(), default=1)):
            bucket = {name: min(rank, count - 1) for name, count in counts.items()}
            microbatch = self._empty(bucket, self._process_rows, lists=False)
            for module, arrays in microbatch.inputs.items():
                most[module] = max(most.get(module, 0), _bytes_of({module: arrays}))
            inputs_by_bucket.append(microbatch.inputs)
        packer = self._packer
        longest = longest_lists(packer.listed, inputs_by_bucket, packer.splits, packer.cells)
        lists = {module: {name: np.empty(shape, np.int32)} for module, (name, shape) in longest.items()}
        return (sum(most.values()) + _bytes_of(lists)) * self._packer.microbatches

    def _empty(self, bucket: dict[str, int], process_rows: ProcessRows | None, *, lists: bool = True) -> Microbatch:
        packer = replace(self._packer, lists=lists and self._packer.lists)
        return packer.fill(packer.plan_microbatch((), self._rows, bucket), {}, process_rows)


def _bytes_of(inputs: Any) -> int:
    """Bytes of the block of a microbatch."""
    microbatch = Microbatch(inputs=inputs, bucket={})
    return place_arrays(StepBatch(step=0, microbatches=(microbatch,), denominators={})).size


def _check_numbers(field: str, values: Any, expected: Mapping[str, object]) -> None:
    """Raises BadBatchError unless `values`, a batch's `field`, is a dict of numbers with the names of `expected`."""
    if not isinstance(values, dict):
        raise BadBatchError(f"its {field} are {values!r:.80}, not numbers by name")
    if values.keys() != expected.keys():
        raise BadBatchError(f"its {field} are {values!r:.80}, not of {', '.join(expected)}")
    for name, value in values.items():
        if not _is_number(value):
            raise BadBatchError(f"its {field} have {value!r:.80} for {name:.80}")


def _is_number(value: Any) -> bool:
    """Whether `value` is an int of 64 bits or a finite float."""
    return (isinstance(value, float) and math.isfinite(value)) or (isinstance(value, int) and abs(value) < 2**63)


_Array = tuple[str, tuple[int, ...], tuple[int, ...] | None]
"""An array's dtype, its shape, and the cells whose rows it has; None for all."""
_Arrays = dict[str, dict[str, _Array]]
"""Arrays by module and name."""


def _described(inputs: Any) -> _Arrays:
    """Dtype, shape and cells of every array of a microbatch. Raises BadBatchError if it is not made of arrays."""
    try:
        return {
            m: {k: (a.dtype.str, a.shape, a.cells if isinstance(a, PartialArray) else None) for k, a in arrays.items()}
            for m, arrays in inputs.items()
        }
    except AttributeError:
        raise BadBatchError("a microbatch is not made of arrays by module and name") from None


def _difference(expected: _Arrays, received: _Arrays) -> str:
    """The first array that differs, in words."""
    for module in sorted({*expected, *received}):
        ours, theirs = expected.get(module, {}), received.get(module, {})
        for name in sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                return f"{module}/{name} is {_shown(theirs.get(name))}, not {_shown(ours.get(name))}"
    return "its modules differ"


def _shown(array: _Array | None) -> str:
    if not array:
        return "missing"
    dtype, shape, cells = array
    return f"{np.dtype(dtype)} {list(shape)}" + (f" (rows of cells {list(cells)})" if cells is not None else "")
