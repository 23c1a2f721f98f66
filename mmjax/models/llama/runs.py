"""Kinds of a decoder's layers: runs of equal layers, and the settings of a run that differ from the decoder's.

Imports no JAX.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple


class LayerRun(NamedTuple):
    """A run of equal layers.

    Attributes:
      count: the number of layers.
      is_local: whether they have the window and chunks.
      has_experts: whether they have experts.
      is_delta: whether they have the delta rule in place of attention.
      rotates: whether they rotate queries and keys.
      sharing: "stores" for a single layer whose keys and values later layers read, "reads" for these; "" for others.
    """

    count: int
    is_local: bool
    has_experts: bool
    is_delta: bool
    rotates: bool
    sharing: str


class LayerKinds:
    """The kinds of layers of ``DecoderConfig``, whose fields these annotations repeat."""

    layers: int
    head_dim: int
    kv_heads: int
    global_head_dim: int
    global_kv_heads: int
    keys_as_values: bool
    delta_heads: int
    attention_every: int
    window: int
    chunk: int
    full_layers: int
    full_every: int
    local_rope_theta: float
    nope_every: int
    rope_scaling: str
    rope_share: float
    experts: int
    dense_layers: int
    mlp: int
    kv_shared_layers: int
    kv_shared_mlp: int

    @property
    def runs(self) -> tuple[LayerRun, ...]:
        """Runs of equal layers."""
        kinds = (
            (self.is_local(at), self.has_experts(at), self.has_delta(at), self.rotates(at), self.sharing(at))
            for at in range(self.layers)
        )
        return tuple(LayerRun(len([*run]), *kind) for kind, run in groupby(kinds))

    @property
    def key_sources(self) -> tuple[int, ...]:
        """Indices of the layers whose keys and values the last ``kv_shared_layers`` read, ascending.

        They are the last layers of the kinds of these, with or without the window, that have keys of their own.
        """
        first = self.layers - self.kv_shared_layers
        last_of_kind = {self.is_local(at): at for at in range(first)}
        read = {self.is_local(at) for at in range(first, self.layers)}
        return tuple(sorted(at for kind, at in last_of_kind.items() if kind in read))

    def sharing(self, layer: int) -> str:
        """Whether a layer, by its index from 0, "stores" keys and values, "reads" stored ones, or neither: ""."""
        if layer >= self.layers - self.kv_shared_layers:
            return "reads"
        return "stores" if layer in self.key_sources else ""

    def rotates(self, layer: int) -> bool:
        """Whether a layer, by its index from 0, rotates queries and keys."""
        return not self.nope_every or (layer + 1) % self.nope_every != 0 or self.has_delta(layer)

    def has_delta(self, layer: int) -> bool:
        """Whether a layer, by its index from 0, has the delta rule in place of attention."""
        return self.delta_heads > 0 and (layer + 1) % self.attention_every != 0

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, by its index from 0, has experts."""
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def expert_layers(self) -> int:
        """The number of layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def is_local(self, layer: int) -> bool:
        """Whether a layer has the window and chunks; False if the model has neither."""
        full = layer < self.full_layers or (self.full_every > 0 and (layer + 1) % self.full_every == 0)
        return bool(self.window or self.chunk) and not full and not self.has_delta(layer)

    def _shape_of(self, run: LayerRun) -> dict[str, Any]:
        """The settings of a run's parameters that are not the decoder's, by name."""
        return self._sharing_of(run) | self._heads_of(run)

    def _sharing_of(self, run: LayerRun) -> dict[str, Any]:
        if not self.kv_shared_layers:
            return {}
        if run.sharing != "reads":
            return {"kv_shared_layers": 0, "kv_shared_mlp": 0}
        return {"kv_shared_layers": self.layers, "kv_shared_mlp": 0, "mlp": self.kv_shared_mlp or self.mlp}

    def _heads_of(self, run: LayerRun) -> dict[str, Any]:
        if not (self.global_head_dim or self.global_kv_heads or self.keys_as_values):
            return {}
        of_all = {"global_head_dim": 0, "global_kv_heads": 0}
        if run.is_local:
            return {**of_all, "keys_as_values": False}
        head_dim, kv_heads = self.global_head_dim or self.head_dim, self.global_kv_heads or self.kv_heads
        return {**of_all, "head_dim": head_dim, "kv_heads": kv_heads}

    def _rope_of(self, run: LayerRun) -> dict[str, Any]:
        """The settings of a run's rotary embedding that are not the decoder's, by name."""
        if not run.rotates:
            return {"nope_every": 1}
        if not (run.is_local and self.local_rope_theta):
            return {}
        unscaled = {"rope_theta": self.local_rope_theta, "local_rope_theta": 0.0}
        unscaled |= {"rope_scaling": "none", "rope_factor": 1.0}
        return unscaled | ({"rope_share": 1.0} if self.rope_scaling == PROPORTIONAL else {})


PROPORTIONAL = "proportional"
"""The value of ``rope_scaling`` that rotates some pairs with their frequencies among those of a whole head."""
