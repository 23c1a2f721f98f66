"""Encoders of latents as a module.

A row has one picture on a canvas of a latent's pixels in row-major order, each with the picture's pixels that it stands
for. A token is the distribution of a latent's pixel as a generator sees it: means, then deviations.

Shapes: R rows, T places of a canvas, E numbers of a place of the picture, D = 2 Z means and deviations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.data.types import EncoderSpec
from mmjax.models.autoencoder.layers import encode, to_generator
from mmjax.models.autoencoder.parameters import Encoder
from mmjax.models.context import Context
from mmjax.models.latent_encoder.config import LatentEncoderConfig
from mmjax.models.latent_encoder.layers import OnCanvases
from mmjax.models.layers import Params
from mmjax.models.module import Block, LayerGroup, Module
from mmjax.models.parameters import Part


@dataclass(frozen=True)
class LatentEncoder(Module):
    """A frozen encoder of the pictures that a generator learns to make, whose latents enter the generator."""

    config: LatentEncoderConfig

    Config = LatentEncoderConfig

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """One group of all layers, each a complete encoder."""
        c = self.config
        return (LayerGroup(c.layers, partial(Encoder, c.autoencoder), partial(_block, c)),)

    def parts(self, *, first: bool, last: bool) -> tuple[Part, ...]:
        """(): all parameters are in layers."""
        del first, last
        return ()

    def inputs(self, *, first: bool, last: bool) -> tuple[str, ...]:
        """ "segments" and "patches"."""
        del first, last
        return ("segments", "patches")

    def embed(self, p: Params, context: Context) -> Float[Array, "R T D"]:
        """Zeros, to which each encoder adds its result, in the dtype of the parameters ``p``."""
        encoder = next(iter(p.values()))
        zeros_RT = jnp.zeros_like(context.inputs["segments"], encoder["encoder"]["conv_in"]["bias"].dtype)
        return jnp.broadcast_to(zeros_RT[..., None], (*zeros_RT.shape, self.config.width))

    def end(self, p: Params, context: Context, x: Float[Array, "R T D"]) -> Float[Array, "R T D"]:
        """Means and deviations as a generator sees them, of means and logarithms of variances."""
        del p, context
        c = self.config.autoencoder
        mean, log_variance = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        scale = to_generator(c, jnp.ones_like(mean)) - to_generator(c, jnp.zeros_like(mean))
        both = [to_generator(c, mean), jnp.exp(0.5 * log_variance) * scale]
        return jnp.concatenate(both, axis=-1).astype(x.dtype)

    @property
    def medium(self) -> EncoderSpec:
        """The cutting of a picture into places of its latent, for the data side."""
        c = self.config
        return EncoderSpec(patch=c.patch, channels=c.channels, canvases=c.canvases, bounded_by="LatentEncoder.canvases")


def _block(c: LatentEncoderConfig, context: Context, x_RTD: Float[Array, "R T D"]) -> Block:
    """The function of the layer, (x [R, T, D], its parameters) -> [R, T, D]; it reads the host input "patches"."""
    rows, columns = c.canvas(x_RTD.shape[1])
    inside_RHW = (context.inputs["segments"] > 0).reshape(-1, rows, columns)
    inside_RHW = jnp.repeat(jnp.repeat(inside_RHW, c.patch, axis=1), c.patch, axis=2)
    cut = context.inputs["patches"].reshape(-1, rows, columns, c.patch, c.patch, c.channels)
    pictures_RHWC = cut.swapaxes(2, 3).reshape(*inside_RHW.shape, c.channels).astype(x_RTD.dtype)
    passes = OnCanvases(inside_RHW, len(c.widths))

    def layer(x_RTD: Array, p: Params) -> Array:
        gaussian = encode(c.autoencoder, p, pictures_RHWC, passes)
        return x_RTD + jnp.concatenate(gaussian, axis=-1).reshape(x_RTD.shape)

    return layer
