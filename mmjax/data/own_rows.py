"""Which rows of a step a process reads, and arrays that hold those rows alone.

A process reads the rows that its own devices work on. As every dp shard of every module is a run of whole cells, rows
are named by their cells: `OwnRows` says for each module and each of its inputs which cells are wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class OwnRows:
    """The cells that are wanted.

    cells: ascending, by module and then by input; an input that is not named is not wanted.
    turns: what is wanted of microbatches in turn, of microbatch m ``turns[m mod len(turns)]``, where a module's lanes
      take them in turn; ``cells`` is what is wanted of any. () where every microbatch is wanted alike.
    """

    cells: Mapping[str, Mapping[str, tuple[int, ...]]]
    turns: tuple[OwnRows, ...] = ()

    @classmethod
    def in_turns(cls, turns: Sequence[OwnRows]) -> OwnRows:
        """What is wanted of microbatches in turn; a single turn is what is wanted of all."""
        if len(turns) == 1:
            return turns[0]
        cells: dict[str, dict[str, set[int]]] = {}
        for module, inputs in (item for turn in turns for item in turn.cells.items()):
            for name, own in inputs.items():
                cells.setdefault(module, {}).setdefault(name, set()).update(own)
        union = {module: {name: tuple(sorted(own)) for name, own in inputs.items()} for module, inputs in cells.items()}
        return cls(cells=union, turns=tuple(turns))


def turn_of(own: OwnRows | None, microbatch: int) -> OwnRows | None:
    """The rows that are wanted of a microbatch; ``None`` for all."""
    return own.turns[microbatch % len(own.turns)] if own and own.turns else own


def wanted_cells(own: OwnRows | None, module: str, name: str, count: int) -> tuple[int, ...]:
    """Those of `count` cells whose rows of input `name` of `module` are wanted; `None` wants all."""
    return tuple(range(count)) if own is None else own.cells.get(module, {}).get(name, ())


class HeldRows:
    """An array of all rows of a microbatch that holds only the rows of some cells.

    Indexing rows that are not held raises IndexError; as a NumPy array it has zeros in their place.

    Attributes:
      shape: shape of the whole array.
      dtype: its dtype.
      cells: the cells whose rows are held.
      count: how many cells there are.
      held: the rows that are held.
    """

    def __init__(self, cells: Sequence[int], shape: tuple[int, ...], count: int, held: np.ndarray):
        """held: the rows of `cells` (ascending) of `count` cells, one after the other."""
        self.shape, self.dtype, self.ndim = shape, held.dtype, len(shape)
        self.held, self.cells, self.count, self._per_cell = held, tuple(cells), count, shape[0] // count
        self._place = {cell: place for place, cell in enumerate(cells)}

    @classmethod
    def full(
        cls, cells: Sequence[int], shape: tuple[int, ...], count: int, value: float = 0, dtype: Any = np.int32
    ) -> HeldRows:
        """An array with `value` in every element of the rows of `cells`."""
        rows = shape[0] // count * len(cells)
        return cls(cells, shape, count, np.full((rows, *shape[1:]), value, dtype))

    @property
    def rows(self) -> np.ndarray:
        """The numbers of the rows that are held."""
        cells_N1 = np.asarray(self.cells, np.int64)[:, None]
        return (cells_N1 * self._per_cell + np.arange(self._per_cell)).reshape(-1)

    def row(self, row: int) -> np.ndarray | None:
        """A writable view of one row; `None` if it is not held."""
        cell, within = divmod(row, self._per_cell)
        place = self._place.get(cell)
        return None if place is None else self.held[place * self._per_cell + within]

    def whole(self) -> Any:
        """The plain array if all rows are held, else this object."""
        return self.held if self.held.shape == self.shape else self

    def __getitem__(self, index: Any) -> np.ndarray:
        rows, *rest = index if isinstance(index, tuple) else (index,)
        start, stop, step = rows.indices(self.shape[0])
        cells = range(start // self._per_cell, -(-stop // self._per_cell))
        missing = [cell for cell in cells if cell not in self._place]
        if missing or step != 1 or not cells:
            raise IndexError(f"rows {start} to {stop} of {self.shape[0]}: cells {missing} are not read by this process")
        # Consecutive cells lie one after the other.
        first = self._place[cells[0]] * self._per_cell + start - cells[0] * self._per_cell
        return self.held[(slice(first, first + stop - start), *rest)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("rows that are not here have no memory to share")
        whole = np.zeros(self.shape, dtype or self.dtype)
        for cell, place in self._place.items():
            to, start = cell * self._per_cell, place * self._per_cell
            whole[to : to + self._per_cell] = self.held[start : start + self._per_cell]
        return whole
