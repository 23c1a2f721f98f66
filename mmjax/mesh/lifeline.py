"""Connections that report at once that a process of the run has ended, and which one.

Every process holds one connection to process 0. The kernel closes it when the process ends, for whatever reason, and
process 0 reports that to the others. A process that is stopped, or whose host vanishes, closes no connection: its
heartbeats are missing. JAX's coordination service detects the same later, blames an arbitrary process and ends with a
stack trace.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from mmjax.flags import FOLLOWED, INTERRUPTED, STUCK, TOO
from mmjax.mesh import stacks
from mmjax.sigterm import CLEAN_UP as _CLEAN_UP
from mmjax.sigterm import end_process, quieten_tracker

_PARTED, _FAILED, _BEAT = b"p", b"f", b"h"
_LONGEST = 600
"""Longest failure message in bytes, and longest received reason in characters; both are cut."""
_LINE = 1024
"""Longest line in bytes."""
MEETING, KNOCK = 300.0, 10.0
"""Seconds for all processes to connect after process 0 has published its address, and for a connection's first line."""
_STRANGERS = 64
"""Connections that may wait to be identified, beside those of the expected processes."""
BEAT, MISSED = 1.0, 20
"""Seconds between heartbeats, and how many may be missing: they are late while Python's lock or all cores are busy."""
PEER_EXIT = 2 * _CLEAN_UP
"""Most seconds that process 0 waits for the others to exit first; they may clean up while programs are compiled."""


class Keys(Protocol):
    """Keys and values that all processes share."""

    def set(self, key: str, value: str) -> None:
        """Sets a value for all processes; a key is set once."""
        ...

    def get(self, key: str) -> str:
        """Waits for a value and returns it."""
        ...


class Lifeline:
    """The connections of one process, each watched by a thread.

    Messages are lines: ``h`` (heartbeat), ``p`` (the sender leaves without a failure) or ``f<index> <status> <news>``
    (process ``index`` has failed; every process exits with this status).
    """

    def __init__(self, index: int, end: Callable[[str, int], None]):
        """Starts unconnected, for process ``index``.

        When another process fails, ``end`` is called once, with one line that names the process and the reason, and
        with the exit status for this process.
        """
        self.index, self._end = index, end
        self._silent: set[int] = set()
        self._quiet = threading.Event()
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
          keys: keys and values that all processes share, where process 0 publishes its address.
          host: address of process 0, as the others reach it.
          count: number of processes, this one too.
          index: index of this process, from 0.
          end: called with a line and an exit status when another process has failed, see ``__init__``; by default it
            ends this process.

        Raises:
          TimeoutError: in process 0, when a process does not connect; the message names it.
          OSError: in another process, when it cannot connect.
        """
        line = cls(index, end or _end_process)
        quieten_tracker()
        if index == 0:
            line._listen(keys, host, count)
        else:
            line._connect(keys)
        for peer in line._peers:
            watch = threading.Thread(target=line._watch, args=(peer,), name=f"lifeline-{peer}", daemon=True)
            line._watches.append(watch)
        for watch in (*line._watches, threading.Thread(target=line._beat, name="beats", daemon=True)):
            watch.start()
        return line

    def _listen(self, keys: Keys, host: str, count: int) -> None:
        token = secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server(("", 0), family=family, backlog=count + _STRANGERS) as server:
            keys.set("lifeline", f"{token} {server.getsockname()[1]} {host}")
            self._peers = _Door(server, token.encode(), count).wait()

    def _connect(self, keys: Keys) -> None:
        token, port, host = keys.get("lifeline").split(" ", 2)
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=60)
        connection.settimeout(None)
        connection.sendall(f"{token} {self.index}\n".encode())
        self._peers[0] = connection

    def announce_leave(self) -> None:
        """Announces to the others that this process ends without a failure."""
        with self._lock:
            self._quiet.set()
            self._send_all(_PARTED)
            self._over = self.index != 0  # process 0 still passes on failures of the remaining ones

    def fail(self, reason: str, status: int = FOLLOWED) -> None:
        """Reports to the others why this process ends; they exit with ``status``. Process 0 waits for their exit.

        Args:
          reason: one line; the others print it behind the number of this process.
          status: exit status of the others.
        """
        self.report(self.index, f"process {self.index} has ended: {reason}", status)
        self.wait_for_peers()  # also where process 0 ends after another one, whose failure a watch has passed on

    def report(self, process: int, news: str, status: int) -> bool:
        """Makes the others end because process number ``process`` failed; returns whether this is the first failure.

        A later failure is not reported.

        Args:
          process: index of the failed process, which may be another one.
          news: one line that the others print; beyond some 600 bytes it is cut.
          status: exit status of the others.
        """
        with self._lock:
            if first := not self._over:
                self._over = True
                self._quiet.set()  # no heartbeat follows a failure
                self._send_all(_FAILED + f"{process} {status} {news}".encode()[:_LONGEST])
        return first

    def _beat(self) -> None:
        """Sends heartbeats until this process ends."""
        while not self._quiet.wait(BEAT):
            with self._lock:
                if not self._quiet.is_set():
                    self._send_all(_BEAT)

    def wait_for_peers(self, peer: int = 0) -> None:
        """Waits, in process 0, at most ``PEER_EXIT`` seconds for the others to exit; does nothing in another process.

        ``peer`` is the index of a process that has failed, which is waited for first; 0 for none.

        JAX's coordination service ends with process 0, and the others would report that as a failure of their own.
        """
        if self.index:
            return
        deadline = time.monotonic() + PEER_EXIT
        if peer:
            with contextlib.suppress(OSError):
                self._peers[peer].settimeout(PEER_EXIT)
                self._peers[peer].recv(1)  # nothing comes but the end
        for index, watch in zip(self._peers, self._watches, strict=True):
            if index not in self._silent and watch is not threading.current_thread():
                watch.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Closes the connections."""
        self._over = True
        self._quiet.set()
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _send_all(self, message: bytes) -> None:
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.sendall(message.replace(b"\n", b" ") + b"\n")

    def _watch(self, peer: int) -> None:
        """Waits for a peer's message, end or silence. Reports a failure to the others, and ends this process."""
        message = self._next_message(peer)
        if message.startswith(_PARTED):
            return
        silent = f"process {peer} has not answered for {BEAT * MISSED:.0f} s: it is stopped, or its host has vanished"
        ended = f"process {peer} has ended, without a word; its own output may say why"
        process, status, news = _read_failure(message) or (peer, FOLLOWED, ended)
        if peer in self._silent:
            status, news = STUCK, silent
        with self._lock:
            if self._over:
                return
            self._over = True
            if self.index == 0:
                self._send_all(_FAILED + f"{process} {status} {news}".encode())
        if status == STUCK:
            stacks.dump()  # before any process ends: collectives that wait for it then fail
        self.wait_for_peers(0 if peer in self._silent else peer)
        self._end(news, status)

    def _next_message(self, peer: int) -> bytes:
        """A peer's next line that is no heartbeat; empty if the connection is closed or heartbeats are missing.

        Counts waits, not seconds: a process that was itself stopped for a while does not blame its peers afterwards.
        """
        connection, data, missed = self._peers[peer], b"", 0
        with contextlib.suppress(OSError):
            connection.settimeout(BEAT)
        while len(data) < _LINE:
            try:
                piece = connection.recv(1)
            except TimeoutError:
                missed += 1
                if missed < MISSED:
                    continue
                self._silent.add(peer)
                return b""
            except OSError:
                return b""
            if not piece:
                return b""
            data, missed = data + piece, 0
            if data == _BEAT + b"\n":
                data = b""
            elif piece == b"\n":
                return data[:-1]
        return b""


