"""Clocks: the interface of the planner's times, and the times of a datasheet.

A clock gives seconds of a stage's forward and backward, of a move between devices and of a collective; and bytes of
the temporaries of programs. `AnalyticClock` computes them from FLOPs, traces and a datasheet; `MeasuredClock` takes
them from a profile. Every plan names its clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from mmjax.planner.accelerators import Accelerator
from mmjax.planner.work import ModuleWork, StagePart, Work


@dataclass(frozen=True, kw_only=True)
class PassSeconds:
    """Seconds of a microbatch in one stage.

    Attributes:
      forward: seconds of the forward.
      backward: seconds of the backward, recompute included; 0 where there is none.
    """

    forward: float
    backward: float


class Clocks(Protocol):
    """The times of modules, which may be on devices of different kinds."""

    @property
    def source(self) -> str:
        """One line that names the source of times and temporaries."""
        ...

    @property
    def op(self) -> float:
        """Seconds that the host spends on an op beside the work of its devices."""
        ...

    @property
    def shared(self) -> float:
        """The number of devices that work at a time where they share processors; 0 where each has its own.

        All other times of a clock are for a device that does not share its processor.
        """
        ...

    def of(self, module: str) -> Clock:
        """The times of the devices of a module, such as "llm"."""
        ...

    def computing(self, work: Work) -> Clocks:
        """The times of other work of the same modules, which recomputes more or less."""
        ...


class Clock(Clocks, Protocol):
    """Seconds of all parts of a step, and temporaries of its programs, on devices of one kind."""

    def computing(self, work: Work) -> Clock:
        """The times of other work of the same modules, which recomputes more or less."""
        ...

    @property
    def memory(self) -> float:
        """Bytes of a device that a run may take."""
        ...

    @property
    def node(self) -> int:
        """Devices of a node."""
        ...

    @property
    def platform(self) -> str:
        """Platform of the devices, such as "gpu"."""
        ...

    @property
    def process(self) -> int:
        """Devices of a group in which no sender waits for its receiver; 0 where none waits. See `waiting_free`."""
        ...

    @property
    def peak(self) -> float:
        """FLOPs per second of a device, for MFU; 0 where it is not known."""
        ...

    def stage(
        self, module: str, part: StagePart, *, rows: float, width: int, tp: int, expert_share: float = 1.0
    ) -> PassSeconds:
        """Seconds of a microbatch in a stage, without moves and without the communication of dp, cp and ep.

        Args:
          module: the module's name.
          part: the part of the module that the stage has.
          rows: rows of the microbatch on one dp rank, divided by cp too where ranks share them; may be fractional.
          width: positions of a row, padding included.
          tp: one of the tp in `ModuleWork.memory` of the module.
          expert_share: share of the sums of experts' gradients that a device reads and writes in a microbatch; it has
            all products of its tokens' experts, whatever the share.
        """
        ...

    def temporaries(self, module: str, part: StagePart, *, rows: float, width: int, tp: int) -> float:
        """Bytes that the largest program of a stage without ep needs on a device; arguments as `stage`."""
        ...

    def move(self, size: float, *, across: bool) -> float:
        """Seconds in which a device sends `size` bytes to another: to another node if `across`, else within one."""
        ...

    def gather(self, size: float, ranks: int, *, across: bool) -> float:
        """Seconds of an all-gather or reduce-scatter over `ranks` devices, across nodes or within one.

        size: bytes of the whole array, which each rank has after a gather and before a scatter.
        """
        ...

    def all_to_all(self, size: float, ranks: int, *, across: bool) -> float:
        """Seconds in which each of `ranks` devices sends an equal part of `size` bytes to each, across nodes or within.

        size: bytes that a rank sends, with the part that it keeps.
        """
        ...

    def copy(self, size: float) -> float:
        """Seconds in which a device copies `size` bytes to its host's memory, or back; infinite where not known."""
        ...


