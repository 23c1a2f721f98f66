"""Capacity: the choices of a sample's tokens that an expert computes, where their number is limited.

Choices are taken in the order of GShard (Lepikhin et al., algorithm 1) and Switch: the first choices of all tokens of a
sample, then the second ones, and so on, each in the order of tokens. A sample is what it is alone: other samples,
padding, microbatches and layouts change none of its choices.

Shapes: B rows, T tokens of this rank, S tokens of whole rows, k experts a token, M = k · S choices of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from mmjax import jax_compat
from mmjax.models.context import Context
from mmjax.models.experts.router import Router
from mmjax.models.taps import Value


def within_capacity(router: Router, context: Context, experts_BTk: Int[Array, "B T k"]) -> Bool[Array, "B T k"]:
    """Whether a choice of this rank's tokens is among those that its expert computes, inside ``shard_map``.

    Tokens of a sample may be on several ranks, in any order, so choices, segments and orders of whole rows are
    gathered: ``k + 2`` integers a token.

    Args:
      router: its ``capacity`` is above 0.
      context: its inputs have the "segments" of the local tokens.
      experts_BTk: the experts of each token, best first.
    """
    axes = context.axes
    segments_BS, experts_BSk = (context.gather_rows(x) for x in (context.inputs["segments"], experts_BTk))
    order_BS = context.tokens.orders_BT
    if axes.positions:
        order_BS = jax_compat.all_gather_invariant(order_BS, axes.positions, 1)
    is_kept_BSk = _kept(router, *jax_compat.alike(segments_BS, order_BS, experts_BSk))
    if not axes.stream:
        return is_kept_BSk
    tokens = experts_BTk.shape[1]
    return lax.dynamic_slice_in_dim(is_kept_BSk, lax.axis_index(axes.stream) * tokens, tokens, 1)


def _kept(
    router: Router, segments_BS: Int[Array, "B S"], order_BS: Int[Array, "B S"], experts_BSk: Int[Array, "B S k"]
) -> Bool[Array, "B S k"]:
    """Whether fewer choices of the same expert and sample than its capacity are before each choice."""
    rows, length, per_token = experts_BSk.shape
    row = jnp.arange(rows)[:, None]
    counts = Value((rows, length + 1), jnp.int32, jax_compat.varying_axes(segments_BS)).zeros()
    samples_BS = counts.at[row, segments_BS].add(1)[row, segments_BS]
    capacity_BS = jnp.asarray([router.capacity_of(tokens) for tokens in range(length + 1)], jnp.int32)[samples_BS]
    group_BSk = segments_BS[..., None] * (router.experts + 1) + experts_BSk
    turn_BSk = jnp.arange(per_token) * length + order_BS[..., None]
    index_BSk = jnp.broadcast_to(jnp.arange(length * per_token).reshape(length, per_token), group_BSk.shape)
    arrays = group_BSk, turn_BSk, jnp.broadcast_to(capacity_BS[..., None], group_BSk.shape), index_BSk
    flat = jax_compat.alike(*(x.reshape(rows, -1) for x in arrays))
    group_BM, _, capacity_BM, index_BM = lax.sort(flat, dimension=1, num_keys=2)
    place_BM = jnp.broadcast_to(jnp.arange(group_BM.shape[1]), group_BM.shape)
    is_first_BM = jnp.concatenate([jnp.ones_like(group_BM[:, :1], bool), jnp.diff(group_BM, axis=1) != 0], axis=1)
    start_BM = lax.cummax(jnp.where(is_first_BM, place_BM, 0), axis=1)
    is_kept_BM = place_BM - start_BM < capacity_BM
    at_index = jax.vmap(lambda is_kept_M, index_M: is_kept_M.at[index_M].set(is_kept_M, unique_indices=True))
    return at_index(is_kept_BM, index_BM).reshape(group_BSk.shape)
