"""Settings of temporal encoders. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mmjax.attention.settings import check_backend
from mmjax.configurable import configurable, divides, one_of, positive, require
from mmjax.models.choices import ACTIVATIONS, REMATS, Medium
from mmjax.models.settings import EqualHeads


@configurable("Temporal")
@dataclass(frozen=True, kw_only=True)
class TemporalConfig(EqualHeads):
    """An encoder of another encoder's tokens: of all media of a sample together, such as the frames of a video.

    Attributes:
      preset: the preset whose values are the defaults.
      layers, width, heads, mlp: depth, model width, attention heads and hidden units.
      rope_theta: base of the rotary frequencies: queries and keys rotate with the number of their medium in its sample.
      activation: ``gelu`` (tanh), ``gelu_exact``, ``quick_gelu`` or ``silu``.
      norm_eps: epsilon of norms.
      attention: the attention backend: ``blockwise`` (any device), ``dense`` (all pairs at once), or ``auto``.
      remat: the checkpoint policy: ``none`` recomputes nothing, ``dots`` saves products, ``full`` recomputes all;
        ``auto`` is none on CPUs, and on GPUs the first of them whose estimated memory fits.
    """

    medium: ClassVar[Medium] = "tokens"
    merge: ClassVar[int] = 1
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {"tiny": {}}

    preset: str = "tiny"
    layers: int = 2
    width: int = 64
    heads: int = 4
    mlp: int = 128
    rope_theta: float = 100.0
    activation: str = "gelu"
    norm_eps: float = 1e-6
    attention: str = "auto"
    remat: str = "auto"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "mlp"):
            positive(f"Temporal.{name}", getattr(self, name))
        divides("Temporal.heads", self.heads, self.width, "Temporal.width")
        fix = f"{self.width // self.heads} components of a head make no pairs; use {max(self.width // 2, 1)} or less"
        require(self.head_width % 2 == 0, "Temporal.heads", self.heads, fix)
        positive("Temporal.rope_theta", self.rope_theta, 100.0)
        one_of("Temporal.activation", self.activation, ACTIVATIONS)
        positive("Temporal.norm_eps", self.norm_eps, 1e-6)
        check_backend("Temporal", self.attention, self.head_width)
        one_of("Temporal.remat", self.remat, REMATS)
