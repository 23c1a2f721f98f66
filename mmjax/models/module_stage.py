"""The stages of a ``MultimodalModel``: some layers of a module, with the projectors and callbacks around them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.attention.backends import AUTO_BACKEND, Backend
from mmjax.attention.cache import Cache
from mmjax.attention.kernels import AttentionCall
from mmjax.configurable import gin_name
from mmjax.mesh.spread import Axes
from mmjax.models.callbacks import CalledAt
from mmjax.models.config import lora_name, projector_name
from mmjax.models.context import Context, Inputs
from mmjax.models.layers import Params, Sums
from mmjax.models.lora.layers import with_adapters
from mmjax.models.module import run_layers
from mmjax.models.nodes import Edge, Node
from mmjax.models.placeholders import merge_modality_tokens, with_newlines
from mmjax.models.projector.config import ProjectorConfig, injected_name
from mmjax.models.projector.layers import joined, merged, project
from mmjax.models.stage_model import Carry, StageModel


@dataclass(frozen=True)
class IncomingActivation:
    """An activation from another module: several parts, concatenated along the last dimension.

    Attributes:
      stage: the name of the stage that sends it.
      tokens: the columns of the module's tokens.
      injected: the columns that enter a layer of this stage again, by the layer's index in this stage's module: the
        tokens, or the output of an inner layer.
      projector: settings of the additional projectors.
    """

    stage: str
    tokens: slice
    injected: Mapping[int, slice]
    projector: ProjectorConfig


@dataclass(frozen=True, kw_only=True)
class ModuleStage(StageModel):
    """A stage of a node.

    Attributes:
      node: the module.
      layers: indices of its layers in the module.
      unroll: see ``MultimodalModel``.
      entering: the activations from other modules, by edge.
      levels: layers of the module whose outputs other modules read. Behind such a layer its output is sent along with
        the features, concatenated along the last dimension.
      starts: the edges of the projectors at the stage's start, by the name of a projector's parameters in those of the
        module's projector; "" is all of them.
    """

    node: Node
    layers: range
    unroll: bool
    entering: Mapping[Edge, IncomingActivation]
    levels: tuple[int, ...]
    starts: Mapping[str, Edge] = field(default_factory=dict)

    def compiled_runs(self, call: AttentionCall) -> tuple[int, ...]:
        """See ``StageModel.compiled_runs``."""
        width = getattr(self.node.config, "head_width", call.width)
        call = replace(call, width=width, value_width=getattr(self.node.config, "value_width", width))
        masks = dict.fromkeys(mask for _, mask in self.node.module.masks)
        return tuple(self._backend.compiled_runs(replace(call, mask=mask)) for mask in masks)

    @property
    def needs_neighbours(self) -> str:
        """See ``StageModel.needs_neighbours``."""
        backend, masks = self._backend, self.node.module.masks
        needs = any(backend.needs_neighbours(mask) for _, mask in masks)
        return f"{backend.setting}={backend.name!r}" if needs else ""

    def completed(self, inputs: Inputs, carry: Carry, cells: int) -> Inputs:
        """The host inputs, with latents in "patches" and "targets" where another module makes them in the step.

        "latent_targets" is what they are in "targets".
        """
        for edge in (edge for edge in self.entering if edge.latents):
            tokens, index, noise = self._tokens(edge, carry), inputs[edge.index], inputs["latent_noise"]
            blank = jnp.zeros((len(index), index[0].size, tokens.shape[-1]), tokens.dtype)
            of_pixels = merge_modality_tokens(blank, tokens, index.reshape(len(index), -1), cells)
            halves = jnp.split(of_pixels.astype(jnp.float32), 2, axis=-1)
            mean, deviation = (half.reshape(noise.shape) for half in halves)
            latents = mean + deviation * noise
            in_patches, in_targets = (inputs["latent_shares"][..., i : i + 1] * latents for i in range(2))
            added = {"patches": in_patches, "targets": in_targets, "latent_targets": in_targets}
            inputs = {**inputs, **{name: inputs.get(name, 0) + values for name, values in added.items()}}
        return inputs

    def forward(
        self, p: Params, inputs: Inputs, carry: Carry, axes: Axes, cells: int
    ) -> tuple[Float[Array, "B T D"], Sums]:
        """The features behind the stage's layers, in the last stage behind the module's end, and its layers' losses.

        With ``levels``, outputs of inner layers follow the features along the last dimension.
        """
        return self._features(p, self._context(inputs, axes), carry, cells)

    def decode(
        self, p: Params, inputs: Inputs, carry: Carry, axes: Axes, cells: int, cache: Cache
    ) -> Float[Array, "B T D"]:
        """See ``StageModel.decode``."""
        present = {edge: incoming for edge, incoming in self.entering.items() if incoming.stage in carry}
        stage = replace(self, levels=(), entering=present)
        return stage._features(p, replace(stage._context(inputs, axes), cache=cache), carry, cells)[0]

    def logits(self, p: Params, inputs: Inputs, x: Array, axes: Axes) -> Float[Array, "B 1 V"]:
        """See ``StageModel.logits``."""
        return self.node.module.logits(p[self.module], self._context(inputs, axes), x)

    def _features(self, p: Params, context: Context, carry: Carry, cells: int) -> tuple[Float[Array, "B T D"], Sums]:
        module, module_params = self.node.module, self._module_params(p)
        earlier: list[Array] = []
        if self.before:
            x, *earlier = self._split_levels(carry[self.before])
        else:
            x = self._apply_callback("before", context, self._embed(p, context, carry, cells))
        added = self._injected(p, context, carry, cells, x)
        context = self._with_media_token(context)
        x, level_outputs, sums = run_layers(
            module, module_params, context, x, self.layers, added, unroll=self.unroll, keep=self.levels
        )
        if self.last:
            x = self._apply_callback("after", context, module.end(module_params, context, x))
        return joined([x, *earlier, *(level_outputs[level] for level in sorted(level_outputs))]), sums

    def give(self, p: Params, inputs: Inputs, x: Array, axes: Axes) -> Float[Array, "B N E"]:
        """The activation for other modules: projected tokens, then outputs of inner layers, along the last dimension.

        [B, N, E], N being T / ``patches_per_token``. Other stages of the module read the features as they are.
        """
        if not self.last or not (self.node.ends or self.levels):
            return x
        x, *levels = self._split_levels(x)
        together = self.node.module.patches_per_token
        if self.node.ends:
            x = project(p[projector_name(self.module)], together, axes, x, self.node.ends)
            x = self._apply_callback("projected", self._context(self._hide_special(inputs), axes), x)
        return joined([x, *(merged(level, together) for level in levels)])

    def loss(self, p: Params, inputs: Inputs, x: Array, axes: Axes) -> Mapping[str, Float[Array, ""]]:
        """See ``StageModel.loss``."""
        return self.node.module.loss(p[self.module], self._context(inputs, axes), self._split_levels(x)[0])

    def predict(self, p: Params, inputs: Inputs, x: Array, axes: Axes) -> Any:
        """See ``StageModel.predict``; predictions are of the host's targets, without latents that are made here."""
        predicted = self.node.module.predict(p[self.module], self._context(inputs, axes), self._split_levels(x)[0])
        return predicted - inputs["latent_targets"] if "latent_targets" in inputs else predicted

    def _module_params(self, p: Params) -> Params:
        """The module's parameters; adapted weights are replaced by ``Adapted``."""
        adapters = p.get(lora_name(self.module))
        return with_adapters(p[self.module], adapters, self.node.lora.scale) if adapters else p[self.module]

    def _split_levels(self, x: Array) -> list[Array]:
        """Splits an activation into features and the outputs of inner layers."""
        width = self.node.config.width
        return [x[..., at : at + width] for at in range(0, x.shape[-1], width)] if self.levels else [x]

    def _context(self, inputs: Inputs, axes: Axes) -> Context:
        return Context.of(axes, inputs, self.node.module.mask, self._backend)

    @property
    def _backend(self) -> Backend:
        """The attention backend of the module's settings; ``AUTO_BACKEND`` for a module without such a setting."""
        config = self.node.config
        name = getattr(config, "attention", "")
        backend = Backend(name, f"{self.module}/{gin_name(type(config))}.attention") if name else AUTO_BACKEND
        return replace(backend, max_runs=self.max_runs, distances=self.distances)

    def _hide_special(self, inputs: Inputs) -> Inputs:
        """The inputs with special tokens marked as padding: these are not sent to other modules."""
        medium = self.node.module.medium
        if not medium or not medium.special or "positions" not in inputs:
            return inputs
        segments = jnp.where(inputs["positions"][..., 0] < 0, 0, inputs["segments"])
        return {**inputs, "segments": segments}

    def _apply_callback(self, place: CalledAt, context: Context, x: Array) -> Array:
        if place not in self.node.callbacks.by_place:
            return x
        # Callbacks see all tokens of tp's ranks: they know nothing of sequence parallelism.
        y = self.node.callbacks.apply(place, self.module, context.unshared, context.gather_sp(x))
        return context.split_sp(y)

    def _embed(self, p: Params, context: Context, carry: Carry, cells: int) -> Float[Array, "B T D"]:
        """The input of the first layer: embedded host inputs, with the tokens of other modules."""
        x, inputs = self.node.module.embed(p[self.module], context), context.inputs
        if not self.starts:
            for edge in (edge for edge in self.entering if not edge.latents):
                x = self._merge_tokens(edge, x, self._tokens(edge, carry), inputs, cells)
                if edge.newline:
                    x = with_newlines(x, p[projector_name(edge.source)]["newline"], inputs[edge.index])
            return x
        projected = [self._condition(p, context, carry, cells, path, x.dtype) for path in self.starts]
        features = self._apply_callback("projected", context, functools.reduce(operator.add, projected))
        features = features.reshape(len(x), -1, x.shape[-1])
        return _with_condition(context, x, features) if self._has_queries else x + features

    @property
    def _has_queries(self) -> bool:
        """Whether the tokens of others have places of their own, before those of patches."""
        medium = self.node.module.medium
        return bool(medium and medium.alone)

    def _with_media_token(self, context: Context) -> Context:
        """The context with ``media_token`` in the places of media, for layers that read tokens."""
        module, names = self.node.module, [edge.index for edge in self.entering if edge.index in context.inputs]
        if not (module.layer_input_width and names):
            return context

        def replaced(inputs: Inputs) -> Inputs:
            tokens_BT = inputs["tokens"]
            for name in names:
                index = inputs[name]
                is_medium_BT = index >= 0 if index.ndim == tokens_BT.ndim else jnp.any(index >= 0, axis=-1)
                tokens_BT = jnp.where(is_medium_BT, module.media_token, tokens_BT)
            return {**inputs, "tokens": tokens_BT}

        tokens = replace(context.tokens, inputs=replaced(context.tokens.inputs))
        return replace(context, inputs=replaced(context.inputs), tokens=tokens)

    def _condition(
        self, p: Params, context: Context, carry: Carry, cells: int, path: str, dtype: Any
    ) -> Float[Array, "B N E"]:
        """The tokens of an edge of ``starts``, gathered to their places and projected; zeros elsewhere are projected
        too.
        """
        edge, params = self.starts[path], p[projector_name(self.module)]
        tokens, index = self._tokens(edge, carry), context.inputs[edge.index]
        gathered = self._merge_tokens(
            edge, jnp.zeros((*index.shape, tokens.shape[-1]), dtype), tokens, context.inputs, cells
        )
        assert self.node.starts
        return project(params[path] if path else params, 1, context.axes, gathered, self.node.starts)

    def _merge_tokens(self, edge: Edge, x: Array, tokens: Array, inputs: Inputs, cells: int) -> Float[Array, "B T D"]:
        """``x`` with the tokens of an edge written at their places."""
        return merge_modality_tokens(x, tokens, inputs[edge.index], cells, inputs[edge.shares] if edge.shares else None)

    def _tokens(self, edge: Edge, carry: Carry) -> Array:
        """The tokens of an edge."""
        incoming = self.entering[edge]
        return _columns(carry[incoming.stage], incoming.tokens)

    def _injected(
        self, p: Params, context: Context, carry: Carry, cells: int, x: Float[Array, "B T D"]
    ) -> dict[int, Array]:
        """The values that edges add to the inputs of layers, by the layer's index in the module."""
        added: dict[int, Array] = {}
        for edge, incoming in self.entering.items():
            for layer, columns in incoming.injected.items():
                projector_params = p[projector_name(edge.source)][injected_name(layer)]
                source_x = _columns(carry[incoming.stage], columns)
                tokens = project(projector_params, 1, context.axes.unshared, source_x, incoming.projector)
                values = self._merge_tokens(edge, jnp.zeros_like(x), tokens, context.inputs, cells)
                added[layer] = added[layer] + values if layer in added else values
        return added


def _with_condition(context: Context, x: Array, features: Array) -> Array:
    """Features of this rank's places, with those of a condition added, which has the first places of a row."""
    if context.axes.sp:
        behind = context.tokens.segments_BT.shape[1] - context.gather_sp(features).shape[1]
        features = context.split_sp(jnp.pad(context.gather_sp(features), ((0, 0), (0, behind), (0, 0))))
    return x.at[:, : features.shape[1]].add(features)


def _columns(x: Array, columns: slice) -> Array:
    """Columns of the last dimension."""
    return x if (columns.start, columns.stop) == (0, x.shape[-1]) else x[..., columns]
