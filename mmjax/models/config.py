"""Settings of the model: its modules by name, and the names and checks that follow. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mmjax.configurable import configurable, require
from mmjax.mesh.layout import Layout, split_layers
from mmjax.models.families import Family, Place, families_for, family_of
from mmjax.user_code import CODE, names_code

LLM = "llm"
"""The name of the module that reads text."""
_A: Mapping[Place, str] = {"encoder": "an encoder", "llm": "an LLM", "generator": "a generator"}
_EXAMPLES: Mapping[Place, str] = {"encoder": "vision", "generator": "painter"}
_A_FUNCTION = {"example": "package.module:function", **CODE}


@configurable("Model")
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which modules the model has.

    A module is of a family, such as 'vit', or a class of one's own, "package.module:Class", which needs --allow_code.

    Attributes:
      encoders: family of each encoder by its name; the name is the encoder's scope in a configuration.
      llm: family of the LLM.
      generators: family of each generator by its name, likewise.
      weights: a folder of a whole model as save_pretrained writes it, such as LLaVA's: settings and parameters of the
        encoders, their projectors and the LLM come from it. A module's own folder is in Weights.path.
    """

    encoders: dict[str, str] = field(default_factory=lambda: {"vision": "vit"}, metadata=CODE)
    llm: str = field(default="llama", metadata=CODE)
    generators: dict[str, str] = field(default_factory=dict, metadata={"example": {"painter": "dit"}, **CODE})
    weights: str = field(default="", metadata={"example": "models/llava-1.5-7b-hf"})

    def __post_init__(self) -> None:
        for name, kind, place in self.placed:
            where = setting_of(name, place)
            fix = f"not {_A[place]}; use one of {', '.join(families_for(place))}"
            require(kind in families_for(place) or names_code(kind), where, kind, fix)
            if place != "llm":
                fix = f"must be an identifier other than 'llm', such as {_EXAMPLES[place]!r}"
                require(name != LLM and name.isidentifier(), f"Model.{place}s", name, fix)

    @property
    def placed(self) -> Iterator[tuple[str, str, Place]]:
        """Name, family and place of each module, sources before users."""
        for name, kind in self.encoders.items():
            yield name, kind, "encoder"
        yield LLM, self.llm, "llm"
        for name, kind in self.generators.items():
            yield name, kind, "generator"

    @property
    def families(self) -> Iterator[tuple[str, Family]]:
        """Name and family of each module, sources before users; imports the code of a user's own."""
        return ((name, family_of(setting_of(name, place), kind, place)) for name, kind, place in self.placed)

    @property
    def media(self) -> tuple[str, ...]:
        """The modules whose media have placeholders in the LLM's rows: encoders, then generators."""
        return (*self.encoders, *self.generators)


@configurable("Callbacks")
@dataclass(frozen=True, kw_only=True)
class CallbacksConfig:
    """Functions of one's own, "package.module:function", which need --allow_code: (context, features) -> features.

    Attributes:
      before: of the features before the module's first layer.
      after: of the features behind the module's end, before its projector and its loss.
      projected: of what its projector gives; an LLM has none.
    """

    before: str = field(default="", metadata=_A_FUNCTION)
    after: str = field(default="", metadata=_A_FUNCTION)
    projected: str = field(default="", metadata=_A_FUNCTION)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            fix = "names no function; give 'package.module:function', or '' for none"
            require(not value or names_code(value), f"Callbacks.{name}", value, fix)

    @property
    def given(self) -> dict[str, str]:
        """The names that are given, by field."""
        return {name: value for name, value in vars(self).items() if value}


def setting_of(name: str, place: Place) -> str:
    """The setting that says of which family a module is."""
    return "Model.llm" if place == "llm" else f"Model.{place}s[{name!r}]"


def projector_name(module: str) -> str:
    """Module name of an encoder's or a generator's projector."""
    return f"{module}_projector"


def lora_name(module: str) -> str:
    """Module name of the low-rank adapters of a module."""
    return f"{module}_lora"


def require_layers(name: str, layers: int, layout: Layout) -> None:
    """Checks that every stage of the module has a layer, and every layer a stage.

    Raises:
      ConfigError: when the module has fewer layers than stages, or not as many as the layout's stages together.
    """
    fix = f"a stage needs a layer and there are {layers}; use {layers} or less"
    require(layout.pp <= layers, f"{name}/Layout.pp", layout.pp, fix)
    fix = f"pp * chunks = {layout.stages} stages need a layer each and there are {layers}; use {layers // layout.pp}"
    require(layout.stages <= layers, f"{name}/Layout.chunks", layout.chunks, fix)
    even = tuple(map(len, split_layers(layers, layout.stages)))
    fix = f"sums to {sum(layout.layers)} and there are {layers}; use {even}, or () for as equal as possible"
    require(sum(layout.layers or even) == layers, f"{name}/Layout.layers", layout.layers, fix)
