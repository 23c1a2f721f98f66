"""Routers: the experts of each token, their weights, and sums over tokens for losses.

A router scores every expert for every token. The best scores decide which experts compute the token, and with which
weights their results are added. Sources: Shazeer et al. (softmax over all, the best k), DeepSeek-V2 (groups) and
DeepSeek-V3 (sigmoids, a bias for the choice). All of it is fp32, and padding chooses no expert.

Shapes: B rows, T tokens of this rank, S tokens of whole rows, N tokens in a flat list, E experts, k experts a token, G
groups of experts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mmjax import jax_compat
from mmjax.models.context import Context
from mmjax.models.experts.sizes import sent_share
from mmjax.models.handles import opened
from mmjax.models.layers import linear
from mmjax.models.norms import rms_norm
from mmjax.models.taps import Value
from mmjax.models.weight_gradients import summed

ROUTER_METRICS = ("router_entropy", "router_fullest")
"""Metrics of every router, without a gradient."""


@dataclass(frozen=True, kw_only=True)
class Router:
    """Settings of a router.

    Attributes:
      experts: number of experts.
      per_token: number of experts that compute a token.
      scores: ``softmax`` over all experts, or ``sigmoid`` of each.
      normalised: whether the weights of a token's experts are divided by their sum.
      scale: factor of the weights.
      groups: number of groups of experts; a token's experts are in the best ``group_limit`` of them.
      group_limit: see ``groups``.
      bias_rate: the change in a step of each expert's bias for the choice, which is not in the weight; ``None`` for no
        bias.
      capacity: the most choices of a sample that an expert computes, over their mean number under equal loads; 0 is no
        limit.
      norm_eps: epsilon of the norm of the features that it reads; ``None`` for no norm. With one they are also divided
        by the root of their width.
      scaled: whether each expert has a learned factor of its weights.
      buffer: tokens and rows of an all-to-all's buffers over their mean numbers under equal loads; 0 stands for the
        worst case.
    """

    experts: int
    per_token: int
    scores: str = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    group_limit: int = 1
    bias_rate: float | None = None
    capacity: float = 0.0
    buffer: float = 0.0
    norm_eps: float | None = None
    scaled: bool = False

    def capacity_of(self, tokens: int) -> int:
        """The most choices that an expert computes of a sample with so many tokens, if there is a ``capacity``.

        It is exact: 1.1 times 10 is 11, and no rounding makes it 12.
        """
        return math.ceil(Fraction(str(self.capacity)) * tokens * self.per_token / self.experts)

    def buffer_tokens(self, tokens: int, experts: int) -> int:
        """The most of a rank's ``tokens`` tokens that it sends to another with ``experts`` experts, which is static."""
        share = sent_share(self.experts, self.per_token, experts)
        return min(tokens, math.ceil(self.buffer * tokens * share)) if self.buffer else tokens

    def buffer_rows(self, tokens: int, experts: int) -> int:
        """Rows of a rank with ``experts`` experts for the choices of ``tokens`` tokens of all ranks: static."""
        worst = tokens * min(self.per_token, experts)
        mean = tokens * self.per_token * experts / self.experts
        return min(worst, math.ceil(self.buffer * mean)) if self.buffer else worst

    def routed_share(self, experts: int, *, all_to_all: bool) -> float:
        """The share of the rows of a rank's products that hold a token's choice, under equal loads.

        Args:
          experts: experts of a rank.
          all_to_all: how ranks exchange tokens; else in a ring, whose buffers hold the worst case.
        """
        tokens = 1 << 20
        rows = self.buffer_rows(tokens, experts) if all_to_all else tokens * min(self.per_token, experts)
        return tokens * self.per_token * experts / self.experts / rows

    @property
    def has_bias(self) -> bool:
        """Whether each expert has a bias for the choice."""
        return self.bias_rate is not None


class Routing(NamedTuple):
    """The choice of a router.

    Attributes:
      experts_BTk: the experts of each token; ``Router.experts``, which no expert has, for padding.
      weights_BTk: fp32 factors of their results; 0 for padding.
      probabilities_BTE: fp32 scores of all experts, whose sum is 1.
      log_sum_BT: fp32 logarithm of the sum of the exponentials of all logits.
    """

    experts_BTk: Int[Array, "B T k"]
    weights_BTk: Float[Array, "B T k"]
    probabilities_BTE: Float[Array, "B T E"]
    log_sum_BT: Float[Array, "B T"]


def route(router: Router, p: Mapping[str, Any], h_BTD: Float[Array, "B T D"], is_token_BT: Array) -> Routing:
    """The experts of each token, inside ``shard_map``.

    Args:
      router: the settings.
      p: "router", the weight ``[D, E]``, and with ``has_bias`` "router_bias" ``[E]``, fp32. The gradient of the bias is
        the number of tokens of each expert: its load, which ``pipeline.loads`` turns into an update.
      h_BTD: normed features.
      is_token_BT: whether a position is a token and not padding.
    """
    if router.norm_eps is not None:
        h_BTD = rms_norm(h_BTD, p["router_norm"], router.norm_eps) * h_BTD.shape[-1] ** -0.5
    logits_BTE = linear(h_BTD, p["router"]).astype(jnp.float32)
    if router.scores == "softmax":
        scores_BTE = probabilities_BTE = jax.nn.softmax(logits_BTE)
    else:
        scores_BTE = jax.nn.sigmoid(logits_BTE)
        probabilities_BTE = scores_BTE / jnp.sum(scores_BTE, axis=-1, keepdims=True)
    choice_BTE = lax.stop_gradient(scores_BTE)
    if router.has_bias:
        choice_BTE += lax.stop_gradient(opened(p["router_bias"]))
    if router.groups > 1:
        choice_BTE = _of_best_groups(router, choice_BTE)
    _, experts_BTk = lax.top_k(choice_BTE, router.per_token)
    weights_BTk = jnp.take_along_axis(scores_BTE, experts_BTk, axis=-1)
    if router.normalised:
        weights_BTk /= jnp.sum(weights_BTk, axis=-1, keepdims=True) + 1e-20
    if router.scaled:
        weights_BTk *= opened(p["expert_scale"])[experts_BTk].astype(jnp.float32)
    weights_BTk = jnp.where(is_token_BT[..., None], weights_BTk * router.scale, 0)
    experts_BTk = jnp.where(is_token_BT[..., None], experts_BTk, router.experts)
    if router.has_bias:
        weights_BTk = _with_loads(opened(p["router_bias"]), experts_BTk, weights_BTk)
    return Routing(experts_BTk, weights_BTk, probabilities_BTE, jax.nn.logsumexp(logits_BTE, axis=-1))


