"""OLMo 2 and OLMo 3 in folders of transformers: their part of ``config.json``. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmjax.models.llama import gemma_weights
from mmjax.models.llama.config import DecoderConfig

Json = Mapping[str, Any]
"""The contents of a ``config.json``."""
_OLMO2: Json = {
    **{"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": None},
    **{"head_dim": None, "intermediate_size": 11008, "vocab_size": 50304, "hidden_act": "silu", "rms_norm_eps": 1e-5},
    **{"tie_word_embeddings": False, "max_position_embeddings": 2048, "attention_bias": False},
}
OLMO3 = "olmo3"
_THETA = 500000.0
DEFAULTS: Mapping[str, Json] = {
    "olmo2": _OLMO2,
    OLMO3: {**_OLMO2, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None, "rope_theta": _THETA},
}
"""The defaults of transformers for missing keys, by model type."""


def layer_settings(kind: str, t: Json) -> dict[str, Any]:
    """Fields of ``DecoderConfig`` beside those of other models, by name, from a ``config.json`` without missing keys.

    Raises:
      ConfigError: layers with a window are at other places than before each so many; or something scales the
        frequencies of theirs.
    """
    values: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_whole": True}
    if kind == OLMO3:
        values |= gemma_weights.windows(t)
        values["local_rope_theta"] = gemma_weights.local_theta(t, _THETA) if values["window"] else 0.0
    return values


def config_entries(c: DecoderConfig, kind: str) -> dict[str, Any]:
    """The entries of a ``config.json`` of this ``model_type`` beside those of other models."""
    entries: dict[str, Any] = {"attention_bias": c.o_bias}
    return entries | gemma_weights.window_entries(c, DEFAULTS[kind]["sliding_window"]) if kind == OLMO3 else entries
