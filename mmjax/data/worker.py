"""The first module of a data process: it makes JAX impossible to import before Grain is imported.

A worker needs no accelerator, and JAX costs it seconds and hundreds of megabytes; but Grain imports JAX wherever it is
installed. A spawned process imports its parent's main module before anything else. Data processes are told that this
module is the main one, which also keeps the real main module and its imports out of them.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from importlib.abc import MetaPathFinder
from multiprocessing import popen_spawn_posix, resource_tracker, spawn
from typing import Any

from mmjax.sigterm import quieten_tracker

GRAIN_PROCESS = "grain-process-prefetch"  # the beginning of names of Grain's processes
POOL_PROCESS = "mmjax-data"  # the beginning of names of a pool's processes
SPAWNED = "__mp_main__"  # the name under which a spawned process imports its parent's main module
_LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM)


class _NoJax(MetaPathFinder):
    """Answers `import jax` with ImportError, which Grain expects."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.partition(".")[0] in ("jax", "jaxlib"):
            raise ModuleNotFoundError(f"a data process does without {fullname}", name=fullname)


def forbid_jax() -> None:
    """Makes `import jax` fail in this process."""
    sys.meta_path.insert(0, _NoJax())
    logging.getLogger("absl").setLevel(logging.ERROR)  # Grain warns that it profiles without JAX


if __name__ == SPAWNED:
    forbid_jax()


def become_main_of_workers() -> None:
    """Makes data processes import this module as their parent's main module, with SIGINT and SIGTERM blocked.

    Other processes start as before. Harmless when repeated.
    """
    quieten_tracker()
    original = spawn.get_preparation_data
    if getattr(original, "serves_workers", False):
        return

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        if name.startswith((GRAIN_PROCESS, POOL_PROCESS)):
            data.pop("init_main_from_path", None)
            data["init_main_from_name"] = "mmjax.data.worker"
        return data

    get_preparation_data.serves_workers = True  # type: ignore[attr-defined]
    spawn.get_preparation_data = get_preparation_data
    launch = getattr(popen_spawn_posix.Popen, "_launch")  # noqa: B009  Python's type stubs leave this name out

    def launch_deaf(popen: Any, process: Any) -> None:
        if not process.name.startswith((GRAIN_PROCESS, POOL_PROCESS)):
            launch(popen, process)
            return
        resource_tracker.ensure_running()  # which unblocks signals when it has started
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)  # a new process begins with the same mask
        try:
            launch(popen, process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        popen.terminate = popen.kill  # else Python waits for ever at its exit for one that SIGTERM does not end

    setattr(popen_spawn_posix.Popen, "_launch", launch_deaf)  # noqa: B010


def prepare(index: int, count: int) -> None:
    """Leaves Ctrl-C and SIGTERM to the parent, and ends this process as soon as the parent has ended for any reason.

    It is a `worker_init_fn` of Grain, which passes the worker's index and the number of workers; both are ignored.
    """
    del index, count
    for number in _LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: Any) -> None:
    parent.join()
    os._exit(1)
