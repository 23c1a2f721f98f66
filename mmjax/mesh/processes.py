"""The processes of a run: how they meet and exchange messages.

``process_group`` finds their settings and lets one leave, without JAX.
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
from mmjax.mesh import process_group
from mmjax.mesh.lifeline import Lifeline
from mmjax.mesh.process_group import Processes

_LOST_AFTER = 100
"""Seconds without a heartbeat after which JAX aborts the process that notices; the lifeline notices long before."""
_PATIENCE = 3600.0
"""Seconds to wait for another process's message: it may be compiling, and if it ends the lifeline reports that."""
_number = itertools.count()


def join(processes: Processes | None) -> None:
    """Connects to the other processes, before any backend is started; does nothing for ``None``, a run of one process.

    ``processes`` is the result of ``process_group.find_processes``.

    From then on the end of any process ends the others: each prints which one ended, and exits with status ``FOLLOWED``
    or the one that the failed process has chosen.

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
        process_group.set_lifeline(Lifeline.open(_Keys(client), host, processes.count, processes.index))
    except OSError as error:
        raise ConfigError(f"--coordinator={host}: the {processes.count} processes did not meet ({error})") from None


def _silence_gloo() -> None:
    """Keeps the line that Gloo prints for every communicator off stdout, where a result may be awaited."""
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = os.fdopen(stdout_copy, "w", buffering=1 if sys.stdout.isatty() else -1)


class ProcessTimeout(RuntimeError):
    """Another process has not reached in time the point where this one waits for it."""


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
        """The values in a folder that are already set, by the last part of their keys."""
        return {key.rpartition("/")[2]: value for key, value in self._client.key_value_dir_get(f"mmjax/{folder}/")}

    def get(self, key: str, patience: float = _PATIENCE) -> str:
        """Waits until a process has set the value; raises ``ProcessTimeout`` after ``patience`` seconds."""
        try:
            return self._client.blocking_key_value_get(f"mmjax/{key}", round(patience * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise ProcessTimeout(f"nobody has said {key} in {patience:g} s") from error


def is_first() -> bool:
    """Whether this is process 0, which alone writes the files that a run has once."""
    return jax_compat.process_index() == 0


def broadcast_text(value: str) -> str:
    """The ``value`` of process 0, in every process; all have to call this, in the same order of calls.

    Other processes wait for process 0, which waits for none. Their ``value`` is ignored.

    Raises:
      ProcessTimeout: process 0 does not call this within an hour.
    """
    if jax_compat.process_count() == 1:
        return value
    keys, name = _Keys(jax_compat.coordination_client()), f"said/{next(_number)}"
    if is_first():
        keys.set(name, value)
        return value
    return keys.get(name)


def announce(key: str, value: str) -> None:
    """Tells all other processes a text, once for each ``key``, such as "pulls/0"; waits for none."""
    _Keys(jax_compat.coordination_client()).set(key, value)


def await_announcement(key: str) -> str:
    """The text that a process has announced under ``key``; waits until one has.

    Raises:
      ProcessTimeout: nobody announces it within an hour.
    """
    return _Keys(jax_compat.coordination_client()).get(key)


def gather_texts(value: str) -> list[str]:
    """The ``value`` of each process, by its index; all have to call this, in the same order of calls."""
    return Exchange()(value)


def barrier(name: str, processes: Collection[int]) -> None:
    """Waits until all of these processes have called this with ``name``, such as "saved/100"; a name may be used once
    in a run.

    ``processes`` has the indices of the processes, such as (0, 1), this one too, and is the same in all of them.
    Returns at once for fewer than two.
    """
    if len(processes) > 1:
        jax_compat.coordination_client().wait_at_barrier(f"mmjax/{name}", round(1000 * _PATIENCE), sorted(processes))


class Board:
    """A board to which each process pins one note, without waiting. All processes use the same name."""

    def __init__(self, name: str) -> None:
        self._folder, self._alone = f"board/{name}", ""

    def pin(self, note: str) -> None:
        """Pins this process's note, in place of the one before."""
        if jax_compat.process_count() == 1:
            self._alone = note
        else:
            _Keys(jax_compat.coordination_client()).replace(f"{self._folder}/{jax_compat.process_index()}", note)

    def read(self) -> dict[int, str]:
        """The notes by process index, without the processes that have pinned none yet."""
        if jax_compat.process_count() == 1:
            return {0: self._alone} if self._alone else {}
        notes = _Keys(jax_compat.coordination_client()).below(self._folder)
        return {int(process): note for process, note in notes.items()}


class Exchange:
    """An all-gather of one text from each process.

    All processes create it at the same place of the program; each may give its text at any time and in any thread.
    """

    def __init__(self) -> None:
        self._number = next(_number)

    def __call__(self, value: str, *, listen: bool = True, patience: float = _PATIENCE) -> list[str]:
        """Gives this process's text; returns the texts of all processes by index, or without ``listen`` an empty list.

        Waits for the others only if it listens. A run of one process gets its text in any case. Call it once.

        Raises:
          ProcessTimeout: a process gives no text within ``patience`` seconds.
        """
        count, me = jax_compat.process_count(), jax_compat.process_index()
        if count == 1:
            return [value]
        keys = _Keys(jax_compat.coordination_client())
        keys.set(f"answer/{self._number}/{me}", value)
        if not listen:
            return []
        return [
            value if process == me else keys.get(f"answer/{self._number}/{process}", patience)
            for process in range(count)
        ]


class Agreement:
    """A point at which either all processes go on or none. All create it at the same place, like an ``Exchange``."""

    def __init__(self) -> None:
        self._exchange, self._number = Exchange(), next(_number)

    def __call__(self, problem: str, patience: float = _PATIENCE) -> str:
        """The problem of the first process that has one, or ""; the same result in every process.

        Args:
          problem: this process's problem, one line, or "" if it has none.
          patience: seconds to wait for each other process.

        Returns:
          "process 2: " and the problem of process 2, for instance; in a run of one process the problem alone.

        Raises:
          ProcessTimeout: another process does not call this within ``patience`` seconds.
        """
        answers = self._exchange(problem, listen=is_first(), patience=patience)
        if jax_compat.process_count() == 1:
            return problem
        keys, name = _Keys(jax_compat.coordination_client()), f"agreed/{self._number}"
        if not is_first():
            return keys.get(name, patience)
        joint = next((f"process {process}: {answer}" for process, answer in enumerate(answers) if answer), "")
        keys.set(name, joint)
        return joint
