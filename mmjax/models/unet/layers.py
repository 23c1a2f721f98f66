"""UNets of latent diffusion (Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion", §3.3).

A UNet predicts from noisy latents. ResNet blocks see the time; transformers see the condition, tokens of an LLM. On the
way down every block leaves a *skip*, which a block on the way up reads beside its input.

A picture may be smaller than its canvas: the other places are *outside*. They are zeros before each convolution, no
statistic counts them, and no place attends to them, so that a picture gets what it would get alone.

Shapes: B pictures, H rows and W columns of places, T places in row-major order, C channels, N places of the condition,
D width of the condition, X width of the time's features, S keys, K width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mmjax.attention.backends import Backend
from mmjax.attention.mask import Mask
from mmjax.attention.tokens import Tokens
from mmjax.mesh.spread import Axes
from mmjax.models.layers import (
    ACTIVATIONS,
    REMAT,
    Params,
    column_parallel,
    linear,
    row_parallel,
    split_heads,
)
from mmjax.models.norms import layer_norm
from mmjax.models.parallel_convolution import column_convolution, convolution, group_norm, normed_silu, row_convolution
from mmjax.models.recorded_work import record_work
from mmjax.models.taps import products
from mmjax.models.unet.config import LAYER_NORM_EPS, TRANSFORMER_EPS, UNetConfig, is_split

LONGEST_PERIOD = 10_000
"""The longest period of the time's sines, in timesteps / 2π."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Values that all blocks share.

    Attributes:
      c: the settings.
      axes: mesh axes by role.
      backend: the backend of attention inside a picture.
      remat: the checkpoint policy of each block, a key of ``REMAT``.
      time_BX: features of the time.
      condition_BND: the condition.
      used_BN: which of its places are in use.
      masks: for each level 1 at the pictures' places and 0 outside, ``[B, H, W, 1]``.
    """

    c: UNetConfig
    axes: Axes
    backend: Backend
    remat: str
    time_BX: Array
    condition_BND: Array
    used_BN: Array
    masks: tuple[Array, ...]

    def checkpointed(self, block: Callable[..., Array], p: Params, level: int, *arrays: Array) -> Array:
        """``block(p, s, mask, *arrays)`` under the checkpoint policy, with the level's mask and s, this object."""

        def run(p: Params, time_BX: Array, condition_BND: Array, *arrays: Array) -> Array:
            surroundings = replace(self, time_BX=time_BX, condition_BND=condition_BND)
            return block(p, surroundings, self.masks[level], *arrays)

        policy = REMAT[self.remat]
        run = run if policy is None else jax.checkpoint(run, policy=policy)
        return run(p, self.time_BX, self.condition_BND, *arrays)


