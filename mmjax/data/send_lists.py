"""Send lists: the tokens of one module that each context-parallel rank of another module reads, so only these are sent.

The source module's tokens of a cell are numbered. An input of the target module has the numbers of the tokens that its
positions read (`Pointers`). For each cell and rank, a list of fixed length, which is an input of the source module, has
the numbers at the rank's positions. The pointers are then renumbered as places in the list of their rank.

Legend: C cells, P ranks that each have a part of a row, N places of a list, B rows of a cell, T positions of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from mmjax.data.process_rows import PartialArray, ProcessRows, wanted_cells
from mmjax.data.split import UNSPLIT, Arrays, Pointers, Split

SEND = "send_"


def send_list(target: str) -> str:
    """The name of the source module's input that lists the tokens which the ranks of `target` read: "send_<target>"."""
    return f"{SEND}{target}"


def with_one_reader(pointers: Sequence[Pointers]) -> tuple[Pointers, ...]:
    """The pointers whose source module has no other reader: all readers of a module receive the same tensor.

    pointers: such as Pointers(module="llm", name="vision_index", source="vision"), whose source is "vision".
    """
    sources = [pointer.source for pointer in pointers]
    return tuple(pointer for pointer in pointers if sources.count(pointer.source) == 1)


def list_length(pointers: Pointers, inputs: Mapping[str, Mapping[str, Any]], split: Split, cells: int) -> int:
    """N: the most tokens that the positions of a rank can point at; 0 where a cell has no more tokens than that.

    It follows from shapes alone, so it is the same in all processes.

    Args:
      pointers: the input that points at the tokens, Pointers(module="llm", name="vision_index", source="vision").
      inputs: arrays or shapes of a microbatch, by module and name; only their `shape` is read. They have this input,
        and "segments" of the source.
      split: how the rows of the target module, "llm" here, are split, such as Split(ranks=2).
      cells: number of cells of the microbatch.
    """
    tokens = math.prod(inputs[pointers.source]["segments"].shape) // pointers.together // cells
    most = math.prod(inputs[pointers.module][pointers.name].shape) // cells // split.ranks
    return most if most < tokens else 0


def list_shapes(
    pointers: Sequence[Pointers], inputs: Mapping[str, Mapping[str, Any]], splits: Mapping[str, Split], cells: int
) -> dict[str, tuple[str, tuple[int, int]]]:
    """(name, shape [C, P·N]) of each send list that is shorter than all tokens, by source module.

    Such as {"vision": ("send_llm", (4, 64))}: C is `cells`, P the ranks that share a row of the reader.

    Args:
      pointers: the pointers whose tokens may go by lists.
      inputs: arrays or shapes of a microbatch, by module and name: {"llm": {"vision_index": …}, "vision": {"segments":
        …}}.
      splits: how rows are split, by module, such as {"llm": Split(ranks=2)}; others are not split.
      cells: number of cells of the microbatch.
    """
    shapes = {}
    for pointer in pointers:
        split = splits.get(pointer.module, UNSPLIT)
        if length := list_length(pointer, inputs, split, cells):
            shapes[pointer.source] = send_list(pointer.module), (cells, split.ranks * length)
    return shapes


def longest_lists(
    pointers: Sequence[Pointers],
    inputs_by_bucket: Sequence[Mapping[str, Mapping[str, Any]]],
    splits: Mapping[str, Split],
    cells: int,
) -> dict[str, tuple[str, tuple[int, int]]]:
    """`list_shapes` of the longest lists, for all pairs of a bucket of the source and a bucket of the target.

    (name, shape [C, P·N]) by source module, such as {"vision": ("send_llm", (4, 64))}.

    Args:
      pointers: the pointers whose tokens may go by lists, Pointers(module="llm", name="vision_index", source="vision").
      inputs_by_bucket: arrays or shapes of a microbatch by module and name, for each bucket.
      splits: how rows are split, by module, such as {"llm": Split(ranks=2)}; others are not split.
      cells: number of cells of the microbatch.
    """
    longest: dict[str, tuple[str, tuple[int, int]]] = {}
    for pointer, source_inputs, target_inputs in product(pointers, inputs_by_bucket, inputs_by_bucket):
        inputs = {**target_inputs, pointer.source: source_inputs[pointer.source]}
        for module, (name, shape) in list_shapes([pointer], inputs, splits, cells).items():
            longest[module] = name, max(shape, longest.get(module, (name, shape))[1])
    return longest


def with_lists(
    inputs: Mapping[str, Arrays],
    splits: Mapping[str, Split],
    pointers: Sequence[Pointers],
    cells: int,
    process_rows: ProcessRows | None,
) -> dict[str, Arrays]:
    """A microbatch's inputs with send lists where these are shorter than all tokens, and their pointers renumbered.

    The dicts are new. A source module has in addition the int32 input "send_llm" [cells, ranks · N] if "llm" reads it:
    the numbers of the tokens that each rank reads, ascending, then -1. Pointers are then places in their rank's list.

    Args:
      inputs: by module and name, rows split and in the order of the ranks. They have the pointers of wanted rows, and
        those of the cells whose lists are wanted.
      splits: how rows are split, by module, such as {"llm": Split(ranks=2)}; others are not split.
      pointers: the pointers that go through lists, Pointers(module="llm", name="vision_index", source="vision").
      cells: number of cells of the microbatch.
      process_rows: the wanted rows; ``None`` for all.
    """
    result = {module: dict(arrays) for module, arrays in inputs.items()}
    shapes = list_shapes(pointers, inputs, splits, cells)
    for pointer in (pointer for pointer in pointers if pointer.source in shapes):
        name, shape = shapes[pointer.source]
        lists = PartialArray.full(wanted_cells(process_rows, pointer.source, name, cells), shape, cells, value=-1)
        target, ranks = result[pointer.module], splits.get(pointer.module, UNSPLIT).ranks
        target[pointer.name] = _listed(target[pointer.name], lists, ranks)
        result[pointer.source][name] = lists
    return result


def _listed(array: PartialArray, lists: PartialArray, ranks: int) -> PartialArray:
    """Pointers [R, T, ...] as places in their ranks' lists. Writes the lists into the cells that `lists` has."""
    per_cell, width = array.shape[0] // array.count, array.shape[1] // ranks
    length = lists.shape[1] // ranks
    local_rows = array.local_rows.copy()
    for number, cell in enumerate(array.cells):
        written = lists.row(cell)
        for rank in range(ranks):
            positions = local_rows[number * per_cell : (number + 1) * per_cell, rank * width : (rank + 1) * width]
            real = positions >= 0
            tokens = np.unique(positions[real])
            positions[real] = np.searchsorted(tokens, positions[real])
            if written is not None:
                written[rank * length : rank * length + len(tokens)] = tokens
    return PartialArray(array.cells, array.shape, array.count, local_rows)
