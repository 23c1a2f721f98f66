"""Decides whether a failed command is started again, from its exit status and its run's progress.

It imports no JAX, and the configuration only if the command names a gin file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmjax.checkpoint.folder import Folder
from mmjax.checkpoint.journal import NAME as JOURNAL
from mmjax.configurable import ConfigError
from mmjax.flags import INTERRUPTED, REFUSED
from mmjax.sigterm import GRACE

MOST = 3
"""Restarts in a row without progress."""
FINAL = (0, REFUSED, INTERRUPTED, 143)
"""Exit statuses after which nothing is started again: success, a mistake in the command or the configuration, Ctrl-C
and SIGTERM. A process without a handler for SIGTERM ends with 143."""
COUNTED = (JOURNAL, "metrics.jsonl")
"""Files of a run directory that get a line for each checkpoint and for each step."""
_TRAIN = ("-m", "mmjax.train")


class Restarts:
    """Decides after each end of a command whether it is started again.

    Attributes:
      command: the command to start next. After a restart with a checkpoint it lacks `--from_scratch`.
    """

    def __init__(self, command: Sequence[str], max_restarts: int):
        """Notes the progress of the command's run.

        Args:
          command: the words after "python", such as ["-m", "mmjax.train", "--run_dir=runs/a"].
          max_restarts: restarts in a row that may bring no progress; 0 for no restarts.
        """
        self.command, self._max_restarts, self._futile = tuple(command), max_restarts, 0
        self._run_dir = run_dir_of(command)
        self._best = (0, 0) if "--from_scratch" in command else self._progress()

    def again(self, status: int) -> tuple[bool, str]:
        """Whether the command is started again, and a line to print, or "" if there is nothing to say.

        Call it once after each end. It counts restarts without progress, and updates `command`.

        Args:
          status: the exit status as shells have it: 128 plus the number of a signal.
        """
        if status in FINAL or not self._max_restarts:
            return False, ""
        progress = self._progress()
        if any(new > best for new, best in zip(progress, self._best, strict=True)):
            self._futile = 0
        self._best = max(progress[0], self._best[0]), max(progress[1], self._best[1])
        if self._futile == self._max_restarts:
            reason = f"{self._max_restarts} restarts have brought no newer checkpoint and no further step"
            return False, f"given up: {reason}"
        self._futile += 1
        if self._run_dir and Folder(self._run_dir / "checkpoints").steps():
            self.command = tuple(word for word in self.command if not word.startswith("--from_scratch"))
        return True, f"starting again, restart {self._futile} of {self._max_restarts} without progress"

    def _progress(self) -> tuple[int, ...]:
        """Numbers of checkpoints and of steps so far."""
        return tuple(_lines(self._run_dir / name) if self._run_dir else 0 for name in COUNTED)


def is_training(command: Sequence[str]) -> bool:
    """Whether a command's words contain "-m", "mmjax.train": such a one continues from a checkpoint after a restart.

    ``command`` has the words after "python", such as ("-m", "mmjax.train", "--gin_file=digits_vlm").
    """
    return any(tuple(command[at : at + 2]) == _TRAIN for at in range(len(command)))


def run_dir_of(command: Sequence[str]) -> Path | None:
    """The run directory of a command: `--run_dir`, else the default one of its `--gin_file`s.

    None if it has neither flag. `command` has the words after "python", such as ("-m", "mmjax.train",
    "--run_dir=runs/a").
    """
    if directory := _values(command, "run_dir"):
        return Path(directory[-1])
    if not (files := _values(command, "gin_file")):
        return None
    from mmjax.config import default_run_dir

    return default_run_dir(files)


def grace_of(command: Sequence[str]) -> float:
    """`Checkpoint.grace_seconds` of a command's configuration, in seconds; `GRACE` where it is not set or not readable.

    `command` has the words after "python", such as ("-m", "mmjax.train", "--gin_file=digits_vlm",
    "--gin.Checkpoint.grace_seconds=60"), of which `--gin_file` and `--gin.…` are read.
    """
    lines = [word.removeprefix("--gin.") for word in command if word.startswith("--gin.") and "=" in word]
    if not lines and not _values(command, "gin_file"):
        return GRACE
    from mmjax.config.gin_reader import read_bindings

    try:
        bindings = read_bindings(_values(command, "gin_file"), lines)
    except ConfigError:  # its processes report it
        return GRACE
    values = [binding.value for binding in bindings if binding.key == "Checkpoint.grace_seconds"]
    return float(values[-1]) if values and isinstance(values[-1], int | float) else GRACE


def _values(command: Sequence[str], name: str) -> list[str]:
    """The values of a flag, written with "=" or as the next word."""
    flag = f"--{name}"
    attached = [(at, word.partition("=")[2]) for at, word in enumerate(command) if word.startswith(f"{flag}=")]
    following = [(at, command[at + 1]) for at, word in enumerate(command[:-1]) if word == flag]
    return [value for _, value in sorted(attached + following)]


def _lines(path: Path) -> int:
    try:
        with open(path, "rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0
