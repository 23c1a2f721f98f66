"""Keeps Orbax's own words about a failure from the terminal: `Checkpointer` reports it in one line."""

from __future__ import annotations

import functools
import logging
import sys
import traceback
import warnings
from typing import Any

_logger = logging.getLogger("mmjax.checkpoint")


def quieten_log() -> None:
    """Orbax and its event loop log a failure's stack trace from several threads; our line says what matters."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_wanted)


@functools.cache
def quieten_reads() -> None:
    """For the rest of the process; `sys.unraisablehook` goes on with everything that is not Orbax's.

    Where one array is damaged, Orbax closes its event loop while TensorStore still reads the others. Each of them then
    complains on its own, some also later, in a stack trace that nobody can catch.
    """
    warnings.filterwarnings("ignore", r"coroutine '(Store\.)?\w+' was never awaited", RuntimeWarning)
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        places = [frame.filename for frame in traceback.extract_tb(unraisable.exc_traceback)]
        code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
        places.append(code.co_filename if code else "")
        theirs = any("orbax" in place for place in places) or "Event loop is closed" in str(unraisable.exc_value)
        if not theirs or _logger.isEnabledFor(logging.DEBUG):
            previous(unraisable)

    sys.unraisablehook = hook


def _wanted(record: logging.LogRecord) -> bool:
    said = record.getMessage() if record.name == "asyncio" else record.pathname
    return not any(name in said for name in ("orbax", "tensorstore")) or _logger.isEnabledFor(logging.DEBUG)
