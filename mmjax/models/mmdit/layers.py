"""Double-stream diffusion transformer (MMDiT) over rows of a condition and a picture: Qwen-Image's layers.

Esser et al. 2024, "Scaling Rectified Flow Transformers", §4: condition and picture have weights of their own and read
each other in one attention. The time shifts, scales and gates both streams of each block (adaptive norms: Peebles and
Xie 2023, §3.2), linear in an embedding of the time.

A row has N places of the condition, then those of patches; a row has one time. The time's embedding, which all layers
read, is computed by the first stage: it is a place of its own at the end of each row, which layers hand on as it is and
which no token reads. So it reaches later stages along the only edge between them.

Under context parallelism a rank has a run of the places of both, and a place of the time.

Shapes: R rows, N places of the condition, T places of patches, S = N + T, L places of this rank's features (all S, or a
part of them under sequence parallelism), D width, E numbers in a patch, H heads local to this rank, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float

from mmjax import jax_compat
from mmjax.models.context import Context
from mmjax.models.layers import ACTIVATIONS, Params, column_parallel, linear, split_heads
from mmjax.models.mmdit.config import MMDiTConfig
from mmjax.models.mmdit.rope import Rotation, centred
from mmjax.models.module import Block
from mmjax.models.norms import normalise, repeated, rms_norm
from mmjax.models.parameters import Part
from mmjax.models.sequence_parallel import sp_gather, sp_scatter
from mmjax.models.transformer import Affine, Attention, Mlp

STREAMS = ("condition_", "")
"""Prefixes of the parameters of the streams in a layer: of the condition, and of the picture."""
TIME_FEATURES = 256
"""Cosines and sines of the time, half of each."""
_TIME_SCALE, _MAX_PERIOD = 1000.0, 10000.0
_NAMES = ("modulation", "attn", "mlp")
_MODULATION = nnx.initializers.normal(0.02)
"""The initial values are small but not zero, so that every weight has a gradient from the first step on."""


class Modulation(nnx.Module):
    """Parameters of shifts, scales and gates: "kernel" ``[D, 6 D]`` and "bias"; tp splits the columns."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_MODULATION(rngs.params(), (width, 6 * width)), dims=("embed", "mlp"))
        self.bias = nnx.Param(jnp.zeros(6 * width), dims=("mlp",))


class MMDiTLayer(nnx.Module):
    """Parameters of one block: "modulation", "attn" and "mlp" of the picture, "condition_modulation" and so on of the
    condition. The norms before products have no scale and bias.
    """

    def __init__(self, c: MMDiTConfig, rngs: nnx.Rngs):
        for stream in STREAMS:
            setattr(self, f"{stream}modulation", Modulation(c.width, rngs))
            setattr(self, f"{stream}attn", Attention(c, rngs))
            setattr(self, f"{stream}mlp", Mlp(c, rngs))


class _Stem(nnx.Module):
    def __init__(self, c: MMDiTConfig, rngs: nnx.Rngs):
        self.patch = Affine(c.patch_values, c.width, rngs)
        self.time_in = Affine(TIME_FEATURES, c.width, rngs)
        self.time_out = Affine(c.width, c.width, rngs)


class _Last(nnx.Module):
    def __init__(self, c: MMDiTConfig, rngs: nnx.Rngs):
        self.last_modulation = Affine(c.width, 2 * c.width, rngs, _MODULATION)
        self.prediction = Affine(c.width, c.patch_values, rngs)


def parts(c: MMDiTConfig, *, first: bool, last: bool) -> tuple[Part, ...]:
    """The parameters outside of layers of a stage that is the module's ``first``, its ``last``, or both; () for
    neither.

    The first stage has "patch", "time_in" and "time_out", the last "last_modulation" and "prediction".
    """
    return ((Part(partial(_Stem, c)),) if first else ()) + ((Part(partial(_Last, c)),) if last else ())


# ---- ends ------------------------------------------------------------------------------------------------------------


def channels_first(c: MMDiTConfig, patches_RTE: Float[Array, "R T E"]) -> Float[Array, "R T E"]:
    """Patches whose numbers lie channel by channel, as Qwen-Image packs latents, from those pixel by pixel."""
    cut = patches_RTE.reshape(*patches_RTE.shape[:2], c.patch**2, c.channels)
    return cut.swapaxes(2, 3).reshape(patches_RTE.shape)


def channels_last(c: MMDiTConfig, patches_RTE: Float[Array, "R T E"]) -> Float[Array, "R T E"]:
    """The inverse of ``channels_first``."""
    cut = patches_RTE.reshape(*patches_RTE.shape[:2], c.channels, c.patch**2)
    return cut.swapaxes(2, 3).reshape(patches_RTE.shape)


