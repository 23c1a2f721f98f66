"""The servers of a run: tracks which are ready, and chooses one for the next request. Servers come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mmjax.configurable import ConfigError
from mmjax.data.service.addresses import is_path, read_addresses
from mmjax.data.service.client import Server, ServerAway, ServerError, ServerLies, ServerRefuses

READ_EVERY = 1.0
"""Seconds between reads of the file of servers."""
SHORTEST_RETRY, LONGEST_RETRY = 0.1, 5.0
"""Seconds until a server that is away, or refuses, is probed again; doubled every time."""
_FAILURES = 3
"""Number of requests in a row that fail before a server that is up counts as not serving."""
NEW, READY, AWAY, REFUSING, DROPPED = "new", "ready", "away", "refusing", "dropped"


@dataclass(eq=False)
class Member:
    """A server and its state.

    state: NEW, READY, AWAY, REFUSING or DROPPED. why: why it is not ready. retry: seconds from the next failure to the
    probe after it. due: when it is probed next, by `time.monotonic`. probing: whether it is being probed now. failures:
    failed requests since its last batch.
    """

    server: Server
    state: str = NEW
    why: str = "does not answer"
    retry: float = SHORTEST_RETRY
    due: float = 0.0
    probing: bool = False
    failures: int = 0

    @property
    def address(self) -> str:
        """The address of the server, such as "grpc+tls://host:8815"."""
        return self.server.address

    @property
    def lied(self) -> bool:
        """Whether it has ever sent something else than the requested batch."""
        return self.server.lies > 0

    def score(self, fallback: float) -> float:
        """Expected seconds until the member has answered one more request; `fallback`: a batch's time if unknown."""
        rounds = (self.server.outstanding + 1) / self.server.workers
        return max(1.0, rounds) * (self.server.seconds or fallback) + 1e-6 * self.server.outstanding


class Roster:
    """The members. Callers of all methods but `tend` must hold the lock of `changed`, which is notified of all changes.

    Args:
      servers: `Data.servers`.
      connect: makes the server of an address.
      report: receives one-line messages.
      changed: notified when a member's state changes.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        connect: Callable[[str], Server],
        report: Callable[[str], None],
        changed: threading.Condition,
    ):
        self._servers, self._connect, self._report, self._changed = servers, connect, report, changed
        self._members: dict[str, Member] = {}
        self._read_at, self._complaint = 0.0, ""
        self.last_served = time.monotonic()
        """The time at which a server last served, or the loader began."""
        with changed:
            self._list(read_addresses(servers))

    def ready(self, without: Collection[str] = ()) -> list[Member]:
        """Members that take requests, without members at the addresses `without`."""
        return [m for m in self._members.values() if m.state == READY and m.address not in without]

    def is_serving(self) -> bool:
        """Whether any ready member has failed fewer than three times in a row."""
        return any(m.failures < _FAILURES for m in self.ready())

    def choose(self, without: Collection[str] = ()) -> Member | None:
        """The ready member expected to answer first, not at the addresses `without`; None if there is none.

        A new member counts as the fastest, so that its speed gets measured.
        """
        ready = self.ready(without)
        known = [m.server.seconds for m in ready if m.server.seconds]
        return min(ready, key=lambda m: m.score(min(known, default=1.0)), default=None)

    def seconds(self) -> float:
        """Seconds of a recent batch of the fastest member; 0 while unknown."""
        return min((m.server.seconds for m in self.ready() if m.server.seconds), default=0.0)

    def workers(self) -> int:
        """Number of batches that all ready members together make at a time."""
        return sum(m.server.workers for m in self.ready())

    def hopeless(self) -> bool:
        """Whether no member is ready, and none can become ready by itself."""
        lost = all(m.state in (REFUSING, DROPPED) and not m.probing for m in self._members.values())
        return lost and not (is_path(self._servers) and not self._members)

    def settled(self) -> bool:
        """Whether every member has been probed."""
        return all(m.state != NEW for m in self._members.values())

    def complaints(self) -> str:
        """The reasons why members are not ready, in one line: "address reason; address reason"."""
        wrong = [m for m in self._members.values() if m.state != READY or m.failures]
        lines = [f"{m.address} {m.why}" for m in wrong]
        return "; ".join(lines) or f"{self._servers} lists none"

    def failed(self, member: Member, error: ServerError) -> None:
        """Records a failed request: a member that sent a wrong batch is dropped, one that is away is probed again."""
        member.failures += 1
        if self._members.get(member.address) is not member:
            return
        if member.state == DROPPED:
            return
        if isinstance(error, ServerLies):
            member.state, member.why = DROPPED, f"sent a wrong batch ({error})"
            self._report(f"data server {member.address} is dropped: {error}")
        elif isinstance(error, (ServerAway, ServerRefuses)) and member.state == READY:
            self._away(member, error)
        self._changed.notify_all()

    def succeeded(self, member: Member) -> None:
        """Records that a member has sent a batch."""
        member.failures, member.retry, self.last_served = 0, SHORTEST_RETRY, time.monotonic()

    def cancel(self) -> None:
        """Ends all requests to all members; later ones fail."""
        for member in self._members.values():
            member.server.cancel()

    def close(self) -> None:
        """Closes the connections that nobody uses any more."""
        for member in self._members.values():
            member.server.close()

    def tend(self) -> None:
        """Reads the list again and probes members that are due. To be called regularly, without the lock."""
        now = time.monotonic()
        if is_path(self._servers) and now > self._read_at + READ_EVERY:
            self._read_again(now)
        with self._changed:
            if self.is_serving():
                self.last_served = now
            due = [m for m in self._members.values() if m.state not in (READY, DROPPED) and not m.probing]
            due = [m for m in due if m.due <= now]
            for member in due:
                member.probing = True
        for member in due:
            threading.Thread(target=self._probe, args=(member,), name="probe", daemon=True).start()

    def _read_again(self, now: float) -> None:
        self._read_at, complaint = now, ""
        try:
            addresses = read_addresses(self._servers)
        except ConfigError as error:  # perhaps half written
            addresses, complaint = None, f"{error}; the servers stay as they were"
        with self._changed:
            if complaint and complaint != self._complaint:
                self._report(complaint)
            self._complaint = complaint
            if addresses is not None:
                self._list(addresses)

    def _list(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            if address not in self._members:
                self._members[address] = Member(self._connect(address))
        for address in [address for address in self._members if address not in addresses]:
            member = self._members.pop(address)  # it may still answer its requests
            if member.state == READY:
                self._report(f"data server {address} has left")
            member.state, member.why = DROPPED, "has left"
        self._changed.notify_all()

    def _probe(self, member: Member) -> None:
        try:
            member.server.probe()
            error = None
        except ServerError as raised:
            error = raised
        with self._changed:
            member.probing = False
            if member.state == DROPPED:
                return
            if error:
                self._away(member, error)
            else:
                if member.state != NEW and not member.failures:
                    self._report(f"data server {member.address} is there")
                member.state = READY
            self._changed.notify_all()

    def _away(self, member: Member, error: ServerError) -> None:
        state = REFUSING if isinstance(error, ServerRefuses) else AWAY
        if (state, str(error)) != (member.state, member.why) and (state, member.state) != (AWAY, AWAY):
            self._report(f"data server {member.address}: {error}")
        member.state, member.why = state, str(error)
        member.due = time.monotonic() + member.retry
        member.retry = min(2 * member.retry, LONGEST_RETRY)
