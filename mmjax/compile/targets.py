"""The GPUs that programs can be compiled for: their descriptions for XLA, and rates for a roofline.

The descriptions are of datasheets and of CUDA's limits for a compute capability. The rates are assumptions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from mmjax.compile.rates import H100, Rates
from mmjax.configurable import ConfigError, suggest
from mmjax.mesh.gpu import CUDA_PLUGINS
from mmjax.planner.accelerators import Accelerator, accelerator

_LIMITS = """
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
"""
_HOPPER = """
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98  cuda_compute_capability { major: 9 }
  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472  l2_cache_size: 52428800
"""
_AMPERE = """
  core_count: 108  fpus_per_core: 64  clock_rate_ghz: 1.41  cuda_compute_capability { major: 8 }
  shared_memory_per_block_optin: 166912  shared_memory_per_core: 167936  l2_cache_size: 41943040
"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A GPU to compile for.

    Attributes:
      name: the name in `TARGETS`, such as "h100".
      device_kind: the name that JAX gives such a device.
      chip: its cores, as text of XLA's GpuDeviceInfoProto.
      memory: bytes of its memory, as CUDA sees them.
      bandwidth: bytes per second of its memory, by the datasheet.
      rates: what a roofline takes.
      fast_rates: a second set, of programs that come nearer to the datasheet, shown beside.
    """

    name: str
    device_kind: str
    chip: str
    memory: int
    bandwidth: int
    rates: Rates
    fast_rates: Rates

    @property
    def datasheet(self) -> Accelerator:
        """Peaks by the datasheet; MFU is a share of them."""
        return accelerator(self.name)

    @property
    def text(self) -> str:
        """The description for XLA, a text of its GpuTargetConfigProto."""
        sizes = f"memory_bandwidth: {self.bandwidth}  device_memory_size: {self.memory}"
        return (
            f'gpu_device_info {{\n{_LIMITS}{self.chip}  {sizes}\n}}\nplatform_name: "CUDA"\n'
            "dnn_version_info { major: 9 minor: 10 patch: 0 }\n"
            f'device_description_str: "{self.device_kind}"\n'
        )

    def devices(self, count: int) -> list[Any]:
        """So many devices of one process, to compile for.

        Raises:
          ConfigError: JAX has no CUDA compiler here.
        """
        import jax
        from jax.experimental import topologies

        from mmjax import jax_compat

        require_compiler()
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        if not jax_compat.backends_are_initialized():
            jax.config.update("jax_platforms", "cpu")  # what a host of the run would compute; no GPU is looked for
        jax.config.update("jax_enable_compilation_cache", False)  # what is found there tells no buffers
        described = topologies.get_topology_desc(
            self.name, platform="cuda", topology=f"1x1x{count}", target_config=self.text
        )
        return list(described.devices)[:count]


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "h100": Target(
            name="h100",
            device_kind="NVIDIA H100 80GB HBM3",
            chip=_HOPPER,
            memory=84_942_979_072,
            bandwidth=3_352_320_000_000,
            rates=H100,
            fast_rates=Rates(products=700e12, grouped=500e12, forward=600e12, backward=480e12, memory=3.0e12),
        ),
        "h200": Target(
            name="h200",
            device_kind="NVIDIA H200",
            chip=_HOPPER,
            memory=150_110_000_000,
            bandwidth=4_800_000_000_000,
            rates=Rates(memory=4.15e12),
            fast_rates=Rates(products=700e12, grouped=500e12, forward=600e12, backward=480e12, memory=4.3e12),
        ),
        "a100": Target(
            name="a100",
            device_kind="NVIDIA A100-SXM4-80GB",
            chip=_AMPERE,
            memory=84_965_720_064,
            bandwidth=2_039_000_000_000,
            rates=Rates(
                products=190e12,
                products32=75e12,
                grouped=120e12,
                forward=160e12,
                backward=130e12,
                memory=1.75e12,
                link=240e9,
                network=20e9,
            ),
            fast_rates=Rates(
                products=220e12,
                products32=80e12,
                grouped=150e12,
                forward=190e12,
                backward=150e12,
                memory=1.83e12,
                link=240e9,
                network=20e9,
            ),
        ),
    }
)
"""By the name that users give."""


def target(name: str, setting: str = "for") -> Target:
    """The target of a name in `TARGETS`, in small or capital letters.

    setting: the flag that names it, for the message.

    Raises:
      ConfigError: there is none of this name.
    """
    if name.lower() not in TARGETS:
        raise ConfigError(f"--{setting}={name}: nothing compiles for it; {suggest(name.lower(), TARGETS)}")
    return TARGETS[name.lower()]


def has_compiler() -> bool:
    """Whether JAX can compile for CUDA here; no GPU is needed for that."""
    return any(map(find_spec, CUDA_PLUGINS))


def require_compiler() -> None:
    """Requires that JAX can compile for CUDA here.

    Raises:
      ConfigError: it cannot.
    """
    if not has_compiler():
        raise ConfigError("jax has no compiler for CUDA here: pip install 'jax[cuda12]'; no GPU is needed")
