"""Llama-family language models in folders of transformers: weights table, and conversion of ``config.json``.

Supported values of ``model_type`` are llama (Llama, Vicuna), mistral, qwen2, qwen3 and smollm3 (see
``smollm3_weights``), olmo2 and olmo3 (see ``olmo_weights``), phi3 (see
``phi3_weights``), with experts mixtral, qwen2_moe and qwen3_moe (see ``expert_weights``), deepseek_v2 and
deepseek_v3 (see ``deepseek_weights``), qwen3_5_text and qwen3_5_moe_text (see ``qwen35_weights``), gemma2 and
gemma3_text (see ``gemma_weights``), gemma4_text (see ``gemma4_weights``), and in composite models those of Qwen2-VL,
Qwen2.5-VL and Qwen3-VL, with and without experts. In a composite model Qwen3.5's has M-RoPE too.

Imports no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from mmjax.configurable import ConfigError, one_of, require
from mmjax.models.delta.config import DELTA_SETTINGS
from mmjax.models.llama import (
    deepseek_weights,
    expert_weights,
    gemma4_weights,
    gemma_weights,
    olmo_weights,
    phi3_weights,
    qwen35_weights,
    smollm3_weights,
)
from mmjax.models.llama.checks import ROPE_TURNS
from mmjax.models.llama.config import EXPERT_SETTINGS, LATENT_SETTINGS, DecoderConfig
from mmjax.models.llama.folder_defaults import ALONE, DEFAULTS, MROPE, QWEN3_MROPE
from mmjax.weights.table import SAME, TRANSPOSED, Row, View

Json = Mapping[str, Any]
"""The contents of a ``config.json``, or its part on the language model."""

_LATENT = deepseek_weights.DEFAULTS
_DELTA = qwen35_weights.DEFAULTS
_GEMMA = gemma_weights.DEFAULTS
_SMOLLM3 = smollm3_weights.SMOLLM3
_OLMO = olmo_weights.DEFAULTS
_PHI3 = phi3_weights.PHI3
_BY_LAYER = (gemma_weights.GEMMA3, olmo_weights.OLMO3)
"""Those whose rotary embedding is described for each kind of layer."""
_GEMMA4 = gemma4_weights.GEMMA4
_ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    *("mscale", "mscale_all_dim"),
}
_SECTIONS, _QWEN3_SECTIONS = (16, 24, 24), (24, 20, 20)
_UNMAPPED = ("preset", "attention", "remat", "z_loss", "balance_loss", "router_z_loss", "router_bias_rate")
"""Settings that no ``config.json`` has."""
_ROPE_TURNS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}


# ---- tensors ---------------------------------------------------------------------------------------------------------


def rows(c: DecoderConfig, model_type: str = "") -> tuple[Row, ...]:
    """The weights table of a model with these settings, with the keys of a folder of the language model alone.

    A ``Row`` has the ``leaf``, such as "layers/{}/attn/q", the possible ``keys`` of its tensor, such as
    ("model.layers.{}.self_attn.q_proj.weight",), and its ``view`` of the tensor, such as the transpose. Only keys of
    experts and of joined products depend on ``model_type``, the folder's; "" is chosen by the settings, with no
    products joined.
    """
    return tuple(_rows(c, model_type))


def _rows(c: DecoderConfig, model_type: str) -> Iterator[Row]:
    def layer_row(leaf: str, key: str, view: View = SAME, layers: Sequence[int] | None = None) -> Row:
        return Row(f"layers/{{}}/{leaf}", (f"model.layers.{{}}.{key}",), view, layers=layers)

    def product(leaf: str, key: str, *, biased: bool, layers: Sequence[int] | None = None) -> Iterator[Row]:
        yield layer_row(leaf, f"{key}.weight", TRANSPOSED, layers)
        if biased:
            yield layer_row(f"{leaf}_bias", f"{key}.bias", layers=layers)

    yield Row("embed", ("model.embed_tokens.weight",), copies=("lm_head.weight",) if c.tied else ())
    if c.pre_norms:
        yield layer_row("attn_norm", "input_layernorm.weight")
    if c.kv_rank:
        yield from deepseek_weights.attention_rows(c)
    with_attention = qwen35_weights.attention_layers(c)
    joined = tuple(phi3_weights.joined_rows(c)) if model_type == _PHI3 else ()
    yield from joined
    for name in "" if c.kv_rank else "o" if joined else "qkvo":
        biased = c.o_bias if name == "o" else c.qkv_bias
        layers = gemma4_weights.layers_with(name, c, with_attention)
        yield from product(f"attn/{name}", f"self_attn.{name}_proj", biased=biased, layers=layers)
    for name in "qk" if c.qk_norm else "":
        layers = gemma4_weights.layers_with(name, c, with_attention)
        yield layer_row(f"attn/{name}_norm", f"self_attn.{name}_norm.weight", layers=layers)
    yield from qwen35_weights.delta_rows(c)
    if c.post_norms:
        yield from gemma_weights.norm_rows(c)
    else:
        yield layer_row("mlp_norm", "post_attention_layernorm.weight")
    if c.per_layer_width:
        yield from gemma4_weights.per_layer_rows()
    if c.layer_scalar:
        yield layer_row("layer_scalar", "layer_scalar")
    dense = c.layers if c.mlp_beside_experts else c.layers - c.expert_layers
    for name in ("down",) if joined else ("gate", "up", "down") if dense else ():
        layers = range(dense) if dense < c.layers else None
        yield from product(f"mlp/{name}", f"mlp.{name}_proj", biased=c.mlp_bias, layers=layers)
    if c.mlp_beside_experts:
        yield from gemma4_weights.expert_rows(c)
    elif c.experts:
        yield from expert_weights.expert_rows(c, model_type)
    yield Row("norm", ("model.norm.weight",))
    if not c.tied:
        yield Row("head", ("lm_head.weight",), TRANSPOSED)


def unused(c: DecoderConfig) -> tuple[str, ...]:
    """Regular expressions for the ends of keys that folders may have although no leaf needs them.

    They are rotary frequencies, which are computed, the layers for a second token of DeepSeek-V3 and Qwen3.5, and keys
    and values of Gemma 4's layers that read those of others.
    """
    second_token = [deepseek_weights.unused(c)] if c.kv_rank else [qwen35_weights.UNUSED] if c.delta_heads else []
    return (r"rotary_emb\.inv_freq", *second_token, *gemma4_weights.unused(c))


# ---- config.json to settings -----------------------------------------------------------------------------------------


def settings(hf_config: Json) -> dict[str, Any]:
    """Fields of ``DecoderConfig``, by name, from a ``config.json``: {"layers": 32, "width": 4096, …}.

    Args:
      hf_config: its contents, or its part on the language model, as transformers 5 or 4 writes it. Missing keys have
        the defaults of transformers; for M-RoPE "whole" is the file of the composite model.

    Raises:
      ConfigError: mmjax cannot compute the model; the message names the key and its value.
    """
    kind = hf_config.get("model_type", "")
    known = f"mmjax knows {', '.join(ALONE)}, and the text of {', '.join(MROPE[::2])}"
    require(kind in DEFAULTS, "config.json: model_type", kind, known)
    t = {**DEFAULTS[kind], **hf_config}
    quantised = (t.get("quantization_config") or {}).get("quant_method")
    fix = "mmjax reads no quantised weights; take the model's folder in BF16, or make one"
    require(not t.get("quantization_config"), "config.json: quantization_config", quantised, fix)
    if kind not in (*_GEMMA, _GEMMA4):
        is_silu = t["hidden_act"] in ("silu", "swish")
        require(is_silu, "config.json: hidden_act", t["hidden_act"], "mmjax has 'silu' alone")
    heads, width = t["num_attention_heads"], t["hidden_size"]
    qkv_bias, o_bias = _attention_biases(kind, t)
    head_dim = t.get("head_dim") or width // heads
    values = {
        "layers": t["num_hidden_layers"],
        "width": width,
        "heads": heads,
        "kv_heads": t["num_key_value_heads"] or heads,
        "head_dim": head_dim,
        "mlp": t["intermediate_size"],
        "vocab": t["vocab_size"],
        "norm_eps": float(t["rms_norm_eps"]),
        "tied": bool(t["tie_word_embeddings"]),
        "qkv_bias": qkv_bias,
        "o_bias": o_bias,
        "mlp_bias": kind in ("llama", _SMOLLM3) and bool(t["mlp_bias"]),
        "qk_norm": kind in ("qwen3", "qwen3_moe", *QWEN3_MROPE, *_DELTA),
    }
    if kind in (*expert_weights.DEFAULTS, *expert_weights.QWEN3_VL):
        values |= expert_weights.expert_settings(kind, t)
    if kind in _LATENT:
        values |= deepseek_weights.attention_settings(t) | deepseek_weights.expert_settings(kind, t)
    if kind in _DELTA:
        values |= qwen35_weights.layer_settings(t)
    if kind == _SMOLLM3:
        return values | {"nope_every": smollm3_weights.nope_every(t)} | _rope(kind, t)
    if kind == _PHI3:
        return values | phi3_weights.layer_settings(t) | _rope(kind, phi3_weights.without_share(t))
    if kind in _OLMO:
        values |= olmo_weights.layer_settings(kind, t)
        return values | _rope(kind, gemma_weights.with_rope(t) if kind in _BY_LAYER else t)
    if kind in (*_GEMMA, _GEMMA4) and "whole" in hf_config:  # whose value counts, true by default
        values["tied"] = bool(hf_config["whole"].get("tie_word_embeddings", True))
    if kind == _GEMMA4:
        return values | gemma4_weights.layer_settings(t)
    if kind in _GEMMA:
        values |= gemma_weights.layer_settings(kind, t)
        return values | _rope(kind, gemma_weights.with_rope(t) if kind in _BY_LAYER else t)
    if kind in (*MROPE, *_DELTA):  # set for the composite model; in older folders in the text's part
        of_whole = hf_config.get("whole", {}).get("tie_word_embeddings")
        is_older = kind in MROPE and kind not in QWEN3_MROPE
        values["tied"] = bool(of_whole or (values["tied"] and (of_whole is None or is_older)))
    return values | _window(kind, t) | _rope(kind, t)


def _attention_biases(kind: str, t: Json) -> tuple[bool, bool]:
    """Whether queries, keys and values, and the attention's output have biases."""
    if kind in ("mistral", "mixtral", _PHI3, *_LATENT):
        return False, False
    if kind == "qwen2_moe":
        return bool(t["qkv_bias"]), False
    biased, only_qkv = bool(t["attention_bias"]), kind == "qwen2" or (kind in MROPE and kind not in QWEN3_MROPE)
    return biased or only_qkv, biased and not only_qkv


