"""Qwen-Image's transformer in folders of diffusers: settings and weights table. Imports no JAX.

The folder is ``transformer/`` of a pipeline. Its ``txt_norm`` and ``txt_in`` map an LLM's hidden states to the width of
the condition: in mmjax they are the generator's projector (see ``projector.weights``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mmjax.configurable import ConfigError, one_of, require
from mmjax.models.mmdit.config import MMDiTConfig
from mmjax.weights.table import SAME, TRANSPOSED, Row, View

CLASS_NAME = "QwenImageTransformer2DModel"
"""The class in ``config.json`` of diffusers, in place of a model type."""
PROJECTOR_PREFIX = "txt_"
"""The prefix of the keys of the projector."""
# Defaults of diffusers for keys that a config.json may leave out.
_SIZES: Mapping[str, Any] = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "axes_dims_rope": (16, 56, 56),
}
_OPTIONS = ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")
"""Options of other models, which need parameters or positions that mmjax lacks."""
_TIMES_WIDTH = 4
"""Hidden units of an mlp, in widths of the model."""


def settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``MMDiTConfig``, by name, from a ``config.json``: {"layers": 60, "width": 3072, …}.

    Raises:
      ConfigError: it is another model, or mmjax cannot compute it.
    """
    one_of("config.json: _class_name", str(hf_config.get("_class_name", "")), (CLASS_NAME,))
    for name in _OPTIONS:
        require(not hf_config.get(name), f"config.json: {name}", hf_config.get(name), "mmjax has models without it")
    c = {**_SIZES, **{key: value for key, value in hf_config.items() if key in _SIZES and value is not None}}
    patch, width = c["patch_size"], c["num_attention_heads"] * c["attention_head_dim"]
    inputs, outputs = c["in_channels"], patch**2 * c["out_channels"]
    fix = f"mmjax has as many numbers in as out, patch_size² · out_channels = {outputs}"
    require(inputs == outputs, "config.json: in_channels", inputs, fix)
    return {
        "layers": c["num_layers"],
        "width": width,
        "heads": c["num_attention_heads"],
        "mlp": _TIMES_WIDTH * width,
        "patch": patch,
        "channels": c["out_channels"],
        "rope": tuple(c["axes_dims_rope"]),
        "activation": "gelu",
    }


def to_hf_config(config: MMDiTConfig, *, model_type: str = "") -> dict[str, Any]:
    """The ``config.json``, as a dict, of a folder of the transformer, without the width of the LLM's hidden states.

    That width, "joint_attention_dim", is the projector's. ``model_type`` is not read.

    Raises:
      ConfigError: no such model computes the same.
    """
    del model_type
    hf_config: dict[str, Any] = {
        "_class_name": CLASS_NAME,
        "patch_size": config.patch,
        "in_channels": config.patch_values,
        "out_channels": config.channels,
        "num_layers": config.layers,
        "attention_head_dim": config.head_width,
        "num_attention_heads": config.heads,
        "axes_dims_rope": list(config.rope_widths),
        **dict.fromkeys(_OPTIONS, False),
    }
    whole = replace(config, rope=config.rope_widths)
    if any(getattr(whole, name) != value for name, value in settings(hf_config).items()):
        raise ConfigError("MMDiT: Qwen-Image has an mlp of 4 widths with gelu; export with --format=orbax")
    return hf_config


def rows(config: MMDiTConfig, model_type: str) -> tuple[Row, ...]:
    """The transformer's weights table. ``model_type`` is not read.

    A ``Row`` has the ``leaf``, such as "layers/{}/attn/q", the ``keys`` of its tensor, such as
    ("transformer_blocks.{}.attn.to_q.weight",), and its ``view`` of the tensor, such as the transpose.
    """
    del config, model_type
    return tuple(Row(leaf, (key,), view) for leaf, key, view in _named())


def unused(config: MMDiTConfig) -> tuple[str, ...]:
    """Regular expressions for the ends of keys that need no leaf of the module: those of the projector."""
    del config
    return (rf"{PROJECTOR_PREFIX}norm\.weight", rf"{PROJECTOR_PREFIX}in\.(weight|bias)")


_SINGLE = {
    "patch": "img_in",
    "time_in": "time_text_embed.timestep_embedder.linear_1",
    "time_out": "time_text_embed.timestep_embedder.linear_2",
    "last_modulation": "norm_out.linear",
    "prediction": "proj_out",
}
_MODULATIONS = {"modulation": "img_mod.1", "condition_modulation": "txt_mod.1"}
_PRODUCTS = {
    "attn/q": "attn.to_q",
    "attn/k": "attn.to_k",
    "attn/v": "attn.to_v",
    "attn/o": "attn.to_out.0",
    "condition_attn/q": "attn.add_q_proj",
    "condition_attn/k": "attn.add_k_proj",
    "condition_attn/v": "attn.add_v_proj",
    "condition_attn/o": "attn.to_add_out",
    "mlp/up": "img_mlp.net.0.proj",
    "mlp/down": "img_mlp.net.2",
    "condition_mlp/up": "txt_mlp.net.0.proj",
    "condition_mlp/down": "txt_mlp.net.2",
}
_NORMS = {
    "attn/q_norm": "attn.norm_q",
    "attn/k_norm": "attn.norm_k",
    "condition_attn/q_norm": "attn.norm_added_q",
    "condition_attn/k_norm": "attn.norm_added_k",
}


def _named() -> Iterator[tuple[str, str, View]]:
    in_layers = {f"layers/{{}}/{leaf}": f"transformer_blocks.{{}}.{key}" for leaf, key in _MODULATIONS.items()}
    for leaf, key in (_SINGLE | in_layers).items():
        yield f"{leaf}/kernel", f"{key}.weight", TRANSPOSED
        yield f"{leaf}/bias", f"{key}.bias", SAME
    for leaf, key in _PRODUCTS.items():
        yield f"layers/{{}}/{leaf}", f"transformer_blocks.{{}}.{key}.weight", TRANSPOSED
        yield f"layers/{{}}/{leaf}_bias", f"transformer_blocks.{{}}.{key}.bias", SAME
    for leaf, key in _NORMS.items():
        yield f"layers/{{}}/{leaf}", f"transformer_blocks.{{}}.{key}.weight", SAME
