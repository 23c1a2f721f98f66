"""Writes the Python stacks of this process's threads when a run hangs. Imports no JAX."""

from __future__ import annotations

import contextlib
import faulthandler
from pathlib import Path

_file: Path | None = None


def write_to(folder: Path | None, process: int) -> None:
    """Sets the stack file of process number ``process``: ``<folder>/stacks-<process>.txt``; ``None`` means no file."""
    global _file
    _file = folder / f"stacks-{process}.txt" if folder else None


def path_pattern() -> str:
    """Pattern of the stack files of all processes, ``<folder>/stacks-*.txt``; "" if they are not written."""
    return str(_file.with_name("stacks-*.txt")) if _file else ""


def dump() -> None:
    """Writes the stacks of this process's threads to the file of ``write_to``, if one is set; ignores an OSError."""
    if _file:
        with contextlib.suppress(OSError), _file.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
