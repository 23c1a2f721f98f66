"""Audio encoders as a module."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from jaxtyping import Array, Float

from mmjax.data.log_mel import LogMel
from mmjax.data.types import EncoderSpec
from mmjax.models.context import Context
from mmjax.models.layers import Params
from mmjax.models.module import Block, LayerGroup, Module
from mmjax.models.norms import layer_norm
from mmjax.models.parameters import Part
from mmjax.models.transformer import EncoderLayer, encoder_block
from mmjax.models.whisper import layers
from mmjax.models.whisper.config import WhisperConfig


@dataclass(frozen=True)
class Whisper(Module):
    """An encoder of recordings of any length, packed into rows."""

    config: WhisperConfig

    Config = WhisperConfig

    @property
    def in_order(self) -> bool:
        """True: the stem has convolutions."""
        return True

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """One group of all layers."""
        c = self.config

        def block(context: Context, x: Array) -> Block:
            return encoder_block(c, context)

        return (LayerGroup(c.layers, partial(EncoderLayer, c), block),)

    def parts(self, *, first: bool, last: bool) -> tuple[Part, ...]:
        """The convolutions and learned positions of the first stage, and the norm of the last."""
        return layers.parts(self.config, first=first, last=last)

    def inputs(self, *, first: bool, last: bool) -> tuple[str, ...]:
        """ "segments"; on the first stage also "patches" and "positions"."""
        return ("patches", "segments", "positions") if first else ("segments",)

    def embed(self, p: Params, context: Context) -> Float[Array, "R T D"]:
        """Features of the context's host input "patches", pairs of log-mel frames; ``p`` are the parameters of the
        first stage.
        """
        inputs, axes = context.inputs, context.axes.stream
        positions_RT = inputs["positions"][..., 0]
        return layers.embed_frames(p, self.config, inputs["patches"], inputs["segments"], positions_RT, axes)

    def end(self, p: Params, context: Context, x: Float[Array, "R T D"]) -> Float[Array, "R T D"]:
        """Features after the last norm. ``p`` are the module's parameters on its last stage, and ``x`` is the output of
        the last layer.
        """
        return layer_norm(x, p["norm"], self.config.norm_eps)

    @property
    def medium(self) -> EncoderSpec:
        """The cutting of a recording into log-mel frames and pairs of these, for the data side."""
        c = self.config
        chunk = layers.STRIDE * c.length if c.pad else 0
        return EncoderSpec(
            patch=layers.STRIDE,
            merge=c.merge,
            channels=c.mels,
            axes=1,
            longest=c.length if c.positions == "learned" else 0,
            bounded_by="Whisper.length",
            boundless="sinusoidal",
            log_mel=LogMel(
                sample_rate=c.sample_rate, window=c.window, hop=c.hop, mels=c.mels, edges=c.edges, chunk=chunk
            ),
        )
