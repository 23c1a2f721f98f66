"""Reordering a step's samples for one pipeline: which rank and microbatch each goes to, by three methods.

* "none": as they come.
* "disttrain": Zhang et al., "DistTrain", §5: Alg. 1 shares them among the dp ranks, Alg. 2 orders each rank's
  microbatches.
* "best": loads balanced further, several ways to cut and order them, and a search from the best of these; never slower
  by the simulation than "disttrain" and "none", which are among what it chooses from.

A rank's pipeline may wait for the others in every op (`together`: an op is one program over all its dp ranks, padded to
the largest of its cells), or for nobody until the step ends, as in the paper. In the first case a microbatch costs what
its largest rank costs, so it pays to have samples of a size in one microbatch.

All is a pure function of the samples' costs: processes that know these agree without talking. Costs are rounded to
multiples of a power of two, so that their sums are exact and no machine's way to add matters.

Legend: C costs that vary, S samples, R dp ranks, M microbatches, W rows of a rank in a microbatch, L lines (pipelines
that run by themselves: R, or one if together), I microbatches of all lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmjax.data.reorder.intervals import Intervals
from mmjax.data.reorder.partition import balanced, cut, descending, greedy, least_load
from mmjax.data.reorder.search import Effort, improve
from mmjax.schedule.ops import Schedule
from mmjax.schedule.recurrence import Recurrence
from mmjax.schedule.simulate import Costs, Timeline, simulate

METHODS = ("none", "disttrain", "best")
_EMPTY = -1
"""A row without a sample."""
_ENOUGH = 1.001
"""A search ends this close to the lower bound."""
_BITS = 50
"""Of what a sum of costs can be."""

Seconds = Mapping[str, np.ndarray]
"""By module whose samples differ, forward and backward seconds of each sample [S, 2]."""
Order = tuple[tuple[tuple[int, ...], ...], ...]
"""By dp rank, by microbatch in the order in which they run: its samples."""
Padded = Callable[[Order], Mapping[str, np.ndarray]]
"""What microbatches cost in static shapes: by module whose samples differ, forward and backward seconds [M, 2]."""


@dataclass(frozen=True, eq=False)
class _Work:
    """A step's samples: their costs [C, S], and what pads them, if anything does."""

    sizes_CS: np.ndarray
    padded: Padded | None


