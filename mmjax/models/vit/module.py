"""Vision transformers as a module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from jaxtyping import Array, Float

from mmjax.data.types import EncoderSpec
from mmjax.models.context import Context
from mmjax.models.layers import Params
from mmjax.models.module import Block, LayerGroup, Module
from mmjax.models.parameters import Part
from mmjax.models.vit import layers
from mmjax.models.vit.config import ViTConfig


@dataclass(frozen=True)
class VisionTransformer(Module):
    """An encoder of images of any size, packed into rows."""

    config: ViTConfig

    Config = ViTConfig

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Its groups of layers: runs of layers with equal windows, see ``ViTConfig.windows``."""
        c = self.config
        create = partial(layers.ViTLayer, c)

        def block(context: Context, x: Array) -> Block:
            return layers.block(c, context)

        return tuple(LayerGroup(count, create, block, grid_window=window) for count, window in c.windows)

    def parts(self, *, first: bool, last: bool) -> tuple[Part, ...]:
        """The patch embedding, special tokens, learned positions and norm of the first stage, and the norm and standard
        of the last.
        """
        return layers.parts(self.config, first=first, last=last)

    def inputs(self, *, first: bool, last: bool) -> tuple[str, ...]:
        """ "segments" and "positions"; on the first stage also "patches"."""
        return (("patches",) if first else ()) + ("segments", "positions")

    def embed(self, p: Params, context: Context) -> Float[Array, "R T D"]:
        """Features of the context's host input "patches", and of special tokens; ``p`` are the parameters of the first
        stage.
        """
        return layers.embed_patches(p, self.config, context)

    def end(self, p: Params, context: Context, x: Float[Array, "R T D"]) -> Float[Array, "R T D"]:
        """Features after the last norm, if there is one, scaled and standardised as ``ViT.output`` says.

        ``p`` are the module's parameters on its last stage, and ``x`` is the output of the last layer.
        """
        return layers.end(p, self.config, x)

    @property
    def medium(self) -> EncoderSpec:
        """The cutting of an image into patches, for the data side."""
        c = self.config
        return EncoderSpec(
            patch=c.patch,
            merge=c.merge,
            channels=c.channels,
            frames=c.frames,
            axes=2,
            special=c.special,
            longest=c.grid if c.has_table and c.interpolate == "none" else 0,
            bounded_by="ViT.grid",
            boundless="rope2d",
        )

    def forward_flops(self, lengths: Iterable[int]) -> int:
        """Forward FLOPs for images with these numbers of patches, class tokens and registers not counted.

        Windows at an edge of an image count as full.
        """
        c, patches = self.config, [int(n) for n in lengths]
        # Pairs of patches in different windows are hidden.
        hidden_pairs = sum(
            layers * n * max(n - window**2, 0) for layers, window in c.windows if window for n in patches
        )
        return super().forward_flops(patches) - 4 * hidden_pairs * c.width
