"""Llama-family decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes: B rows, T tokens, D width, H query heads and G key/value heads local to this rank, K head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.attention import attention
from mmjax.mesh.submesh import Axes
from mmjax.models.config import DecoderConfig
from mmjax.models.layers import (
    Params,
    column_parallel,
    cross_entropy,
    lookup,
    residual_init,
    rms_norm,
    rotate,
    row_parallel,
    scan_layers,
    split_heads,
    vocabulary_logits,
)
from mmjax.models.parameters import Part


class _Attention(nnx.Module):
    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        init, heads, kv = nnx.initializers.lecun_normal(), c.heads * c.head_width, c.kv_heads * c.head_width
        self.q = nnx.Param(init(rngs.params(), (c.width, heads)))
        self.k = nnx.Param(init(rngs.params(), (c.width, kv)))
        self.v = nnx.Param(init(rngs.params(), (c.width, kv)))
        self.o = nnx.Param(residual_init(c.layers)(rngs.params(), (heads, c.width)))


class _Mlp(nnx.Module):
    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.gate = nnx.Param(init(rngs.params(), (c.width, c.mlp)))
        self.up = nnx.Param(init(rngs.params(), (c.width, c.mlp)))
        self.down = nnx.Param(residual_init(c.layers)(rngs.params(), (c.mlp, c.width)))


class DecoderLayer(nnx.Module):
    """Parameters of one pre-norm block."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        self.attn_norm, self.attn = nnx.Param(jnp.ones(c.width)), _Attention(c, rngs)
        self.mlp_norm, self.mlp = nnx.Param(jnp.ones(c.width)), _Mlp(c, rngs)


class _Embedding(nnx.Module):
    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        # Untied: about as large as a projector's output, so that neither text nor images drown the other at the start.
        # A tied table is the head too, whose logits must start small.
        scale = c.width**-0.5 if c.tied else 0.5
        self.embed = nnx.Param(nnx.initializers.normal(scale)(rngs.params(), (c.vocab, c.width)))


class _Head(nnx.Module):
    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        self.norm = nnx.Param(jnp.ones(c.width))
        if not c.tied:
            self.head = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (c.width, c.vocab)))


def parts(c: DecoderConfig, first: bool, last: bool) -> tuple[Part, ...]:
    """The single parts that the first and the last stage hold; a tied table on two stages belongs to the first."""
    embedding, head = partial(_Embedding, c), Part(partial(_Head, c))
    if first and last:
        return (Part(embedding), head)
    if first:
        return (Part(embedding, tie="lent" if c.tied else ""),)
    if last:
        return (Part(embedding, tie="borrowed"), head) if c.tied else (head,)
    return ()


def run_layers(
    layers: Params | None,
    c: DecoderConfig,
    axes: Axes,
    x_BTD: Array,
    segments_BT: Array,
    positions_BT: Array,
    added: Mapping[int, Array] | None = None,
) -> Float[Array, "B T D"]:
    """The stage's blocks; tokens attend causally within their own segment.

    ``added`` holds values ``[B, T, D]`` that are added to the inputs of layers, by the layer's number in the stage.
    """
    if not added:
        return scan_layers(lambda x, p: _layer(p, c, axes, x, segments_BT, positions_BT), x_BTD, layers, c.remat)
    added_NBTD = jnp.stack(list(added.values()))
    # The layers stay one stack: slices of it would be transformed weights, which backward would have to keep.
    slots = [list(added).index(layer) if layer in added else -1 for layer in range(len(jax.tree.leaves(layers)[0]))]

    def body(x_BTD: Array, given: Params) -> Array:
        slot = given["slot"]
        x_BTD = x_BTD + jnp.where(slot >= 0, added_NBTD[jnp.maximum(slot, 0)], 0)
        return _layer(given["layer"], c, axes, x_BTD, segments_BT, positions_BT)

    return scan_layers(body, x_BTD, {"layer": layers, "slot": jnp.asarray(slots)}, c.remat)


def _layer(p: Params, c: DecoderConfig, axes: Axes, x_BTD: Array, segments_BT: Array, positions_BT: Array) -> Array:
    a: Any = p["attn"]
    h_BTD = rms_norm(x_BTD, p["attn_norm"], c.norm_eps)
    q, k, v = (split_heads(y, c.head_width) for y in column_parallel(h_BTD, [(a[n], None) for n in "qkv"], axes))
    q, k = rotate(q, positions_BT, c.rope_theta), rotate(k, positions_BT, c.rope_theta)
    y_BTHK = attention(q, k, v, segments_BT, "causal")
    x_BTD = x_BTD + row_parallel(y_BTHK.reshape(*y_BTHK.shape[:2], -1), a["o"], axes)
    m: Any = p["mlp"]
    h_BTD = rms_norm(x_BTD, p["mlp_norm"], c.norm_eps)
    gate, up = column_parallel(h_BTD, [(m["gate"], None), (m["up"], None)], axes)
    return x_BTD + row_parallel(jax.nn.silu(gate) * up, m["down"], axes)


def logits(p: Params, c: DecoderConfig, axes: Axes, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """This rank's part of the logits of hidden states after the final norm."""
    return vocabulary_logits(x_BTD, p["embed"].T if c.tied else p["head"], axes, c.vocab)


def loss(
    p: Params,
    c: DecoderConfig,
    axes: Axes,
    x_BTD: Float[Array, "B T D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
) -> Float[Array, ""]:
    """Sum of the tokens' weighted losses, from hidden states after the final norm.

    Checkpointed: backward computes the logits again, a product with the head. So neither fp32 numbers for the whole
    vocabulary nor a transposed copy of a tied head are kept per microbatch in flight.
    """
    name = "embed" if c.tied else "head"

    @jax.checkpoint
    def summed(x_BTD: Array, head: Array, targets_BT: Array, weights_BT: Array) -> Array:
        logits_BTV = logits({name: head}, c, axes, x_BTD)
        return jnp.sum(cross_entropy(logits_BTV, targets_BT, axes) * weights_BT)

    return summed(x_BTD, p[name], targets_BT, weights_BT)


def merge_modality_tokens(
    x_BTD: Float[Array, "B T D"], tokens_RTD: Float[Array, "R Tm D"], index_BT: Int[Array, "B T"], cells: int
) -> Float[Array, "B T D"]:
    """Puts modality tokens at the placeholders; or, in reverse, hidden states of placeholders into rows of tokens.

    Args:
      x_BTD: text embeddings of this rank's rows.
      tokens_RTD: modality tokens of the same cells.
      index_BT: index into the flattened tokens of the row's cell, or -1 where there is no placeholder.
      cells: cells among these rows; both row dimensions are cell-major.
    """

    @jax.checkpoint  # else backward would keep the mask for every feature
    def merge(x_BTD: Array, tokens_RTD: Array, index_BT: Array) -> Array:
        flat_CND = tokens_RTD.reshape(cells, -1, x_BTD.shape[-1])
        picked_BTD = jax.vmap(lookup)(flat_CND, index_BT.reshape(cells, -1)).reshape(x_BTD.shape)
        return jnp.where((index_BT >= 0)[..., None], picked_BTD.astype(x_BTD.dtype), x_BTD)

    return merge(x_BTD, tokens_RTD, index_BT)
