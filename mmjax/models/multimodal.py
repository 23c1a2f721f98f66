"""The multimodal model as a graph of modules, cut into pipeline stages.

Encoders feed one LLM, which feeds generators. Every stage is a pure function of its parameters, its host inputs and the
activations that reach it; nothing here knows on which devices it runs. Kinds of encoders are in ``encoders``, of
generators in ``generators``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.mesh.layout import Layout
from mmjax.mesh.submesh import Axes
from mmjax.models import decoder
from mmjax.models.config import LLM, DecoderConfig, projector_name, require_layers
from mmjax.models.decoder import DecoderLayer
from mmjax.models.encoders import Encoder, Inputs
from mmjax.models.generators import Generator
from mmjax.models.layers import Params, best_token, cross_entropy, embed_tokens, rms_norm
from mmjax.models.parameters import ModuleSlice, Part
from mmjax.models.projector import Projector, injected_name, project

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
      forward: ``(params, inputs, carry, axes, cells) -> activation``.
      loss: ``(params, inputs, activation, axes) -> sum of weighted losses []``; ``None`` where it gives no loss.
      predict: takes the place of ``loss``: gives the best next token at every position ``[B, T]`` and the weighted loss
        of each row ``[B]``, or a generator's prediction for each patch.
    """

    name: str
    module: str
    index: int
    sources: tuple[str, ...]
    slices: tuple[ModuleSlice, ...]
    inputs: tuple[str, ...]
    forward: Callable[[Params, Inputs, Carry, Axes, int], Array]
    loss: Callable[[Params, Inputs, Array, Axes], Array] | None = None
    predict: Callable[[Params, Inputs, Array, Axes], Any] | None = None


@dataclass(frozen=True)
class MultimodalModel:
    """Encoders feeding an LLM, which feeds generators.

    Attributes:
      encoders: encoders by name.
      llm: the language model.
      generators: generators by name.
    """

    encoders: Mapping[str, Encoder]
    llm: DecoderConfig
    generators: Mapping[str, Generator] = field(default_factory=dict)

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of all trainable modules: encoders and their projectors, the LLM, generators and their projectors."""
        pairs = {name: (name, projector_name(name)) for name in (*self.encoders, *self.generators)}
        before, behind = ([n for name in names for n in pairs[name]] for names in (self.encoders, self.generators))
        return (*before, LLM, *behind)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weights of the losses in the sum that is optimised, by module that gives a loss."""
        return {LLM: 1.0} | {name: generator.config.loss_weight for name, generator in self.generators.items()}

    def stages(self, layouts: Mapping[str, Layout]) -> tuple[StageModel, ...]:
        """Cuts every module into its layout's stages, sources before users.

        Raises:
          ConfigError: see ``require_layers``.
        """
        result: list[StageModel] = []
        for name in self.encoders:
            result += self._encoder_stages(name, layouts[name])
        tails = {name: f"{name}.{layouts[name].stages - 1}" for name in self.encoders}
        result += self._llm_stages(layouts[LLM], tails)
        tail = result[-1].name
        return (*result, *(stage for name in self.generators for stage in self._generator_stages(name, layouts, tail)))

    def _encoder_stages(self, name: str, layout: Layout) -> list[StageModel]:
        encoder = self.encoders[name]
        kind, c = encoder.of_kind, encoder.config
        result = []
        for i, layers in enumerate(_runs(name, c.layers, layout)):
            first, last = i == 0, i == layout.stages - 1
            slices = [ModuleSlice(name, kind.layer(c), layers, kind.parts(c, first, last))]
            if last:
                slices.append(ModuleSlice(projector_name(name), None, range(0), (self._projector_part(encoder),)))
            result.append(
                StageModel(
                    f"{name}.{i}",
                    name,
                    i,
                    () if first else (f"{name}.{i - 1}",),
                    tuple(slices),
                    kind.inputs if first else kind.later_inputs,
                    partial(_run_encoder, name, encoder, first, last),
                )
            )
        return result

    def _projector_part(self, encoder: Encoder) -> Part:
        hidden = encoder.projector.hidden or self.llm.width
        return Part(partial(Projector, encoder.merged_width, hidden, self.llm.width))

    def _llm_stages(self, layout: Layout, tails: Mapping[str, str]) -> list[StageModel]:
        c, result = self.llm, []
        for i, layers in enumerate(_runs(LLM, c.layers, layout)):
            first, last = i == 0, i == layout.stages - 1
            injected = {name: [at for at in e.projector.inject if at in layers] for name, e in self.encoders.items()}
            entering = [name for name in self.encoders if first or injected[name]]
            own = ModuleSlice(LLM, partial(DecoderLayer, c), layers, decoder.parts(c, first, last), layout.tp)
            inputs = ("segments", "positions", *(f"{name}_index" for name in entering))
            inputs += ("tokens",) if first else ()
            inputs += ("targets", "weights") if last else ()
            before = "" if first else f"{LLM}.{i - 1}"
            run = partial(_run_llm, c, before, last, {name: tails[name] for name in entering}, injected, layers.start)
            result.append(
                StageModel(
                    f"{LLM}.{i}",
                    LLM,
                    i,
                    (*([before] if before else []), *(tails[name] for name in entering)),
                    (own, *(self._injected_slice(name, at) for name, at in injected.items() if at)),
                    inputs,
                    run,
                    partial(_loss, c) if last else None,
                    partial(_predict, c) if last else None,
                )
            )
        return result

    def _injected_slice(self, name: str, layers: Sequence[int]) -> ModuleSlice:
        """An encoder's projectors that inject into these layers of one LLM stage."""
        width = self.llm.width
        create = partial(Projector, width, self.encoders[name].projector.hidden or width, width)
        parts = tuple(Part(create, injected_name(layer)) for layer in layers)
        return ModuleSlice(projector_name(name), None, range(0), parts)

    def _generator_stages(self, name: str, layouts: Mapping[str, Layout], tail: str) -> list[StageModel]:
        generator, layout, before, result = self.generators[name], layouts[name], tail, []
        kind, c = generator.of_kind, generator.config
        for i, layers in enumerate(_runs(name, c.layers, layout)):
            first, last = i == 0, i == layout.stages - 1
            slices = [ModuleSlice(name, kind.layer(c), layers, kind.parts(c, first, last))]
            if first:
                hidden = generator.projector.hidden or self.llm.width
                part = Part(partial(Projector, self.llm.width, hidden, generator.merged_width))
                slices.append(ModuleSlice(projector_name(name), None, range(0), (part,)))
            result.append(
                StageModel(
                    f"{name}.{i}",
                    name,
                    i,
                    (before,),
                    tuple(slices),
                    kind.inputs + (kind.first_inputs if first else ()) + (kind.last_inputs if last else ()),
                    partial(_run_generator, name, generator, first),
                    partial(_generator_loss, name, generator) if last else None,
                    partial(_generator_predict, name, generator) if last else None,
                )
            )
            before = result[-1].name
        return result

    def with_vocab(self, vocab: int) -> MultimodalModel:
        """The model with the tokenizer's vocabulary where the configuration leaves it open."""
        return self if self.llm.vocab else replace(self, llm=replace(self.llm, vocab=vocab))


