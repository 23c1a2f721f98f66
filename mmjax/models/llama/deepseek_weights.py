"""DeepSeek-V2 and V3 in folders of transformers: rows of latent attention, and their part of ``config.json``.

Values of ``model_type`` are deepseek_v2 (V2, V2-Lite) and deepseek_v3. The tensors of experts are in
``expert_weights``. Imports no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.configurable import one_of, require
from mmjax.models.llama.config import DecoderConfig
from mmjax.weights.table import SAME, TRANSPOSED, Row

Json = Mapping[str, Any]
"""The contents of a ``config.json``, or its part on the language model."""
_SHARED = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "rope_interleave": True,
}
DEFAULTS: Mapping[str, Json] = {
    "deepseek_v2": _SHARED
    | {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008}
    | {"vocab_size": 102400, "max_position_embeddings": 2048, "first_k_dense_replace": 0, "n_group": None}
    | {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": None, "moe_intermediate_size": 1407}
    | {"routed_scaling_factor": 1.0, "topk_group": None, "topk_method": "greedy", "norm_topk_prob": False}
    | {"scoring_func": "softmax"},
    "deepseek_v3": _SHARED
    | {"num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "intermediate_size": 18432}
    | {"vocab_size": 129280, "max_position_embeddings": 4096, "first_k_dense_replace": 3, "n_group": 8}
    | {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
    | {"routed_scaling_factor": 2.5, "topk_group": 4, "topk_method": "noaux_tc", "norm_topk_prob": True}
    | {"scoring_func": "sigmoid"},
}
"""The defaults of transformers for missing keys, by model type."""
_METHODS = {"deepseek_v2": ("greedy", "group_limited_greedy"), "deepseek_v3": ("noaux_tc",)}
_ATTENTION = "model.layers.{}.self_attn"


def attention_rows(c: DecoderConfig) -> Iterator[Row]:
    """Yields the rows of a decoder's latent attention."""
    names = {"q_down": "q_a_proj", "q_up": "q_b_proj"} if c.q_rank else {"q": "q_proj"}
    names |= {"kv_down": "kv_a_proj_with_mqa", "kv_up": "kv_b_proj", "o": "o_proj"}
    for leaf, key in names.items():
        yield Row(f"layers/{{}}/attn/{leaf}", (f"{_ATTENTION}.{key}.weight",), TRANSPOSED)
    for name in ("q", "kv") if c.q_rank else ("kv",):
        yield Row(f"layers/{{}}/attn/{name}_down_norm", (f"{_ATTENTION}.{name}_a_layernorm.weight",), SAME)


def unused(c: DecoderConfig) -> str:
    """A regular expression for the end of keys of the layer that predicts a second token, behind the last layer."""
    return rf"layers\.{c.layers}\..*"


def attention_settings(t: Json) -> dict[str, Any]:
    """Fields of ``DecoderConfig`` on latent attention, by name, from a ``config.json`` without missing keys.

    Raises:
      ConfigError: mmjax has no such attention; the message names the key and its value.
    """
    heads, kv_heads = t["num_attention_heads"], t["num_key_value_heads"]
    fix = f"in latent attention each head has keys of its own: num_attention_heads is {heads}"
    require(kv_heads in (None, heads), "config.json: num_key_value_heads", kv_heads, fix)
    for name in ("attention_bias", "mlp_bias"):
        require(not t[name], f"config.json: {name}", t[name], "mmjax has no such biases beside latent attention")
    fix = "mmjax rotates pairs of neighbours, as published models do"
    require(t["rope_interleave"] is not False, "config.json: rope_interleave", t["rope_interleave"], fix)
    return {
        "head_dim": 0,
        "kv_rank": t["kv_lora_rank"],
        "q_rank": t["q_lora_rank"] or 0,
        "nope_head_dim": t["qk_nope_head_dim"],
        "rope_head_dim": t["qk_rope_head_dim"],
        "v_head_dim": t["v_head_dim"],
    }


