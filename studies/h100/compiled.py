"""The programs of a configuration, compiled for H100s without one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from mmjax import jax_compat
from mmjax.assembly.assembly import Assembly, assemble
from mmjax.attention.blockwise import BLOCK
from mmjax.attention.row_runs import MAX_PACKED_RUNS, MAX_RUNS
from mmjax.configurable import ConfigError
from mmjax.mesh.spmd import Program
from mmjax.mesh.world import World
from mmjax.pipeline.executor import Executor
from mmjax.recipe import Recipe
from mmjax.schedule.simulate import Costs, simulate
from studies.h100.hlo import Module
from studies.h100.roofline import H100, Rates, Work, work_of

TARGET = """
gpu_device_info {
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98  threads_per_warp: 32
  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  device_memory_size: 84942979072
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""What XLA has to know of an H100, by its datasheet and CUDA's limits for compute capability 9.0."""
OPTIONS: Mapping[str, Any] = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Nothing can be tuned without a device; products go to cuBLAS, since untuned ones of Triton are slow."""


def devices(count: int) -> list[Any]:
    """So many H100s of one node, to compile for.

    Raises:
      ConfigError: JAX has no CUDA compiler here.
    """
    if not (find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin")):
        raise ConfigError("jax has no compiler for CUDA here: pip install 'jax[cuda12]'; no GPU is needed")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if not jax_compat.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")  # what a host of the run would compute; no GPU is looked for
    found = topologies.get_topology_desc("h100", platform="cuda", topology=f"1x1x{count}", target_config=TARGET)
    return list(found.devices)[:count]


@dataclass(frozen=True)
class Compiled:
    """A program that was compiled.

    Attributes:
      name: such as "F llm.1".
      module: its text.
      temporary_bytes: what a device needs while it runs, beside arguments and results.
      rows: queries of its longest row, for the loops of blockwise attention.
    """

    name: str
    module: Module
    temporary_bytes: int
    rows: int

    def work(self, rates: Rates = H100) -> Work:
        """What one run does on a device, for rows of one segment under a causal mask.

        Of conditionals the first branch counts: there kernels fit, and all blocks travel.
        """
        blocks = -(-self.rows // BLOCK)
        return work_of(self.module, rates, trips=(blocks + 1) / 2)


class Programs:
    """Forward, backward and weights' programs of a configuration's stages."""

    def __init__(self, recipe: Recipe, *, packed: bool = False):
        """Traces the configuration for as many H100s as its layouts need.

        Args:
          recipe: the configuration.
          packed: whether programs are those of rows of up to 16 runs, also where the data have fewer.

        Raises:
          ConfigError: JAX has no CUDA compiler here, or the configuration is wrong.
        """
        train = replace(recipe.train, lowering="ops")  # a program for each op, also where one would do
        recipe = replace(recipe, world=replace(recipe.world, transport="device_put"), train=train)
        self.recipe, self._made = recipe, dict[str, tuple[Module, int]]()
        self.assembly: Assembly = assemble(recipe, world=World(devices(recipe.devices)))
        if packed:
            self.assembly = _with_packed_rows(self.assembly)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all programs of stages."""
        return tuple(dict.fromkeys(program.name for _, _, program, _ in self._stages()))

    def compiled(self, name: str) -> Compiled:
        """The program of this name, of the first bucket; equal ones are compiled once."""
        for _, own, program, inputs in self._stages():
            if program.name == name:
                return self._compiled(program, inputs[own.split(".")[0]])
        raise KeyError(f"program {name!r}: there is none; use one of {', '.join(self.names)}")

    def _compiled(self, program: Program, inputs: Mapping[str, Any]) -> Compiled:
        text = program.lowered_text()
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in self._made:
            made = program.compiled_with(OPTIONS)
            self._made[key] = Module.of(made.as_text()), int(made.memory_analysis().temp_size_in_bytes)
        return Compiled(program.name, *self._made[key], inputs["segments"].shape[1])

    def _stages(self) -> Iterator[tuple[str, str, Program, Any]]:
        """Kind, place, program and shapes of inputs."""
        executor = self.assembly.executor
        assert isinstance(executor, Executor)
        for (place, signature), programs in executor.stage_programs.items():
            for program in programs.programs:
                yield program.name[0], place, program, self.assembly.shapes[signature]

    def step(self, rates: Rates = H100, *, hidden: bool = False) -> float:
        """Predicted seconds of a step's F, B and W: moves, reduction and update are left out.

        Args:
          rates: of the devices.
          hidden: whether all collectives lie beside computations, and not those alone that programs have there.
        """
        seconds: dict[tuple[str, str, bool], float] = {}
        by_place = {place: node.name for node in self.assembly.schedule.graph.stages for place in node.lane_names}
        for kind, place, program, inputs in self._stages():
            work = self._compiled(program, inputs[place.split(".")[0]]).work(rates)
            key = (kind, by_place[place], False)
            seconds[key] = max(seconds.get(key, 0.0), work.hidden if hidden else work.ordered)
        schedule = self.assembly.schedule
        return simulate(schedule, Costs(seconds=seconds).split_as(schedule.graph)).makespan


def _with_packed_rows(parts: Assembly) -> Assembly:
    """The same run with programs for rows of up to 16 runs, of the modules whose kernels differ by it."""
    shapes = {
        signature: {
            module: {**arrays, MAX_RUNS: MAX_PACKED_RUNS} if MAX_RUNS in arrays else arrays
            for module, arrays in inputs.items()
        }
        for signature, inputs in parts.shapes.items()
    }
    return replace(parts, shapes=shapes, executor=Executor(parts.placed, parts.schedule, shapes))
