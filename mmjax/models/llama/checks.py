"""Checks of decoders' settings that read several of them. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mmjax.attention.language import Rules
from mmjax.configurable import divides, one_of, positive, require

if TYPE_CHECKING:
    from mmjax.models.llama.config import DecoderConfig

ROPE_TURNS: Mapping[str, tuple[float, float]] = {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0)}
"""Default ``rope_turns`` of the scalings that read them."""
ROPE_SCALINGS = ("none", "linear", *ROPE_TURNS)
ROUTERS = ("softmax", "sigmoid")


def check_window(c: DecoderConfig) -> None:
    """Requires that window, chunks and the layers without them fit the mask; raises `ConfigError`."""
    rules = Rules.parse(c.mask, "Decoder.mask")
    fix = f"must be Decoder.layers ({c.layers}) or less; set it to 0 if every layer has the window"
    require(c.full_layers <= c.layers, "Decoder.full_layers", c.full_layers, fix)
    fix = "the other layers have no window; set Decoder.window, such as 4096, or leave it 0"
    for name in ("full_layers", "full_every"):
        value = getattr(c, name)
        require(c.window + c.chunk > 0 or value == 0, f"Decoder.{name}", value, fix)
    fix = f"Decoder.full_layers={c.full_layers} says which layers are full; set one of both to 0"
    require(not (c.full_layers and c.full_every), "Decoder.full_every", c.full_every, fix)
    fix = f"Decoder.mask={c.mask!r} shows nothing 'before'; set it to 0"
    has_before = any(rule.relation == "before" for rule in rules.rules)
    require(has_before or not c.window, "Decoder.window", c.window, fix)
    fix = "chunks are cut by a token's place in its sample, and Decoder.rope_sections gives three; set it to 0"
    require(not (c.chunk and c.rope_sections), "Decoder.chunk", c.chunk, fix)


def check_rope(c: DecoderConfig) -> None:
    """Requires that the settings of rotary embedding fit one another; raises `ConfigError`."""
    one_of("Decoder.rope_scaling", c.rope_scaling, ROPE_SCALINGS)
    factor, fix = c.rope_factor, "must be 1 or more, such as 8.0"
    require(math.isfinite(factor) and factor >= 1, "Decoder.rope_factor", factor, fix)
    fix = "changes nothing without a Decoder.rope_scaling, such as 'linear'; set that, or leave it 1.0"
    require(c.rope_scaling != "none" or factor == 1, "Decoder.rope_factor", factor, fix)
    if c.rope_scaling in ROPE_TURNS:
        positive("Decoder.rope_context", c.rope_context, 8192)
    fix = "must be above 1 for frequencies that differ, such as 10000.0"
    require(c.rope_scaling == "none" or c.rope_theta > 1, "Decoder.rope_theta", c.rope_theta, fix)
    turns, fix = c.rope_turns, "must be two numbers above 0, the smaller first, such as (1.0, 4.0)"
    ascending = len(turns) == 2 and 0 < turns[0] < turns[1] < math.inf
    require(not turns or ascending, "Decoder.rope_turns", turns, fix)
    sections, pairs = c.rope_sections, c.rotary_width // 2
    fix = f"must be three numbers, 0 or more, that sum to the pairs of a head, {pairs}; or ()"
    legal = len(sections) == 3 and min(sections) >= 0 and sum(sections) == pairs
    require(not sections or legal, "Decoder.rope_sections", sections, fix)
    if sections and c.rope_interleaved:
        fix = f"interleaved rows and columns have at most every third of {pairs} pairs, such as {(pairs, 0, 0)}"
        fits = all(axis + 3 * (sections[axis] - 1) < pairs for axis in (1, 2))
        require(fits, "Decoder.rope_sections", sections, fix)
    fix = "layers with a window have one number for all pairs, and Decoder.rope_sections three; set one of both"
    require(not (c.local_rope_theta and sections), "Decoder.local_rope_theta", c.local_rope_theta, fix)


def check_latent(c: DecoderConfig) -> None:
    """Requires that nothing is set that latent attention has not; raises `ConfigError`."""
    for name in ("nope_head_dim", "rope_head_dim"):
        positive(f"Decoder.{name}", getattr(c, name), 64)
    fix = f"with Decoder.kv_rank each head has keys of its own; set it to Decoder.heads ({c.heads})"
    require(c.kv_heads == c.heads, "Decoder.kv_heads", c.kv_heads, fix)
    fix = "latent attention has Decoder.nope_head_dim and rope_head_dim; set it to 0"
    require(c.head_dim == 0, "Decoder.head_dim", c.head_dim, fix)
    for name in ("qkv_bias", "o_bias", "qk_norm", "attention_gate"):
        value, fix = getattr(c, name), "latent attention (Decoder.kv_rank) has none; set it to False"
        require(not value, f"Decoder.{name}", value, fix)
    fix = "latent attention has a rotated part of its own, Decoder.rope_head_dim; set it to 1.0"
    require(c.rope_share == 1, "Decoder.rope_share", c.rope_share, fix)


def check_delta(c: DecoderConfig) -> None:
    """Requires sizes and a mask that delta layers can have; raises `ConfigError`."""
    c.delta.check("Decoder")
    fix = "delta layers see earlier tokens of a sample alone; use 'causal', or set Decoder.delta_heads to 0"
    require(c.mask == "causal", "Decoder.mask", c.mask, fix)


def check_experts(c: DecoderConfig) -> None:
    """Requires that settings of router and experts fit one another; raises `ConfigError`."""
    one_of("Decoder.router", c.router, ROUTERS)
    for name in ("experts_per_token", "router_scale", "router_groups", "router_group_limit"):
        positive(f"Decoder.{name}", getattr(c, name))
    fix = f"layers of experts follow, and Decoder.layers is {c.layers}; use {c.layers - 1} or less"
    require(c.dense_layers < c.layers, "Decoder.dense_layers", c.dense_layers, fix)
    divides("Decoder.router_groups", c.router_groups, c.experts, "Decoder.experts")
    fix = f"there are {c.router_groups} groups (Decoder.router_groups); use that or less"
    require(c.router_group_limit <= c.router_groups, "Decoder.router_group_limit", c.router_group_limit, fix)
    most = c.experts // c.router_groups * c.router_group_limit
    fix = f"a token can choose among {most} experts; use {most} or less"
    require(c.experts_per_token <= most, "Decoder.experts_per_token", c.experts_per_token, fix)
    fix = "experts have 'silu' alone; set it, or Decoder.experts to 0"
    require(c.activation == "silu", "Decoder.activation", c.activation, fix)
    fix = "is of shared experts, and Decoder.shared_experts is 0; set it to False"
    require(c.shared_experts > 0 or not c.shared_gate, "Decoder.shared_gate", c.shared_gate, fix)
