"""Model types of language models that are read, and the values of ``transformers`` for missing keys.

Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from mmjax.models.llama.smollm3_weights import SMOLLM3

Json = Mapping[str, Any]
"""The contents of a ``config.json``, or its part on the language model."""

_LLAMA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL = _LLAMA | {
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
}
_QWEN2 = _LLAMA | {
    "num_key_value_heads": 32,
    "intermediate_size": 22016,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN2_VL = _QWEN2 | {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "vocab_size": 152064,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1000000.0,
}
_QWEN3_VL = _QWEN2 | {"head_dim": 128, "rope_theta": 500000.0}
_QWEN3_VL_MOE = _QWEN3_VL | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": None,
    **expert_weights.QWEN3_VL_DEFAULTS,
}
_WITH_EXPERTS = {
    "mixtral": {**_MISTRAL, "sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0},
    "qwen2_moe": _QWEN2
    | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16}
    | {"num_key_value_heads": 16, "qkv_bias": True},
    "qwen3_moe": _QWEN2
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4},
}
_OTHERS: Mapping[str, Json] = {
    **{**deepseek_weights.DEFAULTS, **qwen35_weights.DEFAULTS},
    **{**gemma_weights.DEFAULTS, **gemma4_weights.DEFAULTS},
    **olmo_weights.DEFAULTS,
    phi3_weights.PHI3: phi3_weights.DEFAULTS,
}
ALONE = ("llama", "mistral", "qwen2", "qwen3", SMOLLM3, *_WITH_EXPERTS, *_OTHERS)
"""Model types of folders of a language model alone."""
QWEN3_MROPE = ("qwen3_vl", "qwen3_vl_text", *expert_weights.QWEN3_VL)
"""Those whose sections are interleaved."""
MROPE = ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", *QWEN3_MROPE)
"""Model types of language models with M-RoPE; older folders have the type of the composite model."""
DEFAULTS: Mapping[str, Json] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128},
    **dict.fromkeys(MROPE, _QWEN2_VL),
    **dict.fromkeys(QWEN3_MROPE, _QWEN3_VL),
    **dict.fromkeys(expert_weights.QWEN3_VL, _QWEN3_VL_MOE),
    **{kind: {**values, **expert_weights.DEFAULTS[kind]} for kind, values in _WITH_EXPERTS.items()},
    **_OTHERS,
    SMOLLM3: smollm3_weights.DEFAULTS,
}
"""The defaults of transformers for missing keys, by model type; published files leave some out."""
