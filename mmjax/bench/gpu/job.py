"""The job of a section: its inputs, and the file for its findings."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
_LIST = re.compile(r"\[\s+((?:[-+.\w]+,\s+)*[-+.\w]+)\s+\]")
"""Matches a list of numbers, which is written on one line."""


class Job:
    """A section at work.

    Attributes:
      small: whether shapes are small enough for a CPU.
      folder: folder for pictures, that of the file for findings.
      values: the findings so far.
    """

    def __init__(self, path: Path, *, small: bool, seconds: float = math.inf):
        """``path`` is the JSON file for findings; the process will be ended after ``seconds``."""
        self.small, self.folder, self.values = small, path.parent, dict[str, Any]()
        self._path, self._end = path, time.monotonic() + seconds

    def has_time(self, name: str, seconds: float) -> bool:
        """Whether ``seconds`` are left; if not, ``name`` is noted as not measured."""
        if time.monotonic() + seconds < self._end:
            return True
        self.note(no_time_for=[*self.values.get("no_time_for", ()), name])
        return False

    def while_time(self, items: Iterable[Item], name: Callable[[Item], str], reserve: float = 1.5) -> Iterator[Item]:
        """Yields items, such as cases, until less is left than ``reserve`` times the seconds of the one before.

        ``name`` gives an item's name, under which the first one without time is noted.
        """
        last_seconds = 0.0
        for item in items:
            if not self.has_time(name(item), reserve * last_seconds):
                return
            start = time.monotonic()
            yield item
            last_seconds = time.monotonic() - start

    def note(self, **values: Any) -> None:
        """Adds figures by name, in place of earlier ones of the name, and writes all figures to the file at once."""
        self.values |= values
        write_json(self._path, self.values)

    def check(self, name: str, passed: bool) -> None:
        """Notes under ``checks`` whether a check has passed; a section with a failed check is wrong."""
        self.note(checks={**self.values.get("checks", {}), name: bool(passed)})


def failure(error: Exception) -> dict[str, str]:
    """The figures of something that failed: its "error" in a line, such as {"error": "ValueError: too large"}."""
    first_line = (str(error).splitlines() or [""])[0]
    return {"error": f"{type(error).__name__}: {first_line}"[:300]}


def write_json(path: Path, values: Mapping[str, Any], digits: int = 6) -> None:
    """Writes ``plain`` values as a JSON file, by renaming a complete one.

    A reader never sees half of it, even if this process is killed.
    """
    new = path.with_name(path.name + ".new")
    text = json.dumps(plain(values, digits), indent=1, ensure_ascii=False)
    text = _LIST.sub(lambda match: f"[{' '.join(match[1].split())}]", text)
    new.write_text(text + "\n", encoding="utf-8")
    os.replace(new, path)


def plain(value: Any, digits: int = 6) -> Any:
    """A copy of a value for JSON: floats rounded to ``digits`` significant digits, ``None`` for those not finite.

    Dicts and lists are copied, and tuples become lists.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value
