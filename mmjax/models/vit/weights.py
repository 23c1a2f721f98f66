"""Vision towers of ``transformers`` as vision transformers: their settings, and their tensors as our leaves.

The vision models of CLIP, SigLIP, SigLIP 2, DINOv2 and ViT, alone or in a model with text. What they pool or classify
with has no leaf here: we take the features of patches. Those of Qwen2-VL are in ``qwen_weights``. Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mmjax.configurable import ConfigError, one_of, require
from mmjax.models.choices import ACTIVATION_OF
from mmjax.models.vit import qwen_weights
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
    "vit": "vit",
}
"""Family by ``model_type``. SigLIP 2 of a fixed resolution says "siglip"; "siglip2" is that of any (NaFlex)."""
_CLASSED = ("clip", "dinov2", "vit")
"""Families with a class token."""
_PREFIXES = {
    "clip": "vision_model.",
    "siglip": "vision_model.",
    "siglip2": "vision_model.",
    "dinov2": "dinov2.",
    "vit": "vit.",
}
"""What keys begin with where a family's tower is part of another model, and in older folders."""

_CLASSES = {
    "clip_vision_model": "CLIPVisionModel",
    "siglip_vision_model": "SiglipVisionModel",
    "siglip2_vision_model": "Siglip2VisionModel",
    "dinov2": "Dinov2Model",
    "vit": "ViTModel",
}

# What a config.json may leave out, with the value that transformers then takes.
_BASE: Mapping[str, Any] = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "clip": _BASE
    | dict(intermediate_size=3072, image_size=224, patch_size=32, hidden_act="quick_gelu", layer_norm_eps=1e-5),
    "siglip": _BASE
    | dict(intermediate_size=3072, image_size=224, patch_size=16, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6),
    "siglip2": _BASE
    | dict(intermediate_size=3072, num_patches=256, patch_size=16, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6),
    "dinov2": _BASE | dict(mlp_ratio=4, image_size=224, patch_size=14, hidden_act="gelu", layer_norm_eps=1e-6),
    "vit": _BASE | dict(intermediate_size=3072, image_size=224, patch_size=16, hidden_act="gelu", layer_norm_eps=1e-12),
}


def settings(theirs: Mapping[str, Any], layer: int | None = None) -> dict[str, Any]:
    """The settings of ``ViTConfig`` that a config.json or its ``vision_config`` says.

    Args:
      theirs: the configuration; "whole" is that of the model of which it is a part, such as LLaVA's.
      layer: number of the features among the ``hidden_states`` of transformers, as LLaVA's ``vision_feature_layer``
        says it: 0 is what the first layer takes, -1 what the last one gives, and norms behind that are left out.
        ``None`` takes what the whole model or "feature_layer" says, else ``last_hidden_state``.

    Raises:
      ConfigError: the tower is none of these families, or has something that ours has not.
    """
    if theirs.get("model_type") in qwen_weights.DEFAULTS:
        return qwen_weights.settings(theirs)
    family, whole = family_of(theirs), theirs.get("whole")
    layer = _layer_of(whole, family) if whole and layer is None else layer
    layer = theirs.get("feature_layer") if layer is None else layer
    c = {**_DEFAULTS[family], **{key: value for key, value in _own(theirs).items() if value is not None}}
    for key, legal in (("use_swiglu_ffn", False), ("qkv_bias", True)):
        require(c.get(key, legal) == legal, f"config.json: {key}", c.get(key), f"mmjax has {legal} alone")
    one_of("config.json: hidden_act", c["hidden_act"], ACTIVATION_OF)
    depth = c["num_hidden_layers"]
    return dict(
        layers=depth if layer is None else _run(layer, depth),
        width=c["hidden_size"],
        heads=c["num_attention_heads"],
        mlp=int(c["hidden_size"] * c["mlp_ratio"]) if family == "dinov2" else c["intermediate_size"],
        patch=_edge("patch_size", c["patch_size"]),
        channels=c["num_channels"],
        positions="learned2d",
        rope_theta=100.0,
        frames=1,
        norm="layer",
        gated=False,
        window=0,
        full_at=(),
        grid=_grid(family, c),
        interpolate="bilinear" if family == "siglip2" else "bicubic",
        class_token=family in _CLASSED,
        patch_bias=family != "clip",
        stem_norm=family == "clip",
        last_norm=layer is None and family != "clip",
        norm_eps=float(c["layer_norm_eps"]),
        layer_scale=family == "dinov2",
        activation=ACTIVATION_OF[c["hidden_act"]],
        **({"merge": 1} if whole else {}),  # which a tower alone leaves open
    )


