"""The straight-line lowering: where every stage lives on the same devices, a whole step is one jitted program.

It interprets the same Schedule with the same stage functions and boundaries, inside one trace. Microbatches run one
after another in ``lax.scan``, so the program's size does not grow with their number; all are padded to one bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.mesh.spmd import Program, to_devices, zeros_of
from mmjax.mesh.transfer import LocalTransfer, Transfer
from mmjax.pipeline.last_backward import last_backward, reducing_stages
from mmjax.pipeline.one_program import ByStage, OneProgramExecutor
from mmjax.pipeline.place import InputShapes, PlacedModel, TracedStages
from mmjax.pipeline.stage import Output
from mmjax.pipeline.stage_state import State
from mmjax.pipeline.walker import Signature
from mmjax.pipeline.world_norm import WorldNorm
from mmjax.schedule.ops import ONCE, Op, Schedule

Inputs = dict[str, dict[str, Any]]
"""Host inputs by stage and input name."""


class StraightExecutor(OneProgramExecutor):
    """Runs training steps of a model whose stages share their devices."""

    def __init__(self, placed: PlacedModel, schedule: Schedule, shapes: Mapping[Signature, InputShapes]):
        """Traces one program per bucket combination.

        Raises:
          ValueError: when the stages do not share their devices, or the schedule interleaves microbatches or splits a
            backward; see also ``OneProgramExecutor``.
        """
        if not placed.straight_line:
            raise ValueError("stages on different devices cannot be a straight line; use Executor")
        if split := [stage.name for stage in schedule.graph.stages if stage.split]:
            raise ValueError(f"schedule {schedule.name} splits the backward of {', '.join(split)}; use Executor")
        self._states: dict[str, State] = {}
        self._body_ops, self._tail_ops = _split_ops(schedule)
        submeshes = {name: stage.submesh for name, stage in placed.stages.items()}
        self._norm = WorldNorm(placed.world, submeshes, len(placed.model.modules))
        super().__init__(placed, schedule, shapes)

    @property
    def states(self) -> dict[str, State]:
        """State of each stage, by name; replace it to restore a checkpoint."""
        return self._states

    @states.setter
    def states(self, states: dict[str, State]) -> None:
        self._states = states

    def _place(self, avals: Inputs, microbatches: Sequence[InputShapes]) -> Inputs:
        stacked: Inputs = {}
        for name, stage in self.placed.stages.items():
            arrays = {k: np.stack([inputs[stage.model.module][k] for inputs in microbatches]) for k in avals[name]}
            stacked[name] = to_devices(arrays, {k: avals[name][k].sharding for k in arrays})
        return stacked

    def _run(self, program: Program, inputs: Inputs, seeds: ByStage) -> tuple[ByStage, jax.Array | None]:
        self._states, losses, totals = program(self._states, inputs, seeds)
        return losses, totals

    # ---- the program -------------------------------------------------------------------------------------------------

    def _avals(self, traced: TracedStages) -> tuple[Any, Any, Any]:
        states = {name: stage.state.state_avals for name, stage in self.placed.stages.items()}
        inputs = {
            name: {key: _stacked(aval, self.schedule.microbatches) for key, aval in functions.forward_avals[1].items()}
            for name, functions in traced.stages.items()
        }
        seeds = {node.name: traced.stages[node.name].cotangent_aval.result for node in self.placed.graph.losses}
        return states, inputs, seeds

    def _step(self, traced: TracedStages, arrays: dict[str, State], inputs: Inputs, seeds: ByStage) -> Any:
        stages, states = self.placed.stages, arrays
        params = {
            name: stage.state.compute_params(states[name]["master"], {}, stage.state.prepare)
            for name, stage in stages.items()
        }
        sums = {name: jax.tree.map(zeros_of, stage.state.sums_avals) for name, stage in stages.items()}

        def microbatch(sums: Any, inputs: Inputs) -> Any:
            return self._microbatch(traced, params, sums, inputs, seeds)

        if not (reducing := reducing_stages(self.schedule.graph, traced.stages)):
            sums, losses = lax.scan(microbatch, sums, inputs)
            return self._finish(states, sums, losses, {})
        # The last microbatch is apart from the loop: its backward reduces gradients too.
        before, last = jax.tree.map(lambda x: x[:-1], inputs), jax.tree.map(lambda x: x[-1], inputs)
        sums, losses = lax.scan(microbatch, sums, before)
        # Else its forward could come before the loop, and its residuals would lie in memory meanwhile.
        sums, last = lax.optimization_barrier((sums, last))
        reduced = dict[str, Any]()
        sums, last_losses = self._microbatch(traced, params, sums, last, seeds, reducing, reduced)
        losses = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), losses, last_losses)
        return self._finish(states, sums, losses, reduced)

    def _microbatch(
        self,
        traced: TracedStages,
        params: Any,
        sums: Any,
        inputs: Inputs,
        seeds: ByStage,
        reducing: Collection[str] = (),
        reduced: dict[str, Any] | None = None,
    ) -> Any:
        """Traces the ops of one microbatch: F from sources to losses, then B back.

        B of the stages ``reducing`` puts reduced gradients and norm rows into ``reduced``, by stage.
        """
        graph, sums = self.schedule.graph, dict(sums)
        outs, grads, residuals, carry = {}, {}, {}, {name: {} for name in inputs}
        cotangents: dict[str, jax.Array] = {}
        for op in self._body_ops:
            functions = traced.stages[op.stage]
            if op.kind == "F":
                outs[op.stage], residuals[op.stage] = functions.forward(
                    params[op.stage], inputs[op.stage], carry[op.stage]
                )
            elif op.kind == "B":
                args = (
                    params[op.stage],
                    sums[op.stage],
                    inputs[op.stage],
                    carry[op.stage] if functions.backward_reads_carry else {},
                    residuals[op.stage],
                    Output(cotangents.get(op.stage), seeds.get(op.stage)),
                )
                if op.stage in reducing:
                    assert reduced is not None
                    backward = last_backward(functions, functions.state.reduce, in_place=False)
                    sums[op.stage], *reduced[op.stage], grads[op.stage] = backward(*args)
                else:
                    sums[op.stage], grads[op.stage] = functions.backward(*args)
            else:
                edge, boundary = graph.edge(op.edge), traced.boundaries[op.edge]
                if op.backward:
                    arrived = _traced(boundary.backward, grads[edge.dst][edge.src])
                    cotangents[op.stage] = cotangents[op.stage] + arrived if op.stage in cotangents else arrived
                else:
                    carry[op.stage][edge.src] = _traced(boundary.forward, outs[edge.src].activation)
        return sums, {node.name: outs[node.name].result for node in graph.losses}

    def _finish(self, states: dict[str, State], sums: Any, losses: ByStage, done: Mapping[str, Any]) -> Any:
        """Traces reduce, norm and update; ``done`` has reduced gradients and norm rows of stages without a reduce."""
        stages, reduced, rows, totals = self.placed.stages, {}, {}, {}
        new = dict(states)
        for op in self._tail_ops:
            if op.stage in done and op.kind == "reduce":
                reduced[op.stage], rows[op.stage] = done[op.stage]
            elif op.kind == "reduce":
                reduced[op.stage], _, rows[op.stage] = stages[op.stage].state.reduce(sums[op.stage], {})
            elif op.kind == "norm":
                totals = self._norm.trace(rows)
            else:
                new[op.stage] = stages[op.stage].state.update(states[op.stage], reduced[op.stage], totals[op.stage])
        return new, losses, next(iter(totals.values()), None)


def _split_ops(schedule: Schedule) -> tuple[list[Op], list[Op]]:
    """The ops of microbatch 0, which all microbatches repeat, and the once-a-step ops after them."""
    body = [op for op in schedule.ops if op.microbatch != ONCE]
    for before, op in pairwise(body):
        if op.microbatch < before.microbatch:
            raise ValueError(
                f"schedule {schedule.name} interleaves microbatches at {op}: it cannot be one straight line"
            )
    tail = [op for op in schedule.ops if op.microbatch == ONCE and op.kind != "prepare"]
    return [op for op in body if op.microbatch == 0], tail


def _traced(transfer: Transfer, x: jax.Array) -> jax.Array:
    assert isinstance(transfer, LocalTransfer)  # stages share their devices
    return transfer.trace(x)


def _stacked(aval: Any, count: int) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(None, *aval.sharding.spec))
    return jax.ShapeDtypeStruct((count, *aval.shape), aval.dtype, sharding=sharding)
