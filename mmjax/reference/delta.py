"""Gated delta networks on one sample, token after token (Yang et al. 2025, "Gated Delta Networks", equation 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.reference.arithmetic import Arrays, activate, matmul, rms_norm

if TYPE_CHECKING:
    from mmjax.models.llama.config import DecoderConfig


def delta_rule(
    q_NGK: Float[Array, "N G K"],
    k_NGK: Float[Array, "N G K"],
    v_NHV: Float[Array, "N H V"],
    decay_NH: Float[Array, "N H"],
    strength_NH: Float[Array, "N H"],
) -> Float[Array, "N H V"]:
    """The values that tokens read of their heads' states, which begin as 0: S ← a S + b k (v - a Sᵀk)ᵀ, then Sᵀq.

    Queries and keys are divided by their lengths, queries by sqrt(K) too; value head h has key head h // (H / G).

    Args:
      q_NGK, k_NGK, v_NHV: queries, keys and values of a sample's N tokens.
      decay_NH: a, from 0 to 1.
      strength_NH: b, from 0 to 1.
    """
    q, k = (x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q_NGK, k_NGK))
    groups = v_NHV.shape[1] // k.shape[1]
    q, k = jnp.repeat(q * q.shape[-1] ** -0.5, groups, axis=1), jnp.repeat(k, groups, axis=1)

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, decay, strength = token
        state = state * decay[:, None, None]
        predicted = jnp.sum(state * k[:, :, None], axis=1)
        state = state + k[:, :, None] * (strength[:, None] * (v - predicted))[:, None, :]
        return state, jnp.sum(state * q[:, :, None], axis=1)

    start = jnp.zeros((v_NHV.shape[1], k.shape[2], v_NHV.shape[2]), v_NHV.dtype)
    return jax.lax.scan(step, start, (q, k, v_NHV, decay_NH, strength_NH))[1]


def delta_output(leaves: Arrays, prefix: str, decoder: DecoderConfig, normed_ND: jax.Array) -> Float[Array, "N HV"]:
    """The gated output of a delta layer, before its last product.

    Args:
      leaves: dense leaves, by names such as "llm/layers/000/delta/q".
      prefix: such as "llm/layers/000/delta".
      decoder: the settings.
      normed_ND: normed features of a sample.
    """
    length = len(normed_ND)

    def product(name: str) -> jax.Array:
        return matmul(normed_ND, leaves[f"{prefix}/{name}"])

    def filtered(name: str, width: int) -> jax.Array:
        taps_FL = leaves[f"{prefix}/{name}_filter"]
        before = jnp.pad(product(name), ((taps_FL.shape[1] - 1, 0), (0, 0)))
        total = sum(before[tap : tap + length] * taps_FL[:, tap] for tap in range(taps_FL.shape[1]))
        return activate("silu", jnp.asarray(total)).reshape(length, -1, width)

    steps = jax.nn.softplus(product("decay") + leaves[f"{prefix}/step_bias"])
    y_NHV = delta_rule(
        filtered("q", decoder.delta_key_dim),
        filtered("k", decoder.delta_key_dim),
        filtered("v", decoder.delta_value_dim),
        jnp.exp(-jnp.exp(leaves[f"{prefix}/log_rate"]) * steps),
        1 / (1 + jnp.exp(-product("strength"))),
    )
    y_NHV = rms_norm(leaves[f"{prefix}/norm"], y_NHV, decoder.norm_eps)
    return y_NHV.reshape(length, -1) * activate("silu", product("gate"))