class _Door:
    """The server side of connecting. Strangers may connect too, so all connections are read side by side."""

    def __init__(self, server: socket.socket, token: bytes, count: int):
        """For processes 1 … count-1, which identify themselves by a line with ``token`` and their index."""
        self._server, self._token, self._count = server, token, count
        self._selector = selectors.DefaultSelector()
        self._lines: dict[socket.socket, bytearray] = {}
        self._until: dict[socket.socket, float] = {}
        self._peers: dict[int, socket.socket] = {}

    def wait(self) -> dict[int, socket.socket]:
        """Waits for all processes; returns their connections. Raises TimeoutError after ``MEETING`` seconds."""
        end = time.monotonic() + MEETING
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        try:
            while missing := sorted({*range(1, self._count)} - self._peers.keys()):
                now = time.monotonic()
                if now >= end:
                    names = ", ".join(map(str, missing))
                    raise TimeoutError(f"process {names} did not connect within {MEETING:.0f} s")
                for connection in [connection for connection, until in self._until.items() if until <= now]:
                    self._send_off(connection)
                for key, _ in self._selector.select(min([end, *self._until.values()]) - now):
                    self._admit() if key.fileobj is self._server else self._listen(key.fileobj)
        except BaseException:
            for connection in self._peers.values():
                connection.close()
            raise
        finally:
            for connection in list(self._lines):
                self._send_off(connection)
            self._selector.close()
        return self._peers

    def _admit(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            connection.setblocking(False)
            if len(self._lines) >= self._count + _STRANGERS:
                self._send_off(next(iter(self._lines)))  # the one that has waited longest
            self._lines[connection], self._until[connection] = bytearray(), time.monotonic() + KNOCK
            self._selector.register(connection, selectors.EVENT_READ)

    def _listen(self, connection: Any) -> None:
        """Reads up to the end of the line and no further: the watch reads the following lines."""
        line = self._lines.get(connection)
        try:
            while line is not None and not line.endswith(b"\n"):
                piece = connection.recv(1)
                if not piece or len(line) >= _LINE:
                    return self._send_off(connection)
                line += piece
        except BlockingIOError:
            return None
        except OSError:
            return self._send_off(connection)
        return self._welcome(connection, bytes(line or b"")[:-1])

    def _welcome(self, connection: socket.socket, line: bytes) -> None:
        token, _, number = line.partition(b" ")
        known = secrets.compare_digest(token, self._token) and re.fullmatch(rb"\d{1,9}", number)
        index = int(number) if known else 0
        if not 0 < index < self._count or index in self._peers:
            return self._send_off(connection)
        self._forget(connection)
        connection.setblocking(True)
        self._peers[index] = connection
        return None

    def _send_off(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        if connection in self._lines:
            self._selector.unregister(connection)
            del self._lines[connection], self._until[connection]


def _read_failure(message: bytes) -> tuple[int, int, str] | None:
    """Process, exit status and news of a failure message; ``None`` for any other line."""
    match = re.fullmatch(rb"%b(\d{1,9}) (-?\d{1,9}) (.*)" % _FAILED, message, re.DOTALL)
    return (int(match[1]), int(match[2]), match[3].decode(errors="replace")[:_LONGEST]) if match else None


def _end_process(news: str, status: int) -> None:
    """Ends this process at once: other threads may wait forever in a collective with the process that has ended."""
    end_process(f"{'' if status == INTERRUPTED else 'error: '}{news}; {TOO}", status)
