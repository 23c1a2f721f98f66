"""Pre-norm transformer layers of encoders, with tp over heads and mlp.

Biases, norms of heads and behind branches, and bounds of products are optional. Generators use attention and mlp.

Shapes: R rows, T positions per row, D width, H heads and F hidden units local to this rank, K head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float

from mmjax import jax_compat
from mmjax.mesh.spread import Axes
from mmjax.models.clipping import clipped_input, clipped_output, new_bounds
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
from mmjax.models.norms import any_norm, rms_norm, scaled, unscaled_rms_norm


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
    def bias(self) -> bool:
        """Whether products have biases."""
        ...

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases, where products have."""
        ...

    @property
    def k_bias(self) -> bool:
        """Whether keys have one beside queries and values."""
        ...

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys of each head are normed."""
        ...

    @property
    def v_norm(self) -> bool:
        """Whether values of each head are normed, without a weight."""
        ...

    @property
    def score_width(self) -> float:
        """The number whose square root divides scores; 0 for the width of a head."""
        ...

    @property
    def clipped(self) -> bool:
        """Whether products have bounds."""
        ...

    @property
    def norm_eps(self) -> float:
        """The epsilon of norms."""
        ...


class EncoderLayers(LayerSizes, Protocol):
    """The settings that encoder layers read."""

    @property
    def post_norms(self) -> bool:
        """Whether branches end with norms of their own."""
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

    All biases are missing if ``c.bias`` is False, those of queries, keys and values if ``c.qkv_bias`` is, and "k_bias"
    if ``c.k_bias`` is. With ``c.qk_norm`` there are "q_norm" and "k_norm" ``[K]``, and with ``c.clipped`` bounds
    "q_bounds" and so on ``[4]``.
    """

    def __init__(self, c: LayerSizes, rngs: nnx.Rngs):
        for name in ("q", "k", "v", "o"):
            is_o = name == "o"
            init = residual_init(c.layers) if is_o else nnx.initializers.lecun_normal()
            dims = ("heads", "embed") if is_o else ("embed", "heads")
            setattr(self, name, nnx.Param(init(rngs.params(), (c.width, c.width)), dims=dims))
            if c.bias and (is_o or (c.qkv_bias and (name != "k" or c.k_bias))):
                setattr(self, f"{name}_bias", nnx.Param(jnp.zeros(c.width), dims=dims[1:]))
            if c.clipped:
                setattr(self, f"{name}_bounds", new_bounds())
        if c.qk_norm:
            self.q_norm = nnx.Param(jnp.ones(c.head_width), dims=("head",))
            self.k_norm = nnx.Param(jnp.ones(c.head_width), dims=("head",))


class Mlp(nnx.Module):
    """Parameters of the mlp: "up" ``[D, F]``, "down" ``[F, D]``, "up_bias" and "down_bias".

    With ``gated`` also "gate" ``[D, F]`` and "gate_bias". Biases are missing if ``c.bias`` is False; with ``c.clipped``
    there are bounds "up_bounds" and so on ``[4]``.
    """

    def __init__(self, c: LayerSizes, rngs: nnx.Rngs, *, gated: bool = False):
        init, last = nnx.initializers.lecun_normal(), residual_init(c.layers)
        self.up = nnx.Param(init(rngs.params(), (c.width, c.mlp)), dims=("embed", "mlp"))
        self.down = nnx.Param(last(rngs.params(), (c.mlp, c.width)), dims=("mlp", "embed"))
        if gated:
            self.gate = nnx.Param(init(rngs.params(), (c.width, c.mlp)), dims=("embed", "mlp"))
        for name in ("up", "down", *(("gate",) if gated else ())):
            if c.bias:
                size, dim = (c.width, "embed") if name == "down" else (c.mlp, "mlp")
                setattr(self, f"{name}_bias", nnx.Param(jnp.zeros(size), dims=(dim,)))
            if c.clipped:
                setattr(self, f"{name}_bounds", new_bounds())


class EncoderLayer(nnx.Module):
    """Parameters of one pre-norm block: "attn_norm", "attn", "mlp_norm" and "mlp".

    With ``c.post_norms`` also "attn_post_norm" and "mlp_post_norm".
    """

    def __init__(self, c: EncoderLayers, rngs: nnx.Rngs, *, rms: bool = False, gated: bool = False):
        self.attn_norm, self.attn = Norm(c.width, rms=rms), Attention(c, rngs)
        self.mlp_norm, self.mlp = Norm(c.width, rms=rms), Mlp(c, rngs, gated=gated)
        if c.post_norms:
            self.attn_post_norm, self.mlp_post_norm = Norm(c.width, rms=rms), Norm(c.width, rms=rms)


