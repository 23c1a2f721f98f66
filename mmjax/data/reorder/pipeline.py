"""Reorders a step's samples for one pipeline: assigns each to a rank and a microbatch, by one of three methods.

* "none": the order of the data.
* "disttrain": Zhang et al., "DistTrain", §5: Alg. 1 shares samples among the dp ranks, Alg. 2 orders each rank's
  microbatches.
* "best": balances loads further, tries several ways to cut and order microbatches, and searches from the best of these.
  In the simulation it is never slower than "disttrain" and "none", which are among its candidates.

With `together`, every op is one program over all its dp ranks, padded to the largest of its cells. Ranks then wait for
each other in every op, and a microbatch costs as much as its largest rank, so samples of similar size should share a
microbatch. Without it, ranks do not wait for each other until the step ends, as in the paper.

If encoders or generators have lanes, a unit of microbatches, one on each lane, takes the place of a microbatch (see
`Units`): its samples are shared among its microbatches and their ranks, and units are ordered. Only the search moves
single microbatches out of their unit, if this makes the simulated step shorter.

An encoder whose op takes several microbatches costs as much as all of them, in any order: its ops balance by how
samples are shared among these runs of microbatches and among ranks.

Everything is a pure function of the samples' costs, so processes that know the costs agree without communication. Costs
are rounded to multiples of a power of two, which makes their sums exact in any order of addition.

Legend: C costs that vary, S samples, R dp ranks, M microbatches, W rows of a rank in a microbatch, L lines (pipelines
that run independently: R, or one if together), U units, K cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmjax.data.reorder.intervals import Intervals
from mmjax.data.reorder.partition import balanced, cut, greedy, least_load, similar
from mmjax.data.reorder.search import Effort, improve
from mmjax.data.reorder.units import Units
from mmjax.schedule.ops import Schedule, occupied_ranks
from mmjax.schedule.recurrence import Recurrence
from mmjax.schedule.simulate import Costs, Timeline, simulate

METHODS = ("none", "disttrain", "best")
_EMPTY = -1
"""A row without a sample."""
_ENOUGH = 1.001
"""A search ends this close to the lower bound."""
_BITS = 50
"""Bits of a sum of costs; costs are rounded so that it is exact."""

Seconds = Mapping[str, np.ndarray]
"""Forward and backward seconds of each sample [S, 2], by module whose samples differ."""
Order = tuple[tuple[tuple[int, ...], ...], ...]
"""The samples by dp rank and by microbatch, in the order in which microbatches run."""
Padded = Callable[[Order], Mapping[str, np.ndarray]]
"""A function from an order to the forward and backward seconds of its microbatches in static shapes [M, 2], by module
whose samples differ."""


@dataclass(frozen=True, eq=False)
class _Work:
    """A step's samples: their costs [C, S], and their costs in static shapes, if there are buckets."""

    sizes_CS: np.ndarray
    padded: Padded | None


