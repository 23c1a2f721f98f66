"""Gemma 4 in folders of transformers: rows of its experts and inputs of layers, and its part of ``config.json``.

The value of ``model_type`` is gemma4_text, also as the "text_config" of gemma4. Layers without the window have heads of
their own width and number. Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mmjax.configurable import one_of, require
from mmjax.models.choices import ACTIVATION_OF, hf_activation
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.layer_types import BY_WINDOW, layer_types, period
from mmjax.models.llama.runs import PROPORTIONAL
from mmjax.weights.table import SAME, TRANSPOSED, TRANSPOSED_LIST, Row, View

Json = Mapping[str, Any]
"""The contents of a ``config.json``, or its part on the language model."""
GEMMA4 = "gemma4_text"
DEFAULTS: Mapping[str, Json] = {
    GEMMA4: {
        **{"num_hidden_layers": 30, "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"head_dim": 256, "intermediate_size": 9216, "vocab_size": 262144, "rms_norm_eps": 1e-6},
        **{"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "attention_bias": False},
        **{"max_position_embeddings": 131072, "sliding_window": 512, "layer_types": None, "rope_parameters": None},
        **{"final_logit_softcapping": None, "use_bidirectional_attention": None, "global_head_dim": 512},
        **{"num_global_key_value_heads": None, "attention_k_eq_v": False, "num_kv_shared_layers": 0},
        **{
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "pad_token_id": 0,
        },
        **{"num_experts": None, "top_k_experts": None, "moe_intermediate_size": None},
    }
}
"""The defaults of transformers for missing keys, by model type."""
_PATTERN = 6
_ROPE = {
    BY_WINDOW[0]: {"rope_type": "default", "rope_theta": 10000.0},
    BY_WINDOW[1]: {"rope_type": PROPORTIONAL, "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
}
_ROPE_KEYS = {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}
_BRANCH_NORMS = {
    "mlp_branch_norm": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_post_norm": "post_feedforward_layernorm_2",
}


# ---- tensors ---------------------------------------------------------------------------------------------------------


def layers_with(name: str, c: DecoderConfig, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Those of a decoder's ``layers`` with attention, ``None`` for all, that have the product ``name``, such as "k"."""
    if name in ("q", "o") or not (c.kv_shared_layers or (c.keys_as_values and name == "v")):
        return layers
    with_keys = range(c.layers - c.kv_shared_layers)
    at_all = with_keys if layers is None else (layer for layer in layers if layer in with_keys)
    return tuple(layer for layer in at_all if name == "k" or not c.keys_as_values or c.is_local(layer))


def per_layer_rows() -> Iterator[Row]:
    """Yields the rows of the inputs of layers beside the features."""
    yield Row("per_layer/embed", ("model.embed_tokens_per_layer.weight",))
    yield Row("per_layer/project", ("model.per_layer_model_projection.weight",), TRANSPOSED)
    yield Row("per_layer/norm", ("model.per_layer_projection_norm.weight",))
    layer = "model.layers.{}"
    yield Row("layers/{}/per_layer/gate", (f"{layer}.per_layer_input_gate.weight",), TRANSPOSED)
    yield Row("layers/{}/per_layer/out", (f"{layer}.per_layer_projection.weight",), TRANSPOSED)
    yield Row("layers/{}/per_layer_norm", (f"{layer}.post_per_layer_input_norm.weight",))


def unused(c: DecoderConfig) -> tuple[str, ...]:
    """Regular expressions for keys of products that published folders have in layers that read the keys of others."""
    layers = "|".join(str(layer) for layer in range(c.layers - c.kv_shared_layers, c.layers))
    return (rf"layers\.({layers})\.self_attn\.[kv]_(proj|norm)\.\w+",) if layers else ()


def expert_rows(c: DecoderConfig) -> Iterator[Row]:
    """Yields the rows of experts that have an mlp beside them, and of their router."""
    layers = range(c.dense_layers, c.layers)

    def row(leaf: str, key: str, view: View = SAME) -> Row:
        return Row(f"layers/{{}}/{leaf}", (f"model.layers.{{}}.{key}",), view, layers=layers)

    for leaf, key in _BRANCH_NORMS.items():
        yield row(leaf, f"{key}.weight")
    yield row("experts/router", "router.proj.weight", TRANSPOSED)
    yield row("experts/router_norm", "router.scale")
    yield row("experts/expert_scale", "router.per_expert_scale")
    for number, name in enumerate(("gate", "up")):
        rows = number * c.expert_width, (number + 1) * c.expert_width
        yield row(f"experts/{name}", "experts.gate_up_proj", replace(TRANSPOSED_LIST, rows=rows, axis=1))
    yield row("experts/down", "experts.down_proj", TRANSPOSED_LIST)


