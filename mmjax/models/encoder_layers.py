"""Pre-norm transformer layers of encoders: full attention within a segment, biases everywhere, tp over heads and mlp.

Generators use their parts.

Shapes: R rows, T positions per row, D width, H heads and F hidden units local to this rank, K head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.attention import attention
from mmjax.mesh.submesh import Axes
from mmjax.models.layers import (
    Params,
    column_parallel,
    layer_norm,
    residual_init,
    row_parallel,
    scan_layers,
    split_heads,
)

ACTIVATIONS = {"gelu": jax.nn.gelu, "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x)}


class EncoderLayers(Protocol):
    """The fields of an encoder's configuration that these layers read."""

    @property
    def layers(self) -> int:
        """Depth of the whole encoder."""
        ...

    @property
    def width(self) -> int:
        """Model width."""
        ...

    @property
    def mlp(self) -> int:
        """Hidden units."""
        ...

    @property
    def head_width(self) -> int:
        """Width of one head."""
        ...

    @property
    def activation(self) -> str:
        """Key of ``ACTIVATIONS``."""
        ...

    @property
    def remat(self) -> str:
        """Key of ``REMAT``: how much is kept for backward."""
        ...


class Norm(nnx.Module):
    """Scale and bias of a LayerNorm."""

    def __init__(self, width: int):
        self.scale, self.bias = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width))


class Attention(nnx.Module):
    """Weights and biases of queries, keys, values and output."""

    def __init__(self, c: EncoderLayers, rngs: nnx.Rngs):
        for name in ("q", "k", "v", "o"):
            init = residual_init(c.layers) if name == "o" else nnx.initializers.lecun_normal()
            setattr(self, name, nnx.Param(init(rngs.params(), (c.width, c.width))))
            setattr(self, f"{name}_bias", nnx.Param(jnp.zeros(c.width)))


class Mlp(nnx.Module):
    """Weights and biases of the two-layer product."""

    def __init__(self, c: EncoderLayers, rngs: nnx.Rngs):
        self.up = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (c.width, c.mlp)))
        self.down = nnx.Param(residual_init(c.layers)(rngs.params(), (c.mlp, c.width)))
        self.up_bias, self.down_bias = nnx.Param(jnp.zeros(c.mlp)), nnx.Param(jnp.zeros(c.width))


class EncoderLayer(nnx.Module):
    """Parameters of one pre-norm block."""

    def __init__(self, c: EncoderLayers, rngs: nnx.Rngs):
        self.attn_norm, self.attn = Norm(c.width), Attention(c, rngs)
        self.mlp_norm, self.mlp = Norm(c.width), Mlp(c, rngs)


def run_layers(
    layers: Params | None,
    c: EncoderLayers,
    axes: Axes,
    x_RTD: Float[Array, "R T D"],
    segments_RT: Int[Array, "R T"],
    turn: Callable[[Array], Array] = lambda x_RTHK: x_RTHK,
) -> Float[Array, "R T D"]:
    """The stage's blocks; positions attend within their own segment only. ``turn`` rotates queries and keys."""
    return scan_layers(lambda x, p: _layer(p, c, axes, x, segments_RT, turn), x_RTD, layers, c.remat)


def _layer(
    p: Params, c: EncoderLayers, axes: Axes, x_RTD: Array, segments_RT: Array, turn: Callable[[Array], Array]
) -> Array:
    x_RTD = x_RTD + attend(p["attn"], c, axes, layer_norm(x_RTD, p["attn_norm"]), segments_RT, turn)
    return x_RTD + feed_forward(p["mlp"], c, axes, layer_norm(x_RTD, p["mlp_norm"]))


def attend(
    p: Params, c: EncoderLayers, axes: Axes, h_RTD: Array, segments_RT: Array, turn: Callable[[Array], Array]
) -> Float[Array, "R T D"]:
    """Self-attention of normalised features, without the residual."""
    qkv = column_parallel(h_RTD, [(p[n], p[f"{n}_bias"]) for n in "qkv"], axes)
    q, k, v = (split_heads(y, c.head_width) for y in qkv)
    y_RTHK = attention(turn(q), turn(k), v, segments_RT, "full")
    return row_parallel(y_RTHK.reshape(*y_RTHK.shape[:2], -1), p["o"], axes, p["o_bias"])


def feed_forward(p: Params, c: EncoderLayers, axes: Axes, h_RTD: Array) -> Float[Array, "R T D"]:
    """The two-layer product of normalised features, without the residual."""
    (h_RTF,) = column_parallel(h_RTD, [(p["up"], p["up_bias"])], axes)
    return row_parallel(ACTIVATIONS[c.activation](h_RTF), p["down"], axes, p["down_bias"])
