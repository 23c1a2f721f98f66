"""Rows of encoders whose ops take several microbatches together.

Such an op has the rows of its microbatches cell by cell, and in a cell microbatch by microbatch: so rows of a cell are
neighbours, and every rank of the LLM's dp finds the tokens of all of its microbatches in one run of rows. A microbatch
has as many rows in every cell; empty ones are added, so that the encoder's dp divides the rows of the op.

Legend: C cells, M microbatches of an op, R rows of a microbatch in a cell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MICROBATCHES = "microbatches"
"""The name under which shapes of an encoder's inputs have the microbatches of an op, where it may take several."""


@dataclass(frozen=True, kw_only=True)
class Together:
    """The microbatches of an encoder's op.

    Attributes:
      microbatches: microbatches of an op; the last op of a step may have fewer.
      dp: the encoder's data parallel degree.
    """

    microbatches: int
    dp: int

    def spans(self, microbatches: int) -> tuple[range, ...]:
        """The microbatches of each op of a step of `microbatches`: (range(0, 2), range(2, 3)) of 3, for ops of 2."""
        size = self.microbatches
        return tuple(range(first, min(first + size, microbatches)) for first in range(0, microbatches, size))

    def sizes(self, microbatches: int) -> tuple[int, ...]:
        """The different numbers of microbatches of the ops of a step of `microbatches`: (2, 1) of 3, for ops of 2."""
        return tuple(dict.fromkeys(map(len, self.spans(microbatches))))

    def rows(self, rows: int, cells: int, size: int) -> int:
        """Rows of a microbatch in a cell: `rows`, and empty ones if dp does not divide all of `size` microbatches."""
        multiple = self.dp // math.gcd(self.dp, cells * size)
        return -(-rows // multiple) * multiple

    def cells_of(self, shard: int, cells: int, span: range, microbatch: int) -> tuple[int, ...]:
        """The cells of a microbatch that have rows in a shard of dp.

        Args:
          shard: the number of the shard, from 0.
          cells: cells of a microbatch.
          span: the microbatches of the op.
          microbatch: one of them.
        """
        parts = cells * len(span)
        first, stop = shard * parts // self.dp, -(-(shard + 1) * parts // self.dp)
        of_shard = (divmod(part, len(span)) for part in range(first, stop))
        return tuple(dict.fromkeys(cell for cell, number in of_shard if span[number] == microbatch))


class JoinedRows:
    """The rows of an op of several microbatches; some may be absent, see `PartialArray`.

    Index it by a slice of rows, perhaps with indices of further axes. Attributes: `shape`, `dtype`, `ndim`.
    """

    def __init__(self, arrays: Sequence[Any], cells: int, rows: int):
        """Joins inputs of the microbatches of an op, [C · R', ...] each, to [C · M · R, ...] with R = `rows` >= R'."""
        first = arrays[0]
        self._arrays, self._cells, self._rows, self._filled = tuple(arrays), cells, rows, first.shape[0] // cells
        self.shape, self.dtype = (cells * len(arrays) * rows, *first.shape[1:]), first.dtype
        self.ndim = len(self.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        lines, *inner = index if isinstance(index, tuple) else (index,)
        start, stop, step = lines.indices(self.shape[0])
        if step != 1:
            raise IndexError(f"rows in steps of {step}: take neighbouring rows")
        parts = []
        for part in range(start // self._rows, -(-stop // self._rows)):
            cell, number = divmod(part, len(self._arrays))
            low, high = max(start, part * self._rows), min(stop, (part + 1) * self._rows)
            parts.append(self._part(number, cell, low - part * self._rows, high - part * self._rows, inner))
        return np.concatenate(parts) if parts else np.zeros((0, *self.shape[1:]), self.dtype)

    def _part(self, number: int, cell: int, low: int, high: int, inner: Sequence[Any]) -> np.ndarray:
        """Rows `low` to `high` of a microbatch in a cell; those behind its own are zeros."""
        first, filled = cell * self._filled, min(high, self._filled)
        present = slice(first + min(low, filled), first + filled)
        if low < high <= filled:
            return self._arrays[number][(present, *inner)]
        missing = np.zeros((1, *self.shape[1:]), self.dtype)[(slice(0, 1), *inner)]
        missing = np.repeat(missing, high - max(low, filled), axis=0)
        return np.concatenate([self._arrays[number][(present, *inner)], missing]) if low < filled else missing


def joined(inputs: Sequence[Mapping[str, Any]], cells: int, together: Together) -> dict[str, Any]:
    """The inputs of an op, by name, from those of each of its microbatches.

    Args:
      inputs: an encoder's inputs by name, for each microbatch of the op in order; their shapes are equal.
      cells: cells of a microbatch.
      together: the microbatches of the encoder's ops.
    """
    result: dict[str, Any] = {}
    for name, first in inputs[0].items():
        rows = together.rows(first.shape[0] // cells, cells, len(inputs))
        if len(inputs) == 1 and rows * cells == first.shape[0]:
            result[name] = first
            continue
        lines = JoinedRows([of_microbatch[name] for of_microbatch in inputs], cells, rows)
        result[name] = lines[:] if all(isinstance(part[name], np.ndarray) for part in inputs) else lines
    return result
