"""The programs of forward passes over a placed model: prediction, prefill of prompts, and decoding of one token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from mmjax.attention.reach import DISTANCES
from mmjax.attention.row_runs import MAX_RUNS
from mmjax.data.together import MICROBATCHES
from mmjax.mesh.boundary import Boundary
from mmjax.mesh.spmd import Program
from mmjax.models.config import LLM
from mmjax.models.sampling import SamplingParams
from mmjax.pipeline.decode import CHOICE, ORDER, StageDecoding
from mmjax.pipeline.place import InputShapes, PlacedModel, Stage, TracedStages
from mmjax.pipeline.walker import Signature
from mmjax.schedule.graph import edge_name


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass.

    Attributes:
      programs: by (place, buckets).
      boundaries: by (edge between two places, buckets).
      inputs: names of the host inputs, by stage, for stages whose inputs differ from training.
      whole_rows: stages whose rows are whole on every rank of cp.
    """

    programs: Mapping[tuple[str, Signature], Program]
    boundaries: Mapping[tuple[str, Signature], Boundary]
    inputs: Mapping[str, tuple[str, ...]]
    whole_rows: frozenset[str] = frozenset()


def prediction(traced: Mapping[Signature, TracedStages]) -> ForwardPass:
    """The pass in which stages predict, in place of computing losses.

    ``traced`` has ``placed.trace(shapes)`` by the buckets of a microbatch, such as {(("vision", 0),): ...}.
    """
    programs, boundaries, shared = {}, {}, {}
    for signature, stages in traced.items():
        for name, f in stages.stages.items():
            if id(f) not in shared:
                shared[id(f)] = Program.of(f"infer {name}", f.infer, f.forward_avals)
            programs[name, signature] = shared[id(f)]
        boundaries |= {(edge, signature): boundary for edge, boundary in stages.boundaries.items()}
    return ForwardPass(programs, boundaries, {})


def decoding(
    placed: PlacedModel,
    shapes: Mapping[Signature, InputShapes],
    traced: Mapping[Signature, TracedStages],
    predicted: ForwardPass,
    room: int,
) -> tuple[ForwardPass, ForwardPass]:
    """The pass of prefill, and the pass of decoding one token of each row.

    Args:
      placed: the model on its devices, such as ``place_model(...).placed``.
      shapes: input shapes of every bucket combination, such as (("vision", 0),), without send lists.
      traced: the stages traced for these shapes, ``placed.trace(shapes)``, by the same keys.
      predicted: their ``prediction``, whose programs of encoders are used in prefill too.
      room: capacity of a row in tokens.
    """
    language_model = _LanguageModelPrograms(placed, room)
    prefills, prefill_edges = dict(predicted.programs), dict(predicted.boundaries)
    decodes, decode_edges = dict[tuple[str, Signature], Program](), dict[tuple[str, Signature], Boundary]()
    for signature, inputs in shapes.items():
        encoded = {name: f.out.activation for name, f in traced[signature].stages.items()}
        for name, stage in language_model.stages(inputs[LLM], encoded).items():
            prefills[name, signature], decodes[name, signature] = stage.prefill, stage.decode
            prefill_edges |= {(edge, signature): boundary for edge, boundary in stage.prefill_edges.items()}
            decode_edges |= {(edge, signature): boundary for edge, boundary in stage.decode_edges.items()}
    prefill_inputs, decode_inputs = language_model.prefill_inputs, language_model.decode_inputs
    prefill = ForwardPass(prefills, prefill_edges, prefill_inputs, frozenset(prefill_inputs))
    return prefill, ForwardPass(decodes, decode_edges, decode_inputs, frozenset(decode_inputs))


@dataclass(frozen=True)
class _StagePrograms:
    """The programs of one stage, and the boundaries of the edges that enter it, by edge between two places."""

    prefill: Program
    decode: Program
    prefill_edges: Mapping[str, Boundary]
    decode_edges: Mapping[str, Boundary]


