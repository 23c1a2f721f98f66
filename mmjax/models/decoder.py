"""Llama-family decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes: B rows, T tokens, D width, H query heads and G key/value heads local to this rank, K head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.attention import attention
from mmjax.configurable import configurable, divides, not_negative, one_of, positive, require
from mmjax.mesh.submesh import Axes
from mmjax.models.layers import (
    Params,
    column_parallel,
    residual_init,
    rms_norm,
    rotate,
    row_parallel,
    scan_layers,
    split_heads,
    vocabulary_logits,
)
from mmjax.models.parameters import Part


@configurable("Decoder")
@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A language model.

    Attributes:
      preset: name of the preset whose values are the defaults.
      layers, width, heads, kv_heads, mlp: depth, model width, query heads, key/value heads, hidden units.
      head_dim: width of one head; 0 means width / heads.
      vocab: vocabulary size; 0 means the tokenizer's.
      rope_theta: base of the rotary frequencies.
      norm_eps: added to the mean square in RMSNorm.
      tied: the output head is the embedding's transpose.
      remat: what backward finds kept: ``none`` recomputes nothing, ``dots`` keeps products, ``full`` recomputes all.
    """

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "vicuna-7b": dict(layers=32, width=4096, heads=32, kv_heads=32, mlp=11008, vocab=32000),
        "llama3-8b": dict(layers=32, width=4096, heads=32, kv_heads=8, mlp=14336, vocab=128256, rope_theta=500000.0),
        "llama3-70b": dict(layers=80, width=8192, heads=64, kv_heads=8, mlp=28672, vocab=128256, rope_theta=500000.0),
    }

    preset: str = "tiny"
    layers: int = 4
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 0
    mlp: int = 192
    vocab: int = 0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False
    remat: str = "none"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "mlp", "rope_theta", "norm_eps"):
            positive(f"Decoder.{name}", getattr(self, name))
        for name in ("vocab", "head_dim"):
            not_negative(f"Decoder.{name}", getattr(self, name))
        divides("Decoder.kv_heads", self.kv_heads, self.heads, "Decoder.heads")
        if not self.head_dim:
            divides("Decoder.heads", self.heads, self.width, "Decoder.width")
        require(self.head_width % 2 == 0, "Decoder.head_dim", self.head_width, "must be even, such as 16")
        one_of("Decoder.remat", self.remat, ("none", "dots", "full"))

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.width // self.heads


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
    """The single parts that the first and the last stage hold; a tied table on two stages is the first one's."""
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

    ``added`` is what enters some of the stage's layers, by their number in it: ``[B, T, D]``, added to their input.
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
    """This rank's part of the logits of hidden states after the final norm.

    A tied head transposes the embedding inside a checkpointed body, so that no transposed copy is kept for backward.
    """
    if c.tied:
        return jax.checkpoint(lambda x, table: vocabulary_logits(x, table.T, axes, c.vocab))(x_BTD, p["embed"])
    return vocabulary_logits(x_BTD, p["head"], axes, c.vocab)


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
    B, T, D = x_BTD.shape
    flat_CND = tokens_RTD.reshape(cells, -1, D)
    index_CN = index_BT.reshape(cells, -1)
    picked = jnp.take_along_axis(flat_CND, jnp.maximum(index_CN, 0)[..., None], axis=1).reshape(B, T, D)
    return jnp.where((index_BT >= 0)[..., None], picked.astype(x_BTD.dtype), x_BTD)