def group_gather(clock: Clock, size: float, *, ranks: int, apart: int, first: int) -> float:
    """Seconds of an all-gather or reduce-scatter over a group of devices; 0 for one rank.

    Ranks of one node share the traffic to other nodes, each with its own network card.

    Args:
      clock: the times, such as `AnalyticClock(work=work, accelerator=accelerator("h100"))`.
      size: bytes of the whole array, which each rank has after a gather and before a scatter.
      ranks: number of devices of the group.
      apart: distance of each device's number to the next one's; 1 for neighbours.
      first: number of the group's first device, from 0, where a node starts.
    """
    if ranks == 1:
        return 0.0
    within = clock.gather(size, ranks, across=False)
    if not _leaves_node(clock, ranks=ranks, apart=apart, first=first):
        return within
    return max(within, clock.gather(size / max(1, clock.node // apart), ranks, across=True))


def group_exchange(clock: Clock, size: float, *, ranks: int, apart: int, first: int) -> float:
    """Seconds of an all-to-all over a group of devices; 0 for one rank.

    Each rank sends its own parts to other nodes. size: bytes that a rank sends, with the part that it keeps. Other
    arguments as for `group_gather`.
    """
    if ranks == 1:
        return 0.0
    if not _leaves_node(clock, ranks=ranks, apart=apart, first=first):
        return clock.all_to_all(size, ranks, across=False)
    on_node = max(1, min(ranks - 1, clock.node // apart))
    within = clock.all_to_all(size * on_node / ranks, on_node, across=False) if on_node > 1 else 0.0
    elsewhere = size * (ranks - on_node) / (ranks - 1)  # of this a rank sends (ranks - 1)/ranks
    return max(within, clock.all_to_all(elsewhere, ranks, across=True))


def group_ring(clock: Clock, size: float, *, ranks: int, apart: int, first: int) -> float:
    """Seconds in which an array of `size` bytes of each rank of a group goes round all others; 0 for one rank.

    From a node's last rank each array goes to the next node by itself. Arguments as for `group_gather`.
    """
    if ranks == 1:
        return 0.0
    return clock.gather(size * ranks, ranks, across=_leaves_node(clock, ranks=ranks, apart=apart, first=first))


def _leaves_node(clock: Clock, *, ranks: int, apart: int, first: int) -> bool:
    """Whether a group of devices is on several nodes."""
    return first // clock.node != (first + ranks * apart - 1) // clock.node


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of a datasheet's figures that are reached.

    The defaults are round guesses; they scale all competing layouts alike and were fitted to nothing.

    Attributes:
      compute: share of the FLOPs per second.
      memory: share of the bandwidth of a device's memory.
      link: share of the bandwidths within a node, the one to the host included.
      network: share of the bandwidth between nodes.
    """

    compute: float = 0.5
    memory: float = 0.8
    link: float = 0.8
    network: float = 0.8


@dataclass(frozen=True, kw_only=True)
class AnalyticClock:
    """Times from FLOPs, bytes and a datasheet.

    A layer has two all-reduces of its activations over the tp group in forward and two in backward (Shoeybi et al.,
    "Megatron-LM", §3), each of 2·(tp - 1)/tp of the bytes over the link. The host costs nothing: its work is hidden.
    A weight's gradient takes at least as long as its sum is read and written, so microbatches of few tokens cost more.

    Attributes:
      work: the work of all modules that are asked about.
      accelerator: the figures of the datasheet.
      efficiency: the shares of them that are reached.
      process: as in `Clock`, such as 8 with a process for each node; 0 where no sender waits.
      op, shared: as in `Clocks`.
    """

    work: Work
    accelerator: Accelerator
    efficiency: Efficiency = Efficiency()
    process: int = 0
    op: float = 0.0
    shared: float = 0.0

    @property
    def source(self) -> str:
        """One line that names the source of times and temporaries."""
        share = f"{100 * self.efficiency.compute:.0f} % of {self.accelerator.flops / 1e12:.0f} TFLOP/s"
        return f"analytic: {self.accelerator.name}, {share}; nothing was measured, and temporaries are traced"

    @property
    def memory(self) -> float:
        """Bytes of a device that a run may take."""
        return self.accelerator.usable

    @property
    def node(self) -> int:
        """Devices of a node."""
        return self.accelerator.node

    @property
    def platform(self) -> str:
        """Platform of the devices; datasheets are of GPUs."""
        return "gpu"

    @property
    def peak(self) -> float:
        """FLOPs per second of a device."""
        return self.accelerator.flops

    def of(self, module: str) -> AnalyticClock:
        """This clock, for every module."""
        return self

    def computing(self, work: Work) -> AnalyticClock:
        """The times of other work of the same modules."""
        return self if work is self.work else replace(self, work=work)

    def stage(
        self, module: str, part: StagePart, *, rows: float, width: int, tp: int, expert_share: float = 1.0
    ) -> PassSeconds:
        """Seconds of a microbatch in a stage; arguments as for `Clock.stage`."""
        work = self.work.modules[module]
        scale = rows * width / work.width
        forward, backward = work.forward.of(part) * scale, work.backward.of(part) * scale
        rate = tp * self.accelerator.flops * self.efficiency.compute
        size = work.width * work.model_width * self.work.item * scale
        once = 2 * size * (tp - 1) / tp / (self.accelerator.link * self.efficiency.link)
        forward_sums, backward_sums = (sums * part.layers * once for sums in work.sums)
        waits = self._waits_for_sums(work, part, scale=scale, expert_share=expert_share) / tp
        return PassSeconds(
            forward=forward / rate + forward_sums,
            backward=backward / rate + waits + backward_sums if backward else 0.0,
        )

    def _waits_for_sums(self, work: ModuleWork, part: StagePart, *, scale: float, expert_share: float) -> float:
        """Seconds by which sums of gradients are read and written longer than their products take, for tp 1.

        scale: rows of the microbatch on one dp rank, counted in rows of the module's width.
        """
        device, shares = self.accelerator, self.efficiency

        def waits(weights: float, flops: float) -> float:
            passes = 2 * self.work.gradient * weights / (device.bandwidth * shares.memory)
            return max(0.0, passes - flops * scale / (device.flops * shares.compute))

        flops = work.dense.weight_gradients.of(part)
        dense = waits(flops / (2 * work.width), flops)
        if not work.experts or not work.experts.trained:
            return dense
        return dense + part.layers * waits(expert_share * work.experts.trained, work.experts.forward)

    def temporaries(self, module: str, part: StagePart, *, rows: float, width: int, tp: int) -> float:
        """Bytes that the largest program of a stage needs on a device while it runs, from its trace.

        The arguments are those of `Clock.stage`.
        """
        work = self.work.modules[module]
        return work.memory[tp].running(part, rows * width / work.width)

    def move(self, size: float, *, across: bool) -> float:
        """Seconds in which a device sends `size` bytes to another: to another node if `across`, else within one."""
        return size / self._speed(across=across)

    def gather(self, size: float, ranks: int, *, across: bool) -> float:
        """Seconds of an all-gather or reduce-scatter of `size` bytes in all: a rank sends (ranks - 1)/ranks of it."""
        return size * (ranks - 1) / ranks / self._speed(across=across)

    def all_to_all(self, size: float, ranks: int, *, across: bool) -> float:
        """Seconds of an all-to-all in which a rank sends (ranks - 1)/ranks of `size` bytes."""
        return size * (ranks - 1) / ranks / self._speed(across=across)

    def copy(self, size: float) -> float:
        """Seconds in which a device copies `size` bytes to its host's memory, or back."""
        return size / (self.accelerator.host * self.efficiency.link)

    def _speed(self, *, across: bool) -> float:
        """Bytes per second of a device in one direction."""
        if across:
            return self.accelerator.network * self.efficiency.network
        return self.accelerator.link * self.efficiency.link
