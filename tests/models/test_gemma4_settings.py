"""``config.json`` of Gemma 4's language models to settings and back, and their published sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mmjax.configurable import ConfigError, from_preset
from mmjax.mesh.layout import Layout
from mmjax.models.families import module_of
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.weights import rows, settings, to_hf_config, unused
from mmjax.weights.table import match

LOCAL, FULL = "sliding_attention", "full_attention"
ROPE = {
    LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
}
COMMON: dict[str, Any] = dict(
    **dict(model_type="gemma4_text", vocab_size=262144, head_dim=256, global_head_dim=512, rms_norm_eps=1e-06),
    **dict(hidden_activation="gelu_pytorch_tanh", final_logit_softcapping=30.0, tie_word_embeddings=True),
    **dict(attention_bias=False, use_bidirectional_attention="vision", rope_parameters=ROPE, sliding_window=1024),
)
LARGE: dict[str, Any] = dict(attention_k_eq_v=True, hidden_size_per_layer_input=0, num_kv_shared_layers=0)
SMALL: dict[str, Any] = dict(
    **dict(hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144, attention_k_eq_v=False),
    **dict(use_bidirectional_attention=None, sliding_window=512, num_global_key_value_heads=None),
)
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma4-31b": {
        **dict(COMMON, **LARGE, hidden_size=5376, intermediate_size=21504, num_hidden_layers=60),
        **dict(num_attention_heads=32, num_key_value_heads=16, num_global_key_value_heads=4),
        **dict(layer_types=[*[LOCAL] * 5, FULL] * 10, enable_moe_block=False),
    },
    "gemma4-26b-a4b": {
        **dict(COMMON, **LARGE, hidden_size=2816, intermediate_size=2112, num_hidden_layers=30),
        **dict(num_attention_heads=16, num_key_value_heads=8, num_global_key_value_heads=2),
        **dict(enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704),
    },
    "gemma4-e2b": {
        **dict(
            {**COMMON, **SMALL}, hidden_size=1536, intermediate_size=6144, num_hidden_layers=35, num_attention_heads=8
        ),
        **dict(num_key_value_heads=1, num_kv_shared_layers=20, use_double_wide_mlp=True),
        **dict(layer_types=[*[LOCAL] * 4, FULL] * 7),
    },
    "gemma4-e4b": {
        **dict(
            {**COMMON, **SMALL}, hidden_size=2560, intermediate_size=10240, num_hidden_layers=42, num_attention_heads=8
        ),
        **dict(num_key_value_heads=2, num_kv_shared_layers=18, use_double_wide_mlp=False),
    },
}
"""Of the folders on the Hub, what shapes the model."""
PARAMETERS = {"gemma4-31b": 30_697_345_340, "gemma4-26b-a4b": 25_233_141_790}
PARAMETERS |= {"gemma4-e2b": 4_628_569_379, "gemma4-e4b": 7_463_013_418}
"""Of transformers' models, with the numbers that scale layers, which are buffers there."""
TINY: dict[str, Any] = {
    **COMMON,
    **LARGE,
    **dict(num_hidden_layers=4, hidden_size=16, num_attention_heads=4, intermediate_size=24, vocab_size=7),
    **dict(num_key_value_heads=2, head_dim=8, global_head_dim=16, layer_types=[LOCAL, FULL] * 2),
}


def of(**theirs: Any) -> DecoderConfig:
    """The settings of a small model with such a ``config.json``."""
    return DecoderConfig(**settings({**TINY, **theirs}))


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_are_the_published_models(preset: str) -> None:
    c = from_preset(DecoderConfig, preset)
    assert replace(DecoderConfig(**settings(PUBLISHED[preset])), preset=preset, balance_loss=c.balance_loss) == c
    assert module_of(c).parameters() == PARAMETERS[preset]


EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 12}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        EXPERTS,
        {"attention_k_eq_v": False, "num_global_key_value_heads": 1},
        {"num_global_key_value_heads": 1, "final_logit_softcapping": None, "attention_bias": True},
        {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_k_eq_v": False},
        {"num_kv_shared_layers": 1},
        {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 7},
        {"layer_types": [FULL] * 4, "tie_word_embeddings": False},
        {"global_head_dim": 8, "hidden_activation": "gelu"},
        {"rope_parameters": {**ROPE, FULL: {**ROPE[FULL], "factor": 2.0, "partial_rotary_factor": 0.5}}},
        {"rope_parameters": {**ROPE, FULL: {"rope_type": "default", "rope_theta": 77.0}}},
    ],
)
def test_settings_make_a_config_that_means_the_same(changes: dict[str, Any]) -> None:
    c = of(**changes)
    theirs = to_hf_config(c, dtype="bfloat16")
    assert theirs["model_type"] == "gemma4_text" and DecoderConfig(**settings(theirs)) == c


