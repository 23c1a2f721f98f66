"""Vision transformer over packed patches of variable resolution.

Shapes: R rows, T patches per row, D width, H heads local to this rank, K head width. A row holds the patches of several
images; segment ids keep them apart and segment 0 is padding. Real-size presets lack the class token of their originals.
"""

from __future__ import annotations

from functools import partial

from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.models.context import Context
from mmjax.models.layers import Params, linear, lookup, rotate_2d
from mmjax.models.module import Block
from mmjax.models.parameters import Part
from mmjax.models.transformer import Affine, Norm
from mmjax.models.transformer import block as encoder_block
from mmjax.models.vit.config import ViTConfig


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


def block(c: ViTConfig, context: Context) -> Block:
    """One layer over rows of packed images."""
    positions_RT2 = context.tokens.positions
    if c.positions == "rope2d":
        return encoder_block(c, context, lambda x: rotate_2d(x, positions_RT2))
    return encoder_block(c, context)