def rows_of_ranks(rows: int, ranks: int) -> tuple[int, ...]:
    """The number of a microbatch's `rows` on each dp rank: equal numbers, but fewer or none on the last ranks.

    (3, 3, 1) for 7 rows on 3 ranks. `Packer` cuts rows into cells in the same way.
    """
    each = -(-rows // ranks)
    return tuple(max(0, min(each, rows - rank * each)) for rank in range(ranks))


class Pipeline:
    """A pipeline whose samples are reordered, step by step.

    Attributes:
      recurrence: times the schedule.
      rows: rows of a microbatch, by dp rank.
      units: the units of the stages whose samples differ.
      together: whether ranks wait for each other in every op.
      effort: limits of a search.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        shares: Mapping[str, Mapping[str, tuple[float, float]]],
        rows: Sequence[int],
        *,
        together: bool = False,
        effort: Effort | None = None,
    ):
        """Prepares the pipeline for all steps.

        Args:
          schedule: the schedule of every step.
          costs: costs of the other stages, for a microbatch of a rank.
          shares: each stage's share of its module's forward and backward, by module whose samples differ.
          rows: rows of a microbatch, by dp rank.
          together: see the class.
          effort: see the class.
        """
        self._costs = costs
        self.recurrence = Recurrence(schedule, costs, [stage for stages in shares.values() for stage in stages])
        self.rows, self.together, self.effort = tuple(rows), together, effort or Effort()
        by_stage = ((module, *item) for module, of_module in shares.items() for item in of_module.items())
        self._shares = {stage: (module, share) for module, stage, share in by_stage}
        self.units = Units.of(schedule.graph, self._shares, schedule.microbatches)
        self._intervals: dict[str, Intervals] = {}

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a step."""
        return self.recurrence.schedule.microbatches

    @property
    def samples(self) -> int:
        """Number of samples of a step."""
        return sum(self.rows) * self.microbatches

    # ---- interface ---------------------------------------------------------------------------------------------------

    def reorder(self, seconds: Seconds, method: str, padded: Padded | None = None) -> Order:
        """The samples in the order of `method`; each occurs once, and each rank has its `rows`.

        Args:
          seconds: forward and backward seconds of each sample, float [S, 2] in the order of the data, by module whose
            samples differ.
          method: one of `METHODS`: "none", "disttrain" or "best".
          padded: gives the costs of microbatches in static shapes, if ranks are together. Without it, a microbatch
            costs as much as its largest rank's samples.

        Returns:
          `order[rank][microbatch]` is a tuple of samples, as indices in the order of the data.
        """
        if method == "none":
            return self._order(self._original)
        find_order = {"disttrain": self._disttrain, "best": self._best}[method]
        return self._order(find_order(self._work(seconds, padded)))

    def makespan(self, seconds: Seconds, order: Order, padded: Padded | None = None) -> float:
        """Simulated seconds of a step in this order, on its slowest rank; arguments as in `reorder`."""
        lines_CML = self._lines(self._work(seconds, padded), self._slots(order))
        return float(self.recurrence.makespans(lines_CML).max())

    def timeline(self, seconds: Seconds, order: Order, padded: Padded | None = None) -> Timeline:
        """The simulation of a step in this order, op by op; only if ranks are together. Arguments as in `reorder`."""
        assert self.together, "each rank has a separate timeline"
        table_CM = self.recurrence.of_ops(self._lines(self._work(seconds, padded), self._slots(order)))[..., 0]
        overrides = {
            (kind, stage, False, m): float(cost)
            for (kind, stage), costs_M in zip(self.recurrence.keys, table_CM, strict=True)
            for m, cost in enumerate(costs_M)
        }
        schedule = self.recurrence.schedule
        costs = self._costs.split_as(schedule.graph)
        return simulate(schedule, Costs(seconds=costs.seconds, overrides={**costs.overrides, **overrides}))

    def loads(self, seconds: Seconds, order: Order) -> np.ndarray:
        """Seconds of all modules whose samples differ, forward and backward, by dp rank and microbatch [R, M].

        A microbatch has its share of an op that takes several. Arguments as in `reorder`.
        """
        table_CMR = self._table(self.sizes(seconds), self._slots(order))
        for costs_MR, (_, stage) in zip(table_CMR, self.recurrence.keys, strict=True):
            node = self.recurrence.schedule.graph.stage(stage)
            for first in range(0, self.microbatches, node.microbatches):
                together = slice(first, first + node.microbatches)
                costs_MR[together] = costs_MR[together].mean(axis=0)
        return table_CMR.sum(axis=0).T

    def imbalance(self, seconds: Seconds, order: Order) -> float:
        """Load of the largest cell of each unit over the load of the mean cell, summed over units; see `loads`."""
        loads_RM = self.loads(seconds, order)
        units = [loads_RM[:, self.units.members(unit)] for unit in range(self.units.count)]
        return float(sum(cells.max() for cells in units) / max(sum(cells.mean() for cells in units), 1e-30))

    def least_load(self, seconds: Seconds) -> float:
        """A lower bound of the largest load of a rank in a step, in seconds; `seconds` as in `reorder`."""
        return least_load(self.sizes(seconds).sum(axis=0), self._rows_of_step)

    def bound(self, seconds: Seconds) -> float:
        """A lower bound, in seconds, of the makespan of any order; `seconds` as in `reorder`."""
        return self._bound(self.sizes(seconds))

    def sizes(self, seconds: Seconds) -> np.ndarray:
        """Seconds of each sample [C, S], C in the order of `recurrence.keys`; `seconds` as in `reorder`."""
        sizes_CS = self._columns(seconds)
        _, exponent = np.frexp(sizes_CS.max(initial=0.0) * sizes_CS.size)
        return np.ldexp(np.rint(np.ldexp(sizes_CS, _BITS - exponent)), exponent - _BITS)

    def _columns(self, seconds: Seconds) -> np.ndarray:
        graph, columns = self.recurrence.schedule.graph, []
        for kind, stage in self.recurrence.keys:
            (module, share), direction = self._shares[stage], int(kind != "F")
            split = 0.5 if direction and graph.stage(stage).split else 1.0
            columns.append(seconds[module][:, direction] * (share[direction] * split))
        return np.stack(columns)

    def _work(self, seconds: Seconds, padded: Padded | None) -> _Work:
        assert self.together or padded is None, "independent ranks have different shapes"
        return _Work(self.sizes(seconds), padded)

    # ---- timing ------------------------------------------------------------------------------------------------------

    def _table(self, sizes_CS: np.ndarray, slots_RMW: np.ndarray) -> np.ndarray:
        """Costs of each rank's microbatches [C, M, R]."""
        padded = np.concatenate([sizes_CS, np.zeros((len(sizes_CS), 1), sizes_CS.dtype)], axis=1)  # the last is _EMPTY
        return padded[:, slots_RMW].sum(axis=-1).transpose(0, 2, 1)

    def _lines(self, work: _Work, slots_RMW: np.ndarray) -> np.ndarray:
        """Costs of the pipelines' microbatches [C, M, L]."""
        if work.padded:
            return np.ascontiguousarray(self._columns(work.padded(self._order(slots_RMW)))[..., None])
        table_CMR = self._table(work.sizes_CS, slots_RMW)
        return np.ascontiguousarray(table_CMR.max(axis=-1, keepdims=True) if self.together else table_CMR)

    def _bound(self, sizes_CS: np.ndarray) -> float:
        """A lower bound of makespans, the larger of two.

        One is the least load of the lanes of any submesh, plus the other ops that run there. The other is the makespan
        with the largest sample in its best place and the smallest samples in all others.
        """
        graph = self.recurrence.schedule.graph
        loads: dict[tuple[tuple[int, ...], int], np.ndarray] = {}
        for (_, stage), sizes in zip(self.recurrence.keys, sizes_CS, strict=True):
            where = graph.stage(stage).ranks, graph.stage(stage).lanes
            loads[where] = loads.get(where, 0) + sizes
        largest = sizes_CS[:, sizes_CS.sum(axis=0).argmax()]
        least = np.sort(sizes_CS, axis=1)[:, : min(self.rows)].sum(axis=1)
        places = np.arange(self.microbatches)
        table_CMK = np.repeat(np.repeat(least[:, None, None], len(places), axis=1), len(places), axis=2)
        table_CMK[:, places, places] = np.maximum(largest, least)[:, None]
        busy = [
            least_load(load_S, self._rows_of_lanes(lanes)) + min(self._others[rank] for rank in ranks)
            for (ranks, lanes), load_S in loads.items()
        ]
        return max(float(self.recurrence.makespans(table_CMK).min()), *busy)

    # ---- the methods -------------------------------------------------------------------------------------------------

    @cached_property
    def _original(self) -> np.ndarray:
        """Samples in the order of the data: microbatch by microbatch, rank by rank, row by row [R, M, W]."""
        slots_RMW = np.full((len(self.rows), self.microbatches, max(self.rows)), _EMPTY)
        starts = np.cumsum([0, *self.rows])
        for rank, rows in enumerate(self.rows):
            first = np.arange(self.microbatches) * starts[-1] + starts[rank]
            slots_RMW[rank, :, :rows] = first[:, None] + np.arange(rows)
        return slots_RMW

    def _disttrain(self, work: _Work) -> np.ndarray:
        sizes_CS = work.sizes_CS
        slots_RMW = self._cut(greedy(sizes_CS.sum(axis=0), self._rows_of_step), sizes_CS, even=False)
        return _ordered(slots_RMW, self._by_intervals(sizes_CS, self._table(sizes_CS, slots_RMW)))

    def _best(self, work: _Work) -> np.ndarray:
        """The fastest order of "none", "disttrain" and a search from the best start."""
        sizes_CS = work.sizes_CS
        total_S = sizes_CS.sum(axis=0)
        groups = greedy(total_S, self._rows_of_step)
        paper_RMW = self._cut(groups, sizes_CS, even=False)
        items = self._items(sizes_CS, balanced(total_S, self._rows_of_step, groups=groups))
        tables = [self._lines(work, slots_RMW) for slots_RMW in items]
        # Alg. 2 for all cases at once: the time of a wave hardly depends on their number.
        cases_CMK = np.concatenate([self._table(sizes_CS, paper_RMW), *tables], axis=-1)
        order_MK = self._by_intervals(sizes_CS, cases_CMK)
        ranks, lines = len(self.rows), tables[0].shape[-1]
        starts = []
        for number, table_CML in enumerate(tables):
            first = ranks + number * lines
            orders = [order_MK[:, first : first + lines], *self._rising(table_CML)]
            starts.append((*self._start(table_CML, orders), number))
        _, order_ML, number = min(starts, key=lambda start: start[0])
        searched = self._searched(items[number], tables[number], order_ML, self._bound(sizes_CS))
        candidates = [searched, _ordered(paper_RMW, order_MK[:, :ranks]), self._original]
        lines_CML = [self._lines(work, slots_RMW) for slots_RMW in candidates]
        spans = self.recurrence.makespans(np.concatenate(lines_CML, axis=-1)).reshape(len(candidates), -1).max(axis=1)
        return candidates[int(spans.argmin())]

    def _items(self, sizes_CS: np.ndarray, groups: list[list[int]]) -> list[np.ndarray]:
        """Several ways to cut the samples into microbatches, not ordered yet; each is [R, M, W]."""
        choices = (False, True) if max(self.rows) > 1 else (False,)
        if not self.together:
            return [self._cut(groups, sizes_CS, even=even) for even in choices]
        return [self._in_step(sizes_S, even=even) for sizes_S in self._weights(sizes_CS) for even in choices]

    def _weights(self, sizes_CS: np.ndarray) -> list[np.ndarray]:
        """Costs [S] by which samples can be shared: those of all modules, and those of modules with lanes, if the costs
        of others vary too."""
        graph = self.recurrence.schedule.graph
        spread = [i for i, (_, stage) in enumerate(self.recurrence.keys) if graph.stage(stage).lanes > 1]
        total_S = sizes_CS.sum(axis=0)
        return [total_S, sizes_CS[spread].sum(axis=0)] if 0 < len(spread) < len(sizes_CS) else [total_S]

    def _in_step(self, sizes_S: np.ndarray, *, even: bool) -> np.ndarray:
        """Microbatches [R, M, W] in units whose cells cost about the same.

        Samples of similar size share a unit. With `even`, all microbatches cost about the same instead, and the samples
        of each are then shared among its ranks.
        """
        slots_RMW = np.full_like(self._original, _EMPTY)
        units = Units(1, self.microbatches) if even else self.units
        places = [units.members(unit) for unit in range(units.count)]
        if even:
            blocks = map(np.array, greedy(sizes_S, [sum(self.rows)] * self.microbatches))
            shared = [[block[share] for share in greedy(sizes_S[block], self.rows)] for block in blocks]
        else:
            shared = similar(sizes_S, [self.rows * len(members) for members in places])
        for members, groups in zip(places, shared, strict=True):
            cells = [(rank, place) for place in members for rank in range(len(self.rows))]
            for (rank, place), share in zip(cells, groups, strict=True):
                slots_RMW[rank, place, : len(share)] = share
        return slots_RMW

    def _start(self, table_CML: np.ndarray, orders: Sequence[np.ndarray]) -> tuple[tuple[float, float], np.ndarray]:
        """The best of these orders for each line [M, L], after the seconds of the slowest and of the mean line."""
        cases = np.concatenate([np.take_along_axis(table_CML, order_ML[None], axis=1) for order_ML in orders], axis=-1)
        spans_OL = self.recurrence.makespans(cases.astype(np.float32)).reshape(len(orders), -1)
        order_ML = np.take_along_axis(np.stack(orders), spans_OL.argmin(axis=0)[None, None], axis=0)[0]
        spans_L = spans_OL.min(axis=0)
        return (float(spans_L.max()), float(spans_L.mean(dtype=np.float64))), order_ML

    def _searched(self, slots_RMW: np.ndarray, table_CML: np.ndarray, order_ML: np.ndarray, bound: float) -> np.ndarray:
        """`slots_RMW` in the order that a search from `order_ML` finds."""
        lines = table_CML.shape[-1]
        best_ML = improve(
            self.recurrence,
            table_CML.reshape(len(table_CML), -1),
            order_ML * lines + np.arange(lines),
            np.array(self.rows if lines > 1 else [sum(self.rows)]),
            enough=_ENOUGH * bound,
            effort=self.effort,
        )
        if self.together:
            return slots_RMW[:, best_ML[:, 0]]
        return slots_RMW[best_ML.T % lines, best_ML.T // lines]

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _by_intervals(self, sizes_CS: np.ndarray, table_CMK: np.ndarray) -> np.ndarray:
        """The order of Alg. 2 [M, K]; the original order if no stage at the pipeline's beginning has varying costs.

        A stage there whose op takes several microbatches has none between which others run.
        """
        lead = self._lead(sizes_CS)
        if not lead or not self.units.whole:
            return np.repeat(np.arange(self.microbatches)[:, None], table_CMK.shape[-1], axis=1)
        return self.units.expand(self._intervals_of(lead).order(table_CMK))

    def _rising(self, table_CMK: np.ndarray) -> list[np.ndarray]:
        """Two orders: the smallest unit first, the next smallest last, the others ascending between them; and the same
        with every other one of these first."""
        rising, rear = self.units.rising(table_CMK), self._rear
        first, last, between = rising[:1], rising[1 : 1 + rear][::-1], rising[1 + rear :]
        orders = ([first, between, last], [first, between[::2], between[1::2], last])
        return [self.units.expand(np.concatenate(order)) for order in orders]

    @cached_property
    def _rows_of_step(self) -> list[int]:
        return self._rows_of_lanes(1)

    def _rows_of_lanes(self, lanes: int) -> list[int]:
        """Rows of a step by lane and dp rank."""
        return [len(range(lane, self.microbatches, lanes)) * rows for lane in range(lanes) for rows in self.rows]

    @cached_property
    def _others(self) -> dict[int, float]:
        """Seconds of the ops with constant costs, by world rank."""
        schedule, costs = self.recurrence.schedule, self._costs.split_as(self.recurrence.schedule.graph)
        seconds = dict.fromkeys(schedule.graph.ranks, 0.0)
        for op in schedule.ops:
            if op.kind not in "FBW" or op.stage not in self._shares:
                for rank in occupied_ranks(schedule.graph, op):
                    seconds[rank] += costs.of(op)
        return seconds

    @cached_property
    def _rear(self) -> int:
        if not self._leads or not self.units.whole:
            return 0
        return self._intervals_of(self._leads[0]).rear - self.units.kept

    @cached_property
    def _leads(self) -> list[str]:
        graph = self.recurrence.schedule.graph
        varying = dict.fromkeys(stage for _, stage in self.recurrence.keys)
        return [stage for stage in varying if not graph.in_edges(stage) and graph.stage(stage).microbatches == 1]

    def _lead(self, sizes_CS: np.ndarray) -> str:
        """The stage with the most work among `_leads`; "" if there is none."""
        work = dict.fromkeys(self._leads, 0.0)
        for (_, stage), sizes in zip(self.recurrence.keys, sizes_CS, strict=True):
            if stage in work:
                work[stage] += float(sizes.sum())
        return max(work, key=lambda stage: work[stage], default="")

    def _intervals_of(self, lead: str) -> Intervals:
        if lead not in self._intervals:
            self._intervals[lead] = Intervals(self.recurrence, lead, self.units)
        return self._intervals[lead]

    def _cut(self, groups: list[list[int]], sizes_CS: np.ndarray, *, even: bool) -> np.ndarray:
        """Cuts each rank's samples into microbatches [R, M, W], evenly within each unit, or with `even` over all."""
        slots_RMW, total_S = np.full_like(self._original, _EMPTY), sizes_CS.sum(axis=0)
        units = Units(self.microbatches, self.microbatches) if even else self.units
        for rank, (rows, group) in enumerate(zip(self.rows, groups, strict=True)):
            if units.size == 1:
                slots_RMW[rank, :, :rows] = np.array(group, np.int64).reshape(self.microbatches, -1)
                continue
            for members in map(units.members, range(units.count)):
                block = group[members.start * rows : members.stop * rows]
                slots_RMW[rank, members.start : members.stop, :rows] = cut(block, total_S, len(members))
        return slots_RMW

    def _order(self, slots_RMW: np.ndarray) -> Order:
        pairs = zip(self.rows, slots_RMW, strict=True)
        return tuple(tuple(map(tuple, slots_MW[:, :rows].tolist())) for rows, slots_MW in pairs)

    def _slots(self, order: Order) -> np.ndarray:
        slots_RMW = np.full_like(self._original, _EMPTY)
        for rank, microbatches in enumerate(order):
            for place, samples in enumerate(microbatches):
                slots_RMW[rank, place, : len(samples)] = samples
        return slots_RMW


def _ordered(slots_RMW: np.ndarray, order_MR: np.ndarray) -> np.ndarray:
    return np.take_along_axis(slots_RMW, order_MR.T[:, :, None], axis=1)
