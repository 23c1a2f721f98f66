"""Settings of vision transformers. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mmjax.configurable import configurable, divides, one_of, positive
from mmjax.models.choices import ACTIVATIONS, REMATS, EqualHeads, Medium, SquarePatches


@configurable("ViT")
@dataclass(frozen=True, kw_only=True)
class ViTConfig(EqualHeads, SquarePatches):
    """A vision encoder.

    Attributes:
      preset: name of the preset whose values are the defaults.
      layers, width, heads, mlp: depth, model width, attention heads and hidden units.
      patch: side of a square patch in pixels.
      channels: image channels.
      merge: side of the square of patches that the projector joins into one LLM token.
      positions: ``rope2d`` (any resolution) or ``learned2d`` (a table of ``grid``² positions).
      grid: largest number of patches along a side; used by ``learned2d``.
      activation: ``gelu`` or ``quick_gelu``.
      remat: what is kept for backward: ``none`` recomputes nothing, ``dots`` keeps products, ``full`` recomputes all.
    """

    medium: ClassVar[Medium] = "image"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "clip-vit-l14": dict(
            layers=24,
            width=1024,
            heads=16,
            mlp=4096,
            patch=14,
            channels=3,
            positions="learned2d",
            grid=24,
            activation="quick_gelu",
        ),
        "vit-h14": dict(
            layers=32, width=1280, heads=16, mlp=5120, patch=14, channels=3, positions="learned2d", grid=16
        ),
    }

    preset: str = "tiny"
    layers: int = 2
    width: int = 64
    heads: int = 4
    mlp: int = 128
    patch: int = 4
    channels: int = 1
    merge: int = 2
    positions: str = "rope2d"
    grid: int = 32
    activation: str = "gelu"
    remat: str = "none"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "mlp", "patch", "channels", "merge", "grid"):
            positive(f"ViT.{name}", getattr(self, name))
        divides("ViT.heads", self.heads, self.width, "ViT.width")
        one_of("ViT.positions", self.positions, ("rope2d", "learned2d"))
        one_of("ViT.activation", self.activation, ACTIVATIONS)
        one_of("ViT.remat", self.remat, REMATS)
        if self.positions == "rope2d":
            divides(
                "ViT.heads",
                self.heads,
                self.width // 4,
                "a quarter of ViT.width (rope2d rotates quarters of a head), which is",
            )