def encoder_block(c: EncoderLayers, context: Context, rotate: Rotate = lambda x_RTHK: x_RTHK) -> Block:
    """The function of one layer, (x [R, T, D], its parameters) -> [R, T, D], over rows of packed media.

    ``c`` is such as a ``ViTConfig``, ``context`` such as ``Context.of(Axes(), {"segments": …}, "full")``, and
    ``rotate`` the rotary embedding of queries and keys ``[R, T, H, K]``. A layer's parameters are those of
    ``EncoderLayer``: "attn_norm", "attn", "mlp_norm" and "mlp".

    Optional parameters change the layer: ``attn_post_norm`` and ``mlp_post_norm`` are norms of the branches, and
    ``attn_scale`` and ``mlp_scale`` scale them, before they are added to the residual stream. Norms without a bias are
    RMSNorms, an mlp with a gate is a gated mlp, and products with bounds are clipped.
    """

    def layer(x_RTD: Array, p: Params) -> Array:
        h_RTD = attend(p["attn"], c, context, any_norm(x_RTD, p["attn_norm"], c.norm_eps), rotate)
        x_RTD = x_RTD + _ended(h_RTD, p, "attn", c)
        h_RTD = feed_forward(p["mlp"], c, context.axes, any_norm(x_RTD, p["mlp_norm"], c.norm_eps))
        return x_RTD + _ended(h_RTD, p, "mlp", c)

    return layer


def _ended(h_RTD: Array, p: Params, branch: str, c: EncoderLayers) -> Array:
    """A branch's result after its own norm and scale, as far as it has them."""
    if f"{branch}_post_norm" in p:
        h_RTD = any_norm(h_RTD, p[f"{branch}_post_norm"], c.norm_eps)
    return scaled(h_RTD, p[f"{branch}_scale"]) if f"{branch}_scale" in p else h_RTD


def attend(p: Params, c: LayerSizes, context: Context, h_RTD: Array, rotate: Rotate) -> Float[Array, "R T D"]:
    """The attention branch of normalised features, without the residual.

    Args:
      p: parameters with the names of ``Attention``: "q", "k", "v" and "o" ``[D, D]``, and as the settings have them
        biases, norms and bounds.
      c: settings, such as a ``ViTConfig``, of which the width of a head, its norms and the divisor of scores are read.
      context: the context of the layer, with its mask, such as ``Context.of(Axes(), {"segments": …}, "full")``.
      h_RTD: the normalised features.
      rotate: a function, the rotary embedding of queries and keys ``[R, T, H, K]``.
    """
    qkv = _column_products(p, ("q", "k", "v"), h_RTD, context.axes)
    q, k, v = (split_heads(y, c.head_width) for y in qkv)
    if c.qk_norm:
        q, k = rms_norm(q, p["q_norm"], c.norm_eps), rms_norm(k, p["k_norm"], c.norm_eps)
    if c.v_norm:
        v = unscaled_rms_norm(v, c.norm_eps)
    q = rotate(q)
    if c.score_width:
        q *= (c.head_width / c.score_width) ** 0.5
    y_RTHK = context.attend(q, rotate(k), v)
    return _row_product(p, "o", y_RTHK.reshape(*y_RTHK.shape[:2], -1), context.axes)


def feed_forward(p: Params, c: LayerSizes, axes: Axes, h_RTD: Array) -> Float[Array, "R T D"]:
    """The mlp branch of normalised features, without the residual; a gated mlp has the activation in its gate.

    Args:
      p: parameters with the names of ``Mlp``: "up" ``[D, F]``, "down" ``[F, D]``, if gated "gate", and as the settings
        have them biases and bounds.
      c: settings, such as a ``ViTConfig``, of which the activation is read.
      axes: mesh axes by role, such as ``Axes()``.
      h_RTD: the normalised features.
    """
    names = ("gate", "up") if "gate" in p else ("up",)
    h_RTF, *up_RTF = _column_products(p, names, h_RTD, axes)
    h_RTF = ACTIVATIONS[c.activation](h_RTF)
    return _row_product(p, "down", h_RTF * up_RTF[0] if up_RTF else h_RTF, axes)


def _column_products(p: Params, names: tuple[str, ...], h_RTD: Array, axes: Axes) -> list[Array]:
    """Products of features with several weights that tp splits by columns, each between its bounds if it has some."""
    weights = [(p[name], p.get(f"{name}_bias")) for name in names]
    if f"{names[0]}_bounds" not in p:
        return column_parallel(h_RTD, weights, axes)
    # Varying over tp before the inputs differ, so that backward sums their gradients before its only psum.
    h_RTD = h_RTD if axes.sp else jax_compat.to_varying(h_RTD, axes.tp)
    results = list[Array]()
    for name, weight in zip(names, weights, strict=True):
        bounds_4 = p[f"{name}_bounds"]
        (y_RTF,) = column_parallel(clipped_input(h_RTD, bounds_4), [weight], axes)
        results.append(clipped_output(y_RTF, bounds_4))
    return results


def _row_product(p: Params, name: str, h_RTF: Array, axes: Axes) -> Array:
    """The product of features with a weight that tp splits by rows, between its bounds if it has some."""
    weight, bias = p[name], p.get(f"{name}_bias")
    if f"{name}_bounds" not in p:
        return row_parallel(h_RTF, weight, axes, bias)
    bounds_4 = p[f"{name}_bounds"]
    return clipped_output(row_parallel(clipped_input(h_RTF, bounds_4), weight, axes, bias), bounds_4)
