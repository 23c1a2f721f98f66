"""The programs of a step of a configuration, compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from mmjax.assembly.assembly import Assembly, assemble
from mmjax.assembly.placing import supposed_gpu
from mmjax.attention.blockwise import BLOCK
from mmjax.compile.executables import Compiler, Executable, Report
from mmjax.compile.hlo import Module
from mmjax.compile.model_flops import ModelFlops, stage_flops
from mmjax.compile.rates import H100, Rates
from mmjax.compile.roofline import Work, work_of
from mmjax.compile.targets import TARGETS, Target
from mmjax.data.source import Source
from mmjax.mesh.boundary import Boundary
from mmjax.mesh.shared_out import SharedOut
from mmjax.mesh.spmd import Program
from mmjax.mesh.world import World
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.last_backward import kind_of_op
from mmjax.pipeline.ties import Tie
from mmjax.pipeline.walker import Signature
from mmjax.recipe import Recipe

STEP = "step"
"""Kind of a program that is a whole step."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """One use of a program in a step.

    Attributes:
      program: the program.
      kind: the kind of its op, such as "F" or "unpack"; "B+reduce" and "W+reduce" for those of last ops that reduce
        gradients too (see `last_backward`); `STEP` for a program that is a step.
      name: the stage or edge of the op.
      backward: the direction of an edge's op.
      signature: the buckets whose microbatches it is for; None for all.
      place: the stage or lane that runs it; "" for an edge's programs.
    """

    program: Program
    kind: str
    name: str
    backward: bool = False
    signature: Signature | None = None
    place: str = ""


@dataclass(frozen=True)
class Compiled:
    """A program that was compiled.

    Attributes:
      names: of all programs that are equal, such as ("F llm.1", "F llm.2").
      executable: what XLA made of it.
      rows: positions of its longest row, for the loops of blockwise attention; 0 for a program without rows.
      ranks: ranks of its devices.
      model_flops: what the model needs of it, on a device.
      use: its first use.
      routed: share of the rows of experts' products that hold a token's choice.
    """

    names: tuple[str, ...]
    executable: Executable
    rows: int = 0
    ranks: tuple[int, ...] = ()
    model_flops: ModelFlops = field(default_factory=ModelFlops)
    use: Use | None = None
    routed: float = 1.0

    @property
    def module(self) -> Module:
        """Its instructions."""
        return self.executable.module

    @property
    def temporary_bytes(self) -> int:
        """Bytes that a device needs while it runs, beside arguments and results."""
        return self.executable.temporaries

    def work(self, rates: Rates = H100) -> Work:
        """The work of one run on a device, for rows of one segment under a causal mask.

        Of conditionals the first branch counts: there kernels fit, and all blocks travel.
        """
        blocks = -(-self.rows // BLOCK)
        return work_of(self.module, rates, trips=(blocks + 1) / 2, ranks=self.ranks, routed=self.routed)


class Programs:
    """The programs of a step, each compiled when it is first asked for.

    Attributes:
      recipe: the configuration, with what it leaves to the devices.
      target: the devices.
      fullest: choices of experts that the fullest rank computes over the mean.
      assembly: the run on these devices.
      compiler: compiles the programs.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: Target = TARGETS["h100"],
        *,
        cache: Path | None = None,
        source: Source | None = None,
        compiler: Compiler | None = None,
        fullest: float = 1.0,
    ):
        """Traces the configuration for as many devices as its layouts need.

        Args:
          recipe: the configuration, as ``load_config(["run.gin"])`` gives it.
          target: the devices to compile for.
          cache: the folder where executables are kept; None keeps them in memory alone.
          source: its training samples, where ``open_source(recipe, split="train")`` has opened them already.
          compiler: compiles in place of one of its own, which then knows the programs of several configurations.
          fullest: choices of experts that the fullest rank computes over the mean.

        Raises:
          ConfigError: JAX has no CUDA compiler here, or the configuration is wrong.
        """
        self.target, self.fullest = target, fullest
        self._works: dict[tuple[str, Rates], Work] = {}
        self.compiler = compiler or Compiler(target, cache, deterministic=recipe.train.deterministic)
        world = World(target.devices(recipe.devices))
        device = supposed_gpu(target.memory, target.device_kind, f"an {target.name.upper()}'s ")
        self.assembly: Assembly = assemble(recipe, world=world, source=source, device=device)
        self.recipe = self.assembly.recipe

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """All uses of programs in a step."""
        executor = self.assembly.executor
        if isinstance(executor, Executor):
            return tuple(self._uses(executor))
        shapes = zip(self.assembly.shapes, executor.programs(), strict=True)
        return tuple(Use(program=program, kind=STEP, name=STEP, signature=known) for known, program in shapes)

    def _uses(self, executor: Executor) -> Iterator[Use]:
        placed, graph = executor.placed, executor.schedule.graph
        nodes = {place: node.name for node in graph.stages for place in node.lane_names}
        for (place, signature), programs in executor.stage_programs.items():
            for program in programs.programs:
                kind = program.name.split()[0]
                yield Use(program=program, kind=kind, name=nodes[place], signature=signature, place=place)
        for edge in graph.edges:
            pairs = dict.fromkeys(graph.ends(edge, microbatch) for microbatch in graph.lane_cycle(edge))
            for (name, signature), boundary in executor.boundaries.items():
                if tuple(name.split("->")) in pairs:
                    yield from _transfer_uses(boundary, edge.name, signature)
        for name, tie in placed.ties.items():
            yield from _transfer_uses(tie, name, None)
        for name, stage in placed.stages.items():
            if program := stage.state.prepare_program:
                yield Use(program=program, kind="prepare", name=name)
        for name, gather in placed.lane_gathers.items():
            for program in gather.programs(pulls=graph.stage(name).gather == "pull"):
                yield from (Use(program=program, kind="gather", name=name, backward=way) for way in (False, True))
        for kind, table in (("reduce", executor.reduce_programs), ("update", executor.update_programs)):
            for name, program in table.items():
                yield Use(program=program, kind=kind, name=name)
        if executor.world_norm and executor.world_norm.program:
            yield Use(program=executor.world_norm.program, kind="norm", name="world")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all programs."""
        return tuple(dict.fromkeys(use.program.name for use in self.uses))

    def compiled(self, name: str) -> Compiled:
        """The program of this name, of the first bucket."""
        for use in self.uses:
            if use.program.name == name:
                return self.of(use)
        raise KeyError(f"program {name!r}: there is none; use one of {', '.join(self.names)}")

    def executable(self, use: Use) -> Executable:
        """The executable of a use's program, compiled at the first call."""
        return self.compiler(use.program)

    def of(self, use: Use) -> Compiled:
        """The program of a use; equal ones are compiled once."""
        return self._compiled([use])

    def work(self, use: Use, rates: Rates) -> Work:
        """``Compiled.work`` of a use's program; equal programs are read once."""
        key = self.compiler.key(use.program), rates
        if key not in self._works:
            self._works[key] = self.of(use).work(rates)
        return self._works[key]

    def distinct(self, report: Report | None = None) -> list[Compiled]:
        """Every program, equal ones once, all compiled in parallel; see ``Compiler.all`` for ``report``."""
        self.compiler.all([use.program for use in self.uses], report)
        groups: dict[str, list[Use]] = {}
        for use in self.uses:
            groups.setdefault(self.compiler.key(use.program), []).append(use)
        return [self._compiled(group) for group in groups.values()]

    def _compiled(self, uses: Sequence[Use]) -> Compiled:
        first = uses[0]
        names = tuple(dict.fromkeys(use.program.name for use in uses))
        ranks = self.ranks_of(first.program)
        rows = self._rows(first)
        executable, flops = self.compiler(first.program), self._model_flops(first)
        return Compiled(names, executable, rows, ranks, flops, first, self._routed(first))

    def ranks_of(self, program: Program) -> tuple[int, ...]:
        """Ranks of a program's devices, in its order."""
        mesh = jax.tree.leaves(program.avals)[0].sharding.mesh
        return tuple(self._rank_of[device] for device in mesh.devices.flat)

    @cached_property
    def _rank_of(self) -> dict[Any, int]:
        return {device: rank for rank, device in enumerate(self.assembly.world.devices)}

    def _rows(self, use: Use) -> int:
        if use.signature is None or not (use.place or use.kind == STEP):
            return 0
        inputs = self.assembly.shapes[use.signature]
        modules = [self.assembly.placed.places[use.place].model.module] if use.place else list(inputs)
        return max(inputs[module]["segments"].shape[1] for module in modules)

    def _routed(self, use: Use) -> float:
        """The share of rows of experts' products that hold a choice, on the rank with the most tokens."""
        placed, shares = self.assembly.placed, [1.0]
        for stage in [placed.places[use.place]] if use.place else list(placed.places.values()):
            module, layout = placed.model.nodes[stage.model.module].module, stage.submesh.layout
            all_to_all = layout.ep_way == "all-to-all"
            shares.append(self.fullest * module.routed_share(layout.expert_ranks, all_to_all=all_to_all))
        return min(shares)

    def _model_flops(self, use: Use) -> ModelFlops:
        """Model FLOPs of a program on a device."""
        if use.signature is None or not (use.place or use.kind == STEP):
            return ModelFlops()
        placed, inputs = self.assembly.placed, self.assembly.shapes[use.signature]
        places = [use.place] if use.place else list(placed.places)
        by_place = [stage_flops(self.recipe, placed.model, placed.places[place], inputs) for place in places]
        if use.kind == STEP:
            step_flops = sum((flops[letter] for flops in by_place for letter in "FBW"), start=ModelFlops())
            return step_flops.times(self.recipe.train.microbatches)
        flops, split = by_place[0], self.assembly.schedule.graph.stage(use.name).split
        kind = kind_of_op(use.kind)
        return flops["B"] + flops["W"] if kind == "B" and not split else flops[kind]


def _transfer_uses(both: Boundary | SharedOut | Tie, edge: str, signature: Signature | None) -> Iterator[Use]:
    for backward, transfer in ((False, both.forward), (True, both.backward)):
        for program in transfer.programs():
            kind = next(word for word in program.name.split() if word in ("pack", "move", "unpack"))
            yield Use(program=program, kind=kind, name=edge, backward=backward, signature=signature)
