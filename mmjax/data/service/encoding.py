"""Encodes a batch as a small JSON header and one block of bytes, which travel from a server to a trainer.

Every array starts in the block at a multiple of 64 bytes, so the receiver's arrays are views of the one buffer that it
received into, aligned as XLA wants them. The header describes the arrays and how they form the batch, and has a CRC-32
of this description and of the block.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmjax.data.own_rows import HeldRows, OwnRows, turn_of
from mmjax.data.packing import Packer
from mmjax.data.send_lists import longest_lists
from mmjax.data.service import tree
from mmjax.data.types import Microbatch, StepBatch

ALIGNMENT = 64
MOST_HEADER = 8 << 20
"""Bytes of a header; thousands of arrays fit."""
MOST_TEXT = 4096
"""Characters of a name or a reason."""
_KINDS = "biuf"
_DTYPE = re.compile(rf"[<>|][{_KINDS}]\d\d?")


class BadBatchError(ValueError):
    """A server sent something else than the batch that it was asked for; the message says what is wrong."""


@dataclass(frozen=True, kw_only=True)
class BatchOffsets:
    """The places of a batch's arrays in its block.

    Attributes:
      batch: the batch as JSON.
      arrays: its arrays with their offsets in the block.
      size: bytes of the block.
    """

    batch: Any
    arrays: tuple[tuple[np.ndarray, int], ...]
    size: int


def place_arrays(batch: StepBatch) -> BatchOffsets:
    """Places every array of `batch`. Raises TypeError for arrays of anything but numbers and booleans."""
    arrays: list[tuple[np.ndarray, int]] = []
    size = 0

    def place(array: np.ndarray) -> list[Any]:
        nonlocal size
        if array.dtype.kind not in _KINDS:
            raise TypeError(f"an array of {array.dtype} is not sent")
        offset = size
        arrays.append((array, offset))
        size = -(-(offset + array.nbytes) // ALIGNMENT) * ALIGNMENT
        return [array.dtype.str, list(array.shape), offset]

    return BatchOffsets(batch=tree.write(batch, place), arrays=tuple(arrays), size=size)


def fill(offsets: BatchOffsets, block: memoryview | mmap.mmap) -> bytes:
    """Copies the arrays into `block`, of `offsets.size` zero bytes, and returns the header."""
    flat = np.frombuffer(block, np.uint8) if offsets.size else np.empty(0, np.uint8)
    for array, offset in offsets.arrays:
        # Assigned as bytes of the array's own type: a value that is not contiguous is laid out in C order on the way.
        flat[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    header = {"size": offsets.size, "batch": offsets.batch, "crc32": _checksum(offsets.batch, flat)}
    return json.dumps(header, separators=(",", ":")).encode()


def aligned(size: int) -> np.ndarray:
    """`size` bytes that start at a multiple of 64."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def block_size(header: bytes, most: int) -> int:
    """The bytes of the block that belongs to `header`. Raises BadBatchError beyond `most`."""
    size = _parsed(header).get("size")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= most:
        raise BadBatchError(f"a block of {size} bytes, where at most {most} are possible")
    return size


def decode(header: bytes, block: np.ndarray) -> StepBatch:
    """The batch, its arrays being views of `block` (uint8). Raises BadBatchError when the two do not fit together."""
    parsed = _parsed(header)
    if parsed.get("size") != block.nbytes:
        raise BadBatchError(f"{block.nbytes} bytes of {parsed.get('size')}: truncated")
    if parsed.get("crc32") != _checksum(parsed.get("batch"), block):
        raise BadBatchError("its checksum is wrong")

    def fetch(place: list[Any]) -> np.ndarray:
        dtype, shape, offset = place
        if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
            raise ValueError(f"an array of {dtype!r:.80}")
        kind = np.dtype(dtype)
        # Before they are multiplied: a header has room for very long numbers, and for very many.
        if not tree.is_shape(shape) or not tree.is_shape([offset]):
            raise ValueError(f"an array of shape {shape!r:.80} at {offset!r:.80}")
        end = offset + math.prod(shape) * kind.itemsize
        if end > block.nbytes:
            raise ValueError(f"an array that ends at byte {end} of {block.nbytes}")
        return block[offset:end].view(kind).reshape(shape)

    try:
        batch = tree.read(parsed.get("batch"), fetch)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadBatchError(f"its header is malformed: {error}") from None
    if not isinstance(batch, StepBatch):
        raise BadBatchError(f"its header describes a {type(batch).__name__}")
    return batch


