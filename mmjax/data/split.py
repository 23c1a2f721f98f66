"""The tokens of rows over the ranks of context parallelism: how wide rows are, which rank has which tokens.

Rows are packed as if they were whole. Last of all, after targets have been shifted, their columns are put in the order
of the ranks, each of which has a run of them; an input "order" says where a token stood. Places of one module's tokens
in another's rows are numbered anew.

Legend: R rows, T positions of a row, N blocks of positions, K ranks, C rows or cells of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from mmjax.attention.distribution import METHODS, whole_parts
from mmjax.attention.mask import Mask
from mmjax.attention.pairs import pairs_of
from mmjax.data.process_rows import PartialArray, ProcessRows, wanted_cells

BLOCK = 512
"""The most positions of a block, which stays on one rank: those of a block of attention, which could skip less of the
pairs that a mask hides if its tokens came from several places."""
FEWEST = 8
"""Blocks of a rank, if rows are long enough: with fewer, work is hard to balance."""

Arrays = dict[str, PartialArray]
Row = Mapping[str, np.ndarray]
"""Inputs of one row, by name."""
Order = Int[np.ndarray, "R T"]
"""For each place of a row, the place where its token stood before."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How the rows of one module are split.

    Attributes:
      ranks: ranks that each have a part of a row.
      unit: positions of a part are a multiple of this.
      token: positions that are one token, and stay together; parts hold whole tokens.
      method: how blocks are given to ranks, a key of `attention.distribution.METHODS`; "contiguous" leaves all tokens
        where they are. Or "segments": whole segments, in rows where ranks have room for that, else "lpt".
      masks: of the module's layers, how many have each mask; the work of a block follows from what they allow.
    """

    ranks: int = 1
    unit: int = 1
    token: int = 1
    method: str = "contiguous"
    masks: tuple[tuple[int, Mask], ...] = ()

    @property
    def permutes(self) -> bool:
        """Whether tokens change places."""
        return self.ranks > 1 and self.method != "contiguous"

    def block(self, width: int) -> int:
        """Positions of a block in rows of about this width: units, doubled while a rank has enough blocks."""
        block = self.unit
        while 2 * block <= BLOCK and 2 * block * FEWEST * self.ranks <= width:
            block *= 2
        return block

    def rounded(self, width: int) -> int:
        """The least width, not below this one, of rows that can be split."""
        whole = self.ranks * (self.block(width) if self.permutes else self.unit)
        return -(-width // whole) * whole

    @property
    def reads(self) -> frozenset[str]:
        """The inputs that the order of tokens follows from."""
        return frozenset(name for _, mask in self.masks for name in mask.reads if name != "order") | {"segments"}

    def order(self, inputs: Mapping[str, PartialArray]) -> Order:
        """The order in which the tokens of rows are handed to the ranks; as they are in rows that are not held."""
        rows, width = inputs["segments"].shape
        order_RT = np.tile(np.arange(width, dtype=np.int32), (rows, 1))
        for number in range(rows):
            row = self._row(inputs, number)
            if self.reads <= row.keys():
                order_RT[number] = self.order_of_row(row)
        return order_RT

    def order_of_row(self, row: Row) -> Int[np.ndarray, " T"]:
        """The order of the tokens of one row, from the inputs that are read of it."""
        return np.argsort(self._distributed(row)[1], kind="stable").astype(np.int32)

    def work(self, inputs: Mapping[str, PartialArray]) -> Int[np.ndarray, "R K"]:
        """Keys that the tokens of each rank see in rows, summed over layers.

        Where only segments are held, masks of words are taken to be causal, and windows of a grid to be none.
        """
        rows = (self._row(inputs, number) for number in range(inputs["segments"].shape[0]))
        found = (self._distributed(row) for row in rows)
        return np.stack([np.bincount(rank_T, work_T, self.ranks) for work_T, rank_T in found]).astype(np.int64)

    def imbalance(self, width: int) -> float:
        """Work of the fullest rank over the mean in a row of about this width that is one segment."""
        segments = PartialArray.full((0,), (1, self.rounded(width)), 1, 1)
        return fullest_over_mean(self.work({"segments": segments}))

    def pairs(self, row: Row) -> Int[np.ndarray, " T"]:
        """Keys that each token of a row sees, summed over layers; padding sees none."""
        plain = lambda mask: Mask("causal" if "order" in mask.reads else "full", mask.window)  # noqa: E731
        masks = self.masks if self.reads <= row.keys() else [(layers, plain(mask)) for layers, mask in self.masks]
        counted = [layers * pairs_of(mask, row).counted() for layers, mask in masks]
        return sum(counted, start=np.zeros(len(row["segments"]), np.int64))

    def _row(self, inputs: Mapping[str, PartialArray], number: int) -> dict[str, np.ndarray]:
        """The inputs that are read and held of a row."""
        read = {name: inputs[name].row(number) for name in self.reads & inputs.keys()}
        return {name: values for name, values in read.items() if values is not None}

    def _distributed(self, row: Row) -> tuple[Int[np.ndarray, " T"], Int[np.ndarray, " T"]]:
        """Work and rank of each position of a row."""
        work_T = self.pairs(row)
        rank_T = self._by_segments(row["segments"], work_T) if self.method == "segments" else None
        return work_T, self._by_blocks(work_T) if rank_T is None else rank_T

    def _by_blocks(self, work_T: Int[np.ndarray, " T"]) -> Int[np.ndarray, " T"]:
        block = self.block(len(work_T)) if self.permutes else self.unit
        work_N = np.add.reduceat(work_T, np.arange(0, len(work_T), block))
        method = "lpt" if self.method == "segments" else self.method
        return np.repeat(METHODS[method](work_N, self.ranks), block)

    def _by_segments(
        self, segments_T: Int[np.ndarray, " T"], work_T: Int[np.ndarray, " T"]
    ) -> Int[np.ndarray, " T"] | None:
        """Ranks by whole segments, padding where there is room; None where these do not fit."""
        starts_N = np.flatnonzero(np.diff(segments_T, prepend=segments_T[:1] - 1))
        sizes_N = np.diff(starts_N, append=len(segments_T))
        real_N = segments_T[starts_N] > 0
        if (sizes_N % self.token).any():
            return None
        room, work_N = len(segments_T) // self.ranks, np.add.reduceat(work_T, starts_N)
        rank_N = whole_parts(work_N[real_N], sizes_N[real_N], self.ranks, room)
        if rank_N is None:
            return None
        rank_T = np.empty(len(segments_T), np.int64)
        rank_T[segments_T > 0] = np.repeat(rank_N, sizes_N[real_N])
        used_K = np.bincount(rank_N, sizes_N[real_N], self.ranks).astype(np.int64)
        rank_T[segments_T == 0] = np.repeat(np.arange(self.ranks), room - used_K)
        return rank_T


def fullest_over_mean(work_CK: Int[np.ndarray, "C K"]) -> float:
    """Work of the fullest ranks over that of mean ones, where those of a row of the array wait for each other."""
    return float(work_CK.max(axis=1).sum() / work_CK.mean(axis=1).sum()) if work_CK.any() else 1.0


WHOLE = Split()
"""Rows that are not split."""


@dataclass(frozen=True, kw_only=True)
class Pointers:
    """An input that holds places in another module's rows.

    Attributes:
      module, name: the input.
      source: the module whose places they are, among the flattened tokens of the row's cell; negative where there is
        none.
      together: positions of the source's rows that are one token.
    """

    module: str
    name: str
    source: str
    together: int = 1


def put_in_order(
    inputs: Mapping[str, Arrays],
    splits: Mapping[str, Split],
    pointers: tuple[Pointers, ...],
    cells: int,
    own: ProcessRows | None,
    whole: frozenset[str] = frozenset(),
) -> dict[str, Arrays]:
    """A microbatch's inputs with the columns of rows in the order of the ranks.

    Args:
      inputs: by module and name; of the rows that are wanted, or point at or are pointed at from wanted ones, all that
        the order of tokens follows from.
      splits: by module.
      pointers: the inputs that hold places in other modules' rows.
      cells: cells of the microbatch.
      own: the rows that are wanted.
      whole: modules whose tokens stay where they are all the same.
    """
    orders = {
        module: split.order(inputs[module])
        for module, split in splits.items()
        if split.permutes and module not in whole
    }
    found = {module: dict(arrays) for module, arrays in inputs.items()}
    for one in pointers:
        if one.source in orders:
            arrays = found[one.module]
            arrays[one.name] = _renumbered(arrays[one.name], _of_tokens(orders[one.source], one.together))
    for module, order_RT in orders.items():
        found[module] = {name: _ordered(array, order_RT) for name, array in found[module].items()}
    for module in (module for module, split in splits.items() if split.permutes):
        rows, width = inputs[module]["segments"].shape
        order_RT = orders.get(module, np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width)))
        wanted = wanted_cells(own, module, "order", cells)
        held = PartialArray.full(wanted, (rows, width), cells)
        held.local_rows[:] = order_RT[held.rows]
        found[module]["order"] = held
    return found


def _of_tokens(order_RT: Order, together: int) -> Order:
    """The order of tokens, each of which is so many positions side by side."""
    return order_RT[:, ::together] // together


def _ordered(array: PartialArray, order_RT: Order) -> PartialArray:
    """An input `[R, T, ...]`, or `[R, T/m, ...]` of tokens of m positions, in another order."""
    order = _of_tokens(order_RT, order_RT.shape[1] // array.shape[1])[array.rows]
    order = order.reshape(*order.shape, *[1] * (array.ndim - 2))
    return PartialArray(array.cells, array.shape, array.count, np.take_along_axis(array.local_rows, order, axis=1))


def _renumbered(array: PartialArray, order_RT: Order) -> PartialArray:
    """Places `[row, ...]` among the flattened tokens of the row's cell in rows that are put in another order."""
    rows, width = order_RT.shape
    now_RT = np.empty_like(order_RT)  # for each place before, the place of its token now
    np.put_along_axis(now_RT, order_RT, np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width)), axis=1)
    cell = array.rows * array.count // max(1, array.shape[0])
    first = (cell * (rows // array.count)).reshape(-1, *[1] * (array.ndim - 1))
    row, place = np.divmod(array.local_rows, width)
    real = array.local_rows >= 0
    now = row * width + now_RT[np.where(real, first + row, 0), np.where(real, place, 0)]
    return PartialArray(array.cells, array.shape, array.count, np.where(real, now, array.local_rows).astype(np.int32))


def restored(values_RT: np.ndarray, order_RT: Order) -> np.ndarray:
    """Values of tokens, `[R, T, ...]`, where the tokens stood before."""
    result = np.empty_like(values_RT)
    np.put_along_axis(result, order_RT.reshape(*order_RT.shape, *[1] * (values_RT.ndim - 2)), values_RT, axis=1)
    return result
