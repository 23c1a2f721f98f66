"""The world: all devices of a run in one fixed order, and the settings that must precede JAX's backend."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from mmjax import jax_compat
from mmjax.configurable import ConfigError
from mmjax.mesh import gpu
from mmjax.mesh.config import WorldConfig
from mmjax.mesh.layout import Layout
from mmjax.mesh.processes import barrier, gather_texts
from mmjax.mesh.spmd import to_devices
from mmjax.mesh.submesh import Submesh

Device: TypeAlias = Any  # jax.Device is a variable to type checkers

THREADS_PER_DEVICE = 4
_number = itertools.count()
"""Numbers the worlds of a process; all processes make the same ones."""


class World:
    """All devices of a run, by rank.

    Attributes:
      devices: ``jax.Device`` by rank: those of process 0 first, then those of process 1, and so on.
      local_ranks: ranks whose devices are this process's own.
      processes: number of processes that own the devices.
      mesh: a mesh of all devices with one axis, "world".
    """

    def __init__(self, devices: Iterable[Device]):
        """For these devices, rank by rank; starts and runs nothing."""
        self.devices: tuple[Device, ...] = tuple(devices)
        self.mesh = Mesh(np.array(self.devices), ("world",))
        me = jax_compat.process_index()
        self.local_ranks = frozenset(rank for rank, d in enumerate(self.devices) if d.process_index == me)
        self.processes = len({device.process_index for device in self.devices})

    @classmethod
    def create(
        cls,
        config: WorldConfig,
        layouts: Iterable[Layout],
        require: Callable[[int], None] | None = None,
        deterministic: bool = False,
    ) -> World:
        """Starts the backend with the devices that the layouts need, and tries a sum over all of them.

        Args:
          config: the devices to use.
          layouts: layouts of all modules.
          require: called with the number of accelerators here when they are too few; may raise a better error.
          deterministic: start a GPU with ``gpu.DETERMINISTIC_FLAGS``. A CPU is deterministic without them.

        Raises:
          ConfigError: when the platform is missing, has fewer devices than the layouts need, or was started by
            other code with too small a thread pool, too few virtual devices or without the deterministic flags.
        """
        layouts = tuple(layouts)
        needed = max(layout.rank_offset + layout.size for layout in layouts)
        wanted = config.devices or needed
        if wanted < needed:
            raise ConfigError(f"World.devices={wanted}: the layouts use ranks 0-{needed - 1}; set it to {needed} or 0")
        if not jax_compat.backends_are_initialized():
            _configure_backend(config, wanted)
            if gpu.will_start(jax.config.values["jax_platforms"] or ""):
                gpu.configure(deterministic=deterministic)
        _configure_cache(config.compilation_cache)
        devices = _devices(config)
        if len(devices) < wanted:
            if require and devices[0].platform != "cpu":
                require(len(devices))
            raise ConfigError(_too_few(devices, wanted))
        _check_processes(devices[:wanted], layouts)
        world = cls(devices[:wanted])
        if world.platform == "cpu":
            _check_threads(len(world.local_ranks))
        elif world.platform == "gpu":
            if deterministic:
                gpu.require_deterministic()
            gpu.warn_of_missing()
        # Gloo waits 30 s for a process at its first collective; one that prepares data may take longer to come here.
        barrier(f"world/{next(_number)}", range(jax_compat.process_count()))
        world.warm_up()
        return world

    @classmethod
    def planned(cls, size: int, platform: str = "cpu", device_kind: str = "planned") -> World:
        """A world of planned devices: its programs can be traced, but neither compiled nor run.

        Args:
          size: number of devices.
          platform, device_kind: as ``jax.Device`` has them, such as "gpu" and "NVIDIA H100 80GB HBM3".
        """
        return cls(jax_compat.PlannedDevice(rank, platform, device_kind) for rank in range(size))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    @property
    def platform(self) -> str:
        """Platform of the devices, ``cpu`` or ``gpu`` for instance."""
        return self.devices[0].platform

    @cached_property
    def device_memory(self) -> int:
        """Bytes that JAX may take of a GPU, the least of all processes, which all call this; 0 where it is unknown.

        It is unknown of planned devices, of those to compile for, and of CPUs.
        """
        if self.platform != "gpu":
            return 0
        local = [device for device in self.devices if device in jax.local_devices()]
        limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in local]
        known = [int(text) for text in gather_texts(str(min(limits, default=0))) if int(text)]
        return min(known, default=0)

    def submesh(self, layout: Layout, stage: int) -> Submesh:
        """The submesh of pipeline stage ``stage`` of a module with ``layout``. Raises IndexError for another stage."""
        ranks = layout.stage_ranks(stage)
        return Submesh.of(layout, ranks, [self.devices[r] for r in ranks])

    def warm_up(self) -> None:
        """Sums over the whole world. On GPU its communicator must exist before those of submeshes.

        Raises:
          RuntimeError: when the sum is wrong.
        """
        total = self._sum(np.arange(self.size, dtype=np.float32))
        expected = self.size * (self.size - 1) / 2
        if not all(np.asarray(shard.data)[0] == expected for shard in total.addressable_shards):
            raise RuntimeError(f"warm-up collective over {self.size} devices gave {total}, expected {expected}")

    def total(self, value: float) -> jax.Array:
        """Sum of the processes' values, each counted once per rank of its process, as an fp32 array ``[1]``.

        It is dispatched, not waited for. All processes call it.
        """
        return self._sum(np.full(self.size, value, np.float32))

    def _sum(self, values: np.ndarray) -> jax.Array:
        return self._summing(to_devices(values, jax.NamedSharding(self.mesh, PartitionSpec("world"))))

    @cached_property
    def _summing(self) -> Any:
        def add(x: jax.Array) -> jax.Array:
            return lax.psum(x, "world")

        spec = PartitionSpec("world")
        return jax.jit(jax.shard_map(add, mesh=self.mesh, in_specs=spec, out_specs=PartitionSpec()))


def default_cache_directory() -> Path:
    """The folder of compiled programs: ``$XDG_CACHE_HOME/mmjax/xla``, or ``~/.cache/mmjax/xla`` if that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmjax" / "xla"