def _parsed(header: bytes) -> Mapping[str, Any]:
    if len(header) > MOST_HEADER:
        raise BadBatchError(f"a header of {len(header)} bytes, where {MOST_HEADER} are allowed")
    try:
        parsed = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise BadBatchError(f"its header is no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BadBatchError("its header is no JSON object")
    return parsed


def _checksum(batch: Any, block: np.ndarray) -> int:
    described = json.dumps(batch, separators=(",", ":"), sort_keys=True).encode()
    return zlib.crc32(block.data if block.nbytes else b"", zlib.crc32(described))


class BatchShape:
    """The arrays that every batch of a run must have; they are known before the first batch arrives.

    Args:
      packer: the run's packer.
      global_batch: samples of a step.
      own: the rows that are asked for; all by default.
    """

    def __init__(self, packer: Packer, global_batch: int, own: OwnRows | None = None):
        self._packer, self._rows, self._own = packer, -(-global_batch // packer.microbatches), own
        self._known: dict[Any, Any] = {}
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
            wanted, found = self._shapes(microbatch.bucket, number), _described(microbatch.inputs)
            if wanted != found:
                raise BadBatchError(f"microbatch {number}: {_difference(wanted, found)}")
        for what, found, wanted in (
            ("denominators", batch.denominators, self._totals.denominators),
            ("counts", batch.counts, self._totals.counts),
            ("figures", batch.figures, batch.figures),
        ):
            if not isinstance(found, dict):
                raise BadBatchError(f"its {what} are {found!r:.80}, not numbers by name")
            if found.keys() != wanted.keys():
                raise BadBatchError(f"its {what} are {found!r:.80}, not of {', '.join(wanted)}")
            for name, value in found.items():
                if not _is_number(value):
                    raise BadBatchError(f"its {what} have {value!r:.80} for {name:.80}")
        self._check_broken(batch.broken)

    def _check_broken(self, broken: Any) -> None:
        """Raises BadBatchError unless there are at most as many as samples, with short texts: they go into a file."""
        legal = isinstance(broken, tuple) and len(broken) <= self._rows * self._packer.microbatches
        for one in broken if legal else ():
            legal = legal and isinstance(one, tuple) and [type(text) for text in one] == [str] * 5
            legal = legal and max(map(len, one)) <= MOST_TEXT
        if not legal:
            raise BadBatchError(f"its broken samples are {broken!r:.80}, not names and reasons")

    def _check_bucket(self, bucket: Any, place: str) -> None:
        counts = self._packer.bucket_counts
        legal = isinstance(bucket, dict) and bucket.keys() == counts.keys()
        legal = legal and all(isinstance(at, int) and 0 <= at < counts[name] for name, at in bucket.items())
        if not legal:
            raise BadBatchError(f"{place} has buckets {bucket!r:.80}")

    def _shapes(self, bucket: dict[str, int], microbatch: int) -> dict[str, dict[str, _Array]]:
        own = turn_of(self._own, microbatch)
        key = (id(own), *sorted(bucket.items()))
        if key not in self._known:
            self._known[key] = _described(self._empty(bucket, own).inputs)
        return self._known[key]

    def _most_bytes(self) -> int:
        """Bytes of the largest batch: each module in its largest bucket, which need not be the costliest (last) one.

        Lists, whose length depends on the buckets of two modules, count in all cells.
        """
        counts, most, each = self._packer.bucket_counts, dict[str, int](), []
        for at in range(max(counts.values(), default=1)):
            empty = self._empty({name: min(at, count - 1) for name, count in counts.items()}, self._own, lists=False)
            for module, arrays in empty.inputs.items():
                most[module] = max(most.get(module, 0), _bytes_of({module: arrays}))
            each.append(empty.inputs)
        own = self._packer
        longest = longest_lists(own.listed, each, own.splits, own.cells)
        lists = {module: {name: np.empty(shape, np.int32)} for module, (name, shape) in longest.items()}
        return (sum(most.values()) + _bytes_of(lists)) * self._packer.microbatches

    def _empty(self, bucket: dict[str, int], own: OwnRows | None, *, lists: bool = True) -> Microbatch:
        packer = replace(self._packer, lists=lists and self._packer.lists)
        return packer.fill(packer.plan_microbatch((), self._rows, bucket), {}, own)


def _bytes_of(inputs: Any) -> int:
    """Bytes of the block of a microbatch."""
    alone = Microbatch(inputs=inputs, bucket={})
    return place_arrays(StepBatch(step=0, microbatches=(alone,), denominators={})).size


def _is_number(value: Any) -> bool:
    """Whether it is a number, and finite as a float."""
    return (isinstance(value, float) and math.isfinite(value)) or (isinstance(value, int) and abs(value) < 2**63)


_Array = tuple[str, tuple[int, ...], tuple[int, ...] | None]
"""An array's dtype, its shape, and the cells whose rows it has; None for all."""


def _described(inputs: Any) -> dict[str, dict[str, _Array]]:
    """Dtype, shape and cells of every array of a microbatch. Raises BadBatchError if it is not made of arrays."""
    try:
        return {
            m: {k: (a.dtype.str, a.shape, a.cells if isinstance(a, HeldRows) else None) for k, a in arrays.items()}
            for m, arrays in inputs.items()
        }
    except AttributeError:
        raise BadBatchError("a microbatch is not made of arrays by module and name") from None


def _difference(wanted: Mapping[str, Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]]) -> str:
    for module in sorted({*wanted, *found}):
        one, other = wanted.get(module, {}), found.get(module, {})
        for name in sorted({*one, *other}):
            if one.get(name) != other.get(name):
                return f"{module}/{name} is {_shown(other.get(name))}, not {_shown(one.get(name))}"
    return "its modules differ"


def _shown(array: _Array | None) -> str:
    if not array:
        return "missing"
    dtype, shape, cells = array
    return f"{np.dtype(dtype)} {list(shape)}" + (f" (rows of cells {list(cells)})" if cells is not None else "")
