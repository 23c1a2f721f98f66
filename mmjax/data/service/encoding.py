"""Encodes a batch as a small JSON header and one block of bytes, which travel from a server to a trainer.

Every array starts in the block at a multiple of 64 bytes. The receiver's arrays are views of the buffer into which it
received the block, aligned as XLA wants them. The header describes the arrays and how they form the batch; it has a
CRC-32 of this description and of the block.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.data import tree
from mmjax.data.batch_shape import ALIGNMENT, DTYPE_KINDS, BadBatchError, BatchOffsets
from mmjax.data.types import StepBatch

MOST_HEADER = 8 << 20
"""Bytes of a header; thousands of arrays fit."""
_DTYPE = re.compile(rf"[<>|][{DTYPE_KINDS}]\d\d?")


def fill(offsets: BatchOffsets, block: memoryview | mmap.mmap) -> bytes:
    """Copies the arrays into `block`, which has `offsets.size` zero bytes, and returns the header (JSON as bytes).

    The header is an object of "size" (bytes of the block), "batch" (the batch, `offsets.batch`) and "crc32".

    Args:
      offsets: the batch's arrays and their offsets in the block, as `place_arrays(batch)` gives them.
      block: writable memory, such as `memoryview(bytearray(offsets.size))`.
    """
    flat = np.frombuffer(block, np.uint8) if offsets.size else np.empty(0, np.uint8)
    for array, offset in offsets.arrays:
        # The assignment copies an array that is not contiguous in C order.
        flat[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    header = {"size": offsets.size, "batch": offsets.batch, "crc32": _checksum(offsets.batch, flat)}
    return json.dumps(header, separators=(",", ":")).encode()


def aligned(size: int) -> np.ndarray:
    """A uint8 array of `size` uninitialised bytes that start at a multiple of 64 in memory."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def block_size(header: bytes, most: int) -> int:
    """Number of bytes of the block that belongs to `header`. Raises BadBatchError beyond `most` or for no header.

    header: as `fill` returns it. most: the most bytes, such as `BatchShape(packer, global_batch).most_bytes`.
    """
    size = _parsed(header).get("size")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= most:
        raise BadBatchError(f"a block of {size} bytes, where at most {most} are possible")
    return size


def decode(header: bytes, block: np.ndarray) -> StepBatch:
    """The batch, its arrays being views of `block`. Raises BadBatchError when the two do not fit together.

    Args:
      header: as `fill` returned it.
      block: uint8, the bytes that `fill` wrote, such as an array of `aligned(block_size(header, most))`.
    """
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
        # Checked before they are multiplied: a header has room for very long numbers, and for very many.
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
