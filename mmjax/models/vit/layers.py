"""Vision transformer over packed patches of variable resolution.

Shapes: R rows, T positions per row, P values of a patch, G registers, D width, H heads local to this rank, K head
width. A row has the patches of several images, which segment ids separate; segment 0 is padding. An image begins with
its special tokens, the class token and registers, with the coordinates -1, -2, … on both axes.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from mmjax.models.context import Context
from mmjax.models.handles import opened
from mmjax.models.layers import Params, linear, lookup, rotate_2d, rotate_axial
from mmjax.models.module import Block
from mmjax.models.norms import any_norm, repeated
from mmjax.models.parameters import Part
from mmjax.models.transformer import Affine, EncoderLayer, Norm, encoder_block
from mmjax.models.vit.config import ViTConfig
from mmjax.models.vit.positions import centres, learned


class ViTStem(nnx.Module):
    """The patch embedding "patch", and for learned positions the table "position", with the class token's row first.

    Tables of columns and of rows lie one behind the other. With a class token there is also "class_token", and with
    registers "registers" [registers, width].
    """

    def __init__(self, c: ViTConfig, rngs: nnx.Rngs):
        self.patch = Affine(c.frames * c.patch_values, c.width, rngs, bias=c.patch_bias)
        small = nnx.initializers.normal(0.02)
        if c.has_table:
            self.position = nnx.Param(small(rngs.params(), (c.places, c.width)), dims=("place", "embed"))
        if c.class_token:
            self.class_token = nnx.Param(small(rngs.params(), (c.width,)), dims=("embed",))
        if c.registers:
            self.registers = nnx.Param(small(rngs.params(), (c.registers, c.width)), dims=("place", "embed"))


class ViTLayer(EncoderLayer):
    """Parameters of one layer, see ``EncoderLayer``; with ``ViT.layer_scale`` also "attn_scale" and "mlp_scale"."""

    def __init__(self, c: ViTConfig, rngs: nnx.Rngs):
        super().__init__(c, rngs, rms=c.norm == "rms", gated=c.gated)
        if c.layer_scale:
            self.attn_scale = nnx.Param(jnp.ones(c.width), dims=("embed",))
            self.mlp_scale = nnx.Param(jnp.ones(c.width), dims=("embed",))


class Standard(nnx.Module):
    """The parameters "bias" and "scale" ``[D]`` of ``ViT.output = 'standardised'``, initially 0 and 1, always fp32."""

    def __init__(self, c: ViTConfig):
        self.bias = nnx.Param(jnp.zeros(c.width), dims=("embed",), in_fp32=True)
        self.scale = nnx.Param(jnp.ones(c.width), dims=("embed",), in_fp32=True)


def parts(c: ViTConfig, *, first: bool, last: bool) -> tuple[Part, ...]:
    """The parameters outside of layers of a stage that is the module's ``first``, its ``last``, or both; () for
    neither.

    A ``Part`` creates parameters together; ``Part.declarations`` has their shapes by name, such as "patch/kernel". The
    first stage has "patch", "position", "class_token" and "registers", as the settings have them, and "stem_norm" if
    ``c.stem_norm``; the last has "norm" if ``c.last_norm``, and "standard" if ``c.output`` is "standardised".
    """

    def norm(rngs: nnx.Rngs) -> Norm:
        return Norm(c.width, rms=c.norm == "rms")

    def standard(rngs: nnx.Rngs) -> Standard:
        return Standard(c)

    first_parts = (Part(partial(ViTStem, c)),) if first else ()
    first_parts += (Part(norm, "stem_norm"),) if first and c.stem_norm else ()
    last_parts = (Part(norm, "norm"),) if last and c.last_norm else ()
    last_parts += (Part(standard, "standard"),) if last and c.output == "standardised" else ()
    return first_parts + last_parts


def embed_patches(p: Params, c: ViTConfig, context: Context) -> Float[Array, "R T D"]:
    """Features of patches, class tokens and registers, with learned positions, after the stem's norm if there is one.

    ``p`` are the encoder's parameters of the first stage: "patch", with "kernel" and "bias", and as the settings have
    them "class_token", "registers", "position" and "stem_norm". P are the numbers of a patch, frames · channels ·
    patch², and the context's inputs include "patches" [R, T, P] and "positions" [R, T, 2].
    """
    inputs = context.inputs
    patch, positions_RT2 = p["patch"], inputs["positions"]
    x_RTD = linear(inputs["patches"].astype(patch["kernel"].dtype), patch["kernel"], patch.get("bias"))
    if c.class_token:
        x_RTD = _with_token(x_RTD, p["class_token"], positions_RT2[..., 0] == -1)
    if c.registers:
        x_RTD = _with_registers(x_RTD, p["registers"], -1 - int(c.class_token) - positions_RT2[..., 0])
    if c.has_table:
        x_RTD = x_RTD + learned(p["position"], c, context, x_RTD)
    return any_norm(x_RTD, p["stem_norm"], c.norm_eps) if c.stem_norm else x_RTD


@jax.checkpoint  # otherwise the mask of every feature would be a residual
def _with_token(x_RTD: Array, token_D: Array, is_token_RT: Array) -> Array:
    return jnp.where(is_token_RT[..., None], repeated(token_D, x_RTD), x_RTD)


@jax.checkpoint
def _with_registers(x_RTD: Array, registers_GD: Array, number_RT: Array) -> Array:
    """Features with those of registers by their numbers, which are negative for patches."""
    registers_RTD = lookup(registers_GD, jnp.maximum(number_RT, 0))
    return jnp.where((number_RT >= 0)[..., None], registers_RTD, x_RTD)


def block(c: ViTConfig, context: Context) -> Block:
    """The function of one layer, (x [R, T, D], its parameters) -> [R, T, D], over rows of packed images.

    ``context`` is such as ``Context.of(axes, inputs, "full")``, with "segments" and "positions" [R, T, 2] in its
    inputs. The parameters are a dict with "attn_norm", "attn", "mlp_norm" and "mlp". Class tokens and registers are not
    rotated.

    Raises:
      ValueError: the stage reads no positions, with rotary positions.
    """
    if not c.rotates:
        return encoder_block(c, context)
    positions_RT2 = context.tokens.positions
    rotate = rotate_2d if c.rotates in ("rope2d", "rope_xy") else rotate_axial
    if c.rotates == "rope_xy":
        positions_RT2 = positions_RT2[..., ::-1]
    if c.rotates == "axial_centres":
        positions_RT2 = centres(context)
    elif c.special:
        positions_RT2 = jnp.maximum(positions_RT2, 0)
    return encoder_block(c, context, partial(rotate, positions_RT2=positions_RT2, theta=c.rope_theta))


def end(p: Params, c: ViTConfig, x_RTD: Array) -> Float[Array, "R T D"]:
    """The encoder's features: the last layer's output after the last norm, scaled and standardised, as the settings
    have it.

    ``p`` are the parameters of the last stage, of which "norm" and "standard" are read if they are there.
    """
    if c.last_norm:
        x_RTD = any_norm(x_RTD, p["norm"], c.norm_eps)
    if c.output == "plain":
        return x_RTD
    return _scaled(c.width**0.5, x_RTD, p["standard"] if c.output == "standardised" else None)


@partial(jax.checkpoint, static_argnums=0)  # otherwise fp32 features would be residuals
def _scaled(factor: float, x_RTD: Array, standard: Params | None) -> Array:
    """``x`` times ``factor``, then minus a bias and times a scale that no gradient reaches, computed in fp32."""
    x32 = x_RTD.astype(jnp.float32) * factor
    if standard:
        bias_D, scale_D = (lax.stop_gradient(opened(standard[name])) for name in ("bias", "scale"))
        x32 = (x32 - bias_D) * scale_D
    return x32.astype(x_RTD.dtype)
