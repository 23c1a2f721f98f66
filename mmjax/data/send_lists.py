"""Lists of the tokens that each rank of context parallelism reads of another module, so that only these are sent.

A module's tokens of a cell are numbered; an input of the module that reads them holds such numbers at the places where
the tokens go (`Pointers`). For each cell and rank, the numbers that stand among the rank's own positions are a list of
fixed length, an input of the module that has the tokens. Pointers are numbered anew, by places in their rank's list.

Legend: C cells, P ranks that each have a part of a row, N places of a list, B rows of a cell, T positions of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from mmjax.data.process_rows import PartialArray, ProcessRows, wanted_cells
from mmjax.data.split import WHOLE, Arrays, Pointers, Split

SEND = "send_"


def send_list(target: str) -> str:
    """The name of the input that lists what the ranks of a module read."""
    return f"{SEND}{target}"


def alone(pointers: Sequence[Pointers]) -> tuple[Pointers, ...]:
    """Those whose tokens nothing else points at: a module gives all that read from it the same tensor."""
    sources = [one.source for one in pointers]
    return tuple(one for one in pointers if sources.count(one.source) == 1)


def list_length(one: Pointers, inputs: Mapping[str, Mapping[str, Any]], split: Split, cells: int) -> int:
    """N: the most tokens that the positions of a rank can point at; 0 where a cell has no more than that.

    Follows from shapes alone, so that all processes have the same.

    Args:
      one: the pointers.
      inputs: arrays or shapes of a microbatch, by module and name.
      split: how the rows of the module that reads are split.
      cells: cells of the microbatch.
    """
    tokens = math.prod(inputs[one.source]["segments"].shape) // one.together // cells
    most = math.prod(inputs[one.module][one.name].shape) // cells // split.ranks
    return most if most < tokens else 0


def list_shapes(
    pointers: Sequence[Pointers], inputs: Mapping[str, Mapping[str, Any]], splits: Mapping[str, Split], cells: int
) -> dict[str, tuple[str, tuple[int, int]]]:
    """By the module that has the tokens, name and shape [C, P·N] of its list, where one saves something."""
    found = {}
    for one in pointers:
        split = splits.get(one.module, WHOLE)
        if length := list_length(one, inputs, split, cells):
            found[one.source] = send_list(one.module), (cells, split.ranks * length)
    return found


def longest_lists(
    pointers: Sequence[Pointers],
    each: Sequence[Mapping[str, Mapping[str, Any]]],
    splits: Mapping[str, Split],
    cells: int,
) -> dict[str, tuple[str, tuple[int, int]]]:
    """`list_shapes` of the longest lists, where any module may have the shapes that it has in any of these inputs."""
    found: dict[str, tuple[str, tuple[int, int]]] = {}
    for one, sending, reading in product(pointers, each, each):
        inputs = {**reading, one.source: sending[one.source]}
        for module, (name, shape) in list_shapes([one], inputs, splits, cells).items():
            found[module] = name, max(shape, found.get(module, (name, shape))[1])
    return found


def with_lists(
    inputs: Mapping[str, Arrays],
    splits: Mapping[str, Split],
    pointers: Sequence[Pointers],
    cells: int,
    own: ProcessRows | None,
) -> dict[str, Arrays]:
    """A microbatch's inputs with lists where they save something, and what points through them numbered anew.

    Args:
      inputs: by module and name, rows split and in their order; the pointers of wanted rows, and of the cells whose
        lists are wanted.
      splits: by module.
      pointers: those that are to go through lists.
      cells: cells of the microbatch.
      own: the rows that are wanted.
    """
    found = {module: dict(arrays) for module, arrays in inputs.items()}
    shapes = list_shapes(pointers, inputs, splits, cells)
    for one in (one for one in pointers if one.source in shapes):
        name, shape = shapes[one.source]
        lists = PartialArray.full(wanted_cells(own, one.source, name, cells), shape, cells, -1)
        found[one.module][one.name] = _listed(found[one.module][one.name], lists, splits.get(one.module, WHOLE).ranks)
        found[one.source][name] = lists
    return found


def _listed(array: PartialArray, lists: PartialArray, ranks: int) -> PartialArray:
    """Pointers [R, T, ...] as places in their ranks' lists, which are written into `lists` where these are held."""
    per_cell, width = array.shape[0] // array.count, array.shape[1] // ranks
    length = lists.shape[1] // ranks
    held = array.local_rows.copy()
    for number, cell in enumerate(array.cells):
        wanted = lists.row(cell)
        for rank in range(ranks):
            part = held[number * per_cell : (number + 1) * per_cell, rank * width : (rank + 1) * width]
            real = part >= 0
            tokens = np.unique(part[real])
            part[real] = np.searchsorted(tokens, part[real])
            if wanted is not None:
                wanted[rank * length : rank * length + len(tokens)] = tokens
    return PartialArray(array.cells, array.shape, array.count, held)
