"""HiFi-GAN: waveforms of log-mel frames by transposed convolutions and residual blocks, as transformers has it.

Shapes: F frames, M mel bins, N samples, T places, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from mmjax.configurable import ConfigError
from mmjax.models.vocoder.config import HifiGanConfig
from mmjax.weights.folder import WeightsFolder

Tensors = Mapping[str, Float[Array, "..."]]
"""Tensors by the keys of the folder, such as "conv_pre.weight" [O, I, width]."""
_LAST_SLOPE = 0.01
"""The slope of the rectifier before the last convolution, which is torch's default."""
_SCALES = (
    ("weight_g", "weight_v"),
    ("parametrizations.weight.original0", "parametrizations.weight.original1"),
)
"""Names of a kernel's scales and directions, where weight norm was not removed."""


@dataclass(frozen=True, kw_only=True)
class HifiGan:
    """A vocoder with its parameters."""

    config: HifiGanConfig
    tensors: Tensors

    @classmethod
    def read(cls, path: str) -> HifiGan:
        """Reads a folder of transformers.

        Raises:
          ConfigError: it is of another model, or a tensor is missing or has another shape.
        """
        folder = WeightsFolder.open(path)
        config = HifiGanConfig.of(folder.config)
        tensors: dict[str, Array] = {}
        for key, shape in _shapes(config).items():
            value = _tensor(folder, key)
            if value is None or value.shape != shape:
                problem = "has none" if value is None else f"has {list(value.shape)}"
                raise ConfigError(f"{path}: {key} must be {list(shape)}, and the folder {problem}; get it again")
            tensors[key] = jnp.asarray(value, jnp.float32)
        return cls(config=config, tensors=tensors)

    def waveform(self, logs_FM: Float[np.ndarray, "F M"]) -> Float[np.ndarray, " N"]:
        """The waveform, in -1…1, of frames as logarithms; N is F times ``config.hop``."""
        return np.asarray(_waveform(self.config, dict(self.tensors), jnp.asarray(logs_FM, jnp.float32)))


def _tensor(folder: WeightsFolder, key: str) -> np.ndarray | None:
    """A tensor of the folder, or the product of its scales and directions; ``None`` if it has neither."""

    def whole(name: str) -> np.ndarray:
        return np.asarray(folder.tensor(name)[tuple(slice(None) for _ in folder.info(name).shape)], np.float32)

    if key in folder.tensors:
        return whole(key)
    stem = key.removesuffix("weight")
    for scales, directions in _SCALES:
        if f"{stem}{scales}" in folder.tensors and key.endswith("weight"):
            of_length, direction = whole(f"{stem}{scales}"), whole(f"{stem}{directions}")
            return of_length * direction / np.sqrt(np.square(direction).sum(axis=(1, 2), keepdims=True))
    return None


def _shapes(c: HifiGanConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors by key."""
    shapes: dict[str, tuple[int, ...]] = {"mean": (c.mels,), "scale": (c.mels,)}

    def convolution(name: str, *kernel: int, channels: int) -> None:
        shapes.update({f"{name}.weight": kernel, f"{name}.bias": (channels,)})

    convolution("conv_pre", c.width, c.mels, 7, channels=c.width)
    width = c.width
    for level, kernel in enumerate(c.kernels):
        convolution(f"upsampler.{level}", width, width // 2, kernel, channels=width // 2)
        width //= 2
        for block, (size, dilations) in enumerate(zip(c.block_kernels, c.dilations, strict=True)):
            for number in range(len(dilations)):
                for group in ("convs1", "convs2"):
                    name = f"resblocks.{level * len(c.block_kernels) + block}.{group}.{number}"
                    convolution(name, width, width, size, channels=width)
    convolution("conv_post", 1, width, 7, channels=1)
    return shapes


@partial(jax.jit, static_argnums=0)
def _waveform(c: HifiGanConfig, p: Tensors, logs_FM: Float[Array, "F M"]) -> Float[Array, " N"]:
    x_TC = (logs_FM - p["mean"]) / p["scale"] if c.normalised else logs_FM
    x_TC = _convolved(p, "conv_pre", x_TC)
    for level, rate in enumerate(c.rates):
        x_TC = _upsampled(p, f"upsampler.{level}", jax.nn.leaky_relu(x_TC, c.slope), rate)
        blocks = [
            _block(c, p, f"resblocks.{level * len(c.dilations) + block}", x_TC, dilations)
            for block, dilations in enumerate(c.dilations)
        ]
        x_TC = sum(blocks[1:], start=blocks[0]) / len(blocks)
    return jnp.tanh(_convolved(p, "conv_post", jax.nn.leaky_relu(x_TC, _LAST_SLOPE)))[:, 0]


def _block(c: HifiGanConfig, p: Tensors, name: str, x_TC: Array, dilations: tuple[int, ...]) -> Float[Array, "T C"]:
    for number, dilation in enumerate(dilations):
        h_TC = _convolved(p, f"{name}.convs1.{number}", jax.nn.leaky_relu(x_TC, c.slope), dilation)
        x_TC = x_TC + _convolved(p, f"{name}.convs2.{number}", jax.nn.leaky_relu(h_TC, c.slope))
    return x_TC


def _convolved(p: Tensors, name: str, x_TC: Array, dilation: int = 1) -> Float[Array, "T D"]:
    """A convolution over places, as many as before."""
    kernel = p[f"{name}.weight"]  # [O, I, width]
    beside = dilation * (kernel.shape[2] - 1) // 2
    out = lax.conv_general_dilated(
        x_TC[None], kernel, (1,), [(beside, beside)], rhs_dilation=(dilation,), dimension_numbers=("NWC", "OIW", "NWC")
    )
    return out[0] + p[f"{name}.bias"]


def _upsampled(p: Tensors, name: str, x_TC: Array, rate: int) -> Float[Array, "S D"]:
    """A transposed convolution to ``rate`` times as many places."""
    kernel = p[f"{name}.weight"]  # [I, O, width], as torch has it
    width = kernel.shape[2]
    beside = width - 1 - (width - rate) // 2
    out = lax.conv_general_dilated(
        x_TC[None],
        kernel[:, :, ::-1],
        (1,),
        [(beside, beside)],
        lhs_dilation=(rate,),
        dimension_numbers=("NWC", "IOW", "NWC"),
    )
    return out[0] + p[f"{name}.bias"]
