"""128 H800: what an op takes and what a device holds, by datasheet and formula. Nothing here was measured.

A *rank* is four GPUs of one node that share a row (cp 4). A pipeline of N ranks has 32 / N replicas (dp), and experts
are sharded over the eight GPUs of a node (ep 8, over dp · cp). All modules have the rank's degrees.

* Compute takes FLOPs at half of the datasheet's dense peak, as in `mmjax.planner.analytic`.
* All-to-alls of experts take seven eighths of their bytes over NVLink, and no compute hides them. Rows of equal length
  are taken to meet experts evenly.
* The MMDiT's parameters are sharded over a node and gathered by each op, layer by layer behind the layer before: an op
  takes no less than its gathers over NVLink.
* Moves of activations take their bytes over a GPU's InfiniBand; nothing waits for the wire alone but the receiver.
* What runs once a step, the reductions and the update, is not counted: it is the same for every system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.nested.models import BF16, SEQUENCE, Row, Stack
from mmjax.pipeline.state_bytes import state_bytes
from mmjax.planner.accelerators import H800
from mmjax.schedule.ops import Schedule
from mmjax.schedule.placements import Load, Placement, TimedModule

DEVICES, CP, EP = 128, 4, 8
RANKS = DEVICES // CP
EFFICIENCY = 0.5
RESERVED = 4e9
"""Bytes of a device that the runtime and its communicators are taken to need."""
MOVE = BF16 * SEQUENCE * 2048 / CP / H800.network
"""Seconds of a move of the LLM's activations, or of what an encoder gives to it."""


def seconds(stack: Stack, row: Row) -> float:
    """Seconds of the forward of one layer for a row on a rank."""
    return max(_compute(stack, row) + _traffic(stack, row), _gather(stack))


def _compute(stack: Stack, row: Row) -> float:
    return stack.flops(row) / (CP * EFFICIENCY * H800.flops)


def _traffic(stack: Stack, row: Row) -> float:
    return stack.sent * stack.tokens(row) / CP * (EP - 1) / EP / H800.link


def _gather(stack: Stack) -> float:
    return stack.gathered * BF16 * stack.parameters * (H800.node - 1) / H800.node / H800.link


def timed(stack: Stack, rows: Sequence[Row], *, even: bool = False) -> TimedModule:
    """The module for placements, with times of `rows`; of their mean where `even`.

    Its layers are those that it is cut into stages by, so the parts behind the LLM's last layer count as some.
    """
    each = [seconds(stack, row) for row in rows]
    mean = sum(each) / len(each)
    compute, traffic = _compute(stack, rows[0]), _traffic(stack, rows[0])
    whole = compute + traffic
    return TimedModule(
        name=stack.name,
        layers=stack.layers + stack.head,
        seconds=mean,
        factors=() if even else tuple(one / mean for one in each),
        backward=((2 + stack.again) * compute + traffic) / whole,
        weights=compute / whole,
    )


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the fullest device.

    Attributes:
      states: parameters, gradients, optimizer states.
      activations: what is kept from F to B, and from B to W.
      working: of the running op, and the layers that are gathered.
    """

    states: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """All of it, without what the runtime needs."""
        return self.states + self.activations + self.working

    @property
    def fits(self) -> bool:
        """Whether a device has so much."""
        return self.total + RESERVED <= H800.memory


def memory(schedule: Schedule, placement: Placement, stacks: Sequence[Stack], rows: Sequence[Row]) -> Memory:
    """Bytes of the fullest device of a step in this schedule."""
    held = _activations(schedule, placement, stacks, rows)
    every = []
    for rank in schedule.graph.ranks:
        states = sum(_states(placement, stage, stacks) for stage in _stages(placement, rank))
        every.append(Memory(states=states, activations=held[rank], working=_working(placement, rank, stacks, rows)))
    return max(every, key=lambda one: one.total)


def _stages(placement: Placement, rank: int) -> list[str]:
    return [node.name for node in placement.graph.stages if rank in node.ranks]


def _layers(load: Load, stack: Stack, *, last: bool) -> float:
    """Layers of a module in a stage's load, without those that stand for the parts behind the last."""
    return load.get(stack.name, 0.0) - (stack.head if last else 0)


def _ends(placement: Placement, stage: str, stack: Stack) -> tuple[bool, bool]:
    """Whether a stage has the first and the last part of a module."""
    own = [name for name, load in placement.loads.items() if stack.name in load]
    return stage == own[0], stage == own[-1]


def _states(placement: Placement, stage: str, stacks: Sequence[Stack]) -> float:
    """Bytes of a stage's states: parameters in bf16, sums of gradients in fp32, and ZeRO-1 for the rest.

    A spread module's optimizer is sharded over all devices, another's over its stage's.
    """
    total, node = 0.0, placement.graph.stage(stage)
    replicas = RANKS // len(placement.graph.ranks)
    for stack in stacks:
        if stack.name not in placement.loads[stage]:
            continue
        first, last = _ends(placement, stage, stack)
        layers = _layers(placement.loads[stage], stack, last=last)
        shards = replicas * CP * len(node.ranks)
        within = H800.node if stack.gathered else 1
        own = (layers * stack.parameters + first * stack.first + last * stack.last) / within
        experts = layers * stack.experts / EP
        total += _bytes(own, max(1, shards // within)) + _bytes(experts, max(1, shards // EP))
    return total


def _bytes(parameters: float, shards: int) -> float:
    made = state_bytes(parameters, parameters, item=BF16, shards=shards)
    return made.optimizer + made.parameters + made.sums + made.reduced


def _working(placement: Placement, rank: int, stacks: Sequence[Stack], rows: Sequence[Row]) -> float:
    """Bytes of the largest op of a rank: a layer's activations, and two layers' gathered parameters."""
    there = {name for stage in _stages(placement, rank) for name in placement.loads[stage]}
    found = [0.0]
    for stack in stacks:
        if stack.name in there:
            most = max(stack.tokens(row) for row in rows)
            found.append(stack.working * most / CP + 2 * stack.gathered * BF16 * stack.parameters)
    return max(found)


def _activations(
    schedule: Schedule, placement: Placement, stacks: Sequence[Stack], rows: Sequence[Row]
) -> dict[int, float]:
    """By rank, the most bytes that a device keeps after any op, in the schedule's order."""
    by_name = {stack.name: stack for stack in stacks}
    now = dict.fromkeys(schedule.graph.ranks, 0.0)
    most = dict(now)
    tokens = {stack.name: [stack.tokens(row) for row in rows] for stack in stacks}
    for op in schedule.ops:
        if op.kind not in ("F", "B", "W"):
            continue
        node, change = schedule.graph.stage(op.stage), 0.0
        for name in placement.loads[op.stage]:
            stack = by_name[name]
            layers = _layers(placement.loads[op.stage], stack, last=_ends(placement, op.stage, stack)[1])
            change += layers * tokens[name][op.microbatch] / CP * _change(stack, op.kind, split=node.split)
        for rank in node.ranks_of(op.microbatch):
            now[rank] += change
            most[rank] = max(most[rank], now[rank])
    return most


def _change(stack: Stack, kind: str, *, split: bool) -> float:
    """Bytes of a token and layer that an op adds to what is kept."""
    if kind == "F":
        return stack.kept
    if kind == "W":
        return -stack.deferred
    return (stack.deferred if split else 0.0) - stack.kept
