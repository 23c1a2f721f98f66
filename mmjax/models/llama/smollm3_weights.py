"""SmolLM3 in folders of transformers: its part of ``config.json``. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmjax.configurable import require
from mmjax.models.llama.config import DecoderConfig

Json = Mapping[str, Any]
"""The contents of a ``config.json``."""
SMOLLM3 = "smollm3"
DEFAULTS: Json = {
    **{"num_hidden_layers": 36, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"head_dim": None, "intermediate_size": 11008, "vocab_size": 128256, "hidden_act": "silu", "rms_norm_eps": 1e-6},
    **{"tie_word_embeddings": True, "max_position_embeddings": 32768, "rope_theta": 2000000.0},
    **{"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "sliding_window": None},
    **{"no_rope_layers": None, "no_rope_layer_interval": 4},
}
"""The defaults of transformers for missing keys."""


def nope_every(t: Json) -> int:
    """``Decoder.nope_every`` from a ``config.json`` without missing keys.

    Raises:
      ConfigError: layers that do not rotate are at other places than each so many; or they have a window.
    """
    has_window = t["use_sliding_window"] and t["sliding_window"] is not None
    fix = "mmjax has no window in the layers without positions alone; set it to false if samples are shorter"
    require(not has_window, "config.json: use_sliding_window", t["use_sliding_window"], fix)
    layers, rotates = t["num_hidden_layers"], t["no_rope_layers"]
    if not rotates:
        rotates = _rotating(layers, t["no_rope_layer_interval"])
    every = list(rotates).index(0) + 1 if 0 in rotates else 0
    fix = "mmjax has the last of each run of equally many layers without positions, such as [1, 1, 1, 0]"
    require(list(rotates) == _rotating(layers, every), "config.json: no_rope_layers", rotates, fix)
    return every


def config_entries(c: DecoderConfig) -> dict[str, Any]:
    """The entries of a ``config.json`` beside those of other models, and its architecture."""
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": c.o_bias,
        "mlp_bias": c.mlp_bias,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": _rotating(c.layers, c.nope_every),
        "layer_types": ["full_attention"] * c.layers,
    }


def _rotating(layers: int, every: int) -> list[int]:
    """For each layer 1, or 0 where it does not rotate."""
    return [int(not every or (layer + 1) % every != 0) for layer in range(layers)]
