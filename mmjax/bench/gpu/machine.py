"""The machine: the device, the host, packages and XLA's flags."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

from mmjax.bench.gpu.job import Job

PACKAGES = {
    "jax": "jax", "jaxlib": "jaxlib", "jax-cuda13-plugin": "jax_cuda13_plugin", "nvidia-cudnn-cu13": "",
    "jax-cuda12-plugin": "jax_cuda12_plugin", "nvidia-cudnn-cu12": "", "numpy": "numpy", "flax": "flax",
    "optax": "optax", "orbax-checkpoint": "orbax.checkpoint", "gin-config": "gin",
    "grain": "grain", "array-record": "array_record", "cvxpy": "cvxpy", "pyarrow": "pyarrow", "pillow": "PIL",
    "matplotlib": "matplotlib", "torch": "torch", "triton": "triton",
    "transformers": "transformers", "pytest": "pytest",
}  # fmt: skip
"""Import name by distribution; "" for a distribution that has no module to import."""
GIB = 2**30


def describe(job: Job) -> None:
    """Notes the host and packages, then JAX's devices ("platform", "device", …), which come last since JAX may fail."""
    packages = {name: installed for name in PACKAGES if (installed := _installed(name))}
    missing = [name for name, module in PACKAGES.items() if module and not _is_there(module)]
    job.note(
        python=platform.python_version(),
        system=platform.platform(),
        cores=len(os.sched_getaffinity(0)),
        packages=packages,
        missing=[name for name in missing if not name.startswith("jax-cuda")],
        nvidia_smi=_nvidia_smi(),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        environment={name: value for name, value in os.environ.items() if name.startswith(("XLA_", "JAX_", "NCCL_"))},
    )
    import jax
    from jax.extend.backend import get_backend

    devices = jax.devices()
    memory_limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    job.note(
        platform=devices[0].platform,
        device=devices[0].device_kind,
        devices=len(devices),
        backend=get_backend().platform_version,
        memory_gib=memory_limit and round(memory_limit / GIB, 1),
    )


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _nvidia_smi() -> list[str]:
    """A line for each card: name, memory, driver, and the limits that it runs under."""
    if not shutil.which("nvidia-smi"):
        return []
    query = "name,memory.total,driver_version,power.limit,clocks.max.sm"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]