class _LanguageModelPrograms:
    """Traces the programs of the language model's stages.

    Attributes:
      prefill_inputs, decode_inputs: names of the host inputs by stage.
    """

    def __init__(self, placed: PlacedModel, room: int):
        self._placed, self._room = placed, room
        self._stages = [stage for stage in placed.stages.values() if stage.model.module == LLM]
        choice = {stage.name: (CHOICE,) * stage.model.last for stage in self._stages}
        self.prefill_inputs = {stage.name: (*stage.model.inputs, *choice[stage.name]) for stage in self._stages}
        self.decode_inputs = {
            stage.name: (*stage.model.following, ORDER, *choice[stage.name]) for stage in self._stages
        }
        self._decodings: dict[Any, tuple[StageDecoding, Program]] = {}

    def stages(self, inputs: Mapping[str, Any], encoded: Mapping[str, Any]) -> dict[str, _StagePrograms]:
        """The programs by stage, from the shapes of the host inputs and the avals of the encoders' activations."""
        rows = inputs["segments"].shape[0]
        following: dict[str, Any] = {
            name: _shaped(array, (rows, 1, *array.shape[2:]))
            for name, array in inputs.items()
            if name not in (MAX_RUNS, DISTANCES, MICROBATCHES)
        }
        following[ORDER] = jax.ShapeDtypeStruct((rows, 1), np.int32)
        choices = (np.int32, np.float32, np.float32, np.uint32, np.int32)
        choice = SamplingParams(*cast(Any, [jax.ShapeDtypeStruct((rows,), dtype) for dtype in choices]))
        prefilled, decoded, result = dict(encoded), dict[str, Any](), dict[str, _StagePrograms]()
        for stage in self._stages:
            prefill_edges, decode_edges = self._entering(stage, prefilled), self._entering(stage, decoded)
            prompt_avals = (
                self._avals(stage, {**inputs, CHOICE: choice}, self.prefill_inputs),
                self._arrived(stage, prefill_edges),
            )
            token_avals = (
                self._avals(stage, {**following, CHOICE: choice}, self.decode_inputs),
                self._arrived(stage, decode_edges),
            )
            decoding, decode = self._decoding(stage, prompt_avals, token_avals)
            prefilled[stage.name], decoded[stage.name] = decoding.out.activation, decode.outputs[0].activation
            result[stage.name] = _StagePrograms(decoding.prefill, decode, prefill_edges, decode_edges)
        return result

    def _entering(self, stage: Stage, out: Mapping[str, Any]) -> dict[str, Boundary]:
        """The boundaries that enter a stage from the places in ``out``, by edge between two places."""
        graph = self._placed.graph
        pairs = dict.fromkeys(
            graph.ends(edge, m) for edge in graph.in_edges(stage.name) for m in graph.lane_cycle(edge)
        )
        return {edge_name(s, t): self._placed.boundary(s, t, out[s], whole_rows=True) for s, t in pairs if s in out}

    def _arrived(self, stage: Stage, boundaries: Mapping[str, Boundary]) -> dict[str, Any]:
        """The avals of the received activations, by source stage; they are equal for all lanes of a source."""
        edges = {edge.src: edge_name(edge.src, stage.name) for edge in self._placed.graph.in_edges(stage.name)}
        return {s: boundaries[name].forward.target_aval for s, name in edges.items() if name in boundaries}

    def _avals(self, stage: Stage, inputs: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
        def avals(name: str) -> Any:  # an input may be a tree, such as ``SamplingParams``
            return jax.tree.map(lambda x: self._placed.input_aval(stage, name, x, whole_rows=True), inputs[name])

        return {name: avals(name) for name in names[stage.name]}

    def _decoding(
        self, stage: Stage, prompt_avals: tuple[Any, Any], token_avals: tuple[Any, Any]
    ) -> tuple[StageDecoding, Program]:
        key = (stage.name, *((aval.shape, aval.dtype) for aval in jax.tree.leaves((prompt_avals, token_avals))))
        if key not in self._decodings:
            inputs, carry = prompt_avals
            cells, room = self._placed.cells, self._room
            stage_decoding = StageDecoding(stage.model, stage.state, inputs, carry, cells=cells, room=room)
            self._decodings[key] = stage_decoding, stage_decoding.decode(*token_avals)
        return self._decodings[key]


def _shaped(array: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, array.dtype)
