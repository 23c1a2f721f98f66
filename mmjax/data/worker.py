"""What a data worker process runs first: it makes JAX impossible to import, then lets Grain in.

A worker needs no accelerator, and JAX costs it seconds and hundreds of megabytes; but Grain imports JAX wherever it is
installed. Python's spawned processes import their parent's main module before anything else, so the loader names this
module as the main one while workers start (which also keeps the real main module, and its imports, out of them).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

SPAWNED = "__mp_main__"  # the name under which a spawned process imports its parent's main module

if __name__ == SPAWNED:
    sys.modules["jax"] = None  # type: ignore[assignment]  # import jax now raises ImportError, which Grain expects
    logging.getLogger("absl").setLevel(logging.ERROR)  # Grain warns that it profiles without JAX


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