def _runs(name: str, layers: int, layout: Layout) -> tuple[range, ...]:
    require_layers(name, layers, layout)
    return layout.runs(layers)


def _run_encoder(
    name: str,
    encoder: Encoder,
    first: bool,
    last: bool,
    p: Params,
    inputs: Inputs,
    carry: Carry,
    axes: Axes,
    cells: int,
) -> Array:
    x = None if first else next(iter(carry.values()))
    x = encoder.of_kind.run(p[name], encoder.config, axes, inputs, x, last)
    return project(p[projector_name(name)], encoder.patches_per_token, axes, x) if last else x


def _run_llm(
    c: DecoderConfig,
    before: str,
    last: bool,
    tails: Mapping[str, str],
    injected: Mapping[str, Sequence[int]],
    start: int,
    p: Params,
    inputs: Inputs,
    carry: Carry,
    axes: Axes,
    cells: int,
) -> Float[Array, "B T D"]:
    """Runs one LLM stage: ``before`` is the stage before it, ``tails`` the last stages of the encoders that enter it.

    The last LLM stage returns hidden states after the final norm. ``injected`` lists, by encoder, this stage's layers
    that it enters again, numbered in the LLM; ``start`` is the stage's first layer.
    """
    if before:
        x = carry[before]
    else:
        x = embed_tokens(inputs["tokens"], p[LLM]["embed"], axes)
        for encoder, tail in tails.items():
            x = decoder.merge_modality_tokens(x, carry[tail], inputs[f"{encoder}_index"], cells)
    added: dict[int, Array] = {}
    for encoder, tail in tails.items():
        for layer in injected[encoder]:
            tokens = project(p[projector_name(encoder)][injected_name(layer)], 1, axes, carry[tail])
            placed = decoder.merge_modality_tokens(jnp.zeros_like(x), tokens, inputs[f"{encoder}_index"], cells)
            added[layer - start] = added[layer - start] + placed if layer - start in added else placed
    x = decoder.run_layers(p[LLM].get("layers"), c, axes, x, inputs["segments"], inputs["positions"], added)
    # Checkpointed, or a copy in fp32 would be kept of each microbatch in flight.
    return jax.checkpoint(partial(rms_norm, eps=c.norm_eps))(x, p[LLM]["norm"]) if last else x


def _loss(c: DecoderConfig, p: Params, inputs: Inputs, x_BTD: Array, axes: Axes) -> Float[Array, ""]:
    return decoder.loss(p[LLM], c, axes, x_BTD, inputs["targets"], inputs["weights"])


def _predict(c: DecoderConfig, p: Params, inputs: Inputs, x_BTD: Array, axes: Axes) -> tuple[Array, Array]:
    logits = decoder.logits(p[LLM], c, axes, x_BTD)
    losses_BT = cross_entropy(logits, inputs["targets"], axes) * inputs["weights"]
    return best_token(logits, axes), jnp.sum(losses_BT, axis=1)


def _run_generator(
    name: str, generator: Generator, first: bool, p: Params, inputs: Inputs, carry: Carry, axes: Axes, cells: int
) -> Float[Array, "R T D"]:
    (x,) = carry.values()
    condition = None
    if first:
        tokens = jnp.zeros((*inputs["index"].shape, x.shape[-1]), x.dtype)
        tokens = decoder.merge_modality_tokens(tokens, x, inputs["index"], cells)
        merged = project(p[projector_name(name)], 1, axes, tokens)
        condition = merged.reshape(*inputs["segments"].shape, -1)
    return generator.of_kind.run(p[name], generator.config, axes, inputs, None if first else x, condition)


def _generator_loss(
    name: str, generator: Generator, p: Params, inputs: Inputs, x: Array, axes: Axes
) -> Float[Array, ""]:
    return generator.of_kind.loss(p[name], generator.config, inputs, x)


def _generator_predict(name: str, generator: Generator, p: Params, inputs: Inputs, x: Array, axes: Axes) -> Array:
    return generator.of_kind.predict(p[name], generator.config, inputs, x)
