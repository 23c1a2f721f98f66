"""Weights tables and settings of projectors in composite models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.configurable import one_of, require
from mmjax.models.choices import ACTIVATION_OF
from mmjax.models.mmdit.weights import CLASS_NAME as QWEN_IMAGE
from mmjax.models.projector.config import ProjectorConfig, injected_name
from mmjax.models.vit import qwen_weights
from mmjax.weights.table import SAME, TRANSPOSED, Row, View

_MERGERS = ("qwen2_vl", "qwen2_5_vl", *qwen_weights.QWEN3)
"""Composite models whose projector begins with a norm and is called a merger."""
_WITH_NEWLINES = ("llava_next", "llava_onevision")
"""Composite models whose images are cut into tiles."""
_EPS = 1e-6
"""The epsilon of projectors' norms."""
_LINEAR: Mapping[str, Mapping[str, tuple[str, View]]] = {
    "gemma3": {
        "norm/scale": ("multi_modal_projector.mm_soft_emb_norm.weight", SAME),
        "kernel": ("multi_modal_projector.mm_input_projection_weight", SAME),
    },
    "gemma4": {"kernel": ("model.embed_vision.embedding_projection.weight", TRANSPOSED)},
    "paligemma": {
        "kernel": ("multi_modal_projector.linear.weight", TRANSPOSED),
        "bias": ("multi_modal_projector.linear.bias", SAME),
    },
    QWEN_IMAGE: {
        "norm/scale": ("txt_norm.weight", SAME),
        "kernel": ("txt_in.weight", TRANSPOSED),
        "bias": ("txt_in.bias", SAME),
    },
}
"""Leaves, keys and views of projectors of one layer, by composite model."""
_LINEAR_NORMS = {"gemma3": "rms_plus_one", "gemma4": "rms_plain"}
"""Norms of those of them that read the mean of a token's patches."""
_OLD_NAMES = {"norm": "ln_q", "up": "mlp.0", "down": "mlp.2"}
_NAMES = {"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"}
"""Parts of a merger in folders of Qwen2-VL and Qwen2.5-VL, and of Qwen3-VL and Qwen3.5."""


def settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ProjectorConfig``, by name, from the complete ``config.json`` of a composite model, such as LLaVA's.

    They are "kind", "hidden", "activation" and "norm"; of Qwen3-VL also "inject" and "levels", of Gemma's models "pool"
    and "bias", and of LLaVA's "newline" and "most_tiles".

    Raises:
      ConfigError: the activation, products without biases, or the kind of tiles are not supported.
    """
    if hf_config.get("model_type") in _MERGERS:
        tower = qwen_weights.settings({"model_type": hf_config["model_type"], **hf_config["vision_config"]})
        hidden = tower["width"] * tower["merge"] ** 2
        values = {"kind": "mlp", "hidden": hidden, "activation": "gelu_exact", "norm": tower["norm"]}
        has_inner = hf_config["model_type"] in qwen_weights.DEEPSTACK
        return values | (qwen_weights.deepstack(hf_config["vision_config"]) if has_inner else {})
    if hf_config.get("model_type") in _LINEAR:
        return _linear(hf_config)
    name = hf_config.get("projector_hidden_act", "gelu")
    one_of("config.json: projector_hidden_act", name, ACTIVATION_OF)
    biased = hf_config.get("multimodal_projector_bias", True)
    require(biased, "config.json: multimodal_projector_bias", biased, "mmjax has projectors with biases alone")
    kind = hf_config.get("model_type")
    most_tiles = _most_tiles(hf_config) if kind == "llava_onevision" else 0
    values = {"kind": "mlp", "hidden": 0, "activation": ACTIVATION_OF[name], "norm": "none"}
    return values | {"newline": kind in _WITH_NEWLINES, "most_tiles": most_tiles}


def _linear(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a projector of one layer."""
    if hf_config["model_type"] == QWEN_IMAGE:
        return {"kind": "linear", "hidden": 0, "norm": "rms"}
    norm = _LINEAR_NORMS.get(hf_config["model_type"], "none")
    is_pooled = norm != "none"
    name = "rms_norm_eps" if norm == "rms_plain" else "layer_norm_eps"
    eps = hf_config.get("vision_config", {}).get(name, _EPS)
    fix = f"mmjax has {_EPS} alone in the norm of a projector"
    require(eps == _EPS or not is_pooled, f"config.json: {name}", eps, fix)
    return {"kind": "linear", "hidden": 0, "norm": norm, "pool": is_pooled, "bias": not is_pooled}


def _most_tiles(hf_config: Mapping[str, Any]) -> int:
    ratio = hf_config.get("vision_aspect_ratio", "anyres_max_9")
    number = ratio.removeprefix("anyres_max_") if isinstance(ratio, str) else ""
    legal = number.isdecimal() and int(number) > 0
    require(
        legal, "config.json: vision_aspect_ratio", ratio, "mmjax has anyres_max_ and a number, such as anyres_max_9"
    )
    return int(number)


def rows(config: ProjectorConfig, model_type: str) -> tuple[Row, ...]:
    """The weights table of LLaVA's projector and newline, of Gemma's and Qwen-Image's projectors, or of Qwen-VL's
    mergers, with the oldest keys.

    A ``Row`` has the ``leaf``, such as "up", the possible ``keys`` of its tensor, such as
    ("multi_modal_projector.linear_1.weight",), and its ``view`` of the tensor. The leaves are "up", "up_bias", "down"
    and "down_bias". LLaVA's begin with "newline" if ``config.newline``, a merger's with "norm/scale" and, of a
    LayerNorm, "norm/bias"; a merger of inner layers has such leaves below "inject001". ``model_type`` is the composite
    model's, such as "llava" or "qwen2_vl".
    """
    if model_type in _LINEAR:
        rows_of = _LINEAR[model_type].items()
        return tuple(Row(leaf, (key,), view) for leaf, (key, view) in rows_of)
    if model_type in _MERGERS:
        return tuple(_mergers(config, _NAMES if model_type in qwen_weights.QWEN3 else _OLD_NAMES))
    return (
        *((Row("newline", ("image_newline",)),) if config.newline else ()),
        Row("up", ("multi_modal_projector.linear_1.weight",), TRANSPOSED),
        Row("up_bias", ("multi_modal_projector.linear_1.bias",)),
        Row("down", ("multi_modal_projector.linear_2.weight",), TRANSPOSED),
        Row("down_bias", ("multi_modal_projector.linear_2.bias",)),
    )


def _mergers(config: ProjectorConfig, names: Mapping[str, str]) -> Iterator[Row]:
    """Yields the rows of the merger, and of the mergers of inner layers."""
    inner = [f"visual.deepstack_merger_list.{number}" for number in range(len(config.inject))]
    paths = {"": "visual.merger", **dict(zip((f"{injected_name(at)}/" for at in config.inject), inner, strict=True))}
    for path, key in paths.items():
        yield Row(f"{path}norm/scale", (f"{key}.{names['norm']}.weight",))
        if config.norm == "layer":
            yield Row(f"{path}norm/bias", (f"{key}.{names['norm']}.bias",))
        for leaf in ("up", "down"):
            yield Row(f"{path}{leaf}", (f"{key}.{names[leaf]}.weight",), TRANSPOSED)
            yield Row(f"{path}{leaf}_bias", (f"{key}.{names[leaf]}.bias",))


def unused(config: ProjectorConfig) -> tuple[str, ...]:
    """Regular expressions for the ends of keys that a folder may have although no leaf needs them: none, ()."""
    return ()
