"""Greedy decoding and drawing under any layout: forward-only schedules over the training stages.

Encoders run once; then the LLM's stages run once per new token over the whole row. There is no key/value cache: the
rows keep the training shape, so that evaluation reuses submeshes, boundaries and parameters as they lie. To draw, the
LLM runs once, and a generator's stages as often as it has steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from mmjax.mesh.spmd import Program
from mmjax.models.config import LLM
from mmjax.pipeline.build import InputShapes, PlacedModel
from mmjax.pipeline.compile import compile_all
from mmjax.pipeline.everywhere import Everywhere
from mmjax.pipeline.stage_state import State
from mmjax.pipeline.walker import Signature, Walker
from mmjax.schedule.ops import ONCE, Op
from mmjax.schedule.schedules import forward_only


class Predictor(Walker):
    """Next tokens, and what generators draw, for microbatches of the training shape."""

    def __init__(self, placed: PlacedModel, shapes: Mapping[Signature, InputShapes], microbatches: int):
        """Traces the forward programs.

        Args:
          placed: the model on its devices.
          shapes: input shapes of every bucket combination that may occur.
          microbatches: number of microbatches that are decoded side by side.
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
        every = [op for op in schedule.ops if op.microbatch != ONCE]
        ops = [op for op in every if module[self._reader(op)] not in placed.model.generators]
        self._once = [op for op in ops if op.stage in self._encoders or (op.edge and self._from_encoder(op))]
        again = set(self._once)
        self._per_token = [op for op in ops if op not in again]
        # By generator, the ops that bring its conditions from the LLM, and its own ops.
        behind = {n: [op for op in every if module[self._reader(op)] == n] for n in placed.model.generators}
        self._conditions = {n: [op for op in own if self._from_llm(op)] for n, own in behind.items()}
        self._steps = {n: [op for op in own if not self._from_llm(op)] for n, own in behind.items()}
        self._out: dict[str, dict[int, Any]] = {}
        self._everywhere = self._shared(microbatches)
        self.handlers["F"] = self._forward

    def _shared(self, microbatches: int) -> dict[tuple[str, int, Signature], Everywhere | None]:
        """By module, number of its result and bucket, the program that brings that result to every process: the LLM's
        for all microbatches at once, which have one shape; a generator's one by one."""
        result: dict[tuple[str, int, Signature], Everywhere | None] = {}
        made: dict[Any, Everywhere | None] = {}
        last = {node.name: node.module for node in self.graph.losses}
        for (name, signature), program in self._programs.items():
            for number, aval in enumerate(jax.tree.leaves(program.outputs.result) if name in last else ()):
                key, count = (name, number, aval.shape), microbatches if last[name] == LLM else 1
                if key not in made:
                    made[key] = self.placed.everywhere(f"predictions of {last[name]}", name, aval, count)
                result[last[name], number, signature] = made[key]
        return result

    def _reader(self, op: Op) -> str:
        """The stage that an op works for: its edge's destination, or its own."""
        return self.graph.edge(op.edge).dst if op.edge else op.stage

    def _from_llm(self, op: Op) -> bool:
        return bool(op.edge) and self.graph.edge(op.edge).src in self._llm

    def _from_encoder(self, op: Op) -> bool:
        return self.graph.edge(op.edge).src in self._encoders

    def programs(self) -> list[Program]:
        """All programs that this process has to compile."""
        moves = [p for boundary in self.boundaries.values() for p in boundary.forward.programs()]
        moves += [p for tie in self.placed.ties.values() for p in tie.forward.programs()]
        shared = [one.program for one in self._everywhere.values() if one]  # repeats are compiled once
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
        """Drops the parameters, whose memory the next training step overwrites, and arrays that a failure left."""
        self.params = {}
        self._forget()

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
        self._require_count(microbatches)
        batch = [(s, {**inputs, LLM: _writable(inputs[LLM])}) for s, inputs in microbatches]
        answers: list[list[list[int]]] = [[[] for _ in start] for start in starts]
        done = [np.asarray(start) == 0 for start in starts]
        self.place_inputs(batch, self._here(self._encoders))
        self.walk(self._once)
        received = self._received()
        for count in range(limit):
            self.carry = {key: dict(value) for key, value in received.items()}
            self.place_inputs(batch, self._here(self._llm))
            self.walk(self._per_token)
            for index, best in enumerate(self._predicted(LLM)):
                end = np.asarray(starts[index]) + count
                _extend(batch[index][1][LLM], end, best, stop, answers[index], done[index])
            if all(d.all() for d in done):
                break
        self._forget()
        return answers

    def losses(self, microbatches: Sequence[tuple[Signature, InputShapes]]) -> list[Float[np.ndarray, " B"]]:
        """The weighted loss of each LLM row, the sum over its targets, by microbatch.

        Args:
          microbatches: as for a training step.

        Raises:
          ValueError: when the number of microbatches is not the one the predictor was made for.
        """
        self._require_count(microbatches)
        self.place_inputs(microbatches, self._here([*self._encoders, *self._llm]))
        self.walk([*self._once, *self._per_token])
        losses = self._predicted(LLM, 1)
        self._forget()
        return losses

    def draw(self, microbatches: Sequence[tuple[Signature, InputShapes]]) -> dict[str, list[np.ndarray]]:
        """Draws with each generator, from noise and the LLM's hidden states.

        Args:
          microbatches: as for a training step; their patches are noise.

        Returns:
          Patches [R, T, E] by generator and microbatch.

        Raises:
          ValueError: when the number of microbatches is not the one the predictor was made for.
        """
        self._require_count(microbatches)
        self.place_inputs(microbatches, self._here([*self._encoders, *self._llm]))
        self.walk([*self._once, *self._per_token])
        drawn = {}
        for name, node in self.placed.model.generators.items():
            self.walk(self._conditions[name])
            say = partial(self._say, name, microbatches, self._received())
            drawn[name] = node.module.draw([inputs[name] for _, inputs in microbatches], say)
        self._forget()
        return drawn

    def _say(
        self,
        name: str,
        microbatches: Sequence[tuple[Signature, InputShapes]],
        received: Mapping[tuple[str, int], Mapping[str, jax.Array]],
        given: Sequence[Mapping[str, np.ndarray]],
    ) -> list[np.ndarray]:
        """A generator's predictions for the host inputs ``given``, under the conditions that it has received."""
        self.carry = {key: dict(value) for key, value in received.items()}
        batch = [
            (signature, {**inputs, name: own}) for (signature, inputs), own in zip(microbatches, given, strict=True)
        ]
        own = [stage for stage, found in self.placed.stages.items() if found.model.module == name]
        self.place_inputs(batch, self._here(own))
        self.walk(self._steps[name])
        return self._predicted(name)

    def _require_count(self, microbatches: Sequence[Any]) -> None:
        if len(microbatches) != self.microbatches:
            raise ValueError(f"{len(microbatches)} microbatches for a predictor of {self.microbatches}")

    def _here(self, stages: Sequence[str]) -> list[str]:
        return [name for name in stages if name in self.placed.local_stages]

    def _received(self) -> dict[tuple[str, int], dict[str, jax.Array]]:
        return {key: dict(value) for key, value in self.carry.items()}

    def _predicted(self, module: str, number: int = 0) -> list[np.ndarray]:
        """Result ``number`` of a module's last stage for every microbatch, on the host."""
        said, out = self._out.pop(module, {}), list[jax.Array]()
        together = len(self.signatures) if module == LLM else 1
        for first in range(0, len(self.signatures), together):
            everywhere = self._everywhere[module, number, self.signatures[first]]
            own = [jax.tree.leaves(said[index])[number] for index in range(first, first + together) if index in said]
            out += everywhere(own) if everywhere else own
        return [np.asarray(jax.device_get(one)) for one in out]

    def _forget(self) -> None:
        self.carry, self.inputs, self._out, self.travelling = {}, {}, {}, {}

    def _forward(self, op: Op) -> None:
        key = (op.stage, op.microbatch)
        program = self._programs[op.stage, self.signatures[op.microbatch]]
        out = program(self.params[op.stage], self.inputs.pop(key), self.carry.pop(key, {}))
        if out.result is not None:
            self._out.setdefault(self.graph.stage(op.stage).module, {})[op.microbatch] = out.result
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
        inputs["positions"][row, end] = inputs["positions"][row, end - 1].max() + 1
