"""Checks of decoders' settings that read several of them. Imports no JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mmjax.attention.language import Rules
from mmjax.configurable import divides, one_of, positive, require
from mmjax.mesh.layout import Layout, split_layers
from mmjax.models.llama.runs import LayerKinds

ROPE_TURNS: Mapping[str, tuple[float, float]] = {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0)}
"""Default ``rope_turns`` of the scalings that read them."""
ROPE_SCALINGS = ("none", "linear", "proportional", *ROPE_TURNS)
ROUTERS = ("softmax", "sigmoid")


class DecoderChecks(LayerKinds):
    """Checks of settings of ``DecoderConfig``, whose fields annotations repeat; each raises `ConfigError`."""

    heads: int
    kv_rank: int
    rotated_pairs: int
    activation: str
    mask: str
    rope_theta: float
    rope_factor: float
    rope_context: int
    rope_turns: tuple[float, ...]
    rope_sections: tuple[int, ...]
    rope_interleaved: bool
    experts_per_token: int
    shared_experts: int
    shared_gate: bool
    router: str
    router_groups: int
    router_group_limit: int

    def _check_window(self) -> None:
        """Requires that window, chunks and the layers without them fit the mask."""
        rules = Rules.parse(self.mask, "Decoder.mask")
        fix = f"must be Decoder.layers ({self.layers}) or less; set it to 0 if every layer has the window"
        require(self.full_layers <= self.layers, "Decoder.full_layers", self.full_layers, fix)
        fix = "the other layers have no window; set Decoder.window, such as 4096, or leave it 0"
        for name in ("full_layers", "full_every"):
            value = getattr(self, name)
            require(self.window + self.chunk > 0 or value == 0, f"Decoder.{name}", value, fix)
        fix = f"Decoder.full_layers={self.full_layers} says which layers are full; set one of both to 0"
        require(not (self.full_layers and self.full_every), "Decoder.full_every", self.full_every, fix)
        fix = f"Decoder.mask={self.mask!r} shows nothing 'before'; set it to 0"
        has_before = any(rule.relation == "before" for rule in rules.rules)
        require(has_before or not self.window, "Decoder.window", self.window, fix)
        fix = "chunks are cut by a token's place in its sample, and Decoder.rope_sections gives three; set it to 0"
        require(not (self.chunk and self.rope_sections), "Decoder.chunk", self.chunk, fix)

    def _check_rope(self, pairs: int) -> None:
        """Requires that the settings of rotary embedding fit one another, and the ``pairs`` of a head that rotate."""
        one_of("Decoder.rope_scaling", self.rope_scaling, ROPE_SCALINGS)
        factor, fix = self.rope_factor, "must be 1 or more, such as 8.0"
        require(math.isfinite(factor) and factor >= 1, "Decoder.rope_factor", factor, fix)
        fix = "changes nothing without a Decoder.rope_scaling, such as 'linear'; set that, or leave it 1.0"
        require(self.rope_scaling != "none" or factor == 1, "Decoder.rope_factor", factor, fix)
        if self.rope_scaling in ROPE_TURNS:
            positive("Decoder.rope_context", self.rope_context, 8192)
        fix = "must be above 1 for frequencies that differ, such as 10000.0"
        require(self.rope_scaling == "none" or self.rope_theta > 1, "Decoder.rope_theta", self.rope_theta, fix)
        turns, fix = self.rope_turns, "must be two numbers above 0, the smaller first, such as (1.0, 4.0)"
        ascending = len(turns) == 2 and 0 < turns[0] < turns[1] < math.inf
        require(not turns or ascending, "Decoder.rope_turns", turns, fix)
        fix = "is the share of a head's pairs that rotate, and none would; use more, such as 0.25"
        require(self.rotated_pairs > 0, "Decoder.rope_share", self.rope_share, fix)
        sections = self.rope_sections
        fix = f"must be three numbers, 0 or more, that sum to the pairs of a head, {pairs}; or ()"
        legal = len(sections) == 3 and min(sections) >= 0 and sum(sections) == pairs
        require(not sections or legal, "Decoder.rope_sections", sections, fix)
        if sections and self.rope_interleaved:
            fix = f"interleaved rows and columns have at most every third of {pairs} pairs, such as {(pairs, 0, 0)}"
            fits = all(axis + 3 * (sections[axis] - 1) < pairs for axis in (1, 2))
            require(fits, "Decoder.rope_sections", sections, fix)
        fix = "layers with a window have one number for all pairs, and Decoder.rope_sections three; set one of both"
        require(not (self.local_rope_theta and sections), "Decoder.local_rope_theta", self.local_rope_theta, fix)

    def _check_latent(self) -> None:
        """Requires that nothing is set that latent attention has not."""
        for name in ("nope_head_dim", "rope_head_dim"):
            positive(f"Decoder.{name}", getattr(self, name), 64)
        fix = f"with Decoder.kv_rank each head has keys of its own; set it to Decoder.heads ({self.heads})"
        require(self.kv_heads == self.heads, "Decoder.kv_heads", self.kv_heads, fix)
        fix = "latent attention has Decoder.nope_head_dim and rope_head_dim; set it to 0"
        require(self.head_dim == 0, "Decoder.head_dim", self.head_dim, fix)
        for name in ("qkv_bias", "o_bias", "qk_norm", "v_norm", "keys_as_values", "attention_gate"):
            value, fix = getattr(self, name), "latent attention (Decoder.kv_rank) has none; set it to False"
            require(not value, f"Decoder.{name}", value, fix)
        require(self.nope_every == 0, "Decoder.nope_every", self.nope_every, "latent attention has none; set it to 0")
        fix = "latent attention has a rotated part of its own, Decoder.rope_head_dim; set it to 1.0"
        require(self.rope_share == 1, "Decoder.rope_share", self.rope_share, fix)
        fix = "latent attention has a rotated part of its own; use 'linear', 'yarn' or 'none'"
        require(self.rope_scaling != "proportional", "Decoder.rope_scaling", self.rope_scaling, fix)

    def _check_global(self) -> None:
        """Requires that layers without the window and chunks can have other heads."""
        for name in ("global_head_dim", "global_kv_heads"):
            value, fix = getattr(self, name), "latent attention (Decoder.kv_rank) has heads of one kind; set it to 0"
            require(not (value and self.kv_rank), f"Decoder.{name}", value, fix)
        value = self.global_head_dim
        require(value % 2 == 0, "Decoder.global_head_dim", value, "must be even, such as 16")
        fix = "Decoder.rope_sections are pairs of heads of one width; set one of both"
        require(not (value and self.rope_sections), "Decoder.global_head_dim", value, fix)
        if self.global_kv_heads:
            divides("Decoder.global_kv_heads", self.global_kv_heads, self.heads, "Decoder.heads")

    def _check_sharing(self, count_name: str, layers_name: str, layout: Layout) -> None:
        """Requires that layers without keys of their own lie in one stage with those whose keys they read.

        ``count_name`` and ``layers_name`` are the names of ``kv_shared_layers`` and of ``Layout.layers`` in messages.
        """
        count, layers, sources = self.kv_shared_layers, self.layers, self.key_sources
        fix = f"the first layers have the keys that these read, and there are {layers} layers; use {layers - 1} or less"
        require(count < layers, count_name, count, fix)
        kinds = {self.is_local(at) for at in range(layers - count, layers)}
        fix = "layers with a window and layers without need one before them with keys of their own; use fewer"
        require(len(sources) == len(kinds), count_name, count, fix)
        first, runs = sources[0], layout.runs(layers)
        cuts = [run.start for run in runs if run.start > first]
        before = split_layers(first, layout.stages - 1) if first >= layout.stages - 1 > 0 else ()
        example = (*map(len, before), layers - first)
        fix = f"layers from {first} on share keys and values ({count_name}={count}), and a stage begins at layer "
        fix += f"{cuts[0] if cuts else 0}; use " + (f"{example}" if before else f"at most {first + 1} stages")
        require(not cuts, layers_name, tuple(map(len, runs)), fix)

    def _check_experts(self) -> None:
        """Requires that settings of router and experts fit one another."""
        one_of("Decoder.router", self.router, ROUTERS)
        for name in ("experts_per_token", "router_scale", "router_groups", "router_group_limit"):
            positive(f"Decoder.{name}", getattr(self, name))
        fix = f"layers of experts follow, and Decoder.layers is {self.layers}; use {self.layers - 1} or less"
        require(self.dense_layers < self.layers, "Decoder.dense_layers", self.dense_layers, fix)
        divides("Decoder.router_groups", self.router_groups, self.experts, "Decoder.experts")
        fix = f"there are {self.router_groups} groups (Decoder.router_groups); use that or less"
        require(
            self.router_group_limit <= self.router_groups, "Decoder.router_group_limit", self.router_group_limit, fix
        )
        most = self.experts // self.router_groups * self.router_group_limit
        fix = f"a token can choose among {most} experts; use {most} or less"
        require(self.experts_per_token <= most, "Decoder.experts_per_token", self.experts_per_token, fix)
        fix = "is of shared experts, and Decoder.shared_experts is 0; set it to False"
        require(self.shared_experts > 0 or not self.shared_gate, "Decoder.shared_gate", self.shared_gate, fix)
