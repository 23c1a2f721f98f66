"""Vision transformer over packed patches of variable resolution.

Shapes: R rows, T patches per row, D width, H heads local to this rank, K head width. A row holds the patches of several
images; segment ids keep them apart and segment 0 is padding. Real-size presets lack the class token of their originals.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float, Int

from mmjax.mesh.submesh import Axes
from mmjax.models import encoder_layers
from mmjax.models.config import ViTConfig
from mmjax.models.encoder_layers import Norm
from mmjax.models.layers import Params, linear, lookup, rotate
from mmjax.models.parameters import Part

ROPE_THETA = 100.0


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
        x_RTD = x_RTD + lookup(p["position"], positions_RT2[..., 0] * c.grid + positions_RT2[..., 1])
    return x_RTD


def run_layers(
    layers: Params | None, c: ViTConfig, axes: Axes, x_RTD: Array, segments_RT: Array, positions_RT2: Array
) -> Float[Array, "R T D"]:
    """The stage's blocks; patches attend within their own image only."""
    if c.positions == "rope2d":
        return encoder_layers.run_layers(layers, c, axes, x_RTD, segments_RT, lambda x: rotate_2d(x, positions_RT2))
    return encoder_layers.run_layers(layers, c, axes, x_RTD, segments_RT)


def rotate_2d(x_RTHK: Array, positions_RT2: Array) -> Array:
    """Rotates the first half of each head by the patch's row, the second by its column."""
    by_row, by_column = jnp.split(x_RTHK, 2, axis=-1)
    return jnp.concatenate(
        [rotate(by_row, positions_RT2[..., 0], ROPE_THETA), rotate(by_column, positions_RT2[..., 1], ROPE_THETA)],
        axis=-1,
    )
