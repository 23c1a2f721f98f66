"""One server as a trainer sees it: requests batches, checks them, and keeps a moving average of the server's time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
from pyarrow import flight

from mmjax.data.batch_shape import BadBatchError, BatchShape
from mmjax.data.process_rows import ProcessRows
from mmjax.data.service import protocol
from mmjax.data.service.addresses import TOKEN
from mmjax.data.service.encoding import aligned, block_size, decode
from mmjax.data.service.identity import difference
from mmjax.data.service.protocol import MESSAGE_LIMIT, SCHEMA, Request
from mmjax.data.types import StepBatch

PROBE_SECONDS = 5.0
"""Time limit of an answer that needs no batch."""
MOST_ANSWER = 1 << 20
"""The most bytes of such an answer."""
FIRST_SECONDS, LEAST_SECONDS, SLOWER = 60.0, 10.0, 10.0
"""Time limits of a batch: the first of a server; the least; and a multiple of the time of the server's recent ones."""
_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),
]


class ServerError(Exception):
    """A server did not send the requested batch."""


class ServerAway(ServerError):
    """The server does not answer, or cannot send the batch now; it may later."""


class ServerRefuses(ServerError):
    """The server refuses: the token, the configuration or the request is wrong for it."""


class ServerLies(ServerError):
    """The server sent something else than the batch; nothing more is requested from it."""


class ServerCannot(ServerError):
    """The server cannot make this batch, and says why; no other server can."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The batches that a process of a run requests from every server.

    Attributes:
      described: their identity, see `identity`.
      digest: the hash of the identity.
      seed: the run's seed.
      shape: the arrays that they must have.
      process_rows: the rows that this process needs; None for all.
    """

    described: Mapping[str, Any]
    digest: str
    seed: int
    shape: BatchShape
    process_rows: ProcessRows | None = None