def rows_of_ranks(rows: int, ranks: int) -> tuple[int, ...]:
    """How many of a microbatch's `rows` each dp rank has: the same, and the last ones what is left, maybe nothing.

    So `Packer` cuts rows into cells.
    """
    each = -(-rows // ranks)
    return tuple(max(0, min(each, rows - rank * each)) for rank in range(ranks))


class Pipeline:
    """What stays the same from step to step; made once.

    Attributes:
      recurrence: times the schedule.
      rows: of a microbatch, by dp rank.
      together: whether ranks wait for each other in every op.
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
        """`shares`: by module whose samples differ, by stage of it: its part of the module's forward and backward.

        costs: of the other stages, by microbatch of a rank.
        """
        self._costs = costs
        self.recurrence = Recurrence(schedule, costs, [stage for stages in shares.values() for stage in stages])
        self.rows, self.together, self.effort = tuple(rows), together, effort or Effort()
        self._shares = {stage: (module, share) for module, own in shares.items() for stage, share in own.items()}
        self._intervals: dict[str, Intervals] = {}

    @property
    def microbatches(self) -> int:
        """Of a step."""
        return self.recurrence.schedule.microbatches

    @property
    def samples(self) -> int:
        """Of a step."""
        return sum(self.rows) * self.microbatches

    # ---- what others ask ---------------------------------------------------------------------------------------------

    def reorder(self, seconds: Seconds, method: str, padded: Padded | None = None) -> Order:
        """The samples in the order of `method`, one of `METHODS`; each occurs once, and each rank has its `rows`.

        padded: where ranks are together, what their microbatches cost if not as much as the largest rank's samples.
        """
        ways = {"none": lambda _: self._given, "disttrain": self._disttrain, "best": self._best}
        return self._order(ways[method](self._work(seconds, padded)))

    def makespan(self, seconds: Seconds, order: Order, padded: Padded | None = None) -> float:
        """Simulated seconds of a step in this order: those of its slowest rank."""
        lines_CML = self._lines(self._work(seconds, padded), self._slots(order))
        return float(self.recurrence.makespans(lines_CML).max())

    def timeline(self, seconds: Seconds, order: Order, padded: Padded | None = None) -> Timeline:
        """A step in this order, simulated op by op, where ranks are together."""
        assert self.together, "each rank has a timeline of its own"
        table_CM = self._lines(self._work(seconds, padded), self._slots(order))[..., 0]
        overrides = {
            (kind, stage, False, m): float(own)
            for (kind, stage), row_M in zip(self.recurrence.keys, table_CM, strict=True)
            for m, own in enumerate(row_M)
        }
        schedule = self.recurrence.schedule
        costs = self._costs.split_as(schedule.graph)
        return simulate(schedule, Costs(seconds=costs.seconds, overrides={**costs.overrides, **overrides}))

    def loads(self, seconds: Seconds, order: Order) -> np.ndarray:
        """Seconds of the modules whose samples differ, by dp rank and microbatch [R, M]."""
        return self._table(self.sizes(seconds), self._slots(order)).sum(axis=0).T

    def least_load(self, seconds: Seconds) -> float:
        """No order's largest load is below this."""
        return least_load(self.sizes(seconds).sum(axis=0), self._rows_of_step)

    def bound(self, seconds: Seconds) -> float:
        """No order's makespan is below this."""
        return self._bound(self.sizes(seconds))

    def sizes(self, seconds: Seconds) -> np.ndarray:
        """Costs of each sample [C, S], in the order of `recurrence.keys`."""
        sizes_CS = self._columns(seconds)
        _, exponent = np.frexp(sizes_CS.max(initial=0.0) * sizes_CS.size)
        return np.ldexp(np.rint(np.ldexp(sizes_CS, _BITS - exponent)), exponent - _BITS)

    def _columns(self, seconds: Seconds) -> np.ndarray:
        graph, columns = self.recurrence.schedule.graph, []
        for kind, stage in self.recurrence.keys:
            (module, share), way = self._shares[stage], int(kind != "F")
            split = 0.5 if way and graph.stage(stage).split else 1.0
            columns.append(seconds[module][:, way] * (share[way] * split))
        return np.stack(columns)

    def _work(self, seconds: Seconds, padded: Padded | None) -> _Work:
        assert self.together or padded is None, "ranks that wait for nobody have shapes of their own"
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
        """The load of a submesh; and the largest sample in its best place with the smallest ones everywhere else."""
        graph = self.recurrence.schedule.graph
        loads: dict[tuple[int, ...], np.ndarray] = {}
        for (_, stage), sizes in zip(self.recurrence.keys, sizes_CS, strict=True):
            ranks = graph.stage(stage).ranks
            loads[ranks] = loads.get(ranks, 0) + sizes
        largest = sizes_CS[:, sizes_CS.sum(axis=0).argmax()]
        least = np.sort(sizes_CS, axis=1)[:, : min(self.rows)].sum(axis=1)
        places = np.arange(self.microbatches)
        table_CMK = np.repeat(np.repeat(least[:, None, None], len(places), axis=1), len(places), axis=2)
        table_CMK[:, places, places] = np.maximum(largest, least)[:, None]
        busy = [least_load(load_S, self._rows_of_step) for load_S in loads.values()]
        return max(float(self.recurrence.makespans(table_CMK).min()), *busy)

    # ---- the methods -------------------------------------------------------------------------------------------------

    @cached_property
    def _given(self) -> np.ndarray:
        """Samples in their order: microbatch by microbatch, rank by rank, row by row [R, M, W]."""
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
        """The fastest of "none", "disttrain" and what a search makes of the best start."""
        sizes_CS = work.sizes_CS
        total_S = sizes_CS.sum(axis=0)
        groups = greedy(total_S, self._rows_of_step)
        paper_RMW = self._cut(groups, sizes_CS, even=False)
        items = self._items(sizes_CS, balanced(total_S, self._rows_of_step, groups=groups))
        tables = [self._lines(work, slots_RMW) for slots_RMW in items]
        # Alg. 2 for all of these at once: waves cost more than the cases in them.
        whole = np.concatenate([self._table(sizes_CS, paper_RMW), *tables], axis=-1)
        order_MK = self._by_intervals(sizes_CS, whole)
        ranks, lines = len(self.rows), tables[0].shape[-1]
        starts = []
        for number, table_CML in enumerate(tables):
            first = ranks + number * lines
            orders = [order_MK[:, first : first + lines], *self._rising(table_CML)]
            starts.append((*self._start(table_CML, orders), number))
        _, order_ML, number = min(starts, key=lambda start: start[0])
        found = self._searched(items[number], tables[number], order_ML, self._bound(sizes_CS))
        ways = [found, _ordered(paper_RMW, order_MK[:, :ranks]), self._given]
        lines_CML = [self._lines(work, way) for way in ways]
        spans = self.recurrence.makespans(np.concatenate(lines_CML, axis=-1)).reshape(len(ways), -1).max(axis=1)
        return ways[int(spans.argmin())]

    def _items(self, sizes_CS: np.ndarray, groups: list[list[int]]) -> list[np.ndarray]:
        """Ways to make microbatches: slots by rank and microbatch, not in any order yet."""
        ways = (False, True) if max(self.rows) > 1 else (False,)
        if not self.together:
            return [self._cut(groups, sizes_CS, even=even) for even in ways]
        return [self._in_step(sizes_CS, even=even) for even in ways]

    def _in_step(self, sizes_CS: np.ndarray, *, even: bool) -> np.ndarray:
        """Microbatches whose ranks cost about the same.

        Samples of a size together, or microbatches as even as can be and their rows shared among the ranks.
        """
        total_S, microbatches = sizes_CS.sum(axis=0), self.microbatches
        falling = descending(total_S)
        groups = [falling.tolist()] if not even else greedy(total_S, [sum(self.rows)] * microbatches)
        blocks = groups if even else cut(groups[0], total_S, microbatches, even=False)
        slots_RMW = np.full_like(self._given, _EMPTY)
        for place, block in enumerate(blocks):
            own = np.array(block)
            for rank, share in enumerate(greedy(total_S[own], self.rows)):
                slots_RMW[rank, place, : len(share)] = own[share]
        return slots_RMW

    def _start(self, table_CML: np.ndarray, orders: Sequence[np.ndarray]) -> tuple[tuple[float, float], np.ndarray]:
        """Each line in the best of these orders, and what comes of it: seconds of the slowest line and of the mean."""
        cases = np.concatenate([np.take_along_axis(table_CML, order_ML[None], axis=1) for order_ML in orders], axis=-1)
        spans_OL = self.recurrence.makespans(cases.astype(np.float32)).reshape(len(orders), -1)
        order_ML = np.take_along_axis(np.stack(orders), spans_OL.argmin(axis=0)[None, None], axis=0)[0]
        spans_L = spans_OL.min(axis=0)
        return (float(spans_L.max()), float(spans_L.mean(dtype=np.float64))), order_ML

    def _searched(self, slots_RMW: np.ndarray, table_CML: np.ndarray, order_ML: np.ndarray, bound: float) -> np.ndarray:
        """`slots_RMW` in an order that a search has found, beginning with `order_ML`."""
        lines = table_CML.shape[-1]
        found_ML = improve(
            self.recurrence,
            table_CML.reshape(len(table_CML), -1),
            order_ML * lines + np.arange(lines),
            np.array(self.rows if lines > 1 else [sum(self.rows)]),
            enough=_ENOUGH * bound,
            effort=self.effort,
        )
        if self.together:
            return slots_RMW[:, found_ML[:, 0]]
        return slots_RMW[found_ML.T % lines, found_ML.T // lines]

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _by_intervals(self, sizes_CS: np.ndarray, table_CMK: np.ndarray) -> np.ndarray:
        """The order of Alg. 2 [M, K]; as they are where no stage whose costs vary begins the pipeline."""
        lead = self._lead(sizes_CS)
        if not lead:
            return np.repeat(np.arange(self.microbatches)[:, None], table_CMK.shape[-1], axis=1)
        return self._intervals_of(lead).order(table_CMK)

    def _rising(self, table_CMK: np.ndarray) -> list[np.ndarray]:
        """The smallest first, the next smallest last, rising between; and the same with every other one first."""
        rising = np.argsort(table_CMK.sum(axis=0), axis=0, kind="stable")
        rear = self._rear
        first, last, rest = rising[:1], rising[1 : 1 + rear][::-1], rising[1 + rear :]
        return [np.concatenate([first, rest, last]), np.concatenate([first, rest[::2], rest[1::2], last])]

    @cached_property
    def _rows_of_step(self) -> list[int]:
        return [rows * self.microbatches for rows in self.rows]

    @cached_property
    def _rear(self) -> int:
        return self._intervals_of(self._leads[0]).rear if self._leads else 0

    @cached_property
    def _leads(self) -> list[str]:
        graph = self.recurrence.schedule.graph
        varying = dict.fromkeys(stage for _, stage in self.recurrence.keys)
        return [stage for stage in varying if not graph.in_edges(stage)]

    def _lead(self, sizes_CS: np.ndarray) -> str:
        """The stage with most to do of those that begin the pipeline."""
        work = dict.fromkeys(self._leads, 0.0)
        for (_, stage), sizes in zip(self.recurrence.keys, sizes_CS, strict=True):
            if stage in work:
                work[stage] += float(sizes.sum())
        return max(work, key=lambda stage: work[stage], default="")

    def _intervals_of(self, lead: str) -> Intervals:
        if lead not in self._intervals:
            self._intervals[lead] = Intervals(self.recurrence, lead)
        return self._intervals[lead]

    def _cut(self, groups: list[list[int]], sizes_CS: np.ndarray, *, even: bool) -> np.ndarray:
        """Each rank's samples in microbatches [R, M, W]."""
        slots_RMW = np.full_like(self._given, _EMPTY)
        for rank, group in enumerate(groups):
            own = cut(group, sizes_CS.sum(axis=0), self.microbatches, even=True) if even else group
            slots_RMW[rank, :, : self.rows[rank]] = np.array(own, np.int64).reshape(self.microbatches, -1)
        return slots_RMW

    def _order(self, slots_RMW: np.ndarray) -> Order:
        pairs = zip(self.rows, slots_RMW, strict=True)
        return tuple(tuple(map(tuple, slots_MW[:, :rows].tolist())) for rows, slots_MW in pairs)

    def _slots(self, order: Order) -> np.ndarray:
        slots_RMW = np.full_like(self._given, _EMPTY)
        for rank, microbatches in enumerate(order):
            for place, samples in enumerate(microbatches):
                slots_RMW[rank, place, : len(samples)] = samples
        return slots_RMW


def _ordered(slots_RMW: np.ndarray, order_MR: np.ndarray) -> np.ndarray:
    return np.take_along_axis(slots_RMW, order_MR.T[:, :, None], axis=1)
