"""The settings of one node of a model: a module with its projector and its adapters. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mmjax.checkpoint.config import WeightsConfig
from mmjax.configurable import require
from mmjax.data.config import LatentsConfig, PackingConfig, VocoderConfig
from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM, CallbacksConfig, family_setting, lora_name
from mmjax.models.families import FAMILIES, PROJECTOR, Family, Role, families_for, family_of, kind_of
from mmjax.models.lora.config import LoraConfig
from mmjax.models.projector.config import ProjectorConfig
from mmjax.optimizer_config import OptimizerConfig
from mmjax.pipeline.config import OffloadConfig
from mmjax.user_code import CodeName


@dataclass(frozen=True, kw_only=True)
class PartSpec:
    """Something with parameters, an optimizer and initial weights of its own.

    Attributes:
      settings: of the class that its gin settings have, such as ``ViTConfig``.
      optimizer: trains the part, or freezes it.
      weights: the parameters that a new run starts with.
      stored_dtype: the dtype of its tensors in the folder that it starts from, which it keeps where it is frozen; "" if
        there is none.
    """

    settings: Any
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    stored_dtype: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True)
class ProjectorSpec(PartSpec):
    """The projector between a node and the LLM.

    Attributes:
      settings: its kind and sizes.
    """

    settings: ProjectorConfig = field(default_factory=ProjectorConfig)

    @property
    def family(self) -> Family:
        """The family of projectors."""
        return PROJECTOR


@dataclass(frozen=True, kw_only=True)
class LoraSpec(PartSpec):
    """Low-rank adapters of a module.

    Attributes:
      settings: their rank and the weights that they adapt; a rank of 0 adds none.
    """

    settings: LoraConfig = field(default_factory=LoraConfig)

    def check(self, name: str) -> None:
        """Raises ``ConfigError`` if the adapters of the module ``name`` start from a folder that is not one of PEFT."""
        adapters, path = lora_name(name), self.weights.path
        fix = f"name a folder of PEFT in {name}/Lora.path, or a run in {adapters}/Weights.init_from"
        require(not path, f"{adapters}/Weights.path", path, fix)


@dataclass(frozen=True, kw_only=True)
class ModuleSpec(PartSpec):
    """A node of a model: a module under a layout of its own, with its projector and its adapters.

    Attributes:
      name: its name in the model, the scope of its settings in gin.
      kind: its family, such as "vit", or a user's class, "package.module:Class".
      role: its role in the model, "encoder", "llm" or "generator".
      settings: of its family's class, such as ``ViTConfig`` for "vit".
      layout: its ranks, and how they share its work.
      projector: between it and the LLM; ``None`` for the LLM.
      lora: its low-rank adapters.
      packing: buckets of its rows.
      latents: of a generator that makes latents of pictures.
      vocoder: of a generator of recordings.
      offload: the state that waits in host memory.
      callbacks: a user's own functions between its parts.
    """

    name: str
    kind: str
    role: Role
    layout: Layout = field(default_factory=Layout)
    projector: ProjectorSpec | None = None
    lora: LoraSpec = field(default_factory=LoraSpec)
    packing: PackingConfig = field(default_factory=PackingConfig)
    latents: LatentsConfig = field(default_factory=LatentsConfig)
    vocoder: VocoderConfig = field(default_factory=VocoderConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)

    @property
    def family(self) -> Family:
        """The module's family; imports the code of a user's module."""
        return family_of(family_setting(self.name, self.role), self.kind, self.role)

    def module(self) -> Any:
        """A ``mmjax.models.module.Module`` with these settings, of the family's class."""
        return self.family.module(self.settings, self.role)

    @property
    def speaks(self) -> bool:
        """Whether it generates codes, which have no places in the text: a language model as a generator."""
        return self.role == "generator" and self.settings.medium is None

    @property
    def makes_latents(self) -> bool:
        """Whether it is an encoder of latents, which has no projector."""
        return self.settings.medium == "drawing"

    # ---- modified copies ---------------------------------------------------------------------------------------------

    def at(self, layout: Layout) -> ModuleSpec:
        """A copy under another layout."""
        return replace(self, layout=layout)

    def frozen(self) -> ModuleSpec:
        """A copy whose module is not trained; its projector and its adapters are as before."""
        dtype = self.optimizer.frozen_dtype or self.stored_dtype
        return replace(self, optimizer=replace(self.optimizer, frozen=True, frozen_dtype=dtype))

    def trained(self, optimizer: OptimizerConfig | None = None) -> ModuleSpec:
        """A copy whose module is trained, by ``optimizer`` if it is given; else by its own."""
        return replace(self, optimizer=replace(optimizer or self.optimizer, frozen=False, frozen_dtype=""))

    def with_settings(self, **changes: Any) -> ModuleSpec:
        """A copy with other settings of the module, such as ``layers=2``; raises ``ConfigError`` for illegal ones."""
        return replace(self, settings=replace(self.settings, **changes))

    def with_projector(self, **changes: Any) -> ModuleSpec:
        """A copy with other settings of its projector, fields of ``ProjectorConfig`` such as ``hidden=4096``.

        Raises:
          ValueError: it has no projector.
          ConfigError: a value is illegal.
        """
        if self.projector is None:
            raise ValueError(f"{self.name}: it has no projector")
        settings = replace(self.projector.settings, **changes)
        return replace(self, projector=replace(self.projector, settings=settings))

    def with_lora(self, optimizer: OptimizerConfig | None = None, **changes: Any) -> ModuleSpec:
        """A copy with low-rank adapters that are trained in place of the module, which is frozen.

        Args:
          optimizer: trains the adapters; by default the module's own does.
          changes: settings of the adapters, such as ``rank=16``.
        """
        adapters = replace(
            self.lora,
            settings=replace(self.lora.settings, **changes),
            optimizer=optimizer or replace(self.optimizer, frozen=False, frozen_dtype=""),
        )
        return replace(self.frozen(), lora=adapters)

    def with_callbacks(self, **functions: Callable[..., Any]) -> ModuleSpec:
        """A copy with a user's functions (context, features) -> features, by place: "before", "after", "projected".

        Raises:
          ValueError: a function is not at the top level of a module.
        """
        return replace(self, callbacks=replace(self.callbacks, **functions))


