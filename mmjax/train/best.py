"""The best evaluation of a run by one figure: its checkpoint is kept, and training may end some time after it."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mmjax.mesh.processes import broadcast_text
from mmjax.recipe.best import is_lower_better


class BestEvaluation:
    """The evaluations of a run in order of their steps, compared by ``Checkpoint.best``.

    Everything follows from the rows of ``eval.jsonl`` and from the checkpoints that exist: no mark can disagree.
    """

    def __init__(self, metric: str, patience: int = 0, rows: Sequence[Mapping[str, Any]] = ()):
        """Reads the evaluations so far.

        Args:
          metric: a figure of ``eval.jsonl``; "" compares nothing.
          patience: ``Train.patience``.
          rows: the rows of ``eval.jsonl``.
        """
        self._metric, self._patience = metric, patience
        self._sign = 1 if is_lower_better(metric) else -1
        values = {row["step"]: self._value(row) for row in rows}
        self._values: dict[int, float] = {step: value for step, value in values.items() if value is not None}

    @classmethod
    def agreed(cls, metric: str, patience: int, rows: Sequence[Mapping[str, Any]]) -> BestEvaluation:
        """Makes it from the rows of process 0, for the arguments see ``__init__``; all processes have to call it."""
        return cls(metric, patience, json.loads(broadcast_text(json.dumps(list(rows)))) if metric else ())

    @property
    def step(self) -> int | None:
        """The step of the best evaluation, the first of equals; ``None`` without any."""
        return self.step_among(self._values)

    def step_among(self, steps: Collection[int]) -> int | None:
        """The step of the best evaluation among ``steps``; ``None`` where none of them is evaluated."""
        evaluated = sorted(step for step in self._values if step in steps)
        return min(evaluated, key=lambda step: self._sign * self._values[step], default=None)

    def add(self, step: int, row: Mapping[str, Any]) -> bool:
        """Adds an evaluation by its figures, see ``mmjax.eval.scores.figures``; returns whether it is the best so far.

        All processes have to call it; the figures of process 0 count.
        """
        value = json.loads(broadcast_text(json.dumps(self._value(row)))) if self._metric else None
        if value is None:
            return False
        self._values[step] = value
        return self.step == step

    @property
    def is_last_chance(self) -> bool:
        """Whether training ends after the next evaluation unless that is the best."""
        return bool(self._patience) and self._since_best >= self._patience - 1

    @property
    def ending(self) -> str:
        """Why training ends early, in words; "" where it does not."""
        if not self._patience or self._since_best < self._patience:
            return ""
        assert self.step is not None
        best = f"{self._metric} was best after step {self.step} ({self._values[self.step]:.4g})"
        return f"{best}, and {self._since_best} evaluations since have not been better (Train.patience)"

    @property
    def _since_best(self) -> int:
        return sum(step > self.step for step in self._values) if self.step is not None else 0

    def _value(self, row: Mapping[str, Any]) -> float | None:
        """The figure in a row; one that is not finite is worse than any other."""
        if self._metric not in row:
            return None
        value = row[self._metric]
        return float(value) if value is not None and math.isfinite(value) else self._sign * math.inf
