"""Vision transformer over packed patches of variable resolution.

Shapes: R rows, T patches per row, D width, H heads local to this rank, K head width. A row holds the patches of several
images; segment ids keep them apart and segment 0 is padding. Real-size presets lack the class token of their originals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float, Int

from mmjax.configurable import configurable, divides, one_of, positive
from mmjax.mesh.submesh import Axes
from mmjax.models import encoder_layers
from mmjax.models.encoder_layers import ACTIVATIONS, Norm
from mmjax.models.layers import Params, linear, rotate
from mmjax.models.parameters import Part

ROPE_THETA = 100.0


@configurable("ViT")
@dataclass(frozen=True, kw_only=True)
class ViTConfig:
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
      remat: what backward finds kept: ``none`` recomputes nothing, ``dots`` keeps products, ``full`` recomputes all.
    """

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
        one_of("ViT.activation", self.activation, tuple(ACTIVATIONS))
        one_of("ViT.remat", self.remat, ("none", "dots", "full"))
        if self.positions == "rope2d":
            divides(
                "ViT.heads",
                self.heads,
                self.width // 4,
                "a quarter of ViT.width (rope2d rotates quarters of a head), which is",
            )

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def patch_values(self) -> int:
        """Numbers in one patch."""
        return self.patch * self.patch * self.channels


class Affine(nnx.Module):
    """Kernel and bias of a product that tp does not split."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs, init: Initializer | None = None):
        init = init or nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(init(rngs.params(), (inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs))


class ViTStem(nnx.Module):
    """Patch embedding, and the position table of ``learned2d``."""

    def __init__(self, c: ViTConfig, rngs: nnx.Rngs):
        self.patch = Affine(c.patch_values, c.width, rngs)
        if c.positions == "learned2d":
            self.position = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (c.grid * c.grid, c.width)))


def parts(c: ViTConfig, first: bool, last: bool) -> tuple[Part, ...]:
    """The single parts that the first and the last stage hold."""
    stem = (Part(partial(ViTStem, c)),) if first else ()
    norm = (Part(lambda rngs: Norm(c.width), "norm"),) if last else ()
    return stem + norm


def embed_patches(
    p: Params, c: ViTConfig, patches_RTP: Float[Array, "R T P"], positions_RT2: Int[Array, "R T 2"]
) -> Float[Array, "R T D"]:
    """Patch pixels to features."""
    x_RTD = linear(patches_RTP.astype(p["patch"]["kernel"].dtype), p["patch"]["kernel"], p["patch"]["bias"])
    if c.positions == "learned2d":
        x_RTD = x_RTD + jnp.take(p["position"], positions_RT2[..., 0] * c.grid + positions_RT2[..., 1], axis=0)
    return x_RTD


def run_layers(
    layers: Params | None, c: ViTConfig, axes: Axes, x_RTD: Array, segments_RT: Array, positions_RT2: Array
) -> Float[Array, "R T D"]:
    """The stage's blocks; patches attend within their own image only."""
    if c.positions == "rope2d":
        return encoder_layers.run_layers(layers, c, axes, x_RTD, segments_RT, lambda x: rotate_2d(x, positions_RT2))
    return encoder_layers.run_layers(layers, c, axes, x_RTD, segments_RT)


def rotate_2d(x_RTHK: Array, positions_RT2: Array) -> Array:
    """The first half of a head turns with the patch's row, the second with its column."""
    by_row, by_column = jnp.split(x_RTHK, 2, axis=-1)
    return jnp.concatenate(
        [rotate(by_row, positions_RT2[..., 0], ROPE_THETA), rotate(by_column, positions_RT2[..., 1], ROPE_THETA)],
        axis=-1,
    )
