"""The one-program lowering of a pipeline: its schedule unrolled over the ``pp`` axis, a whole step in one ``jit``.

Between steps the state is stored in blocks: arrays of one shape on all devices, in which every lane has the masters and
moments of its stages. Blocks are converted to the stages' states, and back, on demand and without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from mmjax.configurable import ConfigError
from mmjax.mesh.spmd import Program
from mmjax.pipeline.memory import Memory, shard_bytes
from mmjax.pipeline.one_program import ByStage, OneProgramExecutor
from mmjax.pipeline.place import InputShapes, PlacedModel, TracedStages
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
          ValueError: when the schedule has an op that one program cannot contain, or inputs have send lists.
        """
        if placed.world.processes > 1:
            raise ConfigError("Train.lowering='single': it runs in one process, this run has several; set it to 'auto'")
        self.lanes = Lanes(placed.layouts, placed.world)
        self._ops: dict[int, LaneOps] = {}
        self._arrays: Any = None  # first argument of the programs; built from the states after these were replaced
        self._states: dict[str, State] | None = {}
        for inputs in shapes.values():
            placed.require_no_lists(inputs, "Train.lowering='single'")
        super().__init__(placed, schedule, shapes)

    @property
    def states(self) -> dict[str, State]:
        """State of each stage, as arrays on its stage submesh. They share the blocks' buffers, which a step donates."""
        if self._states is None:
            self._states = self._states_of(self._arrays)
        return self._states

    @states.setter
    def states(self, states: dict[str, State]) -> None:
        self._states, self._arrays = states, None

    def ops(self, traced: TracedStages) -> LaneOps:
        """The ops on lanes, for the shapes of one bucket combination."""
        if id(traced) not in self._ops:
            self._ops[id(traced)] = LaneOps(self.placed, self.schedule, self.lanes, traced)
        return self._ops[id(traced)]

    def _place(self, avals: Any, microbatches: Sequence[InputShapes]) -> Any:
        places, lane = self._any_ops.input_places, self._any_ops.lane
        module = {name: stage.model.module for name, stage in self.placed.stages.items()}
        whole_rows = {
            name: [{key: inputs[module[name]][key] for key in stage_avals[0]} for inputs in microbatches]
            for name, stage_avals in avals["whole"].items()
        }
        lanes = []
        for inputs in microbatches:
            rows: dict[tuple[Register, int | None], np.ndarray] = {}
            for name, registers in places.items():
                rows |= {(register, lane[name]): inputs[module[name]][key] for key, register in registers.items()}
            lanes.append([self._stacked(rows, register) for register in self._any_ops.input_registers])
        return jax.device_put({"lanes": lanes, "whole": whole_rows}, jax.tree.map(lambda aval: aval.sharding, avals))

    def _run(self, program: Program, inputs: Any, seeds: ByStage) -> tuple[ByStage, jax.Array | None]:
        if self._arrays is None:
            assert self._states is not None
            self._arrays = self._arrays_of(self._states)
        self._arrays, losses, totals = program(self._arrays, inputs, seeds)
        self._states = None
        return losses, totals

    def memory(self) -> Memory:
        """Memory of a device in the largest program; equal on all devices, because blocks have one shape.

        States count as ``optimizer``. Parameters, gradients, residuals and arrays in transit live inside the program:
        they are part of its ``temporaries``, an estimate from its trace.
        """
        by_program = []
        for program in self.programs():
            arrays, inputs, _ = program.avals
            temporaries = program.temporary_bytes()
            by_program.append(
                Memory(optimizer=shard_bytes(arrays), inputs=2 * shard_bytes(inputs), temporaries=temporaries)
            )
        return max(by_program, key=lambda memory: memory.total)

    # ---- states and inputs as blocks ---------------------------------------------------------------------------------

    @property
    def _any_ops(self) -> LaneOps:
        """The ops of one bucket combination: the registers of states and inputs are the same in all."""
        return next(iter(self._ops.values()))

    def _arrays_of(self, states: Mapping[str, State]) -> Any:
        ops, parts = self._any_ops, {register: {} for register in self._any_ops.pinned_registers}
        for (lane, (part, name)), registers in ops.plan.pinned.items():
            for register, leaf in zip(registers, jax.tree.leaves(states[name][part]), strict=True):
                parts[register][lane] = leaf
        lanes = [self.lanes.join(register[0], leaves) for register, leaves in parts.items()]
        return {"lanes": lanes, "whole": {name: states[name] for name, lane in ops.lane.items() if lane is None}}

    def _states_of(self, arrays: Any) -> dict[str, State]:
        ops = self._any_ops
        blocks = dict(zip(ops.pinned_registers, arrays["lanes"], strict=True))
        states: dict[str, State] = {name: {} for name in self.placed.stages} | arrays["whole"]
        for (lane, (part, name)), registers in ops.plan.pinned.items():
            avals, structure = jax.tree.flatten(self.placed.stages[name].state.state_avals[part])
            leaves = [self.lanes.part(blocks[r], lane, aval) for r, aval in zip(registers, avals, strict=True)]
            states[name][part] = jax.tree.unflatten(structure, leaves)
        return states

    def _stacked(self, rows: Mapping[tuple[Register, int | None], np.ndarray], register: Register) -> np.ndarray:
        """Every lane's rows of an input register, concatenated; zeros for lanes without that input."""
        example = next(array for (row_register, _), array in rows.items() if row_register == register)
        lanes = [rows.get((register, lane), np.zeros_like(example)) for lane in range(len(self.lanes))]
        return np.concatenate([self.lanes.parted(array) for array in lanes])

    # ---- the program -------------------------------------------------------------------------------------------------

    def _avals(self, traced: TracedStages) -> tuple[Any, Any, Any]:
        ops, stages, count = self.ops(traced), self.placed.stages, self.schedule.microbatches
        spanning = [name for name, lane in ops.lane.items() if lane is None]
        arrays = {
            "lanes": [self.lanes.aval(block) for block, _ in ops.pinned_registers],
            "whole": {name: stages[name].state.state_avals for name in spanning},
        }
        inputs = {
            "lanes": [[self.lanes.aval(block) for block, _ in ops.input_registers]] * count,
            "whole": {name: [dict(traced.stages[name].forward_avals[1])] * count for name in spanning},
        }
        seeds, sharding = {}, self.lanes.sharding(PartitionSpec())
        for node in self.schedule.graph.losses:
            aval = traced.stages[node.name].cotangent_aval.result
            seeds[node.name] = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        return arrays, inputs, seeds

    def _step(self, traced: TracedStages, arrays: Any, inputs: Any, seeds: ByStage) -> tuple[Any, ByStage, Any]:
        return Unrolling(self.ops(traced), arrays, inputs, seeds).step()