def their_config(config: ViTConfig, kind: str = "") -> dict[str, Any]:
    """A config.json for a folder of the tower alone.

    Args:
      config: its settings.
      kind: its ``model_type``, whose model then gives these features before its last norm; "" for any that gives them.

    Raises:
      ConfigError: no model of these families computes the same.
    """
    ours = ("preset", "attention", "remat", "merge")
    own = {name: value for name, value in vars(config).items() if name not in ours}
    for one in (kind,) if kind else _CLASSES:
        theirs = _written(config, one)
        if {name: settings(theirs, -1 if kind else None)[name] for name in own} == own:
            return theirs
    raise ConfigError("ViT: no tower of CLIP, SigLIP, DINOv2 or ViT has these settings; export with --format=orbax")


def _written(c: ViTConfig, kind: str) -> dict[str, Any]:
    """The config.json of a model type with these sizes."""
    found: dict[str, Any] = {"model_type": kind, "architectures": [_CLASSES[kind]], "layer_norm_eps": c.norm_eps}
    found |= {"hidden_size": c.width, "num_hidden_layers": c.layers, "num_attention_heads": c.heads}
    found |= {"num_channels": c.channels, "patch_size": c.patch}
    found |= {"mlp_ratio": c.mlp / c.width} if kind == "dinov2" else {"intermediate_size": c.mlp}
    siglip2 = kind == "siglip2_vision_model"
    found |= {"num_patches": c.grid**2} if siglip2 else {"image_size": c.grid * c.patch}
    found |= {"vision_use_head": False} if kind == "siglip_vision_model" else {}
    return found | {"hidden_act": next(name for name, own in ACTIVATION_OF.items() if own == c.activation)}


