"""The stream of step batches of a trainer whose batches are prepared by other hosts. Every host makes the same batches.

Steps are requested ahead. Each has a thread, which tries servers until one has sent the batch. If the next step takes
much longer than usual, it is requested from a second server too; the first answer counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

from mmjax.configurable import ConfigError
from mmjax.data.batch_shape import BatchShape
from mmjax.data.batch_spec import BatchSpec
from mmjax.data.loader import StepMaker
from mmjax.data.service.addresses import read_token, read_trusted
from mmjax.data.service.client import Server, ServerCannot, ServerError, ServerLies, Wanted
from mmjax.data.service.encoding import decode
from mmjax.data.service.identity import digest, identity
from mmjax.data.service.pool import BatchError, Pool
from mmjax.data.service.roster import Member, Roster
from mmjax.data.types import NoBatchError, StepBatch

LOCAL = "local"
"""The origin of a batch that was made on this host."""
MOST_AHEAD, MOST_BYTES = 64, 2 << 30
"""The most batches that are requested or buffered at a time, and their most bytes together."""
_FIRST_PROBES = 6.0
"""Seconds for which a run waits at its start for servers to say that they serve another configuration."""
_HEDGE, _SLOWER = 0.5, 3.0
"""Delay of a second request for the next batch: so many seconds, or so many times a recent batch's time."""
_LOOK = 0.1
_LEAVE = 2.0


@dataclass
class _Slot:
    """A requested step.

    origin: where its batch was made. makers: servers that are making it. cannot: servers that cannot make it, and why.
    failure: why nobody can.
    """

    batch: StepBatch | None = None
    origin: str = ""
    makers: set[str] = field(default_factory=set)
    cannot: dict[str, str] = field(default_factory=dict)
    failure: NoBatchError | None = None


