"""Vision transformer over packed patches of variable resolution.

Shapes: R rows, T patches per row, D width, H heads local to this rank, K head width. A row holds the patches of several
images; segment ids keep them apart and segment 0 is padding. Real-size presets lack the class token of their originals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.attention import attention
from mmjax.configurable import configurable, divides, one_of, positive
from mmjax.mesh.submesh import Axes
from mmjax.models.layers import (
    Params,
    column_parallel,
    layer_norm,
    linear,
    residual_init,
    rotate,
    row_parallel,
    scan_layers,
    split_heads,
)
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


ACTIVATIONS = {"gelu": jax.nn.gelu, "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x)}


class _Norm(nnx.Module):
    def __init__(self, width: int):
        self.scale, self.bias = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width))


class _Attention(nnx.Module):
    def __init__(self, c: ViTConfig, rngs: nnx.Rngs):
        for name in ("q", "k", "v", "o"):
            init = residual_init(c.layers) if name == "o" else nnx.initializers.lecun_normal()
            setattr(self, name, nnx.Param(init(rngs.params(), (c.width, c.width))))
            setattr(self, f"{name}_bias", nnx.Param(jnp.zeros(c.width)))


class _Mlp(nnx.Module):
    def __init__(self, c: ViTConfig, rngs: nnx.Rngs):
        self.up = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (c.width, c.mlp)))
        self.down = nnx.Param(residual_init(c.layers)(rngs.params(), (c.mlp, c.width)))
        self.up_bias, self.down_bias = nnx.Param(jnp.zeros(c.mlp)), nnx.Param(jnp.zeros(c.width))


class ViTLayer(nnx.Module):
    """Parameters of one pre-norm block."""

    def __init__(self, c: ViTConfig, rngs: nnx.Rngs):
        self.attn_norm, self.attn = _Norm(c.width), _Attention(c, rngs)
        self.mlp_norm, self.mlp = _Norm(c.width), _Mlp(c, rngs)


class _Patch(nnx.Module):
    def __init__(self, c: ViTConfig, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (c.patch_values, c.width)))
        self.bias = nnx.Param(jnp.zeros(c.width))


class ViTStem(nnx.Module):
    """Patch embedding, and the position table of ``learned2d``."""

    def __init__(self, c: ViTConfig, rngs: nnx.Rngs):
        self.patch = _Patch(c, rngs)
        if c.positions == "learned2d":
            self.position = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (c.grid * c.grid, c.width)))


def parts(c: ViTConfig, first: bool, last: bool) -> tuple[Part, ...]:
    """The single parts that the first and the last stage hold."""
    stem = (Part(partial(ViTStem, c)),) if first else ()
    norm = (Part(lambda rngs: _Norm(c.width), "norm"),) if last else ()
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
    return scan_layers(lambda x, p: _layer(p, c, axes, x, segments_RT, positions_RT2), x_RTD, layers, c.remat)


def _layer(p: Params, c: ViTConfig, axes: Axes, x_RTD: Array, segments_RT: Array, positions_RT2: Array) -> Array:
    a: Any = p["attn"]
    h_RTD = layer_norm(x_RTD, p["attn_norm"])
    qkv = column_parallel(h_RTD, [(a[n], a[f"{n}_bias"]) for n in "qkv"], axes)
    q, k, v = (split_heads(y, c.head_width) for y in qkv)
    if c.positions == "rope2d":
        q, k = _rotate_2d(q, positions_RT2), _rotate_2d(k, positions_RT2)
    y_RTHK = attention(q, k, v, segments_RT, "full")
    x_RTD = x_RTD + row_parallel(y_RTHK.reshape(*y_RTHK.shape[:2], -1), a["o"], axes, a["o_bias"])
    m: Any = p["mlp"]
    (h_RTF,) = column_parallel(layer_norm(x_RTD, p["mlp_norm"]), [(m["up"], m["up_bias"])], axes)
    return x_RTD + row_parallel(ACTIVATIONS[c.activation](h_RTF), m["down"], axes, m["down_bias"])


def _rotate_2d(x_RTHK: Array, positions_RT2: Array) -> Array:
    """The first half of a head turns with the patch's row, the second with its column."""
    by_row, by_column = jnp.split(x_RTHK, 2, axis=-1)
    return jnp.concatenate(
        [rotate(by_row, positions_RT2[..., 0], ROPE_THETA), rotate(by_column, positions_RT2[..., 1], ROPE_THETA)],
        axis=-1,
    )
