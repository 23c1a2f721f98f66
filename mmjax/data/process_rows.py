"""The rows of a step that a process reads, and arrays that hold those rows alone.

A process reads the rows that its own devices compute with. Every dp shard of every module is a run of whole cells, so
rows are named by their cells: `ProcessRows` lists the wanted cells of each input of each module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class ProcessRows:
    """The cells whose rows a process reads.

    cells: ascending cell numbers by module and input; no rows are read of an input that is not named.
    turns: the cells of each microbatch, where a module's lanes take microbatches in turn: ``turns[m mod len(turns)]``
      of microbatch m; ``cells`` is then their union. () where all microbatches have the same cells.
    """

    cells: Mapping[str, Mapping[str, tuple[int, ...]]]
    turns: tuple[ProcessRows, ...] = ()

    @classmethod
    def in_turns(cls, turns: Sequence[ProcessRows]) -> ProcessRows:
        """The rows of microbatches that differ in turn: microbatch m reads `turns[m mod len(turns)]`.

        With a single turn, it is returned itself.
        """
        if len(turns) == 1:
            return turns[0]
        cells: dict[str, dict[str, set[int]]] = {}
        for module, inputs in (item for turn in turns for item in turn.cells.items()):
            for name, of_turn in inputs.items():
                cells.setdefault(module, {}).setdefault(name, set()).update(of_turn)
        union = {m: {name: tuple(sorted(of_all)) for name, of_all in inputs.items()} for m, inputs in cells.items()}
        return cls(cells=union, turns=tuple(turns))


def turn_of(process_rows: ProcessRows | None, microbatch: int) -> ProcessRows | None:
    """The wanted rows of microbatch number `microbatch`, from 0; ``None`` for all.

    process_rows: the wanted rows of a step, as `own_rows` gives them. They are returned themselves if their `turns` are
    ().
    """
    if process_rows is None or not process_rows.turns:
        return process_rows
    return process_rows.turns[microbatch % len(process_rows.turns)]


def wanted_cells(process_rows: ProcessRows | None, module: str, name: str, count: int) -> tuple[int, ...]:
    """The wanted cells, ascending, out of cells 0 … `count`-1, of input `name` of `module`, such as "tokens" of "llm".

    All cells if `process_rows` is ``None``; () if it does not name the input.
    """
    return tuple(range(count)) if process_rows is None else process_rows.cells.get(module, {}).get(name, ())


class PartialArray:
    """An array over all rows of a microbatch that holds only the rows of some cells.

    Index it by a slice of rows, perhaps with indices of further axes; absent rows raise IndexError. Converted to a
    NumPy array, it has zeros in their place.

    Attributes:
      shape: shape of the array with all rows.
      dtype: its dtype.
      cells: the cells whose rows are present, ascending.
      count: number of all cells.
      local_rows: the present rows, one cell after the other.
    """

    def __init__(self, cells: Sequence[int], shape: tuple[int, ...], count: int, local_rows: np.ndarray):
        self.shape, self.dtype, self.ndim = shape, local_rows.dtype, len(shape)
        self.local_rows, self.cells, self.count, self._per_cell = local_rows, tuple(cells), count, shape[0] // count
        self._place = {cell: place for place, cell in enumerate(cells)}

    @classmethod
    def full(
        cls, cells: Sequence[int], shape: tuple[int, ...], count: int, *, value: float = 0, dtype: Any = np.int32
    ) -> PartialArray:
        """An array with `value` in every element of the rows of `cells`; the rows of other cells are absent.

        shape: of the array with all rows, a multiple of `count`, the number of all cells.
        """
        rows = shape[0] // count * len(cells)
        return cls(cells, shape, count, np.full((rows, *shape[1:]), value, dtype))

    @property
    def rows(self) -> np.ndarray:
        """The numbers of the present rows, int64, in the order of `local_rows`."""
        cells_N1 = np.asarray(self.cells, np.int64)[:, None]
        return (cells_N1 * self._per_cell + np.arange(self._per_cell)).reshape(-1)

    def row(self, row: int) -> np.ndarray | None:
        """A writable view of one row, by its number among all rows; `None` if it is absent."""
        cell, within = divmod(row, self._per_cell)
        place = self._place.get(cell)
        return None if place is None else self.local_rows[place * self._per_cell + within]

    def simplified(self) -> Any:
        """`local_rows`, a NumPy array, if all rows are present; else this object."""
        return self.local_rows if self.local_rows.shape == self.shape else self

    def __getitem__(self, index: Any) -> np.ndarray:
        rows, *inner = index if isinstance(index, tuple) else (index,)
        start, stop, step = rows.indices(self.shape[0])
        cells = range(start // self._per_cell, -(-stop // self._per_cell))
        missing = [cell for cell in cells if cell not in self._place]
        if missing or step != 1 or not cells:
            raise IndexError(f"rows {start} to {stop} of {self.shape[0]}: cells {missing} are not read by this process")
        # Consecutive cells lie one after the other.
        first = self._place[cells[0]] * self._per_cell + start - cells[0] * self._per_cell
        return self.local_rows[(slice(first, first + stop - start), *inner)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("rows that are not here have no memory to share")
        array = np.zeros(self.shape, dtype or self.dtype)
        for cell, place in self._place.items():
            to, start = cell * self._per_cell, place * self._per_cell
            array[to : to + self._per_cell] = self.local_rows[start : start + self._per_cell]
        return array
