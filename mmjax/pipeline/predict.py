"""Greedy decoding under any layout: forward-only schedules over the training stages.

Encoders run once; then the LLM's stages run once per new token over the whole row. There is no key/value cache: the
rows keep the training shape, so that evaluation reuses submeshes, boundaries and parameters as they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Int

from mmjax.mesh.spmd import Program
from mmjax.models.multimodal import LLM
from mmjax.pipeline.build import InputShapes, PlacedModel
from mmjax.pipeline.compile import compile_all
from mmjax.pipeline.stage_state import State
from mmjax.pipeline.walker import Signature, Walker
from mmjax.schedule.ops import ONCE, Op
from mmjax.schedule.schedules import forward_only


class Predictor(Walker):
    """Next-token prediction for microbatches of the training shape."""

    def __init__(self, placed: PlacedModel, shapes: Mapping[Signature, InputShapes], microbatches: int):
        """Traces the forward programs.

        Args:
          placed: the model on its devices.
          shapes: input shapes of every bucket combination that may occur.
          microbatches: how many are decoded side by side.
        """
        boundaries, programs, shared = {}, {}, {}
        for signature, inputs in shapes.items():
            traced = placed.shapes(inputs)
            for name, f in traced.stages.items():
                if id(f) not in shared:
                    shared[id(f)] = Program.of(f"infer {name}", f.infer, f.forward_avals)
                programs[name, signature] = shared[id(f)]
            boundaries |= {(edge, signature): boundary for edge, boundary in traced.boundaries.items()}
        costs = placed.nominal_costs(next(iter(shapes.values())))
        schedule = forward_only(placed.graph, microbatches, costs)
        super().__init__(placed, schedule.graph, boundaries)
        self.microbatches, self._programs = microbatches, programs
        module = {name: stage.model.module for name, stage in placed.stages.items()}
        self._llm = [name for name in module if module[name] == LLM]
        self._encoders = [name for name in module if module[name] in placed.model.encoders]
        self._loading = [op for op in schedule.ops if op.microbatch == ONCE]
        # Tokens are decoded without the generators, and what goes to them.
        answering = {*self._llm, *self._encoders}
        ops = [op for op in schedule.ops if op.microbatch != ONCE and self._reader(op) in answering]
        self._once = [op for op in ops if op.stage in self._encoders or (op.edge and self._from_encoder(op))]
        again = set(self._once)
        self._per_token = [op for op in ops if op not in again]
        self._out: dict[int, jax.Array] = {}
        rows, length = next(iter(shapes.values()))[LLM]["tokens"].shape
        last = next(node.name for node in placed.graph.losses if node.module == LLM)
        self._everywhere = placed.everywhere(
            "tokens", last, jax.ShapeDtypeStruct((rows, length), np.int32), microbatches
        )
        self.handlers["F"] = self._forward

    def _reader(self, op: Op) -> str:
        """The stage that an op works for."""
        return self.graph.edge(op.edge).dst if op.edge else op.stage

    def _from_encoder(self, op: Op) -> bool:
        return self.graph.edge(op.edge).src in self._encoders

    def programs(self) -> list[Program]:
        """Everything that this process has to compile."""
        moves = [p for boundary in self.boundaries.values() for p in boundary.forward.programs()]
        moves += [p for tie in self.placed.ties.values() for p in tie.forward.programs()]
        shared = [self._everywhere.program] if self._everywhere else []
        found = [*self._programs.values(), *moves, *self.placed.prepare_programs(), *shared]
        return [program for program in found if program.local]

    def compile(self, report: Callable[[int, int, str], None] | None = None) -> None:
        """Compiles every program."""
        compile_all(self.programs(), report)

    def load(self, states: Mapping[str, State]) -> None:
        """Takes the parameters of training states; call it again after a step."""
        self.lend(states)
        self.walk(self._loading)
        self.states = {}

    def unload(self) -> None:
        """Lets go of the parameters; the next training step overwrites their memory."""
        self.params = {}

    def generate(
        self,
        microbatches: Sequence[tuple[Signature, InputShapes]],
        starts: Sequence[Int[np.ndarray, " B"]],
        limit: int,
        stop: int,
    ) -> list[list[list[int]]]:
        """Continues every row greedily until ``stop`` or ``limit`` new tokens.

        Args:
          microbatches: as for a training step; LLM rows hold the prompt, then padding (segment 0).
          starts: per microbatch, the prompt's length in each row; 0 for an empty row.
          limit: largest number of new tokens; rows end at the sequence length in any case.
          stop: token that ends an answer; it is not returned.

        Returns:
          New tokens by microbatch and row.

        Raises:
          ValueError: when the number of microbatches is not the one the predictor was made for.
        """
        if len(microbatches) != self.microbatches:
            raise ValueError(f"{len(microbatches)} microbatches for a predictor of {self.microbatches}")
        batch = [(s, {**inputs, LLM: _writable(inputs[LLM])}) for s, inputs in microbatches]
        answers: list[list[list[int]]] = [[[] for _ in start] for start in starts]
        done = [np.asarray(start) == 0 for start in starts]
        self.place_inputs(batch, [name for name in self._encoders if name in self.placed.local_stages])
        self.signatures = [signature for signature, _ in batch]
        self.walk(self._once)
        received = {key: dict(value) for key, value in self.carry.items()}
        for count in range(limit):
            self.carry = {key: dict(value) for key, value in received.items()}
            self.place_inputs(batch, [name for name in self._llm if name in self.placed.local_stages])
            self.walk(self._per_token)
            out = [self._out[index] for index in sorted(self._out)]
            out = self._everywhere(out) if self._everywhere else out
            for index, (_, inputs) in enumerate(batch):
                best = np.asarray(jax.device_get(out[index]))
                _extend(inputs[LLM], np.asarray(starts[index]) + count, best, stop, answers[index], done[index])
            if all(d.all() for d in done):
                break
        self.carry, self.inputs, self._out, self.travelling = {}, {}, {}, {}
        return answers

    def _forward(self, op: Op) -> None:
        key = (op.stage, op.microbatch)
        program = self._programs[op.stage, self.signatures[op.microbatch]]
        out = program(self.params[op.stage], self.inputs.pop(key), self.carry.pop(key, {}))
        if out.result is not None:
            self._out[op.microbatch] = out.result
        self.send(op.stage, op.microbatch, out.activation)


def _writable(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in inputs.items()}


def _extend(
    inputs: dict[str, np.ndarray],
    ends: np.ndarray,
    best: np.ndarray,
    stop: int,
    answers: list[list[int]],
    done: np.ndarray,
) -> None:
    """Writes each open row's best next token at its end, in fresh arrays (the old ones may still be read by a copy)."""
    for name in ("tokens", "segments", "positions"):
        inputs[name] = inputs[name].copy()
    length = inputs["tokens"].shape[1]
    for row in np.flatnonzero(~done):
        end = int(ends[row])
        token = int(best[row, end - 1])
        if token == stop:
            done[row] = True
            continue
        answers[row].append(token)
        if end >= length:
            done[row] = True
            continue
        inputs["tokens"][row, end] = token
        inputs["segments"][row, end] = inputs["segments"][row, end - 1]
        inputs["positions"][row, end] = inputs["positions"][row, end - 1] + 1