def _window(kind: str, t: Json) -> dict[str, Any]:
    """``window``, and ``full_layers``: the number of first layers without it."""
    layers, no_window = t["num_hidden_layers"], {"window": 0, "full_layers": 0}
    everywhere = kind in ("mistral", "mixtral", "qwen3_moe")
    window = t["sliding_window"] if kind in ("mistral", "mixtral") or t.get("use_sliding_window") else 0
    if not window or kind in QWEN3_MROPE:
        return no_window
    fix = "mmjax has no window in every second layer alone; set it to false if samples are shorter"
    require(kind != "qwen2_moe", "config.json: use_sliding_window", value=True, fix=fix)
    full = 0 if everywhere else min(t["max_window_layers"], layers)
    kinds = t.get("layer_types")
    if not everywhere and kinds is not None:
        full = list(kinds).count("full_attention")
        supported = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
        fix = "mmjax has layers of full attention first, all others with a window"
        require(list(kinds) == supported, "config.json: layer_types", kinds, fix)
    return {"window": window, "full_layers": full} if full < layers else no_window


def _rope(model_type: str, t: Json) -> dict[str, Any]:
    """Rotary settings from ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling``."""
    rope = t.get("rope_scaling") or t.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "default" if kind == "mrope" and model_type in MROPE else kind
    has_share = model_type in _DELTA
    sees = has_share and "whole" in t  # as a part of a composite model
    is_3 = model_type in QWEN3_MROPE or sees
    default_sections = qwen35_weights.SECTIONS if sees else _QWEN3_SECTIONS if is_3 else _SECTIONS
    sections = tuple(rope.get("mrope_section") or default_sections) if model_type in MROPE or sees else ()
    one_of("config.json: rope_type", kind, _ROPE_TYPES)
    interleaved = rope.get("mrope_interleaved", True)
    fix = "transformers interleaves sections in any case; set it to true"
    require(interleaved or not is_3, "config.json: mrope_interleaved", interleaved, fix)
    ignored = qwen35_weights.ROPE_KEYS if has_share else {"mrope_section"} if sections else set[str]()
    for name in sorted(set(rope) - _ROPE_KEYS - ignored - ({"mrope_interleaved"} if is_3 else set())):
        require(rope[name] is None, f"config.json: {name}", rope[name], "mmjax knows no such key of rope_parameters")
    for name, only in (*(() if has_share else (("partial_rotary_factor", 1.0),)), ("truncate", True)):
        value = rope.get(name, t.get(name))
        require(value in (None, only), f"config.json: {name}", value, f"mmjax has {only!r} alone")
    values: dict[str, Any] = {"rope_theta": float(rope.get("rope_theta") or t.get("rope_theta") or 10000.0)}
    values |= {"rope_scaling": _ROPE_TYPES[kind], "rope_factor": 1.0, "rope_context": 0, "rope_turns": ()}
    values |= {"rope_sections": sections, "rope_interleaved": is_3}
    if has_share:
        values["rope_share"] = qwen35_weights.rope_share(t, rope)
    if kind == "default":
        return values
    require(bool(rope.get("factor")), "config.json: factor", rope.get("factor"), f"rope_type {kind!r} needs a number")
    factor = values["rope_factor"] = float(rope["factor"])
    if kind in ROPE_TURNS:
        context = t.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        turns = tuple(
            float(rope.get(name) or usual) for name, usual in zip(_ROPE_TURNS[kind], ROPE_TURNS[kind], strict=True)
        )
        values |= {
            "rope_context": context or t["max_position_embeddings"],
            "rope_turns": () if turns == ROPE_TURNS[kind] else turns,
        }
    if kind == "yarn":
        attention_factor, usual = rope.get("attention_factor"), 0.1 * math.log(factor) + 1
        formula = "0.1 ln(factor) + 1"
        if model_type in _LATENT:
            values |= deepseek_weights.mscales(rope)
            usual, formula = deepseek_weights.magnitude(factor, values), "the factor of mscale and mscale_all_dim"
        fix = f"mmjax has {formula} = {usual:.6g} alone"
        require(
            attention_factor is None or math.isclose(attention_factor, usual, rel_tol=1e-6),
            "config.json: attention_factor",
            attention_factor,
            fix,
        )
        for name in ("mscale", "mscale_all_dim") if model_type not in _LATENT else ():
            require(not rope.get(name), f"config.json: {name}", rope.get(name), "mmjax has none; leave it out")
    return values


