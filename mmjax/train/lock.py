"""One process at a time in a run directory: two would overwrite each other's metrics and checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path
from types import TracebackType

from mmjax.configurable import ConfigError

_logger = logging.getLogger(__name__)
NAME = "lock"
_MOST_OWNER = 20
"""Characters of the file that are shown: a process's number is no longer."""


class RunLock:
    """Holds a run directory from its creation to ``close``, or until its process dies: the kernel releases it then."""

    def __init__(self, run_dir: Path):
        """Takes the lock of a directory, which must exist.

        Raises:
          ConfigError: another process, or another trainer in this one, has it.
        """
        try:
            # Open as long as the run is.
            self._file = open(run_dir / NAME, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115
        except OSError as error:
            cause = error.strerror or type(error).__name__
            raise ConfigError(f"{run_dir / NAME} cannot be opened ({cause}); move it away") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read(_MOST_OWNER).strip()
            self._file.close()
            raise ConfigError(f"--run_dir={str(run_dir)!r}: {_in_use(owner)}") from None
        except OSError as error:  # a file system without locks
            _logger.warning("%s cannot be locked (%s): see to it that one process uses it", run_dir, error.strerror)
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Releases it; may be called twice. The file stays: removing it could let two in."""
        if not self._file.closed:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._file, fcntl.LOCK_UN)  # also for a process that was forked a moment ago
        self._file.close()


def _in_use(owner: str) -> str:
    if owner == str(os.getpid()):
        return f"another Trainer of this process (pid {owner}) is open in it; close it, or name another directory"
    return f"process {owner or 'unknown'} is training in it; wait for it to end, or name another directory"
