"""The journal of a run's checkpoints: a line for each complete one, which stays when the checkpoint is deleted.

A run directory with steps and no checkpoint was either killed before its first checkpoint was complete, or has lost its
checkpoints. The journal distinguishes the two. It imports no JAX.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from mmjax.configurable import ConfigError

NAME = "commits.jsonl"


class Journal:
    """The file `commits.jsonl` of a run directory, which a single process writes.

    A line is on disk before `add` returns. A line that a kill has torn counts too: its checkpoint was complete.
    """

    def __init__(self, run_dir: Path):
        """For the journal in `run_dir`, which need not exist yet."""
        self.path = run_dir / NAME

    def is_empty(self) -> bool:
        """Whether the journal exists and has no line: no checkpoint was ever complete.

        Raises:
          ConfigError: it cannot be read.
        """
        try:
            return self.path.stat().st_size == 0 and self.path.is_file()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read ({error.strerror}); remove it") from None

    def begin(self) -> None:
        """Writes an empty journal, before the run writes its first step. Raises OSError."""
        with open(self.path, "wb") as file:
            os.fsync(file.fileno())
        _sync(self.path.parent)

    def complete(self, step: int) -> None:
        """Adds the checkpoint of a step to an empty or missing journal. Raises OSError.

        The line is missing after a kill just before it was written, or if an earlier version of mmjax has trained.
        """
        if not self.path.exists() or self.is_empty():
            self.add(step)
            _sync(self.path.parent)

    def add(self, step: int) -> None:
        """Adds a line for the checkpoint of a step, {"step": 500}, and waits for the disk. Raises OSError."""
        with open(self.path, "ab+") as file:
            torn = False
            if file.tell():
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
            file.write(b"\n" * torn + json.dumps({"step": step}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Writes the entries of a directory to disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
