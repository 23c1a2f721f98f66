"""Fleets: the devices of a cluster, of one kind or of several.

A module lies on devices of one kind, which gives its times and the memory of its devices. A node also has devices of
one kind, so modules on different kinds share no ranks, and data between them crosses nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mmjax.planner.clock import Clock, Clocks


@dataclass(frozen=True, kw_only=True)
class Kind:
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
      clocks: clock by module.
    """

    clocks: Mapping[str, Clock] = field(hash=False)

    @property
    def source(self) -> str:
        """One line that says where times and temporaries are from."""
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
        """The times of a module's devices."""
        return self.clocks[module]


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All devices.

    Attributes:
      kinds: devices of each kind by its name, which is "" where there is one kind.
    """

    kinds: Mapping[str, Kind] = field(hash=False)

    @property
    def devices(self) -> int:
        """Number of devices of all kinds."""
        return sum(kind.devices for kind in self.kinds.values())

    @cached_property
    def alone(self) -> dict[str, Fleet]:
        """The devices of each kind as a fleet of their own, by kind."""
        return {name: Fleet(kinds={name: kind}) for name, kind in self.kinds.items()}

    def kind(self, placed: Mapping[str, str], module: str) -> Kind:
        """The kind of a module's devices; placed: name of the kind by module, empty where there is one kind."""
        return self.kinds[placed[module]] if placed else next(iter(self.kinds.values()))

    def clocks(self, placed: Mapping[str, str]) -> Clocks:
        """The times of modules on the kinds of device in `placed` (as in `kind`)."""
        if len(set(placed.values())) > 1:
            return MixedClock(clocks={module: self.kinds[kind].clock for module, kind in placed.items()})
        return self.kind(placed, next(iter(placed), "")).clock
