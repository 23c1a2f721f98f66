"""Builds the module graph from a ``Config``, and what the data side reads of encoders and generators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmjax.config import Config
from mmjax.configurable import require
from mmjax.data.buckets import per_cell
from mmjax.data.packing import Packer
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import EncoderSpec
from mmjax.mesh.layout import cell_count
from mmjax.models.callbacks import Callbacks
from mmjax.models.config import LLM
from mmjax.models.graph import MultimodalModel, multimodal
from mmjax.models.nodes import spec_of
from mmjax.own_code import import_named


def build_model(config: Config, tokenizer: Tokenizer) -> MultimodalModel:
    """The module graph; where the configuration leaves the vocabulary open, it is the tokenizer's."""
    modules = build_modules(config)
    encoders, generators = (
        {name: modules[name] for name in own} for own in (config.model.encoders, config.model.generators)
    )
    callbacks = build_callbacks(config)
    loras = {name: own for name, own in config.loras.items() if own.rank}
    model = multimodal(encoders, modules[LLM], generators, config.projectors, callbacks, loras)
    return replace(model.with_vocab(tokenizer.vocab_size), unroll=config.train.unroll)


def build_modules(config: Config) -> dict[str, Any]:
    """The ``Module`` of each encoder, the LLM and each generator, by name."""
    return {name: family.module(config.modules[name]) for name, family in config.model.families}


def build_callbacks(config: Config) -> dict[str, Callbacks]:
    """The callbacks of each module that has some; imports their code."""
    given = {name: own.given for name, own in config.callbacks.items() if own.given}
    return {
        name: Callbacks(**{place: import_named(f"{name}/Callbacks.{place}", value) for place, value in own.items()})
        for name, own in given.items()
    }


def require_inputs(model: MultimodalModel, packer: Packer) -> None:
    """Requires that the data have the host inputs that callbacks read.

    Raises:
      ConfigError: a callback declares another one.
    """
    for module, node in model.nodes.items():
        for place in node.callbacks.given:
            for name in node.callbacks.inputs([place]):
                has = ", ".join(sorted(packer.inputs[module]))
                fix = f"the data of {module} have {has}; name one of these in @reads"
                require(name in packer.inputs[module], f"{module}/Callbacks.{place}: reads", name, fix)


def encoder_specs(config: Config) -> dict[str, EncoderSpec]:
    """The specs of all encoders and generators by name, for the data side."""
    cells = cell_count(config.layouts.values())
    modules, projectors = build_modules(config), config.projectors
    media = {name: spec_of(modules[name].medium, projectors[name]) for name in config.model.media}
    return {name: replace(spec, buckets=per_cell(config.packing[name].given, cells)) for name, spec in media.items()}
