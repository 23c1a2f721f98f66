"""Prediction of a double-stream diffusion transformer for one picture, with its condition as tokens of its own.

N tokens of the condition, T patches of X numbers, D the width, H heads of width K.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mmjax.reference.arithmetic import (
    Arrays,
    affine,
    feed_forward,
    normalised,
    product,
    project,
    rms_norm,
    softmax_attention,
)

if TYPE_CHECKING:
    from mmjax.models.mmdit.config import MMDiTConfig
    from mmjax.models.projector.config import ProjectorConfig

_FEATURES = 256
"""Cosines and sines of the time."""
_THETA = 10000.0
_STREAMS = ("condition_", "")
"""Prefixes of a layer's leaves of the condition and of the picture."""
_NONE_FURTHER: Mapping[str, jax.Array] = {}


@functools.partial(jax.jit, static_argnames=("name", "dit", "rows", "columns", "projector", "sides"))
def double_stream_velocity(
    leaves: Arrays,
    hidden_ND: jax.Array,
    patches_TX: jax.Array,
    time: jax.Array,
    *,
    name: str,
    dit: MMDiTConfig,
    rows: int,
    columns: int,
    projector: ProjectorConfig,
    further: Mapping[str, jax.Array] = _NONE_FURTHER,
    behind: tuple[jax.Array, ...] = (),
    sides: tuple[tuple[int, int], ...] = (),
) -> Float[Array, "T X"]:
    """The velocity that a double-stream transformer predicts for the patches of one noisy picture at `time`.

    The picture's patches are at places around its centre, its condition behind the corner that is furthest.

    Args:
      leaves: dense leaves of the generator and its projector, by names such as "painter/patch/kernel", as
        `dense_leaves` gives them.
      hidden_ND: the LLM's hidden states of the picture's placeholders.
      patches_TX: noisy patches, row by row, each with its pixels row by row and their channels last.
      time: share of noise, a scalar from 0 to 1.
      name: the generator's name, such as "painter".
      dit: its settings.
      rows, columns: numbers of the picture's patches.
      projector: settings of its projector.
      further: nothing; a double-stream transformer reads the LLM alone.
      behind: patches of each picture that this one is made from, without noise.
      sides: the numbers of rows and columns of each of these.
    """
    if further:
        raise ValueError(f"{name}: a double-stream transformer reads the LLM alone, and not {sorted(further)}")
    condition_ND = project(leaves, f"{name}_projector", hidden_ND, 1, projector)
    every_TX = jnp.concatenate([patches_TX, *(patches.astype(patches_TX.dtype) for patches in behind)])
    x_TD = affine(leaves, f"{name}/patch", _channels_first(every_TX, dit.channels))
    time_D = _embedded_time(leaves, name, time).astype(x_TD.dtype)
    tables = _tables(dit, len(condition_ND), ((rows, columns), *sides))
    for layer in range(dit.layers):
        condition_ND, x_TD = _layer(leaves, f"{name}/layers/{layer:03d}", dit, (condition_ND, x_TD), time_D, tables)
    scale, shift = jnp.split(affine(leaves, f"{name}/last_modulation", jax.nn.silu(time_D)), 2)
    predicted_TX = affine(leaves, f"{name}/prediction", normalised(x_TD) * (1 + scale) + shift)
    by_channel = predicted_TX[: len(patches_TX)].reshape(len(patches_TX), dit.channels, dit.patch**2)
    return by_channel.transpose(0, 2, 1).reshape(patches_TX.shape)


def _channels_first(patches_TX: jax.Array, channels: int) -> jax.Array:
    """The numbers of each patch channel by channel, from those pixel by pixel."""
    return patches_TX.reshape(len(patches_TX), -1, channels).transpose(0, 2, 1).reshape(patches_TX.shape)


def _embedded_time(leaves: Arrays, name: str, time: jax.Array) -> jax.Array:
    half = _FEATURES // 2
    frequencies = (10000.0 ** (-np.arange(half) / half)).astype(time.dtype)
    angles = 1000.0 * (time * frequencies)  # rounded in this order: up to 1000 radians have few digits in fp32
    features = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)])
    return affine(leaves, f"{name}/time_out", jax.nn.silu(affine(leaves, f"{name}/time_in", features)))


def _tables(dit: MMDiTConfig, queries: int, pictures: tuple[tuple[int, int], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [N + T, K / 2] of the angles by which pairs of neighbours rotate.

    `pictures` are the rows and columns of the picture that is made, and of those that it is made from.
    """
    first = max(side // 2 for sides in pictures for side in sides)
    places = [(first + number,) * 3 for number in range(queries)]
    for picture, (rows, columns) in enumerate(pictures):
        above, left = rows - rows // 2, columns - columns // 2
        places += [(picture, row - above, column - left) for row in range(rows) for column in range(columns)]
    angles = [
        [
            place[axis] * _THETA ** (-2 * pair / width)
            for axis, width in enumerate(dit.rope_widths)
            for pair in range(width // 2)
        ]
        for place in places
    ]
    return np.cos(angles), np.sin(angles)


def _turn(x_SHK: jax.Array, tables: tuple[np.ndarray, np.ndarray]) -> jax.Array:
    """Rotates pairs of neighbours, as complex numbers."""
    cos, sin = (jnp.asarray(table[:, None], x_SHK.dtype) for table in tables)
    real, imaginary = x_SHK[..., 0::2], x_SHK[..., 1::2]
    turned = jnp.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], axis=-1)
    return turned.reshape(x_SHK.shape)


def _layer(
    leaves: Arrays,
    prefix: str,
    dit: MMDiTConfig,
    streams: tuple[jax.Array, jax.Array],
    time_D: jax.Array,
    tables: tuple[np.ndarray, np.ndarray],
) -> tuple[jax.Array, jax.Array]:
    """One layer of both streams, of the condition and of the picture."""
    activated = jax.nn.silu(time_D)
    changes = [jnp.split(affine(leaves, f"{prefix}/{stream}modulation", activated), 6) for stream in _STREAMS]
    qkv = []
    for stream, x, (shift, scale, *_) in zip(_STREAMS, streams, changes, strict=True):
        normed = normalised(x) * (1 + scale) + shift
        heads = [product(leaves, f"{prefix}/{stream}attn/{name}", normed) for name in "qkv"]
        q, k, v = (y.reshape(len(x), dit.heads, -1) for y in heads)
        q, k = (
            rms_norm(leaves[f"{prefix}/{stream}attn/{name}_norm"], y, dit.norm_eps) for name, y in (("q", q), ("k", k))
        )
        qkv.append((q, k, v))
    q, k, v = (jnp.concatenate(pair) for pair in zip(*qkv, strict=True))
    mixed = softmax_attention(_turn(q, tables), _turn(k, tables), v, causal=False)
    queries, results = len(streams[0]), []
    for stream, x, y, change in zip(_STREAMS, streams, (mixed[:queries], mixed[queries:]), changes, strict=True):
        _, _, gate, shift, scale, mlp_gate = change
        x = x + gate * product(leaves, f"{prefix}/{stream}attn/o", y)
        normed = normalised(x) * (1 + scale) + shift
        results.append(x + mlp_gate * feed_forward(leaves, f"{prefix}/{stream}mlp", dit.activation, normed))
    return results[0], results[1]
