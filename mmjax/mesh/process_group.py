"""The processes of a run as a group: finds its settings, and lets this process leave. Imports JAX only to leave.

A run is one process, or several that were started with the same command and meet at a coordinator, which is process 0.
Flags, ``MMJAX_…`` in the environment, Slurm or Open MPI give the index of this process.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from mmjax import sigterm
from mmjax.configurable import ConfigError
from mmjax.flags import FOLLOWED, STUCK
from mmjax.mesh import stacks
from mmjax.mesh.lifeline import Lifeline

NAMES = ("coordinator", "num_processes", "process_id")
"""Names of the flags; in the environment ``MMJAX_COORDINATOR``, ``MMJAX_NUM_PROCESSES`` and ``MMJAX_PROCESS_ID``."""
# By launcher: environment variables that show its presence, the number of processes and the index of this one.
_LAUNCHERS = {
    "slurm": ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID"),
    "ompi": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}
_OMPI_ADDRESS = "OMPI_MCA_orte_hnp_uri"
_STACKS = 1.0
"""Seconds for the other processes to write their stacks, before this one ends and collectives that wait for it fail."""
_lifeline: Lifeline | None = None


@dataclass(frozen=True, kw_only=True)
class Processes:
    """How the processes of a run meet.

    Attributes:
      coordinator: ``host:port`` of process 0, the same in all processes; empty where JAX finds it by ``launcher``.
      count: number of processes, more than one.
      index: index of this process.
      launcher: ``slurm``, ``ompi`` or empty.
    """

    coordinator: str
    count: int
    index: int
    launcher: str = ""


def find_processes(flags: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> Processes | None:
    """Reads from flags, environment or launcher how the processes meet; ``None`` for a run of one process.

    Args:
      flags: values of the flags ``NAMES``, by name without dashes, such as {"coordinator": "host:9876",
        "num_processes": "2", "process_id": "0"}; empty or absent where a flag is not set. A flag wins over the
        environment, and the environment over a launcher.
      environ: the environment's variables, by name.

    Raises:
      ConfigError: a setting is missing, malformed or out of range; the message is one line.
    """
    settings = {name: _setting(name, flags, environ) for name in NAMES}
    (shown, coordinator), *numbers = settings.values()
    launcher = next((name for name, (sign, *_) in _LAUNCHERS.items() if sign in environ), "")
    complete = bool(coordinator) and all(value for _, value in numbers)
    if launcher and not complete:  # complete settings need no launcher
        numbers = [
            setting if setting[1] else (v, environ.get(v, ""))
            for setting, v in zip(numbers, _LAUNCHERS[launcher][1:], strict=True)
        ]
    if not coordinator and not any(value for _, value in numbers):
        return None
    count, index = (_integer(name, value) for name, value in numbers)
    if count == 1 and not coordinator and launcher:
        return None  # a job of a single task
    for name, value, meaning in (
        (NAMES[1], count, "the number of processes, such as 2"),
        (NAMES[2], index, "which of them this is, from 0"),
    ):
        if value is None:
            raise ConfigError(f"--{name} is missing: give {meaning}, here or as {variable(name)}")
    assert count is not None and index is not None
    if count < 1:
        raise ConfigError(f"{numbers[0][0]}={count}: must be 1 or more, such as 2")
    if not 0 <= index < count:
        raise ConfigError(f"{numbers[1][0]}={index}: must be 0 or more and below {numbers[0][0]}={count}")
    if count == 1:
        return None
    launcher_finds_it = not complete and (launcher == "slurm" or (launcher == "ompi" and _OMPI_ADDRESS in environ))
    if not coordinator and not launcher_finds_it:
        raise ConfigError(
            f"--coordinator is missing: give host:port of process 0, such as localhost:9876, or {variable(NAMES[0])}"
        )
    if coordinator and not re.fullmatch(r"\S+:\d{1,5}", coordinator):
        raise ConfigError(f"{shown}={coordinator!r}: must be host:port of process 0, such as localhost:9876")
    return Processes(coordinator=coordinator, count=count, index=index, launcher="" if complete else launcher)


def planned_count(flags: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> int:
    """The number of processes of a run that is only planned: --num_processes or its variable, else 1.

    Args:
      flags, environ: as in ``find_processes``.

    Raises:
      ConfigError: it is no integer, or less than 1.
    """
    name, value = _setting(NAMES[1], flags, environ)
    count = _integer(name, value)
    if count is not None and count < 1:
        raise ConfigError(f"{name}={count}: must be 1 or more, such as 2")
    return count or 1


def variable(name: str) -> str:
    """Name of the environment variable of a setting of ``NAMES`` ("coordinator", "num_processes", "process_id"):
    "MMJAX_PROCESS_ID" for "process_id".
    """
    return f"MMJAX_{name.upper()}"


def _setting(name: str, flags: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, str]:
    """The flag or environment variable that sets it, and its value; the flag and "" where neither does."""
    if value := flags.get(name, ""):
        return f"--{name}", value
    if value := environ.get(variable(name), ""):
        return variable(name), value
    return f"--{name}", ""


def _integer(name: str, value: str) -> int | None:
    if value and not re.fullmatch(r"-?\d+", value):
        raise ConfigError(f"{name}={value!r}: must be an integer, such as 2")
    return int(value) if value else None


def set_lifeline(lifeline: Lifeline) -> None:
    """Keeps this process's lifeline, as ``Lifeline.open`` gives it; from now on other processes wait for this one."""
    global _lifeline
    _lifeline = lifeline
    sigterm.set_notifier(abandon)


def give_up(reason: str) -> NoReturn:
    """Ends this process with status 1 and the others, if any, with ``FOLLOWED`` (3); may be called from any thread.

    ``reason`` is one line, which all of them print. Exits instead of raising: other threads may wait for a process that
    waits for this one.
    """
    os.write(2, f"error: {reason}\n".encode())
    abandon(reason)
    os._exit(1)


def give_up_stuck(process: int, news: str) -> None:
    """Ends this process and the others, if any, because process number ``process``, from 0, is stuck; may be called
    from any thread.

    ``news`` is one line, which all of them print. Every process writes its stacks and exits with status ``STUCK``.
    Returns only if this process is already ending.
    """
    if _lifeline and not _lifeline.report(process, news, STUCK):
        return
    os.write(2, f"error: {news}\n".encode())
    stacks.dump()
    if _lifeline:
        time.sleep(_STACKS)
        _lifeline.wait_for_peers()
    os._exit(STUCK)


def leave() -> None:
    """Disconnects from the other processes, which go on. Does nothing in a run of one process."""
    global _lifeline
    if _lifeline:
        import jax

        _lifeline.announce_leave()
        jax.distributed.shutdown()
        _lifeline.close()
        _lifeline = None


def abandon(reason: str, status: int = FOLLOWED) -> None:
    """Reports to the other processes, if any, why this one ends early; they exit with ``status``.

    ``reason`` is one line, which they print. This process goes on, and has to end by itself.
    """
    if _lifeline:
        _lifeline.fail(reason, status)


def has_peers() -> bool:
    """Whether other processes wait for this one: True from ``set_lifeline`` to ``leave``, False in a run of one
    process.
    """
    return _lifeline is not None
