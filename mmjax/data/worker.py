"""What a data worker process runs first: it makes JAX impossible to import, then lets Grain in.

A worker needs no accelerator, and JAX costs it seconds and hundreds of megabytes; but Grain imports JAX wherever it is
installed. Python's spawned processes import their parent's main module before anything else, so Grain's are told that
this module is it (which also keeps the real main module, and its imports, out of them).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import spawn
from typing import Any

GRAIN_PROCESS = "grain-process-prefetch"  # how the names of Grain's processes begin
SPAWNED = "__mp_main__"  # the name under which a spawned process imports its parent's main module

if __name__ == SPAWNED:
    sys.modules["jax"] = None  # type: ignore[assignment]  # import jax now raises ImportError, which Grain expects
    logging.getLogger("absl").setLevel(logging.ERROR)  # Grain warns that it profiles without JAX


def become_main_of_grain_workers() -> None:
    """From now on, Grain's worker processes import this module as their parent's main module; others do as before."""
    original = spawn.get_preparation_data
    if getattr(original, "serves_grain", False):
        return

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        if name.startswith(GRAIN_PROCESS):
            data.pop("init_main_from_path", None)
            data["init_main_from_name"] = "mmjax.data.worker"
        return data

    get_preparation_data.serves_grain = True  # type: ignore[attr-defined]
    spawn.get_preparation_data = get_preparation_data


def prepare(index: int, count: int) -> None:
    """Leaves Ctrl-C to the parent, and ends this process as soon as the parent is gone, however it went."""
    del index, count
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: Any) -> None:
    parent.join()
    os._exit(1)
