"""Vision towers of ``transformers`` as vision transformers: settings and weights tables.

Supported are the vision models of CLIP, SigLIP, SigLIP 2, DINOv2, DINOv3 and ViT, alone or in a model with text; what
DINO's have of their own is in ``dino_weights``, those of Qwen-VL are in ``qwen_weights``. The features are those of
patches, so pooling and classification heads have no leaves. Imports no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mmjax.configurable import ConfigError, one_of, require
from mmjax.models.choices import ACTIVATION_OF, hf_activation
from mmjax.models.vit import dino_weights, gemma4_weights, qwen_weights
from mmjax.models.vit.config import ViTConfig
from mmjax.weights.table import SAME, TRANSPOSED, Row, View

FAMILIES: Mapping[str, str] = {
    "clip": "clip",
    "clip_vision_model": "clip",
    "siglip": "siglip",
    "siglip_vision_model": "siglip",
    "siglip2": "siglip2",
    "siglip2_vision_model": "siglip2",
    "dinov2": "dinov2",
    "dinov2_with_registers": "dinov2_with_registers",
    "dinov3_vit": "dinov3_vit",
    "vit": "vit",
}
"""Tower families by ``model_type``. SigLIP 2 with a fixed resolution has the type "siglip"; "siglip2" is NaFlex."""
_WHOLE = ("gemma3", "paligemma")
"""Composite models that read the output of a whole tower, with its last norm."""
_CLASSED = ("clip", "vit", *dino_weights.DEFAULTS)
"""Families with a class token."""
_PREFIXES = {
    "clip": "vision_model.",
    "siglip": "vision_model.",
    "siglip2": "vision_model.",
    "dinov2": "dinov2.",
    "dinov2_with_registers": "dinov2_with_registers.",
    "dinov3_vit": "model.",
    "vit": "vit.",
}
"""Key prefixes of towers in composite models and in older folders, by family."""

_CLASSES = {
    "clip_vision_model": "CLIPVisionModel",
    "siglip_vision_model": "SiglipVisionModel",
    "siglip2_vision_model": "Siglip2VisionModel",
    "dinov2": "Dinov2Model",
    "dinov2_with_registers": "Dinov2WithRegistersModel",
    "dinov3_vit": "DINOv3ViTModel",
    "vit": "ViTModel",
    gemma4_weights.KIND: gemma4_weights.CLASS,
}
_PLAIN: Mapping[str, Any] = {
    "bias": True,
    "qk_norm": False,
    "v_norm": False,
    "score_width": 0.0,
    "post_norms": False,
    "clipped": False,
    "output": "plain",
}
"""What layers and results of all towers but Gemma 4's are."""

