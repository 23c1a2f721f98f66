"""The trial of a drawn configuration: it trains, stops, resumes, trains under another layout, evaluates and exports.

Or it is refused at start, in one line.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmjax.bench.soak.draws import Draw
from mmjax.bench.soak.files import compare_export, grow, with_data_of_its_own
from mmjax.bench.soak.forked import Process, entry, program
from mmjax.flags import INTERRUPTED

PATIENCE = 1200.0
"""Seconds after which a command counts as hanging."""
ORPHANED = 120.0
"""Seconds that processes may outlive a launcher that is killed."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}
"""Relative tolerance of losses and norms under another layout: Adam enlarges rounding from step to step."""
FIRST = {"float32": 2e-5, "bfloat16": 0.05}
"""Relative tolerance of those of the first step, before any update."""
STOPPED = {INTERRUPTED, 128 + signal.SIGTERM}
"""Exit statuses of a run that was asked to stop."""
REFUSED = 2
ENDINGS = {
    "kill": (signal.SIGKILL,),
    "interrupt": (signal.SIGINT,),
    "terminate": (signal.SIGTERM,),
    "pause": (signal.SIGSTOP, signal.SIGCONT),
}
"""The signals of each ending."""
PAUSE = 2.0
"""Seconds between two signals."""


class Failure(Exception):
    """A configuration did not behave as it should."""


class Refused(Exception):
    """A configuration was refused at start, in one line."""


