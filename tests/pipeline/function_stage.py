"""Stages that are made of functions, for models that take the place of a ``MultimodalModel``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmjax.models.stage_model import StageModel


@dataclass(frozen=True, kw_only=True)
class FunctionStage(StageModel):
    """A stage whose ``forward`` is ``run``, and whose ``loss`` is ``judge``."""

    run: Callable[..., Any]
    judge: Callable[..., Any] | None = None

    def forward(self, p: Any, inputs: Any, carry: Any, axes: Any, cells: int) -> Any:
        """``run(p, inputs, carry, axes, cells)``, and no losses of layers."""
        return self.run(p, inputs, carry, axes, cells), {}

    def loss(self, p: Any, inputs: Any, x: Any, axes: Any) -> Any:
        """``judge(p, inputs, x, axes)``."""
        assert self.judge
        return self.judge(p, inputs, x, axes)


def with_methods(model: StageModel, **methods: Callable[..., Any]) -> StageModel:
    """A copy of ``model`` with other methods, such as ``forward``."""
    changed = copy.copy(model)
    for name, method in methods.items():
        object.__setattr__(changed, name, method)
    return changed
