"""The straight-line lowering: where every stage lives on the same devices, a whole step is one jitted program.

It interprets the same Schedule with the same stage functions and boundaries, inside one trace. Microbatches run one
after another in ``lax.scan``, so the program's size does not grow with their number; they share the largest bucket of
the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.mesh.spmd import Program, to_devices
from mmjax.mesh.transfer import LocalTransfer
from mmjax.pipeline.build import InputShapes, PlacedModel, Shapes
from mmjax.pipeline.compile import compile_all
from mmjax.pipeline.executor import StepResult
from mmjax.pipeline.stage_state import State
from mmjax.pipeline.walker import Signature
from mmjax.pipeline.world_norm import WorldNorm
from mmjax.schedule.ops import ONCE, Op, Schedule

Inputs = dict[str, dict[str, Any]]
"""By stage and input name."""


class StraightExecutor:
    """Runs training steps of a model whose stages share their devices; the interface is ``Executor``'s."""

    def __init__(self, placed: PlacedModel, schedule: Schedule, shapes: Mapping[Signature, InputShapes]):
        """Traces one program per bucket combination.

        Raises:
          ValueError: when the stages do not share their devices, something is to be offloaded, or the schedule
            interleaves microbatches or splits a backward.
        """
        if not placed.straight_line:
            raise ValueError("stages on different devices cannot be one program; use Executor")
        if placed.offloads:
            raise ValueError("one program keeps everything on its devices; to offload use Executor")
        if split := [stage.name for stage in schedule.graph.stages if stage.split]:
            raise ValueError(f"schedule {schedule.name} splits the backward of {', '.join(split)}; use Executor")
        self.placed, self.schedule = placed, schedule
        self.states: dict[str, State] = {}
        self._body_ops, self._tail_ops = _split_ops(schedule)
        self._traced = {signature: placed.shapes(inputs) for signature, inputs in shapes.items()}
        trained = {name: s.submesh for name, s in placed.stages.items() if s.state.trainable}
        self._norm = WorldNorm(placed.world, trained, len(placed.model.modules)) if trained else None
        self._programs = {signature: self._program(signature, traced) for signature, traced in self._traced.items()}

    def programs(self) -> list[Program]:
        """One per bucket combination."""
        return list(self._programs.values())

    def compile(self, report: Callable[[int, int, str], None] | None = None) -> None:
        """Compiles every program ahead of the first step."""
        compile_all(self.programs(), report)

    def initialise(self, seed: int) -> None:
        """Fresh parameters and optimizer states, a function of the seed alone."""
        key = jax.random.key(seed)
        self.states = {name: stage.state.initialise(key) for name, stage in self.placed.stages.items()}

    def step(self, microbatches: Sequence[tuple[Signature, InputShapes]], denominator: float) -> StepResult:
        """One optimizer step; see ``Executor.step``. All microbatches come padded to one bucket signature.

        Raises:
          ValueError: when their number is not the schedule's, or their buckets differ.
        """
        signatures = {signature for signature, _ in microbatches}
        if len(microbatches) != self.schedule.microbatches or len(signatures) != 1:
            raise ValueError(
                f"{len(microbatches)} microbatches in {len(signatures)} buckets: "
                f"one program takes {self.schedule.microbatches} in one bucket"
            )
        program = self._programs[signatures.pop()]
        stacked: Inputs = {}
        for (name, stage), avals in zip(self.placed.stages.items(), program.avals[1].values(), strict=True):
            own = {
                k: np.stack([inputs[stage.model.module][k] for _, inputs in microbatches]) for k in stage.model.inputs
            }
            stacked[name] = to_devices(own, {k: avals[k].sharding for k in own})
        weight = to_devices(np.float32(1.0 / denominator), program.avals[2].sharding)
        self.states, losses, totals = program(self.states, stacked, weight)
        return StepResult([losses], totals, denominator, self.placed.model.modules)

    # ---- the program -------------------------------------------------------------------------------------------------

    def _program(self, signature: Signature, traced: Shapes) -> Program:
        placed = self.placed
        states = {name: stage.state.state_avals for name, stage in placed.stages.items()}
        inputs = {
            name: {key: _stacked(aval, self.schedule.microbatches) for key, aval in functions.forward_avals[1].items()}
            for name, functions in traced.stages.items()
        }
        weight = traced.stages[placed.graph.sink.name].cotangent_aval
        fn = lambda states, inputs, weight: self._step(traced, states, inputs, weight)  # noqa: E731
        outputs = jax.eval_shape(fn, states, inputs, weight)
        label = " ".join(f"{name}[{bucket}]" for name, bucket in signature)
        # Pinned, so that the next step finds its states where this program wants them.
        # Losses lie on the devices of several processes unless they are repeated.
        losses = weight.sharding if placed.world.processes > 1 else None
        pinned = (jax.tree.map(lambda a: a.sharding, states), losses, None)
        avals = [states, inputs, weight]
        return Program(f"step {label}".strip(), fn, avals, outputs, donate=(0,), out_shardings=pinned)

    def _step(self, traced: Shapes, states: dict[str, State], inputs: Inputs, weight: jax.Array) -> Any:
        stages = self.placed.stages
        params = {
            name: states[name]["master"]
            if stage.state.prepare_is_identity
            else stage.state.prepare(states[name]["master"], {})
            for name, stage in stages.items()
        }
        sums = {
            name: jax.tree.map(
                lambda a: lax.with_sharding_constraint(jnp.zeros(a.shape, a.dtype), a.sharding), stage.state.sums_avals
            )
            for name, stage in stages.items()
            if stage.state.trainable
        }

        def one(sums: Any, inputs: Inputs) -> Any:
            return self._microbatch(traced, params, sums, inputs, weight)

        if self.schedule.microbatches == 1:
            sums, losses = one(sums, jax.tree.map(lambda x: x[0], inputs))
        else:
            sums, losses = lax.scan(one, sums, inputs)
        return self._finish(states, sums, losses)

    def _microbatch(self, traced: Shapes, params: Any, sums: Any, inputs: Inputs, weight: jax.Array) -> Any:
        """The ops of one microbatch: F down the graph, B up again."""
        graph, sums = self.schedule.graph, dict(sums)
        outs, grads, kept, carry = {}, {}, {}, {name: {} for name in inputs}
        cotangents = {graph.sink.name: weight}
        for op in self._body_ops:
            functions = traced.stages[op.stage]
            if op.kind == "F":
                outs[op.stage], kept[op.stage] = functions.forward(params[op.stage], inputs[op.stage], carry[op.stage])
            elif op.kind == "B":
                received = carry[op.stage] if functions.keeps_carry else {}
                new, grads[op.stage] = functions.backward(
                    params[op.stage],
                    sums.get(op.stage, {}),
                    inputs[op.stage],
                    received,
                    kept[op.stage],
                    cotangents[op.stage],
                )
                if op.stage in sums:
                    sums[op.stage] = new
            else:
                edge, boundary = graph.edge(op.edge), traced.boundaries[op.edge]
                transfer = boundary.backward if op.backward else boundary.forward
                assert isinstance(transfer, LocalTransfer)
                if op.backward:
                    arrived = transfer.trace(grads[edge.dst][edge.src])
                    cotangents[op.stage] = cotangents[op.stage] + arrived if op.stage in cotangents else arrived
                else:
                    carry[op.stage][edge.src] = transfer.trace(outs[edge.src])
        return sums, outs[graph.sink.name]

    def _finish(self, states: dict[str, State], sums: Any, losses: jax.Array) -> Any:
        """reduce, norm and update."""
        stages, reduced, rows, totals = self.placed.stages, {}, {}, {}
        new = dict(states)
        for op in self._tail_ops:
            if op.kind == "reduce":
                reduced[op.stage], _, rows[op.stage], _ = stages[op.stage].state.reduce(sums[op.stage], {})
            elif op.kind == "norm":
                assert self._norm is not None
                totals = self._norm.trace(rows)
            elif op.kind == "update":
                new[op.stage] = stages[op.stage].state.update(states[op.stage], reduced[op.stage], totals[op.stage])
        return new, losses, next(iter(totals.values()), None)


def _split_ops(schedule: Schedule) -> tuple[list[Op], list[Op]]:
    """The ops of microbatch 0, which every microbatch repeats in turn, and the once-a-step ops after them."""
    per_microbatch: list[list[Op]] = [[] for _ in range(schedule.microbatches)]
    running = 0
    tail = []
    for op in schedule.ops:
        if op.microbatch == ONCE:
            tail += [op] if op.kind != "prepare" else []
            continue
        if op.microbatch < running:
            raise ValueError(
                f"schedule {schedule.name} interleaves microbatches at {op}: it cannot be one straight line"
            )
        running = op.microbatch
        per_microbatch[op.microbatch].append(op)
    return per_microbatch[0], tail


def _stacked(aval: Any, count: int) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(None, *aval.sharding.spec))
    return jax.ShapeDtypeStruct((count, *aval.shape), aval.dtype, sharding=sharding)
