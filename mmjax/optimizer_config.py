"""The configuration of a module's optimizer. It imports no JAX, so that mistakes are reported at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from mmjax.configurable import PROPOSED, configurable, not_negative, one_of, positive, require

SCHEDULES = ("constant", "cosine", "linear")
HELD = ("float32", "bfloat16", "float16")
"""Values of ``frozen_dtype``."""


@configurable("Optimizer")
@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW of one module.

    Attributes:
      learning_rate: the highest one.
      final_learning_rate: where "cosine" and "linear" end, as an absolute value.
      warmup: updates with a rising learning rate before the first with the full one.
      schedule: "constant", "cosine" or "linear", from the end of the warm-up to the last step.
      weight_decay: decoupled; applies to matrices only.
      b1: decay of the gradient's running mean.
      b2: decay of the squared gradient's running mean.
      eps: added to the root of the squared gradient's running mean.
      ema: decay of a running mean of the parameters, such as 0.9999, which evaluation, generation and exports read in
        their place; 0 keeps none. It begins with the parameters, and takes them in after each update.
      frozen: the module's parameters stay as they are: one copy without fp32 masters and moments.
      frozen_dtype: dtype of that copy, "float32", "bfloat16" or "float16"; "" is the dtype of the computation. A folder
        of safetensors proposes the dtype of its tensors, so that parameters that are not trained are not rounded.
      rates: factors of the learning rate by name of a parameter in the module, or a pattern of names, such as
        {'layers/*/attn/*': 0.5, 'embed': 0.1}; the first one that fits a name counts, and others have 1.
      layer_decay: factor of the learning rate for each layer from the module's last one down (Bao et al., "BEiT"). Of L
        layers, numbered from 0, layer l has layer_decay ** (L - l), parameters before the layers (embeddings) have
        layer_decay ** (L + 1), and parameters behind them (norm, head, projector) 1. Multiplied with rates.
    """

    learning_rate: float = 1e-3
    final_learning_rate: float = 0.0
    warmup: int = 0
    schedule: str = "constant"
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    ema: float = 0.0
    frozen: bool = False
    frozen_dtype: str = dataclasses.field(default="", metadata={**PROPOSED, "example": "bfloat16"})
    rates: Mapping[str, float] = dataclasses.field(
        default_factory=dict, metadata={"example": {"layers/*/attn/*": 0.5, "embed": 0.1}}
    )
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        positive("Optimizer.learning_rate", self.learning_rate)
        not_negative("Optimizer.final_learning_rate", self.final_learning_rate)
        not_negative("Optimizer.warmup", self.warmup)
        one_of("Optimizer.schedule", self.schedule, SCHEDULES)
        not_negative("Optimizer.weight_decay", self.weight_decay)
        require(0 <= self.b1 < 1, "Optimizer.b1", self.b1, "must be at least 0 and below 1, such as 0.9")
        require(0 <= self.b2 < 1, "Optimizer.b2", self.b2, "must be at least 0 and below 1, such as 0.95")
        positive("Optimizer.eps", self.eps)
        require(0 <= self.ema < 1, "Optimizer.ema", self.ema, "must be at least 0 and below 1, such as 0.9999")
        if self.frozen_dtype:
            one_of("Optimizer.frozen_dtype", self.frozen_dtype, HELD)
        for pattern, factor in self.rates.items():
            not_negative(f"Optimizer.rates[{pattern!r}]", factor, 0.1)
        fix = "must be above 0 and no more than 1, such as 0.9"
        require(0 < self.layer_decay <= 1, "Optimizer.layer_decay", self.layer_decay, fix)

    def idle(self) -> dict[str, str]:
        """The fields that change nothing because of other fields, each with the reason: {"frozen_dtype": "the module is
        …"}.
        """
        if self.frozen:
            names = (field.name for field in dataclasses.fields(self) if not field.name.startswith("frozen"))
            return dict.fromkeys(names, "the module is frozen")
        reasons = {"frozen_dtype": "the module is trained, and held in float32; it belongs to Optimizer.frozen=True"}
        if self.schedule == "constant":
            reasons["final_learning_rate"] = "Optimizer.schedule='constant' ends where it begins"
        return reasons

    def check_warmup(self, part: str, steps: int) -> None:
        """Raises `ConfigError` if the warm-up of a trained part, such as "vision_projector", is not over in `steps`."""
        fix = f"must be below Train.steps ({steps}), such as {steps // 10}"
        require(self.frozen or self.warmup < steps, f"{part}/Optimizer.warmup", self.warmup, fix)

    def held_in(self, dtype: str) -> str:
        """The dtype in which the module's parameters are stored between steps that compute in `dtype`, such as
        "bfloat16".

        Updates need float32 masters. A frozen module has none: it has `frozen_dtype`, or the dtype of the computation.
        """
        return (self.frozen_dtype or dtype) if self.frozen else "float32"

    def factor(self, name: str, from_end: int) -> float:
        """The factor of the learning rate of a parameter, from `rates` and `layer_decay`; 1.0 without these.

        Args:
          name: its name in the module, such as "layers/003/attn/q".
          from_end: 0 behind the module's layers, 1 in the last one, and so on; one more before the first one.
        """
        rate = next((factor for pattern, factor in self.rates.items() if fnmatchcase(name, pattern)), 1.0)
        return rate * self.layer_decay**from_end


def fit_warmup(warmup: int, steps: int, planned_steps: int) -> int:
    """The warm-up for ``steps`` steps, shortened from a warm-up that was meant for ``planned_steps``.

    It stays if it is below ``steps``; else it is the same share of them, or a tenth where it filled ``planned_steps``:
    50 of 800 becomes 1 of 20 steps.
    """
    if warmup < steps:
        return warmup
    return warmup * steps // planned_steps if warmup < planned_steps else steps // 10


def adamw(learning_rate: float, **settings: Any) -> OptimizerConfig:
    """AdamW with this highest learning rate; ``settings`` are other fields of ``OptimizerConfig``."""
    return OptimizerConfig(learning_rate=learning_rate, **settings)
