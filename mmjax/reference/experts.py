"""Mixture of experts on one sample: all experts compute all tokens, and a token's results are weighted.

Sources: Shazeer et al. 2017 (equations 1 and 2: y = Σ_e G(x)_e E_e(x), with G = 0 for experts that are not chosen),
Fedus et al. 2022, "Switch transformers" (equation 4: the balance loss), Zoph et al. 2022, "ST-MoE" (equation 5: the
z-loss), DeepSeek-V2 (§2.1.2 and 2.2.2: shared experts, groups) and DeepSeek-V3 (equations 12 to 16: sigmoids, the
bias).

Letters in shapes: N tokens of a sample, D width, E experts, G groups of experts, k experts a token.
"""

from __future__ import annotations

import dataclasses
import fractions
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mmjax.reference.arithmetic import Arrays, activate, matmul, rms_norm

if TYPE_CHECKING:
    from mmjax.models.llama.config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class RouterSums:
    """Sums of the routers of some layers over the tokens of a sample.

    Attributes:
      losses: by name, "balance_loss" and "router_z_loss", of which those with a weight are there. Each is a mean over
        the layers that have experts.
      loads: by leaf of a router's bias, such as "llm/layers/000/experts/router_bias", the number of tokens that chose
        each expert [E].
    """

    losses: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    loads: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

    def __add__(self, other: RouterSums) -> RouterSums:
        losses = dict(self.losses)
        for name, value in other.losses.items():
            losses[name] = losses.get(name, 0.0) + value
        return RouterSums(losses, self.loads | other.loads)


def has_experts(decoder: DecoderConfig, layer: int) -> bool:
    """Whether a layer, counted from 0, has experts: all but the first `dense_layers`."""
    return decoder.experts > 0 and layer >= decoder.dense_layers


def mixture(
    leaves: Arrays, prefix: str, decoder: DecoderConfig, x_ND: Float[Array, "N D"], before_ND: Float[Array, "N D"]
) -> tuple[Float[Array, "N D"], RouterSums]:
    """The experts of a layer in place of its mlp, without the residual, and the sums of its router.

    Args:
      leaves: arrays by name, as `dense_leaves` gives them.
      prefix: the prefix of the layer's leaves, such as "llm/layers/000", under which are "experts/router" [D, E],
        "experts/gate", "experts/up" [E, D, F] and "experts/down" [E, F, D], and where they exist
        "experts/router_bias" [E], "experts/router_norm" [D], "experts/expert_scale" [E], "shared/gate" and so on, and
        "shared_gate" [D, 1].
      decoder: the settings.
      x_ND: the normalised features of all tokens of a sample.
      before_ND: the same before they were normalised, which a router with a norm of its own reads.
    """
    scored_ND = x_ND
    if decoder.router_norm:
        scored_ND = rms_norm(leaves[f"{prefix}/experts/router_norm"], before_ND, decoder.norm_eps)
        scored_ND = scored_ND / math.sqrt(decoder.width)
    logits_NE = matmul(scored_ND, leaves[f"{prefix}/experts/router"])
    if decoder.router == "softmax":
        scores_NE = jnp.exp(logits_NE - logits_NE.max(axis=1, keepdims=True))
        scores_NE = probabilities_NE = scores_NE / scores_NE.sum(axis=1, keepdims=True)
    else:
        scores_NE = 1 / (1 + jnp.exp(-logits_NE))
        probabilities_NE = scores_NE / scores_NE.sum(axis=1, keepdims=True)
    bias_E = leaves[f"{prefix}/experts/router_bias"] if decoder.router_bias else jnp.zeros(decoder.experts)
    chosen_NE = _chosen(decoder, jax.lax.stop_gradient(scores_NE + bias_E))
    weights_NE = jnp.where(chosen_NE, scores_NE, 0)
    if decoder.router_normalised:
        weights_NE = weights_NE / weights_NE.sum(axis=1, keepdims=True)
    weights_NE = decoder.router_scale * weights_NE
    if decoder.expert_scale:
        weights_NE = weights_NE * leaves[f"{prefix}/experts/expert_scale"]

    if decoder.expert_capacity:
        weights_NE = jnp.where(_within_capacity(decoder, scores_NE + bias_E, chosen_NE), weights_NE, 0)

    y_ND = jnp.zeros_like(x_ND)
    for expert in range(decoder.experts):
        gate, up, down = (leaves[f"{prefix}/experts/{name}"][expert] for name in ("gate", "up", "down"))
        hidden = activate(decoder.activation, matmul(x_ND, gate)) * matmul(x_ND, up)
        y_ND = y_ND + weights_NE[:, expert : expert + 1] * matmul(hidden, down)
    if decoder.shared_experts:
        shared_ND = gated_mlp(leaves, f"{prefix}/shared", x_ND, decoder.activation)
        if decoder.shared_gate:
            shared_ND = shared_ND / (1 + jnp.exp(-matmul(x_ND, leaves[f"{prefix}/shared_gate"])))
        y_ND = y_ND + shared_ND

    layers, losses = decoder.layers - decoder.dense_layers, {}
    if decoder.balance_loss:  # a token chooses k experts, so the shares of a sample sum to k
        share_E, mean_E = chosen_NE.mean(axis=0, dtype=x_ND.dtype), probabilities_NE.mean(axis=0)
        losses["balance_loss"] = len(x_ND) * decoder.experts * jnp.sum(share_E * mean_E) / layers
    if decoder.router_z_loss:
        losses["router_z_loss"] = jnp.sum(jax.nn.logsumexp(logits_NE, axis=1) ** 2) / layers
    loads = {f"{prefix}/experts/router_bias": chosen_NE.sum(axis=0)} if decoder.router_bias else {}
    return y_ND, RouterSums(losses, loads)


