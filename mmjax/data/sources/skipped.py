"""`skipped.jsonl`: what could not be read, a line for each record, whichever process found out."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

NAME = "skipped.jsonl"


@dataclass(kw_only=True)
class Skipped:
    """Adds lines `{"source": …, "name": …, "reason": …}` to a file, each record once however often it is met.

    path: of the file; None only remembers.
    """

    path: Path | None = None
    seen: set[tuple[str, str]] = field(default_factory=set)

    def add(self, source: str, faults: Iterable[tuple[str, str]]) -> None:
        """Adds records of `source`, as names and reasons. A full disk does not end a run: they are tried again."""
        new = {name: reason for name, reason in faults if (source, name) not in self.seen}
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
                    {"source": source, "name": name, "reason": reason}
                    for name, reason in new.items()
                    if (source, name) not in self.seen
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


def _rows(text: bytes) -> Iterator[dict[str, str]]:
    for line in text.split(b"\n"):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("source"), str) and isinstance(row.get("name"), str):
                yield row


def reason_of(error: BaseException) -> str:
    """Why, in one line."""
    named = type(error).__name__ not in ("Unusable", "ValueError")
    return one_line(f"{type(error).__name__}: {error}" if named else str(error))


def one_line(text: str, limit: int = 200) -> str:
    """`text` without line breaks, and not too long."""
    text = " ".join(text.split()) or "no reason given"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
