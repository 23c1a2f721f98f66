"""Experts of a layer: parameters, dispatch of tokens to their experts, and combination of the results.

Shapes: B rows, T tokens of this rank, N tokens of all tp ranks in a flat list, k experts a token, M = N·k rows, D width,
F hidden units local to this rank, E experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.models.context import Context
from mmjax.models.experts.grouped import grouped_products
from mmjax.models.experts.router import Router, chosen_counts, route, router_sums
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
        inner, outer = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
        shape = (router.experts, width, hidden)
        self.router = nnx.Param(
            nnx.initializers.lecun_normal()(rngs.params(), (width, router.experts)), dims=("embed", "router")
        )
        if router.has_bias:
            self.router_bias = nnx.Param(jnp.zeros(router.experts), dims=("router",), load_rate=router.bias_rate)
        self.gate = nnx.Param(init(rngs.params(), shape), dims=inner)
        self.up = nnx.Param(init(rngs.params(), shape), dims=inner)
        down = nnx.initializers.variance_scaling(1.0 / (2 * layers), "fan_in", "truncated_normal", batch_axis=0)
        self.down = nnx.Param(down(rngs.params(), (router.experts, hidden, width)), dims=outer)


class Dispatch(NamedTuple):
    """The rows of tokens, sorted by expert.

    Attributes:
      tokens_M: the token of each row.
      rows_Nk: the row of each token and choice; rows of padding lie behind all groups.
      sizes_E: number of rows of each expert.
    """

    tokens_M: Int[Array, " M"]
    rows_Nk: Int[Array, "N k"]
    sizes_E: Int[Array, " E"]


def apply_experts(
    router: Router, p: Mapping[str, Any], context: Context, h_BTD: Float[Array, "B T D"], losses: Collection[str]
) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, ""]]]:
    """The weighted results of each token's experts, and the sum over the local tokens of each of ``losses``, by name.

    Inside ``shard_map``. Under sequence parallelism each tp rank routes its tokens, which are gathered with their
    choices, and its tokens' results are scattered to it.

    Args:
      router: settings of the router.
      p: arrays or handles: "router", "gate", "up" and "down", maybe "router_bias".
      context: its inputs have the "segments" of the local tokens.
      h_BTD: normed features of the local tokens.
      losses: names of ``router_sums``.
    """
    axes = context.axes
    routing = route(router, p, h_BTD, context.inputs["segments"] > 0)
    sums = router_sums(router, routing, context, losses)
    h_BTD, experts_BTk, weights_BTk = (
        lax.all_gather(x, axes.sp, axis=1, tiled=True) if axes.sp else jax_compat.to_varying(x, axes.tp)
        for x in (h_BTD, routing.experts_BTk, routing.weights_BTk)
    )
    dispatch = sort_by_expert(experts_BTk.reshape(-1, router.per_token), router.experts)
    y_ND = compute_experts(p, h_BTD.reshape(-1, h_BTD.shape[-1]), weights_BTk.reshape(-1, router.per_token), dispatch)
    y_BTD = y_ND.reshape(h_BTD.shape)
    return sp_scatter(y_BTD, axes.sp) if axes.sp else lax.psum(y_BTD, axes.tp), sums


def sort_by_expert(experts_Nk: Int[Array, "N k"], experts: int) -> Dispatch:
    """Sorts the choices of all tokens by expert; the number ``experts`` stands for none."""
    per_token, flat_M = experts_Nk.shape[1], experts_Nk.reshape(-1)
    order_M = jnp.argsort(flat_M, stable=True)
    rows_M = jnp.zeros_like(order_M).at[order_M].set(jnp.arange(order_M.size, dtype=order_M.dtype))
    return Dispatch(order_M // per_token, rows_M.reshape(experts_Nk.shape), chosen_counts(flat_M, experts))


def compute_experts(
    p: Mapping[str, Any], h_ND: Float[Array, "N D"], weights_Nk: Float[Array, "N k"], dispatch: Dispatch
) -> Float[Array, "N D"]:
    """The sum of the results of each token's experts, times their weights; with tp this rank's part of the sum."""
    x_MD = send_rows(h_ND, dispatch)
    gate_MF, up_MF = grouped_products(x_MD, [p["gate"], p["up"]], dispatch.sizes_E)
    # The weights multiply hidden units, so that backward needs no results of the last product.
    weights_M = send_weights(weights_Nk, dispatch).astype(gate_MF.dtype)
    (y_MD,) = grouped_products(jax.nn.silu(gate_MF) * up_MF * weights_M[:, None], [p["down"]], dispatch.sizes_E)
    return add_rows(y_MD, dispatch)


@jax.custom_vjp
def send_rows(h_ND: Float[Array, "N D"], dispatch: Dispatch) -> Float[Array, "M D"]:
    """The features of each row's token. Backward adds the rows of a token, without a scatter."""
    return h_ND[dispatch.tokens_M]


@jax.custom_vjp
def add_rows(y_MD: Float[Array, "M D"], dispatch: Dispatch) -> Float[Array, "N D"]:
    """The sum of each token's rows. Backward is ``send_rows``."""
    return _added(y_MD, dispatch)


def _added(y_MD: Array, dispatch: Dispatch) -> Array:
    per_token = (y_MD[rows_N].astype(jnp.float32) for rows_N in dispatch.rows_Nk.T)
    return sum(per_token, start=jnp.zeros((), jnp.float32)).astype(y_MD.dtype)


def send_weights(weights_Nk: Float[Array, "N k"], dispatch: Dispatch) -> Float[Array, " M"]:
    """The weight of each row's choice."""
    zeros_M = jnp.zeros_like(dispatch.tokens_M, weights_Nk.dtype)
    return zeros_M.at[dispatch.rows_Nk].set(weights_Nk, unique_indices=True)


send_rows.defvjp(
    lambda h_ND, dispatch: (send_rows(h_ND, dispatch), dispatch),
    lambda dispatch, dx_MD: (_added(dx_MD, dispatch), None),
)
add_rows.defvjp(
    lambda y_MD, dispatch: (add_rows(y_MD, dispatch), dispatch),
    lambda dispatch, dy_ND: (dy_ND[dispatch.tokens_M], None),
)
