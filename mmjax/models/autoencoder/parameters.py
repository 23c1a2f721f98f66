"""Parameters of autoencoders."""

from __future__ import annotations

from functools import partial

from flax import nnx

from mmjax.models.autoencoder.config import AutoencoderConfig, Level
from mmjax.models.convolutions import Convolution
from mmjax.models.parameters import ModuleSlice, Part
from mmjax.models.transformer import Affine, Norm

FRAMES = 3
"""Frames of a causal kernel."""
MODULE = "autoencoder"
"""The name of the module, before names of leaves."""


class _Block(nnx.Module):
    """A residual block: "norm1", "conv1", "norm2", "conv2", and "shortcut" where the number of channels changes."""

    def __init__(self, c: AutoencoderConfig, inputs: int, outputs: int, rngs: nnx.Rngs):
        convolution = partial(_convolution, c, rngs=rngs)
        self.norm1, self.norm2 = Norm(inputs, rms=c.causal), Norm(outputs, rms=c.causal)
        self.conv1, self.conv2 = convolution(inputs, outputs), convolution(outputs, outputs)
        if inputs != outputs:
            self.shortcut = convolution(inputs, outputs, side=1)


class _Attention(nnx.Module):
    """Attention of one head: "norm", and the products "q", "k", "v" and "o"."""

    def __init__(self, c: AutoencoderConfig, width: int, rngs: nnx.Rngs):
        self.norm = Norm(width, rms=c.causal)
        for name in "qkvo":
            setattr(self, name, Affine(width, width, rngs))


class _Middle(nnx.Module):
    """Residual blocks "block0" and "block1", and "attn" between them."""

    def __init__(self, c: AutoencoderConfig, rngs: nnx.Rngs):
        width = c.widths[-1]
        self.block0, self.block1 = _Block(c, width, width, rngs), _Block(c, width, width, rngs)
        if c.attention:
            self.attn = _Attention(c, width, rngs)


class _Level(nnx.Module):
    """Residual blocks "block0" …, the convolution "resample", and "time", which single pictures do not meet."""

    def __init__(self, c: AutoencoderConfig, level: Level, rngs: nnx.Rngs, time_outputs: int):
        for at in range(level.blocks):
            setattr(self, f"block{at}", _Block(c, level.outputs if at else level.inputs, level.outputs, rngs))
        if level.resampled:
            self.resample = Convolution(level.outputs, level.resampled, rngs)
        if level.over_time:
            self.time = Convolution(level.outputs, time_outputs, rngs, (FRAMES, 1, 1))


class _Half(nnx.Module):
    """An encoder or a decoder: "conv_in", "level0" …, "middle", "norm" and "conv_out"."""

    def __init__(
        self,
        c: AutoencoderConfig,
        rngs: nnx.Rngs,
        *,
        levels: tuple[Level, ...],
        inputs: int,
        outputs: int,
        expands: bool,
    ):
        self.conv_in = _convolution(c, inputs, levels[0].inputs, rngs=rngs)
        for at, level in enumerate(levels):
            setattr(self, f"level{at}", _Level(c, level, rngs, level.outputs * (2 if expands else 1)))
        self.middle = _Middle(c, rngs)
        self.norm = Norm(levels[-1].outputs, rms=c.causal)
        self.conv_out = _convolution(c, levels[-1].outputs, outputs, rngs=rngs)


class Encoder(nnx.Module):
    """The encoder alone, "encoder", and the convolution of single pixels "moments"."""

    def __init__(self, c: AutoencoderConfig, rngs: nnx.Rngs):
        pair = 2 * c.latent_channels
        self.encoder = _Half(c, rngs, levels=c.encoder_levels, inputs=c.channels, outputs=pair, expands=False)
        if c.moments_convolution:
            self.moments = _convolution(c, pair, pair, rngs=rngs, side=1)


class _Autoencoder(Encoder):
    """Both halves, "encoder" and "decoder", and the convolutions of single pixels "moments" and "latent"."""

    def __init__(self, c: AutoencoderConfig, rngs: nnx.Rngs):
        super().__init__(c, rngs)
        if c.latent_convolution:
            self.latent = _convolution(c, c.latent_channels, c.latent_channels, rngs=rngs, side=1)
        levels = c.decoder_levels
        self.decoder = _Half(c, rngs, levels=levels, inputs=c.latent_channels, outputs=c.channels, expands=True)


def _convolution(c: AutoencoderConfig, inputs: int, outputs: int, *, rngs: nnx.Rngs, side: int = 3) -> Convolution:
    """A convolution at a size; a causal one has as many frames as its side."""
    return Convolution(inputs, outputs, rngs, (side,) * c.kernel_axes)


def slice_of(c: AutoencoderConfig) -> ModuleSlice:
    """All parameters of an autoencoder with these settings, on one stage."""
    return ModuleSlice(MODULE, parts=(Part(partial(_Autoencoder, c)),))
