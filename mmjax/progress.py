"""The progress display of a run: one bar on a terminal, plain lines in a log, or nothing.

with Progress(total=1000, description="training", start=restored_step) as progress:
    progress.update(step, loss=..., tokens_per_s=...)
    progress.message("checkpoint 500 saved")

with Progress(total=12, description="compiling programs", log_every=4) as progress:
    progress.advance()
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from mmjax.mesh.processes import is_first

STYLES = ("auto", "bar", "lines", "silent")


class Progress:
    """Counts from `start` to `total`, as a bar, as lines, or silently.

    Args:
      total: the last step; steps count from 1.
      description: what is being counted; short, lower case.
      start: the step already done, such as that of a restored checkpoint.
      log_every: steps between plain lines; the last step always has one.
      style: "bar", "lines", "silent", or "auto": a bar on a terminal, else lines; of several processes, in the first.
      stream: where it goes; standard error by default, so that output can be piped.
      clock: seconds, rising.

    Raises:
      ValueError: an unknown style.
    """

    def __init__(
        self,
        total: int,
        description: str = "training",
        *,
        start: int = 0,
        log_every: int = 10,
        style: str = "auto",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if style not in STYLES:
            raise ValueError(f"progress style {style!r}: use one of {', '.join(map(repr, STYLES))}")
        self.total, self.description = total, description
        self._stream = stream or sys.stderr
        if style == "auto":
            style = "silent" if not is_first() else "bar" if self._stream.isatty() else "lines"
        self._style, self._log_every, self._clock = style, max(1, log_every), clock
        self._start = self._step = start
        self._first: tuple[int, float] | None = None
        self._bar: Bar | None = None
        # Description, at least ten characters of bar, count, "59m59s left" and four gaps.
        self._fixed_width = len(description) + 10 + len(f"{total}/{total}") + 11 + 4

    def __enter__(self) -> Progress:
        self._began = self._clock()
        if self._style == "bar":
            self._bar = Bar(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[values]}"),
                TextColumn("[dim]{task.fields[left]}"),
                console=Console(file=self._stream),
                expand=True,
                refresh_per_second=4,
            )
            self._bar.start()
            self._bar.add_task(self.description, total=self.total, completed=self._start, values="", left="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def update(self, step: int, **values: float | None) -> None:
        """Shows that `step` steps are done, in all and not since the last call.

        Args:
          step: the number of steps done.
          **values: numbers to show by name, such as loss and tokens_per_s, in their order; `None` is left out.
        """
        self._step = step
        now = self._clock()
        if self._first is None:
            # The first step waits for compilation or a cold cache; the time left is told from those after it.
            self._first = (step, now)
        if self._style == "silent":
            return
        items = [f"{_label(name)} {_number(name, value)}" for name, value in values.items() if value is not None]
        left = self._time_left(step, now)
        if self._bar is not None:
            task = self._bar.task_ids[0]
            shown = _fit(items, self._bar.console.width - self._fixed_width)
            self._bar.update(task, completed=step, values=shown, left=left)
        elif self._style == "lines" and (step % self._log_every == 0 or step >= self.total):
            parts = [f"{self.description} {step}/{self.total}", *items, left]
            self._print("  ".join(part for part in parts if part))

    def advance(self, **values: float | None) -> None:
        """Shows that one more step is done; `values` as for `update`."""
        self.update(self._step + 1, **values)

    def message(self, text: str) -> None:
        """Prints a line above the bar or among the lines; prints nothing if silent. Safe from any thread."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._style == "lines":
            self._print(text)

    def close(self) -> None:
        """Takes the bar down, leaving its last state on the screen; may be called twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._style = "silent"

    def _time_left(self, step: int, now: float) -> str:
        if step >= self.total:
            return f"took {duration(now - self._began)}"
        if self._first is None or step <= self._first[0]:
            return ""
        pace = (now - self._first[1]) / (step - self._first[0])
        return f"{duration(pace * (self.total - step))} left"

    def _print(self, text: str) -> None:
        try:
            print(text, file=self._stream, flush=True)
        except BrokenPipeError:
            raise
        except OSError:  # the disk that holds the log is full: training does not end for a line
            pass


_AT_ONCE = 1.0
"""Seconds."""


@contextmanager
def announced(text: str, seconds: float = 2.0) -> Iterator[None]:
    """A context that prints the line `text` to stdout in the first process if its work takes longer than `seconds`."""
    timer = threading.Timer(seconds, lambda: print(text, flush=True))
    timer.daemon = True
    if is_first():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class IndexProgress:
    """Shows how far the metadata of a dataset are collected."""

    @contextmanager
    def progress(self, total: int, description: str) -> Iterator[Callable[[int], None]]:
        """A context that gives a function to call with the number of samples done so far.

        Work of less than a second shows nothing.

        Args:
          total: the number of all samples.
          description: what is being counted; short, lower case.
        """
        begin, bars = time.monotonic(), list[Progress]()
        with ExitStack() as shown:

            def update(done: int) -> None:
                if not bars and time.monotonic() - begin > _AT_ONCE:
                    bars.append(shown.enter_context(Progress(total, description, log_every=max(1, total // 4))))
                if bars:
                    bars[0].update(done)

            yield update

    def message(self, text: str) -> None:
        """Prints a line on stderr, in the first of several processes."""
        if is_first():
            print(text, file=sys.stderr, flush=True)


def _fit(items: list[str], width: int) -> str:
    """The first items that fit, whole: half a number misleads."""
    while items and len("  ".join(items)) > width:
        items = items[:-1]
    return "  ".join(items)


def duration(seconds: float) -> str:
    """A number of seconds as text: "42s", "3m07s" or "2h05m"."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    return f"{rounded // 3600}h{rounded % 3600 // 60:02d}m"


def _label(name: str) -> str:
    return name.removesuffix("_per_s").replace("_", " ") + ("/s" if name.endswith("_per_s") else "")


def _number(name: str, value: float) -> str:
    if name.endswith("_per_s"):
        for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
            if value >= limit:
                scale = 1e3 if unit == "k" else limit
                return f"{value / scale:.1f}{unit}"
        return f"{value:.0f}"
    return str(value) if isinstance(value, int) else f"{value:.4g}"
