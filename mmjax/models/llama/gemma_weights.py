"""Gemma 2 and Gemma 3 in folders of transformers: rows of their norms, and their part of ``config.json``.

Values of ``model_type`` are gemma2 and gemma3_text, also as the "text_config" of gemma3 and of paligemma, PaliGemma 2.
Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.configurable import one_of, require
from mmjax.models.choices import ACTIVATION_OF, hf_activation
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.layer_types import BY_WINDOW, layer_types, period
from mmjax.weights.table import Row

Json = Mapping[str, Any]
"""The contents of a ``config.json``, or its part on the language model."""
_GEMMA2: Json = {
    **{"num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"head_dim": 256, "intermediate_size": 9216, "vocab_size": 256000, "hidden_activation": "gelu_pytorch_tanh"},
    **{"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "max_position_embeddings": 8192, "attention_bias": False},
    **{"query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 2},
    **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}
GEMMA3 = "gemma3_text"
DEFAULTS: Mapping[str, Json] = {
    "gemma2": _GEMMA2,
    GEMMA3: {
        **_GEMMA2,
        **{"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
        **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
    },
}
"""The defaults of transformers for missing keys, by model type."""
NORMS = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""Keys of a layer's norms behind the first, by leaf, of layers with four norms."""
POST_NORMS = ("attn_post_norm", "mlp_post_norm")
"""Of them those behind attention and mlp."""
MASKS = {"gemma3": "gemma3", "paligemma": "paligemma"}
"""``Decoder.mask`` by the model type of a composite model."""
_THETA, _LOCAL_THETA = 1000000.0, 10000.0


def norm_rows(c: DecoderConfig) -> Iterator[Row]:
    """Yields the rows of the norms behind a layer's first, of layers with norms behind attention and mlp."""
    for leaf, key in NORMS.items() if c.pre_norms else ((leaf, NORMS[leaf]) for leaf in POST_NORMS):
        yield Row(f"layers/{{}}/{leaf}", (f"model.layers.{{}}.{key}.weight",))


def layer_settings(kind: str, t: Json) -> dict[str, Any]:
    """Fields of ``DecoderConfig`` beside those of other models, by name, from a ``config.json`` without missing keys.

    In a composite model "whole" is its complete ``config.json``.

    Raises:
      ConfigError: mmjax has no such layers; the message names the key and its value.
    """
    activation, composite = t["hidden_activation"] or "gelu_pytorch_tanh", t.get("whole", {})
    one_of("config.json: hidden_activation", activation, ACTIVATION_OF)
    bidirectional = t.get("use_bidirectional_attention")
    fix = "mmjax reads Gemma as a causal model, with images and prompts that see themselves"
    is_legal = not bidirectional or composite.get("model_type") == "paligemma"
    require(is_legal, "config.json: use_bidirectional_attention", bidirectional, fix)
    scalar, head_dim = float(t["query_pre_attn_scalar"]), t["head_dim"]
    window = windows(t)
    values = {
        "norm_plus_one": True,
        "post_norms": True,
        "scaled_embed": True,
        "qk_norm": kind == GEMMA3,
        "activation": ACTIVATION_OF[activation],
        "score_width": 0.0 if scalar == head_dim else scalar,
        "score_cap": float(t["attn_logit_softcapping"] or 0),
        "logit_cap": float(t["final_logit_softcapping"] or 0),
        "mask": MASKS.get(composite.get("model_type", ""), "causal"),
        **window,
    }
    if kind == GEMMA3:
        values["local_rope_theta"] = (
            local_theta(t, t.get("rope_local_base_freq") or _LOCAL_THETA) if window["window"] else 0.0
        )
    return values


def windows(t: Json) -> dict[str, int]:
    """``window``, and ``full_every``: every so many layers one has none; from a ``config.json`` without missing keys.

    Raises:
      ConfigError: layers without a window are at other places, or a window is shorter than an image.
    """
    window, every = t["sliding_window"] or 0, period(t, BY_WINDOW, t["sliding_window_pattern"])
    tokens = t.get("whole", {}).get("mm_tokens_per_image") or 0
    fix = f"mmjax shows an image's {tokens} tokens to one another in every layer; it has to be as many or more"
    if not window or every == 1:
        return {"window": 0, "full_every": 0}
    require(window >= tokens, "config.json: sliding_window", window, fix)
    return {"window": window, "full_every": every}


# ---- rotary embedding ------------------------------------------------------------------------------------------------


def with_rope(t: Json) -> Json:
    """A ``config.json`` of Gemma 3 whose entries of rotary embedding are those of layers without a window."""
    by_kind = t.get("rope_parameters") or {}
    rope = {**(by_kind.get(BY_WINDOW[1]) or {}), **(t.get("rope_scaling") or {})}
    rope.setdefault("rope_theta", t.get("rope_theta") or _THETA)
    return {**t, "rope_parameters": rope, "rope_scaling": None}


def local_theta(t: Json, default: float) -> float:
    """The base of layers with a window, by default ``default``.

    Raises:
      ConfigError: something scales their frequencies.
    """
    rope = (t.get("rope_parameters") or {}).get(BY_WINDOW[0]) or {}
    kind = rope.get("rope_type", "default")
    require(kind == "default", "config.json: rope_type of sliding_attention", kind, "mmjax has 'default' alone")
    return float(rope.get("rope_theta") or default)


def config_entries(c: DecoderConfig, kind: str) -> dict[str, Any]:
    """The entries of a ``config.json`` of this ``model_type`` beside those of other models, and its architecture."""
    return {
        "architectures": [f"{'Gemma2' if kind == 'gemma2' else 'Gemma3'}ForCausalLM"],
        "hidden_activation": hf_activation(c.activation),
        "attention_bias": c.o_bias,
        "query_pre_attn_scalar": round(c.score_width) or c.head_width,
        "attn_logit_softcapping": c.score_cap or None,
        "final_logit_softcapping": c.logit_cap or None,
        **window_entries(c, DEFAULTS[kind]["sliding_window"]),
    }


def window_entries(c: DecoderConfig, default: int) -> dict[str, Any]:
    """The entries on layers with a window; of a model without them with the window ``default``."""
    every = c.full_every if c.window else 1
    return {"sliding_window": c.window or default, "layer_types": layer_types(c.layers, every, BY_WINDOW)}


def rope_entries(c: DecoderConfig, rope: Json) -> dict[str, Any]:
    """The entries on rotary embedding of Gemma 3, from those of other models, ``rope``."""
    local = c.local_rope_theta or c.rope_theta
    by_kind = {BY_WINDOW[0]: {"rope_type": "default", "rope_theta": local}, BY_WINDOW[1]: rope["rope_parameters"]}
    return {**rope, "rope_parameters": by_kind, "rope_local_base_freq": local}
