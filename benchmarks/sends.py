"""What it costs that senders wait for receivers: simulated, replayed by processes, and in training on CPUs.

Eight ranks, a process each: a vision encoder of four stages before an LLM of four. Either no sender waits
(``World.transport='device_put'``), or both sides of every move take part ('collective'). Every schedule is simulated,
and replayed by processes whose ops sleep for their modelled time (``benchmarks.replay``). A last row for each schedule
has the order that is made for sends that do not wait, run by ones that do.

Then configs/digits_vlm.gin trains over real processes, by both transports in turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.simulate import MOST_ERROR, MOST_REPEATS, error, shortest
from mmjax.bench.rows import Row, at_most
from mmjax.configurable import ConfigError
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.placements import TimedModule, apart
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs, simulate

MS = 1e-3
LAYER, MOVE, ONCE = 5 * MS, 2 * MS, 5 * MS
"""Seconds of a layer's forward on a rank, of a move, and of an op that runs once a step."""
MODULES = TimedModule(name="vision", layers=12, seconds=LAYER), TimedModule(name="llm", layers=24, seconds=LAYER)
MICROBATCHES = 8
SCHEDULES = {"1f1b": 1, "eager-1f1b": 1, "zb-h1": 1, "interleaved": 2}
"""Chunks of every schedule."""
TRANSPORTS: Mapping[str, Literal["async", "rendezvous"]] = {"device_put": "async", "collective": "rendezvous"}
"""Kinds of edges by transport."""
STEPS, WARM = 30, 10
"""Steps of a run, and the first ones that do not count."""
MOST_DIFFERENCE = 1e-4
"""Most relative difference of two transports' losses, whose sums have other orders."""
CHECKOUT = Path(__file__).resolve().parents[1]


def bench_sends(rounds: int, processes: str) -> Iterator[Row]:
    """Yields rows of eight simulated and replayed processes, then of training over ``processes``, such as "2,4,8"."""
    numbers = _numbers(processes)
    yield from _replayed(min(rounds, MOST_REPEATS))
    for count in numbers:
        yield from _trained(count, min(rounds, MOST_REPEATS))


def _numbers(processes: str) -> list[int]:
    parts = [part for part in processes.split(",") if part]
    if not all(part.isdecimal() and 2 <= int(part) <= 8 for part in parts):
        raise ConfigError(f"--processes={processes}: must be numbers from 2 to 8 with commas between, such as 2,4,8")
    return [int(part) for part in parts]


def _replayed(repeats: int) -> Iterator[Row]:
    for name, chunks in SCHEDULES.items():
        vision, llm = MODULES
        placement = apart((vision,), llm, {"vision": 4, "llm": 4}, chunks=chunks)
        costs = placement.costs(MICROBATCHES, move=MOVE, once=ONCE)
        simulated = {}
        for transport, kind in TRANSPORTS.items():
            schedule = make_schedule(name, placement.graph.with_moves(kind), MICROBATCHES, costs)
            step = simulated[transport] = simulate(schedule, costs).makespan
            measured = shortest(schedule, costs, step, repeats).makespan
            case = f"{name}, eight processes, {transport}"
            yield _row(f"{case}: step, simulated", step / MS, "ms")
            yield _row(f"{case}: step, replayed", measured / MS, "ms")
            yield Row(
                bench="sends",
                case=f"{case}: difference",
                value=error(measured, step),
                unit="%",
                target=at_most(MOST_ERROR),
            )
        yield from _ratios(name, simulated, _unaware(name, placement.graph, costs))


def _unaware(name: str, graph: StageGraph, costs: Costs) -> float:
    """Seconds of a step whose order is made for sends that do not wait, and whose sends do."""
    schedule = make_schedule(name, graph.with_moves("async"), MICROBATCHES, costs)
    return simulate(replace(schedule, graph=schedule.graph.with_moves("rendezvous")), costs).makespan


def _ratios(name: str, simulated: dict[str, float], unaware: float) -> Iterator[Row]:
    waiting, free = simulated["collective"], simulated["device_put"]
    yield _row(f"{name}: step where senders wait, over one where none does", waiting / free, "ratio")
    case = f"{name}: that with an order made for waiting, over one that is not"
    yield Row(bench="sends", case=case, value=waiting / unaware, unit="ratio", target=at_most(1.0))


def _trained(processes: int, rounds: int) -> Iterator[Row]:
    """Rows of training over real processes, whose transports take turns."""
    steps: dict[str, list[float]] = {transport: [] for transport in TRANSPORTS}
    losses: dict[str, float] = {}
    for _ in range(rounds):
        for transport in TRANSPORTS:
            lines = _run(processes, transport)
            steps[transport].append(statistics.median(line["step_time_s"] for line in lines[WARM:]))
            losses[transport] = lines[0]["loss"]
    for transport in TRANSPORTS:
        yield _row(
            f"digits_vlm over {processes} processes, {transport}: step", statistics.median(steps[transport]) / MS, "ms"
        )
    ratios = [free / waiting for free, waiting in zip(steps["device_put"], steps["collective"], strict=True)]
    yield _row(f"digits_vlm over {processes} processes: device_put over collective", statistics.median(ratios), "ratio")
    yield Row(
        bench="sends",
        case=f"digits_vlm over {processes} processes: difference of the first losses",
        value=abs(losses["device_put"] / losses["collective"] - 1),
        unit="relative",
        target=at_most(MOST_DIFFERENCE),
    )


def _run(processes: int, transport: str) -> Sequence[dict[str, Any]]:
    """The lines of metrics of a run of `STEPS` steps."""
    with tempfile.TemporaryDirectory() as folder:
        launched = ["-m", "mmjax.launch", "-n", str(processes), "-m", "mmjax.train"]
        settings = [f"World.transport={transport!r}", f"Train.steps={STEPS}", "Train.eval_samples=0", "Data.workers=0"]
        flags = [f"--gin_file={CHECKOUT / 'configs' / 'digits_vlm.gin'}", f"--run_dir={folder}/run"]
        flags += [f"--gin.{setting}" for setting in settings]
        done = subprocess.run([sys.executable, *launched, *flags], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"training over {processes} processes by {transport} failed:\n{done.stderr[-2000:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if "step_time_s" in line]


def _row(case: str, value: float, unit: str) -> Row:
    return Row(bench="sends", case=case, value=value, unit=unit)
