"""The programs of forward passes over a placed model: prediction, the prompts of answers, and a token that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from mmjax.mesh.boundary import Boundary
from mmjax.mesh.spmd import Program
from mmjax.models.config import LLM
from mmjax.models.sampling import SamplingParams
from mmjax.pipeline.build import InputShapes, PlacedModel, Shapes, Stage
from mmjax.pipeline.decode import CHOICE, ORDER, StageDecoding
from mmjax.pipeline.walker import Signature
from mmjax.schedule.graph import edge_name


@dataclass(frozen=True)
class Pass:
    """A forward pass.

    Attributes:
      programs: by place and buckets.
      boundaries: by edge between two places and buckets.
      inputs: names of the host inputs, by stage where they are others than in training.
      whole_rows: stages whose rows are whole on every rank of cp.
    """

    programs: Mapping[tuple[str, Signature], Program]
    boundaries: Mapping[tuple[str, Signature], Boundary]
    inputs: Mapping[str, tuple[str, ...]]
    whole_rows: frozenset[str] = frozenset()


def prediction(traced: Mapping[Signature, Shapes]) -> Pass:
    """What stages predict in place of their losses."""
    programs, boundaries, shared = {}, {}, {}
    for signature, own in traced.items():
        for name, f in own.stages.items():
            if id(f) not in shared:
                shared[id(f)] = Program.of(f"infer {name}", f.infer, f.forward_avals)
            programs[name, signature] = shared[id(f)]
        boundaries |= {(edge, signature): boundary for edge, boundary in own.boundaries.items()}
    return Pass(programs, boundaries, {})


def decoding(
    placed: PlacedModel,
    shapes: Mapping[Signature, InputShapes],
    traced: Mapping[Signature, Shapes],
    predicted: Pass,
    room: int,
) -> tuple[Pass, Pass]:
    """Prompts, and tokens that follow.

    Args:
      placed: the model on its devices.
      shapes: input shapes of every bucket combination.
      traced: the stages that were traced for them.
      predicted: their ``prediction``, whose programs of encoders serve the prompts too.
      room: tokens of a row.
    """
    maker = _Maker(placed, room)
    begins, begin_edges = dict(predicted.programs), dict(predicted.boundaries)
    follows, follow_edges = dict[tuple[str, Signature], Program](), dict[tuple[str, Signature], Boundary]()
    for signature, inputs in shapes.items():
        encoded = {name: f.out.activation for name, f in traced[signature].stages.items()}
        for name, (begin, follow, begun, followed) in maker.stages(inputs[LLM], encoded).items():
            begins[name, signature], follows[name, signature] = begin, follow
            begin_edges |= {(edge, signature): boundary for edge, boundary in begun.items()}
            follow_edges |= {(edge, signature): boundary for edge, boundary in followed.items()}
    begin = Pass(begins, begin_edges, maker.begin, frozenset(maker.begin))
    return begin, Pass(follows, follow_edges, maker.follow, frozenset(maker.follow))


class _Maker:
    """Makes the programs of the language model's stages.

    Attributes:
      begin, follow: names of the host inputs by stage.
    """

    def __init__(self, placed: PlacedModel, room: int):
        self._placed, self._room = placed, room
        self._stages = [stage for stage in placed.stages.values() if stage.model.module == LLM]
        choice = {stage.name: (CHOICE,) * bool(stage.model.logits) for stage in self._stages}
        self.begin = {stage.name: (*stage.model.inputs, *choice[stage.name]) for stage in self._stages}
        self.follow = {stage.name: (*stage.model.following, ORDER, *choice[stage.name]) for stage in self._stages}
        self._made: dict[Any, tuple[StageDecoding, Program]] = {}

    def stages(self, inputs: Mapping[str, Any], encoded: Mapping[str, Any]) -> dict[str, Any]:
        """By stage, its two programs, and the boundaries of the edges that enter it in each."""
        rows = inputs["segments"].shape[0]
        following: dict[str, Any] = {name: _shaped(own, (rows, 1, *own.shape[2:])) for name, own in inputs.items()}
        following[ORDER] = jax.ShapeDtypeStruct((rows, 1), np.int32)
        choices = (np.int32, np.float32, np.float32, np.uint32, np.int32)
        choice = SamplingParams(*cast(Any, [jax.ShapeDtypeStruct((rows,), dtype) for dtype in choices]))
        out, last, result = dict(encoded), dict[str, Any](), dict[str, Any]()
        for stage in self._stages:
            begun, followed = self._entering(stage, out), self._entering(stage, last)
            given = (self._avals(stage, {**inputs, CHOICE: choice}, self.begin), self._arrived(stage, begun))
            behind = (self._avals(stage, {**following, CHOICE: choice}, self.follow), self._arrived(stage, followed))
            made, follow = self._decoding(stage, given, behind)
            out[stage.name], last[stage.name] = made.out.activation, follow.outputs[0].activation
            result[stage.name] = (made.begin, follow, begun, followed)
        return result

    def _entering(self, stage: Stage, out: Mapping[str, Any]) -> dict[str, Boundary]:
        """The boundaries that enter a stage from the places with an output, by edge between two places."""
        graph = self._placed.graph
        pairs = dict.fromkeys(
            graph.ends(edge, m) for edge in graph.in_edges(stage.name) for m in graph.lane_cycle(edge)
        )
        return {edge_name(s, t): self._placed.boundary(s, t, out[s], whole_rows=True) for s, t in pairs if s in out}

    def _arrived(self, stage: Stage, boundaries: Mapping[str, Boundary]) -> dict[str, Any]:
        """The avals of what has arrived by these boundaries, by source stage; all lanes of a source send alike."""
        edges = {edge.src: edge_name(edge.src, stage.name) for edge in self._placed.graph.in_edges(stage.name)}
        return {s: boundaries[name].forward.target_aval for s, name in edges.items() if name in boundaries}

    def _avals(self, stage: Stage, inputs: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
        def avals(name: str) -> Any:  # an input may be a tree, such as how the next token is chosen
            return jax.tree.map(lambda x: self._placed.input_aval(stage, name, x, whole_rows=True), inputs[name])

        return {name: avals(name) for name in names[stage.name]}

    def _decoding(self, stage: Stage, given: tuple[Any, Any], behind: tuple[Any, Any]) -> tuple[StageDecoding, Program]:
        key = (stage.name, *((aval.shape, aval.dtype) for aval in jax.tree.leaves((given, behind))))
        if key not in self._made:
            made = StageDecoding(stage.model, stage.state, *given, self._placed.cells, self._room)
            self._made[key] = made, made.follow(*behind)
        return self._made[key]


def _shaped(array: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, array.dtype)