def test_heads_by_layer_are_those_of_all_layers_without_a_window() -> None:
    """As transformers 5.24 writes them, in place of two numbers."""
    without = {key: value for key, value in TINY.items() if key != "global_head_dim"}
    by_layer = {str(layer): {"head_dim": 16, "num_key_value_heads": 1} for layer in (1, 3)}
    assert DecoderConfig(**settings({**without, "per_layer_config": by_layer})) == of(num_global_key_value_heads=1)
    assert of(per_layer_config={}) == of(global_head_dim=8)
    for other in ({"1": {"head_dim": 16}}, {**by_layer, "0": {"head_dim": 16}}, {**by_layer, "3": {"head_dim": 4}}):
        with pytest.raises(ConfigError, match=r"^config\.json: per_layer_config=.*: mmjax has one head_dim"):
            of(per_layer_config=other)


def test_layers_without_a_window_have_no_values_of_their_own() -> None:
    values = [row.layers for row in rows(of()) if row.leaf == "layers/{}/attn/v"]
    assert values == [(0, 2)]


def test_layers_that_read_the_keys_of_others_have_none() -> None:
    c = of(num_hidden_layers=8, layer_types=[LOCAL, FULL] * 4, num_kv_shared_layers=3, attention_k_eq_v=False)
    assert c.key_sources == (3, 4)
    with_keys = {row.layers for row in rows(c) if row.leaf.endswith(("/k", "/v", "/k_norm"))}
    assert with_keys == {(0, 1, 2, 3, 4)}
    keys = [f"model.layers.{layer}.self_attn.{name}" for layer in (4, 5) for name in ("k_proj.weight", "v_norm.weight")]
    assert match((), keys, unused(c)).unexpected == tuple(keys[:2])


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        (
            {},
            {"pp": 2},
            "llm/Layout.layers=(4, 4): layers from 3 on share keys and values (llm/Decoder.kv_shared_layers",
        ),
        ({}, {"pp": 2, "layers": (5, 3)}, "llm/Layout.layers=(5, 3): layers from 3 on share keys and values"),
        ({"full_every": 8}, {}, "llm/Decoder.kv_shared_layers=3: layers with a window and layers without need one"),
        ({"per_layer_width": 4}, {"pp": 2, "layers": (3, 5)}, "llm/Layout.pp=2: each layer reads the embeddings (llm/"),
        ({"kv_shared_layers": 8}, {}, "llm/Decoder.kv_shared_layers=8: the first layers have the keys that these read"),
        ({"layers": 3, "kv_shared_layers": 1}, {"pp": 3}, "llm/Layout.layers=(1, 1, 1): layers from 0 on share keys"),
    ],
)
def test_layers_lie_in_a_stage_with_those_whose_keys_they_read(
    changes: dict[str, Any], layout: dict[str, Any], message: str
) -> None:
    c = DecoderConfig(**{**dict(layers=8, window=6, full_every=2, kv_shared_layers=3), **changes})
    with pytest.raises(ConfigError) as error:
        c.check("llm", Layout(**layout))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    replace(c, layers=8, kv_shared_layers=3, full_every=2, per_layer_width=0).check("llm", Layout(pp=2, layers=(3, 5)))


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (
            {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 5},
            "vocab_size_per_layer_input=5: mmjax has tables of one size, and vocab_size is 7",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all': mmjax reads Gemma 4 as"),
        ({"layer_types": [LOCAL, FULL, FULL, FULL]}, "layer_types=['sliding_attention', 'full_attention',"),
        ({"layer_types": [FULL, LOCAL] * 2}, "layer_types=['full_attention', 'sliding_attention',"),
        ({"hidden_activation": "relu"}, "hidden_activation='relu': "),
        ({"rope_parameters": {**ROPE, LOCAL: ROPE[FULL]}}, "rope_type of sliding_attention='proportional': "),
        ({"rope_parameters": {**ROPE, FULL: {**ROPE[FULL], "beta_fast": 3}}}, "beta_fast=3: mmjax knows no such key"),
    ],
)
def test_what_mmjax_does_not_compute_is_refused(theirs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        of(**theirs)
    assert str(error.value).startswith(f"config.json: {message}") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 8, "global_head_dim": 7}, "Decoder.global_head_dim=7: must be even, such as 16"),
        ({"window": 8, "global_kv_heads": 3}, "Decoder.global_kv_heads=3: must divide Decoder.heads (4)"),
        (
            {"window": 8, "global_head_dim": 8, "rope_sections": (2, 3, 3)},
            "Decoder.global_head_dim=8: Decoder.rope_sections are pairs of heads of one width; set one of both",
        ),
        (
            {"window": 8, "global_head_dim": 512, "attention": "cudnn"},
            "Decoder.attention='cudnn': cuDNN takes heads whose width",
        ),
        ({"rope_scaling": "proportional", "rope_share": 0.1}, "Decoder.rope_share=0.1: is the share of a head's pairs"),
        (
            {"kv_rank": 8, "nope_head_dim": 4, "rope_head_dim": 4, "kv_heads": 4, "v_norm": True},
            "Decoder.v_norm=True: latent attention (Decoder.kv_rank) has none; set it to False",
        ),
    ],
)
def test_settings_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        DecoderConfig(**changes)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
