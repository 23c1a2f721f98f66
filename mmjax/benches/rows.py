"""What a benchmark yields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is promised of a value: ``bound`` says on which side of ``value`` it must stay, itself included."""

    bound: Literal["≤", "≥"]
    value: float

    def met_by(self, value: float) -> bool:
        """Whether ``value`` keeps the promise; one that is no number keeps none."""
        return value <= self.value if self.bound == "≤" else value >= self.value

    def __str__(self) -> str:
        return f"{self.bound} {self.value:g}"


def at_most(value: float) -> Target:
    """An upper bound."""
    return Target(bound="≤", value=value)


def at_least(value: float) -> Target:
    """A lower bound."""
    return Target(bound="≥", value=value)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
      bench, case: what was measured.
      value, unit: the outcome.
      target: what is promised of it; ``None`` where nothing is.
      ok: whether the promise is kept; true without one.
    """

    bench: str
    case: str
    value: float
    unit: str
    target: Target | None = None

    @property
    def ok(self) -> bool:
        """Whether the target is met."""
        return self.target is None or self.target.met_by(self.value)

    def as_json(self) -> dict[str, Any]:
        """``{bench, case, value, unit, target, ok}``; the target as text such as "≤ 1.1", or null."""
        target = None if self.target is None else str(self.target)
        names = {"bench": self.bench, "case": self.case, "value": self.value, "unit": self.unit}
        return {**names, "target": target, "ok": self.ok}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Row:
        """The row that ``as_json`` wrote."""
        target = None
        if row["target"] is not None:
            bound, value = row["target"].split()
            target = Target(bound=bound, value=float(value))
        return cls(bench=row["bench"], case=row["case"], value=row["value"], unit=row["unit"], target=target)
