"""Programs compiled for a target: several at a time, equal ones once, and kept on disk.

What is kept of a program is text and numbers. It is found again by all that XLA makes it of: the lowered program, the
options, the target, and versions. Lines of source are those of the time when it was compiled.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from mmjax.compile.buffers import Buffer, read_buffers
from mmjax.compile.hlo import Module
from mmjax.compile.targets import Target
from mmjax.mesh import gpu
from mmjax.mesh.spmd import Program

UNTUNED: Mapping[str, Any] = {"xla_gpu_autotune_level": 0}
"""Nothing can be tuned without a device."""
SUFFIX = ".json.gz"
_NAMES = re.compile(r'jax\.result_info = "[^"]*"')
"""Names of results, which differ from stage to stage, and which XLA does not read."""

Report = Callable[[int, int, str], None]
"""Called with the number of finished programs, of all, and the name of the one that has just been compiled."""


@dataclass(frozen=True, kw_only=True)
class Executable:
    """The text of a compiled program, and its memory.

    Attributes:
      text: its optimised HLO.
      arguments, results, aliased, temporaries: bytes on a device; aliased are results in the memory of arguments.
      buffers: the largest of each kind.
      seconds: it took to compile.
    """

    text: str
    arguments: int
    results: int
    aliased: int
    temporaries: int
    buffers: tuple[Buffer, ...]
    seconds: float = 0.0

    @cached_property
    def module(self) -> Module:
        """The instructions of ``text``."""
        return Module.of(self.text)

    @property
    def bytes(self) -> int:
        """Bytes on a device while it runs."""
        return self.arguments + self.results - self.aliased + self.temporaries

    def as_json(self) -> dict[str, Any]:
        """All of it for ``json.dumps``; ``of_json`` makes it again."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Executable:
        """The executable of ``as_json``. Raises TypeError and KeyError for values of another version."""
        buffers = tuple(Buffer(**buffer) for buffer in values["buffers"])
        return cls(**{**values, "buffers": buffers})


class Compiler:
    """Compiles programs for a target.

    Attributes:
      target: the devices to compile for.
      options: XLA's, by name: those of a run, without tuning.
      compiled: how many programs were compiled and not found.
    """

    def __init__(self, target: Target, cache: Path | None = None, *, deterministic: bool = False):
        """Compiles nothing yet.

        Args:
          target: the devices to compile for.
          cache: the folder where executables are kept; it is made. None keeps them in memory alone.
          deterministic: whether the run is.
        """
        flags = gpu.missing_flags(os.environ, deterministic=deterministic)  # XLA reads the others itself
        self.options = {**dict(map(_option, flags)), **UNTUNED}
        self.target, self.compiled = target, 0
        self._cache, self._made = cache, dict[str, Executable]()
        self._keys: dict[int, tuple[Program, str]] = {}

    def key(self, program: Program) -> str:
        """Equal for programs that XLA compiles to the same."""
        if id(program) not in self._keys:  # with the program, so that no other gets its number
            versions = [jax.__version__, jaxlib.version.__version__, os.environ.get("XLA_FLAGS", "")]
            lowered = _NAMES.sub("", program.lowered_text())
            parts = [lowered, json.dumps(self.options), self.target.text, *versions]
            self._keys[id(program)] = program, hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        return self._keys[id(program)][1]

    def __call__(self, program: Program) -> Executable:
        """The executable of a program, compiled at the first call."""
        return self._made.get(self.key(program)) or self.all([program])[0]

    def all(self, programs: Sequence[Program], report: Report | None = None, workers: int = 0) -> list[Executable]:
        """The executable of each program; they are traced one after another and compiled in parallel.

        Args:
          programs: the programs, which may repeat.
          report: see ``Report``; it is called for programs that are not found.
          workers: number of threads; 0 means one per core, at most eight.
        """
        missing: dict[str, Program] = {}
        pending: dict[Future[Executable], str] = {}
        pool = ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1), thread_name_prefix="compile")
        try:
            for program in programs:
                program.lower()
                key = self.key(program)
                if key in self._made or key in missing:
                    continue
                if stored := self._read(key):
                    self._made[key] = stored
                    continue
                missing[key] = program
                pending[pool.submit(_compile, program, self.options)] = key
            for number, future in enumerate(as_completed(pending), 1):
                key = pending[future]
                self._made[key] = future.result()
                self.compiled += 1
                self._write(key, self._made[key])
                if report:
                    report(number, len(pending), missing[key].name)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return [self._made[self.key(program)] for program in programs]

    def _read(self, key: str) -> Executable | None:
        """The executable on disk; None if there is none, or the file is torn or of another version."""
        if not self._cache:
            return None
        try:
            return Executable.of_json(json.loads(gzip.decompress((self._cache / f"{key}{SUFFIX}").read_bytes())))
        except (OSError, EOFError, ValueError, TypeError, KeyError):
            return None

    def _write(self, key: str, executable: Executable) -> None:
        if not self._cache:
            return
        self._cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._cache, delete=False) as file:
            file.write(gzip.compress(json.dumps(executable.as_json()).encode(), compresslevel=5))
        os.replace(file.name, self._cache / f"{key}{SUFFIX}")


def _compile(program: Program, options: Mapping[str, Any]) -> Executable:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mmjax-compile-") as folder:
        # XLA tells the assignment of buffers in no other way.
        loaded = program.compiled_with({**options, "xla_dump_to": folder})
        texts = sorted(Path(folder).glob("*buffer-assignment.txt"))
        assignment = texts[-1].read_text(encoding="utf-8") if texts else ""
    text, memory = loaded.as_text(), loaded.memory_analysis()
    return Executable(
        text=text,
        arguments=int(memory.argument_size_in_bytes),
        results=int(memory.output_size_in_bytes),
        aliased=int(memory.alias_size_in_bytes),
        temporaries=int(memory.temp_size_in_bytes),
        buffers=read_buffers(assignment, Module.of(text)),
        seconds=round(time.monotonic() - start, 2),
    )


def _option(flag: str) -> tuple[str, Any]:
    """Name and value of a flag of XLA, such as "--xla_gpu_enable_triton_gemm=false"."""
    return gpu.name_of(flag).removeprefix("--"), json.loads(flag.partition("=")[2])
