"""`skipped.jsonl`: a line for each record that could not be used, from all processes."""

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
      medium: the broken medium, by file or by number; "" if the fault is not in a medium.
    """

    name: str
    reason: str
    id: str = ""
    medium: str = ""

    def __str__(self) -> str:
        """The fault in one line; the medium is left out if the reason names it."""
        medium = f"{self.medium}: " if self.medium not in self.reason else ""
        return f"{self.name}{f' (id {self.id!r})' if self.id else ''}: {medium}{self.reason}"

    @staticmethod
    def of(name: str, error: BaseException, record: str = "", medium: str = "") -> Fault:
        """The fault for an error with the record `name` or one of its media.

        record: the record's id; medium: the broken medium. The attributes `record` and `medium` of an `Unusable` win.
        """
        record, medium = getattr(error, "record", "") or record, getattr(error, "medium", "") or medium
        return Fault(name, reason_of(error), one_line(record) if record else "", one_line(medium) if medium else "")


@dataclass(kw_only=True)
class Skipped:
    """Adds lines `{"source": …, "name": …, "id": …, "medium": …, "reason": …}` to a file, one for each record.

    The keys `id` and `medium` are left out if they are empty.

    path: the file; None only remembers the records. listed: (source, name) of the records in it.
    """

    path: Path | None = None
    listed: set[tuple[str, str]] = field(default_factory=set)

    def add(self, source: str, faults: Iterable[Fault]) -> None:
        """Adds the records of `source` that are not listed yet.

        A full disk does not end a run: the next call for a record tries again.
        """
        new = {fault.name: fault for fault in faults if (source, fault.name) not in self.listed}
        if not new:
            return
        if self.path is None:
            self.listed |= {(source, name) for name in new}
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a+b") as file:
                with contextlib.suppress(OSError):  # a file system without locks may hold a line twice
                    fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                text = file.read()
                self.listed |= {(row["source"], row["name"]) for row in _rows(text)}
                unlisted = [fault for name, fault in new.items() if (source, name) not in self.listed]
                lines = "".join(json.dumps({"source": source, **_row(fault)}) + "\n" for fault in unlisted)
                # Part of a line, from a killed process, is ended first.
                start = b"\n" if text and not text.endswith(b"\n") else b""
                file.write(start + lines.encode())
                file.flush()
                self.listed |= {(source, name) for name in new}

    def count(self) -> int:
        """Number of records in the file, or remembered."""
        if self.path is None:
            return len(self.listed)
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
    """The reason of an error, in one line: the name of its type and its message, such as "KeyError: 'id'".

    Of Unusable and ValueError, the message alone.
    """
    named = type(error).__name__ not in ("Unusable", "ValueError")
    return one_line(f"{type(error).__name__}: {error}" if named else str(error))


def one_line(text: str, limit: int = 200) -> str:
    """`text` in one line of at most `limit` characters, the last "…" if it was longer; never empty.

    Line breaks and runs of blanks become one blank; an empty text becomes "no reason given".
    """
    text = " ".join(text.split()) or "no reason given"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
