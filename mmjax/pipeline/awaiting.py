"""Dispatches ops in a schedule's order, but puts off those that await others until these have ended.

Each device keeps the order of its own ops, and data keep that of the rest; what `Schedule.awaits` asks for follows from
neither. Without it a frozen encoder on ranks of its own would run as far ahead as it has inputs, and a reload would
start at once, since it reads nothing that is late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from mmjax.schedule.ops import COPY_KINDS, Op, Resource, Schedule, occupied_resources, participating_ranks, run_in_order


class Awaiting:
    """Dispatches the ops of a step in their order, except those that await an op that has not ended.

    Such an op is put off, and with it every later op that reads its result or holds a rank, wire or copy engine that it
    holds: all of these keep their order. The other ops go on, so that no device idles because the host waits; the host
    waits only when nothing else is left. The end of another process's op is not known here: that process is kept back
    by what its own ops await, and by the transfers between the two.
    """

    def __init__(
        self,
        schedule: Schedule,
        dispatch: Callable[[Op], None],
        end: Callable[[Op], Any],
        local: Callable[[Op], bool],
    ):
        """Finds the ops that await others whose order devices and data do not ensure; without any it puts off none.

        Args:
          schedule: schedule of the step.
          dispatch: runs an op.
          end: arrays that are ready when the op that was just dispatched has ended; None if that is not known here.
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
        """Dispatches an op or puts it off; before that, dispatches put-off ops that may start now."""
        if self._late and self._may_start(self._late[0]):
            self._release()
        self._offer(op)

    def finish(self) -> None:
        """Dispatches the ops left; the host waits for what they await. The first op left awaits only running ops."""
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
        if self._late and self._all <= self._taken:  # no rank is free: no need to check the op
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
        """Whether an op that is put off must come before this one."""
        before, held = self._tied(op)
        return not self._blocking.isdisjoint(before) or not self._taken.isdisjoint(held)

    def _tied(self, op: Op) -> tuple[tuple[Op, ...], tuple[Resource, ...]]:
        """The ops whose results an op reads or which it awaits, and the resources that it holds."""
        if op not in self._ties:
            before = (*self._schedule.dependencies(op), *self.awaits.get(op, ()))
            self._ties[op] = before, occupied_resources(self._schedule.graph, op)
        return self._ties[op]

    def _may_start(self, op: Op) -> bool:
        return all(self._has_ended(one) for one in self.awaits.get(op, ()))

    def _has_ended(self, op: Op) -> bool:
        """Whether an awaited op has ended. If so, what told it is dropped: it may be all that a copy has made."""
        if not all(end.is_ready() for end in jax.tree.leaves(self._ends[op])):
            return False
        self._ends[op] = None
        return True


def end_of(made: Any) -> jax.Array | None:
    """A small array that is ready when the program that makes `made` has ended on its first device here.

    It is a copy of the smallest array, which itself might keep an activation alive or be an overwritten gradient sum.
    """
    arrays = [array for array in jax.tree.leaves(made) if array.addressable_shards]
    if not arrays:
        return None
    least = min(arrays, key=lambda array: array.nbytes).addressable_shards[0].data
    return jax.device_put(least, least.sharding, may_alias=False)


def _unordered(schedule: Schedule, op: Op, local: Callable[[Op], bool]) -> tuple[Op, ...]:
    """The ops awaited by `op` whose end this process knows, without those that devices run before it anyway."""
    found = (_known(schedule, op, one, local) for one in schedule.awaits(op))
    return tuple(one for one in found if one and not run_in_order(schedule.graph, one, op))


def _known(schedule: Schedule, op: Op, awaited: Op, local: Callable[[Op], bool]) -> Op | None:
    """`awaited` if it is local; else, for a copy, the last local F, B or W before it on the copy's ranks: these ranks
    are to be free."""
    if local(awaited):
        return awaited
    if op.kind not in COPY_KINDS:
        return None
    ranks = set(participating_ranks(schedule.graph, op))
    before = reversed(schedule.ops[: schedule.ops.index(awaited)])
    runs = (one for one in before if one.kind in ("F", "B", "W") and local(one))
    return next((one for one in runs if not ranks.isdisjoint(participating_ranks(schedule.graph, one))), None)
