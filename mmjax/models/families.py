"""The registry of module families, by the names that ``Model.encoders``, ``Model.llm`` and ``Model.generators`` use.

A user's module is named "package.module:Class" instead; the class is a subclass of ``mmjax.models.module.Module``.
Imports no JAX: a family's settings are read and checked before its computation is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mmjax.configurable import ConfigError, registry
from mmjax.models.choices import Medium
from mmjax.models.dit.config import DiTConfig, SoundDiTConfig
from mmjax.models.latent_encoder.config import LatentEncoderConfig
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.mmdit.config import MMDiTConfig
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.settings import ModuleSettings
from mmjax.models.temporal.config import TemporalConfig
from mmjax.models.unet.config import UNetConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.models.whisper.config import WhisperConfig
from mmjax.user_code import import_named, names_code

Role = Literal["encoder", "llm", "generator", "projector"]
"""The role of a family in a configured model: before the LLM, the LLM itself, behind it, or between it and another."""


@dataclass(frozen=True)
class Family:
    """A family of modules.

    Attributes:
      config: the configurable class of its settings.
      module_class: its ``Module``, as "package.module:Class"; "" for projectors, which are no modules (ADR 53).
      roles: the roles that it may have in a model.
      weights: the Python module of its weights tables (see ``pretrained``); "" without such tables.
      generator_class: its ``Module`` in the role of a generator, where that is another class; else "".
    """

    config: type[Any]
    module_class: str
    roles: tuple[Role, ...]
    weights: str = ""
    generator_class: str = ""

    @property
    def medium(self) -> Medium | None:
        """The medium that its modules encode or generate; ``None`` for language models and projectors."""
        return getattr(self.config, "medium", None)

    def module(self, config: Any, role: Role | None = None) -> Any:
        """The family's ``Module`` with these settings, of class ``config``; imports its code. Not for projectors.

        ``role`` is one of ``roles``; by default the first.
        """
        is_generator = (role or self.roles[0]) == "generator"
        place = (is_generator and self.generator_class) or self.module_class
        package, _, name = place.partition(":")
        return getattr(importlib.import_module(package), name)(config)


FAMILIES: Mapping[str, Family] = {
    "vit": Family(ViTConfig, "mmjax.models.vit.module:VisionTransformer", ("encoder",), "mmjax.models.vit.weights"),
    "whisper": Family(
        WhisperConfig, "mmjax.models.whisper.module:Whisper", ("encoder",), "mmjax.models.whisper.weights"
    ),
    "temporal": Family(TemporalConfig, "mmjax.models.temporal.module:TemporalEncoder", ("encoder",)),
    "latent-encoder": Family(
        LatentEncoderConfig,
        "mmjax.models.latent_encoder.module:LatentEncoder",
        ("encoder",),
        "mmjax.models.latent_encoder.weights",
    ),
    "llama": Family(
        DecoderConfig,
        "mmjax.models.llama.module:Llama",
        ("llm", "generator"),
        "mmjax.models.llama.weights",
        generator_class="mmjax.models.llama.talker:CodeDecoder",
    ),
    "dit": Family(DiTConfig, "mmjax.models.dit.module:DiffusionTransformer", ("generator",)),
    "sound-dit": Family(SoundDiTConfig, "mmjax.models.dit.module:SoundTransformer", ("generator",)),
    "mmdit": Family(
        MMDiTConfig,
        "mmjax.models.mmdit.module:DoubleStreamTransformer",
        ("generator",),
        "mmjax.models.mmdit.weights",
    ),
    "unet": Family(UNetConfig, "mmjax.models.unet.module:LatentUNet", ("generator",), "mmjax.models.unet.weights"),
}


PROJECTOR = Family(ProjectorConfig, "", ("projector",), "mmjax.models.projector.weights")
"""Projectors: part of other modules' stages, with settings and weights tables like other families."""


def families_for(role: Role) -> tuple[str, ...]:
    """Names of the families with this role, such as ("vit", "whisper") for "encoder"; () for "projector"."""
    return tuple(name for name, family in FAMILIES.items() if role in family.roles)


def family_of(field: str, kind: str, role: Role) -> Family:
    """The family with the name ``kind``, or the family of a user's class, whose code is imported.

    Call ``require_allowed`` before, since importing runs code.

    Args:
      field: the setting, for errors, such as "Model.llm".
      kind: a key of ``FAMILIES``, or "package.module:Class".
      role: the role of the module, such as "llm"; only read for a user's class.

    Raises:
      ConfigError: the class does not exist, or is no module.
      KeyError: there is no such family.
    """
    if not names_code(kind):
        return FAMILIES[kind]
    cls = import_named(field, kind)
    config: type[Any] | None = getattr(cls, "Config", None)
    if config is None or config not in registry().values():
        fix = "give a subclass of mmjax.Module whose Config is a class under @configurable"
        raise ConfigError(f"{field}={kind!r}: it has no configurable class as Config; {fix}")
    if not issubclass(config, ModuleSettings):
        fix = f"let {config.__name__} inherit from mmjax.EqualHeads or mmjax.ModuleSettings"
        raise ConfigError(f"{field}={kind!r}: its settings are none of a module; {fix}")
    if role != "llm" and config.medium is None:
        fix = f"add medium: ClassVar[Medium] = 'image' or 'recording' to {config.__name__}"
        raise ConfigError(f"{field}={kind!r}: its settings name no medium; {fix}")
    return Family(config, kind, (role,))


def family_of_tokens() -> str:
    """The name of the family of encoders that read the tokens of another encoder: "temporal"."""
    return next(kind for kind in families_for("encoder") if FAMILIES[kind].medium == "tokens")


def makes_latents(kind: str) -> bool:
    """Whether ``kind`` is a family of ``FAMILIES`` whose encoders make latents of a generator's pictures."""
    return FAMILIES[kind].medium == "drawing"


def kind_of(config: Any) -> str:
    """The name of the family of ``FAMILIES`` that these settings belong to: "vit" for a ``ViTConfig``; "" for none."""
    return next((kind for kind, family in FAMILIES.items() if type(config) is family.config), "")


def module_of(config: Any, role: Role | None = None) -> Any:
    """The ``Module`` with the settings ``config``, of a family of ``FAMILIES``: ``Llama`` for a ``DecoderConfig``.

    ``role`` is its role in the model; by default the family's first.

    Raises:
      TypeError: the settings belong to no such family.
    """
    if kind := kind_of(config):
        return FAMILIES[kind].module(config, role)
    raise TypeError(f"{type(config).__name__} belongs to no family of mmjax; give the module itself, such as Mine(c)")
