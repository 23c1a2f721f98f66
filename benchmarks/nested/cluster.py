"""128 H800: times of ops and bytes of devices, by datasheet and formula. Nothing here was measured.

A *rank* is four GPUs of one node that share a row (cp 4). A pipeline of N ranks has 32 / N replicas (dp), and experts
are sharded over the eight GPUs of a node (ep 8, over dp · cp). All modules have the rank's degrees.

* Compute takes FLOPs at half of the datasheet's dense peak, as in `mmjax.planner.analytic`.
* All-to-alls of experts take seven eighths of their bytes over NVLink, and no compute hides them. Rows of equal length
  are assumed to use experts evenly.
* The MMDiT's parameters are sharded over a node and gathered by each op, layer by layer behind the layer before: an op
  takes no less than its gathers over NVLink.
* Moves of activations take their bytes over a GPU's InfiniBand; only the receiver waits for them.
* The reductions and the update, once a step, are not counted: they are the same for every system.
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
"""Bytes of a device for the runtime and its communicators, assumed."""
MOVE = BF16 * SEQUENCE * 2048 / CP / H800.network
"""Seconds of a move of the LLM's activations, or of an encoder's output to it."""


def seconds(stack: Stack, row: Row) -> float:
    """Seconds of the forward of one layer for a row on a rank."""
    return max(_compute(stack, row) + _traffic(stack, row), _gather(stack))


def _compute(stack: Stack, row: Row) -> float:
    return stack.flops(row) / (CP * EFFICIENCY * H800.flops)


def _traffic(stack: Stack, row: Row) -> float:
    return stack.all_to_all * stack.tokens(row) / CP * (EP - 1) / EP / H800.link


def _gather(stack: Stack) -> float:
    return stack.sharded * BF16 * stack.parameters * (H800.node - 1) / H800.node / H800.link


def timed(stack: Stack, rows: Sequence[Row], *, even: bool = False) -> TimedModule:
    """The module for placements, with the time of each of `rows`, or the mean time for all if `even`.

    Its layers are the units of stages, so the parts behind the LLM's last layer count as layers.
    """
    row_seconds = [seconds(stack, row) for row in rows]
    mean = sum(row_seconds) / len(row_seconds)
    compute, traffic = _compute(stack, rows[0]), _traffic(stack, rows[0])
    forward = compute + traffic
    return TimedModule(
        name=stack.name,
        layers=stack.layers + stack.head,
        seconds=mean,
        factors=() if even else tuple(time / mean for time in row_seconds),
        backward=((2 + stack.recompute) * compute + traffic) / forward,
        weights=compute / forward,
    )


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the fullest device.

    Attributes:
      states: parameters, gradients, optimizer states.
      activations: saved from F to B, and from B to W.
      working: of the running op, with the layers that are gathered.
    """

    states: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """All bytes, without the runtime's."""
        return self.states + self.activations + self.working

    @property
    def fits(self) -> bool:
        """Whether they fit on a device beside the runtime."""
        return self.total + RESERVED <= H800.memory


def memory(schedule: Schedule, placement: Placement, stacks: Sequence[Stack], rows: Sequence[Row]) -> Memory:
    """Bytes of the fullest device of a step in this schedule."""
    activations = _activations(schedule, placement, stacks, rows)
    by_rank = []
    for rank in schedule.graph.ranks:
        states = sum(_states(placement, stage, stacks) for stage in _stages(placement, rank))
        by_rank.append(
            Memory(states=states, activations=activations[rank], working=_working(placement, rank, stacks, rows))
        )
    return max(by_rank, key=lambda needs: needs.total)


def _stages(placement: Placement, rank: int) -> list[str]:
    return [node.name for node in placement.graph.stages if rank in node.ranks]


def _layers(load: Load, stack: Stack, *, last: bool) -> float:
    """Layers of a module in a stage's load, without the layers that stand for the parts behind the last."""
    return load.get(stack.name, 0.0) - (stack.head if last else 0)


def _ends(placement: Placement, stage: str, stack: Stack) -> tuple[bool, bool]:
    """Whether a stage has the first and the last part of a module."""
    stages = [name for name, load in placement.loads.items() if stack.name in load]
    return stage == stages[0], stage == stages[-1]


def _states(placement: Placement, stage: str, stacks: Sequence[Stack]) -> float:
    """Bytes of a stage's states: parameters in bf16, sums of gradients in fp32, and ZeRO-1 for the rest.

    A spread module's optimizer is sharded over all devices, any other over the devices of its stage.
    """
    total, node = 0.0, placement.graph.stage(stage)
    replicas = RANKS // len(placement.graph.ranks)
    for stack in stacks:
        if stack.name not in placement.loads[stage]:
            continue
        first, last = _ends(placement, stage, stack)
        layers = _layers(placement.loads[stage], stack, last=last)
        shards = replicas * CP * len(node.ranks)
        node_shards = H800.node if stack.sharded else 1
        parameters = (layers * stack.parameters + first * stack.first + last * stack.last) / node_shards
        experts = layers * stack.experts / EP
        total += _bytes(parameters, max(1, shards // node_shards)) + _bytes(experts, max(1, shards // EP))
    return total


def _bytes(parameters: float, shards: int) -> float:
    sizes = state_bytes(parameters, parameters, item=BF16, shards=shards)
    return sizes.optimizer + sizes.parameters + sizes.sums + sizes.reduced


def _working(placement: Placement, rank: int, stacks: Sequence[Stack], rows: Sequence[Row]) -> float:
    """Bytes of the largest op of a rank: a layer's activations, and two layers' gathered parameters."""
    modules = {name for stage in _stages(placement, rank) for name in placement.loads[stage]}
    bytes_of_ops = [0.0]
    for stack in stacks:
        if stack.name in modules:
            most_tokens = max(stack.tokens(row) for row in rows)
            bytes_of_ops.append(stack.working * most_tokens / CP + 2 * stack.sharded * BF16 * stack.parameters)
    return max(bytes_of_ops)


def _activations(
    schedule: Schedule, placement: Placement, stacks: Sequence[Stack], rows: Sequence[Row]
) -> dict[int, float]:
    """By rank, the peak of a device's activations after any op, in the schedule's order."""
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
    """The change of saved bytes by an op, for a token and a layer."""
    if kind == "F":
        return stack.saved
    if kind == "W":
        return -stack.deferred
    return (stack.deferred if split else 0.0) - stack.saved
