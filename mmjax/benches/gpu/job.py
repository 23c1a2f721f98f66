"""What a section is given, and where it writes what it finds."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LIST = re.compile(r"\[\s+((?:[-+.\w]+,\s+)*[-+.\w]+)\s+\]")
"""Of numbers, which are written in one line."""


class Job:
    """A section at work.

    Attributes:
      small: whether shapes are small enough for a CPU.
      folder: where pictures go.
      values: what was found so far.
    """

    def __init__(self, path: Path, *, small: bool, seconds: float = math.inf):
        """``path`` is the file for what is found; in ``seconds`` the process will be ended."""
        self.small, self.folder, self.values = small, path.parent, dict[str, Any]()
        self._path, self._end = path, time.monotonic() + seconds

    def has_time(self, what: str, seconds: float) -> bool:
        """Whether so much is left; if not, ``what`` is noted as not measured."""
        if time.monotonic() + seconds < self._end:
            return True
        self.note(no_time_for=[*self.values.get("no_time_for", ()), what])
        return False

    def note(self, **values: Any) -> None:
        """Adds figures, and writes all of them down at once."""
        self.values |= values
        write_json(self._path, self.values)

    def check(self, what: str, passed: bool) -> None:
        """Notes whether something is as it has to be; the section is wrong if it is not."""
        self.note(checks={**self.values.get("checks", {}), what: bool(passed)})


def write_json(path: Path, values: Mapping[str, Any], digits: int = 6) -> None:
    """Replaces the file as a whole, so that a reader, or the end of the process, never finds half of it."""
    new = path.with_name(path.name + ".new")
    text = json.dumps(plain(values, digits), indent=1, ensure_ascii=False)
    text = _LIST.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    new.write_text(text + "\n", encoding="utf-8")
    os.replace(new, path)


def plain(value: Any, digits: int = 6) -> Any:
    """As JSON has it: numbers with so many digits, ``None`` for what is no finite number."""
    if isinstance(value, Mapping):
        return {str(key): plain(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value
