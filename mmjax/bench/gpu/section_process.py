"""``python -m mmjax.bench.gpu.section_process module:function FILE SECONDS [small]``: runs one section."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from mmjax.bench.gpu.job import Job


def main(where: str, file: str, seconds: str, size: str = "") -> int:
    """Runs the section, and returns the exit status: 1 where it failed; its error is then in the file.

    Args:
      where: "module:function"; the function is called with a ``Job``.
      file: path of the JSON file for its findings.
      seconds: seconds until the process will be ended, as text.
      size: "small" for shapes that are small enough for a CPU.
    """
    job = Job(Path(file), small=size == "small", seconds=float(seconds))
    try:
        module, _, function = where.partition(":")
        getattr(importlib.import_module(module), function)(job)
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        job.note(error=f"{type(error).__name__}: {first}"[:500])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