class Server:
    """One server.

    Args:
      address: "grpc://…" or "grpc+tls://…".
      wanted: the batches that are requested.
      token: the token that is sent; "" sends none.
      tls_ca: certificates (PEM) against which the server's certificate is checked; None takes the system's.

    Attributes:
      outstanding: number of requests without an answer.
      seconds: moving average of the time of a batch, from its request to its last check; 0 while unknown.
      workers: number of batches that the server makes at a time.
      lies: number of answers that were not the requested batch.
    """

    def __init__(self, address: str, wanted: Wanted, token: str = "", tls_ca: bytes | None = None):
        self.address, self._wanted, self._tls_ca = address, wanted, tls_ca
        self._headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
        self._client: Any = None
        self._readers: set[Any] = set()
        self._lock = threading.Lock()
        self._closed = False
        self.outstanding, self.seconds, self.workers, self.lies = 0, 0.0, 1, 0

    def probe(self) -> None:
        """Checks that the server serves this run's configuration, and sets `workers`.

        Raises ServerAway, or ServerRefuses if the token or the configuration is wrong.
        """
        health = self._action(protocol.HEALTH)
        workers = health.get("workers")
        self.workers = workers if isinstance(workers, int) and 0 < workers <= 4096 else 1
        if health.get("identity") == self._wanted.digest:
            return
        changes = difference(self._wanted.described, self._action(protocol.CONFIGURATION))
        raise ServerRefuses(f"serves another configuration: {changes or 'another version of the protocol'}")

    def fetch(self, step: int) -> StepBatch:
        """Requests the batch of `step`, checks it and updates `seconds`. Blocks until it is there.

        Raises ServerAway, ServerRefuses, ServerCannot, or ServerLies if the answer is not the batch.
        """
        begin = time.monotonic()
        wanted = self._wanted
        shard = protocol.write_shard(wanted.process_rows)
        request = Request(identity=wanted.digest, seed=wanted.seed, step=step, shard=shard)
        try:
            batch = self._read(request, self._timeout())
            wanted.shape.check(batch, step)
        except (BadBatchError, ServerLies) as error:
            self.lies += 1
            raise ServerLies(f"step {step}: {error}") from None
        taken = time.monotonic() - begin
        self.seconds = taken if not self.seconds else 0.7 * self.seconds + 0.3 * taken
        return batch

    def cancel(self) -> None:
        """Ends all requests to the server; later ones fail."""
        with self._lock:
            self._closed = True
            readers = list(self._readers)
        for reader in readers:
            reader.cancel()

    def close(self) -> None:
        """Closes the connection, after `cancel`. With an unfinished request, it stays open until the process ends."""
        if self._client is not None and not self.outstanding:
            self._client.close()

    def _timeout(self) -> float:
        return max(LEAST_SECONDS, SLOWER * self.seconds) if self.seconds else FIRST_SECONDS

    def _read(self, request: Request, seconds: float) -> StepBatch:
        try:
            reader = self._connected().do_get(flight.Ticket(request.to_bytes()), self._call(seconds))
            with self._lock:
                self._readers.add(reader)
            try:
                if self._closed:
                    raise ServerAway("closed")
                return self._received(reader)
            finally:
                with self._lock:
                    self._readers.discard(reader)
                reader.cancel()  # drops the rest of an unwanted stream
        except (pa.ArrowException, OSError) as error:
            raise _translated(error) from None

    def _received(self, reader: Any) -> StepBatch:
        if reader.schema != SCHEMA:
            raise BadBatchError(f"a stream of {reader.schema.to_string()[:80]!r}")
        first = next(reader, None)
        if first is None or first.app_metadata is None:
            raise BadBatchError("it has no header")
        header = first.app_metadata.to_pybytes()
        block = aligned(block_size(header, self._wanted.shape.most_bytes))
        end, chunk = 0, first
        while chunk is not None:
            if chunk.data is None:
                raise BadBatchError("a message of it has no data")
            column = chunk.data.column(0)
            if column.null_count or end + len(column) > block.nbytes:
                raise BadBatchError(f"more than the {block.nbytes} bytes that its header has")
            block[end : end + len(column)] = column.to_numpy(zero_copy_only=True)
            end, chunk = end + len(column), next(reader, None)
        if end < block.nbytes:
            raise BadBatchError(f"{end} bytes of {block.nbytes}: truncated")
        return decode(header, block)

    def _action(self, name: str) -> dict[str, Any]:
        try:
            answering = self._connected().do_action(flight.Action(name, b""), self._call(PROBE_SECONDS))
            answers = list(islice(answering, 2))  # a stranger may send very many
            legal = len(answers) == 1 and answers[0].body.size <= MOST_ANSWER
            value = json.loads(answers[0].body.to_pybytes()) if legal else None
        except (pa.ArrowException, OSError) as error:
            raise _translated(error) from None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ServerRefuses(f"answers {name!r} with something else; is it python -m mmjax.serve?")
        return value

    def _call(self, seconds: float) -> Any:
        return flight.FlightCallOptions(timeout=seconds, headers=self._headers)

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                trusted = {"tls_root_certs": self._tls_ca} if self._tls_ca else {}
                self._client = flight.FlightClient(self.address, generic_options=_OPTIONS, **trusted)
            return self._client


def _translated(error: Exception) -> ServerError:
    """The `ServerError` for a Flight error, with the first sentence of its text; the others are gRPC's."""
    text = str(error).partition(". Detail:")[0].partition(". gRPC client")[0].strip()[:300]
    if isinstance(error, flight.FlightUnauthenticatedError):
        return ServerRefuses(f"{text}; give it with Data.token_file or the environment's {TOKEN}")
    kind = getattr(error, "extra_info", b"")
    if kind == protocol.NO_BATCH:
        return ServerCannot(text)
    if kind == protocol.WRONG_CONFIGURATION:
        return ServerAway(text)  # it was restarted with another configuration: the next probe names the difference
    if kind == protocol.WRONG_REQUEST:
        return ServerRefuses(text)
    if isinstance(error, flight.FlightTimedOutError):
        return ServerAway("does not answer in time")
    if isinstance(error, flight.FlightCancelledError) or "larger than max" in text:  # new Arrow; older
        return ServerAway(f"breaks off, or sends messages of more than {MESSAGE_LIMIT} bytes")
    if isinstance(error, (flight.FlightError, OSError)):
        return ServerAway(text)
    return ServerLies(text)  # a stream that is not Arrow's
