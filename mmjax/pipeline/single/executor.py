"""The one-program lowering of a pipeline: its schedule unrolled over the ``pp`` axis, a whole step in one ``jit``.

Between steps the executor holds blocks: arrays of one shape on all devices, in which every lane has its own stages'
masters and moments. Blocks are turned into the stages' states, and states into blocks, on demand and without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from mmjax.configurable import ConfigError
from mmjax.mesh.spmd import Program
from mmjax.pipeline.build import InputShapes, PlacedModel, Shapes
from mmjax.pipeline.memory import Memory, shard_bytes
from mmjax.pipeline.one_program import ByStage, OneProgramExecutor
from mmjax.pipeline.single.lane_ops import LaneOps
from mmjax.pipeline.single.lanes import Lanes
from mmjax.pipeline.single.slots import Register
from mmjax.pipeline.single.unroll import Unrolling
from mmjax.pipeline.stage_state import State
from mmjax.pipeline.walker import Signature
from mmjax.schedule.ops import Schedule


class SingleExecutor(OneProgramExecutor):
    """Runs training steps of a pipeline whose modules live on one rank set.

    Attributes:
      lanes: the stage submeshes.
    """

    def __init__(self, placed: PlacedModel, schedule: Schedule, shapes: Mapping[Signature, InputShapes]):
        """Traces one program per bucket combination.

        Raises:
          ConfigError: for several processes, or when a module is neither on all ranks nor on stage submeshes of the
            pipeline.
          ValueError: when the schedule has an op that has no meaning in one program, or tokens go by lists.
        """
        if placed.world.processes > 1:
            raise ConfigError("Train.lowering='single': it runs in one process, this run has several; set it to 'auto'")
        self.lanes = Lanes(placed.layouts, placed.world)
        self._ops: dict[int, LaneOps] = {}
        self._held: Any = None  # first argument of the programs; made from the states after they were replaced
        self._states: dict[str, State] | None = {}
        for inputs in shapes.values():
            placed.require_no_lists(inputs, "Train.lowering='single'")
        super().__init__(placed, schedule, shapes)

    @property
    def states(self) -> dict[str, State]:
        """State of each stage, as arrays on its stage submesh: the blocks' own buffers, so a step invalidates them."""
        if self._states is None:
            self._states = self._taken_apart(self._held)
        return self._states

    @states.setter
    def states(self, states: dict[str, State]) -> None:
        self._states, self._held = states, None

    def ops(self, traced: Shapes) -> LaneOps:
        """The ops on lanes, for the shapes of one bucket combination."""
        if id(traced) not in self._ops:
            self._ops[id(traced)] = LaneOps(self.placed, self.schedule, self.lanes, traced)
        return self._ops[id(traced)]

    def _place(self, avals: Any, microbatches: Sequence[InputShapes]) -> Any:
        places, lane = self._any_ops.input_places, self._any_ops.lane
        whole = {
            name: [{k: inputs[self.placed.stages[name].model.module][k] for k in own[0]} for inputs in microbatches]
            for name, own in avals["whole"].items()
        }
        lanes = []
        for inputs in microbatches:
            rows: dict[tuple[Register, int | None], np.ndarray] = {}
            for name, own in places.items():
                given = inputs[self.placed.stages[name].model.module]
                rows |= {(register, lane[name]): given[key] for key, register in own.items()}
            lanes.append([self._stacked(rows, register) for register in self._any_ops.input_registers])
        return jax.device_put({"lanes": lanes, "whole": whole}, jax.tree.map(lambda aval: aval.sharding, avals))

    def _run(self, program: Program, inputs: Any, seeds: ByStage) -> tuple[ByStage, jax.Array | None]:
        if self._held is None:
            assert self._states is not None
            self._held = self._put_together(self._states)
        self._held, losses, totals = program(self._held, inputs, seeds)
        self._states = None
        return losses, totals

    def memory(self) -> Memory:
        """Memory of every device in the largest of the programs: the same on every lane, since blocks have one shape.

        States are ``optimizer``. Parameters, gradients, residuals and what travels live inside the program: they are
        among its ``temporaries``, an estimate from its trace.
        """
        found = []
        for program in self.programs():
            (held, inputs, _), temporaries = program.avals, program.temporary_bytes()
            sizes = {"optimizer": shard_bytes(held), "inputs": 2 * shard_bytes(inputs), "temporaries": temporaries}
            found.append(Memory(**sizes))
        return max(found, key=lambda memory: memory.total)

    # ---- states and inputs as blocks ---------------------------------------------------------------------------------

    @property
    def _any_ops(self) -> LaneOps:
        """The ops of any one bucket combination: where states and inputs lie depends on the model alone."""
        return next(iter(self._ops.values()))

    def _put_together(self, states: Mapping[str, State]) -> Any:
        ops, parts = self._any_ops, {register: {} for register in self._any_ops.pinned_registers}
        for (lane, (part, name)), registers in ops.plan.pinned.items():
            for register, leaf in zip(registers, jax.tree.leaves(states[name][part]), strict=True):
                parts[register][lane] = leaf
        lanes = [self.lanes.join(register[0], held) for register, held in parts.items()]
        return {"lanes": lanes, "whole": {name: states[name] for name, lane in ops.lane.items() if lane is None}}

    def _taken_apart(self, held: Any) -> dict[str, State]:
        ops = self._any_ops
        arrays = dict(zip(ops.pinned_registers, held["lanes"], strict=True))
        states: dict[str, State] = {name: {} for name in self.placed.stages} | held["whole"]
        for (lane, (part, name)), registers in ops.plan.pinned.items():
            avals, structure = jax.tree.flatten(self.placed.stages[name].state.state_avals[part])
            leaves = [self.lanes.part(arrays[r], lane, aval) for r, aval in zip(registers, avals, strict=True)]
            states[name][part] = jax.tree.unflatten(structure, leaves)
        return states

    def _stacked(self, rows: Mapping[tuple[Register, int | None], np.ndarray], register: Register) -> np.ndarray:
        """Every lane's rows of an input register one after another; zeros for lanes without that input."""
        some = next(array for (held, _), array in rows.items() if held == register)
        lanes = [rows.get((register, lane), np.zeros_like(some)) for lane in range(len(self.lanes))]
        return np.concatenate([self.lanes.parted(array) for array in lanes])

    # ---- the program -------------------------------------------------------------------------------------------------

    def _avals(self, traced: Shapes) -> tuple[Any, Any, Any]:
        ops, stages, count = self.ops(traced), self.placed.stages, self.schedule.microbatches
        whole = [name for name, lane in ops.lane.items() if lane is None]
        held = {
            "lanes": [self.lanes.aval(block) for block, _ in ops.pinned_registers],
            "whole": {name: stages[name].state.state_avals for name in whole},
        }
        inputs = {
            "lanes": [[self.lanes.aval(block) for block, _ in ops.input_registers]] * count,
            "whole": {name: [dict(traced.stages[name].forward_avals[1])] * count for name in whole},
        }
        seeds, sharding = {}, self.lanes.sharding(PartitionSpec())
        for node in self.schedule.graph.losses:
            aval = traced.stages[node.name].cotangent_aval.result
            seeds[node.name] = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        return held, inputs, seeds

    def _step(self, traced: Shapes, held: Any, inputs: Any, seeds: ByStage) -> tuple[Any, ByStage, Any]:
        return Unrolling(self.ops(traced), held, inputs, seeds).step()
