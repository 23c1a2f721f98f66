"""Slots: the ops of a step, cut so that in each slot every lane runs at most one, and the registers of their values.

Pure arithmetic on names. A value lies in registers of its lane: numbered blocks that all lanes have, because one
program has one set of arrays, and that each lane uses for something else. So a step needs as many registers as its
fullest lane, not the sum of the lanes. A value that is sent arrives at the end of the slot that made it, and is read in
a later one. An op that spans all lanes is no part of a slot: it ends a *segment* of slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmjax.pipeline.single.lanes import LaneBlock, assign
from mmjax.schedule.ops import Op

Key = tuple[Any, ...]
"""Names a value: its kind, its stage and, where these apply, its microbatch and its source, edge or tie."""
Register = tuple[LaneBlock, int]
"""A numbered block."""
Place = tuple[int, Key]
"""A lane and a value on it."""


@dataclass(frozen=True, kw_only=True)
class Send:
    """A value that an op hands to another place.

    Attributes:
      key: its name at the destination.
      blocks: the blocks that it consists of.
      lane: the destination; ``None`` for a value that leaves the lanes at the end of its segment.
    """

    key: Key
    blocks: tuple[LaneBlock, ...]
    lane: int | None


@dataclass(frozen=True, kw_only=True)
class SlotOp:
    """One op of one lane.

    Attributes:
      op: the op.
      lane: its lane.
      reads: values that must be there.
      writes: values that it makes or overwrites.
      drops: values that nothing reads after it.
      sends: values that it makes for others.
    """

    op: Op
    lane: int
    reads: tuple[Key, ...] = ()
    writes: Mapping[Key, tuple[LaneBlock, ...]] = field(default_factory=dict)
    drops: tuple[Key, ...] = ()
    sends: tuple[Send, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Across:
    """An op that spans all lanes.

    Attributes:
      op: the op.
      takes: values that left the lanes.
      gives: values that it puts on lanes.
    """

    op: Op
    takes: tuple[Key, ...] = ()
    gives: tuple[Send, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One ``ppermute`` along the lanes: which lane sends which array, and the register that receives it.

    Attributes:
      block: the kind of array.
      sent: by sending lane, the number of the send and of its array.
      received: by receiving lane, its register, and whether other lanes have something in that register.
      pairs: pairs (sender, receiver).
    """

    block: LaneBlock
    sent: Mapping[int, tuple[int, int]]
    received: Mapping[int, tuple[Register, bool]]
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Ops that lanes run side by side, at most one each.

    Attributes:
      ops: ops by lane.
      reads, writes: registers by lane, then by value.
      hops: moves along the lanes after the ops.
      stays: by lane, the sends to that lane itself: number of the send, and its registers.
      dead: registers that no lane needs afterwards.
    """

    ops: Mapping[int, SlotOp]
    reads: Mapping[int, Mapping[Key, tuple[Register, ...]]]
    writes: Mapping[int, Mapping[Key, tuple[Register, ...]]]
    hops: tuple[Hop, ...]
    stays: Mapping[int, tuple[tuple[int, tuple[Register, ...]], ...]]
    dead: tuple[Register, ...]

    @property
    def written(self) -> tuple[Register, ...]:
        """Registers that some lane's op writes."""
        tables = [registers for table in self.writes.values() for registers in table.values()]
        tables += [registers for stays in self.stays.values() for _, registers in stays]
        return tuple(dict.fromkeys(register for registers in tables for register in registers))

    @property
    def leaving(self) -> tuple[tuple[int, int, Send], ...]:
        """The sends that leave the lanes: lane, number of the send, the send."""
        ops = sorted(self.ops.items())
        return tuple((lane, i, s) for lane, item in ops for i, s in enumerate(item.sends) if s.lane is None)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A value that an op across the lanes puts on one.

    Attributes:
      key, lane: the value's name and its lane.
      registers: the registers that it lies in.
      over: whether other lanes have something in these.
    """

    key: Key
    lane: int
    registers: tuple[Register, ...]
    over: bool


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Slots that nothing separates: one ``shard_map``.

    Attributes:
      arrivals: values from ops across the lanes.
      slots: slots in order.
      departures: key and block of the values that leave the lanes at its end.
    """

    arrivals: tuple[Arrival, ...]
    slots: tuple[Slot, ...]
    departures: tuple[tuple[Key, LaneBlock], ...]

    def registers_after(self, before: Iterable[Register]) -> list[Register]:
        """The registers that hold something at its end, given those at its start."""
        held = dict.fromkeys(before)
        held |= dict.fromkeys(register for arrival in self.arrivals for register in arrival.registers)
        for slot in self.slots:
            held |= dict.fromkeys(slot.written)
            held |= dict.fromkeys(register for hop in slot.hops for register, _ in hop.received.values())
            held = {register: None for register in held if register not in slot.dead}
        return list(held)


