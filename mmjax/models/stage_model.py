"""What one pipeline stage computes: a pure function of its parameters, its host inputs and what reaches it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.attention.cache import Cache
from mmjax.attention.ways import ANY, Way
from mmjax.configurable import gin_name
from mmjax.mesh.spread import Axes
from mmjax.models.callbacks import CalledAt
from mmjax.models.config import lora_name, projector_name
from mmjax.models.context import Context, Inputs
from mmjax.models.handles import Open
from mmjax.models.layers import Params
from mmjax.models.lora.layers import with_adapters
from mmjax.models.module import Loss, run_layers
from mmjax.models.nodes import Edge, Node
from mmjax.models.parameters import ModuleSlice
from mmjax.models.placeholders import merge_modality_tokens, with_newlines
from mmjax.models.projector.layers import injected_name, joined, merged, project

Carry = Mapping[str, Array]
"""Activations that reach a stage, by the name of the stage they come from."""


@dataclass(frozen=True)
class StageModel:
    """One pipeline stage of one module, without devices.

    Attributes:
      name: such as ``llm.1``.
      module: the module whose layout it runs under.
      index: pipeline index inside the module.
      sources: names of the stages whose activations it takes.
      slices: parameters it holds, one slice per module (an encoder's last stage holds the projector too, and an LLM
        stage the projectors' parameters for its layers).
      inputs: host inputs it reads.
      forward: ``(params, inputs, carry, axes, cells) -> features``.
      loss: ``(params, inputs, features, axes) -> sum of each loss [], by name``; ``None`` where it gives none.
      predict: takes the place of ``loss`` in evaluation (see ``Module.predict``).
      decode: ``(params, inputs, carry, axes, cells, cache) -> features`` in place of ``forward`` where text is
        generated. Tokens of other modules take part only where the rows begin: they are in the cache afterwards.
      logits: ``(params, inputs, features, axes) -> logits`` of a module's last stage (see ``Module.logits``).
      following: host inputs that it reads of tokens that follow, for which no other module has tokens.
      remembers: host inputs of earlier tokens that its layers' masks read where text is generated.
      losses: the losses that it gives, by name.
      give: ``(params, inputs, features, axes) -> activation``, which other stages take; ``None`` where that is the
        features.
      opens: how stored parameters become weights, by name among the stage's; those not named are the weights.
      before: the one of ``sources`` that is the stage before it in its module; "" for the first.
      last: whether it is its module's last stage, so that what takes its activation are other modules.
      send_list: host input with the tokens that each rank of cp of the one module that takes its activation reads; the
        inputs need not have it, then all ranks take whole rows. "" where none or several take it.
    """

    name: str
    module: str
    index: int
    sources: tuple[str, ...]
    slices: tuple[ModuleSlice, ...]
    inputs: tuple[str, ...]
    forward: Callable[[Params, Inputs, Carry, Axes, int], Array]
    loss: Callable[[Params, Inputs, Array, Axes], Mapping[str, Array]] | None = None
    predict: Callable[[Params, Inputs, Array, Axes], Any] | None = None
    decode: Callable[[Params, Inputs, Carry, Axes, int, Cache], Array] | None = None
    logits: Callable[[Params, Inputs, Array, Axes], Array] | None = None
    following: tuple[str, ...] = ()
    remembers: tuple[str, ...] = ()
    losses: Mapping[str, Loss] = field(default_factory=dict)
    give: Callable[[Params, Inputs, Array, Axes], Array] | None = None
    opens: Mapping[str, Open] = field(default_factory=dict)
    before: str = ""
    last: bool = True
    send_list: str = ""

    def read(self, given: Collection[str]) -> tuple[str, ...]:
        """The host inputs that it reads, if its module's are those ``given``."""
        return (*self.inputs, self.send_list) if self.send_list in given else self.inputs


@dataclass(frozen=True)
class Arriving:
    """An activation from another module, whose parts lie side by side in its last dimension.

    Attributes:
      stage: the stage that it comes from.
      tokens: the module's tokens.
      injected: by layer of this stage that the module enters again, numbered in this stage's module, the part that
        enters there: the tokens, or the output of an inner layer.
      activation: of the projectors through which it enters.
    """

    stage: str
    tokens: slice
    injected: Mapping[int, slice]
    activation: str


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The computation of one stage.

    Attributes:
      name, node: the module.
      last: whether the stage is its module's last.
      before: the stage before it; "" for the first.
      layers: its layers, numbered in the module.
      unroll: see ``MultimodalModel``.
      entering: the activations that other modules send it, by edge.
      levels: layers of the module whose outputs others take. From the stage behind such a layer on they travel beside
        the features, in the last dimension.
    """

    name: str
    node: Node
    last: bool
    before: str
    layers: range
    unroll: bool
    entering: Mapping[Edge, Arriving]
    levels: tuple[int, ...]

    def forward(self, p: Params, inputs: Inputs, carry: Carry, axes: Axes, cells: int) -> Float[Array, "B T D"]:
        """Features behind the stage's layers, and behind the module's end in its last stage."""
        return self._features(p, self._context(inputs, axes), carry, cells)

    def decode(
        self, p: Params, inputs: Inputs, carry: Carry, axes: Axes, cells: int, cache: Cache
    ) -> Float[Array, "B T D"]:
        """The same for new tokens of rows whose earlier ones are in a cache."""
        present = {edge: own for edge, own in self.entering.items() if own.stage in carry}
        piece = replace(self, levels=(), entering=present)
        return piece._features(p, replace(piece._context(inputs, axes), cache=cache), carry, cells)

    def logits(self, p: Params, inputs: Inputs, x: Array, axes: Axes) -> Float[Array, "B 1 V"]:
        """Logits of each row's next token, from the features of its last."""
        return self.node.module.logits(p[self.name], self._context(inputs, axes), x)

    def _features(self, p: Params, context: Context, carry: Carry, cells: int) -> Float[Array, "B T D"]:
        module, own = self.node.module, self._own(p)
        earlier: list[Array] = []
        if self.before:
            x, *earlier = self._parted(carry[self.before])
        else:
            x = self._called("before", context, self._begin(p, context, carry, cells))
        added = self._added(p, context, carry, cells, x)
        x, kept = run_layers(module, own, context, x, self.layers, added, unroll=self.unroll, keep=self.levels)
        if self.last:
            x = self._called("after", context, module.end(own, context, x))
        return joined([x, *earlier, *(kept[level] for level in sorted(kept))])

    def give(self, p: Params, inputs: Inputs, x: Array, axes: Axes) -> Float[Array, "B N E"]:
        """The module's tokens for others, from its features."""
        x, *levels = self._parted(x)
        together = self.node.module.patches_per_token
        if self.node.ends:
            x = project(p[projector_name(self.name)], together, axes, x, self.node.ends.activation)
            x = self._called("projected", self._context(self._given(inputs), axes), x)
        return joined([x, *(merged(level, together) for level in levels)])

    def loss(self, p: Params, inputs: Inputs, x: Array, axes: Axes) -> Mapping[str, Float[Array, ""]]:
        """Sum of each loss from the stage's features."""
        return self.node.module.loss(p[self.name], self._context(inputs, axes), self._parted(x)[0])

    def predict(self, p: Params, inputs: Inputs, x: Array, axes: Axes) -> Any:
        """Predictions from the stage's features."""
        return self.node.module.predict(p[self.name], self._context(inputs, axes), self._parted(x)[0])

    def _own(self, p: Params) -> Params:
        """The module's parameters, with the adapters of those that have one."""
        adapters = p.get(lora_name(self.name))
        return with_adapters(p[self.name], adapters, self.node.lora.scale) if adapters else p[self.name]

    def _parted(self, x: Array) -> list[Array]:
        """Features, and the outputs of inner layers beside them."""
        width = self.node.config.width
        return [x[..., at : at + width] for at in range(0, x.shape[-1], width)] if self.levels else [x]

    def _context(self, inputs: Inputs, axes: Axes) -> Context:
        return Context.of(axes, inputs, self.node.module.mask, self._way)

    @property
    def _way(self) -> Way:
        """How the module's settings have attention computed; a module of one's own need have no such setting."""
        config = self.node.config
        asked = getattr(config, "attention", "")
        return Way(asked, f"{self.name}/{gin_name(type(config))}.attention") if asked else ANY

    def _given(self, inputs: Inputs) -> Inputs:
        """The inputs, with special positions as padding: the tokens made of them go to no other module."""
        medium = self.node.module.medium
        if not medium or not medium.special or "positions" not in inputs:
            return inputs
        segments = jnp.where(inputs["positions"][..., 0] < 0, 0, inputs["segments"])
        return {**inputs, "segments": segments}

    def _called(self, place: CalledAt, context: Context, x: Array) -> Array:
        if place not in self.node.callbacks.given:
            return x
        # What is anyone's own code sees all tokens of the rows, as without ranks that share them.
        y = self.node.callbacks.apply(place, self.name, context.unshared, context.together(x))
        return context.share(y)

    def _begin(self, p: Params, context: Context, carry: Carry, cells: int) -> Float[Array, "B T D"]:
        """Features of the first stage's host inputs, with the tokens of other modules."""
        x, given = self.node.module.embed(p[self.name], context), context.inputs
        starts = self.node.starts
        if not starts:
            for edge in self.entering:
                x = self._placed(edge, x, self._tokens(edge, carry), given, cells)
                if edge.newline:
                    x = with_newlines(x, p[projector_name(edge.source)]["newline"], given[edge.index])
            return x
        some = next(iter(self.entering))
        tokens = jnp.zeros((*given[some.index].shape, self._tokens(some, carry).shape[-1]), x.dtype)
        for edge in self.entering:
            tokens = self._placed(edge, tokens, self._tokens(edge, carry), given, cells)
        projected = project(p[projector_name(self.name)], 1, context.axes, tokens, starts.activation)
        projected = self._called("projected", context, projected)
        return x + projected.reshape(*x.shape[:2], -1)

    def _placed(self, edge: Edge, x: Array, tokens: Array, inputs: Inputs, cells: int) -> Float[Array, "B T D"]:
        """``x`` with the tokens of an edge at their places."""
        return merge_modality_tokens(x, tokens, inputs[edge.index], cells, inputs[edge.shares] if edge.shares else None)

    def _tokens(self, edge: Edge, carry: Carry) -> Array:
        """The tokens that an edge brings."""
        arriving = self.entering[edge]
        return _part(carry[arriving.stage], arriving.tokens)

    def _added(
        self, p: Params, context: Context, carry: Carry, cells: int, x: Float[Array, "B T D"]
    ) -> dict[int, Array]:
        """The values that are added to the inputs of layers, by the layer's number in the module."""
        added: dict[int, Array] = {}
        for edge, arriving in self.entering.items():
            for layer, place in arriving.injected.items():
                own = p[projector_name(edge.source)][injected_name(layer)]
                arrived = _part(carry[arriving.stage], place)
                tokens = project(own, 1, context.axes.unshared, arrived, arriving.activation)
                placed = self._placed(edge, jnp.zeros_like(x), tokens, context.inputs, cells)
                added[layer] = added[layer] + placed if layer in added else placed
        return added


def _part(x: Array, place: slice) -> Array:
    """A part of the last dimension."""
    return x if (place.start, place.stop) == (0, x.shape[-1]) else x[..., place]