def _of_best_groups(router: Router, choice_BTE: Array) -> Array:
    """The scores of experts in a token's best groups; those of others are -inf."""
    choice_BTGe = choice_BTE.reshape(*choice_BTE.shape[:-1], router.groups, -1)
    best = 1 if router.scores == "softmax" else min(2, choice_BTGe.shape[-1])
    group_scores_BTG = jnp.sum(lax.top_k(choice_BTGe, best)[0], axis=-1)
    _, groups = lax.top_k(group_scores_BTG, router.group_limit)
    is_best_BTG = jnp.any(groups[..., None] == jnp.arange(router.groups), axis=-2)
    return jnp.where(is_best_BTG[..., None], choice_BTGe, -jnp.inf).reshape(choice_BTE.shape)


def _with_loads(bias_E: Array, experts_BTk: Array, weights_BTk: Array) -> Array:
    """The weights; backward gives the bias the number of tokens of each expert as its gradient."""
    like = Value.of(bias_E)

    @jax.custom_vjp
    def identity(bias_E: Array, experts_BTk: Array, weights_BTk: Array) -> Array:
        return weights_BTk

    def backward(experts_BTk: Array, d_weights: Array) -> tuple[Array, None, Array]:
        loads_E = chosen_counts(experts_BTk.reshape(-1), like.shape[0]).astype(like.dtype)
        return summed(loads_E, like.axes), None, d_weights

    identity.defvjp(lambda bias, experts, weights: (weights, experts), backward)
    return identity(bias_E, experts_BTk, weights_BTk)


def chosen_counts(experts_N: Int[Array, " N"], experts: int) -> Int[Array, " E"]:
    """How often each of so many experts is in a list; other numbers are not counted."""
    zeros_E = Value((experts + 1,), jnp.int32, jax_compat.varying_axes(experts_N)).zeros()
    return zeros_E.at[experts_N].add(1)[:experts]


# ---- losses ----------------------------------------------------------------------------------------------------------


def router_sums(
    router: Router, routing: Routing, context: Context, names: Collection[str]
) -> dict[str, Float[Array, ""]]:
    """Sums over the local tokens, by name of a loss or metric.

    ``balance_loss`` is E · Σ_e f_e · P_e of each sample times its tokens, where f_e is the share of the sample's tokens
    that choose expert e and P_e their mean probability of it. Each sample counts alone, so the sum depends neither on
    other samples nor on microbatches and layouts. ``router_z_loss`` is the squared logarithm of the denominator,
    ``router_entropy`` the entropy of the probabilities in nats, and ``router_fullest`` the load of the fullest expert
    over the mean load, of this rank's tokens in this microbatch, times their number.
    """
    is_token_BT = context.inputs["segments"] > 0
    results: dict[str, Array] = {}
    if "balance_loss" in names:
        shares_BTE = _shares_of_samples(router, routing, context)
        results["balance_loss"] = router.experts * jnp.sum(shares_BTE * routing.probabilities_BTE, axis=-1)
    if "router_z_loss" in names:
        results["router_z_loss"] = routing.log_sum_BT**2
    if "router_entropy" in names:
        results["router_entropy"] = lax.stop_gradient(
            -jnp.sum(jax.scipy.special.xlogy(routing.probabilities_BTE, routing.probabilities_BTE), axis=-1)
        )
    sums = {name: jnp.sum(jnp.where(is_token_BT, x_BT, 0)) for name, x_BT in results.items()}
    if "router_fullest" in names:
        loads_E = chosen_counts(routing.experts_BTk.reshape(-1), router.experts)
        sums["router_fullest"] = jnp.max(loads_E) * router.experts / router.per_token
    return {name: total.astype(jnp.float32) for name, total in sums.items()}


def _shares_of_samples(router: Router, routing: Routing, context: Context) -> Float[Array, "B T E"]:
    """The share of the tokens of each token's sample that choose an expert, without a gradient.

    Tokens of a sample may be on several ranks, so the choices and segments of whole rows are gathered.
    """
    segments_BT = context.inputs["segments"]
    segments_BS, experts_BSk = (context.gather_rows(x) for x in (segments_BT, routing.experts_BTk))
    rows, length, _ = experts_BSk.shape
    # A row has at most as many samples as tokens. The last column is of padding.
    counts = Value((rows, length + 1, router.experts + 1), jnp.float32, jax_compat.varying_axes(experts_BSk)).zeros()
    row = jnp.arange(rows)[:, None, None]
    counts = counts.at[row, segments_BS[..., None], experts_BSk].add(1.0)
    chosen_BTE = counts[row[..., 0], segments_BT][..., : router.experts]
    return router.per_token * chosen_BTE / jnp.maximum(jnp.sum(chosen_BTE, axis=-1, keepdims=True), 1)
