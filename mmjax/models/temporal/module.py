"""Temporal encoders as a module: the second step of a two-step video encoder.

A first encoder encodes each image alone; this one lets the tokens of a sample's images attend to one another, as the
factorised encoder of ViViT (Arnab et al. 2021, §3.3) does. A token sees the tokens of its own image and of images
before it, so no answer depends on an image behind it.

Shapes: R rows, T tokens per row, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.attention.language import WORDS
from mmjax.data.derived import MEDIA_RULES
from mmjax.data.types import EncoderSpec
from mmjax.models.context import Context
from mmjax.models.layers import Params, rotate
from mmjax.models.module import Block, LayerGroup, Module
from mmjax.models.norms import layer_norm
from mmjax.models.parameters import Part
from mmjax.models.temporal.config import TemporalConfig
from mmjax.models.transformer import (
    EncoderLayer,
    Norm,
    encoder_block,
)


@dataclass(frozen=True)
class TemporalEncoder(Module):
    """An encoder of another encoder's tokens, packed into rows: a segment has the tokens of all media of a sample."""

    config: TemporalConfig

    Config = TemporalConfig

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """One group of all layers."""
        c = self.config

        def block(context: Context, x: Array) -> Block:
            numbers_RT = context.tokens.inputs["positions"][..., 0]
            return encoder_block(c, context, lambda x_RTHK: rotate(x_RTHK, numbers_RT, c.rope_theta))

        return (LayerGroup(c.layers, partial(EncoderLayer, c), block, rules=MEDIA_RULES),)

    def parts(self, *, first: bool, last: bool) -> tuple[Part, ...]:
        """The norm of the last stage."""
        return (Part(lambda rngs: Norm(self.config.width), "norm"),) if last else ()

    def inputs(self, *, first: bool, last: bool) -> tuple[str, ...]:
        """ "segments", "positions", which are the numbers of media, and the words of the mask."""
        return ("segments", "positions", *WORDS)

    def embed(self, p: Params, context: Context) -> Float[Array, "R T D"]:
        """Zeros in places of the other encoder's tokens; ``p`` are the module's parameters on its first stage."""
        first_layers = next(run for name, run in p.items() if name.startswith("layer"))
        zeros_RT = jnp.zeros_like(context.inputs["segments"], first_layers["attn"]["q"].dtype)
        return jnp.broadcast_to(zeros_RT[..., None], (*zeros_RT.shape, self.config.width))

    def end(self, p: Params, context: Context, x: Float[Array, "R T D"]) -> Float[Array, "R T D"]:
        """Features after the last norm. ``p`` are the module's parameters on its last stage, and ``x`` is the output of
        the last layer.
        """
        return layer_norm(x, p["norm"], self.config.norm_eps)

    @property
    def medium(self) -> EncoderSpec:
        """One position for each token of the other encoder, for the data side."""
        return EncoderSpec(patch=1, axes=1)