# ---- settings to config.json -----------------------------------------------------------------------------------------


def to_hf_config(
    c: DecoderConfig, *, model_type: str = "", positions: int = 4096, dtype: str = "float32"
) -> dict[str, Any]:
    """A ``config.json``, as a dict, from which transformers, 5 and before, builds the same model.

    Args:
      c: the settings, with a vocabulary size.
      model_type: one of ``ALONE``; "" chooses the first that has all of these settings.
      positions: the maximal sequence length in tokens; at least the scaled context is written.
      dtype: the tensors' dtype, such as "bfloat16".

    Raises:
      ConfigError: the type is unknown, no type has all of these settings, or the vocabulary size is not set.
    """
    if model_type:
        one_of("model_type", model_type, ALONE)
    require(c.vocab > 0, "Decoder.vocab", c.vocab, "set it to the tokenizer's vocabulary first")
    differences: list[list[str]] = []
    for kind in [model_type] if model_type else ALONE:
        if (kind in _LATENT) != (c.kv_rank > 0) or (kind in _DELTA) != (c.delta_heads > 0):
            continue
        if kind == _GEMMA4 and not (model_type or c.layer_scalar):  # its layers must end with one that has no window
            continue
        hf_config = _closest_config(c, kind, positions, dtype)
        unmapped = {name: getattr(c, name) for name in _UNMAPPED}
        restored = DecoderConfig(**unmapped, **settings(hf_config))
        different = [field.name for field in fields(c) if _value(c, field.name) != _value(restored, field.name)]
        if not different:
            return hf_config
        differences.append(different)
    name = min(differences, key=len, default=["kv_rank" if model_type in _LATENT or c.kv_rank else "delta_heads"])[0]
    kinds = repr(model_type) if model_type else " or ".join(map(repr, ALONE))
    fix = f"no model of type {kinds} has it beside the other settings; export an Orbax checkpoint instead"
    raise ConfigError(f"Decoder.{name}={getattr(c, name)!r}: {fix}")