def _configure_backend(config: WorldConfig, devices: int) -> None:
    """Sets virtual devices, thread pool and platform; touches no device."""
    requested, processes = jax.config.values["jax_num_cpu_devices"], jax_compat.process_count()
    cpu_devices = max(devices, requested)  # code that has set more devices than this world needs may build a larger one
    if processes > 1:
        cpu_devices = requested if requested > 0 else -(-devices // processes)
    # XLA:CPU sizes its thread pool by NPROC. Queued multi-device programs starve each other in a small one.
    os.environ["NPROC"] = str(max(THREADS_PER_DEVICE * cpu_devices, _threads()))
    jax.config.update("jax_num_cpu_devices", cpu_devices)
    if config.platform:
        jax.config.update("jax_platforms", config.platform)


def _configure_cache(folder: str) -> None:
    """Sets the folder of compiled programs; ``folder``, unless empty, wins over JAX's own setting."""
    if folder == "none":
        jax.config.update("jax_enable_compilation_cache", False)
    elif folder or not jax.config.values["jax_compilation_cache_dir"]:
        path = Path(folder).expanduser() if folder else default_cache_directory()
        jax.config.update("jax_compilation_cache_dir", str(path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _devices(config: WorldConfig) -> list[Device]:
    try:
        return sorted(jax.devices(config.platform or None), key=lambda device: (device.process_index, device.id))
    except (RuntimeError, AssertionError) as error:  # JAX asserts where a platform's plugin is not even installed
        platform = config.platform or jax.config.values["jax_platforms"]
        reason = (str(error) or "JAX finds no such device").splitlines()[0]
        raise ConfigError(f"World.platform={platform!r}: {reason}; use 'cpu' for virtual devices") from error


def _threads() -> int:
    text = os.environ.get("NPROC", "")
    return int(text) if text.isdecimal() else 0


def _check_threads(devices: int) -> None:
    needed = THREADS_PER_DEVICE * devices
    if devices > 1 and _threads() < needed:
        raise ConfigError(
            f"World.devices={devices}: JAX started before mmjax with too small a thread pool, which can deadlock; "
            f"start Python with NPROC={needed} in the environment or build the World before using JAX"
        )


def _check_processes(devices: list[Device], layouts: Iterable[Layout]) -> None:
    """Raises a ConfigError where no module has a rank in some process."""
    count = jax_compat.process_count()
    used = {rank for layout in layouts for rank in layout.ranks}
    busy = {device.process_index for rank, device in enumerate(devices) if rank in used}
    if idle := sorted(set(range(count)) - busy):
        raise ConfigError(
            f"--num_processes={count}: no module has a rank in process {idle[0]}; use {len(busy)} processes, "
            f"or fewer devices in each"
        )


def _too_few(devices: list[Device], wanted: int) -> str:
    if (count := jax_compat.process_count()) > 1:
        each = len(devices) // count
        return (
            f"World.devices={wanted}: {count} processes of {each} device(s) have {len(devices)}; use "
            f"{-(-wanted // count)} devices a process, or {-(-wanted // each)} processes"
        )
    if devices[0].platform == "cpu":
        return (
            f"World.devices={wanted}: JAX was already started with {len(devices)} CPU device(s); "
            f"restart Python and build the World, or set jax_num_cpu_devices={wanted}, before using JAX"
        )
    return (
        f"World.devices={wanted}: only {len(devices)} {devices[0].device_kind} device(s) here; use smaller layouts, "
        f"--gin_file=digits_vlm_one_device for one device, or --gin.World.platform=cpu for virtual devices"
    )
