"""The common part of executors whose step is one jitted program, one per combination of buckets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from mmjax.mesh.spmd import Program, to_devices
from mmjax.pipeline.compile import compile_all
from mmjax.pipeline.ends import Ends
from mmjax.pipeline.executor import StepResult, loss_seeds, model_losses
from mmjax.pipeline.place import InputShapes, PlacedModel, TracedStages
from mmjax.pipeline.stage_state import State
from mmjax.pipeline.walker import Signature
from mmjax.schedule.ops import Schedule

Microbatches = Sequence[tuple[Signature, InputShapes]]
ByStage = Mapping[str, jax.Array]
"""The losses of a step, or their cotangents, by stage with a loss."""


class OneProgramExecutor(ABC):
    """Runs training steps, each one program; the interface is ``Executor``'s, without its walker and gradient sums.

    All microbatches of a step are padded to one bucket signature.

    Attributes:
      placed, schedule: see ``Executor``.
      traced: stage functions and boundaries of each program, in the programs' order.
    """

    def __init__(self, placed: PlacedModel, schedule: Schedule, shapes: Mapping[Signature, InputShapes]):
        """Traces one program per bucket combination.

        Raises:
          ValueError: when offloading is on.
        """
        if placed.offloads:
            raise ValueError("one program keeps everything on its devices; to offload use Executor")
        self.placed, self.schedule = placed, schedule
        self._ends: Ends | None = None
        self.traced = [placed.trace(inputs, schedule.graph) for inputs in shapes.values()]
        self._programs = {s: self._program(s, traced) for s, traced in zip(shapes, self.traced, strict=True)}

    @property
    @abstractmethod
    def states(self) -> dict[str, State]:
        """State of each stage, by name; replace it to restore a checkpoint."""

    @states.setter
    @abstractmethod
    def states(self, states: dict[str, State]) -> None: ...

    def programs(self) -> list[Program]:
        """The programs of a step, one per bucket combination."""
        return list(self._programs.values())

    def compile(self, report: Callable[[int, int, str], None] | None = None) -> None:
        """Compiles every program ahead of the first step; see ``compile_all`` for ``report``."""
        compile_all(self.programs(), report)

    def initialise(self, seed: int) -> None:
        """Sets ``states`` to fresh parameters and optimizer states, a function of the seed alone."""
        key = jax.random.key(seed)
        self.states = {name: stage.state.initialise(key) for name, stage in self.placed.stages.items()}

    def step(self, microbatches: Microbatches, denominators: Mapping[str, float]) -> StepResult:
        """One optimizer step; see ``Executor.step``.

        Raises:
          ValueError: when the number of microbatches is not the schedule's, or their buckets differ; see also
            ``loss_seeds``.
        """
        signatures = {signature for signature, _ in microbatches}
        if len(microbatches) != self.schedule.microbatches or len(signatures) != 1:
            raise ValueError(
                f"{len(microbatches)} microbatches in {len(signatures)} buckets: "
                f"one program takes {self.schedule.microbatches} in one bucket"
            )
        program = self._programs[signatures.pop()]
        _, inputs, avals = program.avals
        seeds = to_devices(loss_seeds(self.placed, denominators), jax.tree.map(lambda a: a.sharding, avals))
        if self._ends:
            self._ends.begin(program.name)
        losses, totals = self._run(
            program, self._place(inputs, [inputs_by_module for _, inputs_by_module in microbatches]), seeds
        )
        if self._ends:
            self._ends.dispatched(program.name)
        losses_by_module: dict[str, list[jax.Array]] = {}
        for name, loss in losses.items():
            losses_by_module.setdefault(self.placed.stages[name].model.module, []).append(loss)
        return StepResult(losses_by_module, totals, denominators, model_losses(self.placed), self.placed.model.modules)

    def follow(self, ends: Ends | None) -> None:
        """See ``Executor.follow``; the step is one op."""
        self._ends = ends

    @abstractmethod
    def _place(self, avals: Any, microbatches: Sequence[InputShapes]) -> Any:
        """The host inputs of a step on the devices, as the program's second argument."""

    @abstractmethod
    def _run(self, program: Program, inputs: Any, seeds: ByStage) -> tuple[ByStage, jax.Array | None]:
        """Runs the step on the executor's arrays and replaces them; returns losses and totals."""

    # ---- the program -------------------------------------------------------------------------------------------------

    @abstractmethod
    def _avals(self, traced: TracedStages) -> tuple[Any, Any, Any]:
        """Avals of the arrays that live between steps, of the inputs and of the cotangents of the losses."""

    @abstractmethod
    def _step(self, traced: TracedStages, arrays: Any, inputs: Any, seeds: ByStage) -> tuple[Any, ByStage, Any]:
        """The step as a traceable function: the new arrays, losses, totals."""

    def _program(self, signature: Signature, traced: TracedStages) -> Program:
        avals = self._avals(traced)
        fn = partial(self._step, traced)
        label = " ".join(f"{name}[{bucket}]" for name, bucket in signature)
        # Shardings are fixed, so that the next step's arguments have the sharding that the program was compiled for.
        # Losses are replicated on all devices, because several processes read them, and because JAX may infer a wrong
        # sharding for a result on one of several meshes.
        pinned = (*(jax.tree.map(lambda a: a.sharding, aval) for aval in (avals[0], avals[2])), None)
        outputs = jax.eval_shape(fn, *avals)
        return Program(f"step {label}".strip(), fn, avals, outputs, donate=(0,), out_shardings=pinned)
