"""Ctrl-C as a request. An optimizer step that is cut in two leaves some stages a step ahead of the others."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any


class Stopped(Exception):
    """Raised at a point where the run's state is whole, after Ctrl-C."""


class StopRequest:
    """A context in which the first Ctrl-C is a request and the second a `KeyboardInterrupt`.

    Outside the main thread, where Python delivers no signals, it does nothing.

    Attributes:
      wanted: whether somebody asked to stop.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._at_once = False
        self._previous: Any = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raises `Stopped` if somebody asked to stop."""
        if self.wanted:
            raise Stopped

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, where nothing can be cut in two, a request raises `Stopped` without waiting for a `check`."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
        if self._at_once:
            raise Stopped
        # A handler may run in the middle of another write, so this goes past Python's streams and their locks.
        os.write(2, b"\nstopping after this step; Ctrl-C again stops without saving\n")
