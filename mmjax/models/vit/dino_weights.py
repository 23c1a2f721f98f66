"""DINOv2 and DINOv3 in folders of transformers: their part of ``config.json``, and rows that other towers lack.

DINOv2 with registers has the type "dinov2_with_registers", and DINOv3's vision transformers "dinov3_vit". Imports no
JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.configurable import require
from mmjax.models.vit.config import ViTConfig
from mmjax.weights.table import SAME, TRANSPOSED, View

DINOV2 = ("dinov2", "dinov2_with_registers")
DINOV3 = "dinov3_vit"
WITH_REGISTERS = (DINOV2[1], DINOV3)
_DINOV2: Mapping[str, Any] = {
    **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3, "mlp_ratio": 4},
    **{"image_size": 224, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "use_swiglu_ffn": False},
    "qkv_bias": True,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "dinov2": _DINOV2,
    "dinov2_with_registers": {**_DINOV2, "patch_size": 16, "num_register_tokens": 4},
    DINOV3: {
        **{"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "num_channels": 3},
        **{"intermediate_size": 1536, "image_size": 224, "patch_size": 16, "hidden_act": "gelu"},
        **{"layer_norm_eps": 1e-5, "rope_theta": 100.0, "use_gated_mlp": False, "num_register_tokens": 0},
        **{"query_bias": True, "key_bias": False, "value_bias": True, "proj_bias": True, "mlp_bias": True},
    },
}
"""The defaults of transformers for missing keys, by family."""
_NAMES2 = {
    **{"attn_norm": "norm1", "attn/q": "attention.attention.query", "attn/k": "attention.attention.key"},
    **{"attn/v": "attention.attention.value", "attn/o": "attention.output.dense", "mlp_norm": "norm2"},
}
NAMES: Mapping[str, Mapping[str, str]] = {
    **{family: {**_NAMES2, "mlp/up": "mlp.fc1", "mlp/down": "mlp.fc2"} for family in DINOV2},
    DINOV3: {
        **{"attn_norm": "norm1", "attn/q": "attention.q_proj", "attn/k": "attention.k_proj"},
        **{"attn/v": "attention.v_proj", "attn/o": "attention.o_proj", "mlp_norm": "norm2"},
        **{"mlp/up": "mlp.up_proj", "mlp/down": "mlp.down_proj"},
    },
}
"""Keys of a layer's norms and products, by leaf and family; those of a gated mlp are in ``gated_rows``."""
_RATIOS = range(1, 17)


def settings(family: str, c: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ViTConfig`` that differ from other towers', by name, from a ``config.json`` without missing keys.

    Raises:
      ConfigError: mmjax has no such biases; the message names the key and its value.
    """
    common = {"layer_scale": True, "class_token": True, "registers": c.get("num_register_tokens", 0)}
    if family in DINOV2:
        mlp, gated = int(c["hidden_size"] * c["mlp_ratio"]), bool(c["use_swiglu_ffn"])
        values = common | {"mlp": _gated_width(mlp) if gated else mlp, "qkv_bias": bool(c["qkv_bias"]), "gated": gated}
        values |= {"interpolate": "bicubic_smooth"} if family in WITH_REGISTERS else {}
        return values | ({"activation": "silu"} if gated else {})  # whatever hidden_act says
    for key in ("proj_bias", "mlp_bias"):
        require(c[key], f"config.json: {key}", c[key], "mmjax has True alone")
    qkv_bias, fix = bool(c["query_bias"]), "mmjax has a bias of queries and values, or of neither"
    require(bool(c["value_bias"]) == qkv_bias, "config.json: value_bias", c["value_bias"], fix)
    fix = "mmjax has a bias of keys beside those of queries alone"
    require(qkv_bias or not c["key_bias"], "config.json: key_bias", c["key_bias"], fix)
    return {
        **common,
        **{"mlp": c["intermediate_size"], "gated": bool(c["use_gated_mlp"]), "qkv_bias": qkv_bias},
        **{"k_bias": bool(c["key_bias"]) or not qkv_bias, "positions": "axial_centres", "interpolate": "none"},
        "rope_theta": float(c["rope_theta"]),
    }


def _gated_width(mlp: int) -> int:
    """Hidden units of DINOv2's gated mlp: two thirds, rounded up to a multiple of 8."""
    return (int(mlp * 2 / 3) + 7) // 8 * 8


def config_entries(c: ViTConfig, family: str) -> dict[str, Any]:
    """The entries of a ``config.json`` beside those of other towers."""
    registers = {} if family == "dinov2" else {"num_register_tokens": c.registers}
    if family in DINOV2:
        ratio = c.mlp / c.width
        if c.gated:
            fitting = (ratio for ratio in _RATIOS if _gated_width(ratio * c.width) == c.mlp)
            ratio = next(fitting, 1.5 * ratio)
        ratio = int(ratio) if ratio == int(ratio) else ratio
        return {"mlp_ratio": ratio, "use_swiglu_ffn": c.gated, "qkv_bias": c.qkv_bias, **registers}
    biases = {"query_bias": c.qkv_bias, "key_bias": c.qkv_bias and c.k_bias, "value_bias": c.qkv_bias}
    biases |= {"proj_bias": True, "mlp_bias": True}
    return {**registers, **biases, "use_gated_mlp": c.gated, "rope_theta": c.rope_theta}


Named = Iterator[tuple[str, str, View]]


def gated_rows(c: ViTConfig, family: str, layer: str) -> Named:
    """Yields the leaves of a gated mlp, each with its key and view; ``layer`` begins a layer's keys."""
    if family == DINOV3:
        for name in ("gate", "up", "down"):
            yield f"layers/{{}}/mlp/{name}", f"{layer}.mlp.{name}_proj.weight", TRANSPOSED
            yield f"layers/{{}}/mlp/{name}_bias", f"{layer}.mlp.{name}_proj.bias", SAME
        return
    for number, name in enumerate(("gate", "up")):
        rows = (number * c.mlp, (number + 1) * c.mlp)
        view = View(TRANSPOSED.order, (c.mlp, c.width), rows)
        yield f"layers/{{}}/mlp/{name}", f"{layer}.mlp.weights_in.weight", view
        yield f"layers/{{}}/mlp/{name}_bias", f"{layer}.mlp.weights_in.bias", View(theirs=(c.mlp,), rows=rows)
    yield "layers/{}/mlp/down", f"{layer}.mlp.weights_out.weight", TRANSPOSED
    yield "layers/{}/mlp/down_bias", f"{layer}.mlp.weights_out.bias", SAME


def stem_rows(c: ViTConfig, family: str) -> Named:
    """Yields the class token, registers and positions, each with its key and view."""
    yield "class_token", "embeddings.cls_token", View(theirs=(1, 1, c.width))
    if c.registers:
        yield "registers", "embeddings.register_tokens", View(theirs=(1, c.registers, c.width))
    if family in DINOV2:
        yield "position", "embeddings.position_embeddings", View(theirs=(1, c.grid**2 + 1, c.width))
