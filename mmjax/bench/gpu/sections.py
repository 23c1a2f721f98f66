"""The sections of ``bench gpu`` in the order in which they run, the most valuable first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HOME = "mmjax.bench.gpu"
MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""JAX's share of the device's memory, taken with plain allocations. Above 1 it would be managed memory."""
XLA_FLAGS = "XLA_FLAGS"


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section: one process of ``bench gpu``.

    Attributes:
      name: its key in the results.
      where: "module:function"; the function is called with a ``Job``.
      seconds: reserved for it; seconds that earlier sections did not use come on top.
      doc: one sentence for ``--help``.
      needs: import names of packages; the section is left out if one is not installed.
      environment: variables of its process.
    """

    name: str
    where: str
    seconds: float
    doc: str
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


MACHINE = Section(
    name="machine", where=f"{HOME}.machine:describe", seconds=30, doc="The device, the host, packages and flags."
)
"""Runs before all others."""
SECTIONS = (
    Section(
        name="vlm",
        where=f"{HOME}.vlm:run",
        seconds=45,
        doc="A step of CLIP-L/14-336 and four Vicuna-7B layers in one program, unrolled: time, MFU, memory.",
        environment={MEMORY: "0.92"},
    ),
    Section(
        name="parity",
        where=f"{HOME}.parity:run",
        seconds=65,
        doc="Three models on one device, fp32 and bf16, beside what the dense reference gave on a CPU.",
        environment={XLA_FLAGS: "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"},
    ),
    Section(
        name="vlm_profile",
        where=f"{HOME}.vlm:run_profile",
        seconds=40,
        doc="The step of section vlm without command buffers: the same, and time by kernel and source line.",
        environment={MEMORY: "0.92", XLA_FLAGS: "--xla_gpu_enable_command_buffer="},
    ),
    Section(
        name="vlm_stacked",
        where=f"{HOME}.vlm:run_stacked",
        seconds=40,
        doc="The step of section vlm with layers in a stack, all recomputed: time, MFU, memory.",
        environment={MEMORY: "0.92"},
    ),
    Section(
        name="vlm_ops",
        where=f"{HOME}.vlm:run_ops",
        seconds=30,
        doc="The step of section vlm as a program per op: time, the host's time an op, time by op and module.",
        environment={MEMORY: "0.92"},
    ),
    Section(
        name="vlm_full",
        where=f"{HOME}.vlm:run_full",
        seconds=40,
        doc="The step of section vlm with as many layers as fit: time, MFU, memory.",
        environment={MEMORY: "0.92"},
    ),
    Section(
        name="attention",
        where=f"{HOME}.attention:run",
        seconds=45,
        doc="The ways of attention side by side, forward and backward: values and times.",
    ),
    Section(
        name="experts",
        where=f"{HOME}.experts:run",
        seconds=45,
        doc="Grouped products of experts by kernels and by XLA, beside a dense one: values and times.",
    ),
    Section(
        name="torch",
        where=f"{HOME}.torch_layers:run",
        seconds=40,
        doc="The same layers in PyTorch, compiled, and FlexAttention: values and times.",
        needs=("torch",),
        environment={MEMORY: "0.4"},
    ),
    Section(
        name="digits",
        where=f"{HOME}.digits:run",
        seconds=25,
        doc="50 steps of configs/digits_vlm_one_device.gin beside the losses of a CPU.",
        needs=("grain",),
    ),
    Section(
        name="tests",
        where=f"{HOME}.marked:run",
        seconds=25,
        doc="The tests that want an accelerator: pytest -m gpu.",
        needs=("pytest",),
    ),
    Section(
        name="offload",
        where=f"{HOME}.offload:run",
        seconds=20,
        doc="Arrays to pinned host memory and back, and training with the optimizer offloaded: bit for bit.",
    ),
    Section(
        name="pulls",
        where=f"{HOME}.pulls:run",
        seconds=10,
        doc="Copies as between processes, through the host's memory and a socket: bit for bit, and their rate.",
    ),
    Section(
        name="deterministic",
        where=f"{HOME}.deterministic:run",
        seconds=30,
        doc="Train.deterministic in two processes: bit for bit.",
    ),
)
