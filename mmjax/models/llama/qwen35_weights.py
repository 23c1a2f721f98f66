"""Qwen3.5 and Qwen3.6 in folders of transformers: rows of gated delta layers, and their part of ``config.json``.

Values of ``model_type`` are qwen3_5_text and, with experts (see ``expert_weights``), qwen3_5_moe_text; folders of the
composite models, qwen3_5 and qwen3_5_moe, have them as their "text_config".
A folder of the text alone has no images: a token of text has one number for all three axes of interleaved M-RoPE, which
then is plain rotation. In a composite model the axes have their sections. Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.models.llama import expert_weights
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.layer_types import layer_types, period
from mmjax.weights.table import SAME, TRANSPOSED, Row, View

Json = Mapping[str, Any]
"""The contents of a ``config.json``, or its part on the language model."""
_DENSE: Json = {
    **{"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"head_dim": 256, "intermediate_size": 12288, "vocab_size": 248320, "hidden_act": "silu"},
    **{"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 32768},
    **{"attention_bias": False, "mlp_bias": False, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
    **{"layer_types": None, "full_attention_interval": 4},
}
_MOE = "qwen3_5_moe_text"
DEFAULTS: Mapping[str, Json] = {
    "qwen3_5_text": _DENSE,
    _MOE: {
        **_DENSE,
        **{"num_hidden_layers": 40, "hidden_size": 2048, "num_key_value_heads": 2, "intermediate_size": 512},
        **expert_weights.DEFAULTS[_MOE],
    },
}
"""The defaults of transformers for missing keys, by model type."""
ROPE_KEYS = frozenset({"mrope_section", "mrope_interleaved"})
"""Keys of ``rope_parameters`` that change nothing for text alone."""
SECTIONS = (11, 11, 10)
"""The default of transformers for ``mrope_section``."""
UNUSED = r"mtp\..*"
"""A regular expression for keys of layers that predict a second token, which transformers does not read either."""
_ROPE_SHARE = 0.25
_LAYER = "model.layers.{}.linear_attn"
_KINDS = ("linear_attention", "full_attention")


def delta_layers(c: DecoderConfig) -> tuple[int, ...]:
    """The indices of a decoder's delta layers."""
    return tuple(layer for layer in range(c.layers) if c.has_delta(layer))


def attention_layers(c: DecoderConfig) -> tuple[int, ...] | None:
    """The indices of a decoder's layers with attention; ``None`` for all."""
    return tuple(layer for layer in range(c.layers) if not c.has_delta(layer)) if c.delta_heads else None


def delta_rows(c: DecoderConfig) -> Iterator[Row]:
    """Yields the rows of a decoder's delta layers: none without such layers."""
    sizes, layers = c.delta, delta_layers(c)
    if not layers:
        return

    def row(leaf: str, key: str, view: View = SAME) -> Row:
        return Row(f"layers/{{}}/delta/{leaf}", (f"{_LAYER}.{key}",), view, layers=layers)

    start = 0
    for name, width in _widths(c).items():
        rows = (start, start + width)
        yield row(name, "in_proj_qkv.weight", View(order=TRANSPOSED.order, rows=rows))
        yield row(f"{name}_filter", "conv1d.weight", View(theirs=(width, 1, sizes.taps), rows=rows))
        start += width
    for name, key in {"gate": "in_proj_z", "strength": "in_proj_b", "decay": "in_proj_a", "o": "out_proj"}.items():
        yield row(name, f"{key}.weight", TRANSPOSED)
    for name, key in {"log_rate": "A_log", "step_bias": "dt_bias", "norm": "norm.weight"}.items():
        yield row(name, key)


def _widths(c: DecoderConfig) -> dict[str, int]:
    """Numbers of all heads of queries, keys and values, in the order in which a folder has them."""
    keys = c.delta.heads * c.delta.key_dim
    return {"q": keys, "k": keys, "v": c.delta.value_heads * c.delta.value_dim}


def layer_settings(t: Json) -> dict[str, Any]:
    """Fields of ``DecoderConfig`` on norms, gates and delta layers, by name, from a ``config.json`` without missing
    keys.

    Raises:
      ConfigError: mmjax has no such layers; the message names the key and its value.
    """
    every = period(t, _KINDS, t["full_attention_interval"]) or t["num_hidden_layers"] + 1  # none has attention
    return {
        "norm_plus_one": True,
        "attention_gate": True,
        "delta_heads": t["linear_num_key_heads"],
        "delta_value_heads": t["linear_num_value_heads"],
        "delta_key_dim": t["linear_key_head_dim"],
        "delta_value_dim": t["linear_value_head_dim"],
        "delta_taps": t["linear_conv_kernel_dim"],
        "attention_every": every,
    }


def rope_share(t: Json, rope: Json) -> float:
    """``Decoder.rope_share``, from a ``config.json`` and its part on rotary embedding."""
    share = rope.get("partial_rotary_factor", t.get("partial_rotary_factor"))
    return _ROPE_SHARE if share is None else float(share)


def config_entries(c: DecoderConfig, kind: str) -> dict[str, Any]:
    """The entries of a ``config.json`` of this ``model_type`` on delta layers, and its architecture."""
    sizes = c.delta
    return {
        "architectures": ["Qwen3_5MoeForCausalLM" if kind == _MOE else "Qwen3_5ForCausalLM"],
        "attention_bias": c.o_bias,
        "linear_num_key_heads": sizes.heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_conv_kernel_dim": sizes.taps,
        "layer_types": layer_types(c.layers, c.attention_every, _KINDS),
        "partial_rotary_factor": c.rope_share,
    }


def rope_entries(c: DecoderConfig) -> dict[str, Any]:
    """The entries of rotary embedding beside those of other models; sections are in the published proportion."""
    pairs = c.rotary_width // 2
    sections = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3]
    return {"partial_rotary_factor": c.rope_share, "mrope_section": sections, "mrope_interleaved": True}
