"""How each process of a run learns at once that another has ended, and which.

Every process holds one connection to process 0. The kernel closes it when the process ends, however that happens, and
process 0 passes the news on. JAX's coordination service notices the same by missing heartbeats, seconds later, and ends
the process with a stack trace; it stays as it is for hosts that vanish without closing anything.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import util
from typing import Protocol

from mmjax.flags import FOLLOWED

_PARTED, _FAILED = b"p", b"f"
_LONGEST = 300
_CLEAN_UP = 5.0
"""Seconds, at most, for what a process does before it follows: it is soon done where others do not need the cores."""
SEEING_OFF = 2.0
"""Seconds that process 0 gives the others to end before it."""


class Keys(Protocol):
    """Keys and values that all processes share."""

    def set(self, key: str, value: str) -> None:
        """Makes a value known."""
        ...

    def get(self, key: str) -> str:
        """Waits for a value."""
        ...


class Lifeline:
    """The connections of one process, each watched by a thread.

    Messages are lines: ``p`` (I part in peace) or ``f<index> <status> <reason>`` (process ``index`` has ended, and the
    others are to end with this exit status).
    """

    def __init__(self, index: int, end: Callable[[str, int], None]):
        """For process ``index``; ``end`` is called once, with a line that says which process has ended and why, and
        the exit status for this one."""
        self.index, self._end = index, end
        self._peers: dict[int, socket.socket] = {}
        self._watches: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._over = False

    @classmethod
    def open(
        cls, keys: Keys, host: str, count: int, index: int, end: Callable[[str, int], None] | None = None
    ) -> Lifeline:
        """Connects all processes; returns when this one is connected.

        Args:
          keys: where process 0 says how it is reached.
          host: of process 0, as the others reach it.
          count, index: as in ``Processes``.
          end: called with the news that another process has ended; by default it ends this one.
        """
        line = cls(index, end or _end_process)
        if index == 0:
            line._listen(keys, host, count)
        else:
            line._connect(keys)
        for peer in line._peers:
            watch = threading.Thread(target=line._watch, args=(peer,), name=f"lifeline-{peer}", daemon=True)
            line._watches.append(watch)
        for watch in line._watches:
            watch.start()
        return line

    def _listen(self, keys: Keys, host: str, count: int) -> None:
        token = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server(("", 0), family=family, backlog=count) as server:
            keys.set("lifeline", f"{token} {server.getsockname()[1]} {host}")
            while len(self._peers) < count - 1:
                connection, _ = server.accept()
                connection.settimeout(10)
                with contextlib.suppress(OSError, ValueError):
                    said, _, number = _line(connection).decode().partition(" ")
                    if secrets.compare_digest(said, token):  # anybody else may knock on an open port
                        connection.settimeout(None)
                        self._peers[int(number)] = connection
                        connection = None
                if connection is not None:
                    connection.close()

    def _connect(self, keys: Keys) -> None:
        token, port, host = keys.get("lifeline").split(" ", 2)
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=60)
        connection.settimeout(None)
        connection.sendall(f"{token} {self.index}\n".encode())
        self._peers[0] = connection

    def part(self) -> None:
        """Says goodbye: that this process ends is no failure."""
        with self._lock:
            self._tell(_PARTED)
            self._over = self.index != 0  # process 0 goes on passing news of those that are still there

    def fail(self, reason: str, status: int = FOLLOWED) -> None:
        """Says why this process ends, and with what exit status the others are to."""
        with self._lock:
            if self._over:
                return
            self._over = True
            self._tell(_FAILED + f"{self.index} {status} {reason}".encode()[:_LONGEST])
        self._see_off()

    def _see_off(self, peer: int = 0) -> None:
        """Process 0 ends last, after ``peer`` that has failed: with it goes JAX's coordination service, whose end the
        others would report as theirs."""
        if self.index:
            return
        deadline = time.monotonic() + SEEING_OFF
        if peer:
            with contextlib.suppress(OSError):
                self._peers[peer].settimeout(SEEING_OFF)
                self._peers[peer].recv(1)  # nothing comes but the end
        for watch in self._watches:
            if watch is not threading.current_thread():
                watch.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Closes the connections."""
        self._over = True
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _tell(self, message: bytes) -> None:
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.sendall(message.replace(b"\n", b" ") + b"\n")

    def _watch(self, peer: int) -> None:
        """Reads what a peer says until it has gone."""
        try:
            said = _line(self._peers[peer])
        except OSError:
            said = b""
        if said.startswith(_PARTED):
            return
        who, status, reason = peer, FOLLOWED, ""
        if said:
            number, code, reason = said.removeprefix(_FAILED).decode(errors="replace").split(" ", 2)
            who, status = int(number), int(code)
        why = f": {reason}" if reason else ", without a word; its own output may say why"
        with self._lock:
            if self._over:
                return
            self._over = True
            if self.index == 0:
                self._tell(_FAILED + f"{who} {status} {reason}".encode())
        self._see_off(peer)
        self._end(f"process {who} has ended{why}", status)


def _line(connection: socket.socket) -> bytes:
    """Up to a line end; empty where the connection was closed before."""
    data = b""
    while not data.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece:
            return b""
        data += piece
    return data[:-1]


def _end_process(news: str, status: int) -> None:
    """At once: other threads may wait in a collective for the process that has ended, and never return."""
    # Past Python's streams, whose locks another thread may hold.
    os.write(2, f"{'error: ' if status == FOLLOWED else ''}{news}; this one ends too\n".encode())
    last = threading.Thread(target=_clean_up, daemon=True)
    last.start()
    last.join(_CLEAN_UP)
    os._exit(status)


def _clean_up() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        # Else the semaphores of data workers are reported as leaked. Python's type stubs leave this name out.
        getattr(util, "_run_finalizers")(0)  # noqa: B009
