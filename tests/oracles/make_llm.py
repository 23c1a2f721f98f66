"""Makes tiny random language models with transformers, saves them, and keeps what they compute.

    python tests/oracles/make_llm.py [FAMILY ...]    # needs torch and transformers

Under ``tests/oracles/llm/<family>``: ``config.json`` and ``model.safetensors`` as ``save_pretrained`` writes them, in
bf16, and ``values.npz`` of the same weights in fp32: for several sequences, each run alone, the hidden states behind
the last norm, the logits, and the log-probability of each next token; and the versions that made them. No bias is 0 and
no scale is 1 (of Qwen3.5 and Gemma, whose scales are 1 + weight, no weight is 0). Sequences are longer than windows and
than the context before it was scaled.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

HERE = Path(__file__).parent / "llm"
LENGTHS = (7, 11, 38)
SEED = 0
SIZES: dict[str, Any] = dict(
    vocab_size=67,
    hidden_size=24,
    intermediate_size=20,
    head_dim=8,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)


def _rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, **numbers}}


LATENT: dict[str, Any] = {**SIZES, "num_key_value_heads": 4, "head_dim": 8} | dict(
    **dict(kv_lora_rank=10, q_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=5),
    **dict(n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, n_shared_experts=2),
    **dict(first_k_dense_replace=1, n_group=4, topk_group=2, bos_token_id=1, eos_token_id=2),
)
LOCAL = ["sliding_attention"] * 2
YARN = dict(rope_theta=100.0, factor=4.0, original_max_position_embeddings=16)
LLAMA3 = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=2.0, original_max_position_embeddings=16)
GEMMA4: dict[str, Any] = {**SIZES, "num_hidden_layers": 6} | dict(
    **dict(global_head_dim=16, sliding_window=6, hidden_size_per_layer_input=0, vocab_size_per_layer_input=67),
    **dict(layer_types=[*LOCAL, "full_attention"] * 2, pad_token_id=None),
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
    },
)
FAMILIES: dict[str, Any] = {
    "llama2": LlamaConfig(
        **{**SIZES, "hidden_size": 32, "num_key_value_heads": 4, "head_dim": None},
        **_rope("default", rope_theta=10000.0),
    ),
    "llama_biases": LlamaConfig(
        **SIZES,
        **_rope("linear", rope_theta=10000.0, factor=4.0),
        **dict(attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5, tie_word_embeddings=True),
    ),
    "llama31": LlamaConfig(**SIZES, **_rope("llama3", rope_theta=20.0, **LLAMA3), rms_norm_eps=1e-5),
    "mistral": MistralConfig(**SIZES, **_rope("default", rope_theta=10000.0), sliding_window=6),
    "qwen2": Qwen2Config(
        **SIZES,
        **_rope("default", rope_theta=1000000.0),
        **dict(use_sliding_window=True, sliding_window=5, max_window_layers=1, tie_word_embeddings=True),
    ),
    "qwen3": Qwen3Config(
        **{**SIZES, "head_dim": 12},
        **_rope("yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16),
    ),
    "mixtral": MixtralConfig(
        **SIZES, **_rope("default", rope_theta=1000000.0), sliding_window=6, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **{**SIZES, "head_dim": 12},
        **_rope("default", rope_theta=1000000.0),
        **dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True),
        mlp_only_layers=[0],
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES,
        **_rope("default", rope_theta=1000000.0),
        **dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=12, shared_expert_intermediate_size=24),
    ),
    "deepseek_v2_lite": DeepseekV2Config(
        **{**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
        **_rope("yarn", **YARN, mscale=0.7, mscale_all_dim=0.7),
    ),
    "deepseek_v2": DeepseekV2Config(
        **LATENT,
        **_rope("yarn", **YARN, mscale=0.7, mscale_all_dim=1.3),
        **dict(topk_method="group_limited_greedy", routed_scaling_factor=1.5),
    ),
    "deepseek_v3": DeepseekV3Config(
        **LATENT,
        **_rope("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0),
        **dict(norm_topk_prob=True, routed_scaling_factor=2.5, num_mtp_layers=0),
    ),
    "qwen3_5_text": Qwen3_5TextConfig(
        **{**SIZES, "head_dim": 16, "num_hidden_layers": 5},
        **_rope("default", rope_theta=10000.0, partial_rotary_factor=0.25, mrope_section=[1, 1, 0]),
        **dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=5),
        **dict(layer_types=["linear_attention", "linear_attention", "full_attention"] + ["linear_attention"] * 2),
    ),
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig(
        **{name: size for name, size in SIZES.items() if name not in ("intermediate_size", "head_dim")},
        **_rope("default", rope_theta=10000.0, partial_rotary_factor=0.5),
        **dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=5, linear_value_head_dim=6),
        **dict(head_dim=8, full_attention_interval=2, num_experts=6, num_experts_per_tok=2),
        **dict(moe_intermediate_size=12, shared_expert_intermediate_size=12),
    ),
    "gemma3_text": Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 5},
        **dict(sliding_window=6, query_pre_attn_scalar=12, layer_types=[*LOCAL, "full_attention", *LOCAL]),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
        },
    ),
    "gemma2": Gemma2Config(
        **{**SIZES, "num_hidden_layers": 4},
        **_rope("default", rope_theta=1000.0),
        **dict(sliding_window=6, query_pre_attn_scalar=5, attn_logit_softcapping=2.0, final_logit_softcapping=0.3),
    ),
    "smollm3": SmolLM3Config(
        **{**SIZES, "num_hidden_layers": 5},
        **_rope("default", rope_theta=100.0),
        **dict(no_rope_layers=[1, 0, 1, 0, 1], tie_word_embeddings=True, attention_bias=True, pad_token_id=None),
    ),
    "olmo2": Olmo2Config(
        **SIZES, **_rope("default", rope_theta=1000.0), **dict(attention_bias=True, pad_token_id=None)
    ),
    "olmo3": Olmo3Config(
        **{**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 4},
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {
                **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16},
                "attention_factor": 0.1 * float(np.log(4.0)) + 1,
            },
        },
        **dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=None),
    ),
    "phi3": Phi3Config(
        **SIZES,
        **_rope("default", rope_theta=100.0, partial_rotary_factor=0.5),
        **dict(sliding_window=9, pad_token_id=None),
    ),
    "gemma4_text": Gemma4TextConfig(
        **GEMMA4, **dict(attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=0.3)
    ),
    "gemma4_moe": Gemma4TextConfig(
        **GEMMA4,
        **dict(attention_k_eq_v=True, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=12),
    ),
    "gemma4_shared": Gemma4TextConfig(
        **{**GEMMA4, "num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4},
        **dict(num_kv_shared_layers=3, use_double_wide_mlp=True),
    ),
    "gemma4_per_layer": Gemma4TextConfig(
        **{**GEMMA4, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | dict(num_kv_shared_layers=2, hidden_size_per_layer_input=6),
    ),
}


def random_model(config: Any, seed: int) -> Any:
    """A model with random weights that bf16 holds, in fp32."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator, is_qwen35 = torch.Generator().manual_seed(seed), "qwen3_5" in config.model_type
    is_around_0 = is_qwen35 or config.model_type in ("gemma2", "gemma3_text")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                scale = 1.0 if is_qwen35 else 1.5  # its fp32 gradients would be 1e-4 from those of fp64
                # Embeddings of Gemma are multiplied, and would hide what layers add.
                embedded = 0.05 if "gemma" in config.model_type else 1.0
                drawn = drawn * (embedded if "embed" in name else scale * weight.shape[-1] ** -0.5)
            else:
                # The rates of delta layers differ, and some are small, so that states last.
                around_1 = not name.endswith("bias") and ("linear_attn" in name or not is_around_0)
                # The rates of delta layers differ, and some are small, so that states last.
                drawn = 2 * drawn - 2 if name.endswith("A_log") else 0.3 * drawn + (1.0 if around_1 else 0.0)
            if name.endswith("q_norm.weight") and config.model_type == "gemma4_text":
                drawn = 0.4 * drawn  # it has the divisor of scores, which are not divided there
            weight.copy_(drawn.bfloat16())
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_((0.2 * torch.randn(bias.shape, generator=generator)).bfloat16())
            if name.endswith("layer_scalar"):
                bias.copy_((1 + 0.2 * torch.randn(bias.shape, generator=generator)).bfloat16())
    return model


