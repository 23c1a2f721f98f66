"""The processes of a run: how they meet and exchange messages.

How they are found and how one leaves is in ``company``, which needs no JAX.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Collection
from typing import Any

import jax

from mmjax import jax_compat
from mmjax.configurable import ConfigError
from mmjax.mesh import company
from mmjax.mesh.company import Processes
from mmjax.mesh.lifeline import Lifeline

_LOST_AFTER = 100
"""Seconds without a heartbeat after which JAX aborts whichever process notices; the lifeline misses beats long before
that."""
_PATIENCE = 3600.0
"""Seconds to wait for another process's message: it may be compiling, and if it ends the lifeline tells."""
_number = itertools.count()


def join(processes: Processes | None) -> None:
    """Meets the other processes, before any backend is started; does nothing for a run of one process.

    From then on the end of any process ends the others: each prints which one ended, and exits with ``FOLLOWED`` unless
    that one asked for another status.

    Raises:
      ConfigError: the processes do not meet.
    """
    if processes is None or jax_compat.process_count() > 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's service would take SIGTERM for the announcement of a preemption, which does not end the process.
    jax.config.update("jax_enable_preemption_service", False)
    _silence_gloo()
    try:
        jax.distributed.initialize(
            processes.coordinator or None,
            processes.count,
            processes.index,
            cluster_detection_method=processes.launcher or "deactivate",
            heartbeat_timeout_seconds=_LOST_AFTER,
        )
    except (RuntimeError, ValueError) as error:
        where = processes.coordinator or f"the address that {processes.launcher} gives"
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"--coordinator={where}: the {processes.count} processes did not meet ({reason})") from None
    client = jax_compat.coordination_client()
    host = jax_compat.coordinator_address().rpartition(":")[0]
    try:
        company.enter(Lifeline.open(_Keys(client), host, processes.count, processes.index))
    except OSError as error:
        raise ConfigError(f"--coordinator={host}: the {processes.count} processes did not meet ({error})") from None


def _silence_gloo() -> None:
    """Keeps the line that Gloo prints for every communicator off stdout, where a result may be awaited."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = os.fdopen(own, "w", buffering=1 if sys.stdout.isatty() else -1)


class Absent(RuntimeError):
    """Another process has not come in time to the point where this one waits for it."""


class _Keys:
    """Keys and values that all processes share."""

    def __init__(self, client: Any):
        self._client = client

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(f"mmjax/{key}", value)

    def replace(self, key: str, value: str) -> None:
        """Sets a value in place of the one before, if any."""
        self._client.key_value_set(f"mmjax/{key}", value, allow_overwrite=True)

    def below(self, folder: str) -> dict[str, str]:
        """The values below a folder that are set by now, by the last part of their keys."""
        return {key.rpartition("/")[2]: value for key, value in self._client.key_value_dir_get(f"mmjax/{folder}/")}

    def get(self, key: str, patience: float = _PATIENCE) -> str:
        """Waits until a process has set the value; raises ``Absent`` after ``patience`` seconds."""
        try:
            return self._client.blocking_key_value_get(f"mmjax/{key}", round(patience * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise Absent(f"nobody has said {key} in {patience:g} s") from error


def is_first() -> bool:
    """Whether this is process 0, the only one to write what a run has one of."""
    return jax_compat.process_index() == 0


def first_says(value: str) -> str:
    """The value that process 0 gives; every process has to call this, in the same order."""
    if jax_compat.process_count() == 1:
        return value
    keys, name = _Keys(jax_compat.coordination_client()), f"said/{next(_number)}"
    if is_first():
        keys.set(name, value)
        return value
    return keys.get(name)


def everyone_says(value: str) -> list[str]:
    """The values that the processes give, by process; every process has to call this, in the same order."""
    return Exchange()(value)


def meet(name: str, processes: Collection[int]) -> None:
    """Waits until all of these processes have called this with ``name``, which is used once."""
    if len(processes) > 1:
        jax_compat.coordination_client().wait_at_barrier(f"mmjax/{name}", round(1000 * _PATIENCE), sorted(processes))


class Board:
    """A board to which each process pins one note; nobody waits for anybody. All processes use the same name."""

    def __init__(self, name: str) -> None:
        self._folder, self._alone = f"board/{name}", ""

    def pin(self, note: str) -> None:
        """Pins this process's note, in place of the one before."""
        if jax_compat.process_count() == 1:
            self._alone = note
        else:
            _Keys(jax_compat.coordination_client()).replace(f"{self._folder}/{jax_compat.process_index()}", note)

    def read(self) -> dict[int, str]:
        """The notes by process; those that are not there yet are left out."""
        if jax_compat.process_count() == 1:
            return {0: self._alone} if self._alone else {}
        notes = _Keys(jax_compat.coordination_client()).below(self._folder)
        return {int(process): note for process, note in notes.items()}


class Exchange:
    """A question that every process answers once. All processes create it at the same place; when and in which thread
    each answers is left to it."""

    def __init__(self) -> None:
        self._number = next(_number)

    def __call__(self, value: str, listen: bool = True, patience: float = _PATIENCE) -> list[str]:
        """Gives this process's answer; returns every process's, or nothing where this process does not ``listen``.

        Raises:
          Absent: a process does not answer within ``patience`` seconds.
        """
        count, me = jax_compat.process_count(), jax_compat.process_index()
        if count == 1:
            return [value]
        keys = _Keys(jax_compat.coordination_client())
        keys.set(f"answer/{self._number}/{me}", value)
        if not listen:
            return []
        return [
            value if other == me else keys.get(f"answer/{self._number}/{other}", patience) for other in range(count)
        ]


class Agreement:
    """A point at which all processes go on or none does. All create it at the same place, like an ``Exchange``."""

    def __init__(self) -> None:
        self._exchange, self._number = Exchange(), next(_number)

    def __call__(self, problem: str, patience: float = _PATIENCE) -> str:
        """The problem of the first process that has one, or ""; every process gives its own and gets the same answer.

        Raises:
          Absent: another process does not come within ``patience`` seconds.
        """
        answers = self._exchange(problem, is_first(), patience)
        if jax_compat.process_count() == 1:
            return problem
        keys, name = _Keys(jax_compat.coordination_client()), f"agreed/{self._number}"
        if not is_first():
            return keys.get(name, patience)
        joint = next((f"process {other}: {answer}" for other, answer in enumerate(answers) if answer), "")
        keys.set(name, joint)
        return joint
