"""The processes of a run: which they are, how they meet, and how each learns that another has ended.

A run is one process, or several that were started with the same command and meet at a coordinator, which is process 0.
Which process this is comes from flags, from ``MMJAX_…`` in the environment, or from Slurm or Open MPI.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

from mmjax import jax_compat
from mmjax.configurable import ConfigError
from mmjax.flags import FOLLOWED
from mmjax.mesh.lifeline import Lifeline

NAMES = ("coordinator", "num_processes", "process_id")
"""Of the flags; in the environment ``MMJAX_COORDINATOR``, ``MMJAX_NUM_PROCESSES`` and ``MMJAX_PROCESS_ID``."""
# What a launcher tells each of its processes: how many there are, and which this one is.
_LAUNCHERS = {
    "slurm": ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID"),
    "ompi": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}
_OMPI_ADDRESS = "OMPI_MCA_orte_hnp_uri"
_LOST_AFTER = 10
"""Seconds without a heartbeat after which JAX gives a process up: for hosts that vanish and close no connection."""
_PATIENCE_MS = 3_600_000
"""For what another process says: it may be compiling, and if it ends it is heard of."""
_number = itertools.count()
_lifeline: Lifeline | None = None


@dataclass(frozen=True, kw_only=True)
class Processes:
    """How the processes of a run meet.

    Attributes:
      coordinator: ``host:port`` of process 0, the same in all; empty for JAX to find it by ``launcher``.
      count: number of processes, more than one.
      index: this one.
      launcher: ``slurm``, ``ompi`` or empty.
    """

    coordinator: str
    count: int
    index: int
    launcher: str = ""


def find_processes(given: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> Processes | None:
    """What flags, the environment or a launcher say; ``None`` for a run of one process.

    Args:
      given: values of the flags ``NAMES``; empty where a flag is not given. A flag wins over the environment, and that
        over what a launcher says.
      environ: the environment.

    Raises:
      ConfigError: the parts do not fit, or one is missing; one line.
    """
    said = {name: _said(name, given, environ) for name in NAMES}
    (shown, coordinator), *numbers = said.values()
    launcher = next((name for name, (sign, *_) in _LAUNCHERS.items() if sign in environ), "")
    whole = bool(coordinator) and all(value for _, value in numbers)
    if launcher and not whole:  # complete settings of one's own need no launcher
        numbers = [
            own if own[1] else (v, environ.get(v, "")) for own, v in zip(numbers, _LAUNCHERS[launcher][1:], strict=True)
        ]
    if not coordinator and not any(value for _, value in numbers):
        return None
    count, index = (_integer(name, value) for name, value in numbers)
    if count == 1 and not coordinator and launcher:
        return None  # a job of a single task
    for name, value, what in (
        (NAMES[1], count, "the number of processes, such as 2"),
        (NAMES[2], index, "which of them this is, from 0"),
    ):
        if value is None:
            raise ConfigError(f"--{name} is missing: give {what}, here or as {variable(name)}")
    assert count is not None and index is not None
    if count < 1:
        raise ConfigError(f"{numbers[0][0]}={count}: must be 1 or more, such as 2")
    if not 0 <= index < count:
        raise ConfigError(f"{numbers[1][0]}={index}: must be 0 or more and below {numbers[0][0]}={count}")
    if count == 1:
        return None
    found = not whole and (launcher == "slurm" or (launcher == "ompi" and _OMPI_ADDRESS in environ))
    if not coordinator and not found:
        raise ConfigError(
            f"--coordinator is missing: give host:port of process 0, such as localhost:9876, or {variable(NAMES[0])}"
        )
    if coordinator and not re.fullmatch(r"\S+:\d{1,5}", coordinator):
        raise ConfigError(f"{shown}={coordinator!r}: must be host:port of process 0, such as localhost:9876")
    return Processes(coordinator=coordinator, count=count, index=index, launcher="" if whole else launcher)


def variable(name: str) -> str:
    """What a setting of ``NAMES`` is called in the environment."""
    return f"MMJAX_{name.upper()}"


def _said(name: str, given: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Who says what."""
    if value := given.get(name, ""):
        return f"--{name}", value
    if value := environ.get(variable(name), ""):
        return variable(name), value
    return f"--{name}", ""


