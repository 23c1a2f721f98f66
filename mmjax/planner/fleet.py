"""Fleets: the devices of a cluster, of one kind or of several.

A module is on devices of one kind, which determines its times and the memory of its devices. A node also has devices of
one kind, so modules on different kinds share no ranks, and data between them crosses nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from mmjax.planner.clock import Clock, Clocks
from mmjax.planner.work import Work


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """Devices of one kind.

    Attributes:
      clock: the times of these devices.
      devices: number of devices; fewer may be used.
      memory: bytes of each.
    """

    clock: Clock
    devices: int
    memory: float


@dataclass(frozen=True, kw_only=True)
class MixedClock:
    """The times of modules on devices of different kinds.

    Attributes:
      clocks: clock by module name.
    """

    clocks: Mapping[str, Clock] = field(hash=False)

    @property
    def source(self) -> str:
        """One line that names the source of times and temporaries."""
        return "; ".join(dict.fromkeys(clock.source for clock in self.clocks.values()))

    @property
    def op(self) -> float:
        """Seconds that the slowest host spends on an op."""
        return max(clock.op for clock in self.clocks.values())

    @property
    def shared(self) -> float:
        """0: devices of different kinds share no processors."""
        return 0.0

    def of(self, module: str) -> Clock:
        """The times of the devices of a module, such as "llm"."""
        return self.clocks[module]

    def computing(self, work: Work) -> MixedClock:
        """The times of other work of the same modules."""
        return MixedClock(clocks={module: clock.computing(work) for module, clock in self.clocks.items()})


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All devices.

    Attributes:
      kinds: devices of each kind by its name, which is "" if there is one kind.
    """

    kinds: Mapping[str, DeviceKind] = field(hash=False)

    @property
    def devices(self) -> int:
        """Number of devices of all kinds."""
        return sum(kind.devices for kind in self.kinds.values())

    @cached_property
    def alone(self) -> dict[str, Fleet]:
        """The devices of each kind as a fleet of their own, by kind."""
        return {name: Fleet(kinds={name: kind}) for name, kind in self.kinds.items()}

    def computing(self, work: Work) -> Fleet:
        """The same devices, with the times of other work of the same modules."""
        return Fleet(kinds={name: replace(kind, clock=kind.clock.computing(work)) for name, kind in self.kinds.items()})

    def kind(self, kinds: Mapping[str, str], module: str) -> DeviceKind:
        """The devices of a module's kind. kinds: name of the kind by module; if empty, there must be one kind."""
        return self.kinds[kinds[module]] if kinds else next(iter(self.kinds.values()))

    def clocks(self, kinds: Mapping[str, str]) -> Clocks:
        """The times of modules that are on these kinds of device; kinds: as for `kind`."""
        if len(set(kinds.values())) > 1:
            return MixedClock(clocks={module: self.kinds[kind].clock for module, kind in kinds.items()})
        return self.kind(kinds, next(iter(kinds), "")).clock
