"""The computation of a pipeline stage: pure functions of parameters, host inputs and incoming activations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Array, Float

from mmjax.attention.cache import Cache
from mmjax.attention.kernels import AttentionCall
from mmjax.attention.row_runs import ANY_RUNS
from mmjax.mesh.spread import Axes
from mmjax.models.context import Inputs
from mmjax.models.handles import Open
from mmjax.models.layers import Params, Sums
from mmjax.models.module import Loss
from mmjax.models.parameters import ModuleSlice

Carry = Mapping[str, Array]
"""Incoming activations of a stage, by the name of the stage that sends them."""


@dataclass(frozen=True, kw_only=True)
class StageModel:
    """One pipeline stage of one module, without devices. Its methods run inside ``shard_map``.

    ``ModuleStage`` is the stage of a ``MultimodalModel``; another model has a subclass of its own.

    Attributes:
      name: the stage's name, such as ``llm.1``.
      module: the module whose layout it runs under.
      index: pipeline index inside the module.
      sources: names of the stages that send it activations.
      slices: its parameters, one slice for each module. An encoder's last stage has the projector's parameters too, and
        an LLM stage those of the projectors for its layers.
      inputs: names of the host inputs that it reads.
      following: host inputs that it reads of generated tokens, among which there are no tokens of other modules.
      remembers: host inputs of earlier tokens that its layers' masks read while text is generated.
      losses: the losses of the stage by name, equal in all stages of a module that have any; a stage without losses
        has neither ``loss`` nor ``predict``.
      ends: whether ``loss`` and ``predict`` are of this stage; otherwise its layers alone give losses.
      opens: functions from stored parameters to weights, by name; other parameters are stored as weights.
      before: the previous stage of its module, one of ``sources``; "" for the first stage.
      last: whether it is the last stage of its module, whose activation goes to other modules.
      send_list: the name of a host input that lists the tokens which each cp rank of the activation's only target
        needs; "" for no target or several. If the input is missing, all ranks receive complete rows.
      max_runs: the number of runs in rows for which its attention is compiled (see ``attention.row_runs``).
      distances: the distances of cp transfers for which its attention is compiled (see ``attention.reach``).
    """

    name: str
    module: str
    index: int = 0
    sources: tuple[str, ...] = ()
    slices: tuple[ModuleSlice, ...]
    inputs: tuple[str, ...] = ()
    following: tuple[str, ...] = ()
    remembers: tuple[str, ...] = ()
    losses: Mapping[str, Loss] = field(default_factory=dict)
    ends: bool = True
    opens: Mapping[str, Open] = field(default_factory=dict)
    before: str = ""
    last: bool = True
    send_list: str = ""
    max_runs: int = ANY_RUNS
    distances: tuple[int, ...] | None = None

    def read(self, available: Collection[str]) -> tuple[str, ...]:
        """Names of the host inputs that it reads; the send list only if it is among the ``available`` inputs of its
        module.
        """
        return (*self.inputs, self.send_list) if self.send_list in available else self.inputs

    def compiled_runs(self, call: AttentionCall) -> tuple[int, ...]:
        """The values of ``max_runs`` that its attention is compiled for, one for each mask of its layers (see
        ``Kernel.compiled_runs``).

        ``call`` has ``max_runs``, devices, dtype, tokens and ``cp_way`` of its rows; mask and heads are not read.
        """
        return ()

    @property
    def needs_neighbours(self) -> str:
        """The setting of a backend that needs the tokens of each medium to be neighbours, with its value; "" without
        one.
        """
        return ""

    def completed(self, inputs: Inputs, carry: Carry, cells: int) -> Inputs:
        """The host inputs of ``forward``, ``loss`` and ``predict``, with latents of ``carry`` in them.

        By default there are none. Arguments are those of ``forward``.
        """
        del carry, cells
        return inputs

    def forward(self, p: Params, inputs: Inputs, carry: Carry, axes: Axes, cells: int) -> tuple[Array, Sums]:
        """The features of the stage, [B, …] with local rows first, and the sums of its layers' losses, by name.

        Args:
          p: parameters by module, such as p["llm"]["layers"].
          inputs: the stage's host inputs by name, local rows of one microbatch.
          carry: incoming activations by the name of the stage that sends them.
          axes: mesh axes by role.
          cells: the number of cells of these rows.
        """
        raise NotImplementedError

    def give(self, p: Params, inputs: Inputs, x: Array, axes: Axes) -> Array:
        """The activation for the stages that have this one as a source, from ``x``, the result of ``forward``."""
        return x

    def loss(self, p: Params, inputs: Inputs, x: Array, axes: Axes) -> Mapping[str, Float[Array, ""]]:
        """The sum over the local tokens of each of ``losses`` that is not of layers, by name.

        ``x`` are the features of ``forward``. Only the last stage of a module has other losses than those of layers.
        """
        raise NotImplementedError

    def predict(self, p: Params, inputs: Inputs, x: Array, axes: Axes) -> Any:
        """Predictions in evaluation, an array whose first dimension is local rows, or ``None`` (see
        ``Module.predict``), from ``x``, the result of ``forward``.
        """
        return None

    def decode(self, p: Params, inputs: Inputs, carry: Carry, axes: Axes, cells: int, cache: Cache) -> Array:
        """``forward`` for new tokens of rows whose earlier tokens are in a cache; fills ``cache.new``.

        ``inputs`` are of the new tokens. Tokens of other modules are read if ``carry`` has them: they are at the
        beginning of rows only, and afterwards in the cache. Other arguments are those of ``forward``.
        """
        raise NotImplementedError

    def logits(self, p: Params, inputs: Inputs, x: Array, axes: Axes) -> Float[Array, "B 1 V"]:
        """Logits ``[B, 1, V]`` of each row's next token in this rank's part of the vocabulary, in the last stage.

        ``x`` is the result of ``decode`` for each row's last token; ``p`` and ``inputs`` are those of ``forward``.
        """
        raise NotImplementedError
