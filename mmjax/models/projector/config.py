"""Settings of projectors. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmjax.configurable import configurable, not_negative, require


@configurable("Projector")
@dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """A two-layer projector.

    Attributes:
      hidden: hidden units; 0 means the LLM's width.
      inject: LLM layers that the modality tokens enter again: each adds, at the tokens' places, the output of a
        projector of its own for them, as in DeepStack (Meng et al. 2024).
      levels: layers of the encoder whose outputs these projectors take instead, one for each of inject (as Qwen3-VL
        does); () takes the encoder's tokens.
    """

    hidden: int = 0
    inject: tuple[int, ...] = field(default=(), metadata={"example": (0, 2)})
    levels: tuple[int, ...] = field(default=(), metadata={"example": (1, 3)})

    def __post_init__(self) -> None:
        not_negative("Projector.hidden", self.hidden)
        rising = list(self.inject) == sorted(set(self.inject)) and all(layer >= 0 for layer in self.inject)
        require(rising, "Projector.inject", self.inject, "must be rising numbers of LLM layers, such as (0, 2)")
        legal = not self.levels or (len(self.levels) == len(self.inject) and min(self.levels) >= 0)
        fix = f"must be a layer of the encoder for each of Projector.inject={self.inject}, or ()"
        require(legal, "Projector.levels", self.levels, fix)
