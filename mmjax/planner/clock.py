"""How long things take: the one interface of the planner's times, and the times of a datasheet.

A clock answers for a stage's forward and backward, a move between devices, and a collective; and for what else only
those know who compile: the temporaries of programs. `AnalyticClock` computes from FLOPs, traces and a datasheet; a
measured profile has a clock of its own. Every plan says which it was made with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from mmjax.planner.accelerators import Accelerator
from mmjax.planner.work import Part, Work


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Seconds of a microbatch in one stage. backward: recompute included; 0 without a backward."""

    forward: float
    backward: float


class Clocks(Protocol):
    """The times of modules, which may be on devices of different kinds."""

    @property
    def source(self) -> str:
        """One line: what times and temporaries are from."""
        ...

    @property
    def op(self) -> float:
        """Seconds of the host that an op costs beside the work of its devices."""
        ...

    @property
    def shared(self) -> float:
        """How many devices work at a time, where they share processors; 0: all. Seconds are those of a device that has
        a processor of its own."""
        ...

    def of(self, module: str) -> Clock:
        """The times of a module's devices."""
        ...


class Clock(Clocks, Protocol):
    """Seconds of everything that a step is made of, and temporaries of its programs, on devices of one kind."""

    @property
    def memory(self) -> float:
        """Bytes of a device."""
        ...

    @property
    def node(self) -> int:
        """Devices of a node."""
        ...

    @property
    def process(self) -> int:
        """Devices of a process: between two processes an activation moves when both ends have come to it; 0: one
        process has all."""
        ...

    @property
    def peak(self) -> float:
        """FLOPs per second of a device, for MFU; 0 where it is not known."""
        ...

    def stage(self, module: str, part: Part, *, rows: float, width: int, tp: int) -> Pass:
        """A microbatch of `rows` rows of `width` on one dp replica of a stage."""
        ...

    def temporaries(self, module: str, part: Part, *, rows: float, width: int, tp: int) -> float:
        """Bytes that the largest program of a stage needs on a device while it runs; arguments as `stage`."""
        ...

    def move(self, size: float, *, across: bool) -> float:
        """A device sends `size` bytes to another, across nodes or within one."""
        ...

    def gather(self, size: float, ranks: int, *, across: bool) -> float:
        """An all-gather or reduce-scatter over `ranks` devices whose whole is `size` bytes."""
        ...

    def copy(self, size: float) -> float:
        """A device copies `size` bytes to its host's memory, or back; infinite where that is not known."""
        ...


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What share of a datasheet's figures is reached.

    The defaults are round guesses; they scale what competes alike and were fitted to nothing.

    Attributes:
      compute: of FLOPs, for every module that is not in `modules`. network: of bandwidths. link: of those within a
        node, the host's among them.
      modules: of FLOPs, by module.
    """

    compute: float = 0.5
    link: float = 0.8
    network: float = 0.8
    modules: Mapping[str, float] = field(default_factory=dict, hash=False)

    def of(self, module: str) -> float:
        """Of the FLOPs of a module."""
        return self.modules.get(module, self.compute)


@dataclass(frozen=True, kw_only=True)
class AnalyticClock:
    """Times from FLOPs, bytes and a datasheet.

    A layer has two all-reduces of its activations over the tp group in forward and two in backward (Shoeybi et al.,
    "Megatron-LM", §3), each of 2·(tp - 1)/tp of the bytes over the link. The host costs nothing: its work is hidden.
    """

    work: Work
    accelerator: Accelerator
    efficiency: Efficiency = Efficiency()
    process: int = 0
    op: float = 0.0
    shared: float = 0.0

    @property
    def source(self) -> str:
        """One line: what times and temporaries are from."""
        share = f"{100 * self.efficiency.compute:.0f} % of {self.accelerator.flops / 1e12:.0f} TFLOP/s"
        return f"analytic: {self.accelerator.name}, {share}; nothing was measured, and temporaries are traced"

    @property
    def memory(self) -> float:
        """Bytes of a device."""
        return self.accelerator.memory

    @property
    def node(self) -> int:
        """Devices of a node."""
        return self.accelerator.node

    @property
    def peak(self) -> float:
        """FLOPs per second of a device."""
        return self.accelerator.flops

    def of(self, module: str) -> AnalyticClock:
        """This one, whatever the module."""
        return self

    def stage(self, module: str, part: Part, *, rows: float, width: int, tp: int) -> Pass:
        """A microbatch of `rows` rows of `width` on one dp replica of a stage."""
        work = self.work.modules[module]
        scale = rows * width / work.width
        forward, backward = work.forward.of(part) * scale, work.backward.of(part) * scale
        rate = tp * self.accelerator.flops * self.efficiency.of(module)
        size = work.width * work.model_width * self.work.item * scale
        once = 2 * size * (tp - 1) / tp / (self.accelerator.link * self.efficiency.link)
        ahead, back = (sums * part.layers * once for sums in work.sums)
        return Pass(forward=forward / rate + ahead, backward=backward / rate + back if backward else 0.0)

    def temporaries(self, module: str, part: Part, *, rows: float, width: int, tp: int) -> float:
        """Bytes that the largest program of a stage needs on a device while it runs, from its trace."""
        work = self.work.modules[module]
        return work.held[tp].running(part, rows * width / work.width)

    def move(self, size: float, *, across: bool) -> float:
        """A device sends `size` bytes to another, across nodes or within one."""
        return size / self._speed(across)

    def gather(self, size: float, ranks: int, *, across: bool) -> float:
        """An all-gather or reduce-scatter over `ranks` devices whose whole is `size` bytes: (ranks - 1)/ranks of it."""
        return size * (ranks - 1) / ranks / self._speed(across)

    def copy(self, size: float) -> float:
        """A device copies `size` bytes to its host's memory, or back."""
        return size / (self.accelerator.host * self.efficiency.link)

    def _speed(self, across: bool) -> float:
        """Bytes per second of a device in one direction."""
        if across:
            return self.accelerator.network * self.efficiency.network
        return self.accelerator.link * self.efficiency.link
