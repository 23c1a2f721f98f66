"""Dispatching in a schedule's order without running ahead of it: ops that await others are put off till those ended.

Devices keep the order of their own ops, and data keep that of the rest; what `Schedule.awaits` says is neither.
A frozen encoder on ranks of its own would run as far ahead as its inputs reach; a reload reads nothing that is late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from mmjax.schedule.ops import COPY_KINDS, Op, Resource, Schedule, holds, touches


class Awaiting:
    """Hands the ops of a step on in their order, but for those that await what has not ended.

    Such an op is put off, and with it every later one that reads its result or holds something that it holds: all
    ranks, wires and copy engines keep their order. The others go on, so that no device idles because the host waits;
    it does so only when nothing else is left. Of another process's op it knows no end: what that process awaits of its
    own keeps it back, and what carries data between them.
    """

    def __init__(
        self,
        schedule: Schedule,
        dispatch: Callable[[Op], None],
        end: Callable[[Op], Any],
        local: Callable[[Op], bool],
    ):
        """Waits for nothing where the schedule awaits nothing that devices and data do not see to.

        Args:
          schedule: of the step.
          dispatch: runs an op.
          end: an array that is there when the op that was just dispatched has ended; None if that is not known here.
          local: whether an op touches this process's devices.
        """
        self._schedule, self._dispatch, self._end = schedule, dispatch, end
        self.awaits = {op: found for op in schedule.ops if local(op) and (found := _unordered(schedule, op, local))}
        self._wanted = {one for before in self.awaits.values() for one in before}
        self._ends: dict[Op, Any] = {}
        self._late: list[Op] = []
        self._blocking: set[Op] = set()
        self._taken: set[Resource] = set()
        self._all = frozenset(schedule.graph.ranks)
        self._ties: dict[Op, tuple[tuple[Op, ...], tuple[Resource, ...]]] = {}

    def __call__(self, op: Op) -> None:
        """Dispatches an op, or puts it off; before it, what was put off and need not be any longer."""
        if self._late and self._may_start(self._late[0]):
            self._release()
        self._offer(op)

    def finish(self) -> None:
        """Dispatches what is left, waiting on the host for what it awaits. The first op left awaits only what runs."""
        while self._late:
            jax.block_until_ready([self._ends[one] for one in self.awaits[self._late[0]]])
            self._release()
        self._ends.clear()

    def _release(self) -> None:
        late, self._late = self._late, []
        self._blocking, self._taken = set(), set()
        for place, op in enumerate(late):
            if self._all <= self._taken:
                self._late += late[place:]
                return
            self._offer(op)

    def _offer(self, op: Op) -> None:
        if self._late and self._all <= self._taken:  # no rank is free: it need not be asked
            self._late.append(op)
        elif (self._late and self._behind(op)) or not self._may_start(op):
            self._late.append(op)
            self._blocking.add(op)
            self._taken.update(self._tied(op)[1])
        else:
            self._dispatch(op)
            if op in self._wanted:
                self._ends[op] = self._end(op)

    def _behind(self, op: Op) -> bool:
        """Whether an op that is put off must come before."""
        before, held = self._tied(op)
        return not self._blocking.isdisjoint(before) or not self._taken.isdisjoint(held)

    def _tied(self, op: Op) -> tuple[tuple[Op, ...], tuple[Resource, ...]]:
        """What an op reads and awaits, and what it holds."""
        if op not in self._ties:
            before = (*self._schedule.dependencies(op), *self.awaits.get(op, ()))
            self._ties[op] = before, holds(self._schedule.graph, op)
        return self._ties[op]

    def _may_start(self, op: Op) -> bool:
        ends = (self._ends[one] for one in self.awaits.get(op, ()))
        return all(end is None or end.is_ready() for end in ends)


def end_of(made: Any) -> jax.Array | None:
    """A small array that is there when the program that makes ``made`` has ended on its first device here.

    It is a copy of the smallest: the array itself would keep an activation alive, and gradient sums are overwritten.
    """
    arrays = [array for array in jax.tree.leaves(made) if array.addressable_shards]
    if not arrays:
        return None
    least = min(arrays, key=lambda array: array.nbytes).addressable_shards[0].data
    return jax.device_put(least, least.sharding, may_alias=False)


def _unordered(schedule: Schedule, op: Op, local: Callable[[Op], bool]) -> tuple[Op, ...]:
    """What `op` awaits and this process knows the end of, without what runs before it on ranks that both take."""
    held = holds(schedule.graph, op)
    found = (_known(schedule, op, one, local) for one in schedule.awaits(op))
    return tuple(one for one in found if one and set(held).isdisjoint(holds(schedule.graph, one)))


def _known(schedule: Schedule, op: Op, awaited: Op, local: Callable[[Op], bool]) -> Op | None:
    """`awaited`, or for a copy what comes last before it here on the copy's ranks: these are what is to be free."""
    if local(awaited):
        return awaited
    if op.kind not in COPY_KINDS:
        return None
    ranks = set(touches(schedule.graph, op))
    before = reversed(schedule.ops[: schedule.ops.index(awaited)])
    runs = (one for one in before if one.kind in ("F", "B", "W") and local(one))
    return next((one for one in runs if not ranks.isdisjoint(touches(schedule.graph, one))), None)