# ---- config.json -----------------------------------------------------------------------------------------------------


def layer_settings(t: Json) -> dict[str, Any]:
    """Fields of ``DecoderConfig`` beside those of other models, by name, from a ``config.json`` without missing keys.

    Raises:
      ConfigError: mmjax has no such layers; the message names the key and its value.
    """
    activation, bidirectional = t["hidden_activation"], t["use_bidirectional_attention"]
    one_of("config.json: hidden_activation", activation, ACTIVATION_OF)
    fix = "mmjax reads Gemma 4 as a causal model, with images that see themselves"
    require(bidirectional in (None, "vision"), "config.json: use_bidirectional_attention", bidirectional, fix)
    per_layer, rows = t["hidden_size_per_layer_input"] or 0, t["vocab_size_per_layer_input"]
    fix = f"mmjax has tables of one size, and vocab_size is {t['vocab_size']}"
    is_one_size = not per_layer or rows == t["vocab_size"]
    require(is_one_size, "config.json: vocab_size_per_layer_input", rows, fix)
    window = _window(t)
    values = {
        "post_norms": True,
        "scaled_embed": True,
        "qk_norm": True,
        "v_norm": True,
        "keys_as_values": bool(t["attention_k_eq_v"]),
        "layer_scalar": True,
        "activation": ACTIVATION_OF[activation],
        "score_width": 1.0,
        "logit_cap": float(t["final_logit_softcapping"] or 0),
        **window,
        **_mask(t, window["window"]),
        **_heads(t, has_local=window["window"] > 0),
        **_rope(t, has_local=window["window"] > 0),
        "per_layer_width": per_layer,
        "per_layer_media": t["pad_token_id"] if per_layer and t["pad_token_id"] is not None else -1,
        "kv_shared_layers": t["num_kv_shared_layers"],
        "kv_shared_mlp": 2 * t["intermediate_size"] if t["use_double_wide_mlp"] and t["num_kv_shared_layers"] else 0,
    }
    return values | (_experts(t) if t["enable_moe_block"] else {})


def _mask(t: Json, window: int) -> dict[str, Any]:
    """``mask``, by which an image's tokens see one another in layers with the window, and ``full_causal``."""
    composite = t.get("whole", {})
    if not (composite.get("vision_config") and t["use_bidirectional_attention"] and window):
        return {"mask": "causal", "full_causal": False}
    tokens = composite.get("vision_soft_tokens_per_image") or 0
    fix = f"mmjax shows an image's {tokens} tokens to one another, whatever the window; it has to be as many or more"
    require(window >= tokens, "config.json: sliding_window", window, fix)
    return {"mask": "gemma3", "full_causal": True}


def _window(t: Json) -> dict[str, int]:
    """``window``, and ``full_every``: every so many layers one has none."""
    layers = t["num_hidden_layers"]
    # Without a list transformers gives every sixth layer no window, and the last.
    kinds = list(t["layer_types"] or [*layer_types(layers, _PATTERN, BY_WINDOW)[:-1], BY_WINDOW[1]])
    every = period({**t, "layer_types": kinds}, BY_WINDOW, _PATTERN)
    fix = f"mmjax has one layer of {BY_WINDOW[1]} behind equally many of {BY_WINDOW[0]}, again and again"
    require(every > 0 and layers % every == 0, "config.json: layer_types", kinds, fix)
    return {"window": 0 if every == 1 else t["sliding_window"], "full_every": 0 if every == 1 else every}


def _heads(t: Json, *, has_local: bool) -> dict[str, int]:
    """Width and number of heads of layers with and without the window; equal numbers count once."""
    width, kv_heads = t["global_head_dim"], t["num_key_value_heads"]
    global_kv = (t["num_global_key_value_heads"] if t["attention_k_eq_v"] else None) or kv_heads
    if t.get("per_layer_config") is not None:
        of_layers = _of_full_layers(t)
        width, global_kv = of_layers.get("head_dim", t["head_dim"]), of_layers.get("num_key_value_heads", kv_heads)
    if not has_local:
        return {"head_dim": width, "kv_heads": global_kv}
    return {
        "global_head_dim": 0 if width == t["head_dim"] else width,
        "global_kv_heads": 0 if global_kv == kv_heads else global_kv,
    }


