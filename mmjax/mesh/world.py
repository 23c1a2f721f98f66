"""The world: all devices of a run in one fixed order, and the settings that must precede JAX's backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from mmjax import jax_compat
from mmjax.configurable import ConfigError, configurable, one_of
from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import AXIS_NAMES, Submesh

THREADS_PER_DEVICE = 4
TRANSPORTS = ("auto", "device_put", "collective")


@configurable("World")
@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """Which devices a run uses.

    Attributes:
      devices: number of devices; 0 means as many as the layouts need.
      platform: ``cpu``, ``cuda`` or empty for the accelerator if there is one and virtual CPU devices otherwise.
      transport: how activations cross between devices: ``device_put`` (direct copies, the sender does not wait),
        ``collective`` (both sides take part) or ``auto`` (direct copies where this process owns every device).
      compilation_cache: folder of compiled programs kept between runs; empty means ``mmjax/xla`` in the user's cache
        directory and ``none`` switches it off.
    """

    devices: int = 0
    platform: str = ""
    transport: str = "auto"
    compilation_cache: str = ""

    def __post_init__(self) -> None:
        if self.devices < 0:
            raise ConfigError(f"World.devices={self.devices}: must not be negative; set it to 0 for what the layouts need")
        one_of("World.platform", self.platform, ("", "cpu", "cuda", "rocm", "tpu"))
        one_of("World.transport", self.transport, TRANSPORTS)


class World:
    """All devices of a run, by rank.

    Attributes:
      devices: ``jax.Device`` by rank.
    """

    def __init__(self, devices: Iterable[jax.Device]):
        self.devices: tuple[jax.Device, ...] = tuple(devices)
        self.mesh = Mesh(np.array(self.devices), ("world",))

    @classmethod
    def create(
        cls, config: WorldConfig, layouts: Iterable[Layout], require: Callable[[int], None] | None = None
    ) -> World:
        """Starts the backend with what the layouts need, and checks that every device can talk to every other.

        Args:
          config: which devices.
          layouts: of all modules.
          require: called with the number of devices found when they are too few; may raise a better message.

        Raises:
          ConfigError: when there are fewer devices than the layouts need, or the backend was started by somebody
            else with too small a thread pool or too few virtual devices.
        """
        needed = max(layout.rank_offset + layout.size for layout in layouts)
        wanted = config.devices or needed
        if wanted < needed:
            raise ConfigError(f"World.devices={wanted}: the layouts use ranks 0-{needed - 1}; set it to {needed} or 0")
        _start_backend(config, wanted)
        devices = jax.devices()
        if len(devices) < wanted:
            if require:
                require(len(devices))
            raise ConfigError(_too_few(config, len(devices), wanted))
        world = cls(devices[:wanted])
        world.warm_up()
        return world

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    @property
    def platform(self) -> str:
        """Platform of the devices, ``cpu`` or ``gpu`` for instance."""
        return self.devices[0].platform

    def submesh(self, layout: Layout, stage: int) -> Submesh:
        """The submesh of pipeline stage ``stage`` of a module with ``layout``."""
        ranks = layout.stage_ranks(stage)
        grid = np.array([self.devices[r] for r in ranks]).reshape(layout.dp, layout.cp, layout.tp)
        return Submesh(ranks, layout, Mesh(grid, AXIS_NAMES))

    def warm_up(self) -> None:
        """A sum over the whole world. On GPU its communicator must exist before those of submeshes.

        Raises:
          RuntimeError: when the sum is wrong.
        """
        ranks = jax.device_put(np.arange(self.size, dtype=np.float32), jax.NamedSharding(self.mesh, PartitionSpec("world")))
        total = jax.jit(
            jax.shard_map(lambda x: lax.psum(x, "world"), mesh=self.mesh, in_specs=PartitionSpec("world"), out_specs=PartitionSpec())
        )(ranks)
        expected = self.size * (self.size - 1) / 2
        if not bool(jnp.all(total == expected)):
            raise RuntimeError(f"warm-up collective over {self.size} devices gave {total}, expected {expected}")


def default_cache_directory() -> Path:
    """``$XDG_CACHE_HOME/mmjax/xla``, or below ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmjax" / "xla"


def _start_backend(config: WorldConfig, devices: int) -> None:
    """Virtual devices, thread pool and compilation cache; nothing here touches a device."""
    threads = THREADS_PER_DEVICE * devices
    if jax_compat.backends_are_initialized():
        if jax.default_backend() == "cpu" and devices > 1 and int(os.environ.get("NPROC", "0")) < threads:
            raise ConfigError(
                f"World.devices={devices}: JAX started before mmjax with too small a thread pool, which can deadlock; "
                f"start Python with NPROC={threads} in the environment or build the World before using JAX"
            )
    else:
        # XLA:CPU sizes its thread pool by NPROC. Queued multi-device programs starve each other in a small one.
        os.environ["NPROC"] = str(max(threads, int(os.environ.get("NPROC") or "0")))
        jax.config.update("jax_num_cpu_devices", devices)
        if config.platform:
            jax.config.update("jax_platforms", config.platform)
    if config.compilation_cache != "none" and not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", config.compilation_cache or str(default_cache_directory()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _too_few(config: WorldConfig, found: int, wanted: int) -> str:
    kind = jax.devices()[0].device_kind
    if jax.default_backend() == "cpu":
        return (
            f"World.devices={wanted}: JAX was already started with {found} CPU device(s); "
            f"restart Python, or set jax_num_cpu_devices={wanted} before using JAX"
        )
    return (
        f"World.devices={wanted}: only {found} {kind} device(s) here; use smaller layouts, "
        f"--gin_file=configs/digits_vlm_one_device.gin for one device, or --gin.World.platform=cpu for virtual devices"
    )
