"""The devices that there are: of one kind or of several.

A module lies on devices of one kind, so all of its times and the bytes of its devices are those of that kind. A node
has devices of one kind, so modules of different kinds never share ranks, and what they send each other crosses nodes.
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
      clock: their times.
      devices: how many there are; fewer may be used.
      memory: bytes of each.
    """

    clock: Clock
    devices: int
    memory: float


@dataclass(frozen=True, kw_only=True)
class MixedClock:
    """The times of modules on devices of different kinds.

    Attributes:
      clocks: by module.
    """

    clocks: Mapping[str, Clock] = field(hash=False)

    @property
    def source(self) -> str:
        """One line: what the times are from."""
        return "; ".join(dict.fromkeys(clock.source for clock in self.clocks.values()))

    @property
    def op(self) -> float:
        """Seconds of the host that an op costs: of the slowest host."""
        return max(clock.op for clock in self.clocks.values())

    @property
    def shared(self) -> float:
        """Devices of different kinds share no processors."""
        return 0.0

    def of(self, module: str) -> Clock:
        """The times of a module's devices."""
        return self.clocks[module]


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All devices.

    Attributes:
      kinds: by name; "" is the name where there is one kind.
    """

    kinds: Mapping[str, Kind] = field(hash=False)

    @property
    def devices(self) -> int:
        """Of all kinds."""
        return sum(kind.devices for kind in self.kinds.values())

    @cached_property
    def alone(self) -> dict[str, Fleet]:
        """Those of each kind as a fleet of its own."""
        return {name: Fleet(kinds={name: kind}) for name, kind in self.kinds.items()}

    def kind(self, placed: Mapping[str, str], module: str) -> Kind:
        """Of a module's devices; placed: names of kinds by module, empty where there is one kind."""
        return self.kinds[placed[module]] if placed else next(iter(self.kinds.values()))

    def clocks(self, placed: Mapping[str, str]) -> Clocks:
        """The times of modules on these kinds of devices."""
        if len(set(placed.values())) > 1:
            return MixedClock(clocks={module: self.kinds[kind].clock for module, kind in placed.items()})
        return self.kind(placed, next(iter(placed), "")).clock
