"""A schedule's timing as a recurrence over arrays, for many tables of costs at a time: as `simulate`, but faster.

`simulate` starts an op when all ops that it waits for have ended: its dependencies, the ops that it awaits, and the
last op before it on each resource that it occupies. These follow from the schedule alone, so they are computed once.
Then times are maxima and sums, in waves of ops that do not wait for each other. Costs are tables with a column for each
case; an op of several microbatches costs as much as all of them.

Legend: C costs that vary, M microbatches, K cases (orders of the microbatches, say), N ops that take time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.schedule.ops import Op, Resource, Schedule, occupied_resources
from mmjax.schedule.simulate import Costs

CHUNK = 256
"""The number of cases that are timed together; more do not fit into a core's cache."""


@dataclass(frozen=True, eq=False)
class Wave:
    """Ops that do not wait for each other, as row indices of the array of ends.

    before: rows of the ops that each op waits for, [n] in each of several arrays: array i has the i-th one. An op that
    waits for fewer ops repeats them. costs: row indices of the array of costs.
    """

    ops: np.ndarray
    before: tuple[np.ndarray, ...]
    costs: np.ndarray


class Recurrence:
    """Times `schedule` for costs that differ by microbatch in the stages `varying`, and are `costs` elsewhere.

    Attributes:
      schedule: the schedule that is timed.
      keys: (kind, stage) of each cost that varies, kinds F, B and W: the first axis of a table of costs [C, M, K].
      ops: the ops that can take time, in their order; the array of ends [N + 1, K] begins with the start of the step.
      index: the row of each of `ops` in the array of ends.
    """

    def __init__(self, schedule: Schedule, costs: Costs, varying: Collection[str]):
        """`varying` are names of stages, whose F, B and W are not read from `costs`.

        Raises ValueError where an op precedes one that it depends on, or another F, B or W has no cost.
        """
        graph = schedule.graph
        names = [stage.name for stage in graph.topological if stage.name in set(varying)]
        kinds = {name: "FBW"[: 1 + graph.stage(name).backward + graph.stage(name).split] for name in names}
        self.schedule = schedule
        self.keys = tuple((kind, name) for name in names for kind in kinds[name])
        self._spans = [graph.stage(name).microbatches for _, name in self.keys]
        costs = costs.split_as(graph)
        place = {key: i * schedule.microbatches for i, key in enumerate(self.keys)}
        waits = _waits(schedule)
        self.ops: list[Op] = []
        self._before: list[list[int]] = [[]]
        self._cost: list[int] = [0]
        self._record_waits(waits, costs, place)
        self._costs = np.array(self._cost)
        self.index = {op: i for i, op in enumerate(self.ops, start=1)}
        self._all = self.waves(range(1, len(self.ops) + 1))
        awaited = {before for predecessors in self._before for before in predecessors}
        self._last = np.array([i for i in range(len(self._before)) if i not in awaited])

    def _record_waits(self, waits: Sequence[tuple[int, ...]], costs: Costs, place: dict[tuple[str, str], int]) -> None:
        """Records the ops that each op waits for, without ops that take no time or that are waited for indirectly."""
        offset = len(place) * self.schedule.microbatches
        timed: list[tuple[int, ...]] = []  # for each op of the schedule, the ops with whose ends it ends
        constants = {0.0: 0}
        above: list[int] = [0]  # for each op that takes time, a bit for each op before it
        for op, predecessors in zip(self.schedule.ops, waits, strict=True):
            direct = _latest({i for before in predecessors for i in timed[before]}, above)
            key = (op.kind, op.stage)
            constant = 0.0 if key in place else costs.of(op)
            if key not in place and constant == 0.0:
                timed.append(tuple(direct))
                continue
            self.ops.append(op)
            self._before.append(direct or [0])
            above.append(_union(direct, above))
            timed.append((len(self.ops),))
            if key in place:
                self._cost.append(place[key] + op.microbatch)  # with those of its other microbatches: see `costs`
            else:
                self._cost.append(offset + constants.setdefault(constant, len(constants)))
        self._above, self._constants = above, list(constants)

    # ---- timing ------------------------------------------------------------------------------------------------------

    def makespans(self, table_CMK: np.ndarray) -> np.ndarray:
        """Seconds of the step in each case [K], from the seconds of each of `keys`, microbatch and case."""
        cases = table_CMK.shape[-1]
        if cases <= CHUNK:
            return self.ends(table_CMK)[self._last].max(axis=0)
        return np.concatenate([self.makespans(table_CMK[..., k : k + CHUNK]) for k in range(0, cases, CHUNK)])

    def ends(self, table_CMK: np.ndarray) -> np.ndarray:
        """The end of each of `ops` in each case [N + 1, K], from the table of `makespans`; row 0 is the start."""
        ends_NK = np.zeros((len(self._before), table_CMK.shape[-1]), table_CMK.dtype)
        self.advance(ends_NK, self.costs(table_CMK), self._all)
        return ends_NK

    def costs(self, table_CMK: np.ndarray) -> np.ndarray:
        """All costs [X, K] as `advance` reads them: first the C · M varying ones, then the constants.

        The varying ones are those of `table_CMK`. A microbatch that begins an op of several has the costs of all.
        """
        varying = self.of_ops(table_CMK).reshape(-1, table_CMK.shape[-1])
        constants = np.array(self._constants, varying.dtype)[:, None]
        return np.concatenate([varying, np.broadcast_to(constants, (len(constants), varying.shape[1]))])

    def of_ops(self, table_CMK: np.ndarray) -> np.ndarray:
        """The costs of ops, each at its first microbatch, in a table like the one of `makespans`.

        The other microbatches of an op keep their costs, which no op has.
        """
        if max(self._spans, default=1) == 1:
            return table_CMK
        result_CMK = table_CMK.copy()
        for costs_MK, summed_MK, span in zip(table_CMK, result_CMK, self._spans, strict=True):
            if span > 1:
                firsts = np.arange(0, self.schedule.microbatches, span)
                summed_MK[firsts] = np.add.reduceat(costs_MK, firsts, axis=0)
        return result_CMK

    def advance(self, ends_NK: np.ndarray, costs_XK: np.ndarray, waves: Sequence[Wave]) -> None:
        """Writes the ends of the ops in `waves` into `ends_NK`, which has the ends of the ops that they wait for.

        `costs_XK` are `costs`.
        """
        for wave in waves:
            start_WK = ends_NK.take(wave.before[0], axis=0)
            for before in wave.before[1:]:
                np.maximum(start_WK, ends_NK.take(before, axis=0), out=start_WK)
            start_WK += costs_XK.take(wave.costs, axis=0)
            ends_NK[wave.ops] = start_WK

    def waves(self, ops: Collection[int]) -> tuple[Wave, ...]:
        """The waves of `ops`, rows of the array of ends, in an order in which they can be written."""
        depth: dict[int, int] = {}
        for op in sorted(ops):
            depth[op] = 1 + max((depth.get(before, 0) for before in self._before[op]), default=0)
        levels: dict[int, list[int]] = {}
        for op, level in depth.items():
            levels.setdefault(level, []).append(op)
        return tuple(self._wave(levels[level]) for level in sorted(levels))

    def _wave(self, ops: Sequence[int]) -> Wave:
        width = max(len(self._before[op]) for op in ops)
        padded = np.array([(self._before[op] * width)[:width] for op in ops])
        return Wave(np.array(ops), tuple(np.ascontiguousarray(padded.T)), np.array([self._cost[op] for op in ops]))

    def cost_of(self, ops: np.ndarray) -> np.ndarray:
        """The rows in `costs` for `ops`, rows of the array of ends."""
        return self._costs[ops]

    # ---- ops that an op waits for ------------------------------------------------------------------------------------

    def ancestors(self, op: int) -> set[int]:
        """The rows of all ops that must have ended before `op` can start."""
        bits = self._above[op]
        return {i for i in range(1, op) if bits >> i & 1}


def _waits(schedule: Schedule) -> list[tuple[int, ...]]:
    """For each op of the schedule, the indices of the ops that `simulate` makes it wait for."""
    place = {op: i for i, op in enumerate(schedule.ops)}
    holder: dict[Resource, int] = {}
    result = []
    for i, op in enumerate(schedule.ops):
        resources = occupied_resources(schedule.graph, op)
        predecessors = {place[before] for before in (*schedule.dependencies(op), *schedule.awaits(op))}
        predecessors |= {holder[resource] for resource in resources if resource in holder}
        if later_ops := [before for before in sorted(predecessors) if before >= i]:
            raise ValueError(f"{op} precedes {schedule.ops[later_ops[0]]}, which it needs: validate the schedule first")
        result.append(tuple(sorted(predecessors)))
        holder.update(dict.fromkeys(resources, i))
    return result


def _latest(ops: Collection[int], above: Sequence[int]) -> list[int]:
    """The members of `ops` that no other member waits for."""
    covered = 0
    for op in ops:
        covered |= above[op]
    return sorted(op for op in ops if not covered >> op & 1)


def _union(ops: Collection[int], above: Sequence[int]) -> int:
    bits = 0
    for op in ops:
        bits |= above[op] | 1 << op
    return bits