class SoakTrial:
    """One draw in a folder of its own."""

    def __init__(self, draw: Draw, folder: Path):
        """Writes the draw's configuration into ``folder``."""
        self.draw, self.folder, self.run = draw, folder, folder / "run"
        self._grown_after: int | None = None
        shared = with_data_of_its_own(draw.shared, folder) if draw.grows else draw.shared
        for name, bindings in (("draw", shared), ("layout", draw.layout), ("other", draw.other)):
            (folder / f"{name}.gin").write_text("".join(f"{line.replace('=', ' = ', 1)}\n" for line in bindings))
        self._said = {key: value for key, _, value in (line.partition("=") for line in draw.shared)}
        self._server: Process | None = None
        self._processes: list[Process] = []

    def ask(self) -> str:
        """Runs the whole trial; returns what was done, in words.

        Raises:
          Failure: something else happened.
          Refused: the run was refused at start.
        """
        try:
            if self.draw.served:
                self._serve()
            done = [self._interrupted(), self._resumed(), self._elsewhere()]
            return ", ".join([*done, self._evaluated(), self._exported()])
        finally:
            for process in self._processes:
                if process.poll() is None:
                    process.signal(signal.SIGKILL)

    # ---- what is asked -----------------------------------------------------------------------------------------------

    def _interrupted(self) -> str:
        """Trains until the run is stopped; then its data may grow."""
        draw, ready = self.draw, self.run / "config.gin"
        process = self._start_training(self.run, "layout")
        reached = (lambda: len(_rows(self.run)) >= draw.killed) if draw.killed else ready.exists
        if self._wait(process, reached) is None and self._wait(process, _passed(draw.delay)) is None:
            self._end(process)
        else:  # a short run may end by itself
            self._require_end(process, {0})
        steps = len(_rows(self.run))
        if draw.grows:
            self._grown_after = steps
            grow(self.folder)
        stopped = "trained" if process.status == 0 else f"stopped by {draw.ending} after step {steps}"
        return f"{stopped}, data grew" if draw.grows else stopped

    def _end(self, process: Process) -> None:
        """Ends a run as the draw says, and waits for its end."""
        ending = self.draw.ending
        for number in ENDINGS[ending]:
            process.signal(number)
            self._wait(process, _passed(PAUSE))
        status = self._wait(process)
        self._require_no_traceback(process)
        legal = {"kill": {-signal.SIGKILL}, "pause": {0}}.get(ending, {0, *STOPPED})
        if status not in legal:
            raise Failure(f"{ending} after step {len(_rows(self.run))}: exit status {status}; see {process.log}")
        steps = [row["step"] for row in _rows(self.run)]
        if status in STOPPED and steps and steps[-1] not in _checkpoints(self.run):
            raise Failure(f"{ending}: no checkpoint of step {steps[-1]}, the last one; see {process.log}")

    def _resumed(self) -> str:
        """Resumes to the end by the same command; every step and every evaluation must be recorded once."""
        trained = bool(_rows(self.run))
        process = self._started_again()
        try:
            self._require_end(process, {0})
        except Refused as refused:
            if not trained:  # it was stopped while it started
                raise
            raise Failure(f"what has trained is refused when it is to go on: {refused}; see {process.log}") from None
        self._require_rows(self.run)
        return "resumed"

    def _started_again(self) -> Process:
        """Runs the same command again, until the processes of a killed launcher have noticed its end."""
        end = time.monotonic() + ORPHANED
        while True:
            process = self._start_training(self.run, "layout")
            if self._wait(process) != REFUSED or "is training in it" not in process.text or time.monotonic() > end:
                return process
            time.sleep(1)

    def _elsewhere(self) -> str:
        """Trains under the other layout, from a checkpoint or from the beginning; losses must agree."""
        other, start = self.folder / "other", 0
        kept = [step for step in _checkpoints(self.run) if step <= self.draw.restored]
        if kept:
            start = max(kept)
            shutil.copytree(self.run, other)
            for step, path in _checkpoints(other).items():
                if step > start:
                    shutil.rmtree(path)
        process = self._start_training(other, "other")
        self._wait(process)
        try:
            self._require_end(process, {0})
        except Refused as refused:
            return f"refused under another layout ({refused})"
        self._require_rows(other)
        if self._grown_after is not None and start < self._grown_after:
            return f"trained under another layout from step {start}, on other data"
        self._require_same(_rows(self.run), _rows(other), start)
        return f"the same under another layout from step {start}"

    def _evaluated(self) -> str:
        """Evaluates the last checkpoint; scores must be the run's."""
        samples = int(self._said["Train.eval_samples"])
        flags = [f"--run_dir={self.run}", "--json", "--allow_code", *([] if samples else ["--samples=4"])]
        if self.draw.moved:
            flags.append(f"--gin_file={self.folder / 'other.gin'}")
        process = self._start("eval", flags)
        self._wait(process)
        try:
            self._require_end(process, {0})
        except Refused as refused:
            if not self.draw.moved:
                raise Failure(f"a run that evaluates itself cannot be evaluated: {refused}") from None
            return f"not evaluated under another layout ({refused})"
        found = json.loads(process.text.strip().splitlines()[-1])
        if samples:
            self._require_same_scores(_lines(self.run / "eval.jsonl")[-1], found, samples)
        return "evaluated"

    def _exported(self) -> str:
        """Exports the parameters of the last checkpoint, which must be equal bit for bit."""
        out = self.folder / "exported"
        process = self._start("export", [f"--run_dir={self.run}", f"--out={out}"])
        self._wait(process)
        self._require_export(process, {0})
        folder = self._exported_folder() if self.draw.folder else None
        compared = self._fork("compare", lambda: compare_export(self.run, out, folder))
        self._wait(compared)
        self._require_end(compared, {0})
        return "exported, as a folder too" if folder else "exported"

    def _exported_folder(self) -> Path:
        """The LLM of the run as a folder of safetensors."""
        out = self.folder / "exported-folder"
        merge = ["--merge_lora"] if any(line.startswith("llm/Lora.rank") for line in self.draw.shared) else []
        flags = [f"--run_dir={self.run}", f"--out={out}", "--format=safetensors", "--allow_code", *merge]
        process = self._start("export", flags)
        self._wait(process)
        self._require_export(process, {1})  # the encoders are in no folder
        return out

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _start_training(self, run_dir: Path, layout: str, *more: str) -> Process:
        flags = [*self._files(layout), f"--run_dir={run_dir}", *more]
        if self._server:
            flags.append(f"--gin.Data.servers=({self._address!r},)")
        if self.draw.processes == 1:
            return self._start("train", flags)
        command = ["-m", "mmjax.launch", "-n", str(self.draw.processes), "-m", "mmjax.train", *flags]
        return self._fork("launch", program(command))

    def _start(self, name: str, flags: Sequence[str]) -> Process:
        return self._fork(name, entry(name, flags))

    def _fork(self, name: str, work: Callable[[], object]) -> Process:
        """Starts a process that ends with the trial."""
        log = self.folder / f"{len(self._processes) + 1}.{name}.log"
        self._processes.append(Process(work, log, self._environment))
        return self._processes[-1]

    def _serve(self) -> None:
        command = ["-u", "-m", "mmjax.serve", *self._files("layout"), "--port=0", "--workers=1"]
        self._server = server = self._fork("serve", program(command))
        found: list[str] = []
        self._wait(server, lambda: bool(found.extend(re.findall(r"serving on (\S+)", server.text)) or found))
        if not found:
            self._require_end(server, set())
        self._address = found[0]

    def _files(self, layout: str) -> list[str]:
        return [*(f"--gin_file={self.folder / name}.gin" for name in ("draw", layout)), "--allow_code"]

    @property
    def _environment(self) -> Mapping[str, str]:
        return {
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }

    def _wait(self, process: Process, until: Any = lambda: False) -> int | None:
        try:
            return process.wait(PATIENCE, until)
        except TimeoutError as error:
            raise Failure(f"{process.log.stem}: {error}; see {process.log}") from None

    # ---- what is required --------------------------------------------------------------------------------------------

    def _require_end(self, process: Process, legal: set[int]) -> None:
        """Requires a legal exit status; raises `Refused` for a refusal in one line before the first step."""
        self._require_no_traceback(process)
        if process.status in legal:
            return
        errors = [line for line in process.text.splitlines() if "error: " in line]
        errors.sort(key=lambda line: "this one ends too" in line)  # who only follows another says nothing of the reason
        if process.status == REFUSED and (len(errors) == 1 or (self.draw.processes > 1 and errors)):
            if len(_rows(self.run)) and process.log.name.startswith("1."):
                raise Failure(f"refused after {len(_rows(self.run))} steps: {errors[0]}; see {process.log}")
            raise Refused(errors[0].partition("error: ")[2])
        last = (process.text.strip().splitlines() or ["no output"])[-1]
        raise Failure(f"{process.log.stem}: exit status {process.status}, {last}; see {process.log}")

    def _require_export(self, process: Process, legal: set[int]) -> None:
        """Requires a legal exit status of an export: a run that has trained is refused by none."""
        try:
            self._require_end(process, legal)
        except Refused as refused:
            raise Failure(f"a run that has trained cannot be exported: {refused}; see {process.log}") from None

    def _require_no_traceback(self, process: Process) -> None:
        if "Traceback (most recent call last)" in process.text:
            last = process.text.strip().splitlines()[-1]
            raise Failure(f"{process.log.stem} ended with a traceback: {last}; see {process.log}")

    def _require_rows(self, run_dir: Path) -> None:
        """Requires every step and evaluation once, in order, with finite numbers."""
        rows, steps = _rows(run_dir), self.draw.steps
        if [row["step"] for row in rows] != [*range(1, steps + 1)]:
            raise Failure(f"metrics.jsonl has the steps {[row['step'] for row in rows]}, not 1 to {steps}")
        if not all(math.isfinite(row["loss"]) for row in rows):
            raise Failure(f"losses are not finite: {[row['loss'] for row in rows]}")
        if not int(self._said["Train.eval_samples"]):
            return
        every = int(self._said["Train.eval_every"])
        due = [step for step in range(1, steps + 1) if step == steps or (every and step % every == 0)]
        scores = _lines(run_dir / "eval.jsonl")
        if failed := [row for row in scores if "failure" in row]:
            raise Failure(f"the evaluation after step {failed[0]['step']} failed: {failed[0]['failure']}")
        evaluated = [row["step"] for row in scores]
        if evaluated != due:
            raise Failure(f"eval.jsonl of {run_dir.name} has the steps {evaluated}, not {due}")

    def _require_same(self, rows: list[dict[str, Any]], others: list[dict[str, Any]], start: int) -> None:
        dtype = self._said["Train.dtype"].strip("'")
        for one, other in zip(rows[start:], others[start:], strict=True):
            limit = FIRST[dtype] if one["step"] == 1 else TOLERANCE[dtype]
            for name in ("loss", "grad_norm"):
                if abs(one[name] - other[name]) > limit * max(abs(one[name]), 1e-3):
                    raise Failure(f"step {one['step']} under another layout: {name} {other[name]}, not {one[name]}")
            rates = [name for name in one if name.endswith("learning_rate")]
            if any(one[name] != other.get(name) for name in rates):
                raise Failure(f"step {one['step']} under another layout: other learning rates")

    def _require_same_scores(self, row: dict[str, Any], found: dict[str, Any], samples: int) -> None:
        """Requires the scores of the run's last evaluation. Another layout may round one tie differently."""
        for name, value in row.items():
            if not isinstance(value, int | float) or not isinstance(found.get(name), int | float):
                continue
            limit = 1e-6 * max(1, abs(value)) if not self.draw.moved else max(1 / samples, 0.05 * abs(value))
            if name == "step":
                limit = 0
            if abs(value - found[name]) > limit:
                raise Failure(f"mmjax.eval says {name} {found[name]}, the run {value}")


def _checkpoints(run_dir: Path) -> dict[int, Path]:
    """Paths of a run's checkpoints, by step."""
    found = (path for path in (run_dir / "checkpoints").glob("*") if path.name.isdecimal())
    return {int(path.name): path for path in sorted(found)}


def _lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; one that is being written is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    return _lines(run_dir / "metrics.jsonl")


def _passed(seconds: float) -> Callable[[], bool]:
    """Whether so many seconds have passed from now on."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end
