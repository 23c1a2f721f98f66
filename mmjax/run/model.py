"""Builds the module graph from a ``Config``, and the specs of encoders and generators that the data side reads."""

from __future__ import annotations

from typing import Any

from mmjax.config import Config
from mmjax.configurable import gin_name
from mmjax.data.buckets import per_cell
from mmjax.data.log_mel import LogMel
from mmjax.data.tokenizer import Tokenizer
from mmjax.data.types import EncoderSpec
from mmjax.mesh.layout import cell_count
from mmjax.models.encoders import ENCODERS, MEDIUM_AXES, Encoder
from mmjax.models.generators import GENERATORS, Generator
from mmjax.models.multimodal import MultimodalModel


def build_model(config: Config, tokenizer: Tokenizer) -> MultimodalModel:
    """The module graph; where the configuration leaves the vocabulary open, it is the tokenizer's."""
    encoders = {
        name: Encoder(kind, config.encoders[name], config.projectors[name])
        for name, kind in config.model.encoders.items()
    }
    generators = {
        name: Generator(kind, config.generators[name], config.projectors[name])
        for name, kind in config.model.generators.items()
    }
    return MultimodalModel(encoders, config.llm, generators).with_vocab(tokenizer.vocab_size)


def encoder_specs(config: Config) -> dict[str, EncoderSpec]:
    """The specs of all encoders and generators by name, for the data side."""
    cells = cell_count(config.layouts.values())
    specs = {
        name: encoder_spec(kind, config.encoders[name], per_cell(config.packing[name].given, cells))
        for name, kind in config.model.encoders.items()
    }
    return specs | {
        name: generator_spec(kind, config.generators[name], per_cell(config.packing[name].given, cells))
        for name, kind in config.model.generators.items()
    }


def encoder_spec(kind: str, c: Any, buckets: tuple[tuple[int, int], ...] = ()) -> EncoderSpec:
    """The spec of an encoder of this kind with the configuration ``c``."""
    of_kind = ENCODERS[kind]
    return EncoderSpec(
        patch=of_kind.patch(c),
        merge=c.merge,
        channels=of_kind.channels(c),
        axes=MEDIUM_AXES[of_kind.medium],
        buckets=buckets,
        longest=0 if c.positions == of_kind.boundless else getattr(c, of_kind.bounded_by),
        bounded_by=f"{gin_name(type(c))}.{of_kind.bounded_by}",
        boundless=of_kind.boundless,
        log_mel=_log_mel(c) if of_kind.medium == "recording" else None,
    )


def generator_spec(kind: str, c: Any, buckets: tuple[tuple[int, int], ...] = ()) -> EncoderSpec:
    """The spec of a generator of this kind with the configuration ``c``."""
    axes = MEDIUM_AXES[GENERATORS[kind].medium]
    return EncoderSpec(patch=c.patch, merge=c.merge, channels=c.channels, axes=axes, buckets=buckets, drawn=True)


def _log_mel(c: Any) -> LogMel:
    return LogMel(sample_rate=c.sample_rate, window=c.window, hop=c.hop, mels=c.mels)
