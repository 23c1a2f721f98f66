"""How the tokens of rows are split over the ranks of context parallelism, and how wide rows must be for that.

Rows are packed as if they were not split. After targets have been shifted, the columns are put in the order of the
ranks, so that each rank has a run of columns. The input "order" has the original place of each token. Places of one
module's tokens in another's rows are renumbered.

Legend: R rows, T positions of a row, N blocks of positions, K ranks, C rows or cells of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from mmjax.attention.distribution import METHODS, assign_parts
from mmjax.attention.mask import Mask
from mmjax.attention.pairs import pairs_of
from mmjax.data.process_rows import PartialArray, ProcessRows, wanted_cells

BLOCK = 512
"""The most positions of a block, which stays on one rank: the size of a block of attention. With tokens from several
places in a block, attention could skip less of the pairs that a mask hides."""
FEWEST = 8
"""The least blocks of a rank, if rows are long enough: with fewer, work is hard to balance."""
ALIGNED = 8
"""Positions of a rank's part of a long row are a multiple of this. XLA for GPUs copies factors and results of a bf16
product, in every layer, where the number of tokens is no multiple of 8."""
LEAST_ALIGNED = 16
"""A row is long if it has at least so many times the positions of which its width becomes a multiple: this adds at most
a sixteenth."""

Arrays = dict[str, PartialArray]
Row = Mapping[str, np.ndarray]
"""Inputs of one row, by name."""
Order = Int[np.ndarray, "R T"]
"""The original place of the token at each place of a row."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How the rows of one module are split.

    Attributes:
      ranks: number of ranks that share a row.
      unit: the number of positions of a part is a multiple of this.
      token: number of positions that make one token, and stay together.
      method: how blocks are assigned to ranks, a key of `attention.distribution.METHODS`; "contiguous" moves no tokens.
        Or "segments": whole segments, in rows where ranks have room for that, else "lpt".
      masks: (number of layers, mask) pairs of the module; the work of a block follows from the pairs they allow.
      front: number of first places of a row that are split apart from the others: each rank has a run of these, and
        behind it a run of the others. Arrays of one kind of place alone are not moved.
    """

    ranks: int = 1
    unit: int = 1
    token: int = 1
    method: str = "contiguous"
    masks: tuple[tuple[int, Mask], ...] = ()
    front: int = 0

    @property
    def has_fronts(self) -> bool:
        """Whether each rank has a run of a row's first places."""
        return self.ranks > 1 and self.front > 0

    @property
    def permutes(self) -> bool:
        """Whether tokens change places."""
        return self.ranks > 1 and self.method != "contiguous"

    def block(self, width: int) -> int:
        """Positions of a block in rows of about this width: `unit`, doubled while a rank still has enough blocks."""
        block = self.unit
        while 2 * block <= BLOCK and 2 * block * FEWEST * self.ranks <= width:
            block *= 2
        return block

    def rounded(self, width: int) -> int:
        """The smallest width of rows that is at least `width`, and can be split, and suits products (see `ALIGNED`)."""
        part = self.block(width) if self.permutes else self.unit
        aligned = math.lcm(part, ALIGNED)
        multiple = self.ranks * (aligned if self.ranks * aligned <= width // LEAST_ALIGNED else part)
        return -(-width // multiple) * multiple

    @property
    def reads(self) -> frozenset[str]:
        """The names of the module's inputs that determine the order of tokens; "segments" is always one."""
        return frozenset(name for _, mask in self.masks for name in mask.input_names if name != "order") | {"segments"}

    def order(self, inputs: Mapping[str, PartialArray]) -> Order:
        """The order of tokens by rank, int32 [R, T]: the original place of the token at each place of each row.

        Rows that lack an input of `reads` keep their order.

        inputs: the module's inputs by name, with all rows of "segments".
        """
        rows, width = inputs["segments"].shape
        order_RT = np.tile(np.arange(width, dtype=np.int32), (rows, 1))
        if self.has_fronts:
            return order_RT[:, np.argsort(self._with_fronts(width), kind="stable")]
        for number in range(rows):
            row = self._row(inputs, number)
            if self.reads <= row.keys():
                order_RT[number] = self.order_of_row(row)
        return order_RT

    def order_of_row(self, row: Row) -> Int[np.ndarray, " T"]:
        """The order of the tokens of one row, int32: the original place of each token. `row` as in `pairs`."""
        return np.argsort(self._distributed(row)[1], kind="stable").astype(np.int32)

    def work(self, inputs: Mapping[str, PartialArray]) -> Int[np.ndarray, "R K"]:
        """Number of keys that the tokens of each rank see in each row, summed over layers.

        In rows that lack an input of `reads`, masks of words count as causal, and windows of a grid as none.
        """
        rows = (self._row(inputs, number) for number in range(inputs["segments"].shape[0]))
        distributed = (self._distributed(row) for row in rows)
        return np.stack([np.bincount(rank_T, work_T, self.ranks) for work_T, rank_T in distributed]).astype(np.int64)

    def imbalance(self, width: int) -> float:
        """Work of the busiest rank over the mean, in a row of about this width that is one segment."""
        segments = PartialArray.full((0,), (1, self.rounded(width)), 1, value=1)
        return busiest_over_mean(self.work({"segments": segments}))

    def pairs(self, row: Row) -> Int[np.ndarray, " T"]:
        """Number of keys that each token of a row sees, summed over layers; padding sees none.

        row: the row's inputs by name, "segments" [T] and, for masks that read others, those of `reads`.
        """
        has_inputs = self.reads <= row.keys()
        masks = self.masks if has_inputs else [(layers, _by_segments_alone(mask)) for layers, mask in self.masks]
        counted = [layers * pairs_of(mask, row).key_counts() for layers, mask in masks]
        return sum(counted, start=np.zeros(len(row["segments"]), np.int64))

    def _row(self, inputs: Mapping[str, PartialArray], number: int) -> dict[str, np.ndarray]:
        """The inputs `reads` of a row, as far as they are present."""
        read = {name: inputs[name].row(number) for name in self.reads & inputs.keys()}
        return {name: values for name, values in read.items() if values is not None}

    def _distributed(self, row: Row) -> tuple[Int[np.ndarray, " T"], Int[np.ndarray, " T"]]:
        """Work and rank of each position of a row."""
        work_T = self.pairs(row)
        if self.has_fronts:
            return work_T, self._with_fronts(len(work_T))
        rank_T = self._by_segments(row["segments"], work_T) if self.method == "segments" else None
        return work_T, self._by_blocks(work_T) if rank_T is None else rank_T

    def _with_fronts(self, width: int) -> Int[np.ndarray, " T"]:
        """The rank of each place of a row of this width, with a run of the first places on each rank."""
        ranks = np.arange(self.ranks)
        return np.concatenate([np.repeat(ranks, count // self.ranks) for count in (self.front, width - self.front)])

    def _by_blocks(self, work_T: Int[np.ndarray, " T"]) -> Int[np.ndarray, " T"]:
        block = self.block(len(work_T)) if self.permutes else self.unit
        work_N = np.add.reduceat(work_T, np.arange(0, len(work_T), block))
        method = "lpt" if self.method == "segments" else self.method
        return np.repeat(METHODS[method](work_N, self.ranks), block)

    def _by_segments(
        self, segments_T: Int[np.ndarray, " T"], work_T: Int[np.ndarray, " T"]
    ) -> Int[np.ndarray, " T"] | None:
        """The rank of each position, with whole segments on ranks, and padding where there is room.

        None where the segments do not fit.
        """
        starts_N = np.flatnonzero(np.diff(segments_T, prepend=segments_T[:1] - 1))
        sizes_N = np.diff(starts_N, append=len(segments_T))
        real_N = segments_T[starts_N] > 0
        if (sizes_N % self.token).any():
            return None
        room, work_N = len(segments_T) // self.ranks, np.add.reduceat(work_T, starts_N)
        rank_N = assign_parts(work_N[real_N], sizes_N[real_N], self.ranks, room)
        if rank_N is None:
            return None
        rank_T = np.empty(len(segments_T), np.int64)
        rank_T[segments_T > 0] = np.repeat(rank_N, sizes_N[real_N])
        used_K = np.bincount(rank_N, sizes_N[real_N], self.ranks).astype(np.int64)
        rank_T[segments_T == 0] = np.repeat(np.arange(self.ranks), room - used_K)
        return rank_T


def _by_segments_alone(mask: Mask) -> Mask:
    """A mask of similar work that reads segments and the order of tokens alone."""
    return Mask("causal" if "order" in mask.input_names else "full", mask.window)


def busiest_over_mean(work_CK: Int[np.ndarray, "C K"]) -> float:
    """Sum over rows of the work of the busiest rank, over the sum of the mean work; the ranks of a row wait for it.

    1.0 if all is balanced or there is no work; 1.5 for [[3, 1]]. The columns are ranks.
    """
    return float(work_CK.max(axis=1).sum() / work_CK.mean(axis=1).sum()) if work_CK.any() else 1.0


UNSPLIT = Split()
"""Rows that are not split."""


@dataclass(frozen=True, kw_only=True)
class Pointers:
    """An input whose numbers point at tokens in another module's rows.

    A number is a place among the flattened tokens of the row's cell; negative numbers point at nothing.

    Attributes:
      module: the module that has the input, and reads the tokens.
      name: the name of the input.
      source: the module that has the tokens.
      together: number of positions of the source's rows that make one token.
    """

    module: str
    name: str
    source: str
    together: int = 1


def places_of(source: str) -> str:
    """The default name of the input that points at tokens of ``source``: "index" for the LLM, else "<source>_index"."""
    return "index" if source == "llm" else f"{source}_index"


def put_in_order(
    inputs: Mapping[str, Arrays],
    splits: Mapping[str, Split],
    pointers: tuple[Pointers, ...],
    cells: int,
    process_rows: ProcessRows | None,
    fixed: frozenset[str] = frozenset(),
) -> dict[str, Arrays]:
    """A microbatch's inputs with the columns of rows in the order of the ranks, as new dicts.

    Each module whose split `permutes` has the input "order" in addition, int32 [R, T]: the original place of the token
    at each place of a row.

    Args:
      inputs: `PartialArray`s by module and name. Wanted rows, rows that point at them and rows at which they point have
        all inputs that determine the order of tokens.
      splits: how rows are split, by module, such as {"llm": Split(ranks=2, method="lpt", masks=…)}.
      pointers: the inputs that point at tokens in other modules' rows, such as Pointers(module="llm",
        name="vision_index", source="vision"); they are renumbered.
      cells: number of cells of the microbatch.
      process_rows: the wanted rows; ``None`` for all.
      fixed: modules whose tokens keep their places in any case.
    """
    orders = {
        module: split.order(inputs[module])
        for module, split in splits.items()
        if (split.permutes or split.has_fronts) and module not in fixed
    }
    ordered = {module: dict(arrays) for module, arrays in inputs.items()}
    for pointer in pointers:
        if pointer.source in orders:
            arrays, order = ordered[pointer.module], _order_of_tokens(orders[pointer.source], pointer.together)
            arrays[pointer.name] = _renumbered(arrays[pointer.name], order)
    for module, order_RT in orders.items():
        has_fronts, width = splits[module].has_fronts, order_RT.shape[1]
        for name, array in ordered[module].items():
            if not has_fronts or array.shape[1] == width:
                ordered[module][name] = _ordered(array, order_RT)
    for module in (module for module, split in splits.items() if split.permutes):
        rows, width = inputs[module]["segments"].shape
        order_RT = orders.get(module, np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width)))
        array = PartialArray.full(wanted_cells(process_rows, module, "order", cells), (rows, width), cells)
        array.local_rows[:] = order_RT[array.rows]
        ordered[module]["order"] = array
    return ordered


def _order_of_tokens(order_RT: Order, together: int) -> Order:
    """The order of tokens that each take `together` neighbouring positions, from the order of positions."""
    return order_RT[:, ::together] // together


def _ordered(array: PartialArray, order_RT: Order) -> PartialArray:
    """An input `[R, T, ...]`, or `[R, T/m, ...]` of tokens of m positions, in another order."""
    order = _order_of_tokens(order_RT, order_RT.shape[1] // array.shape[1])[array.rows]
    order = order.reshape(*order.shape, *[1] * (array.ndim - 2))
    return PartialArray(array.cells, array.shape, array.count, np.take_along_axis(array.local_rows, order, axis=1))


def _renumbered(array: PartialArray, order_RT: Order) -> PartialArray:
    """Pointers `[row, ...]` at the flattened tokens of the row's cell, after these were put in another order."""
    rows, width = order_RT.shape
    now_RT = np.empty_like(order_RT)  # the new place of each token, by its old place
    np.put_along_axis(now_RT, order_RT, np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width)), axis=1)
    cell = array.rows * array.count // max(1, array.shape[0])
    first = (cell * (rows // array.count)).reshape(-1, *[1] * (array.ndim - 1))
    row, place = np.divmod(array.local_rows, width)
    real = array.local_rows >= 0
    now = row * width + now_RT[np.where(real, first + row, 0), np.where(real, place, 0)]
    return PartialArray(array.cells, array.shape, array.count, np.where(real, now, array.local_rows).astype(np.int32))


def restored(values_RT: np.ndarray, order_RT: Order) -> np.ndarray:
    """A copy of values of tokens, `[R, T, ...]` in the order `order_RT`, at the original places of the tokens.

    order_RT: int [R, T], the original place of the token at each place of a row, as the input "order" has it.
    """
    result = np.empty_like(values_RT)
    np.put_along_axis(result, order_RT.reshape(*order_RT.shape, *[1] * (values_RT.ndim - 2)), values_RT, axis=1)
    return result
