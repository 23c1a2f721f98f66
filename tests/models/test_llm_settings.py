"""``config.json`` of language models, as published folders and transformers 5 spell it, to settings and back."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from mmjax.configurable import ConfigError, from_preset
from mmjax.models.families import module_of
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.weights import settings, to_hf_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN40 = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
QWEN35: dict[str, Any] = dict(
    **dict(vocab_size=248320, hidden_act="silu", rms_norm_eps=1e-06, tie_word_embeddings=False, attention_bias=False),
    **dict(linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4),
    **dict(full_attention_interval=4, attn_output_gate=True, mamba_ssm_dtype="float32", mtp_num_hidden_layers=1),
    rope_parameters={
        **{"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        **{"mrope_section": [11, 11, 10], "mrope_interleaved": True},
    },
)
GEMMA2_2B: dict[str, Any] = {
    **dict(model_type="gemma2", hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, head_dim=256),
    **dict(num_attention_heads=8, num_key_value_heads=4, hidden_act="gelu_pytorch_tanh", rms_norm_eps=1e-06),
    **dict(hidden_activation="gelu_pytorch_tanh", rope_theta=10000.0, sliding_window=4096, sliding_window_size=4096),
    **dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, query_pre_attn_scalar=256, attention_bias=False),
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "vicuna-7b": {
        **dict(model_type="llama", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, vocab_size=32000),
        **dict(num_attention_heads=32, num_key_value_heads=32, hidden_act="silu", rms_norm_eps=1e-05),
        **dict(rope_scaling=None, tie_word_embeddings=False, torch_dtype="float16", max_position_embeddings=4096),
    },
    "llama3-8b": {
        **dict(model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, vocab_size=128256),
        **dict(num_attention_heads=32, num_key_value_heads=8, hidden_act="silu", rms_norm_eps=1e-05),
        **dict(rope_theta=500000.0, rope_scaling=None, attention_bias=False, tie_word_embeddings=False),
    },
    "llama3.1-8b": {
        **dict(model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, vocab_size=128256),
        **dict(num_attention_heads=32, num_key_value_heads=8, hidden_act="silu", rms_norm_eps=1e-05, mlp_bias=False),
        **dict(rope_theta=500000.0, rope_scaling={**LLAMA3, "rope_type": "llama3"}, max_position_embeddings=131072),
    },
    "mistral-7b": {
        **dict(model_type="mistral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, vocab_size=32000),
        **dict(num_attention_heads=32, num_key_value_heads=8, hidden_act="silu", rms_norm_eps=1e-05),
        **dict(rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False, max_position_embeddings=32768),
    },
    "qwen2.5-7b": {
        **dict(model_type="qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, vocab_size=152064),
        **dict(num_attention_heads=28, num_key_value_heads=4, hidden_act="silu", rms_norm_eps=1e-06),
        **dict(rope_theta=1000000.0, use_sliding_window=False, sliding_window=131072, max_window_layers=28),
    },
    "qwen3-8b": {
        **dict(model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, vocab_size=151936),
        **dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128, hidden_act="silu", rms_norm_eps=1e-06),
        **dict(rope_theta=1000000, rope_scaling=None, use_sliding_window=False, sliding_window=None),
        **dict(attention_bias=False, max_window_layers=36, tie_word_embeddings=False),
    },
    "smollm3-3b": {
        **dict(model_type="smollm3", hidden_size=2048, intermediate_size=11008, num_hidden_layers=36),
        **dict(num_attention_heads=16, num_key_value_heads=4, vocab_size=128256, rms_norm_eps=1e-06),
        **dict(rope_theta=5000000.0, rope_scaling=None, use_sliding_window=False, sliding_window=None),
        **dict(no_rope_layers=[1, 1, 1, 0] * 9, no_rope_layer_interval=4, attention_bias=False, mlp_bias=False),
    },
    "olmo2-7b": {
        **dict(model_type="olmo2", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32),
        **dict(num_attention_heads=32, num_key_value_heads=32, vocab_size=100352, rms_norm_eps=1e-06),
        **dict(rope_theta=500000, rope_scaling=None, attention_bias=False, tie_word_embeddings=False),
    },
    "olmo2-13b": {
        **dict(model_type="olmo2", hidden_size=5120, intermediate_size=13824, num_hidden_layers=40),
        **dict(num_attention_heads=40, num_key_value_heads=40, vocab_size=100352, rms_norm_eps=1e-06),
        **dict(rope_theta=500000, rope_scaling=None, attention_bias=False, tie_word_embeddings=False),
    },
    "olmo3-7b": {
        **dict(model_type="olmo3", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32),
        **dict(num_attention_heads=32, num_key_value_heads=32, vocab_size=100278, rms_norm_eps=1e-06),
        **dict(attention_bias=False, tie_word_embeddings=False, sliding_window=4096, rope_theta=500000),
        **dict(layer_types=[*["sliding_attention"] * 3, "full_attention"] * 8),
        "rope_scaling": {
            **dict(attention_factor=1.2079441541679836, beta_fast=32, beta_slow=1, factor=8.0),
            **dict(original_max_position_embeddings=8192, rope_type="yarn"),
        },
    },
    "phi3-mini-4k": {
        **dict(model_type="phi3", hidden_size=3072, intermediate_size=8192, num_hidden_layers=32),
        **dict(num_attention_heads=32, num_key_value_heads=32, vocab_size=32064, rms_norm_eps=1e-05),
        **dict(rope_theta=10000.0, rope_scaling=None, sliding_window=2047, attention_bias=False),
        **dict(tie_word_embeddings=False, original_max_position_embeddings=4096),
    },
    "phi4": {
        **dict(model_type="phi3", hidden_size=5120, intermediate_size=17920, num_hidden_layers=40),
        **dict(num_attention_heads=40, num_key_value_heads=10, vocab_size=100352, rms_norm_eps=1e-05),
        **dict(rope_theta=250000, rope_scaling=None, sliding_window=None, attention_bias=False),
        **dict(tie_word_embeddings=False, original_max_position_embeddings=16384),
    },
    "qwen3-30b-a3b": {
        **dict(model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, head_dim=128),
        **dict(num_attention_heads=32, num_key_value_heads=4, hidden_act="silu", rms_norm_eps=1e-06, vocab_size=151936),
        **dict(rope_theta=1000000.0, rope_scaling=None, use_sliding_window=False, sliding_window=None),
        **dict(attention_bias=False, max_window_layers=48, tie_word_embeddings=False, norm_topk_prob=True),
        **dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1),
        **dict(mlp_only_layers=[], router_aux_loss_coef=0.001, output_router_logits=False),
    },
    "mixtral-8x7b": {
        **dict(model_type="mixtral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, vocab_size=32000),
        **dict(num_attention_heads=32, num_key_value_heads=8, hidden_act="silu", rms_norm_eps=1e-05),
        **dict(rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False, max_position_embeddings=32768),
        **dict(num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.02, output_router_logits=False),
    },
    "qwen1.5-moe-a2.7b": {
        **dict(model_type="qwen2_moe", hidden_size=2048, intermediate_size=5632, num_hidden_layers=24),
        **dict(num_attention_heads=16, num_key_value_heads=16, hidden_act="silu", rms_norm_eps=1e-06),
        **dict(rope_theta=1000000.0, use_sliding_window=False, sliding_window=32768, max_window_layers=21),
        **dict(vocab_size=151936, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408),
        **dict(shared_expert_intermediate_size=5632, norm_topk_prob=False, decoder_sparse_step=1),
    },
    "deepseek-v2-lite": {
        **dict(model_type="deepseek_v2", hidden_size=2048, intermediate_size=10944, num_hidden_layers=27),
        **dict(num_attention_heads=16, num_key_value_heads=16, hidden_act="silu", rms_norm_eps=1e-06),
        **dict(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        **dict(rope_theta=10000, rope_scaling={**YARN40, "mscale": 0.707, "mscale_all_dim": 0.707}, vocab_size=102400),
        **dict(n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408),
        **dict(first_k_dense_replace=1, moe_layer_freq=1, n_group=1, topk_group=1, topk_method="greedy"),
        **dict(norm_topk_prob=False, routed_scaling_factor=1.0, scoring_func="softmax", aux_loss_alpha=0.001),
        **dict(attention_bias=False, tie_word_embeddings=False, seq_aux=True, max_position_embeddings=163840),
    },
    "deepseek-v3": {
        **dict(model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432, num_hidden_layers=61),
        **dict(num_attention_heads=128, num_key_value_heads=128, hidden_act="silu", rms_norm_eps=1e-06),
        **dict(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        **dict(rope_theta=10000, rope_scaling={**YARN40, "mscale": 1.0, "mscale_all_dim": 1.0}, vocab_size=129280),
        **dict(n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048),
        **dict(first_k_dense_replace=3, moe_layer_freq=1, n_group=8, topk_group=4, topk_method="noaux_tc"),
        **dict(norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid", num_nextn_predict_layers=1),
        **dict(attention_bias=False, tie_word_embeddings=False, ep_size=1, max_position_embeddings=163840),
    },
    "qwen3.5-9b": {
        **dict(model_type="qwen3_5_text", hidden_size=4096, intermediate_size=12288, num_hidden_layers=32),
        **dict(num_attention_heads=16, num_key_value_heads=4, head_dim=256, linear_num_value_heads=32, **QWEN35),
    },
    "qwen3.5-27b": {
        **dict(model_type="qwen3_5_text", hidden_size=5120, intermediate_size=17408, num_hidden_layers=64),
        **dict(num_attention_heads=24, num_key_value_heads=4, head_dim=256, linear_num_value_heads=48, **QWEN35),
        **dict(layer_types=[*["linear_attention"] * 3, "full_attention"] * 16),
    },
    "qwen3.5-35b-a3b": {
        **dict(model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16),
        **dict(num_key_value_heads=2, head_dim=256, linear_num_value_heads=32, **QWEN35),
        **dict(num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, router_aux_loss_coef=0.001),
        **dict(shared_expert_intermediate_size=512),
    },
    "gemma2-2b": {**GEMMA2_2B, "vocab_size": 256000},
    "gemma2-9b": {
        **dict(GEMMA2_2B, vocab_size=256000, hidden_size=3584, intermediate_size=14336, num_hidden_layers=42),
        **dict(num_attention_heads=16, num_key_value_heads=8),
    },
}
"""Of the folders on the Hub, what shapes the model."""
TINY: dict[str, Any] = {
    **dict(num_hidden_layers=3, hidden_size=16, num_attention_heads=4, intermediate_size=24, vocab_size=7),
    **dict(num_key_value_heads=2),
}


V2: dict[str, Any] = dict(
    model_type="deepseek_v2", num_key_value_heads=4, num_experts_per_tok=3, first_k_dense_replace=1
)


def of(**theirs: Any) -> DecoderConfig:
    """The settings of a small model with such a ``config.json``."""
    return DecoderConfig(**settings({"model_type": "llama", **TINY, **theirs}))


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_models(name: str) -> None:
    found = DecoderConfig(**settings(PUBLISHED[name]))
    preset = from_preset(DecoderConfig, name)
    assert (
        replace(preset, head_dim=0 if preset.kv_rank else preset.head_width, preset="tiny", balance_loss=0.0) == found
    )


@pytest.mark.long
def test_presets_have_the_published_sizes() -> None:
    sizes = {"llama3.1-8b": 8_030_261_248, "mistral-7b": 7_241_732_096, "qwen2.5-7b": 7_615_616_512}
    sizes |= {"qwen3-8b": 8_190_735_360, "qwen3-30b-a3b": 30_532_122_624}
    sizes |= {"smollm3-3b": 3_075_098_624, "olmo2-7b": 7_298_617_344, "olmo2-13b": 13_716_198_400}
    sizes |= {"olmo3-7b": 7_298_011_136, "phi3-mini-4k": 3_821_079_552, "phi4": 14_659_507_200}
    sizes |= {"mixtral-8x7b": 46_702_792_704, "qwen1.5-moe-a2.7b": 14_315_784_192}
    sizes |= {"qwen3.5-9b": 8_953_803_264, "qwen3.5-27b": 26_895_998_464, "qwen3.5-35b-a3b": 34_660_610_688}
    sizes |= {"deepseek-v2-lite": 15_706_484_224, "deepseek-v3": 671_026_419_200}
    assert {name: module_of(from_preset(DecoderConfig, name)).parameters() for name in sizes} == sizes


def test_an_absent_key_is_what_transformers_takes_for_it() -> None:
    """As in the language part of LLaVA-1.5's folder."""
    c = DecoderConfig(**settings({"model_type": "llama", "rms_norm_eps": 1e-05, "vocab_size": 32064}))
    preset = from_preset(DecoderConfig, "vicuna-7b", vocab=32064)
    assert replace(preset, head_dim=128, preset="tiny") == c
    assert settings({"model_type": "qwen3"})["head_dim"] == 128
    assert settings({"model_type": "mistral"})["window"] == 4096
    assert settings({"model_type": "qwen2"})["qkv_bias"] and not settings({"model_type": "qwen2"})["o_bias"]


