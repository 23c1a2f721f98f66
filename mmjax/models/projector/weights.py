"""Tables of projectors' weights inside of whole models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmjax.models.projector.config import ProjectorConfig
from mmjax.weights.table import TRANSPOSED, Row


def settings(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``Projector`` from a whole model's ``config.json``."""
    return {}


def rows(config: ProjectorConfig, model_type: str) -> tuple[Row, ...]:
    """LLaVA's two products; keys as transformers has had them since LLaVA's first folder."""
    return (
        Row("up", ("multi_modal_projector.linear_1.weight",), TRANSPOSED),
        Row("up_bias", ("multi_modal_projector.linear_1.bias",)),
        Row("down", ("multi_modal_projector.linear_2.weight",), TRANSPOSED),
        Row("down_bias", ("multi_modal_projector.linear_2.bias",)),
    )


def unused(config: ProjectorConfig) -> tuple[str, ...]:
    """Nothing."""
    return ()