def time_features(times_R: Float[Array, " R"]) -> Float[Array, "R 256"]:
    """Cosines, then sines, of 1000 · t · 10000^(-k / 128) for k from 0; ``times_R`` are shares of noise, 0 to 1."""
    half = TIME_FEATURES // 2
    frequency = (_MAX_PERIOD ** (-np.arange(half) / half)).astype(np.float32)
    angles = _TIME_SCALE * (times_R[:, None].astype(jnp.float32) * frequency)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def embed(p: Params, c: MMDiTConfig, context: Context) -> Float[Array, "R L+1 D"]:
    """Features of noisy patches, zeros in the places of the condition, and the time's embedding in a last place.

    Args:
      p: the generator's parameters of the first stage: "patch", "time_in" and "time_out".
      c: the settings.
      context: its inputs include "patches" [R, T, E] and "times" [R, T], which are equal in a row, or 0.
    """
    inputs, dtype = context.tokens.inputs, p["patch"]["kernel"].dtype
    patches_RTE = context.split_sp(channels_first(c, inputs["patches"]).astype(dtype))
    x_RTD = context.gather_sp(linear(patches_RTE, p["patch"]["kernel"], p["patch"]["bias"]))
    x_RLD = context.split_sp(jnp.pad(x_RTD, ((0, 0), (context.part_of(c.queries), 0), (0, 0))))
    times_R = context.largest(inputs["times"]) / c.noising.time_scale
    h_RQ = time_features(times_R).astype(dtype)
    h_R1D = jax.nn.silu(linear(h_RQ[:, None], p["time_in"]["kernel"], p["time_in"]["bias"]))
    time_R1D = linear(h_R1D, p["time_out"]["kernel"], p["time_out"]["bias"])
    return _with_time(x_RLD, time_R1D)


def end(p: Params, x: Float[Array, "R L+1 D"]) -> Float[Array, "R L D"]:
    """The output of the last layer without the time's place: normed, scaled and shifted.

    ``p`` are the generator's parameters of the last stage, of which "last_modulation" is read.
    """
    x_RLD, time_R1D = x[:, :-1], jax.nn.silu(x[:, -1:])
    modulation = p["last_modulation"]
    y_R1F = linear(time_R1D, modulation["kernel"], modulation["bias"])
    scale, shift = jnp.split(y_R1F.astype(jnp.float32), 2, axis=-1)
    return _modulated(normalise(x_RLD), scale, shift)


def predict(p: Params, c: MMDiTConfig, context: Context, x_RLD: Float[Array, "R L D"]) -> Float[Array, "R t E"]:
    """The prediction for each patch of this rank, in fp32, pixel by pixel.

    Args:
      p: the generator's parameters of the last stage, of which "prediction" is read.
      c: the settings.
      context: the context of the stage.
      x_RLD: the result of ``end``.
    """
    x_RtD = context.split_sp(context.gather_sp(x_RLD)[:, context.part_of(c.queries) :])
    y_RtE = linear(x_RtD, p["prediction"]["kernel"], p["prediction"]["bias"])
    return channels_last(c, y_RtE.astype(jnp.float32))


# ---- layers ----------------------------------------------------------------------------------------------------------


def block(c: MMDiTConfig, context: Context, x: Float[Array, "R L+1 D"]) -> Block:
    """The function of one layer, (x [R, L + 1, D], its parameters) -> [R, L + 1, D].

    Args:
      c: the settings.
      context: such as ``Context.of(axes, inputs, "full")``; its inputs are "segments" [R, S] and "positions" [R, S, 2],
        or [R, S, 3] with a picture's number in front (see ``rope.centred``).
      x: the input of the first layer; it is not read.
    """
    del x
    tokens, is_condition = context.tokens, _is_condition(c, context)
    places = centred(tokens.positions, tokens.segments_BT, context.part_of(c.queries), context.axes.positions)
    rotation = Rotation.of(c.rope_widths, places)

    def layer(x: Array, p: Params) -> Array:
        condition, picture = ({name: p[stream + name] for name in _NAMES} for stream in STREAMS)
        x_RLD, time_R1D = x[:, :-1], x[:, -1:]
        by_stream = [_shifts(stream["modulation"], context, time_R1D) for stream in (condition, picture)]
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (
            jnp.where(is_condition, *pair) for pair in zip(*by_stream, strict=True)
        )
        h_RLD = _modulated(normalise(x_RLD), scale, shift)
        x_RLD = _gated(x_RLD, gate, attend((condition["attn"], picture["attn"]), c, context, h_RLD, rotation))
        h_RLD = _modulated(normalise(x_RLD), mlp_scale, mlp_shift)
        x_RLD = _gated(x_RLD, mlp_gate, feed_forward((condition["mlp"], picture["mlp"]), c, context, h_RLD))
        return _with_time(x_RLD, time_R1D)

    return layer