class ServedLoader(Iterator[StepBatch]):
    """Batches of steps start_step … steps-1, in order, from `Data.servers`. Close it, or use it in a `with` block.

    Args:
      spec: all that batches depend on.
      maker: makes the same batches on this host, where `Data.fallback` is "local"; its rows are requested of servers.
      report: receives one-line messages, from any thread.

    Attributes:
      origin: where the last batch was made: a server's address, or "local".

    Raises:
      ConfigError: a token, certificate or list cannot be read, or every server refuses this run.
    """

    def __init__(
        self, spec: BatchSpec, maker: StepMaker, *, steps: int, start_step: int, report: Callable[[str], None]
    ):
        data = spec.data.settings
        described = identity(spec, maker.source)
        rows = maker.process_rows
        shape = BatchShape(spec.packer, spec.global_batch, rows)
        wanted = Wanted(described=described, digest=digest(described), seed=spec.seed, shape=shape, process_rows=rows)
        token = read_token("Data.token_file", data.token_file)
        trusted = read_trusted(data.tls_ca)
        self._data, self._maker, self._shape, self._report = data, maker, shape, report
        self._changed = threading.Condition()
        self._slots: dict[int, _Slot] = {}
        self._next, self._stop = start_step, max(start_step, steps)
        self._failure: NoBatchError | None = None
        self._alone = self._closed = False
        self._threads: set[threading.Thread] = set()
        self._pool: Pool | None = None
        self.origin = ""

        def connect(address: str) -> Server:
            return Server(address, wanted, token, trusted)

        self._roster = Roster(data.servers, connect, report, self._changed)
        self._start(self._watch)
        try:
            self._meet()
        except BaseException:
            self.close()
            raise

    def __next__(self) -> StepBatch:
        """The next batch.

        Raises:
          NoBatchError: no server has sent it for longer than `Data.patience`.
        """
        with self._changed:
            if self._next >= self._stop or self._closed:
                raise StopIteration
            slot, begin = self._fill(), time.monotonic()
            while slot.batch is None:
                failure = slot.failure or (None if slot.makers else self._failure)
                if failure:
                    raise failure
                if self._closed:
                    raise StopIteration
                self._changed.wait(_LOOK)
                self._hedge(self._next, slot, time.monotonic() - begin)
            self.origin = slot.origin
            del self._slots[self._next]
            self._next += 1
            if self._next < self._stop:
                self._fill()
            return slot.batch

    def interrupt(self) -> None:
        """Ends a `next` that waits in another thread: it raises StopIteration, as do all later ones."""
        with self._changed:
            self._closed = True
            self._roster.cancel()
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all requests and workers. Harmless when repeated."""
        self.interrupt()
        with self._changed:
            pool, self._pool = self._pool, None
        if pool:
            pool.close()
        end = time.monotonic() + _LEAVE  # a server that hangs is not waited for
        for thread in list(self._threads):
            thread.join(max(0.0, end - time.monotonic()))
        self._roster.close()

    def __enter__(self) -> ServedLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- servers -----------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Waits until a server is ready or all have answered, for a few seconds at most."""
        end = time.monotonic() + _FIRST_PROBES
        with self._changed:
            while not (self._roster.ready() or self._roster.settled()) and time.monotonic() < end:
                self._changed.wait(_LOOK)
            if self._roster.ready():
                self._fill()
            elif self._roster.hopeless():
                raise ConfigError(f"Data.servers={self._data.servers!r}: {self._roster.complaints()}")
            else:
                self._report(f"waiting for a data server: {self._roster.complaints()}")

    def _watch(self) -> None:
        """Probes the servers in the background, and reacts when none is left or one is back."""
        while True:
            self._roster.tend()
            with self._changed:
                if self._closed or self._failure:
                    return
                self._judge()
                self._changed.wait(_LOOK)

    def _judge(self) -> None:
        roster, data = self._roster, self._data
        if roster.is_serving():
            if self._alone:
                self._report("a data server is there: batches come from it again")
            self._alone = False
        elif not self._alone and (time.monotonic() - roster.last_served > data.patience or roster.hopeless()):
            if data.fallback == "error":
                fix = "start servers, or prepare batches here with Data.fallback='local'"
                self._fail(f"no data server is there: {roster.complaints()}; {fix}")
                return
            self._report(f"no data server is there: {roster.complaints()}; batches are prepared here until one is")
            self._alone = True
            self._changed.notify_all()

    def _fail(self, why: str) -> None:
        self._failure = self._failure or NoBatchError(why)
        self._changed.notify_all()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _fill(self) -> _Slot:
        """Requests the steps that should be under way; returns the slot of the next one."""
        workers = 0 if self._alone else self._roster.workers()
        ahead = min(self._data.prefetch * max(1, workers), MOST_AHEAD, MOST_BYTES // max(1, self._shape.most_bytes))
        for step in range(self._next, min(self._next + max(2, ahead), self._stop)):
            if step not in self._slots:
                self._slots[step] = _Slot()
                self._start(self._fetch, step, self._slots[step])
        return self._slots[self._next]

    def _hedge(self, step: int, slot: _Slot, waited: float) -> None:
        """Requests a step from another server too, if it has been waited for too long."""
        late = waited > max(_HEDGE, _SLOWER * self._roster.seconds()) * max(1, len(slot.makers))
        if late and slot.batch is None and slot.makers and self._roster.ready({*slot.makers, *slot.cannot}):
            self._start(self._fetch, step, slot)

    def _fetch(self, step: int, slot: _Slot) -> None:
        """Fetches a step, in a separate thread: tries servers until one thread has received the batch."""
        try:
            while (maker := self._next_maker(step, slot)) is not None:
                if isinstance(maker, Member):
                    self._request(step, slot, maker)
                else:
                    self._make(step, slot)
        except Exception as error:  # else the run would wait for ever
            with self._changed:
                self._fail(f"step {step}: {type(error).__name__}: {error}")
            raise

    def _next_maker(self, step: int, slot: _Slot) -> Member | str | None:
        """Waits until a server, or `LOCAL` (this host), can make the step, and returns it.

        Returns None if the step is no longer wanted, or nobody can make it.
        """
        with self._changed:
            while not (self._closed or self._failure or slot.batch or slot.failure):
                member = self._roster.choose({*slot.makers, *slot.cannot})
                if member:
                    member.server.outstanding += 1
                    slot.makers.add(member.address)
                    return member
                if self._alone and LOCAL not in slot.makers:
                    slot.makers.add(LOCAL)
                    return LOCAL
                if slot.cannot and not slot.makers and self._roster.ready() and self._roster.settled():
                    reasons = "; ".join(f"data server {name} says: {why}" for name, why in slot.cannot.items())
                    slot.failure = NoBatchError(reasons)
                    self._changed.notify_all()
                    return None
                self._changed.wait()
            return None

    def _request(self, step: int, slot: _Slot, member: Member) -> None:
        batch, error = None, None
        try:
            batch = member.server.fetch(step)
        except ServerError as raised:
            error = raised
        finally:
            with self._changed:  # the answer is recorded before another request can go to this server
                member.server.outstanding -= 1
                slot.makers.discard(member.address)
                if not self._closed:
                    self._record_answer(slot, member, batch, error)

    def _record_answer(self, slot: _Slot, member: Member, batch: StepBatch | None, error: ServerError | None) -> None:
        if isinstance(error, ServerCannot):
            slot.cannot[member.address] = str(error)
        elif error:
            self._roster.failed(member, error)
            if isinstance(error, ServerLies):
                self._forget(member.address)
        elif batch and not member.lied:
            self._roster.succeeded(member)
            self._deliver(slot, batch, member.address)
        self._changed.notify_all()

    def _forget(self, address: str) -> None:
        """Requests again the unused batches of a server that has since sent something wrong."""
        for step, slot in self._slots.items():
            if slot.batch and slot.origin == address:
                slot.batch = None
                self._start(self._fetch, step, slot)

    def _make(self, step: int, slot: _Slot) -> None:
        with self._changed:
            if self._closed:
                return
            self._pool = self._pool or Pool(self._maker, max(1, self._data.workers))
            future = self._pool.submit(step, self._maker.process_rows)
        try:
            encoded = future.result()
            batch = decode(encoded.header, encoded.block)
        except CancelledError:
            return
        except BatchError as error:
            with self._changed:
                slot.failure = NoBatchError(str(error))
                self._changed.notify_all()
            return
        with self._changed:
            slot.makers.discard(LOCAL)
            self._deliver(slot, batch, LOCAL)

    def _deliver(self, slot: _Slot, batch: StepBatch, origin: str) -> None:
        if slot.batch is None:
            slot.batch, slot.origin = batch, origin
        self._changed.notify_all()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            try:
                target(*arguments)
            finally:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="batches", daemon=True)
        self._threads.add(thread)
        thread.start()
