"""The Flight server: it answers requests for batches from a pool of workers, and never imports JAX."""

from __future__ import annotations

import hmac
import json
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from mmjax.data.batch_spec import BatchSpec
from mmjax.data.process_rows import ProcessRows
from mmjax.data.service import protocol
from mmjax.data.service.identity import digest, identity
from mmjax.data.service.pool import BatchError, MadeBatch, Pool
from mmjax.data.service.protocol import CHUNK, SCHEMA, Request

KEPT_BYTES = 1 << 30
"""Bytes of finished batches that are kept for a client that lost its connection, or for a second client."""
_WAIT = 0.1
"""Seconds between checks whether a client still waits."""


class _Guard(flight.ServerMiddlewareFactory):
    """Refuses calls without the token."""

    def __init__(self, token: str):
        self._token = token.encode()

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        texts = [value for name, values in headers.items() if name.lower() == "authorization" for value in values]
        text = texts[0] if len(texts) == 1 and isinstance(texts[0], str) else ""
        scheme, _, token = text.partition(" ")
        if scheme != "Bearer" or not hmac.compare_digest(token.encode(errors="replace"), self._token):
            raise flight.FlightUnauthenticatedError("the token is missing or wrong")


_Key = tuple[int, str]
"""A step, and the wanted rows as JSON."""


class _Shelf:
    """Batches that are being made or were made lately; equal requests share one batch."""

    def __init__(self, pool: Pool, most_waiting: int):
        self._pool, self._most_waiting = pool, most_waiting
        self._lock = threading.Lock()
        self._futures: OrderedDict[_Key, Future[MadeBatch]] = OrderedDict()
        self._readers: dict[_Key, int] = {}

    def waiting(self) -> int:
        """How many batches are not made yet."""
        with self._lock:
            return sum(not future.done() for future in self._futures.values())

    @contextmanager
    def read(self, step: int, process_rows: ProcessRows | None) -> Iterator[Future[MadeBatch]]:
        """A context with a future of the batch of `step`. It is dropped from the queue when its last reader leaves.

        Raises BlockingIOError when too many are waiting.
        """
        key = step, json.dumps(protocol.write_shard(process_rows), sort_keys=True)
        with self._lock:
            future = self._futures.get(key)
            if future is None:
                if sum(not pending.done() for pending in self._futures.values()) >= self._most_waiting:
                    raise BlockingIOError
                future = self._futures[key] = self._pool.submit(step, process_rows)
            self._futures.move_to_end(key)
            self._readers[key] = self._readers.get(key, 0) + 1
        try:
            yield future
        finally:
            with self._lock:
                self._readers[key] -= 1
                if not self._readers[key]:
                    del self._readers[key]
                    if future.cancel() or _failed(future):
                        del self._futures[key]
                self._forget()

    def _forget(self) -> None:
        """Drops batches beyond `KEPT_BYTES`, the least recently requested first, and none that is being read."""
        finished = [(key, future) for key, future in self._futures.items() if future.done() and not _failed(future)]
        size = sum(future.result().nbytes for _, future in finished)
        for key, future in finished:
            if size <= KEPT_BYTES:
                break
            if key not in self._readers:
                size -= future.result().nbytes
                del self._futures[key]


def _failed(future: Future[MadeBatch]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def require_free(host: str, port: int) -> None:
    """Raises OSError if the port cannot be listened on; gRPC would print lines first.

    host: such as "127.0.0.1". port: 1 to 65535; 0, any free one, always passes.
    """
    family, kind, protocol_, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol_) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


