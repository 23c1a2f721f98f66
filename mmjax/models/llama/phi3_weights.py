"""Phi-3 and Phi-4 in folders of transformers: rows of joined products, and their part of ``config.json``.

Queries, keys and values are one tensor there, and gates and ups another. LongRoPE is refused: its frequencies depend on
the length of a text. Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.configurable import require
from mmjax.models.llama.config import DecoderConfig
from mmjax.weights.table import TRANSPOSED, Row, View

Json = Mapping[str, Any]
"""The contents of a ``config.json``."""
PHI3 = "phi3"
DEFAULTS: Json = {
    **{"num_hidden_layers": 32, "hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": None},
    **{"head_dim": None, "intermediate_size": 8192, "vocab_size": 32064, "hidden_act": "silu", "rms_norm_eps": 1e-5},
    **{"tie_word_embeddings": False, "max_position_embeddings": 4096, "sliding_window": None},
}
"""The defaults of transformers for missing keys."""
_SHARE = "partial_rotary_factor"


def joined_rows(c: DecoderConfig) -> Iterator[Row]:
    """Yields the rows of the leaves that share a tensor, in the order in which they lie in it."""
    heads, kv_heads = c.heads * c.head_width, c.kv_heads * c.head_width
    yield from _joined(c, "self_attn.qkv_proj", {"attn/q": heads, "attn/k": kv_heads, "attn/v": kv_heads})
    yield from _joined(c, "mlp.gate_up_proj", {"mlp/gate": c.mlp, "mlp/up": c.mlp})


def _joined(c: DecoderConfig, key: str, widths: Mapping[str, int]) -> Iterator[Row]:
    first = 0
    for leaf, width in widths.items():
        view = View(TRANSPOSED.order, (width, c.width), rows=(first, first + width))
        yield Row(f"layers/{{}}/{leaf}", (f"model.layers.{{}}.{key}.weight",), view)
        first += width


def layer_settings(t: Json) -> dict[str, Any]:
    """Fields of ``DecoderConfig`` beside those of other models, by name, from a ``config.json`` without missing keys.

    Raises:
      ConfigError: something scales the rotary frequencies.
    """
    rope = _rope(t)
    kind = rope.get("rope_type", rope.get("type", "default"))  # transformers takes any other for LongRoPE
    fix = "mmjax has 'default' alone for Phi-3: LongRoPE's frequencies depend on a text's length"
    require(kind == "default", "config.json: rope_type", kind, fix)
    share = rope.get(_SHARE, t.get(_SHARE))
    return {"window": t["sliding_window"] or 0, "rope_share": 1.0 if share is None else float(share)}


def without_share(t: Json) -> Json:
    """The ``config.json`` without the share of a head that is rotated."""
    rope = {key: value for key, value in _rope(t).items() if key != _SHARE}
    return {**t, "rope_parameters": rope, "rope_scaling": None, _SHARE: None}


def _rope(t: Json) -> Json:
    return t.get("rope_scaling") or t.get("rope_parameters") or {}


def config_entries(c: DecoderConfig) -> dict[str, Any]:
    """The entries of a ``config.json`` beside those of other models."""
    return {
        **{"sliding_window": c.window or None, _SHARE: c.rope_share, "pad_token_id": None},
        "original_max_position_embeddings": 4096,
    }
