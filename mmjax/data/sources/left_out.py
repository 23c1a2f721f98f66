"""The records of a dataset that are left out because they cannot be used, counted by reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mmjax.configurable import ConfigError
from mmjax.data.sources.skipped import Fault

_SHOWN = 3
"""Reasons in a line."""
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|/\S+|\d+")
"""The parts of a reason that differ from record to record: names, paths and numbers."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A reason why records are left out.

    Attributes:
      count: number of records.
      first: the fault of the first record.
    """

    count: int
    first: Fault


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """The records of a dataset that are left out.

    Attributes:
      source: the dataset's name.
      scanned: number of all its records.
      faults: why each record that is left out cannot be used.
    """

    source: str
    scanned: int
    faults: Sequence[Fault]

    @property
    def share(self) -> float:
        """The share of all records, 0 to 1."""
        return len(self.faults) / max(1, self.scanned)

    @property
    def reasons(self) -> list[Reason]:
        """The reasons, the most frequent first; reasons that differ only in names and numbers count as one."""
        groups: dict[str, list[Fault]] = {}
        for fault in self.faults:
            groups.setdefault(_PARTICULAR.sub("…", fault.reason), []).append(fault)
        reasons = [Reason(count=len(group), first=group[0]) for group in groups.values()]
        return sorted(reasons, key=lambda reason: -reason.count)

    def describe(self, shown: int = _SHOWN) -> str:
        """One line: counts, and the first record with each of the `shown` most frequent reasons."""
        reasons = self.reasons
        parts = [f"{reason.count} × {reason.first}" for reason in reasons[:shown]]
        further = sum(reason.count for reason in reasons[shown:])
        parts += [f"{further} for {len(reasons) - shown} other reasons"] if further else []
        return f"{len(self.faults)} of {self.scanned} records cannot be used: {'; '.join(parts)}"

    def require_few(self, max_broken: float) -> None:
        """Raises ConfigError if more than the share `max_broken` of the records are left out."""
        if self.share > max_broken:
            fix = f"of {self.source}, {self.describe()}; mend the data, or raise it to train on the others"
            raise ConfigError(f"Data.max_broken={max_broken!r}: {fix}")
