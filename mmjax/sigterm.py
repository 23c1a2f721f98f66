"""SIGTERM, by which clusters end processes: it does what Ctrl-C does, within a time limit. Imports no JAX.

Python calls a signal's handler in the main thread, and only between two of its instructions: a process that waits
inside a library does not hear it. A thread therefore hears of SIGTERM too, and ends the process at the time limit.
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
"""Most seconds that a process cleans up before it ends; it needs few unless others use the cores."""
_POLL = 0.05
_QUIET = "ignore:resource_tracker:UserWarning"


class _State:
    """The process's own state: contexts that are open, and whether SIGTERM has come since the first was entered."""

    def __init__(self) -> None:
        self.contexts: list[Sigterm] = []
        self.grace, self.came, self.ending, self.left = GRACE, False, False, 0
        self.tell: Callable[[str, int], None] | None = None
        self.alarm: _Alarm | None = None


class Sigterm:
    """A context in which the first SIGTERM calls `react` in the main thread; later ones do nothing.

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
                if _state.came:  # in an earlier context, where a library has dropped its exception
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
            _state.came, _state.left = False, _state.left + 1
            if _state.alarm:
                _state.alarm.release()

    def _react_at_once(self) -> None:
        try:
            self.react()
        except BaseException:
            self.__exit__(None, None, None)
            raise


def within(seconds: float) -> None:
    """Sets the time limit of this process."""
    _state.grace = seconds


def tell_others(tell: Callable[[str, int], None]) -> None:
    """Sets the function that tells other processes why this one ends, and with which status they are to end."""
    _state.tell = tell


def raise_interrupt() -> None:
    """Does what Ctrl-C does outside of training."""
    raise KeyboardInterrupt


def leave_now() -> None:
    """Ends the process at once, in the main thread: an exception might be lost in the imports of a library."""
    os.write(2, b"interrupted\n")
    _tell("interrupted", INTERRUPTED)
    os._exit(INTERRUPTED)


def expect_end() -> None:
    """From now on SIGTERM does nothing outside of contexts: the process is ending by itself."""
    _state.ending = True


def end_from_the_start() -> None:
    """Makes SIGTERM end a command with a line while it is starting, before it has entered a context."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _receive)


def end_process(line: str, status: int) -> None:
    """Writes a line and ends this process from a thread, whatever the other threads are waiting for."""
    # Python's streams are bypassed: another thread may hold their locks.
    os.write(2, f"{line}\n".encode())
    # Hides the errors of libraries and of the main thread, which are cut off.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    last = threading.Thread(target=_clean_up, daemon=True)
    last.start()
    last.join(CLEAN_UP)
    os._exit(status)


def quieten_tracker() -> None:
    """Hides the warning of Python's resource tracker about what a process that exits at once leaves to it.

    The tracker cleans up all the same. Has to be called before data workers are started, and with them the tracker.
    """
    if _QUIET not in sys.warnoptions:
        sys.warnoptions.append(_QUIET)


def free_semaphores() -> None:
    """Frees the semaphores of data workers, which else are reported as leaked when the process exits at once."""
    getattr(util, "_run_finalizers")(0)  # noqa: B009  Python's type stubs leave this name out


def _clean_up() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        free_semaphores()


def _tell(reason: str, status: int) -> None:
    if _state.tell:
        with contextlib.suppress(Exception):
            _state.tell(reason, status)


def _receive(number: int, frame: FrameType | None) -> None:
    del number, frame
    if not _state.contexts:
        if not _state.ending:
            leave_now()
        return
    if _state.alarm:
        _state.alarm.ring()
    if not _state.came:
        _state.came = True
        _state.contexts[-1].react()


class _Alarm:
    """The thread that hears of SIGTERM through a socket: Python's C handler writes every signal's number into it."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._far.setblocking(False)
        threading.Thread(target=self._watch, name="sigterm", daemon=True).start()

    def listen(self) -> None:
        """Has signals written into the socket, unless the program has a file of its own for them."""
        previous = signal.set_wakeup_fd(self._far.fileno(), warn_on_full_buffer=False)
        if previous not in (-1, self._far.fileno()):
            signal.set_wakeup_fd(previous)

    def release(self) -> None:
        """Undoes `listen`."""
        previous = signal.set_wakeup_fd(-1)
        if previous != self._far.fileno():
            signal.set_wakeup_fd(previous)

    def ring(self) -> None:
        """Tells the thread of SIGTERM, where Python's C handler does not."""
        with contextlib.suppress(OSError):
            self._far.send(bytes([signal.SIGTERM]))

    def _watch(self) -> None:
        while True:
            if signal.SIGTERM in self._near.recv(64):
                self._count_down(time.monotonic(), _state.left)
                with contextlib.suppress(BlockingIOError):  # repeated signals
                    self._near.recv(4096, socket.MSG_DONTWAIT)

    def _count_down(self, start: float, left: int) -> None:
        """Returns when the contexts are left, or ends the process."""
        while _state.contexts and _state.left == left:
            if time.monotonic() > start + _state.grace:
                reason = (
                    f"the process has not ended {_state.grace:g} s after SIGTERM (Checkpoint.grace_seconds): it ends "
                    "without another checkpoint, and the newest whole one stays"
                )
                _tell(reason, INTERRUPTED)
                end_process(f"error: {reason}", INTERRUPTED)
            time.sleep(_POLL)


def _listen() -> None:
    if _state.alarm is None:
        _state.alarm = _Alarm()
    _state.alarm.listen()


def _begin_anew() -> None:
    """A forked process has none of its parent's threads, and must not write into the parent's socket."""
    global _state
    if _state.alarm:
        _state.alarm.release()
    _state = _State()


_state = _State()
os.register_at_fork(after_in_child=_begin_anew)