Change = Callable[[ModuleSpec], ModuleSpec]
"""Makes a modified copy of a node's settings."""


def encoder(name: str, settings: Any, projector: ProjectorConfig | None = None) -> ModuleSpec:
    """A node that turns media into tokens of the LLM.

    Args:
      name: its name in the model, such as "vision".
      settings: of a family of encoders, such as ``ViTConfig``; or a ``Module`` of a user's class, such as
        ``Gated(GatedConfig())``.
      projector: the projector at its end; by default one with the defaults. An encoder of latents has none, and is
        frozen.

    Raises:
      ValueError: the settings are of no family of encoders, or the module's class cannot be imported by its name.
      ConfigError: the class of a module or of its settings lacks what mmjax reads; the message names it.
    """
    if getattr(settings, "medium", None) == "drawing":
        return _node(name, "encoder", settings, None).frozen()
    return _node(name, "encoder", settings, projector or ProjectorConfig())


def generator(name: str, settings: Any, projector: ProjectorConfig | None = None) -> ModuleSpec:
    """A node that draws from the LLM's features, or speaks.

    Args:
      name: its name in the model, such as "painter".
      settings: such as ``DiTConfig``, or a ``DecoderConfig`` with a ``vocab`` for a generator that speaks in codes; or
        a ``Module`` of a user's class.
      projector: the projector at its start; by default one with the defaults.

    Raises:
      ValueError: the settings are of no family of generators, or the module's class cannot be imported by its name.
      ConfigError: the class of a module or of its settings lacks what mmjax reads; the message names it.
    """
    return _node(name, "generator", settings, projector or ProjectorConfig())


def language_model(settings: Any) -> ModuleSpec:
    """The node that reads text, named "llm", with settings such as ``DecoderConfig``.

    Raises:
      ValueError: the settings are of no family of language models.
    """
    return _node(LLM, "llm", settings, None)


def _node(name: str, role: Role, settings: Any, projector: ProjectorConfig | None) -> ModuleSpec:
    """A node of a family of mmjax, or of a user's class.

    Raises:
      ValueError: the settings are of no family with this role.
    """
    part = projector and ProjectorSpec(settings=projector)
    if hasattr(settings, "config"):
        kind = CodeName.of(type(settings))
        family_of(family_setting(name, role), kind, role)
        return ModuleSpec(name=name, kind=kind, role=role, settings=settings.config, projector=part)
    kind = kind_of(settings)
    if kind not in families_for(role):
        legal = ", ".join(FAMILIES[kind].config.__name__ for kind in families_for(role))
        raise ValueError(f"{name}: {type(settings).__name__} is no settings of {role}s; use {legal}")
    return ModuleSpec(name=name, kind=kind, role=role, settings=settings, projector=part)
