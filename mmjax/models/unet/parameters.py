"""Parameters of UNets.

Shapes: C input and F output channels of a block, X width of the time's features.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from mmjax.models.transformer import Affine, Norm
from mmjax.models.unet.config import GATED, KERNEL, UNetConfig, is_split

_INIT = nnx.initializers.lecun_normal()


class Convolution(nnx.Module):
    """Parameters "kernel" ``[3, 3, C, F]`` and "bias" ``[F]``, initially 0.

    ``dims`` are the names of the dimensions C and F; tp splits "mlp".
    """

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs, dims: tuple[str, str] = ("input", "output")):
        shape = (KERNEL, KERNEL, inputs, outputs)
        self.kernel = nnx.Param(_INIT(rngs.params(), shape), dims=("row", "column", *dims))
        self.bias = nnx.Param(jnp.zeros(outputs), dims=dims[1:])


class Scale(nnx.Module):
    """Parameters "scale" and "bias" ``[width]`` of a norm, initially 1 and 0; tp splits the dimension "mlp"."""

    def __init__(self, width: int, dim: str = "embed"):
        self.scale = nnx.Param(jnp.ones(width), dims=(dim,))
        self.bias = nnx.Param(jnp.zeros(width), dims=(dim,))


class Column(nnx.Module):
    """Parameters "kernel" ``[inputs, outputs]`` and "bias" of a product that tp splits by columns."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_INIT(rngs.params(), (inputs, outputs)), dims=("embed", "mlp"))
        self.bias = nnx.Param(jnp.zeros(outputs), dims=("mlp",))


class ResNet(nnx.Module):
    """Parameters of a ResNet block: "norm1", "conv1", "time", "norm2", "conv2", and "shortcut" if C is not F."""

    def __init__(self, c: UNetConfig, inputs: int, outputs: int, rngs: nnx.Rngs):
        self.norm1 = Scale(inputs)
        self.conv1 = Convolution(inputs, outputs, rngs, ("input", "mlp"))
        self.time = Column(c.time_width, outputs, rngs)
        self.norm2 = Scale(outputs, "mlp")
        self.conv2 = Convolution(outputs, outputs, rngs, ("mlp", "output"))
        if inputs != outputs:
            self.shortcut = Affine(inputs, outputs, rngs)


class Attention(nnx.Module):
    """Parameters of attention to features of a width: "q", "k", "v", "o" and "o_bias"."""

    def __init__(self, width: int, condition: int, heads: int, rngs: nnx.Rngs):
        dim = "heads" if is_split(heads) else "all_heads"
        self.q = nnx.Param(_INIT(rngs.params(), (width, width)), dims=("embed", dim))
        self.k = nnx.Param(_INIT(rngs.params(), (condition, width)), dims=("embed", dim))
        self.v = nnx.Param(_INIT(rngs.params(), (condition, width)), dims=("embed", dim))
        self.o = nnx.Param(_INIT(rngs.params(), (width, width)), dims=(dim, "embed"))
        self.o_bias = nnx.Param(jnp.zeros(width), dims=("embed",))


class GatedMlp(nnx.Module):
    """Parameters of a gated mlp: "up", "gate" and "down", each with a bias, such as "up_bias"."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        hidden = GATED * width
        for name in ("up", "gate"):
            setattr(self, name, nnx.Param(_INIT(rngs.params(), (width, hidden)), dims=("embed", "mlp")))
            setattr(self, f"{name}_bias", nnx.Param(jnp.zeros(hidden), dims=("mlp",)))
        self.down = nnx.Param(_INIT(rngs.params(), (hidden, width)), dims=("mlp", "embed"))
        self.down_bias = nnx.Param(jnp.zeros(width), dims=("embed",))


class Block(nnx.Module):
    """Parameters of a transformer's block: "norm1", "self_attn", "norm2", "cross_attn", "norm3" and "mlp"."""

    def __init__(self, c: UNetConfig, width: int, heads: int, rngs: nnx.Rngs):
        self.norm1, self.self_attn = Norm(width), Attention(width, width, heads, rngs)
        self.norm2, self.cross_attn = Norm(width), Attention(width, c.width, heads, rngs)
        self.norm3, self.mlp = Norm(width), GatedMlp(width, rngs)


class Transformer(nnx.Module):
    """Parameters of a transformer: "norm", "proj_in", "block_0" and so on, and "proj_out"."""

    def __init__(self, c: UNetConfig, width: int, heads: int, rngs: nnx.Rngs):
        self.norm, self.proj_in = Scale(width), Affine(width, width, rngs)
        for number in range(c.transformer_blocks):
            setattr(self, f"block_{number}", Block(c, width, heads, rngs))
        self.proj_out = Affine(width, width, rngs)


class Level(nnx.Module):
    """Parameters of a level on the way down or up: "resnet_0", "attention_0" and so on, and "sample".

    "attention_0" is missing without heads, and "sample", the convolution behind the level, if ``sampled`` is False.
    """

    def __init__(
        self, c: UNetConfig, inputs: tuple[int, ...], width: int, heads: int, rngs: nnx.Rngs, *, sampled: bool
    ):
        for number, channels in enumerate(inputs):
            setattr(self, f"resnet_{number}", ResNet(c, channels, width, rngs))
            if heads:
                setattr(self, f"attention_{number}", Transformer(c, width, heads, rngs))
        if sampled:
            self.sample = Convolution(width, width, rngs)


class Middle(nnx.Module):
    """Parameters between the way down and the way up: "resnet_0", "attention_0" and "resnet_1"."""

    def __init__(self, c: UNetConfig, rngs: nnx.Rngs):
        width = c.widths[-1]
        self.resnet_0, self.resnet_1 = ResNet(c, width, width, rngs), ResNet(c, width, width, rngs)
        self.attention_0 = Transformer(c, width, c.mid_heads, rngs)


class UNet(nnx.Module):
    """Parameters of a UNet.

    They are "conv_in", "time_up", "time_down", "down_0" and so on for each level, "mid", "up_0" and so on from the last
    level on, "norm_out" and "conv_out".
    """

    def __init__(self, c: UNetConfig, rngs: nnx.Rngs):
        first, last = c.widths[0], len(c.widths) - 1
        self.conv_in = Convolution(c.channels, first, rngs)
        self.time_up = Affine(first, c.time_width, rngs)
        self.time_down = Affine(c.time_width, c.time_width, rngs)
        for level, inputs in enumerate(c.down_inputs):
            width, heads = c.widths[level], c.heads_by_level[level]
            setattr(self, f"down_{level}", Level(c, inputs, width, heads, rngs, sampled=level < last))
        self.mid = Middle(c, rngs)
        for number, inputs in enumerate(c.up_inputs):
            width, heads = c.widths[last - number], c.heads_by_level[last - number]
            setattr(self, f"up_{number}", Level(c, inputs, width, heads, rngs, sampled=number < last))
        self.norm_out = Scale(first)
        self.conv_out = Convolution(first, c.channels, rngs)