# Defaults of transformers for keys that a config.json may leave out.
_BASE: Mapping[str, Any] = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "clip": _BASE
    | {
        "intermediate_size": 3072,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    "siglip": _BASE
    | {
        "intermediate_size": 3072,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    "siglip2": _BASE
    | {
        "intermediate_size": 3072,
        "num_patches": 256,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    **dino_weights.DEFAULTS,
    "vit": _BASE
    | {"intermediate_size": 3072, "image_size": 224, "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-12},
}


def settings(hf_config: Mapping[str, Any], layer: int | None = None) -> dict[str, Any]:
    """Fields of ``ViTConfig``, by name, from a config.json or its ``vision_config``: {"layers": 24, "width": 1024, …}.

    Args:
      hf_config: the configuration; its "whole" is the configuration of the composite model, such as LLaVA's.
      layer: index of the features among the ``hidden_states`` of transformers, as in LLaVA's ``vision_feature_layer``:
        0 is the input of the first layer, -1 the output of the last one, without the norm behind it. By default it is
        taken from the composite model or "feature_layer"; otherwise features are the ``last_hidden_state``.

    Raises:
      ConfigError: the tower belongs to none of these families, or mmjax cannot compute it.
    """
    kind = hf_config.get("model_type")
    if kind in gemma4_weights.KINDS:
        return gemma4_weights.settings(hf_config)
    if kind in qwen_weights.DEFAULTS:
        return {**_PLAIN, **qwen_weights.settings(hf_config)}
    family, composite = family_of(hf_config), hf_config.get("whole")
    is_whole = composite is not None and composite.get("model_type") in _WHOLE
    layer = _layer_of(composite, family) if composite and not is_whole and layer is None else layer
    layer = hf_config.get("feature_layer") if layer is None else layer
    c = {**_DEFAULTS[family], **{key: value for key, value in _vision_config(hf_config).items() if value is not None}}
    is_dino = family in dino_weights.DEFAULTS
    qkv_bias = is_dino or c.get("qkv_bias", True)
    require(qkv_bias, "config.json: qkv_bias", c.get("qkv_bias"), "mmjax has True alone")
    one_of("config.json: hidden_act", c["hidden_act"], ACTIVATION_OF)
    depth = c["num_hidden_layers"]
    return {
        **_PLAIN,
        "layers": depth if layer is None else _layer_count(layer, depth),
        "width": c["hidden_size"],
        "heads": c["num_attention_heads"],
        **({} if is_dino else {"mlp": c["intermediate_size"]}),
        "patch": _edge("patch_size", c["patch_size"]),
        "channels": c["num_channels"],
        "positions": "learned2d",
        "rope_theta": 100.0,
        "frames": 1,
        "norm": "layer",
        "gated": False,
        "window": 0,
        "full_at": (),
        "grid": _grid(family, c),
        "interpolate": "bilinear" if family == "siglip2" else "bicubic",
        **{"class_token": family in _CLASSED, "registers": 0, "qkv_bias": True, "k_bias": True},
        "patch_bias": family != "clip",
        "stem_norm": family == "clip",
        "last_norm": layer is None and family != "clip",
        "norm_eps": float(c["layer_norm_eps"]),
        "layer_scale": False,
        "activation": ACTIVATION_OF[c["hidden_act"]],
        **({"merge": _merge(composite, _grid(family, c))} if composite else {}),
        **(dino_weights.settings(family, c) if is_dino else {}),
    }


def to_hf_config(config: ViTConfig, *, model_type: str = "") -> dict[str, Any]:
    """The config.json, as a dict, of a folder of the tower alone.

    Args:
      config: the settings.
      model_type: such as "clip_vision_model"; the features are then those before the model's last norm.
        "" chooses a type whose ``last_hidden_state`` are the features.

    Raises:
      ConfigError: no model of these families computes the same; the message names what differs from the closest.
    """
    unmapped = ("preset", "attention", "remat", "merge")
    wanted = {name: value for name, value in vars(config).items() if name not in unmapped}
    differences = dict[str, dict[str, Any]]()
    for candidate in (model_type,) if model_type else _CLASSES:
        hf_config = _closest_config(config, candidate)
        restored = settings(hf_config, -1 if model_type else None)
        differences[candidate] = {name: restored[name] for name in wanted if restored[name] != wanted[name]}
        if not differences[candidate]:
            return hf_config
    closest = min(differences, key=lambda candidate: len(differences[candidate]))
    theirs = ", ".join(f"ViT.{name}={value!r}" for name, value in differences[closest].items())
    ours = ", ".join(f"{name}={wanted[name]!r}" for name in differences[closest])
    fix = f"the closest tower of transformers, {closest}, has {theirs}; set that, or export with --format=orbax"
    raise ConfigError(f"ViT: {ours}: {fix}")


def _closest_config(c: ViTConfig, kind: str) -> dict[str, Any]:
    """The config.json of a model type with as many of the settings as it has."""
    if kind == gemma4_weights.KIND:
        return gemma4_weights.closest_config(c)
    hf_config: dict[str, Any] = {"model_type": kind, "architectures": [_CLASSES[kind]], "layer_norm_eps": c.norm_eps}
    hf_config |= {"hidden_size": c.width, "num_hidden_layers": c.layers, "num_attention_heads": c.heads}
    hf_config |= {"num_channels": c.channels, "patch_size": c.patch}
    if kind in dino_weights.DEFAULTS:
        hf_config |= dino_weights.config_entries(c, kind)
    hf_config |= {} if kind in dino_weights.DINOV2 else {"intermediate_size": c.mlp}
    siglip2 = kind == "siglip2_vision_model"
    hf_config |= {"num_patches": c.grid**2} if siglip2 else {"image_size": c.grid * c.patch}
    hf_config |= {"vision_use_head": False} if kind == "siglip_vision_model" else {}
    return hf_config | {"hidden_act": hf_activation(c.activation)}


def _vision_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tower's part of the configuration of a model with text, or the complete configuration."""
    return hf_config.get("vision_config") or hf_config


def _layer_of(composite: Mapping[str, Any], family: str) -> int:
    """The index of the hidden states that a composite model reads, with the defaults of transformers."""
    defaults = {"llava_onevision": (-1, "full")}.get(composite.get("model_type", ""), (-2, "default"))
    layer, strategy = (
        composite.get(key, default_value)
        for key, default_value in zip(("vision_feature_layer", "vision_feature_select_strategy"), defaults, strict=True)
    )
    fix = "mmjax takes the features of one layer; use a model with one, such as -2"
    require(isinstance(layer, int), "config.json: vision_feature_layer", layer, fix)
    fix = "mmjax gives the LLM no registers, of which transformers leaves out none; name the tower's folder instead"
    require(family not in dino_weights.WITH_REGISTERS, "config.json: model_type", family, fix)
    supported = "default" if family in _CLASSED else "full"
    fix = f"mmjax gives the LLM every patch of a {family} and no class token; use a model with {supported!r}"
    require(strategy == supported, "config.json: vision_feature_select_strategy", strategy, fix)
    return layer


def family_of(hf_config: Mapping[str, Any]) -> str:
    """The family, such as "clip" or "dinov2", of a config.json or of its ``vision_config``.

    Raises:
      ConfigError: its "model_type" is in none of ``FAMILIES``.
    """
    kind = _vision_config(hf_config).get("model_type") or hf_config.get("model_type", "")
    one_of("config.json: model_type", kind, FAMILIES)
    return FAMILIES[kind]


def _layer_count(layer: int, depth: int) -> int:
    """The number of layers to run for the features with this index among the hidden states."""
    count = layer if layer >= 0 else depth + 1 + layer
    if not 0 < count <= depth:
        raise ConfigError(f"vision_feature_layer={layer}: the tower has {depth} layers; use -{depth} to {depth}, not 0")
    return count


def _merge(composite: Mapping[str, Any], grid: int) -> int:
    """The side of the square of patches of a token, in a tower of ``grid``² patches."""
    if composite.get("model_type") != "gemma3":
        return 1
    tokens = composite.get("mm_tokens_per_image", 256)
    side = math.isqrt(tokens)
    fix = f"must be the square of a number that divides the {grid} patches of an image's side"
    require(side * side == tokens and grid % side == 0, "config.json: mm_tokens_per_image", tokens, fix)
    return grid // side


def _edge(name: str, value: int | Iterable[int]) -> int:
    """The side of a square, from one number or equal numbers.

    Raises:
      ConfigError: the numbers differ.
    """
    sides = {value} if isinstance(value, int) else {*value}
    if len(sides) != 1:
        raise ConfigError(f"config.json: {name}={value!r}: ours are squares; give one number")
    return sides.pop()


def _grid(family: str, c: Mapping[str, Any]) -> int:
    """The side of the position table in patches."""
    if family != "siglip2":
        return _edge("image_size", c["image_size"]) // _edge("patch_size", c["patch_size"])
    grid = round(c["num_patches"] ** 0.5)
    if grid * grid != c["num_patches"]:
        raise ConfigError(f"config.json: num_patches={c['num_patches']}: must be a square, such as {grid * grid}")
    return grid


def rows(config: ViTConfig, model_type: str) -> tuple[Row, ...]:
    """The tower's weights table in a folder of this ``model_type``, such as "clip_vision_model".

    A ``Row`` has the ``leaf``, such as "layers/{}/attn/q", the two possible ``keys`` of its tensor, without and with
    the prefix of a whole model, and its ``view`` of the tensor, such as the transpose. Qwen's and Gemma 4's towers have
    one key.

    Raises:
      KeyError: the model type is none of ``FAMILIES``, none of Qwen's and not Gemma 4's.
    """
    if model_type in gemma4_weights.KINDS:
        return gemma4_weights.rows(config)
    if model_type in qwen_weights.DEFAULTS:
        return qwen_weights.rows(config, model_type)
    family = FAMILIES[model_type]
    return tuple(
        Row(leaf, (key, _PREFIXES[family] + key), view)
        for leaf, key, view in (*_stem(config, family), *_layer(config, family), *_norms(config, family))
    )


def unused(config: ViTConfig) -> tuple[str, ...]:
    """Regular expressions for the ends of keys that need no leaf.

    These are layers and norms behind the features, pooling and classification heads, mask tokens, and text models.
    """
    patterns = [r"embeddings\.position_ids", r"embeddings\.mask_token", r"head\..*", r"pooler\..*", r"classifier\..*"]
    patterns += [r"text_model\..*", r"(?:text|visual)_projection\..*", r"logit_(?:scale|bias)"]
    if not config.last_norm:
        patterns += [r"post_layernorm\..*", r"layernorm\..*", r"norm\..*"]
    used_layers = "|".join(map(str, range(config.layers)))
    return (*patterns, rf"(?:encoder\.layers?|layer)\.(?!(?:{used_layers})\.)\d+\..*")


Named = Iterator[tuple[str, str, View]]


def _stem(c: ViTConfig, family: str) -> Named:
    kernel = View((2, 3, 1, 0), (c.width, c.channels, c.patch, c.patch))
    patch = "patch_embedding"
    if family in dino_weights.DEFAULTS:
        patch = "patch_embeddings" if family == dino_weights.DINOV3 else "patch_embeddings.projection"
        yield from dino_weights.stem_rows(c, family)
    elif family == "vit":
        patch = "patch_embeddings.projection"
        yield "position", "embeddings.position_embeddings", View(theirs=(1, c.grid**2 + 1, c.width))
        yield "class_token", "embeddings.cls_token", View(theirs=(1, 1, c.width))
    else:
        yield "position", "embeddings.position_embedding.weight", SAME
    if family == "clip":
        yield "class_token", "embeddings.class_embedding", SAME
    yield "patch/kernel", f"embeddings.{patch}.weight", TRANSPOSED if family == "siglip2" else kernel
    if c.patch_bias:
        yield "patch/bias", f"embeddings.{patch}.bias", SAME


_NAMES: Mapping[str, Mapping[str, str]] = {
    "clip": {
        "attn_norm": "layer_norm1",
        "attn/q": "self_attn.q_proj",
        "attn/k": "self_attn.k_proj",
        "attn/v": "self_attn.v_proj",
        "attn/o": "self_attn.out_proj",
        "mlp_norm": "layer_norm2",
        "mlp/up": "mlp.fc1",
        "mlp/down": "mlp.fc2",
    },
    **dino_weights.NAMES,
    "vit": {
        "attn_norm": "layernorm_before",
        "attn/q": "attention.attention.query",
        "attn/k": "attention.attention.key",
        "attn/v": "attention.attention.value",
        "attn/o": "attention.output.dense",
        "mlp_norm": "layernorm_after",
        "mlp/up": "intermediate.dense",
        "mlp/down": "output.dense",
    },
}


_LAYER = {**dict.fromkeys((*dino_weights.DINOV2, "vit"), "encoder.layer.{}"), dino_weights.DINOV3: "layer.{}"}
"""Keys of a layer, by family; of others "encoder.layers.{}"."""
_LAST_NORM = {**dict.fromkeys((*dino_weights.DINOV2, "vit"), "layernorm"), dino_weights.DINOV3: "norm"}
"""Keys of the last norm, by family; of others "post_layernorm"."""


def _layer(c: ViTConfig, family: str) -> Named:
    layer = _LAYER.get(family, "encoder.layers.{}")
    if c.gated:
        yield from dino_weights.gated_rows(c, family, layer)
    has_bias = {"attn/q": c.qkv_bias, "attn/k": c.qkv_bias and c.k_bias, "attn/v": c.qkv_bias}
    for name, hf_name in _NAMES.get(family, _NAMES["clip"]).items():
        if c.gated and name.startswith("mlp/"):
            continue
        if name.endswith("_norm"):
            yield f"layers/{{}}/{name}/scale", f"{layer}.{hf_name}.weight", SAME
            yield f"layers/{{}}/{name}/bias", f"{layer}.{hf_name}.bias", SAME
        else:
            yield f"layers/{{}}/{name}", f"{layer}.{hf_name}.weight", TRANSPOSED
            if has_bias.get(name, True):
                yield f"layers/{{}}/{name}_bias", f"{layer}.{hf_name}.bias", SAME
    if c.layer_scale:
        yield "layers/{}/attn_scale", f"{layer}.layer_scale1.lambda1", SAME
        yield "layers/{}/mlp_scale", f"{layer}.layer_scale2.lambda1", SAME


def _norms(c: ViTConfig, family: str) -> Named:
    last = _LAST_NORM.get(family, "post_layernorm")
    named = {"stem_norm": "pre_layrnorm"} if c.stem_norm else {}
    for name, hf_name in (named | ({"norm": last} if c.last_norm else {})).items():
        yield f"{name}/scale", f"{hf_name}.weight", SAME
        yield f"{name}/bias", f"{hf_name}.bias", SAME
