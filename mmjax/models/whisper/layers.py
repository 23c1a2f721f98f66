"""Audio encoder over packed recordings of variable length: convolutional stem, then a transformer (as in Whisper).

Source: Radford et al. 2022, "Robust Speech Recognition via Large-Scale Weak Supervision", §2.2. A row has the frames of
several recordings, which segment ids separate; segment 0 is padding. Two frames make one position (the stem's stride),
so they are one *patch*. At the ends of a recording the stem's convolutions see zeros. The convolutions have the GELU of
the layers, or the tanh approximation if these have another activation. Attention does not depend on the bias of keys,
which the original lacks (``Whisper.k_bias``).

Shapes: R rows, T patches per row, M mel bins, D width.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax.models.layers import ACTIVATIONS, Params, linear, lookup
from mmjax.models.parameters import Part
from mmjax.models.transformer import Norm
from mmjax.models.whisper.config import WhisperConfig

STRIDE = 2
"""Frames per position: the stride of the second convolution."""
TAPS = 3
"""Frames that a convolution reads: the previous, the current and the next one."""
LONGEST_PERIOD = 10000.0
"""Longest period of the sinusoidal positions, in units of 2π."""


class _Convolution(nnx.Module):
    """A kernel as a matrix, whose rows are ordered by tap, then by input channel."""

    def __init__(self, channels: int, width: int, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(init(rngs.params(), (TAPS * channels, width)), dims=("input", "output"))
        self.bias = nnx.Param(jnp.zeros(width), dims=("output",))


class AudioStem(nnx.Module):
    """Both convolutions, "conv1" and "conv2", and for ``learned`` the table "position" ``[length, width]``."""

    def __init__(self, c: WhisperConfig, rngs: nnx.Rngs):
        self.conv1, self.conv2 = _Convolution(c.mels, c.width, rngs), _Convolution(c.width, c.width, rngs)
        if c.positions == "learned":
            init = nnx.initializers.normal(0.02)
            self.position = nnx.Param(init(rngs.params(), (c.length, c.width)), dims=("place", "embed"))


def parts(c: WhisperConfig, *, first: bool, last: bool) -> tuple[Part, ...]:
    """The parameters outside of layers of a stage that is the module's ``first``, its ``last``, or both; () for
    neither.

    A ``Part`` creates parameters together; ``Part.declarations`` has their shapes by name, such as "conv1/kernel". The
    first stage has "conv1", "conv2" and, if learned, "position"; the last has "norm".
    """
    stem = (Part(partial(AudioStem, c)),) if first else ()
    norm = (Part(lambda rngs: Norm(c.width), "norm"),) if last else ()
    return stem + norm


def embed_frames(
    p: Params,
    c: WhisperConfig,
    patches_RTP: Float[Array, "R T 2*M"],
    segments_RT: Int[Array, "R T"],
    positions_RT: Int[Array, "R T"],
    axes: tuple[str, ...] = (),
) -> Float[Array, "R T D"]:
    """Features of pairs of log-mel frames: both convolutions and positions.

    Args:
      p: the encoder's parameters of the first stage: "conv1", "conv2" and, if learned, "position".
      c: the settings.
      patches_RTP: the mels of two frames, side by side.
      segments_RT: the recording of each patch, from 1; 0 is padding.
      positions_RT: the place of each patch in its recording, from 0.
      axes: mesh axes that rows are split over, in contiguous runs; () for complete rows.
    """
    conv1, conv2 = p["conv1"], p["conv2"]
    gelu = ACTIVATIONS["gelu_exact" if c.activation == "gelu_exact" else "gelu"]
    even, odd = jnp.split(patches_RTP.astype(conv1["kernel"].dtype), STRIDE, axis=-1)
    taps_RT2X = jnp.stack(
        [
            jnp.concatenate([_before(odd, segments_RT, axes), even, odd], axis=-1),
            jnp.concatenate([even, odd, _after(even, segments_RT, axes)], axis=-1),
        ],
        axis=2,
    )
    h_RT2D = gelu(linear(taps_RT2X, conv1["kernel"], conv1["bias"]))
    even, odd = h_RT2D[:, :, 0], h_RT2D[:, :, 1]
    taps_RTX = jnp.concatenate([_before(odd, segments_RT, axes), even, odd], axis=-1)
    x_RTD = gelu(linear(taps_RTX, conv2["kernel"], conv2["bias"]))
    if c.positions == "learned":
        return x_RTD + lookup(p["position"], positions_RT)
    return x_RTD + _sinusoids(positions_RT, c.width).astype(x_RTD.dtype)


def _before(x_RTX: Array, segments_RT: Array, axes: tuple[str, ...]) -> Array:
    """The value one patch earlier; zeros at the start of a recording."""
    return _neighbour(x_RTX, segments_RT, 1, axes)


def _after(x_RTX: Array, segments_RT: Array, axes: tuple[str, ...]) -> Array:
    """The value one patch later; zeros at the end of a recording."""
    return _neighbour(x_RTX, segments_RT, -1, axes)


@partial(jax.checkpoint, static_argnums=(2, 3))  # otherwise the mask of every feature would be a residual
def _neighbour(x_RTX: Array, segments_RT: Array, step: int, axes: tuple[str, ...]) -> Array:
    """``x`` shifted by one patch along the row; zeros where the segment changes. Segment ids are not negative."""
    shifted_segments = _shifted(segments_RT + 1, step, axes) - 1
    return jnp.where((shifted_segments == segments_RT)[..., None], _shifted(x_RTX, step, axes), 0)


def _shifted(x_RT: Array, step: int, axes: tuple[str, ...]) -> Array:
    """Values shifted by one place along the row, forwards or backwards, with zeros at its open end."""
    end, inner = (x_RT[:, -1:], x_RT[:, :-1]) if step > 0 else (x_RT[:, :1], x_RT[:, 1:])
    if axes:
        # An all-gather although one rank's end is needed: a ppermute in a program with branches waits for all devices.
        ends_N = lax.all_gather(end, axes)
        neighbour = lax.axis_index(axes) - step
        exists = (neighbour >= 0) & (neighbour < len(ends_N))
        end = jnp.where(exists, lax.dynamic_index_in_dim(ends_N, neighbour, keepdims=False), 0)
    else:
        end = jnp.zeros_like(end)
    return jnp.concatenate([end, inner] if step > 0 else [inner, end], axis=1)


def _sinusoids(positions_RT: Array, width: int) -> Float[Array, "R T D"]:
    """Sines, then cosines, with periods in a geometric series from 2π to 2π · 10000."""
    half = width // 2
    frequency = jnp.exp(-jnp.arange(half, dtype=jnp.float32) * (math.log(LONGEST_PERIOD) / (half - 1)))
    angle = positions_RT[..., None].astype(jnp.float32) * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