def _own(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tower's part of a model with text, or the whole."""
    return theirs.get("vision_config") or theirs


def _layer_of(whole: Mapping[str, Any], family: str) -> int:
    """Which hidden states a whole model takes; what it leaves out is as transformers has it."""
    default = {"llava_onevision": (-1, "full")}.get(whole.get("model_type", ""), (-2, "default"))
    layer, strategy = (
        whole.get(key, own)
        for key, own in zip(("vision_feature_layer", "vision_feature_select_strategy"), default, strict=True)
    )
    fix = "mmjax takes the features of one layer; use a model with one, such as -2"
    require(isinstance(layer, int), "config.json: vision_feature_layer", layer, fix)
    wanted = "default" if family in _CLASSED else "full"
    fix = f"mmjax gives the LLM every patch of a {family} and no class token; use a model with {wanted!r}"
    require(strategy == wanted, "config.json: vision_feature_select_strategy", strategy, fix)
    return layer


def family_of(theirs: Mapping[str, Any]) -> str:
    """The family of a config.json, or of its ``vision_config``.

    Raises:
      ConfigError: it is none of ``FAMILIES``.
    """
    kind = _own(theirs).get("model_type") or theirs.get("model_type", "")
    one_of("config.json: model_type", kind, FAMILIES)
    return FAMILIES[kind]


def _run(layer: int, depth: int) -> int:
    """How many of so many layers are run for these features."""
    count = layer if layer >= 0 else depth + 1 + layer
    if not 0 < count <= depth:
        raise ConfigError(f"vision_feature_layer={layer}: the tower has {depth} layers; use -{depth} to {depth}, not 0")
    return count


def _edge(name: str, value: int | Iterable[int]) -> int:
    sides = {value} if isinstance(value, int) else {*value}
    if len(sides) != 1:
        raise ConfigError(f"config.json: {name}={value!r}: ours are squares; give one number")
    return sides.pop()


def _grid(family: str, c: Mapping[str, Any]) -> int:
    """Patches along a side of the table of positions."""
    if family != "siglip2":
        return _edge("image_size", c["image_size"]) // _edge("patch_size", c["patch_size"])
    grid = round(c["num_patches"] ** 0.5)
    if grid * grid != c["num_patches"]:
        raise ConfigError(f"config.json: num_patches={c['num_patches']}: must be a square, such as {grid * grid}")
    return grid


def rows(config: ViTConfig, model_type: str) -> tuple[Row, ...]:
    """The tower's leaves and tensors in a folder of this ``model_type``."""
    if model_type in qwen_weights.DEFAULTS:
        return qwen_weights.rows(config)
    family = FAMILIES[model_type]
    return tuple(
        Row(leaf, (key, _PREFIXES[family] + key), view)
        for leaf, key, view in (*_stem(config, family), *_layer(config, family), *_norms(config, family))
    )


def unused(config: ViTConfig) -> tuple[str, ...]:
    """Regular expressions of the ends of keys that need no leaf.

    Layers and norms behind our features; what pools, classifies, or masks patches in training; and text.
    """
    found = [r"embeddings\.position_ids", r"embeddings\.mask_token", r"head\..*", r"pooler\..*", r"classifier\..*"]
    found += [r"text_model\..*", r"(?:text|visual)_projection\..*", r"logit_(?:scale|bias)"]
    if not config.last_norm:
        found += [r"post_layernorm\..*", r"layernorm\..*"]
    here = "|".join(map(str, range(config.layers)))
    return (*found, rf"encoder\.layers?\.(?!(?:{here})\.)\d+\..*")


Named = Iterator[tuple[str, str, View]]


def _stem(c: ViTConfig, family: str) -> Named:
    kernel = View((2, 3, 1, 0), (c.width, c.channels, c.patch, c.patch))
    patch = "patch_embedding"
    if family in ("dinov2", "vit"):
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
    "dinov2": {
        "attn_norm": "norm1",
        "attn/q": "attention.attention.query",
        "attn/k": "attention.attention.key",
        "attn/v": "attention.attention.value",
        "attn/o": "attention.output.dense",
        "mlp_norm": "norm2",
        "mlp/up": "mlp.fc1",
        "mlp/down": "mlp.fc2",
    },
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


def _layer(c: ViTConfig, family: str) -> Named:
    layer = "encoder.layer.{}" if family in ("dinov2", "vit") else "encoder.layers.{}"
    for ours, theirs in _NAMES.get(family, _NAMES["clip"]).items():
        if ours.endswith("_norm"):
            yield f"layers/{{}}/{ours}/scale", f"{layer}.{theirs}.weight", SAME
            yield f"layers/{{}}/{ours}/bias", f"{layer}.{theirs}.bias", SAME
        else:
            yield f"layers/{{}}/{ours}", f"{layer}.{theirs}.weight", TRANSPOSED
            yield f"layers/{{}}/{ours}_bias", f"{layer}.{theirs}.bias", SAME
    if c.layer_scale:
        yield "layers/{}/attn_scale", f"{layer}.layer_scale1.lambda1", SAME
        yield "layers/{}/mlp_scale", f"{layer}.layer_scale2.lambda1", SAME


def _norms(c: ViTConfig, family: str) -> Named:
    last = "layernorm" if family in ("dinov2", "vit") else "post_layernorm"
    named = {"stem_norm": "pre_layrnorm"} if c.stem_norm else {}
    for ours, theirs in (named | ({"norm": last} if c.last_norm else {})).items():
        yield f"{ours}/scale", f"{theirs}.weight", SAME
        yield f"{ours}/bias", f"{theirs}.bias", SAME
