"""Handles SIGTERM, with which clusters end processes, like Ctrl-C, within a time limit. Imports no JAX.

Python calls a signal's handler in the main thread, and only between two of its instructions, so never while the process
waits inside a library. A thread therefore receives SIGTERM too, and ends the process at the time limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import util
from types import FrameType, TracebackType
from typing import Any

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it (128 and the signal's number), and after SIGTERM."""
GRACE = 25.0
"""Seconds from SIGTERM to the end of the process, unless `within` sets another number."""
CLEAN_UP = 5.0
"""Seconds after which a process stops cleaning up and ends; it needs few unless others use the cores."""
_POLL = 0.05
_QUIET = "ignore:resource_tracker:UserWarning"


class _State:
    """State of the process.

    Attributes:
      contexts: open contexts, the outermost first.
      grace: the time limit in seconds.
      received: whether SIGTERM was received since the outermost context was entered.
      ending: whether the process is ending by itself.
      exits: how often an outermost context was left.
      notify: tells other processes the reason and the status of this one's end.
      alarm: the thread that enforces the time limit.
    """

    def __init__(self) -> None:
        self.contexts: list[Sigterm] = []
        self.grace, self.received, self.ending, self.exits = GRACE, False, False, 0
        self.notify: Callable[[str, int], None] | None = None
        self.alarm: _Alarm | None = None


class Sigterm:
    """A context in which the first SIGTERM calls `react()` in the main thread; later ones do nothing.

    Contexts nest, and the innermost one reacts. If the outermost is not left within the time limit, the process ends.
    Outside the main thread, and where the program has a handler of its own, a context does nothing.
    """

    def __init__(self, react: Callable[[], None]):
        self.react = react
        self._previous: Any = None

    def __enter__(self) -> Sigterm:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGTERM)
            if previous in (signal.SIG_DFL, _receive):
                _state.contexts.append(self)
                _listen()
                self._previous = signal.signal(signal.SIGTERM, _receive)
                if _state.received:  # in an earlier context, whose exception a library has dropped
                    self._react_at_once()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._previous is None:
            return
        signal.signal(signal.SIGTERM, self._previous)
        self._previous = None
        if self not in _state.contexts:  # entered before this process was forked
            return
        _state.contexts.remove(self)
        if not _state.contexts:
            _state.received, _state.exits = False, _state.exits + 1
            if _state.alarm:
                _state.alarm.release()

    def _react_at_once(self) -> None:
        try:
            self.react()
        except BaseException:
            self.__exit__(None, None, None)
            raise


def within(seconds: float) -> None:
    """Sets the time limit of this process: seconds from SIGTERM to its end, `GRACE` (25) by default."""
    _state.grace = seconds


def set_notifier(notify: Callable[[str, int], None]) -> None:
    """Sets the function that tells other processes of this one's end.

    It is called with the reason, one line, and the exit status for the others.
    """
    _state.notify = notify


def raise_interrupt() -> None:
    """Raises the exception of Ctrl-C."""
    raise KeyboardInterrupt


def ignore() -> None:
    """Does nothing: a reaction for a process that is ending by itself."""


def leave_now() -> None:
    """Ends the process at once with status 130, from the main thread; other processes are told.

    An exception might be dropped during imports of a library.
    """
    os.write(2, b"interrupted\n")
    _notify("interrupted", INTERRUPTED)
    os._exit(INTERRUPTED)


def expect_end() -> None:
    """Makes SIGTERM do nothing outside of contexts from now on: the process is ending by itself."""
    _state.ending = True


def end_from_the_start() -> None:
    """Makes SIGTERM end a command with one line while it starts, before it has entered a context.

    Does nothing if the program has a handler of its own.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _receive)


def end_process(line: str, status: int) -> None:
    """Writes `line` to stderr and ends this process with exit status `status`; never returns.

    Any thread may call it, whatever the others are waiting for.
    """
    # Python's streams are bypassed: another thread may hold their locks.
    os.write(2, f"{line}\n".encode())
    # Hides the errors of libraries and of the main thread that the end causes.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    cleaner = threading.Thread(target=_clean_up, daemon=True)
    cleaner.start()
    cleaner.join(CLEAN_UP)
    os._exit(status)


def quieten_tracker() -> None:
    """Hides the warning of Python's resource tracker about resources of a process that exits at once.

    The tracker frees them all the same. Must be called before data workers are started, which start the tracker.
    """
    if _QUIET not in sys.warnoptions:
        sys.warnoptions.append(_QUIET)


def free_semaphores() -> None:
    """Frees the semaphores of data workers, which would be reported as leaked when the process exits at once."""
    getattr(util, "_run_finalizers")(0)  # noqa: B009  Python's type stubs leave this name out


def _clean_up() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        free_semaphores()


def _notify(reason: str, status: int) -> None:
    if _state.notify:
        with contextlib.suppress(Exception):
            _state.notify(reason, status)


def _receive(number: int, frame: FrameType | None) -> None:
    del number, frame
    if not _state.contexts:
        if not _state.ending:
            leave_now()
        return
    if _state.alarm:
        _state.alarm.ring()
    if not _state.received:
        _state.received = True
        _state.contexts[-1].react()


class _Alarm:
    """A thread that receives SIGTERM through a socket, into which Python's C handler writes every signal's number."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.settimeout(0)  # never blocks
        threading.Thread(target=self._watch, name="sigterm", daemon=True).start()

    def listen(self) -> None:
        """Makes Python write signals into the socket, unless the program has set another file for them."""
        previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if previous not in (-1, self._writer.fileno()):
            signal.set_wakeup_fd(previous)

    def release(self) -> None:
        """Undoes `listen`."""
        previous = signal.set_wakeup_fd(-1)
        if previous != self._writer.fileno():
            signal.set_wakeup_fd(previous)

    def ring(self) -> None:
        """Passes SIGTERM to the thread, for the case that Python's C handler has not."""
        with contextlib.suppress(OSError):
            self._writer.send(bytes([signal.SIGTERM]))

    def _watch(self) -> None:
        while True:
            if signal.SIGTERM in self._reader.recv(64):
                self._count_down(time.monotonic(), _state.exits)
                with contextlib.suppress(BlockingIOError):  # repeated signals
                    self._reader.recv(4096, socket.MSG_DONTWAIT)

    def _count_down(self, start: float, exits: int) -> None:
        """Returns when all contexts were left, or ends the process at the time limit."""
        while _state.contexts and _state.exits == exits:
            if time.monotonic() > start + _state.grace:
                reason = (
                    f"the process has not ended {_state.grace:g} s after SIGTERM (Checkpoint.grace_seconds): it ends "
                    "without another checkpoint, and the newest whole one stays"
                )
                _notify(reason, INTERRUPTED)
                end_process(f"error: {reason}", INTERRUPTED)
            time.sleep(_POLL)


def _listen() -> None:
    if _state.alarm is None:
        _state.alarm = _Alarm()
    _state.alarm.listen()


def _reset_after_fork() -> None:
    """Resets the state: a forked process has no threads of its parent, and must not write into the parent's socket."""
    global _state
    if _state.alarm:
        _state.alarm.release()
    _state = _State()


_state = _State()
os.register_at_fork(after_in_child=_reset_after_fork)