@dataclass(frozen=True, kw_only=True)
class SlotPlan:
    """A step for lanes.

    Attributes:
      parts: segments and the ops between them, in order.
      pinned: by place, the registers of the values that are there before and after a step.
      registers: the most registers that are in use at once, by kind of block.
    """

    parts: tuple[Segment | Across, ...]
    pinned: Mapping[Place, tuple[Register, ...]]
    registers: Mapping[LaneBlock, int]


def plan(items: Sequence[SlotOp | Across], pinned: Mapping[Place, tuple[LaneBlock, ...]], lanes: int) -> SlotPlan:
    """Cuts a step into segments and slots, each op as early as what it reads and its lane's order allow.

    Args:
      items: the step's ops in their total order.
      pinned: values that are on lanes before and after the step.
      lanes: number of lanes.

    Raises:
      ValueError: when an op reads a value that is not there.
    """
    files = _Files(pinned, lanes)
    parts: list[Segment | Across] = []
    waiting: list[Send] = []  # from ops across the lanes, for the next segment
    run: list[SlotOp] = []

    def close() -> None:
        nonlocal run, waiting
        if run:
            parts.append(_segment(run, waiting, files))
            run, waiting = [], []

    for item in items:
        if isinstance(item, SlotOp):
            run.append(item)
            continue
        close()
        parts.append(item)
        waiting += item.gives
    close()
    return SlotPlan(parts=tuple(parts), pinned=files.pinned, registers=dict(files.most))


class _Files:
    """The registers of every lane, with the values that they hold."""

    def __init__(self, pinned: Mapping[Place, tuple[LaneBlock, ...]], lanes: int):
        self.lanes = lanes
        by_lane = [[place for place in pinned if place[0] == lane] for lane in range(lanes)]
        numbered = assign([[b for place in places for b in pinned[place]] for places in by_lane])
        self.pinned: dict[Place, tuple[Register, ...]] = {}
        for places, registers in zip(by_lane, numbered, strict=True):
            left = iter(registers)
            for place in places:
                self.pinned[place] = tuple(next(left) for _ in pinned[place])
        # A register of a pinned value serves no other value on any lane: its array outlives the step.
        self.reserved = {register for registers in self.pinned.values() for register in registers}
        self.held: dict[Place, tuple[Register, ...]] = dict(self.pinned)
        self.used: list[set[Register]] = [set() for _ in range(lanes)]
        self.most: dict[LaneBlock, int] = {}

    def of(self, lane: int, key: Key, reader: Op) -> tuple[Register, ...]:
        """The registers of a value; a ValueError where it is not there."""
        if (lane, key) not in self.held:
            raise ValueError(f"{reader} on lane {lane} reads {key}, which is not there")
        return self.held[lane, key]

    def put(self, lane: int, key: Key, blocks: Iterable[LaneBlock]) -> tuple[Register, ...]:
        """Registers for a value: those that it has, or the first that are free on its lane, shared with other lanes."""
        if (lane, key) in self.held:
            return self.held[lane, key]
        taken = []
        for block in blocks:
            number = 0
            while (block, number) in self.used[lane] or (block, number) in self.reserved:
                number += 1
            self.used[lane].add((block, number))
            taken.append((block, number))
            in_use = len({r for used in self.used for r in used if r[0] == block})
            self.most[block] = max(self.most.get(block, 0), in_use)
        self.held[lane, key] = tuple(taken)
        return self.held[lane, key]

    def drop(self, lane: int, key: Key) -> None:
        """Frees a value's registers."""
        self.used[lane].difference_update(self.held.pop((lane, key)))

    def shared(self, register: Register, lane: int) -> bool:
        """Whether another lane has something in a register."""
        return any(register in used for other, used in enumerate(self.used) if other != lane)

    def alive(self) -> set[Register]:
        """Registers that some lane uses for the time being."""
        return {register for used in self.used for register in used}


