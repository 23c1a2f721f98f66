"""What the benchmark's process and those of the systems tell one another: requests and answers, a line each.

It needs the standard library alone, since the Python of PyTorch may have nothing else of mmjax.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a system's process.

    Attributes:
      folder: the model's.
      dialogues: the file of dialogues.
      dtype: of the computation, "float32" or "bfloat16"; parameters are fp32.
      threads: of a CPU's computation.
      compiled: whether PyTorch compiles the model.
      learning_rate, weight_decay, b1, b2, eps, clip_norm: of AdamW; matrices alone decay.
    """

    folder: str
    dialogues: str
    dtype: str = "float32"
    threads: int = 2
    compiled: bool = False
    learning_rate: float = 1e-4
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0


def serve(start: Callable[[Settings], tuple[Callable[[], float], Callable[[], Mapping[str, float]]]]) -> None:
    """Answers requests until there are no more.

    ``start`` prepares a system; it returns a function that computes the next step, waits, and returns its loss, and
    another that returns the seconds of a step by kind of operation. What else is printed goes to stderr.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        step, ops = start(Settings(**json.loads(sys.argv[1])))
        for request in sys.stdin:
            if request.strip() == "ops":
                answer = dict(ops())
            else:
                wall, processor = time.perf_counter(), time.process_time()
                loss = step()
                wall, processor = time.perf_counter() - wall, time.process_time() - processor
                answer = {"loss": loss, "seconds": wall, "processor_seconds": processor}
            print(json.dumps(answer), file=answers, flush=True)


class System:
    """A system in a process of its own. Use it as a context manager."""

    def __init__(self, python: str, module: str, settings: Settings, environment: Mapping[str, str]):
        """Starts ``module`` with this Python, which imports and compiles while others start."""
        command = [python, "-m", module, json.dumps(asdict(settings))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=dict(environment))

    def __enter__(self) -> System:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error:
            self._process.kill()
        self._process.communicate()

    def step(self) -> dict[str, float]:
        """Its next step: "loss", "seconds" and "processor_seconds"."""
        return self._answer("step")

    def ops(self) -> dict[str, float]:
        """Seconds of a step by kind of operation, largest first."""
        return self._answer("ops")

    def _answer(self, request: str) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args}: ended with status {self._process.wait()}")
        return json.loads(line)


def has_modules(python: str, modules: Sequence[str]) -> bool:
    """Whether this Python can import the modules; they are looked up, not imported."""
    code = f"import importlib.util as u; raise SystemExit(not all(u.find_spec(m) for m in {list(modules)!r}))"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
