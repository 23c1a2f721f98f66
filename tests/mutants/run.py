"""Mutation testing of the boundary and stage code: makes wrong changes one at a time and sees whether tests notice.

    python tests/mutants/run.py [FILE …] [--list] [--only=ID] [--sample=N [--seed=S]] [--jobs=1] [--json=OUT [--resume]]

FILE is a path of ``targets.py`` or its end (``routes.py``); all without one. Every mutant runs its file's tests up to
the first failure, in a copy of the package, in a process forked from one that has imported everything heavy. A test
that fails, a crash and a hang kill it. A survivor must be recorded, with its reason, in ``docs/mutants.md``; else the
exit status is 1.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import gc
import importlib
import json
import math
import os
import py_compile
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutations import Mutant
from targets import ROOT, TARGETS, mutants_of

RECORD = ROOT / "docs" / "mutants.md"
LEAST = 0.95
PRELOADED = (
    *("jax", "jax.numpy", "jax._src.interpreters.partial_eval", "jax.experimental.pallas", "numpy", "optax"),
    *(
        "flax.nnx",
        "gin",
        "jaxtyping",
        "pytest",
        "pytest_timeout",
        "_pytest.assertion.rewrite",
        "hypothesis",
        "hypothesis.strategies",
        "PIL.Image",
    ),
)


@dataclass
class Outcome:
    """The outcome of running a mutant. A line of ``--json`` holds these fields.

    Attributes:
      id, key, file: of the mutant.
      outcome: ``killed``, ``hung`` or ``survived``.
      by: the test that failed first, or how the process ended.
      seconds: of work, of all threads; of waiting for one that hung.
    """

    id: str
    key: str
    file: str
    outcome: str
    by: str
    seconds: float


@dataclass
class Running:
    """A test process.

    Attributes:
      pid, log: the process and what it writes.
      started, limit: wall-clock seconds.
      cpu: seconds of work, once it has ended by itself.
    """

    pid: int
    log: Path
    limit: float
    started: float = field(default_factory=time.monotonic)
    cpu: float = 0.0

    def poll(self) -> tuple[int, str] | None:
        """Exit status and output; negative where it was stopped at its limit; ``None`` while it runs."""
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        self.cpu = usage.ru_utime + usage.ru_stime
        late = time.monotonic() - self.started > self.limit
        if not pid and not late:
            return None
        self.stop()
        if not pid:
            os.waitpid(self.pid, 0)
        return (status if pid else -1), self.log.read_text(errors="replace")

    def stop(self) -> None:
        """Ends it with all of its group: tests start processes of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Copy:
    """A copy of the package and its tests, in which one file at a time is wrong."""

    def __init__(self, folder: Path):
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
        for name in ("mmjax", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        for name in ("pyproject.toml", "configs"):
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
        # Byte code that goes by the source's hash, since a mutant may have the size and second of its original.
        compileall.compile_dir(folder / "mmjax", quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)

    def start(self, tests: Sequence[str], limit: float) -> Running:
        """Runs tests in a forked process."""
        log = self.folder / "log"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks; no backend has been started in this process
            pid = os.fork()
        if pid:
            return Running(pid, log, limit)
        status = 1
        try:
            status = self._child(tests, log)
        finally:
            os._exit(status)

    def _child(self, tests: Sequence[str], log: Path) -> int:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self.folder)
        os.environ |= {"PYTHONPATH": str(self.folder), "COLUMNS": "240"}  # wide enough to see why a test failed
        sys.path[:] = [str(self.folder), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
        options = ["-q", "-x", "--no-header", "--tb=no", "--noconftest", "-m", "not slow", "-o", "timeout=0"]
        options += ["-p", "no:cacheprovider", "-p", "pytest_timeout", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        return int(importlib.import_module("pytest").main([*options, *tests]))

    def mutate(self, mutant: Mutant) -> None:
        """Makes the change."""
        (self.folder / mutant.file).write_bytes(mutant.mutated)

    def restore(self, mutant: Mutant) -> None:
        """Takes it back."""
        (self.folder / mutant.file).write_bytes(mutant.source)


def preload() -> None:
    """Imports what is heavy, once for all test processes, and starts no backend."""
    sys.path.insert(0, str(ROOT / "tests"))
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(cache).expanduser() / "mmjax" / "compiled-mutants"))
    flags = "--xla_cpu_collective_call_terminate_timeout_seconds=40"  # a hang that XLA sees ends sooner than its limit
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    importlib.import_module("conftest")  # devices, threads and flags, before JAX
    sys.path.remove(str(ROOT / "tests"))
    for name in PRELOADED:
        importlib.import_module(name)
    hypothesis: Any = sys.modules["hypothesis"]
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # a smaller counterexample says no more
    hypothesis.settings.register_profile("mutants", phases=phases, database=None)
    hypothesis.settings.load_profile("mutants")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other packages' plugins take longer than most tests here
    gc.freeze()  # what is imported by now is no garbage, and pytest looks for some at every end


