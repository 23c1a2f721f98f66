"""The run's measurements: one JSON object per step in `metrics.jsonl`, and copies for TensorBoard and W&B.

Columns of a row, all present in every row, `null` where unknown:

  step                optimizer steps done
  loss                what is optimised: weighted cross-entropy per unit of loss weight, plus generators' losses
  grad_norm           global gradient norm before clipping
  tokens_per_s        real (unpadded) LLM tokens of all devices
  media_per_s         images and recordings
  tflops_per_device   model FLOPs of real tokens, 1e12 per second and device
  mfu                 of the devices' peak, in [0, 1]
  bubble              idle share of the devices' time in [0, 1]
  padding             share of padded positions in all modules' inputs, in [0, 1]
  step_time_s         seconds
  peak_memory_bytes   of the fullest device
  imbalance           measured busy seconds of the busiest rank over those of the mean rank, 1 or more

`imbalance` and "vision/busy_s", the busy seconds of a module's busiest rank, are those of the newest
step whose ops were timed, every `Train.log_every` steps; `null` before, and where a step is one program.
After them come the caller's own, such as "vision/learning_rate" and "vision/grad_norm", and with
several losses each of them, such as "llm/loss" and "painter/loss".
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from mmjax.configurable import ConfigError, near_misses
from mmjax.json_files import parse

_logger = logging.getLogger(__name__)

COLUMNS = (
    "step",
    "loss",
    "grad_norm",
    "tokens_per_s",
    "media_per_s",
    "tflops_per_device",
    "mfu",
    "bubble",
    "padding",
    "step_time_s",
    "peak_memory_bytes",
    "imbalance",
)


class Sink(Protocol):
    """A receiver of numbers beside the file."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of a row by column, without "step", and without columns that are no numbers."""
        ...

    def close(self) -> None:
        """Writes everything that was taken, and closes the receiver."""
        ...


class MetricsWriter:
    """Appends rows to a JSONL file. A row is on its way to the disk when `write` returns: a kill loses none.

    While the disk is full (or gone) rows are kept in memory, under a kilobyte each, and are written, in order, by the
    first `write` or `close` that finds room: training does not end for a row. That is reported once, and so is its end.

    Opening a file that a run was writing when it died repairs its torn last line. With `resume_step` it also
    drops the rows beyond the restored checkpoint, so that after training has passed them again the file has
    each step once. The old file stays until the repaired one is complete.

    Args:
      path: the file; its folder is made.
      resume_step: the step training goes on from (0: a fresh run, which empties the file). `None` keeps all rows.
      columns: columns that every row has, `null` unless given.
      sinks: names of further sinks: "tensorboard", "wandb". Their files lie beside the JSONL.
      report: receives one-line messages about rows that cannot be written.

    Attributes:
      failure: why rows are waiting; `None` when all are in the file.

    Raises:
      ConfigError: an unknown sink, or one whose package is not installed.
      OSError: the file cannot be opened or repaired.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        resume_step: int | None = None,
        columns: Sequence[str] = COLUMNS,
        sinks: Sequence[str] = (),
        report: Callable[[str], None] = _logger.warning,
    ) -> None:
        self.path = Path(path)
        self._report = report
        self._waiting = b""  # begins in the middle of a row where only part of it found room
        self._waiting_steps: list[int] = []
        self.failure: OSError | None = None
        self._columns = tuple(columns)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._sinks = open_sinks(sinks, self.path.parent)
        if self.path.exists():
            repair(self.path, resume_step)
        # Unbuffered and appending: each row is one write, and a reader never sees half of one.
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row. Numbers may be Python's, numpy's or JAX scalars; NaN and infinities become `null`.

        Args:
          row: column -> value; "step" is required.

        Raises:
          ValueError: no "step", or a value that is neither a number, text, boolean, list, dict nor `None`.
        """
        if row.get("step") is None:
            raise ValueError("a metrics row needs a 'step'")
        plain = {name: _plain(name, value) for name, value in row.items()}
        plain = {**dict.fromkeys(self._columns), **plain}
        self._waiting += (json.dumps(plain, allow_nan=False, ensure_ascii=False) + "\n").encode()
        self._waiting_steps.append(plain["step"])
        self._flush()
        numbers = {
            name: float(value)
            for name, value in plain.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        for sink in self._sinks:
            sink.write(plain["step"], numbers)

    def close(self) -> None:
        """Closes the file and the sinks; may be called twice. `unwritten` names the rows that could not be written."""
        if not self._file.closed:
            self._flush()
            self._file.close()
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    @property
    def unwritten(self) -> str:
        """The rows that are not in the file, and why: "metrics.jsonl: steps 3 to 5 (…)"; "" when all are."""
        if not self._waiting:
            return ""
        first, last = self._waiting_steps[0], self._waiting_steps[-1]
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"{self.path.name}: {steps} ({_cause(self.failure)})"

    def _flush(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) or 0 :]
        except OSError as error:
            if not self.failure:
                wait = "training goes on, and rows wait in memory until there is room"
                self._report(f"{self.path} cannot be written ({_cause(error)}); {wait}")
            self.failure = error
            return
        if self.failure:
            self._report(f"{self.path} is written again, from step {self._waiting_steps[0]} on")
        self._waiting_steps, self.failure = [], None