def _integer(name: str, value: str) -> int | None:
    if value and not re.fullmatch(r"-?\d+", value):
        raise ConfigError(f"{name}={value!r}: must be an integer, such as 2")
    return int(value) if value else None


def join(processes: Processes | None) -> None:
    """Meets the other processes, before any backend is started; nothing for a run of one process.

    From then on the end of any process ends the others: each says which one it was, with exit status ``FOLLOWED``.

    Raises:
      ConfigError: they do not come together.
    """
    global _lifeline
    if processes is None or jax_compat.process_count() > 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Its service takes SIGTERM for the announcement of a preemption, which ends nothing.
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
    _lifeline = Lifeline.open(_Keys(client), host, processes.count, processes.index)


def _silence_gloo() -> None:
    """Gloo prints a line for every communicator to the process's stdout, where a result may be awaited."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = os.fdopen(own, "w", buffering=1 if sys.stdout.isatty() else -1)


class _Keys:
    """Keys and values that all processes share."""

    def __init__(self, client: Any):
        self._client = client

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(f"mmjax/{key}", value)

    def get(self, key: str) -> str:
        return self._client.blocking_key_value_get(f"mmjax/{key}", _PATIENCE_MS)


def is_first() -> bool:
    """Whether this is process 0, which alone writes what a run has one of."""
    return jax_compat.process_index() == 0


def first_says(value: str) -> str:
    """The value that process 0 gives; every process has to ask, in the same order."""
    if jax_compat.process_count() == 1:
        return value
    keys, name = _Keys(jax_compat.coordination_client()), f"said/{next(_number)}"
    if is_first():
        keys.set(name, value)
        return value
    return keys.get(name)


def everyone_says(value: str) -> list[str]:
    """What every process says, by process; every process has to ask, in the same order."""
    return Exchange()(value)


def meet(name: str, processes: Collection[int]) -> None:
    """Waits until each of these processes has come to the meeting of that name, which is used once."""
    if len(processes) > 1:
        jax_compat.coordination_client().wait_at_barrier(f"mmjax/{name}", _PATIENCE_MS, sorted(processes))


class Exchange:
    """A question that every process answers once. All make it at the same place; who answers when, and in which thread,
    is then left to each."""

    def __init__(self) -> None:
        self._number = next(_number)

    def __call__(self, value: str, listen: bool = True) -> list[str]:
        """Every process's answer, or nothing where this process does not ``listen``."""
        count, me = jax_compat.process_count(), jax_compat.process_index()
        if count == 1:
            return [value]
        keys = _Keys(jax_compat.coordination_client())
        keys.set(f"answer/{self._number}/{me}", value)
        if not listen:
            return []
        return [value if other == me else keys.get(f"answer/{self._number}/{other}") for other in range(count)]


class Agreement:
    """A point at which all processes go on or none does. All make it at the same place, as an `Exchange`."""

    def __init__(self) -> None:
        self._exchange, self._number = Exchange(), next(_number)

    def __call__(self, problem: str) -> str:
        """What is wrong in some process, "" if nothing is; every process gives its own and hears the same."""
        answers = self._exchange(problem, listen=is_first())
        if jax_compat.process_count() == 1:
            return problem
        keys, name = _Keys(jax_compat.coordination_client()), f"agreed/{self._number}"
        if not is_first():
            return keys.get(name)
        joint = next((f"process {other}: {answer}" for other, answer in enumerate(answers) if answer), "")
        keys.set(name, joint)
        return joint


def give_up(reason: str) -> NoReturn:
    """Ends this process at once, and with it the others; from any thread.

    Raises nothing: other threads may wait for a process that waits for this one.
    """
    os.write(2, f"error: {reason}\n".encode())
    abandon(reason)
    os._exit(1)


def leave() -> None:
    """Parts in peace: the others go on. Nothing in a run of one process."""
    global _lifeline
    if _lifeline:
        _lifeline.part()
        jax.distributed.shutdown()
        _lifeline.close()
        _lifeline = None


def abandon(reason: str, status: int = FOLLOWED) -> None:
    """Tells the others why this process ends early, and with what exit status they are to. Nothing in one process."""
    if _lifeline:
        _lifeline.fail(reason, status)


def in_company() -> bool:
    """Whether other processes wait for this one."""
    return _lifeline is not None
