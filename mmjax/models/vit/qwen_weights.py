"""The vision towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: settings, and weights tables of a transformer.

The towers are part of a composite model's folder; their merger is a projector in mmjax. Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Any

from mmjax.configurable import one_of, require
from mmjax.models.choices import ACTIVATION_OF
from mmjax.models.vit.config import ViTConfig
from mmjax.weights.table import SAME, TRANSPOSED, Row, View, third

# Defaults of transformers for keys that a config.json may leave out.
_BASE: Mapping[str, Any] = {
    "depth": 32,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2: Mapping[str, Any] = _BASE | {"embed_dim": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
_QWEN2_5: Mapping[str, Any] = _BASE | {
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
_QWEN3: Mapping[str, Any] = _BASE | {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "hidden_act": "gelu_pytorch_tanh",
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
DEEPSTACK = ("qwen3_vl", "qwen3_vl_moe")
"""Composite models whose language model reads inner layers of the tower (``deepstack``)."""
QWEN3 = (*DEEPSTACK, "qwen3_5", "qwen3_5_moe")
"""Composite models with a tower of Qwen3-VL; Qwen3.5 reads its last layer alone."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": _QWEN2,
    "qwen2_vl_vision": _QWEN2,
    "qwen2_5_vl": _QWEN2_5,
    "qwen2_5_vl_vision": _QWEN2_5,
    **{f"{kind}{end}": _QWEN3 for kind in QWEN3 for end in ("", "_vision")},
}
"""Defaults by ``model_type``; in older folders the tower has the type of the composite model."""


def settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ViTConfig``, by name, from a ``vision_config`` whose "model_type" is a key of ``DEFAULTS``.

    Such a type is "qwen2_vl" or "qwen3_vl_vision"; the result is such as {"layers": 32, "width": 1280, …}.

    Raises:
      ConfigError: mmjax cannot compute the tower.
      KeyError: the model type is another one.
    """
    defaults = DEFAULTS[hf_config["model_type"]]
    is_2_5, is_2 = defaults is _QWEN2_5, defaults is _QWEN2
    c = {**defaults, **{key: value for key, value in hf_config.items() if value is not None}}
    one_of("config.json: hidden_act", c["hidden_act"], ACTIVATION_OF)
    rope, merge = c.get("rope_parameters") or {}, c["spatial_merge_size"]
    kind = rope.get("rope_type", "axial")
    require(kind == "axial", "config.json: rope_type", kind, "mmjax has 'axial' alone")
    for name in ("patch_size", "temporal_patch_size"):
        require(
            isinstance(c[name], int), f"config.json: {name}", c[name], "ours are squares and equal; give one number"
        )
    width = c["embed_dim"] if is_2 else c["hidden_size"]
    values = {
        "layers": c["depth"],
        "width": width,
        "heads": c["num_heads"],
        "mlp": int(width * c["mlp_ratio"]) if is_2 else c["intermediate_size"],
        "patch": c["patch_size"],
        "channels": c["in_channels"],
        "merge": merge,
        "positions": "axial",
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "interpolate": "none",
        **{"class_token": False, "registers": 0, "qkv_bias": True, "k_bias": True},
        "frames": c["temporal_patch_size"],
        "patch_bias": False,
        "norm": "rms" if is_2_5 else "layer",
        "stem_norm": False,
        "last_norm": False,
        "norm_eps": 1e-6,
        "layer_scale": False,
        "gated": is_2_5,
        "activation": ACTIVATION_OF[c["hidden_act"]],
    }
    values |= _windows(c) if is_2_5 else {"window": 0, "full_at": ()}
    return values | (_table(c) if defaults is _QWEN3 else {})


def _table(c: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``ViTConfig`` on the tower's learned positions, and on the bias of its patches."""
    places = c["num_position_embeddings"]
    grid, fix = isqrt(places), "must be the square of a number, such as 2304"
    require(grid**2 == places, "config.json: num_position_embeddings", places, fix)
    return {"positions": "learned2d+axial", "grid": grid, "interpolate": "corners", "patch_bias": True}


def deepstack(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ProjectorConfig``, by name, on the outputs of inner layers of a tower of Qwen3-VL.

    They are "levels", the layers of the tower, and "inject", the layers of the language model, from 1 on: features are
    added to the output of the layer before.

    ``hf_config`` is a ``vision_config``.

    Raises:
      ConfigError: the layers do not rise.
    """
    levels = tuple(hf_config.get("deepstack_visual_indexes", _QWEN3["deepstack_visual_indexes"]))
    rising, fix = levels == tuple(sorted({*levels})), "must rise, as in published folders"
    require(rising, "config.json: deepstack_visual_indexes", levels, fix)
    return {"inject": tuple(range(1, len(levels) + 1)), "levels": levels}


def _windows(c: Mapping[str, Any]) -> dict[str, Any]:
    merge = c["spatial_merge_size"]
    window = c["window_size"] // merge // c["patch_size"] * merge
    fix = f"must be {merge * c['patch_size']} pixels or more, a whole token"
    require(window > 0, "config.json: window_size", c["window_size"], fix)
    return {"window": window, "full_at": tuple(at for at in c["fullatt_block_indexes"] if at < c["depth"])}


def rows(c: ViTConfig, model_type: str) -> tuple[Row, ...]:
    """The tower's weights table in a folder of this type, a key of ``DEFAULTS``; keys lack the prefix "visual.".

    A ``Row`` has the ``leaf``, such as "layers/{}/attn/q", a tuple of one key, and its ``view`` of the tensor, such as
    the transpose.
    """
    return tuple(Row(leaf, (key,), view) for leaf, key, view in _named(c, is_3=DEFAULTS[model_type] is _QWEN3))


def _named(c: ViTConfig, *, is_3: bool) -> Iterator[tuple[str, str, View]]:
    kernel = View((2, 3, 4, 1, 0), (c.width, c.channels, c.frames, c.patch, c.patch))
    yield "patch/kernel", "patch_embed.proj.weight", kernel
    if is_3:
        yield "patch/bias", "patch_embed.proj.bias", SAME
        yield "position", "pos_embed.weight", SAME
    layer = "blocks.{}"
    for name, hf_name in (("attn_norm", "norm1"), ("mlp_norm", "norm2")):
        yield f"layers/{{}}/{name}/scale", f"{layer}.{hf_name}.weight", SAME
        if c.norm == "layer":
            yield f"layers/{{}}/{name}/bias", f"{layer}.{hf_name}.bias", SAME
    for number, name in enumerate("qkv"):
        yield f"layers/{{}}/attn/{name}", f"{layer}.attn.qkv.weight", third(number, c.width)
        yield f"layers/{{}}/attn/{name}_bias", f"{layer}.attn.qkv.bias", third(number, c.width, SAME)
    product = "linear_fc" if is_3 else "fc"
    plain = {"mlp/up": f"mlp.{product}1", "mlp/down": f"mlp.{product}2"}
    gated = {"mlp/gate": "mlp.gate_proj", "mlp/up": "mlp.up_proj", "mlp/down": "mlp.down_proj"}
    for name, hf_name in {"attn/o": "attn.proj", **(gated if c.gated else plain)}.items():
        yield f"layers/{{}}/{name}", f"{layer}.{hf_name}.weight", TRANSPOSED
        yield f"layers/{{}}/{name}_bias", f"{layer}.{hf_name}.bias", SAME
