"""The files of a run directory beside its checkpoints: its configuration, its numbers and its pictures.

A file that cannot be written before the first step ends the command with one line: nothing is lost yet. From then on a
full disk is reported and training goes on.
"""

from __future__ import annotations

import contextlib
import errno
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmjax.checkpoint.folder import Folder
from mmjax.checkpoint.journal import Journal
from mmjax.config import differences, load_run_config, operative_config
from mmjax.configurable import ConfigError
from mmjax.data.sources.skipped import reason_of
from mmjax.json_files import is_there, read_text
from mmjax.recipe import Recipe
from mmjax.schedule import timeline
from mmjax.schedule.simulate import Timeline
from mmjax.train.metrics import MetricsWriter, read_metrics, repair

_NAMES = ("config.gin", "metrics.jsonl", "eval.jsonl", "skipped.jsonl", "commits.jsonl", "lock")
"""Files that a run reads again, or goes on writing."""
_UNTIL = re.compile(r"config-until-(\d+)\.gin")


def recorded(run_dir: Path, *, allow_code: bool = False) -> Recipe | None:
    """The last configuration of the run in a directory; ``None`` if there is none, or it is no longer legal.

    Args:
      run_dir: the run's directory.
      allow_code: whether settings may name code of one's own, which is run.
    """
    with contextlib.suppress(ConfigError):
        return load_run_config(run_dir, allow_code=allow_code)
    return None


