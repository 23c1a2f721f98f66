"""The settings of JAX and XLA on GPUs: all that mmjax makes are here. Imports no JAX.

They are environment variables, which JAX reads when it starts a GPU and which must be set before. What the user has
set stays. The reasons for each, and for what is left unset, are in docs/guide/gpus.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from mmjax.configurable import ConfigError

MEMORY_SHARE = 0.92
"""The share of a GPU's memory that JAX takes; the rest is for CUDA, NCCL and cuDNN, which allocate beside it."""
JAX_MEMORY_SHARE = 0.75
"""The share that JAX takes by itself."""
H100, H100_MEMORY = "NVIDIA H100 80GB HBM3", 80e9
"""The GPU that forecasts suppose where none is here: its name, as JAX has it, and its bytes."""
FRACTION, OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The variable of this share, and its deprecated name. JAX refuses to start if both are set."""
TRITON = "--xla_gpu_enable_triton_gemm=false"
"""Products in cuBLASLt, which can add to an accumulator, and none in kernels of Triton."""
NO_MERGING = "--xla_gpu_dot_merger_threshold_mb=0"
"""Products with one input stay separate: merging them concatenates their weights at every call."""
FLAGS = (TRITON, NO_MERGING)
"""XLA's flags of every run on GPUs."""
DETERMINISTIC_FLAGS = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=0", TRITON)
"""XLA's flags of a deterministic run on GPUs.

The first refuses or replaces kernels whose result depends on the order of threads. The second switches off the choice
by timing among kernels that round differently; products that nobody tunes are slow in Triton's default block sizes.
"""
CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""JAX's plugins for NVIDIA's GPUs, by the names of their modules."""
_PLUGINS = (*CUDA_PLUGINS, "jax_rocm7_plugin", "jax_rocm60_plugin")
_DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_GPU_PLATFORMS = ("cuda", "gpu", "rocm")
_NO = ("false", "False", "0")
_logger = logging.getLogger(__name__)


def will_start(platforms: str = "") -> bool:
    """Whether JAX's first platform is going to be a GPU.

    Args:
      platforms: names in JAX's order, such as "cuda" or "cuda,cpu"; "" takes ``JAX_PLATFORMS``, and without it a GPU
        is started if there is one here and a plugin for it is installed.
    """
    if platforms := platforms or os.environ.get("JAX_PLATFORMS", ""):
        return platforms.split(",")[0].strip() in _GPU_PLATFORMS
    return any(map(find_spec, _PLUGINS)) and any(Path(file).exists() for file in _DEVICE_FILES)


def configure(*, deterministic: bool = False) -> None:
    """Sets the environment variables; to be called before JAX starts a GPU.

    deterministic: sets ``DETERMINISTIC_FLAGS``, also where the user's flags differ.
    """
    os.environ.update(environment(os.environ, deterministic=deterministic))


def environment(variables: Mapping[str, str], *, deterministic: bool = False) -> dict[str, str]:
    """The variables that ``configure`` sets, with their values, such as {"XLA_CLIENT_MEM_FRACTION": "0.92"}.

    Args:
      variables: the environment, such as ``os.environ``.
      deterministic: as for ``configure``.
    """
    added = {}
    if missing := missing_flags(variables, deterministic=deterministic):
        added["XLA_FLAGS"] = " ".join(filter(None, [_flags_text(variables), *missing]))
    if _takes_default_share(variables):
        added[FRACTION] = str(MEMORY_SHARE)
    return added


def missing_flags(variables: Mapping[str, str], *, deterministic: bool = False) -> list[str]:
    """The flags that XLA_FLAGS lacks: those of ``FLAGS`` whose name is not there, with any value.

    Args:
      variables: the environment.
      deterministic: puts those of ``DETERMINISTIC_FLAGS`` that are not in force before them.
    """
    forced = _not_deterministic(variables) if deterministic else []
    there = {name_of(flag) for flag in (*_flags_text(variables).split(), *forced)}
    return [*forced, *(flag for flag in FLAGS if name_of(flag) not in there)]


def _not_deterministic(variables: Mapping[str, str]) -> list[str]:
    """Those of ``DETERMINISTIC_FLAGS`` that are not in force: a name's last value counts."""
    last = {name_of(flag): flag for flag in _flags_text(variables).split()}
    return [flag for flag in DETERMINISTIC_FLAGS if last.get(name_of(flag)) != flag]