def unet(
    p: Params,
    c: UNetConfig,
    sample_BHWC: Float[Array, "B H W C"],
    timesteps_B: Float[Array, " B"],
    condition_BND: Float[Array, "B N D"],
    *,
    inside_BHW: Bool[Array, "B H W"],
    used_BN: Bool[Array, "B N"],
    axes: Axes,
    backend: Backend,
) -> Float[Array, "B H W C"]:
    """The prediction for noisy pictures.

    Sides that the levels do not halve to the end are filled up with places outside; the result is that of alike sizes
    in ``diffusers``.

    Args:
      p: the parameters of ``parameters.UNet``.
      c: the settings.
      sample_BHWC: the noisy pictures on their canvases.
      timesteps_B: the timestep of each picture, which need not be a whole number.
      condition_BND: the condition.
      inside_BHW: the places of the picture, of any shape; a rectangle in the upper left corner gets what it would get
        alone.
      used_BN: the places of the condition that are in use.
      axes: mesh axes by role.
      backend: the backend of attention inside a picture.
    """
    rows, columns, last = *sample_BHWC.shape[1:3], len(c.widths) - 1
    beyond = [(0, 0), (0, -rows % 2**last), (0, -columns % 2**last)]
    mask_BHW1 = jnp.pad(inside_BHW, beyond)[..., None].astype(sample_BHWC.dtype)
    time_BX = _time_features(p, c, timesteps_B, sample_BHWC.dtype)
    s = Surroundings(
        c=c,
        axes=axes,
        backend=backend,
        remat=c.remat,
        time_BX=time_BX,
        condition_BND=condition_BND,
        used_BN=used_BN,
        masks=tuple(mask_BHW1[:, :: 2**level, :: 2**level] for level in range(last + 1)),
    )
    x_BHWC = jnp.pad(sample_BHWC, [*beyond, (0, 0)]) * mask_BHW1
    x_BHWC = convolution(x_BHWC, p["conv_in"]["kernel"], p["conv_in"]["bias"])
    skips = [x_BHWC]
    for level, inputs in enumerate(c.down_inputs):
        x_BHWC, of_level = _down(p[f"down_{level}"], s, level, len(inputs), x_BHWC)
        skips += of_level
    x_BHWC = s.checkpointed(resnet, p["mid"]["resnet_0"], last, x_BHWC)
    x_BHWC = s.checkpointed(partial(transformer, heads=c.mid_heads), p["mid"]["attention_0"], last, x_BHWC)
    x_BHWC = s.checkpointed(resnet, p["mid"]["resnet_1"], last, x_BHWC)
    for number, inputs in enumerate(c.up_inputs):
        of_level = [skips.pop() for _ in inputs]
        x_BHWC = _up(p[f"up_{number}"], s, last - number, of_level, x_BHWC)
    x_BHWC = normed_silu(x_BHWC, p["norm_out"], mask_BHW1, c.widths[0] // c.groups, c.norm_eps)
    return convolution(x_BHWC, p["conv_out"]["kernel"], p["conv_out"]["bias"])[:, :rows, :columns]


def _time_features(p: Params, c: UNetConfig, timesteps_B: Array, dtype: Any) -> Float[Array, "B X"]:
    """SiLU of the time's features, as all blocks read them."""
    sines_BX = timestep_sines(c, timesteps_B).astype(dtype)
    h_BX = jax.nn.silu(linear(sines_BX, p["time_up"]["kernel"], p["time_up"]["bias"]))
    return jax.nn.silu(linear(h_BX, p["time_down"]["kernel"], p["time_down"]["bias"]))


def timestep_sines(c: UNetConfig, timesteps_B: Float[Array, " B"]) -> Float[Array, "B X"]:
    """Sines and cosines of timesteps, which need not be whole numbers, in fp32; X is the first of ``c.widths``.

    The periods are a geometric series from 2π towards 2π · 10000 timesteps (Ho et al. 2020, "Denoising Diffusion
    Probabilistic Models", appendix B).
    """
    half = c.widths[0] // 2
    exponents = -math.log(LONGEST_PERIOD) * jnp.arange(half, dtype=jnp.float32) / (half - c.freq_shift)
    angles_BX = timesteps_B.astype(jnp.float32)[:, None] * jnp.exp(exponents)
    both = (jnp.cos, jnp.sin) if c.flip_sin_to_cos else (jnp.sin, jnp.cos)
    return jnp.concatenate([function(angles_BX) for function in both], axis=-1)


def _down(p: Params, s: Surroundings, level: int, blocks: int, x_BHWC: Array) -> tuple[Array, list[Array]]:
    """A level on the way down; its output, and its skips."""
    skips = []
    for number in range(blocks):
        x_BHWC = _block(p, s, level, number, x_BHWC)
        skips.append(x_BHWC)
    if "sample" in p:
        x_BHWC = s.checkpointed(_downsample, p["sample"], level, x_BHWC)
        skips.append(x_BHWC)
    return x_BHWC, skips


def _up(p: Params, s: Surroundings, level: int, skips: list[Array], x_BHWC: Array) -> Array:
    """A level on the way up, each of whose blocks reads one of the skips."""
    for number, skip_BHWC in enumerate(skips):
        x_BHWC = _block(p, s, level, number, jnp.concatenate([x_BHWC, skip_BHWC], axis=-1))
    return s.checkpointed(_upsample, p["sample"], level - 1, x_BHWC) if "sample" in p else x_BHWC


def _block(p: Params, s: Surroundings, level: int, number: int, x_BHWC: Array) -> Array:
    """A ResNet block, and the transformer behind it on a level with attention."""
    x_BHWC = s.checkpointed(resnet, p[f"resnet_{number}"], level, x_BHWC)
    if f"attention_{number}" not in p:
        return x_BHWC
    attention = partial(transformer, heads=s.c.heads_by_level[level])
    return s.checkpointed(attention, p[f"attention_{number}"], level, x_BHWC)


def _downsample(p: Params, s: Surroundings, mask_BHW1: Array, x_BHWC: Array) -> Array:
    """Half as many rows and columns."""
    del s
    return convolution(x_BHWC * mask_BHW1, p["kernel"], p["bias"], stride=2)


def _upsample(p: Params, s: Surroundings, mask_BHW1: Array, x_BHWC: Array) -> Array:
    """Twice as many rows and columns, each place four times, and a convolution; the mask is the finer level's."""
    del s
    doubled_BHWC = jnp.repeat(jnp.repeat(x_BHWC, 2, axis=1), 2, axis=2)
    return convolution(doubled_BHWC * mask_BHW1, p["kernel"], p["bias"])


def resnet(p: Params, s: Surroundings, mask_BHW1: Array, x_BHWC: Float[Array, "B H W C"]) -> Float[Array, "B H W F"]:
    """A ResNet block: two convolutions, with the time's features between them.

    tp splits the channels between both convolutions into whole groups of the second norm.

    Args:
      p: the parameters of ``parameters.ResNet``.
      s: the surroundings, of which settings, axes and ``time_BX`` are read.
      mask_BHW1: 1 at the pictures' places, 0 outside.
      x_BHWC: the input.
    """
    c, widths = s.c, (x_BHWC.shape[-1], p["conv2"]["bias"].shape[0])
    h_BHWC = normed_silu(x_BHWC, p["norm1"], mask_BHW1, widths[0] // c.groups, c.norm_eps)
    (time_BF,) = column_parallel(s.time_BX, [(p["time"]["kernel"], p["time"]["bias"])], s.axes)
    h_BHWF = column_convolution(h_BHWC, p["conv1"], s.axes) + time_BF[:, None, None]
    h_BHWF = normed_silu(h_BHWF, p["norm2"], mask_BHW1, widths[1] // c.groups, c.norm_eps)
    h_BHWF = row_convolution(h_BHWF, p["conv2"], s.axes)
    if "shortcut" in p:
        x_BHWC = linear(x_BHWC, p["shortcut"]["kernel"], p["shortcut"]["bias"])
    return x_BHWC + h_BHWF


def transformer(
    p: Params, s: Surroundings, mask_BHW1: Array, x_BHWC: Float[Array, "B H W C"], *, heads: int
) -> Float[Array, "B H W C"]:
    """Attention inside pictures and to the condition, and gated mlps, between two products.

    Args:
      p: the parameters of ``parameters.Transformer``.
      s: the surroundings.
      mask_BHW1: 1 at the pictures' places, 0 outside.
      x_BHWC: the input.
      heads: attention heads of all tp ranks together.
    """
    h_BHWC = _transformer_norm(x_BHWC, p["norm"], mask_BHW1, x_BHWC.shape[-1] // s.c.groups)
    h_BTC = h_BHWC.reshape(len(h_BHWC), -1, h_BHWC.shape[-1])
    inside_BT = mask_BHW1.reshape(h_BTC.shape[:2]) > 0
    h_BTC = linear(h_BTC, p["proj_in"]["kernel"], p["proj_in"]["bias"])
    for number in range(s.c.transformer_blocks):
        h_BTC = _transformer_block(p[f"block_{number}"], s, inside_BT, h_BTC, heads)
    h_BTC = linear(h_BTC, p["proj_out"]["kernel"], p["proj_out"]["bias"])
    return x_BHWC + h_BTC.reshape(x_BHWC.shape)


@partial(jax.checkpoint, static_argnums=(3,))  # the residual is the input alone
def _transformer_norm(x_BHWC: Array, p: Params, mask_BHW1: Array, width: int) -> Array:
    return group_norm(x_BHWC, p, mask_BHW1, width=width, eps=TRANSFORMER_EPS)


def _transformer_block(p: Params, s: Surroundings, inside_BT: Array, x_BTC: Array, heads: int) -> Array:
    places, used = (Tokens.of({"segments": used.astype(jnp.int32)}) for used in (inside_BT, s.used_BN))
    inner = partial(s.backend.attend, tokens=places, mask=Mask("full"))
    cross = partial(Backend("blockwise").attend, tokens=places, mask=Mask("full"), keys=used)
    h_BTC = layer_norm(x_BTC, p["norm1"], LAYER_NORM_EPS)
    x_BTC = x_BTC + _attention(p["self_attn"], s.axes, h_BTC, None, heads, inner)
    h_BTC = layer_norm(x_BTC, p["norm2"], LAYER_NORM_EPS)
    x_BTC = x_BTC + _attention(p["cross_attn"], s.axes, h_BTC, s.condition_BND, heads, cross)
    h_BTC = layer_norm(x_BTC, p["norm3"], LAYER_NORM_EPS)
    return x_BTC + _gated_mlp(p["mlp"], s.axes, h_BTC)


def _attention(
    p: Params, axes: Axes, h_BTC: Array, keys_BSD: Array | None, heads: int, attend: Callable[..., Array]
) -> Float[Array, "B T C"]:
    """The attention branch, without the residual; every tp rank has its heads, or all of an odd number.

    Without ``keys_BSD`` it is attention of ``h_BTC`` to itself.
    """
    head_width = p["o_bias"].shape[0] // heads
    if keys_BSD is None:
        qkv = _products(h_BTC, [p["q"], p["k"], p["v"]], axes, heads)
    else:
        qkv = [*_products(h_BTC, [p["q"]], axes, heads), *_products(keys_BSD, [p["k"], p["v"]], axes, heads)]
    q, k, v = (split_heads(y, head_width) for y in qkv)
    record_work(4 * q.size * k.shape[1])
    y_BTF = attend(q, k, v).reshape(qkv[0].shape)
    return row_parallel(y_BTF, p["o"], axes, p["o_bias"]) if is_split(heads) else linear(y_BTF, p["o"], p["o_bias"])


def _products(x_BTC: Array, weights: list[Any], axes: Axes, heads: int) -> list[Array]:
    """Products with the weights of attention, of this rank's heads."""
    if is_split(heads):
        return column_parallel(x_BTC, [(weight, None) for weight in weights], axes)
    return products(x_BTC, weights)


def _gated_mlp(p: Params, axes: Axes, h_BTC: Array) -> Float[Array, "B T C"]:
    """The mlp branch, without the residual; tp splits its hidden units."""
    gate_BTF, up_BTF = column_parallel(h_BTC, [(p["gate"], p["gate_bias"]), (p["up"], p["up_bias"])], axes)
    return row_parallel(ACTIVATIONS["gelu_exact"](gate_BTF) * up_BTF, p["down"], axes, p["down_bias"])