def _of_full_layers(t: Json) -> Json:
    """The entry of ``per_layer_config``, as transformers 5.24 writes it, that all layers without the window have."""
    by_layer = {int(layer): dict(entry) for layer, entry in t["per_layer_config"].items()}
    full = {layer for layer in range(t["num_hidden_layers"]) if (layer + 1) % (_window(t)["full_every"] or 1) == 0}
    entries = [by_layer.get(layer, {}) for layer in sorted(full)]
    fix = f"mmjax has one head_dim and num_key_value_heads for all layers of {BY_WINDOW[1]}, and no others"
    known = all(not set(entry) - {"head_dim", "num_key_value_heads"} for entry in entries)
    alike = known and not set(by_layer) - full and all(entry == entries[0] for entry in entries)
    require(alike, "config.json: per_layer_config", t["per_layer_config"], fix)
    return entries[0]


def _rope(t: Json, *, has_local: bool) -> dict[str, Any]:
    """Rotary embedding of layers without the window, and the base of the others, which nothing scales."""
    by_kind = {**_ROPE, **(t["rope_parameters"] or {})}
    for kind, rope in by_kind.items():
        for name in sorted(set(rope) - _ROPE_KEYS):
            require(
                rope[name] is None, f"config.json: {name}", rope[name], "mmjax knows no such key of rope_parameters"
            )
        one_of(
            f"config.json: rope_type of {kind}",
            rope["rope_type"],
            ("default", PROPORTIONAL)[: 1 + (kind == BY_WINDOW[1])],
        )
    local, full = (by_kind[kind] for kind in BY_WINDOW)
    values = {"rope_theta": float(full["rope_theta"]), "local_rope_theta": float(local["rope_theta"]) * has_local}
    if full["rope_type"] == "default":
        return values
    share, factor = full.get("partial_rotary_factor") or 1.0, full.get("factor") or 1.0
    return {**values, "rope_scaling": PROPORTIONAL, "rope_share": float(share), "rope_factor": float(factor)}


def _experts(t: Json) -> dict[str, Any]:
    return {
        "experts": t["num_experts"],
        "experts_per_token": t["top_k_experts"],
        "expert_mlp": t["moe_intermediate_size"],
        "mlp_beside_experts": True,
        "router_norm": True,
        "expert_scale": True,
    }


def config_entries(c: DecoderConfig) -> dict[str, Any]:
    """The entries of a ``config.json`` beside those of other models, rotary embedding included."""
    full = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_scaling == PROPORTIONAL:
        full |= {"rope_type": PROPORTIONAL, "partial_rotary_factor": c.rope_share, "factor": c.rope_factor}
    entries: dict[str, Any] = {
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_activation": hf_activation(c.activation),
        "attention_bias": c.o_bias,
        "sliding_window": c.window or DEFAULTS[GEMMA4]["sliding_window"],
        "layer_types": layer_types(c.layers, c.full_every if c.window else 1, BY_WINDOW),
        "final_logit_softcapping": c.logit_cap or None,
        "global_head_dim": c.global_head_dim or c.head_width,
        "num_global_key_value_heads": c.global_kv_heads or None,
        "attention_k_eq_v": c.keys_as_values,
        "num_kv_shared_layers": c.kv_shared_layers,
        "use_double_wide_mlp": c.kv_shared_mlp == 2 * c.mlp,
        "hidden_size_per_layer_input": c.per_layer_width,
        "vocab_size_per_layer_input": c.vocab,
        "enable_moe_block": c.experts > 0,
        "rope_parameters": {
            BY_WINDOW[0]: {"rope_type": "default", "rope_theta": c.local_rope_theta or c.rope_theta},
            BY_WINDOW[1]: full,
        },
    }
    of_experts = {
        "num_experts": c.experts,
        "top_k_experts": c.experts_per_token,
        "moe_intermediate_size": c.expert_width,
    }
    media = {"pad_token_id": c.per_layer_media if c.per_layer_media >= 0 else None} if c.per_layer_width else {}
    return entries | media | (of_experts if c.experts else {})
