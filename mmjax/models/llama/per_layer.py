"""Inputs of layers beside their features (``Decoder.per_layer_width``), as in Gemma 4's small models and Gemma 3n.

Shapes: B rows, T tokens, D width, L layers, P width of a layer's input, F = L P.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.models.context import Context
from mmjax.models.layers import ACTIVATIONS, LAYER_INPUT, Params, embed_tokens, linear, residual_init, saved
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.norms import first_scale, normed


class Products(nnx.Module):
    """The products with which a layer reads its input beside the features."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        shape, init = (c.width, c.per_layer_width), nnx.initializers.lecun_normal()
        self.gate = nnx.Param(init(rngs.params(), shape), dims=("embed", "per_layer"))
        self.out = nnx.Param(residual_init(c.layers)(rngs.params(), shape[::-1]), dims=("per_layer", "embed"))


class Tables(nnx.Module):
    """The table and the product that give the inputs of layers beside the features."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        columns = c.layers * c.per_layer_width
        table = nnx.initializers.normal(c.per_layer_width**-0.5)(rngs.params(), (c.vocab, columns))
        project = nnx.initializers.lecun_normal()(rngs.params(), (c.width, columns))
        self.embed = nnx.Param(table, dims=("vocab", "per_layers"))
        self.project = nnx.Param(project, dims=("embed", "per_layers"))
        self.norm = nnx.Param(first_scale(c, c.per_layer_width), dims=("per_layer",))


def inputs(c: DecoderConfig, p: Params, context: Context, x: Array) -> Float[Array, "L B T P"]:
    """The inputs of layers beside the features.

    Each is a token's row of ``p``'s table "embed", times the root of P, and the normed product "project" of ``x
    [B, T, D]``, the first layer's input, added and divided by the root of 2.
    """
    width = c.per_layer_width
    tokens_BT = context.tokens.inputs["tokens"]
    table_BTF = embed_tokens(tokens_BT, p["embed"], context.axes)
    if c.per_layer_media >= 0:
        table_BTF = _untrained_at(table_BTF, context.inputs["tokens"] == c.per_layer_media)
    rows, product = ((y.reshape(*x.shape[:2], c.layers, width)) for y in (table_BTF, linear(x, p["project"])))
    rows *= jnp.asarray(width**0.5, rows.dtype)
    projected = normed(c, product * c.width**-0.5, p["norm"])
    return jnp.moveaxis((projected + rows) * 2**-0.5, 2, 0)


@jax.checkpoint  # otherwise the mask of every feature would be a residual
def _untrained_at(x_BTF: Array, is_fixed_BT: Array) -> Array:
    """The features; no gradient passes where ``is_fixed_BT``."""
    return jnp.where(is_fixed_BT[..., None], jax.lax.stop_gradient(x_BTF), x_BTF)


def branch(c: DecoderConfig, x_BTD: Array, p: Params) -> Float[Array, "B T D"]:
    """The summand of a layer's output that its input beside the features gives, between two products.

    ``p`` are the layer's parameters, with ``LAYER_INPUT`` [B, T, P] among them.
    """
    gate = ACTIVATIONS[c.activation](linear(x_BTD, p["per_layer"]["gate"]))
    return normed(c, saved(linear(gate * p[LAYER_INPUT], p["per_layer"]["out"])), p["per_layer_norm"])