def memory_share(variables: Mapping[str, str] | None = None) -> float:
    """The share of a GPU's memory that arrays and temporaries of a run may take, in (0, 1].

    ``variables``: the environment in which the run starts; this process's by default.

    Raises:
      ConfigError: the environment names a share that is none.
    """
    variables = os.environ if variables is None else variables
    return _share_in_force({**variables, **environment(variables)})


def describe(variables: Mapping[str, str] | None = None) -> str:
    """One line about the settings in force.

    Such as "GPUs: 92 % of the memory, XLA_FLAGS=--xla_gpu_enable_triton_gemm=false …".

    ``variables``: the environment in which JAX has started; this process's by default.

    Raises:
      ConfigError: the environment names a share of the memory that is none.
    """
    variables = os.environ if variables is None else variables
    share = f"{100 * _share_in_force(variables):.3g} % of the memory"
    flags = _flags_text(variables).split()
    return f"GPUs: {share}, XLA_FLAGS={' '.join(flags)}" if flags else f"GPUs: {share}, no XLA_FLAGS"


def describe_planned(*, deterministic: bool = False) -> str:
    """``describe`` for a run that this process's environment starts. ``deterministic``: as for ``configure``."""
    return describe({**os.environ, **environment(os.environ, deterministic=deterministic)})


def require_deterministic() -> None:
    """Requires that a GPU which JAX has started has ``DETERMINISTIC_FLAGS``.

    Raises:
      ConfigError: some of them are not in force.
    """
    if missing := _not_deterministic(os.environ):
        raise ConfigError(
            f"Train.deterministic=True: JAX started before mmjax and without {' '.join(missing)}; "
            f"start Python with XLA_FLAGS='{' '.join(DETERMINISTIC_FLAGS)}' or build the World before using JAX"
        )


def warn_of_missing() -> None:
    """Warns, on the log, of settings that a GPU lacks which JAX has started before mmjax could make them."""
    if missing := environment(os.environ):
        losses = {FRACTION: "a quarter of the memory stays unused", "XLA_FLAGS": "sums of gradients take memory passes"}
        values = " ".join(f"{name}={value!r}" for name, value in missing.items())
        reason = " and ".join(losses[name] for name in missing)
        fix = f"start Python with {values} or build the World before using JAX"
        _logger.warning("JAX started the GPU before mmjax: %s; %s", reason, fix)


def name_of(flag: str) -> str:
    """The name of a flag of XLA, such as "--xla_gpu_autotune_level" of "--xla_gpu_autotune_level=0"."""
    return flag.partition("=")[0]


def _flags_text(variables: Mapping[str, str]) -> str:
    """The flags in XLA_FLAGS; where it names a file instead, the flags in that file."""
    text = variables.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("-") and Path(text).is_file():
        return Path(text).read_text(encoding="utf-8").strip()
    return text


def _takes_default_share(variables: Mapping[str, str]) -> bool:
    """Whether mmjax chooses the share of the memory: the user has named none, and JAX allocates in advance."""
    named = variables.get(FRACTION) or variables.get(OLD_FRACTION)
    on_demand = variables.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") in _NO or _allocates_one_by_one(variables)
    return not named and not on_demand


def _share_in_force(variables: Mapping[str, str]) -> float:
    for name in (FRACTION, OLD_FRACTION):
        if text := variables.get(name):
            try:
                share = float(text)
            except ValueError:
                share = 0.0
            if not share > 0:
                raise ConfigError(f"{name}={text!r}: must be a number above 0, such as {MEMORY_SHARE}")
            return min(share, 1.0)  # beyond 1 it is the host's memory
    return 1.0 if _allocates_one_by_one(variables) else JAX_MEMORY_SHARE


def _allocates_one_by_one(variables: Mapping[str, str]) -> bool:
    return variables.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform"
