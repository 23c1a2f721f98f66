"""Slots: the ops of a step, cut so that in each slot every lane runs at most one op, and the registers of their values.

Pure arithmetic on names. A value is stored in registers of its lane. Registers are numbered blocks. All lanes have the
same registers, because one program has one set of arrays, and each lane stores other values in them: a step needs as
many registers as its fullest lane, not the sum over lanes. A sent value arrives at the end of the slot that computed
it, and is read in a later slot. An op that spans all lanes belongs to no slot: it ends a *segment* of slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmjax.pipeline.single.lanes import LaneBlock, assign
from mmjax.schedule.ops import Op

Key = tuple[Any, ...]
"""The name of a value: its kind, its stage and, if these apply, its microbatch and its source, edge or tie.

For instance ("sums", "llm.0"), ("residuals", "llm.0", 2) or ("carry", "llm.0", 2, "vision.0").
"""
Register = tuple[LaneBlock, int]
"""A numbered block."""
Place = tuple[int, Key]
"""A lane and a value on it."""


@dataclass(frozen=True, kw_only=True)
class Send:
    """A value that an op sends.

    Attributes:
      key: its name at the destination.
      blocks: its blocks.
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
      reads: values that must exist.
      writes: values that it creates or overwrites.
      drops: values that no later op reads.
      sends: values that it sends.
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
      takes: values that it receives from lanes.
      gives: values that it sends to lanes.
    """

    op: Op
    takes: tuple[Key, ...] = ()
    gives: tuple[Send, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One ``ppermute`` along the lanes: the array that each lane sends, and the register that receives it.

    Attributes:
      block: the kind of array.
      sources: number of the send and of its array, by sending lane.
      targets: the register and whether other lanes have values in it, by receiving lane.
      pairs: pairs (sender, receiver).
    """

    block: LaneBlock
    sources: Mapping[int, tuple[int, int]]
    targets: Mapping[int, tuple[Register, bool]]
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Ops that lanes run in parallel, at most one each.

    Attributes:
      ops: ops by lane.
      reads, writes: registers by lane, then by value.
      hops: moves along the lanes after the ops.
      stays: sends of a lane to itself: number of the send, and its registers, by lane.
      dead: registers that no lane needs after the slot.
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
        """(lane, number among its op's sends, send) of each send that leaves the lanes."""
        ops = sorted(self.ops.items())
        return tuple((lane, i, s) for lane, item in ops for i, s in enumerate(item.sends) if s.lane is None)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A value that an op across the lanes sends to one lane.

    Attributes:
      key, lane: the value's name and its lane.
      registers: its registers.
      shared: whether other lanes have values in these registers.
    """

    key: Key
    lane: int
    registers: tuple[Register, ...]
    shared: bool


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive slots without an op across the lanes between them: one ``shard_map``.

    Attributes:
      arrivals: values from ops across the lanes.
      slots: slots in order.
      departures: key and block of each value that leaves the lanes at its end.
    """

    arrivals: tuple[Arrival, ...]
    slots: tuple[Slot, ...]
    departures: tuple[tuple[Key, LaneBlock], ...]

    def registers_after(self, before: Iterable[Register]) -> list[Register]:
        """The registers in use at its end, from those in use at its start."""
        used = dict.fromkeys(before)
        used |= dict.fromkeys(register for arrival in self.arrivals for register in arrival.registers)
        for slot in self.slots:
            used |= dict.fromkeys(slot.written)
            used |= dict.fromkeys(register for hop in slot.hops for register, _ in hop.targets.values())
            used = {register: None for register in used if register not in slot.dead}
        return list(used)


@dataclass(frozen=True, kw_only=True)
class SlotPlan:
    """A step for lanes.

    Attributes:
      parts: segments and the ops between them, in order.
      pinned: registers of the values that exist before and after a step, by place.
      registers: largest number of registers in use at once, by kind of block.
    """

    parts: tuple[Segment | Across, ...]
    pinned: Mapping[Place, tuple[Register, ...]]
    registers: Mapping[LaneBlock, int]


