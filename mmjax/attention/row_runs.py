"""The number of runs in packed rows, which kernels have to know when their programs are compiled. NumPy alone.

A run is a stretch of neighbouring tokens of one segment, or of padding. ``max_runs`` says what rows may be:

* 1: whole rows, each of one run. Under a causal mask padding may follow the segment, since it hides it.
* n > 1: packed rows, of at most n runs each on average, over the rows of any rank; each segment is one run.
* ``ANY_RUNS``: any rows.

Larger numbers include smaller ones, and ``ANY_RUNS`` includes all.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

ANY_RUNS = 0
"""The value of ``max_runs`` that stands for rows of any number of runs."""
MAX_PACKED_RUNS = 16
"""The largest ``max_runs`` of packed rows: kernels for these take a list of so many runs a row."""
MAX_RUNS = "max_runs"
"""The name under which the shapes of a module's inputs have ``max_runs`` (see ``pipeline.place.InputShapes``)."""


def runs_of(segments_BT: Int[np.ndarray, "B T"], *, cells: int, causal: bool, in_row_order: bool = True) -> int:
    """The least ``max_runs`` of the rows of a microbatch, for any number of ranks that share its cells.

    Args:
      segments_BT: the sample or medium of each token, from 1; 0 is padding.
      cells: the number of cells, each of the same number of neighbouring rows.
      causal: whether the mask is causal; else it is full.
      in_row_order: whether tokens are stored in the order of their rows. Else segments count as neighbouring, with
        padding behind them, as they are packed.
    """
    if not in_row_order:
        behind = np.iinfo(segments_BT.dtype).max
        segments_BT = np.sort(np.where(segments_BT > 0, segments_BT, behind), axis=1)
        segments_BT = np.where(segments_BT < behind, segments_BT, 0)
    starts_BT = np.ones(segments_BT.shape, bool)
    starts_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    later_BT = starts_BT[:, 1:] & (segments_BT[:, 1:] > 0) if causal else starts_BT[:, 1:]
    if not later_BT.any():
        return 1
    real_starts_B = (starts_BT & (segments_BT > 0)).sum(axis=1)
    if (real_starts_B != _segment_counts(segments_BT)).any():
        return ANY_RUNS
    by_cell = starts_BT.reshape(cells, -1).sum(axis=1)
    return max(2, -(-int(by_cell.max()) * cells // len(segments_BT)))


def _segment_counts(segments_BT: Int[np.ndarray, "B T"]) -> Int[np.ndarray, " B"]:
    """The number of different segments of each row, without padding."""
    sorted_BT = np.sort(segments_BT, axis=1)
    return (np.diff(sorted_BT, axis=1, prepend=0) > 0).sum(axis=1)


def are_neighbours(segments_BT: Int[np.ndarray, "B T"], items_BT: Int[np.ndarray, "B T"]) -> bool:
    """Whether the tokens of each medium are neighbours, in rows in their order.

    Args:
      segments_BT: the sample of each token, from 1; 0 is padding.
      items_BT: the number of each token's medium in its sample, from 1; 0 for text.
    """
    key_BT = np.where(items_BT > 0, segments_BT.astype(np.int64) * (int(items_BT.max(initial=0)) + 1) + items_BT, 0)
    starts_BT = (np.diff(key_BT, axis=1, prepend=0) != 0) & (key_BT > 0)
    return bool((starts_BT.sum(axis=1) == _segment_counts(key_BT)).all())


def includes(max_runs: int, runs: int) -> bool:
    """Whether rows of at most ``runs`` runs are among those of ``max_runs``; both as above."""
    return max_runs == ANY_RUNS or (runs != ANY_RUNS and runs <= max_runs)


def widest_of(numbers: Sequence[int]) -> int:
    """The ``max_runs`` that includes the rows of each of ``numbers``, which has one or more: 3 for [1, 3]."""
    return ANY_RUNS if ANY_RUNS in numbers else max(numbers)
