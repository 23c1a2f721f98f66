"""Text, losses and drawings under any layout: forward-only schedules over the training stages.

For text, encoders run once and the language model's stages once over the prompts, which leaves a cache in each; then
once for every new token (see ``decode``). To draw, the language model runs once, and a generator's stages as often as
it has steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from mmjax.attention.language import Rules
from mmjax.configurable import ConfigError, gin_name
from mmjax.mesh.spmd import Program
from mmjax.models.config import LLM
from mmjax.models.module import Module
from mmjax.pipeline.answers import Answers, Said
from mmjax.pipeline.build import InputShapes, PlacedModel
from mmjax.pipeline.compile import compile_all
from mmjax.pipeline.config import Sampling
from mmjax.pipeline.everywhere import Everywhere
from mmjax.pipeline.passes import Pass, decoding, prediction
from mmjax.pipeline.stage import Output
from mmjax.pipeline.stage_state import State
from mmjax.pipeline.walker import Signature, Walker
from mmjax.schedule.ops import ONCE, Op
from mmjax.schedule.schedules import forward_only

GREEDY = Sampling()


class Predictor(Walker):
    """Text, losses, and what generators draw, for microbatches of given shapes.

    Attributes:
      room: tokens that a row has room for, prompt and answer.
    """

    def __init__(self, placed: PlacedModel, shapes: Mapping[Signature, InputShapes], microbatches: int, room: int = 0):
        """Traces the forward programs.

        Args:
          placed: the model on its devices.
          shapes: input shapes of every bucket combination that may occur. Prompts and what is scored have no lists of
            tokens that ranks read: what follows them is not known yet.
          microbatches: number of microbatches that are answered side by side.
          room: tokens of prompt and answer in a row; 0 means as many as the widest row of prompts has.
        """
        shapes = {signature: placed.without_lists(inputs) for signature, inputs in shapes.items()}
        self._shapes, self._traced = shapes, {signature: placed.shapes(inputs) for signature, inputs in shapes.items()}
        self._prediction = self._pass = prediction(self._traced)
        self.room = room or max(inputs[LLM]["segments"].shape[1] for inputs in shapes.values())
        costs = placed.nominal_costs(next(iter(shapes.values())))
        schedule = forward_only(placed.graph, microbatches, costs)
        super().__init__(placed, schedule.graph, self._prediction.boundaries)
        self.microbatches = microbatches
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
        self._caches: dict[tuple[str, int], Any] = {}
        self._everywhere: dict[Any, Everywhere | None] = {}
        self.handlers["F"] = self._forward

    @property
    def writes(self) -> bool:
        """Whether the language model gives logits, and its tokens do not see later ones, so that it can write text."""
        module = self.placed.model.nodes[LLM].module
        return type(module).logits is not Module.logits and not Rules.parse(module.sees).shows_later

    def require_no_later(self) -> None:
        """Requires that no token sees text that is generated after it.

        Raises:
          ConfigError: the language model's mask has a rule that lets it.
        """
        module = self.placed.model.nodes[LLM].module
        if later := Rules.parse(module.sees).shows_later:
            field = f"{LLM}/{gin_name(type(module.config))}.mask"
            fix = f"'{later}' shows tokens those that are generated after them, so it writes no text; write 'before'"
            raise ConfigError(f"{field}={module.sees!r}: {fix}, or train with Train.eval_samples=0")

    @cached_property
    def _decoding(self) -> tuple[Pass, Pass]:
        """The passes over prompts, and over tokens that follow."""
        self.require_no_later()
        if not self.writes:
            name = type(self.placed.model.nodes[LLM].module).__name__
            raise ConfigError(f"{name} has no logits, so it writes no text: add a method Module.logits to it")
        return decoding(self.placed, self._shapes, self._traced, self._prediction, self.room)

    def _shared(self, name: str, number: int, aval: Any) -> Everywhere | None:
        """The program that brings result ``number`` of a place to every process: the language model's for all
        microbatches at once, which have one shape; a generator's one by one."""
        module = self.placed.places[name].model.module
        key = name, number, aval.shape, aval.dtype
        if key not in self._everywhere:
            count = self.microbatches if module == LLM else 1
            self._everywhere[key] = self.placed.everywhere(f"predictions of {module}", name, aval, count)
        return self._everywhere[key]

    def _reader(self, op: Op) -> str:
        """The stage that an op works for: its edge's destination, or its own."""
        return self.graph.edge(op.edge).dst if op.edge else op.stage

    def _from_llm(self, op: Op) -> bool:
        return bool(op.edge) and self.graph.edge(op.edge).src in self._llm

    def _from_encoder(self, op: Op) -> bool:
        return self.graph.edge(op.edge).src in self._encoders

    def programs(self) -> list[Program]:
        """All programs that this process has to compile; repeats are compiled once."""
        passes = [self._prediction, *(self._decoding if self.writes else ())]
        found = [program for own in passes for program in own.programs.values()]
        boundaries = [boundary for own in passes for boundary in own.boundaries.values()]
        found += [p for boundary in boundaries for p in boundary.forward.programs()]
        found += [p for tie in self.placed.ties.values() for p in tie.forward.programs()]
        found += self.placed.prepare_programs()
        last = {place for node in self.graph.losses for place in node.lane_names}
        for (name, _), program in (item for own in passes for item in own.programs.items() if item[0][0] in last):
            results = jax.tree.leaves(_output_of(program.outputs).result)
            shared = [self._shared(name, number, aval) for number, aval in enumerate(results)]
            found += [one.program for one in shared if one]
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
        stops: Collection[int],
        sampling: Sampling = GREEDY,
        report: Callable[[Sequence[Sequence[Said]]], None] = lambda said: None,
    ) -> list[list[Said]]:
        """Continues every row until one of ``stops`` or ``limit`` new tokens.

        Args:
          microbatches: as for ``losses``; LLM rows hold one prompt each, then padding (segment 0).
          starts: per microbatch, the prompt's length in each row; 0 for an empty row.
          limit: largest number of new tokens; an answer ends in any case when its row has no ``room`` for another.
          stops: tokens that end an answer; they are not returned.
          sampling: how tokens are chosen.
          report: called after each token with the answers so far; it may raise.

        Returns:
          Answers by microbatch and row.

        Raises:
          ValueError: when the number of microbatches is not the one the predictor was made for, or a prompt is longer
            than its room.
          ConfigError: the language model has no logits, or its mask shows tokens later ones.
        """
        self._require_fitting(microbatches)
        if (longest := max(int(np.max(start, initial=0)) for start in starts)) > self.room:
            raise ValueError(f"a prompt of {longest} tokens in rows with room for {self.room}")
        (begin, follow), stages = self._decoding, self._here(self._llm)
        words = Rules.parse(self.placed.model.nodes[LLM].module.sees).generated
        answers = Answers(microbatches, starts, limit, stops, sampling, self.room, words)
        try:
            self._run(begin, answers.first(), self._here([*self._encoders, *self._llm]), self._once + self._per_token)
            while not answers.done:
                answers.add(self._predicted(LLM), self._predicted(LLM, 1))
                report(answers.said)
                if not answers.done:
                    self._run(follow, answers.following(), stages, self._per_token)
        finally:
            self._forget()
        return answers.said

    def _run(
        self,
        forward: Pass,
        microbatches: Sequence[tuple[Signature, InputShapes]],
        stages: Sequence[str],
        ops: Sequence[Op],
    ) -> None:
        """Walks ops of a pass, with the host inputs of these stages."""
        self._pass, self.boundaries, self._out = forward, forward.boundaries, {}
        self.place_inputs(microbatches, stages, forward.inputs, forward.whole_rows)
        self.walk(ops)

    def losses(self, microbatches: Sequence[tuple[Signature, InputShapes]]) -> list[Float[np.ndarray, " B"]]:
        """The weighted loss of each LLM row, the sum over its targets, by microbatch.

        Args:
          microbatches: as for a training step, without lists of tokens that ranks read.

        Raises:
          ValueError: when the number of microbatches is not the one the predictor was made for, or they have lists.
        """
        self._require_fitting(microbatches)
        self._see(microbatches)
        losses = self._predicted(LLM)
        self._forget()
        return losses

    def draw(self, microbatches: Sequence[tuple[Signature, InputShapes]]) -> dict[str, list[np.ndarray]]:
        """Draws with each generator, from noise and the LLM's hidden states.

        Args:
          microbatches: as for ``losses``; their patches are noise.

        Returns:
          Patches [R, T, E] by generator and microbatch.

        Raises:
          ValueError: when the number of microbatches is not the one the predictor was made for, or they have lists.
        """
        self._require_fitting(microbatches)
        self._see(microbatches)
        drawn = {}
        for name, node in self.placed.model.generators.items():
            self.walk(self._conditions[name])
            say = partial(self._say, name, microbatches, self._received())
            drawn[name] = node.module.draw([inputs[name] for _, inputs in microbatches], say)
        self._forget()
        return drawn

    def _see(self, microbatches: Sequence[tuple[Signature, InputShapes]]) -> None:
        """Runs encoders and the language model over whole rows."""
        stages = self._here([*self._encoders, *self._llm])
        self._run(self._prediction, microbatches, stages, self._once + self._per_token)

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
        self._run(self._prediction, batch, self._here(own), self._steps[name])
        return self._predicted(name)

    def _require_fitting(self, microbatches: Sequence[Any]) -> None:
        if len(microbatches) != self.microbatches:
            raise ValueError(f"{len(microbatches)} microbatches for a predictor of {self.microbatches}")
        for _, inputs in microbatches:
            self.placed.require_no_lists(inputs, "a predictor")

    def _here(self, stages: Sequence[str]) -> list[str]:
        return [name for name in stages if name in self.placed.local_stages]

    def _received(self) -> dict[tuple[str, int], dict[str, jax.Array]]:
        return {key: dict(value) for key, value in self.carry.items()}

    def _predicted(self, module: str, number: int = 0) -> list[np.ndarray]:
        """Result ``number`` of a module's last stage for every microbatch, on the host."""
        said, out = self._out.get(module, {}), list[jax.Array]()
        (node,) = [node for node in self.graph.losses if node.module == module]
        together = len(self.signatures) if module == LLM else 1
        for first in range(0, len(self.signatures), together):
            own = [jax.tree.leaves(said[index])[number] for index in range(first, first + together) if index in said]
            place = node.lane_name(first)
            program = self._pass.programs[place, self.signatures[first]]
            everywhere = self._shared(place, number, jax.tree.leaves(_output_of(program.outputs).result)[number])
            out += everywhere(own) if everywhere else own
        return [np.asarray(jax.device_get(one)) for one in out]

    def _forget(self) -> None:
        self.carry, self.inputs, self._out, self._caches, self.travelling = {}, {}, {}, {}, {}

    def _forward(self, op: Op) -> None:
        key = (op.stage, op.microbatch)
        place = self.place(op)
        program = self._pass.programs[place, self.signatures[op.microbatch]]
        cache = [self._caches.pop(key)] if key in self._caches else []
        found = program(self.params[place], self.inputs.pop(key), self.carry.pop(key, {}), *cache)
        out = _output_of(found)
        if not isinstance(found, Output):
            _, self._caches[key] = found
        if out.result is not None:
            self._out.setdefault(self.graph.stage(op.stage).module, {})[op.microbatch] = out.result
        self.send(op.stage, op.microbatch, out.activation)


def _output_of(found: Any) -> Output:
    """The output among what a program returns, which may be a cache too."""
    return found if isinstance(found, Output) else found[0]
