"""Experts of a layer: parameters, and the weighted results of each token's experts.

Shapes: B rows, T tokens of this rank, N tokens of all tp ranks in a flat list, k experts a token, D width, F hidden
units local to this rank, E experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.mesh.spread import EXPERT_MLP, EXPERTS, Axes
from mmjax.models.context import Context
from mmjax.models.experts.capacity import within_capacity
from mmjax.models.experts.exchange import AllToAll, LocalExperts, compute_all_to_all, compute_in_ring, compute_local
from mmjax.models.experts.mlp import expert_mlps, reads_in_place
from mmjax.models.experts.router import Router, route, router_sums
from mmjax.models.sequence_parallel import sp_scatter


class Experts(nnx.Module):
    """Parameters of the router and of all experts of a layer."""

    def __init__(self, router: Router, width: int, hidden: int, layers: int, rngs: nnx.Rngs):
        """Creates them.

        Args:
          router: settings of the router.
          width: width of the features.
          hidden: hidden units of one expert.
          layers: number of layers of the module, which scales the initial output.
          rngs: keys.
        """
        init = nnx.initializers.lecun_normal(batch_axis=0)
        inner, outer = (EXPERTS, "embed", EXPERT_MLP), (EXPERTS, EXPERT_MLP, "embed")
        shape = (router.experts, width, hidden)
        self.router = nnx.Param(
            nnx.initializers.lecun_normal()(rngs.params(), (width, router.experts)), dims=("embed", "router")
        )
        if router.norm_eps is not None:
            self.router_norm = nnx.Param(jnp.ones(width), dims=("embed",))
        if router.scaled:
            self.expert_scale = nnx.Param(jnp.ones(router.experts), dims=("router",), in_fp32=True)
        if router.has_bias:
            self.router_bias = nnx.Param(jnp.zeros(router.experts), dims=("router",), load_rate=router.bias_rate)
        self.gate = nnx.Param(init(rngs.params(), shape), dims=inner)
        self.up = nnx.Param(init(rngs.params(), shape), dims=inner)
        down = nnx.initializers.variance_scaling(1.0 / (2 * layers), "fan_in", "truncated_normal", batch_axis=0)
        self.down = nnx.Param(down(rngs.params(), (router.experts, hidden, width)), dims=outer)


def apply_experts(
    router: Router,
    p: Mapping[str, Any],
    context: Context,
    h_BTD: Float[Array, "B T D"],
    losses: Collection[str],
    scored_BTD: Float[Array, "B T D"] | None = None,
    *,
    activation: str = "silu",
) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, ""]]]:
    """The weighted results of each token's experts, and the sum over the local tokens of each of ``losses``, by name.

    Inside ``shard_map``. Under sequence parallelism each tp rank routes its tokens, which are gathered with their
    choices, and its tokens' results are scattered to it.

    Args:
      router: settings of the router.
      p: arrays or handles: "router", "gate", "up" and "down", maybe "router_bias", "router_norm" and "expert_scale".
      context: its inputs have the "segments" of the local tokens.
      h_BTD: normed features of the local tokens.
      losses: names of ``router_sums``.
      scored_BTD: features that the router reads; by default ``h_BTD``.
      activation: a key of ``ACTIVATIONS``, of the experts' gates.
    """
    axes = context.axes
    routing = route(router, p, h_BTD if scored_BTD is None else scored_BTD, context.inputs["segments"] > 0)
    sums = router_sums(router, routing, context, losses)
    experts_BTk, beyond = _computed(router, context, routing.experts_BTk)
    h_BTD, experts_BTk, weights_BTk = (
        lax.all_gather(x, axes.sp, axis=1, tiled=True) if axes.sp else jax_compat.to_varying(x, axes.tp)
        for x in (h_BTD, experts_BTk, routing.weights_BTk)
    )
    width = h_BTD.shape[-1]
    flat = (h_BTD.reshape(-1, width), *(x.reshape(-1, router.per_token) for x in (experts_BTk, weights_BTk)))
    y_ND, dropped = _exchanged(router, p, axes, *flat, activation=activation)
    if "router_dropped" in losses:
        # Ranks of tp send the same choices, or those of their own experts alone.
        repeated = 1 if axes.has_whole_experts else lax.axis_size(axes.tp)
        dropped = jax_compat.to_varying(dropped, (*axes.dp, *axes.positions, *axes.tp))
        sums["router_dropped"] = (lax.psum(dropped, axes.tp) / repeated + beyond) / router.per_token
    y_BTD = y_ND.reshape(h_BTD.shape)
    return sp_scatter(y_BTD, axes.sp) if axes.sp else lax.psum(y_BTD, axes.tp), sums


def _computed(
    router: Router, context: Context, experts_BTk: Int[Array, "B T k"]
) -> tuple[Int[Array, "B T k"], Float[Array, ""]]:
    """The experts that compute each token, and the number of choices beyond their capacity, of all ranks of tp.

    Such a choice has the number that no expert has, as padding's have. Tokens that are generated have all of theirs.
    """
    if not router.capacity or context.cache is not None:
        return experts_BTk, jnp.zeros(())
    is_chosen_BTk = experts_BTk < router.experts
    is_computed_BTk = is_chosen_BTk & within_capacity(router, context, experts_BTk)
    beyond = jnp.sum(is_chosen_BTk & ~is_computed_BTk).astype(jnp.float32)
    return jnp.where(is_computed_BTk, experts_BTk, router.experts), lax.psum(beyond, context.axes.sp)


def _exchanged(
    router: Router,
    p: Mapping[str, Any],
    axes: Axes,
    h_ND: Array,
    experts_Nk: Array,
    weights_Nk: Array,
    *,
    activation: str,
) -> tuple[Float[Array, "N D"], Float[Array, ""]]:
    """The sum of each token's experts, with tp this rank's part of it; and the number of choices that were dropped."""
    experts = LocalExperts.of(axes, p["gate"].shape[0])
    same_tokens = tuple(axis for axis in axes.ep if axis not in axes.exchange)
    flat = jax_compat.tree_to_varying((h_ND, experts_Nk, weights_Nk), same_tokens)
    compute, none = partial(expert_mlps, p, activation=activation), jnp.zeros(())
    if not axes.exchange:
        return lax.psum(compute_local(compute, experts, *flat), same_tokens), none
    if axes.ep_way == "ring" or same_tokens:
        return lax.psum(compute_in_ring(compute, experts, axes.exchange, *flat), same_tokens), none
    exchange = AllToAll(
        axes=axes.exchange,
        tokens=partial(router.buffer_tokens, experts=experts.count),
        rows=partial(router.buffer_rows, experts=experts.count),
    )
    return compute_all_to_all(compute, experts, exchange, *flat, halves=reads_in_place(p))
