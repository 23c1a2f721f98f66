"""Dispatches ops in a schedule's order, but defers ops until the ops that they await have ended.

Devices run their own ops in order, and data dependencies order ops of different devices. Neither ensures the order of
``Schedule.awaits``: without this module a frozen encoder on separate ranks would run ahead as far as it has inputs, and
a reload, which depends on no data, would start at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from mmjax.schedule.ops import COPY_KINDS, Op, Resource, Schedule, occupied_resources, participating_ranks, run_in_order


class Awaiting:
    """Dispatches the ops of a step in their order, except ops that await an op that has not ended.

    Such an op is deferred, and with it every later op that reads its result or uses the same rank, link or copy engine:
    these keep their order. All other ops are dispatched, so that no device idles because the host waits; the host waits
    only when all remaining ops are deferred. The end of another process's op is not known in this process: that process
    is held back by the ops that its own ops await, and by the transfers between the two.
    """

    def __init__(
        self,
        schedule: Schedule,
        dispatch: Callable[[Op], None],
        end: Callable[[Op], Any],
        local: Callable[[Op], bool],
        *,
        in_turn: bool = False,
    ):
        """Finds the awaits that neither devices nor data dependencies ensure; without any, no op is deferred.

        Args:
          schedule: schedule of the step.
          dispatch: runs an op.
          end: returns arrays that are ready when the op dispatched last has ended; None if this process cannot know.
          local: whether an op touches this process's devices.
          in_turn: whether a deferred op defers all later ones, on any rank. Processes with CPUs need this: XLA launches
            the programs of a process that have collectives in the order of their dispatch, whatever their devices, so
            in another order two processes would wait for each other.
        """
        self._in_turn = in_turn
        self._schedule, self._dispatch, self._end = schedule, dispatch, end
        self.awaits = {
            op: unordered for op in schedule.ops if local(op) and (unordered := _unordered(schedule, op, local))
        }
        self._awaited = {awaited for before in self.awaits.values() for awaited in before}
        self._ends: dict[Op, Any] = {}
        self._deferred: list[Op] = []
        self._blocking: set[Op] = set()
        self._taken_resources: set[Resource] = set()
        self._all_ranks = frozenset(schedule.graph.ranks)
        self._cached_requirements: dict[Op, tuple[tuple[Op, ...], tuple[Resource, ...]]] = {}

    def __call__(self, op: Op) -> None:
        """Dispatches or defers an op, after dispatching deferred ops that may start now."""
        if self._deferred and self._may_start(self._deferred[0]):
            self._release()
        self._offer(op)

    def finish(self) -> None:
        """Dispatches the deferred ops; the host waits for the ops that they await.

        The first deferred op awaits only ops that are running.
        """
        while self._deferred:
            jax.block_until_ready([self._ends[awaited] for awaited in self.awaits[self._deferred[0]]])
            self._release()
        self._ends.clear()

    def _release(self) -> None:
        deferred, self._deferred = self._deferred, []
        self._blocking, self._taken_resources = set(), set()
        for place, op in enumerate(deferred):
            if self._defers_all:
                self._deferred += deferred[place:]
                return
            self._offer(op)

    def _offer(self, op: Op) -> None:
        if self._defers_all:  # no need to check the op
            self._deferred.append(op)
        elif (self._deferred and self._must_follow_deferred(op)) or not self._may_start(op):
            self._deferred.append(op)
            self._blocking.add(op)
            self._taken_resources.update(self._requirements(op)[1])
        else:
            self._dispatch(op)
            if op in self._awaited:
                self._ends[op] = self._end(op)

    @property
    def _defers_all(self) -> bool:
        """Whether deferred ops defer every later one: in turn, or since no rank is free."""
        return bool(self._deferred) and (self._in_turn or self._all_ranks <= self._taken_resources)

    def _must_follow_deferred(self, op: Op) -> bool:
        """Whether a deferred op must come before this one."""
        predecessors, resources = self._requirements(op)
        return not self._blocking.isdisjoint(predecessors) or not self._taken_resources.isdisjoint(resources)

    def _requirements(self, op: Op) -> tuple[tuple[Op, ...], tuple[Resource, ...]]:
        """The ops that an op depends on or awaits, and the resources that it uses."""
        if op not in self._cached_requirements:
            predecessors = (*self._schedule.dependencies(op), *self.awaits.get(op, ()))
            self._cached_requirements[op] = predecessors, occupied_resources(self._schedule.graph, op)
        return self._cached_requirements[op]

    def _may_start(self, op: Op) -> bool:
        return all(self._has_ended(awaited) for awaited in self.awaits.get(op, ()))

    def _has_ended(self, op: Op) -> bool:
        """Whether an awaited op has ended. If so, drops its marker arrays: they may be all results of a copy."""
        if not all(end.is_ready() for end in jax.tree.leaves(self._ends[op])):
            return False
        self._ends[op] = None
        return True


def completion_marker(results: Any) -> jax.Array | None:
    """A small array that is ready when the program with these results, any tree, has ended on its first local device.

    ``None`` if no array of the tree has a shard in this process.

    It is a copy of the smallest result: the result itself could keep an activation alive, or be overwritten.
    """
    arrays = [array for array in jax.tree.leaves(results) if array.addressable_shards]
    if not arrays:
        return None
    least = min(arrays, key=lambda array: array.nbytes).addressable_shards[0].data
    return jax.device_put(least, least.sharding, may_alias=False)


def _unordered(schedule: Schedule, op: Op, local: Callable[[Op], bool]) -> tuple[Op, ...]:
    """The awaited ops whose end this process knows, without those that devices run before ``op`` anyway."""
    local_ops = (_local_equivalent(schedule, op, awaited, local) for awaited in schedule.awaits(op))
    return tuple(awaited for awaited in local_ops if awaited and not run_in_order(schedule.graph, awaited, op))


def _local_equivalent(schedule: Schedule, op: Op, awaited: Op, local: Callable[[Op], bool]) -> Op | None:
    """``awaited`` if it is local; else, for a copy, the last local F, B or W before it on the copy's ranks.

    The copy waits for its ranks to be free.
    """
    if local(awaited):
        return awaited
    if op.kind not in COPY_KINDS:
        return None
    ranks = set(participating_ranks(schedule.graph, op))
    earlier = reversed(schedule.ops[: schedule.ops.index(awaited)])
    runs = (earlier_op for earlier_op in earlier if earlier_op.kind in ("F", "B", "W") and local(earlier_op))
    return next((run for run in runs if not ranks.isdisjoint(participating_ranks(schedule.graph, run))), None)
