"""How many processes a node has: one for all of its devices, or one for each.

In a process of a node no sender waits for its receiver on the same node, but one thread of Python dispatches the ops of
all devices. With a process for each device a thread has fewer ops, and under `World.transport='auto'` every activation
that leaves a GPU occupies both sides.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from mmjax.planner.clock import AnalyticClock
from mmjax.planner.cluster_files import DEVICE, NODE, PROCESSES_PER
from mmjax.planner.estimate import Estimate
from mmjax.planner.measured import MeasuredClock
from mmjax.schedule.ops import ONCE, participating_ranks, step_ops
from mmjax.schedule.schedules import split_as

OP_SECONDS = 250e-6
"""Seconds of Python for an op on GPUs. An assumption: some 120 µs on a CPU outside of the program's call, as
`bench runtime` has it, and as much for the call on several devices."""


@dataclass(frozen=True, kw_only=True)
class ProcessSeconds:
    """A step with one process for each node or each device.

    Attributes:
      per: "node" or "device".
      simulated: seconds of the simulated step.
      host: seconds of Python in the process with the most ops.
    """

    per: str
    simulated: float
    host: float

    @property
    def seconds(self) -> float:
        """Seconds of a step: of its devices, or of a host that holds them up."""
        return max(self.simulated, self.host)

    def __str__(self) -> str:
        return f"{self.seconds * 1e3:.4g} ms with one a {self.per} ({self.host * 1e3:.3g} ms of Python)"


def waiting_free(transport: str, per: str, node: int, platform: str = "gpu") -> int:
    """The devices of a group in which senders do not wait for receivers; 0 where none waits.

    Args:
      transport: "auto", "device_put" or "collective", as `World.transport`.
      per: "node" or "device".
      node: devices of a node, such as 8.
      platform: platform of the devices; see `mover_of` for what "auto" is on it.
    """
    if transport == "device_put" or (transport == "auto" and platform == "cpu"):
        return 0
    return 1 if transport == "collective" or per == DEVICE else node


def seconds_by_process(estimate: Estimate, transport: str) -> tuple[ProcessSeconds, ...]:
    """The step of a plan with a process for each node and with one for each device, in this order.

    () for a plan on one device or on several kinds of device, whose nodes have one process each.

    Args:
      estimate: a plan, such as the `best` of `choose_plan`'s result.
      transport: "auto", "device_put" or "collective", as `World.transport`.
    """
    clock = estimate.clock
    if estimate.candidate.world == 1 or not isinstance(clock, AnalyticClock | MeasuredClock):
        return ()
    op = clock.op or OP_SECONDS
    result = []
    for per in PROCESSES_PER:
        group = waiting_free(transport, per, clock.node, clock.platform)
        step = replace(estimate, clock=replace(clock, process=group)).seconds
        host = most_ops(estimate, clock.node if per == NODE else 1) * op
        result.append(ProcessSeconds(per=per, simulated=step, host=host))
    return tuple(result)


def most_ops(estimate: Estimate, devices: int) -> int:
    """Number of ops of a step in the process that dispatches the most of them.

    Args:
      estimate: a plan, such as the `best` of `choose_plan`'s result.
      devices: devices of a process, such as 8.
    """
    graph = split_as(estimate.candidate.schedule, estimate.candidate.inner, estimate.graph)
    unit = math.lcm(*(node.lanes for node in graph.stages))
    repeats = estimate.candidate.microbatches / unit
    once, every = Counter[int](), Counter[int]()
    for op in step_ops(graph, unit):
        processes = {rank // devices for rank in participating_ranks(graph, op)}
        (once if op.microbatch == ONCE else every).update(processes)
    return max(once[process] + math.ceil(every[process] * repeats) for process in once | every)
