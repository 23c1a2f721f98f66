"""Python stacks of this process's threads, for a run that hangs. Imports no JAX."""

from __future__ import annotations

import contextlib
import faulthandler
from pathlib import Path

_file: Path | None = None


def keep_in(folder: Path | None, process: int) -> None:
    """Stacks of this process go to a file in `folder` from now on; nowhere for `None`."""
    global _file
    _file = folder / f"stacks-{process}.txt" if folder else None


def place() -> str:
    """Where the stacks of all processes are; empty where they are not written."""
    return str(_file.with_name("stacks-*.txt")) if _file else ""


def dump() -> None:
    """Writes the stacks of all threads, where there is a place for them."""
    if _file:
        with contextlib.suppress(OSError), _file.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
