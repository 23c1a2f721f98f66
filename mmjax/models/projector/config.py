"""Settings of projectors. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mmjax.configurable import configurable, not_negative, one_of, require, setting_name
from mmjax.models.choices import ACTIVATIONS
from mmjax.models.settings import ModuleSettings

KINDS = ("mlp", "linear")
NORMS = ("none", "layer", "rms", "rms_plus_one", "rms_plain")


@configurable("Projector")
@dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """A projector.

    With an encoder's ``merge`` above 1 each LLM token is made of a square of patches, row by row: ``merge=2`` and
    ``linear`` are known as pixel shuffle.

    Attributes:
      kind: ``mlp``, two layers with an activation between them, or ``linear``, one layer.
      hidden: hidden units of ``mlp``; 0 means the LLM's width.
      activation: activation of ``mlp``: ``gelu`` (tanh), ``gelu_exact`` (LLaVA's), ``quick_gelu`` or ``silu``.
      norm: norm of each feature before features are concatenated: ``none``, ``layer`` (Qwen2-VL), ``rms``,
        ``rms_plus_one``, which multiplies by 1 + its weight (Gemma 3), or ``rms_plain``, which has no weight (Gemma 4).
      bias: whether its products have biases.
      stds: standard deviations of new weights, of the first layer and the second, or of the only one, such as
        (0.02, 0.014), normally distributed; () divides 1 by the root of a layer's inputs. New biases are 0.
      pool: whether a token is made of the mean of its patches, whose norm comes behind the mean, and not of all of them
        one behind another (Gemma 3).
      inject: LLM layers that the modality tokens enter again: to the input of each, at the tokens' places, the output
        of an additional projector is added, as in DeepStack (Meng et al. 2024).
      newline: whether an image is encoded as in LLaVA-NeXT and LLaVA-OneVision: the tokens of the image, then those of
        its tiles as one picture without padding, with a learned newline behind each row (see ``mmjax.data.tiles``).
      most_tiles: the largest picture of newline, in tiles: a larger one is resized, as with LLaVA-OneVision's
        anyres_max_9; 0 = no limit.
      levels: layers of the encoder whose outputs the additional projectors read, one for each of inject (as in
        Qwen3-VL); () stands for the encoder's tokens.
    """

    llm_only: ClassVar[tuple[str, ...]] = ("newline", "inject", "most_tiles", "pool")
    """Fields of an encoder that feeds the LLM alone."""

    kind: str = "mlp"
    hidden: int = 0
    activation: str = "gelu"
    norm: str = "none"
    bias: bool = True
    stds: tuple[float, ...] = field(default=(), metadata={"example": (0.02, 0.014)})
    pool: bool = False
    inject: tuple[int, ...] = field(default=(), metadata={"example": (0, 2)})
    levels: tuple[int, ...] = field(default=(), metadata={"example": (1, 3)})
    newline: bool = False
    most_tiles: int = 0

    @property
    def layer_settings(self) -> dict[str, Any]:
        """What every ``Projector`` of the settings has as keyword arguments: "norm", "bias" and "stds"."""
        return {"norm": self.norm, "bias": self.bias, "stds": self.stds}

    def __post_init__(self) -> None:
        one_of("Projector.kind", self.kind, KINDS)
        one_of("Projector.activation", self.activation, ACTIVATIONS)
        one_of("Projector.norm", self.norm, NORMS)
        not_negative("Projector.hidden", self.hidden)
        fix = "a linear projector has no hidden units; set it to 0 or Projector.kind to 'mlp'"
        require(self.kind == "mlp" or not self.hidden, "Projector.hidden", self.hidden, fix)
        layers = 2 if self.kind == "mlp" else 1
        legal = not self.stds or (len(self.stds) == layers and min(self.stds) > 0)
        fix = f"must be a number above 0 for each of its layers, such as {(0.02, 0.014)[:layers]}, or ()"
        require(legal, "Projector.stds", self.stds, fix)
        ascending = list(self.inject) == sorted(set(self.inject)) and all(layer >= 0 for layer in self.inject)
        require(ascending, "Projector.inject", self.inject, "must be rising numbers of LLM layers, such as (0, 2)")
        legal = not self.levels or (len(self.levels) == len(self.inject) and min(self.levels) >= 0)
        fix = f"must be a layer of the encoder for each of Projector.inject={self.inject}, or ()"
        require(legal, "Projector.levels", self.levels, fix)
        not_negative("Projector.most_tiles", self.most_tiles)
        fix = "bounds the picture of Projector.newline; set it to 0, or Projector.newline to True"
        require(self.newline or not self.most_tiles, "Projector.most_tiles", self.most_tiles, fix)
        fix = "additional projectors read all features of a token; set it to (), or Projector.pool to False"
        require(not (self.pool and self.inject), "Projector.inject", self.inject, fix)
        fix = "places that are newlines have no tokens to inject; set it to (), or Projector.newline to False"
        require(not (self.newline and self.inject), "Projector.inject", self.inject, fix)

    def check(self, name: str, source: ModuleSettings, llm: ModuleSettings, *, llm_name: str, encodes: bool) -> None:
        """Requires that the projector fits the modules that it connects.

        Args:
          name: the name of its encoder or generator.
          source: settings of that module.
          llm: settings of the LLM.
          llm_name: the LLM's name.
          encodes: whether the module is an encoder.

        Raises:
          ConfigError: a layer that its tokens enter or leave does not exist, or a field belongs to other modules.
        """
        fix = "is of an encoder's patches; set it to False"
        require(encodes or not self.pool, f"{name}/Projector.pool", self.pool, fix)
        fix = "a generator takes what the LLM ends with; set it to ()"
        require(encodes or not self.inject, f"{name}/Projector.inject", self.inject, fix)
        fix = "belongs to the tiles of images that an encoder sees; set it to False"
        is_tiled = encodes and source.medium == "image"
        require(is_tiled or not self.newline, f"{name}/Projector.newline", self.newline, fix)
        if self.newline and llm.grid_setting:
            counting = setting_name(llm_name, llm, llm.grid_setting)
            fix = f"is no token of an image's rows and columns, which {counting} counts; set one of both"
            require(not self.newline, f"{name}/Projector.newline", self.newline, fix)
        most = llm.layers - 1
        legal = (0, most) if most else (0,)
        fix = f"the LLM has layers 0 to {most} ({setting_name(llm_name, llm, 'layers')}={most + 1}); use {legal}"
        require(all(layer <= most for layer in self.inject), f"{name}/Projector.inject", self.inject, fix)
        most = source.layers - 1
        fix = f"{name} has layers 0 to {most}; use numbers of these"
        require(all(layer <= most for layer in self.levels), f"{name}/Projector.levels", self.levels, fix)

    def sizes_by_tp(self, name: str, llm: ModuleSettings, *, llm_name: str) -> Mapping[str, int]:
        """The sizes that tp divides, by setting: the hidden units of the projector of the module ``name``, if any."""
        hidden = self.hidden_of(llm.width)
        setting = setting_name(name, self, "hidden") if self.hidden else setting_name(llm_name, llm, "width")
        return {setting: hidden} if hidden else {}

    def idle(self) -> dict[str, str]:
        """The fields without effect, given the other fields, each with the reason: "activation" if it is linear, else
        {}.
        """
        return {"activation": "Projector.kind='linear' has none"} if self.kind == "linear" else {}

    def hidden_of(self, width: int) -> int:
        """The number of hidden units: ``hidden``, or ``width`` (the width of its results) if that is 0; 0 for a linear
        projector.
        """
        return (self.hidden or width) if self.kind == "mlp" else 0


def injected_name(layer: int) -> str:
    """The name of an additional projector's parameters, by the layer that its tokens enter: "inject003" for 3.

    ``layer`` is an index in the LLM, from 0, as in ``Edge.inject``.
    """
    return f"inject{layer:03d}"
