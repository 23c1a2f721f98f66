"""The order of a rank's microbatches by the intervals that they fill: Zhang et al., "DistTrain", §5.3, Alg. 2.

The *lead* is the submesh where a pipeline begins. Its forwards run in the *intervals* between its backwards. The first
interval, from its first forward to its first backward, holds a pipeline's warm-up. Each later interval holds the
forwards that the schedule puts there, in 1F1B one; the last ones stay empty. The paper fills an interval with the
microbatches whose forwards come closest to its length. This length (GETINTERVAL) comes from the recurrence that times
the schedule, in which microbatches without a place take no time.

Two things differ from the paper. The loop of Alg. 2 ends when no microbatch is left: the printed bound, l - p, counts
p - 2 too many. With an interleaved schedule, where a microbatch comes to the lead once for each chunk, the sum of its
forwards is compared with the sum of their intervals. If a lead is frozen and has no backward, the intervals are between
the forwards of its consumer that it awaits.

If stages have lanes, whole units are ordered, by the intervals of the lead's first lane, and a unit's forwards are
those of its longest lane (see `Units`).

Legend: M microbatches, U units, K ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.data.reorder.units import Units
from mmjax.schedule.ops import Op
from mmjax.schedule.recurrence import Recurrence, Wave


@dataclass(frozen=True, eq=False)
class _Choice:
    """Places in the order of units that are filled at once.

    opens, closes: the ops whose ends delimit each interval, as places in the array of ends. waves: the waves of ops
    that have to be timed to know these ends.
    """

    places: range
    opens: np.ndarray
    closes: np.ndarray
    waves: tuple[Wave, ...]


class Intervals:
    """Alg. 2 for one schedule.

    Attributes:
      lead: name of the stage where the pipeline begins.
      rear: number of units that are kept for the end.
    """

    def __init__(self, recurrence: Recurrence, lead: str, units: Units):
        """`lead` must have no stage before it, and costs that vary; at least one of `units` must be whole."""
        self.lead, self._recurrence, self._units = lead, recurrence, units
        graph, node = recurrence.schedule.graph, recurrence.schedule.graph.stage(lead)
        self._lanes, ranks = node.lanes, set(node.ranks)
        chunks = {stage.name for stage in graph.stages if stage.module == node.module and ranks & set(stage.ranks)}
        first = [op for op in recurrence.ops if node.lane(op.microbatch) == 0]
        on_lead = [op for op in first if op.stage in chunks]
        forwards = [op for op in on_lead if op.kind == "F"]
        self._returns = any(op.kind == "B" for op in on_lead)
        if self._returns:
            markers = [op for op in on_lead if op.kind == "B"]
        else:
            users = {edge.dst for name in chunks for edge in graph.out_edges(name)} - chunks
            markers = [op for op in first if op.kind == "F" and op.stage in users]
        self._forwards = [i for i, key in enumerate(recurrence.keys) if key[0] == "F" and key[1] in chunks]
        index = recurrence.index
        bits = {index[marker] for marker in markers}
        interval = {op: len(recurrence.ancestors(index[op]) & bits) for op in forwards}
        empty = len(markers) - 1 - max(interval.values())
        each = len(self._forwards) * units.size // node.lanes
        self.rear = max(units.kept, min(units.count - 1, -(-empty // each)))
        # Consumers without time leave no intervals.
        self._choices = self._choose([index[op] for op in markers], interval, index[forwards[0]]) if markers else ()

    def _choose(self, markers: Sequence[int], interval: dict[Op, int], first: int) -> tuple[_Choice, ...]:
        """The choices in order, each with the waves that have to be timed for it."""
        recurrence, last = self._recurrence, self._units.count - self.rear
        intervals_of: dict[int, list[int]] = {}
        for op, number in interval.items():
            intervals_of.setdefault(op.microbatch // self._units.size, []).append(number)
        opening = [first, *markers]
        placed, timed, result = 1, set[int](), []
        while placed < last:
            earliest = min(intervals_of[placed])
            end = placed + 1
            while end < last and min(intervals_of[end]) <= earliest:
                end += 1
            numbers = sorted({min(n, len(markers) - 1) for place in range(placed, end) for n in intervals_of[place]})
            closes = [markers[number] for number in numbers]
            needed = set().union(*(recurrence.ancestors(i) | {i} for i in closes)) - timed
            waves = recurrence.waves(needed)
            timed |= {i for i in needed if self._known(i, placed * self._units.size)}
            opens = np.array([opening[number] for number in numbers])
            result.append(_Choice(range(placed, end), opens, np.array(closes), waves))
            placed = end
        return tuple(result)

    def _known(self, op: int, placed: int) -> bool:
        """Whether this op and all ops before it belong to microbatches that already have a place."""
        ops = self._recurrence.ops
        return all(ops[i - 1].microbatch < placed for i in (op, *self._recurrence.ancestors(op)))

    def order(self, sizes_CMK: np.ndarray) -> np.ndarray:
        """The numbers of the whole units in the order of Alg. 2, for each of K ranks or cases [U, K].

        sizes_CMK: costs of the microbatches in the order of the data, C in the order of `Recurrence.keys`.
        """
        units, ranks = self._units, sizes_CMK.shape[-1]
        rising_UK = units.rising(sizes_CMK)
        every, rear = np.arange(ranks), self.rear - units.kept
        order_UK = np.concatenate([rising_UK[:1], rising_UK[1 + rear :], rising_UK[1 : 1 + rear]])
        left_UK = units.longest(sizes_CMK[self._forwards].sum(axis=0), self._lanes)
        left_UK[rising_UK[: 1 + rear], every] = np.inf  # where a unit has its place
        costs_XK = self._recurrence.costs(np.zeros_like(sizes_CMK))
        table_CMK = costs_XK[: sizes_CMK.shape[0] * sizes_CMK.shape[1]].reshape(sizes_CMK.shape)
        self._place(table_CMK, sizes_CMK, 0, order_UK[0])
        ends_NK = np.zeros((len(self._recurrence.ops) + 1, ranks))
        for choice in self._choices:
            self._recurrence.advance(ends_NK, costs_XK, choice.waves)
            room_K = self._room(choice, ends_NK, costs_XK)
            for place in choice.places:
                share_K = room_K / (choice.places.stop - place)
                picked_K = np.abs(left_UK - share_K).argmin(axis=0)
                order_UK[place] = picked_K
                room_K = room_K - left_UK[picked_K, every]
                left_UK[picked_K, every] = np.inf
                self._place(table_CMK, sizes_CMK, place, picked_K)
        return order_UK

    def _place(self, table_CMK: np.ndarray, sizes_CMK: np.ndarray, place: int, picked_K: np.ndarray) -> None:
        """Writes the costs of the picked units to the microbatches at `place`."""
        for step, microbatch in enumerate(self._units.members(place)):
            table_CMK[:, microbatch] = sizes_CMK[:, picked_K * self._units.size + step, np.arange(len(picked_K))]

    def _room(self, choice: _Choice, ends_NK: np.ndarray, costs_XK: np.ndarray) -> np.ndarray:
        """The sum of the seconds of all intervals of a choice, in each case [K]."""
        closed_IK = ends_NK[choice.closes]
        if self._returns:  # a backward ends its interval where it starts, a consumer's forward where it ends
            closed_IK = closed_IK - costs_XK[self._recurrence.cost_of(choice.closes)]
        return (closed_IK - ends_NK[choice.opens]).sum(axis=0)
