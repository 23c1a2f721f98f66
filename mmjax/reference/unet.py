"""A UNet's prediction for one noisy picture at its own size: no canvas, mask, rank or checkpoint (see `reference`).

A convolution is nine products of shifted pictures; attention is dense.

Letters in shapes: H rows and W columns of places, T places in row-major order, C and F channels, N tokens of the
condition, D their width, X width of the time's features, G groups of channels, S keys, K width of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mmjax.reference.arithmetic import Arrays, activate, affine, layer_norm, matmul, project

if TYPE_CHECKING:
    from mmjax.models.projector.config import ProjectorConfig
    from mmjax.models.unet.config import UNetConfig

_NORM_EPS = 1e-5
"""The epsilon of LayerNorms."""
_TRANSFORMER_EPS = 1e-6
"""The epsilon of the GroupNorm before attention."""


def unet_velocity(
    leaves: Arrays,
    hidden_ND: jax.Array,
    patches_TX: jax.Array,
    time: jax.Array,
    *,
    name: str,
    c: UNetConfig,
    rows: int,
    columns: int,
    projector: ProjectorConfig,
    further: Mapping[str, jax.Array],
) -> Float[Array, "T X"]:
    """The prediction at a time from 0 to 1; the timestep is `c.train_steps` times the time.

    ``further`` is {}, since a UNet reads the LLM alone.
    """
    if further:
        raise ValueError(f"{name}: a UNet reads the LLM alone, and {list(further)} give tokens too")
    sizes = {"name": name, "c": c, "rows": rows, "columns": columns, "projector": projector}
    return unet_prediction(leaves, hidden_ND, patches_TX, time * c.train_steps, **sizes)


@functools.partial(jax.jit, static_argnames=("name", "c", "rows", "columns", "projector"))
def unet_prediction(
    leaves: Arrays,
    hidden_ND: jax.Array,
    patches_TX: jax.Array,
    timestep: jax.Array,
    *,
    name: str,
    c: UNetConfig,
    rows: int,
    columns: int,
    projector: ProjectorConfig,
) -> Float[Array, "T X"]:
    """The prediction of a UNet for the places of one noisy picture.

    Args:
      leaves: dense leaves of the generator and its projector, by names such as "painter/layers/000/conv_in/kernel".
      hidden_ND: the LLM's hidden states of the picture's placeholders.
      patches_TX: the noisy picture's places in row-major order.
      timestep: its timestep, a scalar.
      name: the generator's name, such as "painter".
      c: its settings.
      rows, columns: the picture's sides.
      projector: settings of its projector.
    """
    condition_ND = project(leaves, f"{name}_projector", hidden_ND, 1, projector)
    network = _Network(leaves, f"{name}/layers/000", c, condition_ND)
    return network.prediction(patches_TX.reshape(rows, columns, -1), timestep).reshape(patches_TX.shape)


class _Network:
    """A UNet with its parameters, condition and time."""

    def __init__(self, leaves: Arrays, prefix: str, c: UNetConfig, condition_ND: jax.Array):
        self.leaves, self.prefix, self.c, self.condition_ND = leaves, prefix, c, condition_ND
        self.time_X = condition_ND

    def leaf(self, path: str) -> jax.Array:
        return self.leaves[f"{self.prefix}/{path}"]

    def affine(self, path: str, x: jax.Array) -> jax.Array:
        return affine(self.leaves, f"{self.prefix}/{path}", x)

    def prediction(self, x_HWC: jax.Array, timestep: jax.Array) -> jax.Array:
        c, last = self.c, len(self.c.widths) - 1
        self.time_X = self.time(timestep, x_HWC.dtype)
        x_HWC = self.convolution("conv_in", x_HWC)
        skips = [x_HWC]
        for level in range(last + 1):
            for number in range(c.blocks):
                x_HWC = self.block(f"down_{level}", number, c.heads_by_level[level], x_HWC)
                skips.append(x_HWC)
            if level < last:
                x_HWC = self.convolution(f"down_{level}/sample", x_HWC)[::2, ::2]
                skips.append(x_HWC)
        x_HWC = self.block("mid", 0, c.mid_heads, x_HWC)
        x_HWC = self.resnet("mid/resnet_1", x_HWC)
        for number in range(last + 1):
            for block in range(c.blocks + 1):
                joined = jnp.concatenate([x_HWC, skips.pop()], axis=-1)
                x_HWC = self.block(f"up_{number}", block, c.heads_by_level[last - number], joined)
            if number < last:
                height, width = skips[-1].shape[:2]
                doubled = x_HWC[np.arange(height) // 2][:, np.arange(width) // 2]
                x_HWC = self.convolution(f"up_{number}/sample", doubled)
        x_HWC = activate("silu", self.group_norm("norm_out", x_HWC, c.norm_eps))
        return self.convolution("conv_out", x_HWC)

    def time(self, timestep: jax.Array, dtype: jnp.dtype) -> Float[Array, " X"]:
        half = self.c.widths[0] // 2
        rates = 10_000.0 ** (-np.arange(half) / (half - self.c.freq_shift))
        angles = timestep * jnp.asarray(rates, jnp.float32)
        sines = [jnp.sin(angles), jnp.cos(angles)]
        first = jnp.concatenate(sines[::-1] if self.c.flip_sin_to_cos else sines).astype(dtype)
        return self.affine("time_down", activate("silu", self.affine("time_up", first)))

    def convolution(self, path: str, x_HWC: jax.Array) -> jax.Array:
        kernel, (height, width, _) = self.leaf(f"{path}/kernel"), x_HWC.shape
        around = jnp.pad(x_HWC, ((1, 1), (1, 1), (0, 0)))
        shifted = [
            matmul(around[row : row + height, column : column + width], kernel[row, column])
            for row in range(3)
            for column in range(3)
        ]
        return sum(shifted[1:], start=shifted[0]) + self.leaf(f"{path}/bias")

    def group_norm(self, path: str, x_HWC: jax.Array, eps: float) -> jax.Array:
        x_TGC = x_HWC.reshape(-1, self.c.groups, x_HWC.shape[-1] // self.c.groups)
        mean, variance = (fn(x_TGC, axis=(0, 2), keepdims=True) for fn in (jnp.mean, jnp.var))
        normed = ((x_TGC - mean) / jnp.sqrt(variance + eps)).reshape(x_HWC.shape)
        return normed * self.leaf(f"{path}/scale") + self.leaf(f"{path}/bias")

    def block(self, path: str, number: int, heads: int, x_HWC: jax.Array) -> jax.Array:
        x_HWC = self.resnet(f"{path}/resnet_{number}", x_HWC)
        return self.transformer(f"{path}/attention_{number}", heads, x_HWC) if heads else x_HWC

    def resnet(self, path: str, x_HWC: jax.Array) -> jax.Array:
        h_HWC = activate("silu", self.group_norm(f"{path}/norm1", x_HWC, self.c.norm_eps))
        time_F = self.affine(f"{path}/time", activate("silu", self.time_X))
        h_HWF = self.convolution(f"{path}/conv1", h_HWC) + time_F
        h_HWF = activate("silu", self.group_norm(f"{path}/norm2", h_HWF, self.c.norm_eps))
        h_HWF = self.convolution(f"{path}/conv2", h_HWF)
        if f"{self.prefix}/{path}/shortcut/kernel" in self.leaves:
            x_HWC = self.affine(f"{path}/shortcut", x_HWC)
        return x_HWC + h_HWF

    def transformer(self, path: str, heads: int, x_HWC: jax.Array) -> jax.Array:
        h_HWC = self.group_norm(f"{path}/norm", x_HWC, _TRANSFORMER_EPS)
        h_TC = self.affine(f"{path}/proj_in", h_HWC.reshape(-1, h_HWC.shape[-1]))
        for number in range(self.c.transformer_blocks):
            block = f"{path}/block_{number}"
            normed = self.layer_norm(f"{block}/norm1", h_TC)
            h_TC = h_TC + self.attention(f"{block}/self_attn", heads, normed, normed)
            normed = self.layer_norm(f"{block}/norm2", h_TC)
            h_TC = h_TC + self.attention(f"{block}/cross_attn", heads, normed, self.condition_ND)
            normed = self.layer_norm(f"{block}/norm3", h_TC)
            up, gate = (
                matmul(normed, self.leaf(f"{block}/mlp/{half}")) + self.leaf(f"{block}/mlp/{half}_bias")
                for half in ("up", "gate")
            )
            down = matmul(up * activate("gelu_exact", gate), self.leaf(f"{block}/mlp/down"))
            h_TC = h_TC + down + self.leaf(f"{block}/mlp/down_bias")
        return x_HWC + self.affine(f"{path}/proj_out", h_TC).reshape(x_HWC.shape)

    def layer_norm(self, path: str, x_TC: jax.Array) -> jax.Array:
        return layer_norm(self.leaves, f"{self.prefix}/{path}", x_TC, _NORM_EPS)

    def attention(self, path: str, heads: int, x_TC: jax.Array, keys_SD: jax.Array) -> jax.Array:
        inputs = {"q": x_TC, "k": keys_SD, "v": keys_SD}
        q, k, v = (
            matmul(x, self.leaf(f"{path}/{name}")).reshape(len(x), heads, -1).swapaxes(0, 1)
            for name, x in inputs.items()
        )
        scores = matmul(q, k.swapaxes(1, 2)) / q.shape[-1] ** 0.5
        y_TC = matmul(jax.nn.softmax(scores, axis=-1), v).swapaxes(0, 1).reshape(x_TC.shape)
        return matmul(y_TC, self.leaf(f"{path}/o")) + self.leaf(f"{path}/o_bias")