def killer(status: int, output: str) -> str:
    """The first test that failed, and why."""
    for line in output.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            return line[:200]
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return (output.strip().splitlines() or ["no output"])[-1][:160]


def check_baseline(copy: Copy, tests: Sequence[str]) -> float:
    """Seconds that the unchanged code takes, on the clock: a machine that others use needs more patience.

    Raises:
      SystemExit: when its tests fail.
    """
    running = copy.start(tests, 3600)
    while (done := running.poll()) is None:
        time.sleep(0.05)
    if done[0] != 0:
        print(done[1][-4000:], file=sys.stderr)
        raise SystemExit("the unchanged code fails its tests")
    return time.monotonic() - running.started


def run_all(todo: Sequence[Mutant], copies: Sequence[Copy], limits: dict[tuple[str, ...], float]) -> Iterator[Outcome]:
    """Runs mutants, one in each copy at a time; yields as they end."""
    waiting, busy = list(todo)[::-1], dict[int, tuple[Mutant, Running]]()
    with contextlib.ExitStack() as stopping:
        stopping.callback(lambda: [running.stop() for _, running in busy.values()])
        yield from _run_waiting(waiting, busy, copies, limits)


def _run_waiting(
    waiting: list[Mutant],
    busy: dict[int, tuple[Mutant, Running]],
    copies: Sequence[Copy],
    limits: dict[tuple[str, ...], float],
) -> Iterator[Outcome]:
    while waiting or busy:
        for slot, copy in enumerate(copies):
            if slot not in busy and waiting:
                mutant = waiting.pop()
                copy.mutate(mutant)
                busy[slot] = mutant, copy.start(TARGETS[mutant.file], limits[TARGETS[mutant.file]])
        for slot, (mutant, running) in list(busy.items()):
            done = running.poll()
            if done is None:
                continue
            copies[slot].restore(mutant)
            del busy[slot]
            status, output = done
            outcome = "survived" if status == 0 else "hung" if status < 0 else "killed"
            by = "" if status == 0 else killer(status, output) if status > 0 else "time limit"
            seconds = round(running.cpu or time.monotonic() - running.started, 1)
            yield Outcome(mutant.id, mutant.key, mutant.file, outcome, by, seconds)
        time.sleep(0.02)


def recorded() -> set[str]:
    """Keys of the survivors that ``docs/mutants.md`` gives a reason for."""
    if not RECORD.exists():
        return set()
    lines = [line.strip() for line in RECORD.read_text().splitlines()]
    return {line[2:].rpartition(": ")[0] for line in lines if line.startswith("* `")}


def interval(killed: int, count: int) -> tuple[float, float]:
    """95 % confidence interval of a rate (Wilson)."""
    z, rate = 1.96, killed / count
    middle, spread = rate + z * z / (2 * count), z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return tuple((middle + sign * spread) / (1 + z * z / count) for sign in (-1, 1))  # type: ignore[return-value]


def table(outcomes: Sequence[Outcome], totals: dict[str, int]) -> str:
    """The result by file, in Markdown."""
    lines = ["| file | mutants | run | killed | survived | rate |", "|---|---|---|---|---|---|"]
    for name in (*TARGETS, ""):
        own = [one for one in outcomes if not name or one.file == name]
        if own:
            lost = sum(one.outcome == "survived" for one in own)
            total = totals[name] if name else sum(totals[file] for file in {one.file for one in own})
            rate = f"{100 * (1 - lost / len(own)):.1f} %"
            title = f"`{name}`" if name else "all"
            lines.append(f"| {title} | {total} | {len(own)} | {len(own) - lost} | {lost} | {rate} |")
    return "\n".join(lines)