def _cause(error: OSError | None) -> str:
    return (error and error.strerror) or type(error).__name__


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, such as metrics.jsonl, in order, of each step the last one; without a torn last line.

    A row is such as {"step": 1, "loss": 2.31}; one without a step is kept. The result is [] for an empty file.

    Raises:
      FileNotFoundError: there is no such file.
      ConfigError: a line other than the last is no JSON object; the message names file and line.
    """
    rows = _parse(Path(path))
    by_step = {row["step"]: index for index, row in enumerate(rows) if "step" in row}
    return [row for index, row in enumerate(rows) if by_step.get(row.get("step"), index) == index]


def _parse(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    complete, last_line = lines[:-1], lines[-1]
    rows = []
    for number, line in enumerate(complete, start=1):
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif line.strip(b" \0") and number < len(complete):
            fix = "remove the line, or move the file away"
            raise ConfigError(f"{path}:{number} is not a JSON object with a number as its step; {fix}")
    row = _row(last_line)  # complete but for its newline
    return rows if row is None else [*rows, row]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step", 0), int) else None


def repair(path: Path, resume_step: int | None) -> None:
    """Drops a torn last line of a JSONL file, and the rows after `resume_step`: all of them for 0, none for `None`.

    Of several rows of one step the last one stays, as in `read_metrics`, whose errors are raised too.

    Raises:
      OSError: it cannot be written; it is as it was then.
    """
    rows = read_metrics(path)
    if resume_step is not None:
        rows = [row for row in rows if row.get("step", 0) <= resume_step]
        if resume_step == 0:
            rows = []
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if text == path.read_bytes():
        return
    new = path.with_name(path.name + ".new")
    try:
        with open(new, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _plain(name: str, value: Any) -> Any:
    """`value` as JSON without NaN."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}/{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if not isinstance(value, float):
        array = np.asarray(value)
        if array.ndim:
            return [_plain(name, item) for item in array]
        if array.dtype.kind in "iub":
            return array.item()
        try:
            value = float(array.astype(np.float64))
        except (TypeError, ValueError) as error:
            raise ValueError(f"metric {name!r} = {value!r}: give a number, text or None") from error
    return value if math.isfinite(value) else None


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter  # type: ignore[import-not-found]  # pyright: ignore

        self._writer = SummaryWriter(logdir=str(folder / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path) -> None:
        import wandb  # type: ignore[import-not-found]  # pyright: ignore

        # The same folder is the same run: it goes on where it stopped.
        name = folder.resolve().name
        self._run = wandb.init(project="mmjax", name=name, id=name, dir=str(folder), resume="allow")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_SINKS: dict[str, Callable[[Path], Sink]] = {"tensorboard": _TensorBoard, "wandb": _Wandb}


_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def require_sinks(names: Sequence[str]) -> None:
    """Raises `ConfigError` for a sink whose package is not installed; imports none.

    names: of "tensorboard" and "wandb", such as ("wandb",); () requires nothing.
    """
    for name in names:
        if not importlib.util.find_spec(_PACKAGES[name]):
            fix = f"needs a package that is not installed: pip install {_PACKAGES[name]}, or use ()"
            raise ConfigError(f"Train.sinks={name!r}: {fix}")


def open_sinks(names: Sequence[str], folder: Path) -> list[Sink]:
    """Opens sinks, in the order of `names`; the caller closes them. `sink.write(10, {"loss": 2.3})` writes a step.

    Args:
      names: of "tensorboard" and "wandb", such as ("wandb",); () opens none.
      folder: the folder below which they write, such as the run's directory.

    Raises:
      ConfigError: an unknown name, or one whose package is not installed.
    """
    for name in names:
        if name not in _SINKS:
            hint = "".join(f"did you mean {close!r}? " for close in near_misses(name, _SINKS)[:1])
            raise ConfigError(f"metrics sink {name!r}: {hint}legal: {', '.join(map(repr, _SINKS))}")
    sinks: list[Sink] = []
    for name in names:
        try:
            sinks.append(_SINKS[name](folder))
        except ImportError as error:
            raise ConfigError(
                f"metrics sink {name!r} needs a package that is not installed: pip install {_PACKAGES[name]}"
            ) from error
    return sinks
