"""The families of modules: one entry each, by the name that ``Model.encoders``, ``Model.llm`` or ``Model.generators``
gives them. A user's own module is named "package.module:Class" instead, a subclass of ``mmjax.models.module.Module``.

Imports no JAX: a family's settings are read, and refused, before its computation is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mmjax.configurable import ConfigError, registry
from mmjax.models.dit.config import DiTConfig
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.models.whisper.config import WhisperConfig
from mmjax.user_code import import_named, names_code

Place = Literal["encoder", "llm", "generator", "projector"]
"""Where a family stands in the model that a configuration describes: before the LLM, as it, or behind it; or between
the LLM and another module."""


@dataclass(frozen=True)
class Family:
    """A family of modules.

    Attributes:
      config: its configurable class.
      home: its ``Module``, as "package.module:Class"; "" for projectors, which are none (ADR 53).
      place: where it stands.
      weights: the Python module with its tables of weights (see ``pretrained``); "" where it has none.
    """

    config: type[Any]
    home: str
    place: Place
    weights: str = ""

    def module(self, config: Any) -> Any:
        """The module with these settings, a ``Module``."""
        package, _, name = self.home.partition(":")
        return getattr(importlib.import_module(package), name)(config)


FAMILIES: Mapping[str, Family] = {
    "vit": Family(ViTConfig, "mmjax.models.vit.module:VisionTransformer", "encoder", "mmjax.models.vit.weights"),
    "whisper": Family(WhisperConfig, "mmjax.models.whisper.module:Whisper", "encoder", "mmjax.models.whisper.weights"),
    "llama": Family(DecoderConfig, "mmjax.models.llama.module:Llama", "llm", "mmjax.models.llama.weights"),
    "dit": Family(DiTConfig, "mmjax.models.dit.module:DiffusionTransformer", "generator"),
}


PROJECTOR = Family(ProjectorConfig, "", "projector", "mmjax.models.projector.weights")
"""Projectors: a part of the stages of other modules, with settings and tables of weights as other families have."""


def families_for(place: Place) -> tuple[str, ...]:
    """Names of the families that stand there."""
    return tuple(name for name, family in FAMILIES.items() if family.place == place)


def family_of(field: str, kind: str, place: Place) -> Family:
    """The family that ``field`` names. Imports the code of a user's own: ask ``require_allowed`` first.

    Raises:
      ConfigError: there is no such module, or it is none.
    """
    if not names_code(kind):
        return FAMILIES[kind]
    found = import_named(field, kind)
    config: type[Any] | None = getattr(found, "Config", None)
    if config is None or config not in registry().values():
        fix = "give a subclass of mmjax.Module whose Config is a class under @configurable"
        raise ConfigError(f"{field}={kind!r}: it has no configurable class as Config; {fix}")
    if place != "llm" and not hasattr(config, "medium"):
        fix = f"add medium: ClassVar[Medium] = 'image' or 'recording' to {config.__name__}"
        raise ConfigError(f"{field}={kind!r}: its settings name no medium; {fix}")
    return Family(config, kind, place)


def module_of(config: Any) -> Any:
    """The ``Module`` with these settings, for a family of ``FAMILIES``."""
    for family in FAMILIES.values():
        if type(config) is family.config:
            return family.module(config)
    raise TypeError(f"{type(config).__name__} belongs to no family of mmjax; give the module itself, such as Mine(c)")