def sample(found: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Mutants of one file at random; a smaller sample is the beginning of a larger one."""
    return random.Random(seed).sample(found, len(found))[:count]


def chosen_files(names: Sequence[str]) -> list[str]:
    """Targets by their ends."""
    for name in names:
        if not any(file.endswith(name) for file in TARGETS):
            raise SystemExit(f"{name}: not a target; use one of {', '.join(TARGETS)}")
    return [file for file in TARGETS if not names or any(file.endswith(name) for name in names)]


def earlier(out: Path, mutants: Sequence[Mutant]) -> list[Outcome]:
    """Outcomes of mutants that an earlier run wrote down, if they are still the same change."""
    known = {mutant.id: mutant.key for mutant in mutants}
    lines = out.read_text().splitlines() if out.exists() else []
    found = {one.id: one for one in (Outcome(**json.loads(line)) for line in lines)}
    return [one for one in found.values() if known.get(one.id) == one.key]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="this mutant; may be repeated")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="at most N mutants a file, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write outcomes here, one JSON object a line")
    parser.add_argument("--resume", action="store_true", help="keep the outcomes that OUT has already")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Entry."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what it started is ended too
    flags = parse(argv)
    files = chosen_files(flags.files)
    by_file = {file: mutants_of(file) for file in files}
    totals = {file: len(found) for file, found in by_file.items()}
    everything = [mutant for found in by_file.values() for mutant in found]
    wanted = [m for m in everything if not flags.only or m.id in flags.only]
    if flags.only and len(wanted) != len(set(flags.only)):
        raise SystemExit(f"no such mutant: {', '.join(set(flags.only) - {m.id for m in wanted})}")
    if flags.sample:
        wanted = [mutant for found in by_file.values() for mutant in sample(found, flags.sample, flags.seed)]
    if flags.list:
        for mutant in wanted:
            print(f"{mutant.id}  {mutant.key}")
        print("\n".join(f"{count:5d} {file}" for file, count in totals.items()), f"\n{sum(totals.values()):5d} in all")
        return 0
    before = earlier(flags.json, everything) if flags.json and flags.resume else []
    outcomes = run(wanted, before, flags)
    return summary([*before, *outcomes], totals)


def run(wanted: Sequence[Mutant], before: Sequence[Outcome], flags: Any) -> list[Outcome]:
    """Runs what has no outcome yet and writes down what becomes of it."""
    known, done = {one.id for one in before}, list[Outcome]()
    todo = [mutant for mutant in wanted if mutant.id not in known]
    if not todo:
        return done
    preload()
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        copies = [Copy(Path(folder) / str(slot)) for slot in range(flags.jobs)]
        limits = {}
        for tests in dict.fromkeys(TARGETS[mutant.file] for mutant in todo):
            seconds = check_baseline(copies[0], tests)
            limits[tests] = 60 + 3 * seconds
            print(f"unchanged code passes in {seconds:.0f} s: {' '.join(tests)}", flush=True)
        writer = open(flags.json, "a" if flags.resume else "w") if flags.json else None  # noqa: SIM115
        for number, one in enumerate(run_all(todo, copies, limits), 1):
            done.append(one)
            print(f"{number}/{len(todo)} {one.outcome} {one.seconds:.0f}s {one.id}  {one.by}", flush=True)
            if writer:
                print(json.dumps(vars(one), ensure_ascii=False), file=writer, flush=True)
        if writer:
            writer.close()
    return done


def summary(outcomes: Sequence[Outcome], totals: dict[str, int]) -> int:
    """Prints the table and the survivors; the exit status."""
    if not outcomes:
        return 0
    survivors, reasons = [one for one in outcomes if one.outcome == "survived"], recorded()
    print("\n" + table(outcomes, totals))
    killed, count = len(outcomes) - len(survivors), len(outcomes)
    if count < sum(totals.values()):
        low, high = interval(killed, count)
        print(f"\nestimate from a part: {killed / count:.1%}, 95 % confidence {low:.1%} to {high:.1%}")
    new = [one for one in survivors if one.key not in reasons]
    for one in survivors:
        print(f"\n{'recorded' if one.key in reasons else 'NEW'} {one.id}\n* {one.key}")
    return int(bool(new) or killed / count < LEAST)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
