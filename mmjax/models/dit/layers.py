"""Diffusion transformer over packed patches: a generator of pictures, conditioned on an LLM's hidden states.

The model sees patches with noise in them, and says what the noise process asks for: with the defaults it learns by flow
matching, the velocity noise - x (see ``mmjax.data.process``). The time t shifts, scales and gates every
block (adaptive norms: Peebles and Xie 2023, "Scalable Diffusion Models with Transformers", §3.2). The condition, one
feature per patch made from the LLM's hidden states, is added to the patch. Shifts, scales and gates are linear in
Fourier features of t, in each layer, and modify a plain pre-norm block. So only the residual stream of rows is sent
from stage to stage.

Shapes: R rows, T patches per row, D width, E numbers in a patch, Q Fourier features. A row holds the patches of several
pictures; segment ids keep them apart and segment 0 is padding.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.models.context import Context
from mmjax.models.dit.config import DiTConfig
from mmjax.models.layers import Params, linear, rotate_2d
from mmjax.models.module import Block
from mmjax.models.norms import normalise
from mmjax.models.parameters import Part
from mmjax.models.transformer import Affine, Attention, Mlp, attend, feed_forward

_MODULATION = nnx.initializers.normal(0.02)
"""The initial values are small but not zero, so that every weight has a gradient from the first step on."""


class DiTLayer(nnx.Module):
    """Parameters of one block: "modulation", "attn" and "mlp"; its norms have no scale and bias."""

    def __init__(self, c: DiTConfig, rngs: nnx.Rngs):
        self.modulation = Affine(2 * c.frequencies, 6 * c.width, rngs, _MODULATION)
        self.attn, self.mlp = Attention(c, rngs), Mlp(c, rngs)


class _Stem(nnx.Module):
    def __init__(self, c: DiTConfig, rngs: nnx.Rngs):
        self.patch = Affine(c.patch_values, c.width, rngs)


class _Last(nnx.Module):
    def __init__(self, c: DiTConfig, rngs: nnx.Rngs):
        self.last_modulation = Affine(2 * c.frequencies, 2 * c.width, rngs, _MODULATION)
        self.velocity = Affine(c.width, c.patch_values, rngs)


def parts(c: DiTConfig, *, first: bool, last: bool) -> tuple[Part, ...]:
    """The parameters outside of layers of a stage that is the module's ``first``, its ``last``, or both; () for
    neither.

    A ``Part`` creates parameters together; ``Part.declarations`` has their shapes by name, such as "patch/kernel". The
    first stage has "patch", the last "last_modulation" and "velocity".
    """
    return ((Part(partial(_Stem, c)),) if first else ()) + ((Part(partial(_Last, c)),) if last else ())


def embed_patches(p: Params, patches_RTE: Float[Array, "R T E"], queries: int = 0) -> Float[Array, "R queries+T D"]:
    """Features of noisy patches, ``[R, T, E]`` with E numbers each, behind zeros in the places of the condition.

    The condition is not added yet; ``queries`` is the number of its places on this rank. ``p`` are the generator's
    parameters of the first stage, {"patch": {"kernel": [E, D], "bias": [D]}}.
    """
    kernel = p["patch"]["kernel"]
    x_RTD = linear(patches_RTE.astype(kernel.dtype), kernel, p["patch"]["bias"])
    return jnp.pad(x_RTD, ((0, 0), (queries, 0), (0, 0)))


def time_features(c: DiTConfig, times_RT: Float[Array, "R T"]) -> Float[Array, "R T Q"]:
    """cos(π k t), then sin(π k t), for k = 1 … ``c.frequencies``, so Q is 2 · ``frequencies``; in fp32.

    ``times_RT`` are the times of the patches' pictures in their process, which t puts into 0…1.
    """
    scale = c.noising.time_scale
    shares_RT = times_RT if scale == 1 else times_RT / scale
    angles_RTQ = jnp.pi * shares_RT[..., None] * jnp.arange(1, c.frequencies + 1, dtype=jnp.float32)
    return jnp.concatenate([jnp.cos(angles_RTQ), jnp.sin(angles_RTQ)], axis=-1)


def block(c: DiTConfig, context: Context, x_RTD: Float[Array, "R T D"]) -> Block:
    """The function of one layer, (x [R, T, D], its parameters) -> [R, T, D], over rows of packed pictures.

    The parameters are a dict with "modulation", "attn" and "mlp".

    Args:
      c: the settings.
      context: such as ``Context.of(axes, inputs, "full")``; its inputs are "segments", "positions" [R, T, 2] and
        "times".
      x_RTD: the input of the first layer, of which the dtype is read.

    Raises:
      ValueError: the stage reads no positions.
    """
    times_RT = context.inputs["times"]
    if c.queries:  # a row has one picture, and padding has time 0
        of_row_RN = jnp.repeat(context.largest(times_RT)[:, None], context.part_of(c.queries), axis=1)
        times_RT = jnp.concatenate([of_row_RN, times_RT], axis=1)
    features_RTQ = time_features(c, times_RT).astype(x_RTD.dtype)
    positions_RT2 = context.tokens.positions

    def layer(x_RTD: Array, p: Params) -> Array:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = _modulation(p["modulation"], features_RTQ, 6)
        h_RTD = normalise(x_RTD) * (1 + scale) + shift
        rotate = partial(rotate_2d, positions_RT2=positions_RT2)
        x_RTD = x_RTD + (1 + gate) * attend(p["attn"], c, context, h_RTD, rotate)
        h_RTD = normalise(x_RTD) * (1 + mlp_scale) + mlp_shift
        return x_RTD + (1 + mlp_gate) * feed_forward(p["mlp"], c, context.axes, h_RTD)

    return layer


def velocity(
    p: Params, c: DiTConfig, x_RTD: Float[Array, "R T D"], times_RT: Float[Array, "R T"], queries: int = 0
) -> Float[Array, "R T E"]:
    """The last stage's prediction for each patch, such as its velocity, in fp32.

    Args:
      p: the generator's parameters of the last stage: "last_modulation" and "velocity", each with "kernel"
        and "bias".
      c: the settings.
      x_RTD: the output of the last layer, of all places of a row.
      times_RT: the time of each patch's picture in its process.
      queries: the number of first places that are the condition's.
    """
    x_RTD = x_RTD[:, queries:]
    features_RTQ = time_features(c, times_RT).astype(x_RTD.dtype)
    shift, scale = _modulation(p["last_modulation"], features_RTQ, 2)
    h_RTD = normalise(x_RTD) * (1 + scale) + shift
    return linear(h_RTD, p["velocity"]["kernel"], p["velocity"]["bias"]).astype(jnp.float32)


def _modulation(p: Params, features_RTQ: Array, count: int) -> list[Array]:
    """``count`` arrays of shifts, scales and gates ``[R, T, D]``."""
    return jnp.split(linear(features_RTQ, p["kernel"], p["bias"]), count, axis=-1)
