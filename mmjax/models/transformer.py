"""Pre-norm transformer layers of encoders, with biases (optional for keys) and tp over heads and mlp.

Generators use their attention and mlp.

Shapes: R rows, T positions per row, D width, H heads and F hidden units local to this rank, K head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float

from mmjax.mesh.spread import Axes
from mmjax.models.context import Context
from mmjax.models.layers import (
    ACTIVATIONS,
    Params,
    column_parallel,
    residual_init,
    row_parallel,
    split_heads,
)
from mmjax.models.module import Block
from mmjax.models.norms import any_norm, scaled


class LayerSizes(Protocol):
    """The settings that attention and the mlp read."""

    @property
    def layers(self) -> int:
        """Depth of the encoder in all stages."""
        ...

    @property
    def width(self) -> int:
        """Model width."""
        ...

    @property
    def mlp(self) -> int:
        """Hidden units of the mlp."""
        ...

    @property
    def head_width(self) -> int:
        """Width of one head."""
        ...

    @property
    def activation(self) -> str:
        """Key of ``ACTIVATIONS``."""
        ...

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        ...

    @property
    def k_bias(self) -> bool:
        """Whether keys have one beside queries and values."""
        ...


class EncoderLayers(LayerSizes, Protocol):
    """The settings that encoder layers read."""

    @property
    def norm_eps(self) -> float:
        """The epsilon of norms."""
        ...


Rotate = Callable[[Array], Array]
"""A function that applies rotary embedding to queries or keys."""


class Affine(nnx.Module):
    """Parameters of a product that tp does not split: "kernel" ``[inputs, outputs]`` and, if wanted, "bias", initially
    0.

    ``init`` is the initializer of the kernel, by default ``lecun_normal``.
    """

    def __init__(
        self, inputs: int, outputs: int, rngs: nnx.Rngs, init: Initializer | None = None, *, bias: bool = True
    ):
        init = init or nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(init(rngs.params(), (inputs, outputs)), dims=("input", "output"))
        if bias:
            self.bias = nnx.Param(jnp.zeros(outputs), dims=("output",))


class Norm(nnx.Module):
    """Parameters "scale" and "bias" ``[width]`` of a LayerNorm, or "scale" of an RMSNorm; initially 1 and 0.

    The scale is initially 0 in a norm that multiplies by 1 + the scale, ``plus_one``.
    """

    def __init__(self, width: int, *, rms: bool = False, plus_one: bool = False):
        self.scale = nnx.Param(jnp.full(width, 1.0 - plus_one), dims=("embed",))
        if not rms:
            self.bias = nnx.Param(jnp.zeros(width), dims=("embed",))


class Attention(nnx.Module):
    """Parameters of attention: "q", "k", "v" and "o" ``[D, D]``, and their biases "q_bias" and so on ``[D]``.

    "k_bias" is missing if ``c.k_bias`` is False, and all but "o_bias" if ``c.qkv_bias`` is.
    """

    def __init__(self, c: LayerSizes, rngs: nnx.Rngs):
        for name in ("q", "k", "v", "o"):
            is_o = name == "o"
            init = residual_init(c.layers) if is_o else nnx.initializers.lecun_normal()
            dims = ("heads", "embed") if is_o else ("embed", "heads")
            setattr(self, name, nnx.Param(init(rngs.params(), (c.width, c.width)), dims=dims))
            if is_o or (c.qkv_bias and (name != "k" or c.k_bias)):
                setattr(self, f"{name}_bias", nnx.Param(jnp.zeros(c.width), dims=dims[1:]))


class Mlp(nnx.Module):
    """Parameters of the mlp: "up" ``[D, F]``, "down" ``[F, D]``, "up_bias" and "down_bias".

    With ``gated`` also "gate" ``[D, F]`` and "gate_bias".
    """

    def __init__(self, c: LayerSizes, rngs: nnx.Rngs, *, gated: bool = False):
        init, last = nnx.initializers.lecun_normal(), residual_init(c.layers)
        self.up = nnx.Param(init(rngs.params(), (c.width, c.mlp)), dims=("embed", "mlp"))
        self.down = nnx.Param(last(rngs.params(), (c.mlp, c.width)), dims=("mlp", "embed"))
        self.up_bias = nnx.Param(jnp.zeros(c.mlp), dims=("mlp",))
        self.down_bias = nnx.Param(jnp.zeros(c.width), dims=("embed",))
        if gated:
            self.gate = nnx.Param(init(rngs.params(), (c.width, c.mlp)), dims=("embed", "mlp"))
            self.gate_bias = nnx.Param(jnp.zeros(c.mlp), dims=("mlp",))


class EncoderLayer(nnx.Module):
    """Parameters of one pre-norm block: "attn_norm", "attn", "mlp_norm" and "mlp"."""

    def __init__(self, c: EncoderLayers, rngs: nnx.Rngs, *, rms: bool = False, gated: bool = False):
        self.attn_norm, self.attn = Norm(c.width, rms=rms), Attention(c, rngs)
        self.mlp_norm, self.mlp = Norm(c.width, rms=rms), Mlp(c, rngs, gated=gated)


def encoder_block(c: EncoderLayers, context: Context, rotate: Rotate = lambda x_RTHK: x_RTHK) -> Block:
    """The function of one layer, (x [R, T, D], its parameters) -> [R, T, D], over rows of packed media.

    ``c`` is such as a ``ViTConfig``, ``context`` such as ``Context.of(Axes(), {"segments": …}, "full")``, and
    ``rotate`` the rotary embedding of queries and keys ``[R, T, H, K]``. A layer's parameters are those of
    ``EncoderLayer``: "attn_norm", "attn", "mlp_norm" and "mlp".

    Optional parameters change the layer: ``attn_scale`` and ``mlp_scale`` scale the branches before they are added to
    the residual stream, norms without a bias are RMSNorms, and an mlp with a gate is a gated mlp.
    """

    def layer(x_RTD: Array, p: Params) -> Array:
        h_RTD = attend(p["attn"], c, context, any_norm(x_RTD, p["attn_norm"], c.norm_eps), rotate)
        x_RTD = x_RTD + (scaled(h_RTD, p["attn_scale"]) if "attn_scale" in p else h_RTD)
        h_RTD = feed_forward(p["mlp"], c, context.axes, any_norm(x_RTD, p["mlp_norm"], c.norm_eps))
        return x_RTD + (scaled(h_RTD, p["mlp_scale"]) if "mlp_scale" in p else h_RTD)

    return layer


def attend(p: Params, c: LayerSizes, context: Context, h_RTD: Array, rotate: Rotate) -> Float[Array, "R T D"]:
    """The attention branch of normalised features, without the residual.

    Args:
      p: parameters with the names of ``Attention``: "q", "k", "v" and "o" ``[D, D]``, and "q_bias" and so on, of which
        "o_bias" is needed.
      c: sizes, such as a ``ViTConfig``, of which the width of a head is read.
      context: the context of the layer, with its mask, such as ``Context.of(Axes(), {"segments": …}, "full")``.
      h_RTD: the normalised features.
      rotate: a function, the rotary embedding of queries and keys ``[R, T, H, K]``.
    """
    qkv = column_parallel(h_RTD, [(p[n], p.get(f"{n}_bias")) for n in "qkv"], context.axes)
    q, k, v = (split_heads(y, c.head_width) for y in qkv)
    y_RTHK = context.attend(rotate(q), rotate(k), v)
    return row_parallel(y_RTHK.reshape(*y_RTHK.shape[:2], -1), p["o"], context.axes, p["o_bias"])


def feed_forward(p: Params, c: LayerSizes, axes: Axes, h_RTD: Array) -> Float[Array, "R T D"]:
    """The mlp branch of normalised features, without the residual; a gated mlp has the activation in its gate.

    Args:
      p: parameters with the names of ``Mlp``: "up" ``[D, F]``, "down" ``[F, D]``, "up_bias" and "down_bias", and if
        gated "gate" and "gate_bias".
      c: settings, such as a ``ViTConfig``, of which the activation is read.
      axes: mesh axes by role, such as ``Axes()``.
      h_RTD: the normalised features.
    """
    names = ("gate", "up") if "gate" in p else ("up",)
    h_RTF, *up_RTF = column_parallel(h_RTD, [(p[name], p[f"{name}_bias"]) for name in names], axes)
    h_RTF = ACTIVATIONS[c.activation](h_RTF)
    return row_parallel(h_RTF * up_RTF[0] if up_RTF else h_RTF, p["down"], axes, p["down_bias"])