def values(model: Any, sequences: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Hidden states, logits and log-probabilities of next tokens, of one sequence behind the other."""
    found: dict[str, list[np.ndarray]] = {"hidden": [], "logits": [], "logprobs": []}
    for tokens in sequences:
        ids = torch.from_numpy(tokens)[None].long()
        with torch.no_grad():
            # Without further outputs transformers slices inputs of Gemma 4's layers that may be None.
            hidden = model.model(input_ids=ids, output_hidden_states=True).last_hidden_state
            logits, cap = model.lm_head(hidden), getattr(model.config, "final_logit_softcapping", None)
            logits = torch.tanh(logits / cap) * cap if cap else logits
        assert torch.equal(logits, model(input_ids=ids, output_hidden_states=True).logits)
        chosen = torch.log_softmax(logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        for name, value in (("hidden", hidden[0]), ("logits", logits[0]), ("logprobs", chosen)):
            found[name].append(value.detach().numpy())
    return {name: np.concatenate(parts) for name, parts in found.items()}


def make(family: str) -> None:
    """Writes the folder of a family."""
    folder = HERE / family
    folder.mkdir(parents=True, exist_ok=True)
    number = SEED + list(FAMILIES).index(family)
    model = random_model(FAMILIES[family], number)
    rng = np.random.default_rng(number)
    sequences = [rng.integers(0, 67, length).astype(np.int32) for length in LENGTHS]
    made = values(model, sequences)
    versions = [f"{one.__name__} {one.__version__}" for one in (transformers, torch, np)]
    made |= {"tokens": np.concatenate(sequences), "lengths": np.array(LENGTHS), "versions": np.array(versions)}
    np.savez_compressed(folder / "values.npz", allow_pickle=False, **made)
    model.bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    for name in sys.argv[1:] or FAMILIES:
        make(name)
