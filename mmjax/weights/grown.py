"""Tensors with more rows than in their folder, such as a table of embeddings for new tokens."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from mmjax.weights.table import Shape, Tensor

_PART = 4096
"""Number of rows to read at a time."""
_SPREAD = 0.01
"""Deviation of fresh rows, relative to the deviation of the folder's rows."""


class GrownTensor:
    """A tensor of a folder with fresh rows behind its own.

    Fresh rows are close to the mean of the folder's rows, so that none of their tokens starts as the likeliest, but
    differ from one another. They depend only on the folder's tensor, its key and the number of fresh rows. Indexed with
    a slice of step 1 for each dimension, it reads that part as a numpy array.
    """

    def __init__(self, tensor: Tensor, key: str, shape: Shape, rows: int):
        """Reads nothing.

        Args:
          tensor: the tensor in the folder.
          key: its key.
          shape: its shape, without fresh rows.
          rows: number of fresh rows.
        """
        self._tensor, self._key, self._shape, self._rows = tensor, key, shape, rows

    def __getitem__(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        start, stop, _ = index[0].indices(self._shape[0] + self._rows)
        size = self._shape[0]
        parts = []
        if start < size:
            parts.append(np.asarray(self._tensor[(slice(start, min(stop, size)), *index[1:])]))
        if stop > size:
            fresh = self._fresh()[max(start, size) - size : stop - size]
            parts.append(fresh[(slice(None), *index[1:])])
        return np.concatenate(parts)

    def _fresh(self) -> np.ndarray:
        total, squares, dtype = np.zeros(self._shape[1:]), np.zeros(self._shape[1:]), np.dtype(np.float32)
        for part in self._parts():
            dtype = part.dtype
            total += part.sum(0, dtype=np.float64)
            squares += np.square(part.astype(np.float64)).sum(0)
        mean = total / self._shape[0]
        deviation = np.sqrt(np.maximum(squares / self._shape[0] - mean**2, 0))
        noise = np.random.default_rng(zlib.crc32(self._key.encode())).normal(size=(self._rows, *self._shape[1:]))
        return (mean + _SPREAD * deviation * noise).astype(dtype)

    def _parts(self) -> Iterator[np.ndarray]:
        columns = tuple(slice(0, size) for size in self._shape[1:])
        for at in range(0, self._shape[0], _PART):
            yield np.asarray(self._tensor[(slice(at, min(at + _PART, self._shape[0])), *columns)])