def _value(c: DecoderConfig, name: str) -> Any:
    """The value of a setting in a normal form, which is equal for equal models."""
    if name in LATENT_SETTINGS and name in c.idle():
        return None
    if name == "v_head_dim":
        return c.value_width
    if name in DELTA_SETTINGS and not c.delta_heads:
        return None
    if name == "delta_value_heads":
        return c.delta.value_heads
    if name in EXPERT_SETTINGS and (not c.experts or name in c.idle()):
        return None
    has_mlp = not c.experts or c.dense_layers or c.mlp_beside_experts
    if (name == "mlp" and not has_mlp) or name == "expert_mlp":
        return c.expert_width  # of layers without experts there are none
    if name == "router_group_limit":
        return c.router_group_limit if c.router_groups > 1 else 1
    if name == "rope_interleaved":
        return bool(c.rope_sections) and c.rope_interleaved
    if name == "rope_turns":
        return c.turns if c.rope_scaling in ROPE_TURNS else ()
    if name == "rope_context":
        return c.rope_context if c.rope_scaling in ROPE_TURNS else 0
    if name == "local_rope_theta" and not c.local_rope_theta:  # as in other layers
        return c.rope_theta if c.rope_scaling == "none" and name not in c.idle() else 0
    if name == "kv_shared_mlp":
        return (c.kv_shared_mlp or c.mlp) if c.kv_shared_layers else None
    if name in ("global_head_dim", "global_kv_heads"):
        return getattr(c, name) or _value(c, name.removeprefix("global_"))
    if name == "per_layer_media" and not c.per_layer_width:
        return -1
    if name == "full_causal":
        return c.full_causal and c.mask != "causal"
    if name == "nope_every":
        return tuple(map(c.rotates, range(c.layers)))
    if name == "score_width":
        return c.score_width or c.head_width
    if name in ("window", "chunk", "full_layers", "full_every"):
        return (c.window, c.chunk, c.runs) if any(run.is_local for run in c.runs) else ()
    return c.head_width if name == "head_dim" else getattr(c, name)