def expert_settings(kind: str, t: Json) -> dict[str, Any]:
    """Fields of ``DecoderConfig`` on experts, by name, from a ``config.json`` of this model type, without missing keys.

    Raises:
      ConfigError: mmjax has no such experts; the message names the key and its value.
    """
    dense = t["first_k_dense_replace"] or 0
    if dense >= t["num_hidden_layers"] or not t["n_routed_experts"]:
        return {"experts": 0}
    frequency, method, k = t["moe_layer_freq"], t["topk_method"], t["num_experts_per_tok"]
    require(frequency == 1, "config.json: moe_layer_freq", frequency, "mmjax has experts in all layers but the first")
    one_of("config.json: topk_method", method, _METHODS[kind])
    one_of("config.json: scoring_func", t["scoring_func"], (DEFAULTS[kind]["scoring_func"],))
    require(bool(k), "config.json: num_experts_per_tok", k, "is the number of experts of a token, such as 6")
    is_v3 = kind == "deepseek_v3"
    fix = "transformers does not read it for deepseek_v2; mmjax has False alone"
    require(is_v3 or not t["norm_topk_prob"], "config.json: norm_topk_prob", t["norm_topk_prob"], fix)
    has_groups = method != "greedy"
    return {
        "experts": t["n_routed_experts"],
        "experts_per_token": k,
        "expert_mlp": t["moe_intermediate_size"],
        "shared_experts": t["n_shared_experts"] or 0,
        "shared_gate": False,
        "dense_layers": dense,
        "router": t["scoring_func"],
        "router_normalised": bool(t["norm_topk_prob"]),
        "router_scale": float(t["routed_scaling_factor"]),
        "router_groups": (t["n_group"] or 1) if has_groups else 1,
        "router_group_limit": (t["topk_group"] or 1) if has_groups else 1,
        "router_bias": is_v3,
    }


def mscales(rope: Json) -> dict[str, float]:
    """``rope_mscale`` and ``rope_mscale_all`` from the entries of YaRN.

    Raises:
      ConfigError: only one of the two is there, of which transformers and DeepSeek's release make different factors.
    """
    mscale, mscale_all = (float(rope.get(name) or 0.0) for name in ("mscale", "mscale_all_dim"))
    fix = f"mscale_all_dim is {mscale_all}; mmjax has both above 0, or neither"
    require(bool(mscale) == bool(mscale_all), "config.json: mscale", mscale, fix)
    return {"rope_mscale": mscale or 1.0, "rope_mscale_all": mscale_all}


def magnitude(factor: float, settings: Mapping[str, float]) -> float:
    """The factor of rotated queries and keys under YaRN with this ``rope_factor``, from a result of ``mscales``."""
    mscale, mscale_all = (0.1 * settings[name] * math.log(factor) + 1 for name in ("rope_mscale", "rope_mscale_all"))
    return mscale / mscale_all


def config_entries(c: DecoderConfig, kind: str) -> dict[str, Any]:
    """The entries of a ``config.json`` on latent attention and experts."""
    values: dict[str, Any] = {
        "kv_lora_rank": c.kv_rank,
        "q_lora_rank": c.q_rank or None,
        "qk_nope_head_dim": c.nope_head_dim,
        "qk_rope_head_dim": c.rope_head_dim,
        "v_head_dim": c.value_width,
        "head_dim": c.rope_head_dim,  # of transformers, for rotary frequencies
        "attention_bias": False,
        "first_k_dense_replace": c.dense_layers if c.experts else c.layers,
        "num_nextn_predict_layers": 0,
    }
    is_v3 = kind == "deepseek_v3"
    if is_v3:
        values["rope_interleave"] = True
    if not c.experts:
        return values
    return values | {
        "n_routed_experts": c.experts,
        "num_experts_per_tok": c.experts_per_token,
        "moe_intermediate_size": c.expert_width,
        "n_shared_experts": c.shared_experts,
        "routed_scaling_factor": c.router_scale,
        "norm_topk_prob": is_v3 and c.router_normalised,
        "n_group": c.router_groups,
        "topk_group": c.router_group_limit,
        "topk_method": _METHODS[kind][-1] if is_v3 or c.router_groups > 1 else "greedy",
        "scoring_func": DEFAULTS[kind]["scoring_func"],
        "moe_layer_freq": 1,
        "aux_loss_alpha": c.balance_loss * c.experts_per_token,  # its loss divides loads by the experts of a token
        "seq_aux": True,
    }


def rope_entries(c: DecoderConfig) -> dict[str, float]:
    """The entries of YaRN beside those of other models."""
    if c.rope_scaling != "yarn" or not c.rope_mscale_all:
        return {}
    return {"mscale": c.rope_mscale, "mscale_all_dim": c.rope_mscale_all}
