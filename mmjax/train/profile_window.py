"""A profiler trace of a few steps, ``Train.profile_steps``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import jax

from mmjax.mesh.processes import is_first
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.one_program import OneProgramExecutor
from mmjax.pipeline.watch import watched


class ProfileWindow:
    """Traces whole steps: it opens and closes only where no step is in flight."""

    def __init__(self, steps: tuple[int, ...], folder: Path, executor: Executor | OneProgramExecutor):
        """Plans a trace.

        Args:
          steps: first and last step, counted from 1; () for none.
          folder: where traces go.
          executor: its ops appear by name where they are programs of their own.
        """
        self._before, self._last = (steps[0] - 1, steps[1]) if steps else (0, 0)
        self._folder, self._executor = folder, executor
        self._open: ExitStack | None = None

    def due(self, step: int) -> bool:
        """Whether the trace begins or ends after ``step`` steps."""
        return self._last > 0 and step in (self._before, self._last)

    def enter(self, step: int, report: Callable[[str], None]) -> None:
        """Begins the trace if the step after ``step`` belongs to it; a continued run may begin in the middle of it.

        ``report`` gets a line where it begins. Of several processes only the first is traced.
        """
        if self._open is None and self._before <= step < self._last and is_first():
            self._open = ExitStack()
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._open.callback(jax.profiler.stop_trace)
            if isinstance(self._executor, Executor):
                self._open.enter_context(
                    watched(self._executor.walker, lambda op: jax.profiler.TraceAnnotation(str(op)))
                )
            report(f"profiling steps {step + 1} to {self._last}")

    def leave(self, step: int, report: Callable[[str], None]) -> None:
        """Ends the trace if ``step`` was its last step, or is behind it; ``report`` gets a line about where it is."""
        if step >= self._last:
            self.close(report)

    def close(self, report: Callable[[str], None]) -> None:
        """Ends the trace if one is open, wherever it is; ``report`` gets a line about where its files are."""
        if self._open is not None:
            self._open.close()
            self._open = None
            report(
                f"profile in {self._folder}: open its perfetto_trace.json.gz at https://ui.perfetto.dev, or the whole "
                f"folder with `pip install xprof` and `xprof --logdir={self._folder}`"
            )
