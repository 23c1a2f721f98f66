"""One fault in a run of several processes: the line that names it, its delay, lost steps, and the end of the run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mmjax.bench.faults.faulty import FAULTY_PROCESS
from mmjax.bench.soak.forked import Process, program

STEPS, EVERY = 24, 4
"""Steps of a run, and between two checkpoints."""
PATIENCE = 600.0
"""Seconds after which a command counts as hanging."""
COMMANDS = 3
"""Most times that the same command is given again."""
_POLL = 0.05
# The vision encoder on ranks 2 and 3, the LLM on ranks 0 and 1: with two processes each has a module of its own.
CONFIGURATION = f"""
Train.steps = {STEPS}
Train.global_batch = 8
Train.microbatches = 2
Train.eval_samples = 0
Train.eval_every = 0
Train.log_every = 1
Checkpoint.every = {EVERY}
Checkpoint.keep = 3
Digits.images = (1, 2)
Digits.digits = (1, 2)
Digits.scale = (1.0, 1.0)
Digits.aspect = (1.0, 1.0)
Data.sequence_length = 36
Packing.buckets = ()
Data.workers = 1
Optimizer.learning_rate = 0.02
Optimizer.warmup = 2
vision/ViT.layers = 1
vision/ViT.width = 16
vision/ViT.heads = 2
vision/ViT.mlp = 16
llm/Decoder.layers = 2
llm/Decoder.width = 16
llm/Decoder.heads = 2
llm/Decoder.kv_heads = 2
llm/Decoder.mlp = 16
llm/Layout.tp = 2
vision/Layout.dp = 2
vision/Layout.rank_offset = 2
"""


class FaultFailure(Exception):
    """A run did not survive its fault, or no line named it."""


@dataclass(frozen=True, kw_only=True)
class FaultResult:
    """How a run came through a fault.

    Attributes:
      ending: how the run went on, in words.
      line: the line that named the fault.
      seconds: seconds from the fault to that line.
      steps_lost: steps that had been recorded and were trained again.
      loss_gap: largest difference between a loss and that of the run without a fault.
    """

    ending: str
    line: str
    seconds: float
    steps_lost: int
    loss_gap: float


@dataclass
class FaultTrial:
    """A run of several processes in a folder of its own.

    Attributes:
      processes: number of processes.
      folder: folder of all files.
      inside: name in ``faulty.FAULTS`` of a fault inside process 1; empty for a fault from outside.
      settings: further bindings, such as ("Train.max_skipped=2",).
      run: the run directory, ``folder``/run.
      commands: commands so far; the last one may be running.
      servers: data servers of the run, the newest one last.
      port: port of the data servers.
    """

    processes: int
    folder: Path
    inside: str = ""
    settings: tuple[str, ...] = ()
    run: Path = field(init=False)
    commands: list[Process] = field(default_factory=list)
    servers: list[Process] = field(default_factory=list)
    port: int = 0
    _text_before_fault: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run = self.folder / "run"
        (self.folder / "run.gin").write_text(CONFIGURATION)

    @property
    def mark(self) -> Path:
        """The file that marks that a fault from inside has happened."""
        return self.folder / "happened"

    @property
    def command(self) -> Process:
        """The newest command."""
        return self.commands[-1]

    def start(self) -> None:
        """Starts the command, which is the same every time, in the background; it becomes the last of ``commands``."""
        module = "mmjax.bench.faults.faulty" if self.inside else "mmjax.train"
        flags = [f"--gin_file={self.folder / 'run.gin'}", f"--run_dir={self.run}"]
        flags += [f"--gin.{setting}" for setting in self.settings]
        restart_flags = (
            ["--max_restarts=3"] if self.inside else []
        )  # the default where the module is mmjax.train itself
        launch = ["-m", "mmjax.launch", "-n", str(self.processes), *restart_flags, "-m", module, *flags]
        log, self._text_before_fault = self.folder / f"{len(self.commands)}.log", 0
        self.commands.append(Process(program(launch), log, self._environment))

    @property
    def _environment(self) -> dict[str, str]:
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(self.folder.parent / "compiled"))
        shared = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        fault = {"MMJAX_FAULT": self.inside, "MMJAX_FAULT_MARK": str(self.mark)}
        return {**shared, **fault, "JAX_PLATFORMS": "cpu"}

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def wait_for(self, condition: Callable[[], object], waited_for: str) -> None:
        """Waits until ``condition`` returns something true; ``waited_for`` names it in messages, such as "step 3".

        Raises:
          FaultFailure: the command ends before, or it takes too long.
        """
        end = time.monotonic() + PATIENCE
        while not condition():
            if self.command.poll() is not None and not condition():
                raise FaultFailure(f"ended before {waited_for}: see {self.command.log}")
            if time.monotonic() > end:
                self.command.signal(signal.SIGKILL)
                raise FaultFailure(f"no {waited_for} in {PATIENCE:.0f} s: see {self.command.log}")
            time.sleep(_POLL)

    def wait_for_step(self, step: int) -> None:
        """Waits until a row of a step, or of a later one, is recorded; raises ``FaultFailure`` as ``wait_for``."""
        self.wait_for(lambda: self.last_step() >= step, f"step {step}")

    def now(self) -> float:
        """The time of a fault, by ``time.time``. Lines written from now on may name the fault."""
        self._text_before_fault = len(self.command.text)
        return time.time()

    def wait_for_line(self, pattern: str, since: float) -> tuple[str, float]:
        """Waits for a line of the command's output, written after the call of ``now``, that has a match of ``pattern``.

        Args:
          pattern: a regular expression.
          since: a time by ``time.time``.

        Returns:
          The first such line, and the seconds from ``since`` until it was seen.

        Raises:
          FaultFailure: see ``wait_for``.
        """
        matches, line = list[str](), re.compile(f"^.*(?:{pattern}).*$", flags=re.MULTILINE)

        def appears() -> bool:
            matches.extend(line.findall(self.command.text, self._text_before_fault))
            return bool(matches)

        self.wait_for(appears, f"a line like {pattern!r}")
        return matches[0].strip(), time.time() - since

    def wait_for_end(self) -> int:
        """Waits for the end of the command; returns its exit status.

        Raises:
          FaultFailure: it did not end in time, and was killed.
        """
        try:
            status = self.command.wait(PATIENCE)
        except TimeoutError:
            raise FaultFailure(f"no end in {PATIENCE:.0f} s: see {self.command.log}") from None
        assert status is not None
        return status

    def finish(self) -> str:
        """Waits for the command, and starts it again until its status is 0; returns a summary in words.

        Raises:
          FaultFailure: ``COMMANDS`` commands have failed, or the run is not at its last step.
        """
        statuses = [self.wait_for_end()]
        while statuses[-1] != 0 and len(statuses) < COMMANDS:
            self.start()
            statuses.append(self.wait_for_end())
        if statuses[-1] != 0:
            raise FaultFailure(f"exit statuses {statuses}: see {self.command.log}")
        if self.last_step() != STEPS:
            raise FaultFailure(f"the run ended after step {self.last_step()} of {STEPS}: see {self.command.log}")
        if len(statuses) > 1:
            return f"exit status {statuses[0]}, the same command again"
        return "restarted by launch" if "launch: starting again" in self.command.text else "went on"

    # ---- processes and files of a run ------------------------------------------------------------------------------

    def process(self, number: int = FAULTY_PROCESS) -> int:
        """The process id of a process of the run, by its number. Raises ``FaultFailure`` where it is not running."""
        for pid, parent, environment in _living():
            if parent == self.command.pid and f"MMJAX_PROCESS_ID={number}" in environment:
                return pid
        raise FaultFailure(f"process {number} is not running: see {self.command.log}")

    def members(self) -> list[int]:
        """Ids of all living processes of the run."""
        mark = f"MMJAX_FAULT_MARK={self.mark}"
        return [pid for pid, _, environment in _living() if mark in environment]

    def worker(self) -> int:
        """The process id of a data worker: the newest of process 0's children. Raises ``FaultFailure`` without any."""
        first = self.process(0)
        workers = sorted(pid for pid, parent, _ in _living() if parent == first)
        if not workers:
            raise FaultFailure(f"no data worker is running: see {self.command.log}")
        return workers[-1]

    def losses(self) -> dict[int, float]:
        """Recorded losses by step; {} before the first. A line that is being written is left out."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row["loss"] for row in rows}

    def last_step(self) -> int:
        """The last recorded step; 0 before the first."""
        return max(self.losses(), default=0)

    def newest_checkpoint(self) -> Path:
        """The directory of the newest whole checkpoint. Raises ``ValueError`` where there is none."""
        checkpoints = [path for path in (self.run / "checkpoints").glob("*") if path.name.isdecimal()]
        return max(checkpoints)

    def resumed_after(self) -> int | None:
        """The step after which the last restart continued; ``None`` without a restart."""
        text = "".join(command.text for command in self.commands)
        starts = re.findall(r"continuing after step (\d+)", text)
        return int(starts[-1]) if starts else None


def _living() -> Iterator[tuple[int, int, list[str]]]:
    """Process id, parent's id and environment of every process that this one may inspect."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                yield int(entry.name), int(parent), (entry / "environ").read_text(errors="replace").split("\0")