class BatchServer(flight.FlightServerBase):
    """Serves the batches of one configuration, from its construction on.

    Args:
      spec: all that batches depend on.
      workers: number of processes that make batches.
      location: the address to listen on, such as "grpc://127.0.0.1:0"; port 0 takes a free one.
      token: the token that requests must carry; "" accepts all.
      tls: certificate and key (PEM) of a grpc+tls location.

    Raises:
      ConfigError: the data cannot be read.
      OSError: the address is taken, or is not of this host.
    """

    def __init__(
        self, spec: BatchSpec, workers: int, location: str, token: str = "", tls: tuple[bytes, bytes] | None = None
    ):
        maker = spec.maker()
        self.spec, self.workers = spec, workers
        self.described = identity(spec, maker.source)
        self.identity = digest(self.described)
        self.served = self.sent_bytes = self.failed = 0
        self._began, self._lock, self._ending = time.monotonic(), threading.Lock(), threading.Event()
        self._pool = Pool(maker, workers)
        self._shelf = _Shelf(self._pool, most_waiting=16 * workers + 64)
        try:
            guards = {"token": _Guard(token)} if token else {}
            super().__init__(location, tls_certificates=[tls] if tls else None, middleware=guards)
        except BaseException as error:
            self._pool.close()
            if isinstance(error, pa.ArrowException):
                raise OSError(str(error)) from None
            raise

    def health(self) -> dict[str, Any]:
        """The state of the server, as JSON.

        "status" ("serving" or "ending"), "identity" (the hash), "workers", "waiting" (batches that are not made yet),
        "served" and "failed" (batches), "sent_bytes", "seconds" since the start, "jax" (whether JAX is imported).
        """
        return {
            "status": "ending" if self._ending.is_set() else "serving",
            "identity": self.identity,
            "workers": self.workers,
            "waiting": self._shelf.waiting(),
            "served": self.served,
            "sent_bytes": self.sent_bytes,
            "failed": self.failed,
            "seconds": round(time.monotonic() - self._began, 3),
            "jax": "jax" in sys.modules,
        }

    def end(self) -> None:
        """Refuses requests, ends the workers and closes the port."""
        self._ending.set()
        self.shutdown()
        self._pool.close()

    # ---- Flight's interface ------------------------------------------------------------------------------------------

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """Answers the actions "health" and "configuration" with one JSON object; Flight calls it."""
        answers = {protocol.HEALTH: self.health, protocol.CONFIGURATION: lambda: self.described}
        if action.type not in answers or action.body.size:
            raise self._refusal(f"no action {action.type[:80]!r}", protocol.WRONG_REQUEST)
        return iter([json.dumps(answers[action.type]()).encode()])

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        """Name and description of each action; Flight calls it."""
        return [
            (protocol.HEALTH, "How the server is, as JSON."),
            (protocol.CONFIGURATION, "What it serves, as JSON."),
        ]

    def do_get(self, context: Any, ticket: Any) -> Any:
        """The stream of the batch that the ticket, a `Request` as bytes, asks for; Flight calls it.

        Raises FlightServerError, with a kind of refusal of `protocol`, for a request that is refused.
        """
        try:
            request = Request.from_bytes(ticket.ticket)
        except ValueError as error:
            raise self._refusal(f"no request for a batch: {error}", protocol.WRONG_REQUEST) from None
        if request.identity != self.identity or request.seed != self.spec.seed:
            raise self._refusal("another configuration is served here", protocol.WRONG_CONFIGURATION)
        try:
            process_rows = protocol.read_shard(request.shard, self.spec.packer)
        except ValueError as error:
            raise self._refusal(str(error), protocol.WRONG_REQUEST) from None
        # The stream opens at once and waits for its first message: a client may cancel it meanwhile.
        return flight.GeneratorStream(SCHEMA, self._send(context, request.step, process_rows))

    def _send(self, context: Any, step: int, process_rows: ProcessRows | None) -> Iterator[Any]:
        try:
            with self._shelf.read(step, process_rows) as future:
                batch = self._awaited(context, future)
        except BlockingIOError:
            raise self._refusal("too many requests are waiting", protocol.BUSY) from None
        except BatchError as error:
            with self._lock:
                self.failed += 1
            raise self._refusal(str(error), protocol.NO_BATCH) from None
        for start in range(0, max(1, batch.block.nbytes), CHUNK):
            part = _column(batch.block[start : start + CHUNK])
            yield (part, batch.header) if start == 0 else part
        with self._lock:
            self.served += 1
            self.sent_bytes += batch.block.nbytes

    def _awaited(self, context: Any, future: Future[MadeBatch]) -> MadeBatch:
        while True:
            try:
                return future.result(_WAIT)
            except FutureTimeoutError:
                if context.is_cancelled():
                    raise flight.FlightCancelledError("nobody waits for it") from None
            except CancelledError:
                raise flight.FlightUnavailableError("the server is ending") from None
            if self._ending.is_set():
                raise flight.FlightUnavailableError("the server is ending")

    def _refusal(self, text: str, kind: bytes) -> Exception:
        return flight.FlightServerError(text, kind)


def _column(block: np.ndarray) -> pa.RecordBatch:
    """`block` as a record batch of one column, without a copy."""
    array = pa.Array.from_buffers(pa.uint8(), block.nbytes, [None, pa.py_buffer(block)])
    return pa.RecordBatch.from_arrays([array], schema=SCHEMA)
