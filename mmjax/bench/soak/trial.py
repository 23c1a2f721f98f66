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
from mmjax.bench.soak.files import compare_export, grow, held_out_records, with_copied_data
from mmjax.bench.soak.forked import Process, entry, program
from mmjax.flags import INTERRUPTED

PATIENCE = 1200.0
"""Seconds after which a command counts as hanging."""
ORPHANED = 120.0
"""Seconds that processes may outlive a launcher that is killed."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}
"""Relative tolerance of losses and norms under another layout: Adam enlarges rounding from step to step."""
FIRST = {"float32": 2e-5, "bfloat16": 0.05}
"""Relative tolerance of losses and norms of the first step, before any update."""
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
        """Writes the draw's configuration into ``folder``, which exists, and copies data that grow there."""
        self.draw, self.folder, self.run = draw, folder, folder / "run"
        self._steps_before_growth: int | None = None
        self._held_out: dict[str, str] = {}  # when data grew
        shared = with_copied_data(draw.shared, folder) if draw.data_grow else draw.shared
        for name, bindings in (("draw", shared), ("layout", draw.layout), ("other", draw.other_layout)):
            (folder / f"{name}.gin").write_text("".join(f"{line.replace('=', ' = ', 1)}\n" for line in bindings))
        self._settings = {key: value for key, _, value in (line.partition("=") for line in draw.shared)}
        self._server: Process | None = None
        self._processes: list[Process] = []

    def run_all(self) -> str:
        """Runs the trial from training to export; returns a summary in words.

        Raises:
          Failure: a command did not do what it should.
          Refused: the run was refused at start.
        """
        try:
            if self.draw.data_server:
                self._serve()
            summary = [self._interrupted(), self._resumed(), self._elsewhere()]
            return ", ".join([*summary, self._evaluated(), self._exported()])
        finally:
            for process in self._processes:
                if process.poll() is None:
                    process.signal(signal.SIGKILL)

    # ---- parts of the trial ------------------------------------------------------------------------------------------

    def _interrupted(self) -> str:
        """Trains until the run is stopped; then its data may grow."""
        draw, ready = self.draw, self.run / "config.gin"
        process = self._start_training(self.run, "layout")
        reached = (lambda: len(_rows(self.run)) >= draw.stop_after) if draw.stop_after else ready.exists
        if self._wait(process, reached) is None and self._wait(process, _passed(draw.delay)) is None:
            self._end(process)
        else:  # a short run may end by itself
            self._require_end(process, {0})
        steps = len(_rows(self.run))
        if draw.data_grow:
            self._steps_before_growth = steps
            self._held_out = _held_out(self.run)
            grow(self.folder)
        stopped = "trained" if process.status == 0 else f"stopped by {draw.ending} after step {steps}"
        return f"{stopped}, data grew" if draw.data_grow else stopped

    def _end(self, process: Process) -> None:
        """Sends the signals of the draw's ending, and waits for the end of the run."""
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
        has_trained = bool(_rows(self.run))
        process = self._started_again()
        if has_trained:
            self._require_accepted(process, {0}, "what has trained is refused when it is to go on")
        else:  # it was stopped while it started
            self._require_end(process, {0})
        self._require_rows(self.run)
        self._require_held_out(_held_out(self.run))
        return "resumed"

    def _started_again(self) -> Process:
        """Runs the same command again, repeatedly as long as processes of a killed launcher still hold the run."""
        end = time.monotonic() + ORPHANED
        while True:
            process = self._start_training(self.run, "layout")
            if self._wait(process) != REFUSED or "is training in it" not in process.text or time.monotonic() > end:
                return process
            time.sleep(1)

    def _elsewhere(self) -> str:
        """Trains under the other layout, from a checkpoint or from the beginning; losses must be the same."""
        run_dir, first_step = self.folder / "other", 0
        restorable = [step for step in _checkpoints(self.run) if step <= self.draw.restore_up_to]
        if restorable:
            first_step = max(restorable)
            shutil.copytree(self.run, run_dir)
            for step, path in _checkpoints(run_dir).items():
                if step > first_step:
                    shutil.rmtree(path)
        process = self._start_training(run_dir, "other")
        self._wait(process)
        try:
            self._require_end(process, {0})
        except Refused as refused:
            return f"refused under another layout ({refused})"
        self._require_rows(run_dir)
        if self._steps_before_growth is not None and first_step < self._steps_before_growth:
            return f"trained under another layout from step {first_step}, on other data"
        self._require_same_losses(_rows(self.run), _rows(run_dir), first_step)
        return f"the same under another layout from step {first_step}"

    def _evaluated(self) -> str:
        """Evaluates the last checkpoint; scores must be equal to those of the run's own evaluation."""
        samples = int(self._settings["Train.eval_samples"])
        flags = [f"--run_dir={self.run}", "--json", "--allow_code", *([] if samples else ["--samples=4"])]
        if self.draw.eval_elsewhere:
            flags.append(f"--gin_file={self.folder / 'other.gin'}")
        process = self._start("eval", flags)
        self._wait(process)
        if self.draw.eval_elsewhere:
            try:
                self._require_end(process, {0})
            except Refused as refused:
                return f"not evaluated under another layout ({refused})"
        else:
            self._require_accepted(process, {0}, "a run that evaluates itself cannot be evaluated")
        scores = json.loads(process.text.strip().splitlines()[-1])
        if samples:
            self._require_same_scores(_lines(self.run / "eval.jsonl")[-1], scores, samples)
        return "evaluated"

    def _exported(self) -> str:
        """Exports the parameters of the last checkpoint, which must be equal bit for bit."""
        out = self.folder / "exported"
        process = self._start("export", [f"--run_dir={self.run}", f"--out={out}"])
        self._wait(process)
        self._require_accepted(process, {0}, "a run that has trained cannot be exported")
        folder = self._exported_folder() if self.draw.from_folder else None
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
        self._require_accepted(
            process, {1}, "a run that has trained cannot be exported"
        )  # the encoders are in no folder
        return out

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _start_training(self, run_dir: Path, layout: str) -> Process:
        flags = [*self._files(layout), f"--run_dir={run_dir}"]
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
        addresses: list[str] = []
        self._wait(server, lambda: bool(addresses.extend(re.findall(r"serving on (\S+)", server.text)) or addresses))
        if not addresses:
            self._require_end(server, set())
        self._address = addresses[0]

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

    # ---- requirements ------------------------------------------------------------------------------------------------

    def _require_end(self, process: Process, legal: set[int]) -> None:
        """Requires a legal exit status; raises `Refused` for a refusal in one line before the first step."""
        self._require_no_traceback(process)
        if process.status in legal:
            return
        errors = [line for line in process.text.splitlines() if "error: " in line]
        errors.sort(key=lambda line: "this one ends too" in line)  # a process that follows another names no reason
        if process.status == REFUSED and (len(errors) == 1 or (self.draw.processes > 1 and errors)):
            if len(_rows(self.run)) and process.log.name.startswith("1."):
                raise Failure(f"refused after {len(_rows(self.run))} steps: {errors[0]}; see {process.log}")
            raise Refused(errors[0].partition("error: ")[2])
        last = (process.text.strip().splitlines() or ["no output"])[-1]
        raise Failure(f"{process.log.stem}: exit status {process.status}, {last}; see {process.log}")

    def _require_accepted(self, process: Process, legal: set[int], complaint: str) -> None:
        """Requires a legal exit status of a command that may not be refused; ``complaint`` begins the message."""
        try:
            self._require_end(process, legal)
        except Refused as refused:
            raise Failure(f"{complaint}: {refused}; see {process.log}") from None

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
        if not int(self._settings["Train.eval_samples"]):
            return
        every = int(self._settings["Train.eval_every"])
        due = [step for step in range(1, steps + 1) if step == steps or (every and step % every == 0)]
        scores = _lines(run_dir / "eval.jsonl")
        if failed := [row for row in scores if "failure" in row]:
            raise Failure(f"the evaluation after step {failed[0]['step']} failed: {failed[0]['failure']}")
        evaluated = [row["step"] for row in scores]
        if evaluated != due:
            raise Failure(f"eval.jsonl of {run_dir.name} has the steps {evaluated}, not {due}")

    def _require_same_losses(
        self, rows: list[dict[str, Any]], elsewhere_rows: list[dict[str, Any]], start: int
    ) -> None:
        """Requires the losses and norms of the steps behind ``start``, whose state both layouts share.

        In bf16 the norm of the first of them alone: rounding turns the sign of Adam's update of an element that has
        next to no gradient, and where norms fall steeply the next one is another (10.6 in place of 15.2, with equal
        losses).
        """
        dtype = self._settings["Train.dtype"].strip("'")
        for row, elsewhere in zip(rows[start:], elsewhere_rows[start:], strict=True):
            limit = FIRST[dtype] if row["step"] == 1 else TOLERANCE[dtype]
            has_norm = dtype == "float32" or row["step"] == start + 1
            for name in ("loss", "grad_norm") if has_norm else ("loss",):
                if abs(row[name] - elsewhere[name]) > limit * max(abs(row[name]), 1e-3):
                    raise Failure(f"step {row['step']} under another layout: {name} {elsewhere[name]}, not {row[name]}")
            rates = [name for name in row if name.endswith("learning_rate")]
            if any(row[name] != elsewhere.get(name) for name in rates):
                raise Failure(f"step {row['step']} under another layout: other learning rates")

    def _require_held_out(self, keys: Mapping[str, str]) -> None:
        """Requires that records which were held out when data grew still are, and no others."""
        for name, before in self._held_out.items():
            if keys.get(name) != before:
                raise Failure(f"{name}: other records are held out since the data grew")

    def _require_same_scores(self, row: dict[str, Any], scores: dict[str, Any], samples: int) -> None:
        """Requires the scores of the run's last evaluation. Another layout may round one tie differently."""
        for name, value in row.items():
            if not isinstance(value, int | float) or not isinstance(scores.get(name), int | float):
                continue
            limit = 1e-6 * max(1, abs(value)) if not self.draw.eval_elsewhere else max(1 / samples, 0.05 * abs(value))
            if name == "step":
                limit = 0
            if abs(value - scores[name]) > limit:
                raise Failure(f"mmjax.eval says {name} {scores[name]}, the run {value}")


def _held_out(run_dir: Path) -> dict[str, str]:
    """Keys of the records that the newest checkpoint keeps held out, by dataset; {} without a checkpoint."""
    checkpoints = _checkpoints(run_dir)
    return held_out_records(checkpoints[max(checkpoints)]) if checkpoints else {}


def _checkpoints(run_dir: Path) -> dict[int, Path]:
    """Paths of a run's checkpoints, by step."""
    paths = (path for path in (run_dir / "checkpoints").glob("*") if path.name.isdecimal())
    return {int(path.name): path for path in sorted(paths)}


def _lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; one that is being written is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    return _lines(run_dir / "metrics.jsonl")


def _passed(seconds: float) -> Callable[[], bool]:
    """A condition that holds after ``seconds`` from now on."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end