def plan(items: Sequence[SlotOp | Across], pinned: Mapping[Place, tuple[LaneBlock, ...]], lanes: int) -> SlotPlan:
    """Cuts a step into segments and slots; each op is as early as its dependencies and its lane's order allow.

    Args:
      items: the step's ops in their total order: ``SlotOp(op=op, lane=0)`` with the values that it reads and writes,
        and ``Across`` for an op that spans all lanes.
      pinned: blocks of the values on lanes before and after the step, by (lane, value), such as (0, ("sums", "llm.0")).
      lanes: number of lanes.

    Raises:
      ValueError: when an op reads a value that does not exist.
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
    """The registers of every lane, with their values."""

    def __init__(self, pinned: Mapping[Place, tuple[LaneBlock, ...]], lanes: int):
        self.lanes = lanes
        by_lane = [[place for place in pinned if place[0] == lane] for lane in range(lanes)]
        numbered = assign([[b for place in places for b in pinned[place]] for places in by_lane])
        self.pinned: dict[Place, tuple[Register, ...]] = {}
        for places, registers in zip(by_lane, numbered, strict=True):
            remaining = iter(registers)
            for place in places:
                self.pinned[place] = tuple(next(remaining) for _ in pinned[place])
        # No lane stores other values in a register of a pinned value, because its array outlives the step.
        self.reserved = {register for registers in self.pinned.values() for register in registers}
        self.held: dict[Place, tuple[Register, ...]] = dict(self.pinned)
        self.used: list[set[Register]] = [set() for _ in range(lanes)]
        self.most: dict[LaneBlock, int] = {}

    def of(self, lane: int, key: Key, reader: Op) -> tuple[Register, ...]:
        """The registers of a value; a ValueError if it does not exist."""
        if (lane, key) not in self.held:
            raise ValueError(f"{reader} on lane {lane} reads {key}, which is not there")
        return self.held[lane, key]

    def put(self, lane: int, key: Key, blocks: Iterable[LaneBlock]) -> tuple[Register, ...]:
        """Registers for a value: its present ones, or the first that are free on its lane, shared with other lanes."""
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
        """Whether another lane has a value in a register."""
        return any(register in used for index, used in enumerate(self.used) if index != lane)

    def alive(self) -> set[Register]:
        """Registers that some lane uses at the moment."""
        return {register for used in self.used for register in used}


def _segment(run: Sequence[SlotOp], waiting: Sequence[Send], files: _Files) -> Segment:
    arrivals = []
    for send in waiting:
        assert send.lane is not None
        registers = files.put(send.lane, send.key, send.blocks)
        shared = any(files.shared(register, send.lane) for register in registers)
        arrivals.append(Arrival(key=send.key, lane=send.lane, registers=registers, shared=shared))
    numbers = _number(run)
    slots = []
    for number in range(max(numbers) + 1):
        ops = {item.lane: item for item, n in zip(run, numbers, strict=True) if n == number}
        slots.append(_slot(ops, files))
    departures = tuple((s.key, block) for item in run for s in item.sends if s.lane is None for block in s.blocks)
    return Segment(arrivals=tuple(arrivals), slots=tuple(slots), departures=departures)


def _number(run: Sequence[SlotOp]) -> list[int]:
    """The slot of each op: after its lane's previous op, and after the slots of its dependencies."""
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
        stays[lane] = tuple(
            (i, files.put(lane, send.key, send.blocks)) for i, send in enumerate(item.sends) if send.lane == lane
        )
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
    rounds: list[_Round] = []
    for lane, item in ops.items():
        for i, send in enumerate(item.sends):
            if send.lane is None or send.lane == lane:
                continue
            registers = files.put(send.lane, send.key, send.blocks)
            for j, (block, register) in enumerate(zip(send.blocks, registers, strict=True)):
                chosen = next((r for r in rounds if r.block == block and r.is_free(lane, send.lane)), None)
                if chosen is None:
                    rounds.append(chosen := _Round(block))
                chosen.sources[lane] = (i, j)
                chosen.targets[send.lane] = register
                chosen.pairs.append((lane, send.lane))
    hops = []
    for hop in rounds:
        targets = {lane: (register, files.shared(register, lane)) for lane, register in hop.targets.items()}
        hops.append(Hop(block=hop.block, sources=hop.sources, targets=targets, pairs=tuple(hop.pairs)))
    return tuple(hops)


@dataclass
class _Round:
    """A ``Hop`` while sends are added to it."""

    block: LaneBlock
    sources: dict[int, tuple[int, int]] = field(default_factory=dict)
    targets: dict[int, Register] = field(default_factory=dict)
    pairs: list[tuple[int, int]] = field(default_factory=list)

    def is_free(self, sender: int, receiver: int) -> bool:
        """Whether neither lane takes part yet."""
        return sender not in self.sources and receiver not in self.targets
