"""Settings of the model: its modules by name, names of their parts, and callbacks. Imports no JAX."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mmjax.configurable import configurable, require
from mmjax.models.edges import EdgeSpec, check_edges, parse_edge, star
from mmjax.models.families import FAMILIES, Family, Role, families_for, family_of, makes_latents
from mmjax.user_code import CODE, import_named, names_code, replace_by_name

LLM = "llm"
"""The name of the module that reads text."""
_A: Mapping[Role, str] = {"encoder": "an encoder", "llm": "an LLM", "generator": "a generator"}
_EXAMPLES: Mapping[Role, str] = {"encoder": "vision", "generator": "painter"}
_A_FUNCTION = {"example": "package.module:function", **CODE}


@configurable("Model")
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The modules of the model.

    A module belongs to a family, such as 'vit', or is a user's class, "package.module:Class", which needs --allow_code.

    Attributes:
      encoders: the family of each encoder by its name; the name is the encoder's scope in a configuration.
      llm: the family of the LLM.
      generators: the family of each generator by its name; the name is the generator's scope.
      edges: whose tokens go to whom, such as ('vision -> llm', 'vision -> painter', 'llm -> painter'); () lets every
        encoder feed the LLM, and the LLM every generator. Sources come before targets in ``encoders``.
      weights: a folder of a complete model as save_pretrained writes it, such as LLaVA's, from which settings and
        parameters of the encoders, their projectors and the LLM are read. A folder of one module is set in
        Weights.path.
    """

    encoders: dict[str, str] = field(default_factory=lambda: {"vision": "vit"}, metadata=CODE)
    llm: str = field(default="llama", metadata=CODE)
    generators: dict[str, str] = field(default_factory=dict, metadata={"example": {"painter": "dit"}, **CODE})
    edges: tuple[str, ...] = field(default=(), metadata={"example": ("vision -> llm",)})
    weights: str = field(default="", metadata={"example": "models/llava-1.5-7b-hf"})

    def __post_init__(self) -> None:
        for name, kind, role in self.roles:
            where = family_setting(name, role)
            fix = f"not {_A[role]}; use one of {', '.join(families_for(role))}"
            require(kind in families_for(role) or names_code(kind), where, kind, fix)
            if role != "llm":
                fix = f"must be an identifier other than 'llm', such as {_EXAMPLES[role]!r}"
                require(name != LLM and name.isidentifier(), f"Model.{role}s", name, fix)
        for name in self.generators:
            fix = f"is the name of an encoder; use another, such as '{name}2'"
            require(name not in self.encoders, "Model.generators", name, fix)
        for (name, _, role), (owner, _, _) in itertools.permutations(self.roles, 2):
            for part, kind in ((projector_name(owner), "projector"), (lora_name(owner), "adapters")):
                fix = f"is the name of {owner}'s {kind}; use another, such as '{name}2'"
                require(name != part, f"Model.{role}s", name, fix)
        check_edges(self.flows, {name: role for name, _, role in self.roles}, LLM, self.latent_encoders)

    @property
    def flows(self) -> tuple[EdgeSpec, ...]:
        """All edges, without settings: those of ``edges``, or of the star that () stands for."""
        if not self.edges:
            return star({name: role for name, _, role in self.roles}, LLM, self.latent_encoders)
        return tuple(map(parse_edge, self.edges))

    @property
    def roles(self) -> Iterator[tuple[str, str, Role]]:
        """Name, family and role of each module, such as ("vision", "vit", "encoder"): encoders, LLM, generators."""
        for name, kind in self.encoders.items():
            yield name, kind, "encoder"
        yield LLM, self.llm, "llm"
        for name, kind in self.generators.items():
            yield name, kind, "generator"

    @property
    def families(self) -> Iterator[tuple[str, Family]]:
        """Name and family of each module: encoders, LLM, generators; imports the code of a user's modules.

        Raises:
          ConfigError: a user's class does not exist, or is no module.
        """
        return ((name, family_of(family_setting(name, role), kind, role)) for name, kind, role in self.roles)

    @property
    def latent_encoders(self) -> tuple[str, ...]:
        """Names of the encoders of latents, which have no projector."""
        return tuple(name for name, kind in self.encoders.items() if kind in FAMILIES and makes_latents(kind))

    @property
    def media(self) -> tuple[str, ...]:
        """Names of the modules with a projector: encoders, then generators."""
        return (*(name for name in self.encoders if name not in self.latent_encoders), *self.generators)


@configurable("Callbacks")
@dataclass(frozen=True, kw_only=True)
class CallbacksConfig:
    """A user's functions (context, features) -> features, "package.module:function", which need --allow_code.

    In Python a value may be the function itself; then it needs no --allow_code.

    Attributes:
      before: called with the features before the module's first layer.
      after: called with the features behind the module's end, before its projector and its loss.
      projected: called with the output of the module's projector; an LLM has no projector.
    """

    before: str = field(default="", metadata=_A_FUNCTION)
    after: str = field(default="", metadata=_A_FUNCTION)
    projected: str = field(default="", metadata=_A_FUNCTION)

    def __post_init__(self) -> None:
        for name in vars(self):
            replace_by_name(self, name)
            value = getattr(self, name)
            fix = "names no function; give 'package.module:function', or '' for none"
            require(not value or names_code(value), f"Callbacks.{name}", value, fix)

    def check(self, module: str) -> None:
        """Requires that the module ``module`` has a place for each function; imports the functions.

        Raises:
          ConfigError: ``projected`` is set for the LLM, or Python does not find a function.
        """
        fix = f"the {LLM} has no projector; use {module}/Callbacks.after"
        require(module != LLM or not self.projected, f"{module}/Callbacks.projected", self.projected, fix)
        for name, value in self.names.items():
            import_named(f"{module}/Callbacks.{name}", value)

    @property
    def names(self) -> dict[str, str]:
        """The names of functions that are set, by field: {"before": "package.module:function"}."""
        return {name: value for name, value in vars(self).items() if value}


def family_setting(name: str, role: Role) -> str:
    """The gin setting of the family of the module ``name``, such as "Model.llm" or "Model.encoders['vision']"."""
    return "Model.llm" if role == "llm" else f"Model.{role}s[{name!r}]"


def projector_name(module: str) -> str:
    """The module name of an encoder's or a generator's projector: "vision_projector" for "vision"."""
    return f"{module}_projector"


def lora_name(module: str) -> str:
    """The module name of a module's low-rank adapters: "llm_lora" for "llm"."""
    return f"{module}_lora"