class RunFiles:
    """Writes the files of a run directory, and remembers those that could not be written.

    Attributes:
      run_dir: the directory.
      journal: the checkpoints that were whole.

    Args:
      run_dir: made if missing.
      report: receives one-line messages.

    Raises:
      ConfigError: the directory cannot be made or written to, or has something else by the name of a file.
    """

    def __init__(self, run_dir: str | Path, report: Callable[[str], None]):
        self.run_dir, self._report = made_run_dir(run_dir), report
        for name in _NAMES:
            is_there(self.run_dir / name, f"move it away, or name another directory than --run_dir={str(run_dir)!r}")
        self.journal = Journal(self.run_dir)
        self._metrics: MetricsWriter | None = None
        self._evaluations: list[Mapping[str, Any]] = []  # those that are not in the file
        self._failed: dict[str, str] = {}

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of ``eval.jsonl`` in order, each with a "step"; [] where there is no file."""
        path = self.run_dir / "eval.jsonl"
        return read_metrics(path) if path.exists() else []

    @property
    def last_step(self) -> int:
        """The last step in ``metrics.jsonl``; 0 without rows."""
        path = self.run_dir / "metrics.jsonl"
        return max((row.get("step", 0) for row in read_metrics(path)), default=0) if path.exists() else 0

    @property
    def unwritten(self) -> tuple[str, ...]:
        """Files that the directory lacks, or lacks rows of, and why: one line for each file."""
        metrics = self._metrics.unwritten if self._metrics else ""
        return (*filter(None, [metrics]), *(f"{name} ({cause})" for name, cause in self._failed.items()))

    def begin(self, recipe: Recipe, planned: Timeline, step: int) -> None:
        """Writes ``config.gin``, the journal and the planned timeline of a run that goes on after ``step``.

        If the configuration has changed, the earlier one is kept as ``config-until-<step>.gin``, and the difference is
        reported. Configurations of attempts after ``step`` that left no checkpoint are dropped.

        Raises:
          ConfigError: the disk is full, or the directory cannot be written to.
        """
        with self._needed():
            self._keep_config(recipe, step)
            if not step:
                self.journal.begin()
            elif saved := Folder(self.run_dir / "checkpoints").steps():
                self.journal.complete(saved[-1])
            source, unit = "planned with nominal costs", "forwards of the costliest stage"
            timeline.draw_timeline(planned, self.run_dir / "timeline.png", source=source, unit=unit)
            timeline.write_trace(planned, self.run_dir / "timeline.json")

    def open_metrics(self, step: int, sinks: Sequence[str]) -> MetricsWriter:
        """Opens ``metrics.jsonl`` for the rows after ``step``; in it and in ``eval.jsonl`` later rows are dropped.

        ``sinks`` are those of ``Train.sinks``.

        Raises:
          ConfigError: the files cannot be written.
        """
        with self._needed():
            path, evaluations = self.run_dir / "metrics.jsonl", self.run_dir / "eval.jsonl"
            if evaluations.exists():
                repair(evaluations, step)
            self._metrics = MetricsWriter(path, resume_step=step, sinks=sinks, report=self._report)
        return self._metrics

    def add_evaluation(self, row: Mapping[str, Any]) -> None:
        """Appends a row, with its "step", to ``eval.jsonl``, and drops earlier rows of its step and of later steps.

        A row that cannot be written is reported, and written by a later call or ``flush``.
        """
        self._evaluations.append(row)
        self.flush()

    def flush(self) -> None:
        """Writes the evaluations that are not in ``eval.jsonl`` yet; a failure is reported and not raised."""
        if not self._evaluations:
            return
        first = self._evaluations[0]
        with self._attempt("eval.jsonl"):
            path, silent = self.run_dir / "eval.jsonl", lambda _: None
            with MetricsWriter(path, columns=tuple(first), resume_step=first["step"] - 1, report=silent) as writer:
                for row in self._evaluations:
                    writer.write(row)
            if writer.failure:
                raise writer.failure
            self._evaluations = []

    def write(self, name: str, text: str) -> None:
        """Writes the file ``name`` of the directory; an older one stays until the new one is complete.

        A failure is reported and not raised; ``unwritten`` names the file.
        """
        with self._attempt(name):
            _put(self.run_dir / name, text)

    def draw(self, name: str, draw: Callable[[Path], object]) -> None:
        """Makes the picture ``name``, such as "curves.png"; an older one stays until the new one is complete.

        ``draw`` is called with the path that it has to write.

        A picture is no reason to end a run: one that cannot be drawn is reported like one that cannot be written.
        """
        new = self.run_dir / f"new-{name}"
        with self._attempt(name):
            try:
                draw(new)
                new.replace(self.run_dir / name)
            except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
                raise OSError(errno.EINVAL, f"it cannot be drawn: {reason_of(error)}") from error
            finally:
                new.unlink(missing_ok=True)

    def _keep_config(self, recipe: Recipe, step: int) -> None:
        path, text = self.run_dir / "config.gin", operative_config(recipe)
        before = self._config_at(step)
        earlier = path.with_name(f"config-until-{step}.gin")
        if step and before and differences(before, text):
            _put(earlier, before)
            if path.read_text(encoding="utf-8") != text:  # else it was said when they were tried first
                news = f"after step {step} with other settings: {_difference(before, text)}"
                self._report(f"{news}; before: {earlier.name}")
        for number, later in self._earlier_configs().items():
            if number > step or (number == step and before == text):
                later.unlink()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            _put(path, text)

    def _config_at(self, step: int) -> str:
        """The text of the configuration with which the run did ``step``; "" where there is none."""
        later = [path for number, path in self._earlier_configs().items() if number >= step]
        path = [*later, self.run_dir / "config.gin"][0]
        return read_text(path, "move it away") if is_there(path) else ""

    def _earlier_configs(self) -> dict[int, Path]:
        """The files of earlier configurations by the last step that each was used for, in rising order."""
        matches = ((_UNTIL.fullmatch(path.name), path) for path in self.run_dir.iterdir())
        return dict(sorted((int(match[1]), path) for match, path in matches if match))

    @contextlib.contextmanager
    def _needed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            cause = error.strerror or type(error).__name__
            fix = "make room there or name another directory"
            raise ConfigError(f"--run_dir={str(self.run_dir)!r}: cannot be written ({cause}); {fix}") from None

    @contextlib.contextmanager
    def _attempt(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            cause = error.strerror or type(error).__name__
            if name not in self._failed:
                self._report(f"{self.run_dir / name} cannot be written ({cause}); training goes on")
            self._failed[name] = cause
        else:
            if self._failed.pop(name, None):
                self._report(f"{self.run_dir / name} is written again")


def _put(path: Path, text: str) -> None:
    """Writes a file; an older one stays until the new one is complete."""
    new = path.with_name(f"new-{path.name}")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _difference(before: str, after: str, limit: int = 3) -> str:
    """The settings that changed, as "Train.steps = 12 → 14"."""
    changed = [f"{name} = {old} → {new}" for name, (old, new) in differences(before, after).items()]
    remainder = f" and {len(changed) - limit} more" if len(changed) > limit else ""
    return ", ".join(changed[:limit]) + remainder


def made_run_dir(path: str | Path) -> Path:
    """Makes the run directory if it is missing, and tries to write there; returns its path.

    Raises:
      ConfigError: it cannot be made or written to, or the disk is full.
    """
    run_dir = Path(path)
    shown = f"--run_dir={str(run_dir)!r}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = f"name another, such as {str(Path('runs') / run_dir.name)!r}"
        raise ConfigError(f"{shown}: cannot be made ({error.strerror}); {fix}") from None
    try:
        with tempfile.TemporaryFile(dir=run_dir) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        fix = "make room there or name another directory"
        raise ConfigError(f"{shown}: cannot be written ({error.strerror}); {fix}") from None
    return run_dir
