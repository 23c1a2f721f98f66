"""Configuration of the world. Imports no JAX, so that errors in it are reported at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmjax.configurable import ConfigError, configurable, one_of, positive, require
from mmjax.mesh.layout import SPANNING, Layout

TRANSPORTS = ("auto", "device_put", "collective")
ROUTES = ("leader", "sliced")
WARM_UPS = ("auto", "on", "off")
MOST_DEVICES = 1 << 16
"""The most devices that layouts may need if ``World.devices`` is not set."""


@configurable("World")
@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """Which devices a run uses.

    Attributes:
      devices: number of devices; 0 means as many as the layouts need.
      platform: ``cpu``, ``cuda``, ``rocm``, ``tpu``, or empty for the accelerator if there is one and virtual CPU
        devices otherwise.
      transport: how activations cross between devices: ``device_put`` (direct copies, the sender does not wait),
        ``collective`` (both sides take part) or ``auto`` (``collective`` between GPUs of several processes, and else
        ``device_put``).
      route: which ranks of a tp·cp group send and receive: ``leader`` (the first, and the destination broadcasts) or
        ``sliced`` (every rank carries a slice, and the destination all-gathers).
      compilation_cache: folder of compiled programs kept between runs; empty means ``mmjax/xla`` in the user's cache
        directory and ``none`` switches it off.
      warm_up: whether every boundary and collective is tried before the first step: ``on``, ``off``, or ``auto`` (with
        several processes, or on accelerators).
      warm_up_seconds: longest time that such a trial may take; the run ends when one takes longer.
      hang_seconds: longest time in which nothing may move in a step; the run then says where it hangs, and ends with
        status 75. 0 means five times the longest of the newest steps and at least 60; -1 switches the watch off.
    """

    devices: int = 0
    platform: str = ""
    transport: str = "auto"
    route: str = "leader"
    compilation_cache: str = ""
    warm_up: str = "auto"
    warm_up_seconds: float = 120.0
    hang_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.devices < 0:
            raise ConfigError(
                f"World.devices={self.devices}: must not be negative; set it to 0 for what the layouts need"
            )
        one_of("World.platform", self.platform, ("", "cpu", "cuda", "rocm", "tpu"), meant={"gpu": "cuda"})
        one_of("World.transport", self.transport, TRANSPORTS)
        one_of("World.route", self.route, ROUTES)
        one_of("World.warm_up", self.warm_up, WARM_UPS)
        positive("World.warm_up_seconds", self.warm_up_seconds, 120.0)
        legal = math.isfinite(self.hang_seconds) and (self.hang_seconds >= 0 or self.hang_seconds == -1)
        fix = "must be above 0, such as 120.0; 0 finds it from the steps' times, and -1 switches it off"
        require(legal, "World.hang_seconds", self.hang_seconds, fix)

    def idle(self) -> dict[str, str]:
        """The fields without effect, given the other fields, each with the reason: "warm_up_seconds", or {}."""
        return {"warm_up_seconds": "World.warm_up='off' tries nothing"} if self.warm_up == "off" else {}

    def check_size(self, layouts: Mapping[str, Layout]) -> None:
        """Refuses layouts, by module, that are larger than any cluster, before memory is allocated for their ranks.

        Raises:
          ConfigError: a layout needs more than ``devices`` and more than ``MOST_DEVICES``.
        """
        most = max(self.devices, MOST_DEVICES)
        for module, layout in layouts.items():
            if layout.end > most:
                degrees = {name: getattr(layout, name) for name in (*SPANNING, "rank_offset")}
                name = max(degrees, key=lambda name: degrees[name])
                fix = f"needs {layout.end} devices, more than {most}; use less, or name so many with World.devices"
                raise ConfigError(f"{module}/Layout.{name}={degrees[name]}: {fix}")

    def check_devices(
        self, layouts: Mapping[str, Layout], available: int, alternative: tuple[Path, int] | None = None
    ) -> None:
        """Requires that the number of available devices is enough for the layouts.

        Args:
          layouts: the layouts by module.
          available: number of devices.
          alternative: a gin file that fits, and the number of devices that it needs; for the message.

        Raises:
          ConfigError: the layouts need more devices; the message names flags that fit.
        """
        needed = max(layout.end for layout in layouts.values())
        if available >= needed:
            return
        fixes = [f"--gin.World.devices={needed}" if self.devices else "smaller layouts"]
        if self.platform != "cpu" and not self.devices:
            fixes.append(f"--gin.World.platform=cpu for {needed} virtual devices")
        if alternative:
            fixes.append(f"--gin_file={alternative[0]} (needs {alternative[1]})")
        described = "; ".join(f"{module} {layout.describe()}" for module, layout in layouts.items())
        problem = f"the layouts need {needed} devices, not {available} ({described})"
        raise ConfigError(f"World.devices={self.devices}: {problem}; use {', or '.join(fixes)}")
