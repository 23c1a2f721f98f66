"""Attention of the LLM's layers on one sample."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from mmjax.reference.arithmetic import Arrays, Tables, matmul, rms_norm, rotate_to, softmax_attention
from mmjax.reference.latent import latent_heads
from mmjax.reference.positions import token_positions
from mmjax.reference.rotary import rotary_magnitude, rotary_tables

if TYPE_CHECKING:
    from mmjax.models.llama.config import DecoderConfig


KeysByKind = dict[bool, tuple[jax.Array, jax.Array]]
"""Keys and values [N, G, K] of the last layer without a window (True) and with one (False)."""
Masks = tuple[jax.Array, jax.Array]
"""Masks of layers with a window or chunks and of layers without, see `masks.masks_of`."""


def scaled_norm(leaves: Arrays, name: str, decoder: DecoderConfig, x_ND: jax.Array) -> jax.Array:
    """RMSNorm with the scale of this name [D], to which `Decoder.norm_plus_one` adds 1. Returns [N, D]."""
    return rms_norm(leaves[name] + (1.0 if decoder.norm_plus_one else 0.0), x_ND, decoder.norm_eps)


def attention_output(
    leaves: Arrays,
    layer: int,
    decoder: DecoderConfig,
    normed: jax.Array,
    tables: Tables | None,
    masks: Masks | None,
    earlier: KeysByKind,
) -> jax.Array:
    """The output of a layer's attention. `earlier` has the keys and values of the last layer of each kind, which the
    last `Decoder.kv_shared_layers` read; others put theirs there.
    """
    prefix, length = f"llm/layers/{layer:03d}", normed.shape[0]
    is_last = decoder.full_every > 0 and (layer + 1) % decoder.full_every == 0
    is_global = not (decoder.window or decoder.chunk) or layer < decoder.full_layers or is_last
    decoder = _of_layer(decoder, is_global=is_global)
    width, magnitude = decoder.head_width, rotary_magnitude(decoder)
    if tables is None:
        tables = rotary_tables(decoder, token_positions(length, ()))

    def optional(name: str, *, exists: bool) -> jax.Array | float:
        return leaves[f"{prefix}/{name}"] if exists else 0.0

    def heads(name: str, count: int) -> jax.Array:
        projected = matmul(normed, leaves[f"{prefix}/attn/{name}"])
        return (projected + optional(f"attn/{name}_bias", exists=decoder.qkv_bias)).reshape(length, count, -1)

    def rotated(name: str, x_NHK: jax.Array) -> jax.Array:
        if decoder.qk_norm:
            normed_as = x_NHK.reshape(length, -1) if decoder.qk_norm_whole else x_NHK
            x_NHK = scaled_norm(leaves, f"{prefix}/attn/{name}_norm", decoder, normed_as).reshape(x_NHK.shape)
        if decoder.nope_every and (layer + 1) % decoder.nope_every == 0:
            return x_NHK
        rotated_width = decoder.rotary_width
        turned = magnitude * rotate_to(x_NHK[..., :rotated_width], tables)
        return jnp.concatenate([turned, x_NHK[..., rotated_width:]], axis=-1)

    gate = None
    if decoder.kv_rank:
        q, k, v = latent_heads(leaves, f"{prefix}/attn", decoder, normed, tables, magnitude)
    else:
        q = heads("q", decoder.heads)
        if decoder.attention_gate:
            q, gate = q[..., :width], q[..., width:].reshape(length, -1)
        q = rotated("q", q)
        if layer < decoder.layers - decoder.kv_shared_layers:
            k = heads("k", decoder.kv_heads)
            v = k if decoder.keys_as_values else heads("v", decoder.kv_heads)
            v = rms_norm(jnp.ones(width), v, decoder.norm_eps) if decoder.v_norm else v
            earlier[is_global] = rotated("k", k), v
        k, v = earlier[is_global]
    if decoder.score_width:
        q = q * (width / decoder.score_width) ** 0.5
    if masks is None:
        window = 0 if is_global else decoder.window
        mixed = softmax_attention(q, k, v, causal=True, window=window, cap=decoder.score_cap)
    else:
        mixed = softmax_attention(q, k, v, causal=False, read_NN=masks[is_global], cap=decoder.score_cap)
    if gate is not None:
        mixed = mixed / (1 + jnp.exp(-gate))
    return matmul(mixed, leaves[f"{prefix}/attn/o"]) + optional("attn/o_bias", exists=decoder.o_bias)


def _of_layer(decoder: DecoderConfig, *, is_global: bool) -> DecoderConfig:
    """The settings of the heads and the rotation of a layer without, or with, a window or chunks."""
    changes: dict[str, Any] = {"global_head_dim": 0, "global_kv_heads": 0}
    if is_global:
        changes["head_dim"] = decoder.global_head_dim or decoder.head_dim
        changes["kv_heads"] = decoder.global_kv_heads or decoder.kv_heads
        return dataclasses.replace(decoder, **changes)
    changes["keys_as_values"] = False
    if decoder.local_rope_theta:
        changes |= {"rope_theta": decoder.local_rope_theta, "local_rope_theta": 0.0, "rope_scaling": "none"}
        changes |= {"rope_factor": 1.0, "rope_context": 0, "rope_turns": ()}
        changes["rope_share"] = 1.0 if decoder.rope_scaling == "proportional" else decoder.rope_share
    return dataclasses.replace(decoder, **changes)