def attend(
    streams: Sequence[Params], c: MMDiTConfig, context: Context, h_RLD: Float[Array, "R L D"], rotation: Rotation
) -> Float[Array, "R L D"]:
    """The joint attention of both streams, without the residual.

    Args:
      streams: parameters with the names of ``Attention``, of the condition and of the picture.
      c: the settings.
      context: the context of the layer, with its mask.
      h_RLD: the normed features.
      rotation: the rotation of queries and keys.
    """
    q, k, v = _column_products(streams, ("q", "k", "v"), c, context, h_RLD)
    q, k, v = ([split_heads(y, c.head_width) for y in by_stream] for by_stream in (q, k, v))
    q = [rms_norm(y, p["q_norm"], c.norm_eps) for p, y in zip(streams, q, strict=True)]
    k = [rms_norm(y, p["k_norm"], c.norm_eps) for p, y in zip(streams, k, strict=True)]
    q_RSHK, k_RSHK, v_RSHK = (jnp.concatenate(y, axis=1) for y in (q, k, v))
    y_RSHK = context.attend(rotation.turn(q_RSHK), rotation.turn(k_RSHK), v_RSHK)
    y_RSF = y_RSHK.reshape(*y_RSHK.shape[:2], -1)
    return _row_product(streams, "o", c, context, _by_stream(c, context, y_RSF))


def feed_forward(
    streams: Sequence[Params], c: MMDiTConfig, context: Context, h_RLD: Float[Array, "R L D"]
) -> Float[Array, "R L D"]:
    """The mlps of both streams, without the residual; ``streams`` are parameters with the names of ``Mlp``."""
    (hidden,) = _column_products(streams, ("up",), c, context, h_RLD)
    return _row_product(streams, "down", c, context, [ACTIVATIONS[c.activation](y) for y in hidden])


def _by_stream(c: MMDiTConfig, context: Context, x_RSD: Array) -> tuple[Array, Array]:
    """Features of the places of the condition, and of the picture's."""
    queries = context.part_of(c.queries)
    return x_RSD[:, :queries], x_RSD[:, queries:]


def _column_products(
    streams: Sequence[Params], names: Sequence[str], c: MMDiTConfig, context: Context, h_RLD: Array
) -> list[list[Array]]:
    """Products with weights that tp splits by columns, for all places: by name, then by stream."""
    axes = context.axes
    h_RSD = sp_gather(h_RLD, axes.sp) if axes.sp else jax_compat.to_varying(h_RLD, axes.tp)
    by_stream = _by_stream(c, context, h_RSD)
    return [[linear(h, p[name], p[f"{name}_bias"]) for p, h in zip(streams, by_stream, strict=True)] for name in names]


def _row_product(
    streams: Sequence[Params], name: str, c: MMDiTConfig, context: Context, hidden: Sequence[Array]
) -> Float[Array, "R L D"]:
    """The product with a weight that tp splits by rows, for this rank's places; one sum over tp for both streams."""
    axes = context.axes
    y_RSD = jnp.concatenate([linear(h, p[name]) for p, h in zip(streams, hidden, strict=True)], axis=1)
    y_RLD = sp_scatter(y_RSD, axes.sp) if axes.sp else lax.psum(y_RSD, axes.tp)
    biases = (repeated(p[f"{name}_bias"], y_RLD) for p in streams)
    return y_RLD + jnp.where(_is_condition(c, context), *biases)


def _shifts(p: Params, context: Context, time_R1D: Array) -> list[Float[Array, "R 1 D"]]:
    """Shift, scale and gate of a stream's attention, then of its mlp, in fp32, in which they are summed over places."""
    axes = context.axes.unshared
    (y_R1F,) = column_parallel(jax.nn.silu(time_R1D), [(p["kernel"], p["bias"])], axes)
    return jnp.split(jax_compat.all_gather_invariant(y_R1F, axes.tp, 2).astype(jnp.float32), 6, axis=-1)


def _modulated(h_RLD: Array, scale: Array, shift: Array) -> Float[Array, "R L D"]:
    return (h_RLD.astype(jnp.float32) * (1 + scale) + shift).astype(h_RLD.dtype)


def _gated(x_RLD: Array, gate: Array, y_RLD: Array) -> Float[Array, "R L D"]:
    return x_RLD + (gate * y_RLD.astype(jnp.float32)).astype(x_RLD.dtype)


def _with_time(x_RLD: Array, time_R1D: Array) -> Float[Array, "R L+1 D"]:
    """Features of places, with the time's embedding in a place behind them."""
    return jnp.concatenate(jax_compat.alike(x_RLD, time_R1D), axis=1)


def _is_condition(c: MMDiTConfig, context: Context) -> Bool[Array, "1 L 1"]:
    """Whether each place of this rank's features is one of the condition. Computed at each use: it would be kept."""
    places = lax.broadcasted_iota(jnp.int32, (1, context.tokens.segments_BT.shape[1], 1), 1)
    return context.split_sp(places) < context.part_of(c.queries)
