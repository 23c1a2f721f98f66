"""Vision transformers as a module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from jaxtyping import Array, Float

from mmjax.data.types import EncoderSpec
from mmjax.models.context import Context
from mmjax.models.layers import Params, layer_norm
from mmjax.models.module import LayerGroup, Module
from mmjax.models.parameters import Part
from mmjax.models.transformer import EncoderLayer, block_flops, encoder_parameters
from mmjax.models.vit import layers
from mmjax.models.vit.config import ViTConfig


@dataclass(frozen=True)
class VisionTransformer(Module):
    """An encoder of images of any size, packed into rows."""

    config: ViTConfig

    Config = ViTConfig

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        c = self.config
        return (LayerGroup(c.layers, partial(EncoderLayer, c), lambda context, x: layers.block(c, context)),)

    def parts(self, first: bool, last: bool) -> tuple[Part, ...]:
        return layers.parts(self.config, first, last)

    def inputs(self, first: bool, last: bool) -> tuple[str, ...]:
        return (("patches",) if first else ()) + ("segments", "positions")

    def embed(self, p: Params, context: Context) -> Float[Array, "R T D"]:
        return layers.embed_patches(p, self.config, context.inputs["patches"], context.inputs["positions"])

    def end(self, p: Params, context: Context, x: Float[Array, "R T D"]) -> Float[Array, "R T D"]:
        return layer_norm(x, p["norm"])

    @property
    def medium(self) -> EncoderSpec:
        c = self.config
        return EncoderSpec(
            patch=c.patch,
            merge=c.merge,
            channels=c.channels,
            axes=2,
            longest=c.grid if c.positions == "learned2d" else 0,
            bounded_by="ViT.grid",
            boundless="rope2d",
        )

    def parameters(self) -> int:
        """Patch embedding, position table when learned, layers, last norm. No class token or head."""
        c = self.config
        position = c.grid**2 * c.width if c.positions == "learned2d" else 0
        return c.patch_values * c.width + c.width + position + encoder_parameters(c)

    def forward_flops(self, lengths: Iterable[int]) -> int:
        c, patches = self.config, [int(n) for n in lengths]
        return 2 * sum(patches) * c.patch_values * c.width + block_flops(c, patches)
