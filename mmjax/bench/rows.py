"""Rows: the results that benchmarks yield."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Target:
    """A promise about a result, which must be at most ("≤") or at least ("≥") ``value``."""

    bound: Literal["≤", "≥"]
    value: float

    def met_by(self, value: float) -> bool:
        """Whether ``value`` is within the bound, which is itself legal; NaN is not."""
        return bool(value <= self.value if self.bound == "≤" else value >= self.value)  # NumPy's is no JSON

    def __str__(self) -> str:
        return f"{self.bound} {self.value:g}"


def at_most(value: float) -> Target:
    """The target that a result is at most ``value``."""
    return Target(bound="≤", value=value)


def at_least(value: float) -> Target:
    """The target that a result is at least ``value``."""
    return Target(bound="≥", value=value)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
      bench: name of the benchmark.
      case: the measured case, in words.
      value: the result.
      unit: unit of the result.
      target: the promise about it; ``None`` where there is none.
    """

    bench: str
    case: str
    value: float
    unit: str
    target: Target | None = None

    @property
    def ok(self) -> bool:
        """Whether the target is met; true without one."""
        return self.target is None or self.target.met_by(self.value)

    def as_json(self) -> dict[str, Any]:
        """``{bench, case, value, unit, target, ok, bound}``; ``bound`` is the side of the target."""
        number, bound = (None, None) if self.target is None else (self.target.value, self.target.bound)
        names = {"bench": self.bench, "case": self.case, "value": self.value, "unit": self.unit}
        return {**names, "target": number, "ok": self.ok, "bound": bound}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Row:
        """The row from the dict that ``as_json`` returned."""
        target = None if row["target"] is None else Target(bound=row["bound"], value=row["target"])
        return cls(bench=row["bench"], case=row["case"], value=row["value"], unit=row["unit"], target=target)


def print_rows(rows: Iterable[Row], *, as_json: bool) -> bool:
    """Prints each row as it comes, as a line of a table or as a JSON object, and returns whether all are ``ok``."""
    all_ok = True
    for row in rows:
        all_ok &= row.ok
        print(json.dumps(row.as_json(), ensure_ascii=False) if as_json else _line(row), flush=True)
    return all_ok


def _line(row: Row) -> str:
    target = "" if row.target is None else f"  target {row.target}  {'ok' if row.ok else 'MISSED'}"
    return f"{row.bench:9} {row.case:56} {row.value:10.4g} {row.unit}{target}"
