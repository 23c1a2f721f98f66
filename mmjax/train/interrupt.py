"""Ctrl-C and SIGTERM as a request. An optimizer step that is cut in two leaves some stages a step ahead of the others.

The first of them raises nothing where it arrives: an exception in the middle of somebody else's code is swallowed
there, or leaves a lock behind. It takes effect at the next `check`, or while a `result` is waited for.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import FrameType, TracebackType
from typing import Any, TypeVar

import jax
import numpy as np

from mmjax.sigterm import Sigterm

T = TypeVar("T")
_POLL = 0.05  # seconds until a request is heard while something is waited for


class Stopped(Exception):
    """Raised after Ctrl-C or SIGTERM, between steps: all stages are at the same step."""


class StopRequest:
    """A context in which SIGTERM and the first Ctrl-C are requests, and the next Ctrl-C is a `KeyboardInterrupt`.

    After SIGTERM the process ends within `Checkpoint.grace_seconds`; clusters repeat it, so another one does nothing.
    Outside the main thread, where Python delivers no signals, it does nothing. Several processes have to stop after the
    same step: there a request takes effect only when all have agreed.

    Attributes:
      wanted: whether this process was told to stop.
    """

    def __init__(self, total: Callable[[float], jax.Array] | None = None) -> None:
        """Nobody has asked to stop yet.

        Args:
          total: for several processes that run the same steps, `World.total`, which dispatches a sum over one number of
            each; `None` for one process.
        """
        self.wanted, self._total, self._agreed = False, total, False
        self._previous: Any = None
        self._sigterm = Sigterm(self._stop_soon)

    def __enter__(self) -> StopRequest:
        self._sigterm.__enter__()
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        self._sigterm.__exit__(kind, error, at)

    def check(self) -> None:
        """Raises `Stopped` if somebody asked to stop, and all processes agreed, see `hear`; else does nothing."""
        if self._agreed or (self.wanted and not self._total):
            raise Stopped

    def ask(self) -> jax.Array | None:
        """Dispatches the question whether any process was asked to stop, for `hear`; all ask in the same order.

        `None` in a run of one process.
        """
        return self._total(float(self.wanted)) if self._total else None

    def hear(self, answer: jax.Array | None) -> None:
        """Waits for an answer from `ask`, which is the same in all processes; the next `check` acts on it."""
        if answer is not None:
            self._agreed = self._agreed or bool(np.asarray(answer.addressable_shards[0].data)[0])

    def check_together(self) -> None:
        """Asks all processes, waits for the answer and checks it: `ask`, `hear` and `check`."""
        self.hear(self.ask())
        self.check()

    def result(self, future: Future[T]) -> T:
        """The result of `future`; raises `Stopped` instead of waiting for it any longer after a request."""
        while not future.done():
            self.check()
            wait([future], timeout=_POLL)
        self.check()
        return future.result()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.wanted:
            raise KeyboardInterrupt
        self._note(b"\nstopping after this step; Ctrl-C again stops without saving\n")

    def _stop_soon(self) -> None:
        if not self.wanted:
            self._note(b"\nSIGTERM: stopping after this step\n")

    def _note(self, line: bytes) -> None:
        self.wanted = True
        # A handler may run in the middle of another write, so this goes past Python's streams and their locks.
        os.write(2, line)
