"""What a benchmark yields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
      bench, case: what was measured.
      value, unit: the outcome.
      target: what it should not exceed; ``None`` where nothing is promised.
      ok: whether it is met; true without a target.
    """

    bench: str
    case: str
    value: float
    unit: str
    target: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the target is met."""
        return self.target is None or self.value <= self.target