def _closest_config(c: DecoderConfig, kind: str, positions: int, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of a model type with as many of the settings as it has."""
    scaled = round(c.rope_factor * c.rope_context)
    hf_config: dict[str, Any] = {
        "architectures": [f"{''.join(word.capitalize() for word in kind.split('_'))}ForCausalLM"],
        "model_type": kind,
        "num_hidden_layers": c.layers,
        "hidden_size": c.width,
        "num_attention_heads": c.heads,
        "hidden_act": "silu",
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_width,
        "intermediate_size": c.mlp,
        "vocab_size": c.vocab,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "max_position_embeddings": max(positions, scaled),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if kind in ("llama", "qwen3", "qwen3_moe"):
        hf_config["attention_bias"] = c.o_bias
    if kind == "llama":
        hf_config["mlp_bias"] = c.mlp_bias
    if kind in ("mistral", "mixtral"):
        hf_config["sliding_window"] = c.window or None
    if kind == "qwen2_moe":
        hf_config |= {"qkv_bias": c.qkv_bias, "use_sliding_window": False}
    if kind == "qwen3_moe":
        hf_config |= {"use_sliding_window": c.window > 0, "sliding_window": c.window or None}
    if kind in expert_weights.DEFAULTS:
        hf_config |= expert_weights.expert_config(c, kind)
    if kind in _LATENT:
        hf_config |= deepseek_weights.config_entries(c, kind)
    if kind in _DELTA:
        hf_config |= qwen35_weights.config_entries(c, kind)
    if kind == _SMOLLM3:
        hf_config |= smollm3_weights.config_entries(c)
    if kind == _PHI3:
        hf_config |= phi3_weights.config_entries(c)
    if kind in _OLMO:
        hf_config |= olmo_weights.config_entries(c, kind)
    if kind in _GEMMA:
        hf_config |= gemma_weights.config_entries(c, kind)
    if kind == _GEMMA4:
        return hf_config | gemma4_weights.config_entries(c)
    if kind in ("qwen2", "qwen3"):
        full = c.full_layers if c.window else c.layers
        kinds = ["full_attention"] * full + ["sliding_attention"] * (c.layers - full)
        hf_config |= {"use_sliding_window": c.window > 0, "sliding_window": c.window or None}
        hf_config |= {"max_window_layers": full, "layer_types": kinds}
    rope = _rope_of(c)
    return hf_config | (gemma_weights.rope_entries(c, rope) if kind in _BY_LAYER else rope)


def _rope_of(c: DecoderConfig) -> dict[str, Any]:
    """The entries on rotary embedding, for transformers 5 and before."""
    kind = next((rope_type for rope_type, scaling in _ROPE_TYPES.items() if scaling == c.rope_scaling), "default")
    numbers: dict[str, Any] = {} if kind == "default" else {"factor": c.rope_factor}
    if kind in ROPE_TURNS:
        numbers |= dict(zip(_ROPE_TURNS[kind], c.turns, strict=True))
        numbers["original_max_position_embeddings"] = c.rope_context
    if c.kv_rank:
        numbers |= deepseek_weights.rope_entries(c)
    if c.delta_heads:
        numbers |= qwen35_weights.rope_entries(c)
    return {
        "rope_parameters": {"rope_type": kind, "rope_theta": c.rope_theta, **numbers},
        "rope_theta": c.rope_theta,
        "rope_scaling": {"rope_type": kind, **numbers} if numbers else None,
    }