def _segment(run: Sequence[SlotOp], waiting: Sequence[Send], files: _Files) -> Segment:
    arrivals = []
    for send in waiting:
        assert send.lane is not None
        registers = files.put(send.lane, send.key, send.blocks)
        over = any(files.shared(register, send.lane) for register in registers)
        arrivals.append(Arrival(key=send.key, lane=send.lane, registers=registers, over=over))
    numbers = _number(run)
    slots = []
    for number in range(max(numbers) + 1):
        ops = {item.lane: item for item, n in zip(run, numbers, strict=True) if n == number}
        slots.append(_slot(ops, files))
    departures = tuple((s.key, block) for item in run for s in item.sends if s.lane is None for block in s.blocks)
    return Segment(arrivals=tuple(arrivals), slots=tuple(slots), departures=departures)


def _number(run: Sequence[SlotOp]) -> list[int]:
    """The slot of each op: after its lane's last, and after the slots that make what it reads."""
    free: dict[int, int] = {}
    ready: dict[Place, int] = {}
    numbers = []
    for item in run:
        number = max([free.get(item.lane, 0), *(ready.get((item.lane, key), 0) for key in item.reads)])
        numbers.append(number)
        free[item.lane] = number + 1
        ready |= {(send.lane, send.key): number + 1 for send in item.sends if send.lane is not None}
    return numbers


def _slot(ops: Mapping[int, SlotOp], files: _Files) -> Slot:
    before = files.alive()
    reads = {lane: {key: files.of(lane, key, item.op) for key in item.reads} for lane, item in ops.items()}
    writes = {lane: {key: files.put(lane, key, b) for key, b in item.writes.items()} for lane, item in ops.items()}
    stays: dict[int, tuple[tuple[int, tuple[Register, ...]], ...]] = {}
    for lane, item in ops.items():
        own = [(i, files.put(lane, s.key, s.blocks)) for i, s in enumerate(item.sends) if s.lane == lane]
        stays[lane] = tuple(own)
    for lane, item in ops.items():
        for key in item.drops:
            files.drop(lane, key)
    hops = _hops(ops, files)
    touched = before | {r for table in writes.values() for registers in table.values() for r in registers}
    return Slot(
        ops=ops,
        reads=reads,
        writes=writes,
        hops=hops,
        stays=stays,
        dead=tuple(touched - files.alive() - files.reserved),
    )


def _hops(ops: Mapping[int, SlotOp], files: _Files) -> tuple[Hop, ...]:
    """The sends between lanes, packed greedily into rounds in which no lane sends or receives twice."""
    rounds: list[
        tuple[LaneBlock, dict[int, tuple[int, int]], dict[int, tuple[Register, bool]], list[tuple[int, int]]]
    ] = []
    for lane, item in ops.items():
        for i, send in enumerate(item.sends):
            if send.lane is None or send.lane == lane:
                continue
            registers = files.put(send.lane, send.key, send.blocks)
            for j, (block, register) in enumerate(zip(send.blocks, registers, strict=True)):
                fits = (r for r in rounds if r[0] == block and lane not in r[1] and send.lane not in r[2])
                chosen = next(fits, None)
                if chosen is None:
                    rounds.append(chosen := (block, {}, {}, []))
                chosen[1][lane] = (i, j)
                chosen[2][send.lane] = (register, False)
                chosen[3].append((lane, send.lane))
    hops = []
    for block, sent, received, pairs in rounds:
        known = {lane: (register, files.shared(register, lane)) for lane, (register, _) in received.items()}
        hops.append(Hop(block=block, sent=sent, received=known, pairs=tuple(pairs)))
    return tuple(hops)
