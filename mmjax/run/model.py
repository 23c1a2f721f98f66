"""Builds the module graph from a ``Config``, and what the data side reads of encoders and generators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmjax.config import Config
from mmjax.data.buckets import per_cell
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import EncoderSpec
from mmjax.mesh.layout import cell_count
from mmjax.models.config import LLM
from mmjax.models.graph import MultimodalModel, multimodal


def build_model(config: Config, tokenizer: Tokenizer) -> MultimodalModel:
    """The module graph; where the configuration leaves the vocabulary open, it is the tokenizer's."""
    modules = build_modules(config)
    encoders, generators = (
        {name: modules[name] for name in own} for own in (config.model.encoders, config.model.generators)
    )
    return multimodal(encoders, modules[LLM], generators, config.projectors).with_vocab(tokenizer.vocab_size)


def build_modules(config: Config) -> dict[str, Any]:
    """The ``Module`` of each encoder, the LLM and each generator, by name."""
    return {name: family.module(config.modules[name]) for name, family in config.model.families}


def encoder_specs(config: Config) -> dict[str, EncoderSpec]:
    """The specs of all encoders and generators by name, for the data side."""
    cells = cell_count(config.layouts.values())
    media = {name: module.medium for name, module in build_modules(config).items() if name in config.model.media}
    return {name: replace(spec, buckets=per_cell(config.packing[name].given, cells)) for name, spec in media.items()}
