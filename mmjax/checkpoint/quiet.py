"""Keeps Orbax's messages about a failure off the terminal: `Checkpointer` reports it in one line."""

from __future__ import annotations

import functools
import logging
import sys
import traceback
import warnings
from typing import Any

_logger = logging.getLogger("mmjax.checkpoint")


@functools.cache
def quieten() -> None:
    """Silences Orbax's errors and stack traces for the rest of the process; other messages are not affected.

    Orbax logs a failure's stack trace from several threads. If one array cannot be read or written, it also closes its
    event loop while TensorStore still works on the others. Each of these then prints a stack trace that no caller can
    catch, some of them later.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_shown)
    warnings.filterwarnings("ignore", r"coroutine '(Store\.)?\w+' was never awaited", RuntimeWarning)
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        places = [frame.filename for frame in traceback.extract_tb(unraisable.exc_traceback)]
        code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
        places.append(code.co_filename if code else "")
        is_orbax = any("orbax" in place for place in places) or "Event loop is closed" in str(unraisable.exc_value)
        if not is_orbax or _logger.isEnabledFor(logging.DEBUG):
            previous(unraisable)

    sys.unraisablehook = hook


def _is_shown(record: logging.LogRecord) -> bool:
    origin = record.getMessage() if record.name == "asyncio" else record.pathname
    return not any(name in origin for name in ("orbax", "tensorstore")) or _logger.isEnabledFor(logging.DEBUG)