def gated_mlp(leaves: Arrays, prefix: str, x_ND: jax.Array, activation: str = "silu") -> jax.Array:
    """The gated mlp with the leaves ``{prefix}/gate``, ``up`` and ``down``, and their biases where they exist.

    ``activation`` is a key of ``ACTIVATIONS``, of the gate.
    """

    def product(name: str, y: jax.Array) -> jax.Array:
        return matmul(y, leaves[f"{prefix}/{name}"]) + leaves.get(f"{prefix}/{name}_bias", 0.0)

    return product("down", activate(activation, product("gate", x_ND)) * product("up", x_ND))


def _chosen(decoder: DecoderConfig, scores_NE: Float[Array, "N E"]) -> Bool[Array, "N E"]:
    """Whether an expert is among the k best of a token, in the best groups."""
    if decoder.router_groups > 1:
        members_NGe = scores_NE.reshape(len(scores_NE), decoder.router_groups, -1)
        ordered_NGe = jnp.sort(members_NGe, axis=2)[..., ::-1]
        best = ordered_NGe[..., :1] if decoder.router == "softmax" else ordered_NGe[..., :2]
        is_in_NG = _among_best(best.sum(axis=2), decoder.router_group_limit)
        scores_NE = jnp.where(is_in_NG[..., None], members_NGe, -jnp.inf).reshape(scores_NE.shape)
    return _among_best(scores_NE, decoder.experts_per_token)


def _within_capacity(
    decoder: DecoderConfig, scores_NE: Float[Array, "N E"], chosen_NE: Bool[Array, "N E"]
) -> Bool[Array, "N E"]:
    """Whether a token is among the first ceil(capacity · N · k / E) that an expert takes: those whose best expert it is
    in the order of tokens, then those whose second best it is, and so on.
    """
    scores_NE = jnp.where(chosen_NE, scores_NE, -jnp.inf)
    choice_NE = (scores_NE[:, None, :] > scores_NE[:, :, None]).sum(axis=2)
    mine, others = choice_NE[:, None], choice_NE[None]
    tokens = jnp.arange(len(scores_NE))
    is_before_NNE = (others < mine) | ((others == mine) & (tokens[None, :] < tokens[:, None])[..., None])
    places_NE = (is_before_NNE & chosen_NE[None]).sum(axis=1)
    capacity = fractions.Fraction(str(decoder.expert_capacity))
    return places_NE < math.ceil(capacity * len(scores_NE) * decoder.experts_per_token / decoder.experts)


def _among_best(scores_NE: jax.Array, count: int) -> jax.Array:
    """Whether fewer than `count` scores of a row are better; of equal scores the first is better."""
    places = jnp.arange(scores_NE.shape[1])
    mine, others = scores_NE[:, :, None], scores_NE[:, None, :]
    is_better = (others > mine) | ((others == mine) & (places[None, :] < places[:, None]))
    return is_better.sum(axis=2) < count
