"""Multi-head latent attention: queries, keys and values as products of narrow latents (DeepSeek-V2, §2.1).

A layer's features go through narrow products first, whose results, the latents, are the same for all heads. Every rank
of tp has these weights and computes the latents of its own tokens; the products behind them are divided by heads. Under
sequence parallelism latents are gathered, which are narrower than features.

The key of a head is a product of the latent, without position, followed by a rotated key that all heads share.

Shapes: B rows, T tokens of all tp ranks, D width, H heads local to this rank, N width of queries and keys without
position, R width of the rotated part, V width of values.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from mmjax import jax_compat
from mmjax.mesh.spread import Axes
from mmjax.models.context import Context
from mmjax.models.layers import Params, column_parallel, residual_init, saved, split_heads
from mmjax.models.llama import rope
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.norms import rms_norm
from mmjax.models.taps import products

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, in every published model."""


class LatentAttention(nnx.Module):
    """Parameters: "kv_down" to the latent and the shared key, "kv_down_norm" of the latent, "kv_up" to keys and values
    of heads, "o", and "q"; with ``Decoder.q_rank`` "q_down", "q_down_norm" and "q_up" in its place.
    """

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        init, down, up = nnx.initializers.lecun_normal(), ("embed", "latent"), ("latent", "heads")
        queries, values = c.heads * c.head_width, c.heads * c.value_width
        if c.q_rank:
            self.q_down = nnx.Param(init(rngs.params(), (c.width, c.q_rank)), dims=down)
            self.q_down_norm = nnx.Param(jnp.ones(c.q_rank), dims=("latent",))
            self.q_up = nnx.Param(init(rngs.params(), (c.q_rank, queries)), dims=up)
        else:
            self.q = nnx.Param(init(rngs.params(), (c.width, queries)), dims=("embed", "heads"))
        self.kv_down = nnx.Param(init(rngs.params(), (c.width, c.kv_rank + c.rope_head_dim)), dims=down)
        self.kv_down_norm = nnx.Param(jnp.ones(c.kv_rank), dims=("latent",))
        keys = c.heads * c.nope_head_dim
        self.kv_up = nnx.Param(init(rngs.params(), (c.kv_rank, keys + values)), dims=up)
        self.o = nnx.Param(residual_init(c.layers)(rngs.params(), (values, c.width)), dims=("heads", "embed"))


def latent_heads(
    c: DecoderConfig, context: Context, p: Params, h: Array
) -> tuple[Float[Array, "B T H N+R"], Float[Array, "B T H N+R"], Float[Array, "B T H V"]]:
    """Queries and keys with rotary embedding, and values, of the tokens of ``context.tokens``; inside ``shard_map``.

    Args:
      c: the settings, with ``kv_rank``.
      context: the context of the layer, with "positions" in the inputs of its tokens.
      p: the parameters that ``LatentAttention`` names, arrays or handles.
      h: normed features, ``[B, T, D]`` of this rank's tokens under sequence parallelism, else ``[B·T, D]``.
    """
    a: Any = p
    axes, positions = context.axes, context.tokens.positions
    rows = positions.shape[:2]
    down = products(h, [a["kv_down"], a["q_down"]] if c.q_rank else [a["kv_down"]])
    latent, shared = jnp.split(down[0], [c.kv_rank], axis=-1)
    if c.q_rank:
        h = rms_norm(down[1], a["q_down_norm"], LATENT_EPS)
    (q,) = column_parallel(h, [(a["q_up" if c.q_rank else "q"], None)], axes)
    (kv,) = column_parallel(rms_norm(latent, a["kv_down_norm"], LATENT_EPS), [(a["kv_up"], None)], axes)
    q_BTHK = split_heads(q.reshape(*rows, -1), c.head_width)
    k_BTHN, v_BTHV = jnp.split(
        split_heads(kv.reshape(*rows, -1), c.nope_head_dim + c.value_width), [c.nope_head_dim], axis=-1
    )
    q_BTHN, q_BTHR = jnp.split(q_BTHK, [c.nope_head_dim], axis=-1)
    k_BT1R = rope.rotate(c, _of_all_tokens(shared, axes).reshape(*rows, 1, -1), positions)
    # In fp32, so that its gradients are: they are summed over heads.
    k_BTHR = jnp.broadcast_to(k_BT1R.astype(jnp.float32), (*k_BTHN.shape[:3], c.rope_head_dim)).astype(k_BT1R.dtype)
    q_BTHK = jnp.concatenate([q_BTHN, rope.rotate(c, q_BTHR, positions)], axis=-1)
    if (factor := rope.score_factor(c)) != 1:
        q_BTHK *= factor
    # Keys and values are parts of one product, which is kept: with the shared key they are made again in backward.
    return saved(q_BTHK), jnp.concatenate([k_BTHN, k_BTHR], axis=-1), v_BTHV


def _of_all_tokens(shared: Array, axes: Axes) -> Array:
    """The shared key of the tokens of all tp ranks. Backward sums its gradients over the heads of all ranks."""
    if axes.sp:
        return lax.all_gather(shared, axes.sp, axis=1, tiled=True)
    return jax_compat.to_varying(shared, axes.tp)
