"""Tables of projectors' weights inside of whole models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmjax.configurable import one_of, require
from mmjax.models.choices import ACTIVATION_OF
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.vit import qwen_weights
from mmjax.weights.table import TRANSPOSED, Row

_MERGERS = ("qwen2_vl", "qwen2_5_vl")
"""Whole models whose projector normalises first and is called a merger."""


def settings(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``Projector`` from a whole model's ``config.json``.

    Raises:
      ConfigError: its activation is none of ours, its products have no biases, or its tiles come in another way.
    """
    if theirs.get("model_type") in _MERGERS:
        tower = qwen_weights.settings({"model_type": theirs["model_type"], **theirs["vision_config"]})
        hidden = tower["width"] * tower["merge"] ** 2
        return {"kind": "mlp", "hidden": hidden, "activation": "gelu_exact", "norm": tower["norm"]}
    name = theirs.get("projector_hidden_act", "gelu")
    one_of("config.json: projector_hidden_act", name, ACTIVATION_OF)
    biased = theirs.get("multimodal_projector_bias", True)
    require(biased, "config.json: multimodal_projector_bias", biased, "mmjax has projectors with biases alone")
    tiled = theirs.get("model_type") == "llava_onevision"
    own = {"kind": "mlp", "hidden": 0, "activation": ACTIVATION_OF[name], "norm": "none"}
    return own | {"newline": tiled, "most_tiles": _most_tiles(theirs) if tiled else 0}


def _most_tiles(theirs: Mapping[str, Any]) -> int:
    said = theirs.get("vision_aspect_ratio", "anyres_max_9")
    most = said.removeprefix("anyres_max_") if isinstance(said, str) else ""
    legal = most.isdecimal() and int(most) > 0
    require(legal, "config.json: vision_aspect_ratio", said, "mmjax has anyres_max_ and a number, such as anyres_max_9")
    return int(most)


def rows(config: ProjectorConfig, model_type: str) -> tuple[Row, ...]:
    """LLaVA's two products and newline, or Qwen2-VL's merger; keys as transformers has them since the first folders."""
    if model_type in _MERGERS:
        return _merger(config)
    return (
        *((Row("newline", ("image_newline",)),) if config.newline else ()),
        Row("up", ("multi_modal_projector.linear_1.weight",), TRANSPOSED),
        Row("up_bias", ("multi_modal_projector.linear_1.bias",)),
        Row("down", ("multi_modal_projector.linear_2.weight",), TRANSPOSED),
        Row("down_bias", ("multi_modal_projector.linear_2.bias",)),
    )


def _merger(config: ProjectorConfig) -> tuple[Row, ...]:
    return (
        Row("norm/scale", ("visual.merger.ln_q.weight",)),
        *([Row("norm/bias", ("visual.merger.ln_q.bias",))] if config.norm == "layer" else []),
        Row("up", ("visual.merger.mlp.0.weight",), TRANSPOSED),
        Row("up_bias", ("visual.merger.mlp.0.bias",)),
        Row("down", ("visual.merger.mlp.2.weight",), TRANSPOSED),
        Row("down_bias", ("visual.merger.mlp.2.bias",)),
    )


def unused(config: ProjectorConfig) -> tuple[str, ...]:
    """Nothing."""
    return ()
