"""Copies to devices of other processes: the sender offers arrays, the receiver pulls them, and neither waits.

``jax.experimental.transfer`` moves the bytes over sockets; from and to a GPU they go through the memory of its host.
The sockets are open to everybody on the network on which the processes meet, as those of JAX and NCCL are.
"""

from __future__ import annotations

import hashlib
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Self, TypeVar

import jax

from mmjax import jax_compat
from mmjax.mesh.processes import announce, await_announcement

Copied = TypeVar("Copied")
"""A description of a copy from one device to another."""


@dataclass(frozen=True, kw_only=True)
class ProcessCopies(Generic[Copied]):
    """The copies that this process takes part in.

    Attributes:
      local: those from and to its own devices.
      offered: those from its devices, by the process that receives them.
      pulled: those to its devices, by the process that sends them.
    """

    local: list[Copied]
    offered: dict[int, list[Copied]]
    pulled: dict[int, list[Copied]]

    @classmethod
    def of(cls, copies: Iterable[Copied], ends: Callable[[Copied], tuple[Any, Any]]) -> Self:
        """Those of ``copies``, in order; ``ends`` gives the device that a copy is from, and the one that it goes to."""
        result, me = cls(local=[], offered={}, pulled={}), jax_compat.process_index()
        for copy in copies:
            sender, receiver = (device.process_index for device in ends(copy))
            if sender == me == receiver:
                result.local.append(copy)
            elif sender == me:
                result.offered.setdefault(receiver, []).append(copy)
            elif receiver == me:
                result.pulled.setdefault(sender, []).append(copy)
        return result


class Pulls:
    """The offers of this process, and its pulls from others.

    Both processes count the copies of a name, so a name has one sender and one receiver that order its copies alike.
    """

    def __init__(self) -> None:
        """Opens the socket that others pull from, and announces its address to them."""
        self._counts: Counter[tuple[str, int, int]] = Counter()
        self._connections: dict[tuple[int, str], Any] = {}
        self._server = jax_compat.transfer_server(_host())
        announce(_key(jax_compat.process_index()), self._server.address())

    def offer(self, name: str, receiver: int, arrays: Sequence[jax.Array]) -> None:
        """Lets another process pull ``arrays`` once, when they are ready; returns at once.

        Args:
          name: name of the transfer, such as "vision.0->llm.0 forward".
          receiver: index of the process that pulls them.
          arrays: arrays on one device each. They live until they have been pulled, unless they are donated before.
        """
        self._server.await_pull(self._number(name, jax_compat.process_index(), receiver), list(arrays))

    def pull(
        self, name: str, sender: int, avals: Sequence[jax.ShapeDtypeStruct], *, channel: str = ""
    ) -> list[jax.Array]:
        """The arrays that another process offers; returns at once, with arrays that are not ready.

        Args:
          name: name of the transfer, as for ``offer``.
          sender: index of the process that offers them.
          avals: their shapes and dtypes, each with a ``SingleDeviceSharding`` on the device that it goes to.
          channel: its pulls arrive one after another, so one that comes early must not stand behind one that comes
            late: activations are pulled in the order of a schedule, all else has a channel of its own.
        """
        if (sender, channel) not in self._connections:
            self._connections[sender, channel] = self._server.connect(await_announcement(_key(sender)))
        number = self._number(name, sender, jax_compat.process_index())
        return self._connections[sender, channel].pull(number, list(avals))

    def _number(self, name: str, sender: int, receiver: int) -> int:
        """The number of the next copy, which is the same in both processes and used once."""
        count = self._counts[name, sender, receiver]
        self._counts[name, sender, receiver] += 1
        digest = hashlib.blake2b(f"{name} {sender} {receiver} {count}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


@cache
def process_pulls() -> Pulls:
    """The offers and pulls of this process."""
    return Pulls()


def _key(process: int) -> str:
    return f"pulls/{process}"


def _host() -> str:
    """The IP address by which the other processes reach this one: of the interface to the coordinator."""
    host, _, port = jax_compat.coordinator_address().rpartition(":")
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:  # no packet is sent
        probe.connect(address)
        return str(probe.getsockname()[0])
