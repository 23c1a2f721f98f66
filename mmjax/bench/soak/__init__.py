"""A soak: configurations drawn at random, each trained, stopped, resumed, moved, evaluated and exported.

Settings that single tests fix vary here together. A failure is a row that misses its target; it names the command that
repeats it, and its folder stays.
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mmjax.bench.rows import Row, at_most
from mmjax.bench.soak.draws import make_draw
from mmjax.bench.soak.forked import Process, preload
from mmjax.bench.soak.trial import Failure, Refused, SoakTrial
from mmjax.configurable import require
from mmjax.data.sources.writers import write_all, write_pictures
from mmjax.data.tasks.digits.dialogues import digit_dialogues

DIALOGUES = 24
_POLL, _WRITING = 0.05, 120.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a draw.

    Attributes:
      number: number of the draw.
      end: "passed", "refused" or "failed".
      text: details.
      seconds: duration.
    """

    number: int
    end: str
    text: str
    seconds: float


def bench_soak(rounds: int, *, minutes: int, seed: int, first: int, draws: int, jobs: int, out: str) -> Iterator[Row]:
    """Yields a row for each draw, then the numbers of draws that passed, were refused and failed.

    Args:
      rounds: not used; every draw is made once.
      minutes: no draw starts later; 0 is no limit.
      seed: seed of the draws; a draw follows from seed and number.
      first: number of the first draw.
      draws: number of draws; 0 for as many as there is time for.
      jobs: number of draws at the same time.
      out: folder for the files of draws; those of a draw that passes are removed.
    """
    del rounds
    require(minutes > 0 or draws > 0, "--minutes", minutes, "without --draws a soak has no end; set it to 10")
    for name, value in (("minutes", minutes), ("seed", seed), ("first", first), ("draws", draws)):
        require(value >= 0, f"--{name}", value, "must be 0 or more")
    require(jobs > 0, "--jobs", jobs, "must be 1 or more, such as 2")
    folder = Path(out).absolute()
    data = write_data(folder / "data")
    weights = write_weights(folder / "weights")
    preload()
    ends = {"passed": 0, "refused": 0, "failed": 0}
    works = (
        _Work(seed=seed, number=number, data=data, weights=weights, folder=folder / f"seed{seed}-draw{number}")
        for number in itertools.count(first)
    )
    if draws:
        works = itertools.islice(works, draws)
    for outcome in _outcomes(works, jobs, minutes):
        ends[outcome.end] += 1
        again = f"; again: python -m mmjax.bench soak --seed={seed} --first={outcome.number} --draws=1"
        text = f"draw {outcome.number} {outcome.end}: {outcome.text}{again if outcome.end == 'failed' else ''}"
        yield Row(bench="soak", case=text, value=outcome.seconds, unit="s")
    yield Row(bench="soak", case="draws that passed", value=ends["passed"], unit="draws")
    yield Row(bench="soak", case="draws that were refused at start, in one line", value=ends["refused"], unit="draws")
    yield Row(bench="soak", case="draws that failed", value=ends["failed"], unit="draws", target=at_most(0))


def write_data(folder: Path) -> dict[str, Path]:
    """Writes dialogues in every layout below a folder; returns the path to each by its `Source.kind`.

    This happens in a process of its own, and RuntimeError is raised if it fails.

    ArrayRecord's writer starts threads. A process that is forked later lacks them, and ends with a segmentation fault
    when its own ArrayRecord reader waits for one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "paths.json"

    def write() -> int:
        dialogues = digit_dialogues(DIALOGUES, seed=0)
        written = write_all(folder, dialogues, per_shard=10)
        written["pictures"] = write_pictures(folder / "pictures", dialogues)
        paths.write_text(json.dumps({kind: str(path) for kind, path in written.items()}))
        return 0

    _run(write, folder / "log")
    return {kind: Path(path) for kind, path in json.loads(paths.read_text()).items()}


def write_weights(folder: Path) -> tuple[Path, Path]:
    """Writes two small language models of random numbers in bf16; returns the paths of their folders of safetensors.

    The head of the first, ``folder``/llm, is separate; that of ``folder``/tied is tied and stored twice.

    ``folder`` is emptied before. Raises RuntimeError if it cannot be written.
    """

    def write() -> int:
        from mmjax.bench.soak.weights import write_folder

        write_folder(folder / "llm")
        write_folder(folder / "tied", tied=True)
        return 0

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _run(write, folder / "log")
    return folder / "llm", folder / "tied"


def _run(work: Callable[[], int], log: Path) -> None:
    """Runs ``work`` in a process of its own."""
    process = Process(work, log)
    if process.wait(_WRITING):
        raise RuntimeError(f"files for the soak cannot be written: see {process.log}")


def _outcomes(works: Iterator[_Work], jobs: int, minutes: int) -> Iterator[Outcome]:
    """Runs up to `jobs` draws at a time, and yields outcomes as they come; none starts after `minutes`, unless 0."""
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    running: list[tuple[_Work, Process]] = []
    try:
        while True:
            while len(running) < jobs and time.monotonic() < end and (work := next(works, None)):
                shutil.rmtree(work.folder, ignore_errors=True)
                work.folder.mkdir(parents=True)
                running.append((work, Process(work, work.folder / "soak.log")))
            if not running:
                return
            for work, process in [*running]:
                if process.poll() is not None:
                    running.remove((work, process))
                    yield _outcome(work.number, process, work.folder)
            time.sleep(_POLL)
    finally:
        for _, process in running:
            process.signal(signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One draw, in a process of its own that forks the commands."""

    seed: int
    number: int
    data: dict[str, Path]
    weights: tuple[Path, ...]
    folder: Path

    def __call__(self) -> int:
        signal.signal(signal.SIGTERM, _exit)
        start = time.monotonic()
        try:
            draw = make_draw(self.seed, self.number, data=self.data, folders=self.weights)
            text, end = SoakTrial(draw, self.folder).run_all(), "passed"
        except Refused as refused:
            text, end = str(refused), "refused"
        except Failure as failure:
            text, end = str(failure), "failed"
        outcome = {"number": self.number, "end": end, "text": text, "seconds": time.monotonic() - start}
        (self.folder / "outcome.json").write_text(json.dumps(outcome))
        return 0


def _exit(*_: object) -> None:
    """Ends a draw through its `finally`, which ends its commands; each leads a process group."""
    raise SystemExit(1)


def _outcome(number: int, process: Process, folder: Path) -> Outcome:
    path = folder / "outcome.json"
    if not path.exists():
        last_line = (process.text.strip().splitlines() or [f"exit status {process.status}"])[-1]
        return Outcome(
            number=number, end="failed", text=f"the soak itself: {last_line}; see {process.log}", seconds=0.0
        )
    outcome = Outcome(**json.loads(path.read_text()))
    if outcome.end != "failed":
        shutil.rmtree(folder)
    return outcome