@pytest.mark.parametrize(
    ("rope", "fields"),
    [
        ({"rope_type": "linear", "factor": 4}, {"rope_scaling": "linear", "rope_factor": 4.0}),
        (
            {**LLAMA3, "rope_type": "llama3", "high_freq_factor": 8},
            {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_context": 8192, "rope_turns": (1.0, 8.0)},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_context": 32768},
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "attention_factor": 0.1 * math.log(2) + 1},
            {"rope_scaling": "yarn", "rope_factor": 2.0, "rope_context": 2048, "rope_turns": (1.0, 16.0)},
        ),
    ],
)
def test_both_spellings_of_scaled_frequencies(rope: dict[str, Any], fields: dict[str, Any]) -> None:
    older = {"type" if name == "rope_type" else name: value for name, value in rope.items()}
    found = of(rope_theta=500.0, rope_scaling=older)
    assert found == of(rope_parameters={**rope, "rope_theta": 500.0})
    assert found == replace(of(rope_theta=500.0), **fields)


@pytest.mark.parametrize(
    ("theirs", "window", "full_layers"),
    [
        (dict(model_type="mistral", sliding_window=None), 0, 0),
        (dict(model_type="mistral", sliding_window=9), 9, 0),
        (dict(model_type="qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=2), 9, 2),
        (dict(model_type="qwen3", use_sliding_window=True, sliding_window=9, max_window_layers=28), 0, 0),
        (dict(model_type="qwen2", use_sliding_window=False, sliding_window=9, max_window_layers=2), 0, 0),
        (
            dict(
                **dict(model_type="qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=0),
                layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            ),
            9,
            1,
        ),
    ],
)
def test_windows(theirs: dict[str, Any], window: int, full_layers: int) -> None:
    found = of(**theirs)
    assert (found.window, found.full_layers) == (window, full_layers)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"model_type": "mamba"}, "model_type='mamba': mmjax knows llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': mmjax has 'silu' alone"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic': legal: 'default', 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None: rope_type 'linear' needs a number"),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1]}},
            "mrope_section=[1, 1]: mmjax knows no",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention={"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: mmjax has 1.0 alone"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate=False: mmjax has True"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}},
            "attention_factor=1.5: mmjax has 0.1 ln(factor) + 1 = 1.06931 alone",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale=0.7: mmjax has none"),
        (
            dict(
                **dict(model_type="qwen2", use_sliding_window=True, sliding_window=9),
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            ),
            "layer_types=['sliding_attention', 'full_attention', 'sliding_attention']: mmjax has layers of full",
        ),
        ({"model_type": "deepseek_v32"}, "model_type='deepseek_v32': mmjax knows llama, mistral"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config='fp8': mmjax reads no quantised"),
        ({**V2, "num_key_value_heads": 2}, "num_key_value_heads=2: in latent attention each head has keys of its own"),
        ({**V2, "attention_bias": True}, "attention_bias=True: mmjax has no such biases beside latent attention"),
        ({**V2, "moe_layer_freq": 2}, "moe_layer_freq=2: mmjax has experts in all layers but the first"),
        ({**V2, "topk_method": "noaux_tc"}, "topk_method='noaux_tc': legal: 'greedy', 'group_limited_greedy'"),
        ({**V2, "norm_topk_prob": True}, "norm_topk_prob=True: transformers does not read it for deepseek_v2"),
        ({**V2, "num_experts_per_tok": None}, "num_experts_per_tok=None: is the number of experts of a token"),
        ({**V2, "model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func='softmax': legal: 'sigmoid'"),
        ({**V2, "model_type": "deepseek_v3", "rope_interleave": False}, "rope_interleave=False: mmjax rotates pairs"),
        ({**V2, "rope_scaling": {**YARN40, "mscale": 0.7}}, "mscale=0.7: mscale_all_dim is 0.0; mmjax has both above"),
        (
            {**V2, "rope_scaling": {**YARN40, "mscale": 1, "mscale_all_dim": 1, "attention_factor": 1.5}},
            "attention_factor=1.5: mmjax has the factor of mscale and mscale_all_dim = 1 alone",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [0, 1, 1]},
            "no_rope_layers=[0, 1, 1]: mmjax has the last of each",
        ),
        (
            {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 5},
            "use_sliding_window=True: mmjax has no window in the layers without positions",
        ),
        (
            {"model_type": "olmo3", "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
            "layer_types=['full_attention', 'sliding_attention', 'sliding_attention']: mmjax has one layer of",
        ),
        (
            {"model_type": "olmo3", "rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            "rope_type of sliding_attention='yarn': mmjax has 'default' alone",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}},
            "rope_type='su': mmjax has 'default' alone for Phi-3: LongRoPE's frequencies depend on a text's length",
        ),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step=2: mmjax has experts in all"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [2]}, "mlp_only_layers=[2]: mmjax has layers without experts"),
        ({"model_type": "qwen2_moe", "use_sliding_window": True}, "use_sliding_window=True: mmjax has no window in"),
        (
            {"model_type": "qwen3_5_text", "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
            "layer_types=['full_attention', 'linear_attention', 'linear_attention']: mmjax has one layer of",
        ),
        (
            {"model_type": "qwen2_moe", "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12},
            "shared_expert_intermediate_size=12: mmjax has multiples of moe_intermediate_size, 8",
        ),
    ],
)
def test_what_mmjax_does_not_compute_is_refused(theirs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        of(**theirs)
    assert str(error.value).startswith(f"config.json: {message}") and "\n" not in str(error.value)


KINDS = {
    "llama": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "mistral": {"window": 9},
    "qwen2": {"qkv_bias": True, "window": 9, "full_layers": 1},
    "qwen3": {"qk_norm": True, "qkv_bias": True, "o_bias": True, "window": 9, "full_layers": 2},
    "smollm3": {"nope_every": 2, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "mixtral": {"experts": 5, "experts_per_token": 3, "window": 9},
    "qwen2_moe": {
        **{"experts": 5, "expert_mlp": 8, "shared_experts": 3, "shared_gate": True, "dense_layers": 1},
        **{"qkv_bias": True, "router_normalised": False},
    },
    "qwen3_moe": {
        **{"experts": 5, "expert_mlp": 8, "dense_layers": 2, "window": 9},
        **{"qk_norm": True, "qkv_bias": True, "o_bias": True},
    },
}
LATENT_SIZES = {"kv_heads": 4, "head_dim": 0, "kv_rank": 9, "nope_head_dim": 5, "rope_head_dim": 4, "v_head_dim": 3}
LATENT = {
    "deepseek_v2": {
        **LATENT_SIZES,
        **{"experts": 6, "expert_mlp": 8, "experts_per_token": 3, "shared_experts": 2, "dense_layers": 1},
        **{"router_normalised": False, "router_groups": 3, "router_group_limit": 2, "router_scale": 16.0},
    },
    "deepseek_v3": {
        **LATENT_SIZES,
        **{"experts": 6, "expert_mlp": 8, "experts_per_token": 3, "shared_experts": 1, "q_rank": 7},
        **{"router": "sigmoid", "router_bias": True, "router_scale": 2.5},
    },
}
DELTA = {
    **{"qk_norm": True, "norm_plus_one": True, "attention_gate": True, "rope_share": 0.7, "delta_heads": 2},
    **{"delta_value_heads": 6, "delta_key_dim": 5, "delta_value_dim": 7, "delta_taps": 3, "attention_every": 2},
}
KINDS |= LATENT | {"qwen3_5_text": DELTA}
KINDS["qwen3_5_moe_text"] = {**DELTA, "experts": 5, "expert_mlp": 8, "shared_experts": 3, "shared_gate": True}
GEMMA = {
    **{"norm_plus_one": True, "post_norms": True, "scaled_embed": True, "activation": "gelu_exact", "tied": True},
    **{"score_width": 5.0, "score_cap": 7.0, "logit_cap": 9.0, "window": 9, "full_every": 2, "o_bias": True},
    "qkv_bias": True,
}
OLMO2 = {
    **{"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_whole": True, "qkv_bias": True},
    "o_bias": True,
}
KINDS |= {"olmo2": OLMO2, "olmo3": {**OLMO2, "window": 9, "full_every": 2, "local_rope_theta": 500000.0}}
KINDS |= {"gemma2": GEMMA, "gemma3_text": {**GEMMA, "qk_norm": True, "local_rope_theta": 55.0}}
ROPES = (
    {},
    {"rope_scaling": "linear", "rope_factor": 3.0},
    {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_context": 64, "rope_turns": (1.0, 5.0)},
    {"rope_scaling": "yarn", "rope_factor": 8.0, "rope_context": 64},
)


CASES = [*product(KINDS, ROPES), ("phi3", {"window": 9, "rope_share": 0.7})]


@pytest.mark.parametrize(("kind", "rope"), CASES)
def test_settings_make_a_config_that_means_the_same(kind: str, rope: dict[str, Any]) -> None:
    own = of()
    for some in ({}, {"tied": True, "head_dim": 6, "norm_eps": 1e-3, "rope_theta": 77.0}):
        c = replace(own, **{**some, **KINDS.get(kind, {}), **rope})
        theirs = to_hf_config(c, dtype="bfloat16")
        assert theirs["model_type"] == kind and DecoderConfig(**settings(theirs)) == c
        for older in (("rope_parameters",), ("rope_theta", "rope_scaling")):  # either spelling is enough
            left = {key: value for key, value in theirs.items() if key not in older}
            assert DecoderConfig(**settings(left)) == c
        assert theirs["max_position_embeddings"] == 4096 and theirs["dtype"] == "bfloat16"


def test_a_plain_model_can_be_of_any_type_that_has_no_more() -> None:
    c = of()
    assert to_hf_config(c)["model_type"] == "llama"
    assert to_hf_config(c, model_type="mistral")["sliding_window"] is None
    scaled = replace(c, rope_scaling="yarn", rope_factor=4.0, rope_context=8192)
    assert to_hf_config(scaled)["max_position_embeddings"] == 32768


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"qk_norm": True, "mlp_bias": True}, "", "Decoder.qk_norm=True: no model of type 'llama' or 'mistral' or"),
        ({"qk_norm": True}, "qwen2", "Decoder.qkv_bias=False: no model of type 'qwen2' has it"),
        ({"o_bias": True}, "", "Decoder.qkv_bias=False: no model of type 'llama'"),
        ({}, "phi", "model_type='phi': did you mean 'phi3'? legal: 'llama'"),
        ({"mask": "gemma3"}, "", "Decoder.mask='gemma3': no model of type 'llama' or 'mistral' or"),
        ({"window": 9, "full_every": 2}, "mistral", "Decoder.window=9: no model of type 'mistral' has it"),
        ({"experts": 4, "router": "sigmoid"}, "", "Decoder.router='sigmoid': no model of type 'llama' or"),
        ({"experts": 4, "router_bias": True}, "mixtral", "Decoder.router_bias=True: no model of type 'mixtral'"),
        ({"experts": 4}, "llama", "Decoder.experts=4: no model of type 'llama' has it"),
        (LATENT_SIZES, "llama", "Decoder.kv_rank=9: no model of type 'llama' has it"),
        ({}, "deepseek_v2", "Decoder.kv_rank=0: no model of type 'deepseek_v2' has it"),
        ({**LATENT["deepseek_v2"], "router_bias": True}, "deepseek_v2", "Decoder.router_bias=True: no model of type"),
        ({**LATENT["deepseek_v3"], "window": 9}, "", "Decoder.window=9: no model of type 'llama' or 'mistral' or"),
        ({**DELTA, "attention_gate": False}, "", "Decoder.attention_gate=False: no model of type 'llama' or"),
        (DELTA, "qwen3", "Decoder.delta_heads=2: no model of type 'qwen3' has it"),
        ({**GEMMA, "post_norms": False}, "gemma2", "Decoder.post_norms=False: no model of type 'gemma2' has it"),
        ({**GEMMA, "local_rope_theta": 55.0}, "gemma2", "Decoder.local_rope_theta=55.0: no model of type"),
        ({**OLMO2, "post_norms": True, "pre_norms": True}, "olmo2", "Decoder.pre_norms=True: no model of type 'olmo2'"),
        (
            {"qk_norm": True, "qk_norm_whole": True},
            "qwen3",
            "Decoder.qk_norm_whole=True: no model of type 'qwen3' has it",
        ),
        ({"rope_share": 0.5}, "llama", "Decoder.rope_share=0.5: no model of type 'llama' has it"),
        ({"rope_share": 0.5, "o_bias": True}, "phi3", "Decoder.o_bias=True: no model of type 'phi3' has it"),
        ({"score_cap": 5.0}, "", "Decoder.score_cap=5.0: no model of type 'llama' or"),
        ({"chunk": 9}, "", "Decoder.window=0: no model of type 'llama' or 'mistral' or"),
        ({"vocab": 0}, "", "Decoder.vocab=0: set it to the tokenizer's vocabulary first"),
    ],
)
def test_what_no_type_has_is_refused(changes: dict[str, Any], kind: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        to_hf_config(replace(of(), **changes), model_type=kind)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": -1}, "Decoder.window=-1: must be 0 or more"),
        ({"full_layers": 2}, "Decoder.full_layers=2: the other layers have no window; set Decoder.window"),
        ({"full_layers": 5, "window": 4}, "Decoder.full_layers=5: must be Decoder.layers (4) or less"),
        ({"full_every": 2}, "Decoder.full_every=2: the other layers have no window; set Decoder.window"),
        ({"full_every": 2, "full_layers": 1, "window": 4}, "Decoder.full_every=2: Decoder.full_layers=1 says which"),
        ({"pre_norms": False}, "Decoder.pre_norms=False: set Decoder.post_norms too"),
        ({"mask": "gemma"}, "Decoder.mask='gemma': did you mean 'gemma3'?"),
        ({"mask": "full", "window": 4}, "Decoder.window=4: Decoder.mask='full' shows nothing 'before'; set it to 0"),
        ({"chunk": 4, "rope_sections": (2, 3, 3)}, "Decoder.chunk=4: chunks are cut by a token's place in its sample"),
        ({"rope_scaling": "lama3"}, "Decoder.rope_scaling='lama3': did you mean 'llama3'?"),
        ({"rope_factor": 2.0}, "Decoder.rope_factor=2.0: changes nothing without a Decoder.rope_scaling"),
        ({"rope_factor": 0.5, "rope_scaling": "linear"}, "Decoder.rope_factor=0.5: must be 1 or more, such as 8.0"),
        ({"rope_scaling": "yarn", "rope_factor": 2.0}, "Decoder.rope_context=0: must be above 0, such as 8192"),
        ({"rope_scaling": "linear", "rope_theta": 1.0}, "Decoder.rope_theta=1.0: must be above 1"),
        ({"experts": 4, "experts_per_token": 5}, "Decoder.experts_per_token=5: a token can choose among 4 experts"),
        ({"experts": 4, "router_groups": 3}, "Decoder.router_groups=3: "),
        ({"experts": 4, "router_groups": 2, "router_group_limit": 3}, "Decoder.router_group_limit=3: there are 2"),
        ({"experts": 4, "dense_layers": 4}, "Decoder.dense_layers=4: layers of experts follow"),
        ({"experts": 4, "shared_gate": True}, "Decoder.shared_gate=True: is of shared experts"),
        ({"experts": 4, "router": "sigmod"}, "Decoder.router='sigmod': did you mean 'sigmoid'?"),
        (
            {"delta_heads": 2, "delta_value_heads": 3},
            "Decoder.delta_heads=2: must divide Decoder.delta_value_heads (3)",
        ),
        ({"delta_heads": 2, "delta_taps": 1}, "Decoder.delta_taps=1: a convolution reads tokens before"),
        ({"delta_heads": 2, "mask": "gemma3"}, "Decoder.mask='gemma3': delta layers see earlier tokens of a sample"),
        ({"rope_share": 0.2}, "Decoder.rope_share=0.2: must be above 0, at most 1, and rotate an even number of"),
        ({"kv_rank": 8}, "Decoder.nope_head_dim=0: must be above 0, such as 64"),
        ({"kv_rank": 8, "nope_head_dim": 4, "rope_head_dim": 4}, "Decoder.kv_heads=2: with Decoder.kv_rank each head"),
        ({**LATENT_SIZES, "head_dim": 8}, "Decoder.head_dim=8: latent attention has Decoder.nope_head_dim and"),
        ({**LATENT_SIZES, "rope_head_dim": 3}, "Decoder.rope_head_dim=3: must be even"),
        ({**LATENT_SIZES, "qkv_bias": True}, "Decoder.qkv_bias=True: latent attention (Decoder.kv_rank) has none"),
        ({**LATENT_SIZES, "attention": "cudnn"}, "Decoder.attention='cudnn': cuDNN takes keys and values of one width"),
        (
            {**LATENT_SIZES, "rope_sections": (1, 1, 2)},
            "Decoder.rope_sections=(1, 1, 2): must be three numbers, 0 or more, ",
        ),
        (
            {"local_rope_theta": 5.0, "rope_sections": (2, 3, 3)},
            "Decoder.local_rope_theta=5.0: layers with a window have",
        ),
        ({"activation": "gelo"}, "Decoder.activation='gelo': did you mean 'gelu'?"),
        ({"score_cap": -1.0}, "Decoder.score_cap=-1.0: must be 0 or more"),
        ({"rope_turns": (4.0, 1.0)}, "Decoder.rope_turns=(4.0, 1.0): must be two numbers above 0, the smaller first"),
    ],
)
def test_settings_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        DecoderConfig(**changes)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
