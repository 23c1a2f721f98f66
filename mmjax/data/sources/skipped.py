"""`skipped.jsonl`: a line for each record that could not be used, whichever process found out."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mmjax.json_files import parse

NAME = "skipped.jsonl"


class Fault(NamedTuple):
    """Why a record cannot be used.

    Attributes:
      name: the record's place in the dataset.
      reason: the reason, in one line.
      id: the record's id in the data; "" without one.
      medium: the medium that is wrong, by file or by number; "" if it is not one.
    """

    name: str
    reason: str
    id: str = ""
    medium: str = ""

    def __str__(self) -> str:
        """The fault in one line; a medium that the reason names already is not repeated."""
        medium = f"{self.medium}: " if self.medium not in self.reason else ""
        return f"{self.name}{f' (id {self.id!r})' if self.id else ''}: {medium}{self.reason}"

    @staticmethod
    def of(name: str, error: BaseException, record: str = "", medium: str = "") -> Fault:
        """The fault for an error with the record `name` or one of its media."""
        record, medium = getattr(error, "record", "") or record, getattr(error, "medium", "") or medium
        return Fault(name, reason_of(error), one_line(record) if record else "", one_line(medium) if medium else "")


@dataclass(kw_only=True)
class Skipped:
    """Adds lines `{"source": …, "name": …, "id": …, "medium": …, "reason": …}` to a file, one for each record however
    often it is met. The keys `id` and `medium` are left out where they are empty.

    path: the file; None only remembers the records.
    """

    path: Path | None = None
    seen: set[tuple[str, str]] = field(default_factory=set)

    def add(self, source: str, faults: Iterable[Fault]) -> None:
        """Adds records of `source`. A full disk does not end a run: the next call for a record tries again."""
        new = {fault.name: fault for fault in faults if (source, fault.name) not in self.seen}
        if not new:
            return
        if self.path is None:
            self.seen |= {(source, name) for name in new}
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a+b") as file:
                with contextlib.suppress(OSError):  # a file system without locks may hold a line twice
                    fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                text = file.read()
                self.seen |= {(row["source"], row["name"]) for row in _rows(text)}
                rows = [
                    {"source": source, **_row(fault)} for name, fault in new.items() if (source, name) not in self.seen
                ]
                lines = "".join(json.dumps(row) + "\n" for row in rows)
                # What a killed process left of a line stays a line of its own.
                start = b"\n" if text and not text.endswith(b"\n") else b""
                file.write(start + lines.encode())
                file.flush()
                self.seen |= {(source, name) for name in new}

    def count(self) -> int:
        """Records in the file, or remembered."""
        if self.path is None:
            return len(self.seen)
        if not self.path.is_file():
            return 0
        return len({(row["source"], row["name"]) for row in _rows(self.path.read_bytes())})


def _row(fault: Fault) -> dict[str, str]:
    optional = {"id": fault.id, "medium": fault.medium}
    return {"name": fault.name, **{key: text for key, text in optional.items() if text}, "reason": fault.reason}


def _rows(text: bytes) -> Iterator[dict[str, str]]:
    for line in text.split(b"\n"):
        with contextlib.suppress(ValueError):
            row = parse(line)
            if isinstance(row, dict) and isinstance(row.get("source"), str) and isinstance(row.get("name"), str):
                yield row


def reason_of(error: BaseException) -> str:
    """The reason for an error, in one line."""
    named = type(error).__name__ not in ("Unusable", "ValueError")
    return one_line(f"{type(error).__name__}: {error}" if named else str(error))


def one_line(text: str, limit: int = 200) -> str:
    """`text` without line breaks, and not too long."""
    text = " ".join(text.split()) or "no reason given"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
