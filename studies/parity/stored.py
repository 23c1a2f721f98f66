"""Results of the study, as JSON files of a folder. Imports no JAX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from studies.parity.runs import RUNS

Stored = dict[str, Any]
"""What a file of a run has: "settings", "steps", "seconds", and "losses" or the numbers of a check."""


def write(path: Path, value: Stored) -> None:
    """Writes a file whole: under a new name first."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value) + "\n")
    new.replace(path)


def has(path: Path, key: Stored) -> bool:
    """Whether there is such a file, with these values."""
    return path.exists() and key.items() <= json.loads(path.read_text()).items()


def stored(out: Path, suffix: str = ".json") -> dict[str, Stored]:
    """The contents of a folder's files, by the run's name; suffix ".check.json" for checks."""
    files = {name: out / f"{name}{suffix}" for name in RUNS}
    return {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}


def losses_of(out: Path) -> dict[str, list[float]]:
    """The losses of the runs in a folder, by name."""
    return {name: value["losses"] for name, value in stored(out).items()}
