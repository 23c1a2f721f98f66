"""Settings of vision transformers. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mmjax.configurable import configurable, divides, one_of, positive, require
from mmjax.models.choices import ACTIVATIONS, REMATS, EqualHeads, Medium, SquarePatches

INTERPOLATIONS = ("none", "bicubic", "bilinear")
"""How a learned table of positions becomes as large as an image."""


_LARGE: Mapping[str, object] = dict(
    layers=24, width=1024, heads=16, mlp=4096, patch=14, channels=3, positions="learned2d"
)
"""Sizes of ViT-L/14, which CLIP and DINOv2 have."""


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
      grid: largest number of patches along a side, or the table's, which is resized where ``interpolate`` says how;
        used by ``learned2d``.
      interpolate: how the table is resized to each image: ``none`` (an image reads the upper left corner), ``bicubic``,
        or ``bilinear`` (smoothed where the image has fewer patches, as in SigLIP 2).
      class_token: whether a class token with a position of its own comes before each image's patches. Patches attend to
        it; the LLM never sees it.
      patch_bias: whether the patch embedding has a bias.
      stem_norm, last_norm: whether a norm follows the embeddings, and the last layer.
      norm_eps: what norms add to the variance.
      layer_scale: whether what attention and the two-layer product add is scaled by learned vectors.
      activation: ``gelu`` (tanh), ``gelu_exact`` or ``quick_gelu``.
      remat: what is kept for backward: ``none`` recomputes nothing, ``dots`` keeps products, ``full`` recomputes all.
    """

    medium: ClassVar[Medium] = "image"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "clip-vit-l14": dict(
            **_LARGE,
            grid=24,
            activation="quick_gelu",
        ),
        "vit-h14": dict(
            layers=32, width=1280, heads=16, mlp=5120, patch=14, channels=3, positions="learned2d", grid=16
        ),
        "clip-vit-l14-336": dict(
            **_LARGE,
            grid=24,
            interpolate="bicubic",
            class_token=True,
            patch_bias=False,
            stem_norm=True,
            last_norm=False,
            norm_eps=1e-5,
            activation="quick_gelu",
        ),
        "siglip-so400m-14-384": dict(
            layers=27,
            width=1152,
            heads=16,
            mlp=4304,
            patch=14,
            channels=3,
            positions="learned2d",
            grid=27,
            interpolate="bicubic",
        ),
        "dinov2-large": dict(
            **_LARGE,
            grid=37,
            interpolate="bicubic",
            class_token=True,
            layer_scale=True,
            activation="gelu_exact",
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
    interpolate: str = "none"
    class_token: bool = False
    patch_bias: bool = True
    stem_norm: bool = False
    last_norm: bool = True
    norm_eps: float = 1e-6
    layer_scale: bool = False
    activation: str = "gelu"
    remat: str = "none"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "mlp", "patch", "channels", "merge", "grid"):
            positive(f"ViT.{name}", getattr(self, name))
        positive("ViT.norm_eps", self.norm_eps, 1e-6)
        divides("ViT.heads", self.heads, self.width, "ViT.width")
        one_of("ViT.positions", self.positions, ("rope2d", "learned2d"))
        one_of("ViT.interpolate", self.interpolate, INTERPOLATIONS)
        one_of("ViT.activation", self.activation, ACTIVATIONS)
        one_of("ViT.remat", self.remat, REMATS)
        legal = self.interpolate == "none" or self.positions == "learned2d"
        fix = "resizes a table of positions, which rope2d has not; set it to 'none' or ViT.positions to 'learned2d'"
        require(legal, "ViT.interpolate", self.interpolate, fix)
        if self.positions == "rope2d":
            divides(
                "ViT.heads",
                self.heads,
                self.width // 4,
                "a quarter of ViT.width (rope2d rotates quarters of a head), which is",
            )
