"""First fit: packs segments into rows of one width."""

from __future__ import annotations

from collections.abc import Sequence


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """The (row, offset) of each item, in the order of `sizes`. Items go into the first row with room, largest first.

    Both count from 0: sizes [2, 3] in rows of 4 are at [(1, 0), (0, 0)].

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


def spread(
    sizes: Sequence[int], rows: int, capacity: int, pairs: float, *, alone: bool = False
) -> list[tuple[int, int]]:
    """The (row, offset) of each item, both from 0, in the order of `sizes`, in `rows` rows of `capacity`.

    The rows must be enough for `first_fit_decreasing`.

    Balances the compute of rows, n + pairs * n² for an item of size n: largest first, each into the row with the least
    compute among those with room. If this leaves an item without room, or `pairs` is 0, first fit decides.

    Args:
      sizes: number of positions of each item.
      rows, capacity: the rows.
      pairs: compute of a pair of positions of an item relative to a position's, such as 0.001.
      alone: whether each item has a row to itself.
    """
    if alone:
        return [(row, 0) for row in range(len(sizes))]
    if not pairs:
        return first_fit_decreasing(sizes, capacity)
    places, free, work = [(0, 0)] * len(sizes), [capacity] * rows, [0.0] * rows
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[item]
        open_rows = [row for row in range(rows) if free[row] >= size]
        if not open_rows:
            return first_fit_decreasing(sizes, capacity)
        row = min(open_rows, key=lambda row: work[row])
        places[item] = (row, capacity - free[row])
        free[row] -= size
        work[row] += size + pairs * size * size
    return places


def rows_needed(sizes: Sequence[int], width: int, *, alone: bool = False) -> int:
    """Number of rows of `width` that first fit needs for the segments of a cell, largest first; 0 for none.

    Args:
      sizes: number of positions of each segment, at most `width`.
      width: positions of a row.
      alone: whether each segment has a row to itself.
    """
    return len(sizes) if alone else max((row + 1 for row, _ in first_fit_decreasing(sizes, width)), default=0)


def holds(bucket: tuple[int, int], sizes: Sequence[int], *, alone: bool = False) -> bool:
    """Whether the segments of a cell fit into the rows of a (rows, positions per row) shape by first fit.

    Args:
      bucket: the shape.
      sizes: number of positions of each segment.
      alone: whether each segment has a row to itself.
    """
    rows, width = bucket
    if max(sizes, default=0) > width or sum(sizes) > rows * width:
        return False
    return rows_needed(sizes, width, alone=alone) <= rows
