"""The rows of `bench nested`, the tables of docs/benchmarks.md, and the published figures.

Nothing about 128 GPUs was measured here: times and bytes are *simulated*, from datasheets and formulas. *Published*
figures are copied from "BigMac" (§4.2), whose figures 9 and 10 give ratios and marks in the text alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from benchmarks.nested import in_flight
from benchmarks.nested.measured import Replayed, replayed
from benchmarks.nested.models import GENERATION, UNDERSTANDING, WORKLOADS, Workload
from benchmarks.nested.systems import (
    ANY_RANKS,
    DEPTH,
    NESTED,
    NESTED_1F1B,
    ONE_RANK,
    OPTIMUS,
    SYSTEMS,
    Outcome,
    System,
    outcome,
)
from benchmarks.simulate import MOST_ERROR, MS
from mmjax.bench.rows import Row, Target, at_least, at_most

BATCHES = (2, 4, 8, 16)
"""Rows for each GPU."""
EVEN_BATCH = 8
"""The batch for which rows of equal cost are simulated too."""
LEAST_OF_OPTIMUS = 0.99
"""Lower bound on Optimus's step with unlimited memory over the nested step, with even rows."""
GB = 1e9

_DISTTRAIN = (ONE_RANK, ANY_RANKS)
PUBLISHED = {
    (UNDERSTANDING.name, OPTIMUS): (1.08, 1.1),
    **{(UNDERSTANDING.name, system): (1.6, 1.9) for system in _DISTTRAIN},
    **{(GENERATION.name, system): (1.5, 1.9) for system in _DISTTRAIN},
}
"""Published range of the iteration time over BigMac's, by workload and system."""
LAST_THAT_FITS = {
    **{(workload.name, system): math.inf for workload in WORKLOADS for system in (NESTED, *_DISTTRAIN)},
    (UNDERSTANDING.name, OPTIMUS): 8,
    (GENERATION.name, OPTIMUS): 0,
}
"""Published: the largest batch with which a system does not run out of memory."""


def bench_nested(rounds: int, picture: str = "") -> Iterator[Row]:
    """Yields simulated steps and memory of both models, microbatches in flight, and steps of real processes.

    Args:
      rounds: measurements of each case.
      picture: path of a picture of the microbatches in flight; "" for none.
    """
    for workload in WORKLOADS:
        for system in _systems(workload):
            for batch in BATCHES:
                yield from _simulated(outcome(system, workload, batch))
        yield from _ratios(workload)
    counted = in_flight.counts()
    for count in counted:
        case = f"in flight, {in_flight.PANELS[count.panel]}, {count.system}: of {count.microbatches}"
        yield _row(case, count.most, "microbatches", _flat(count))
    if picture:
        in_flight.draw(counted, picture)
    for step in replayed(rounds):
        yield from _measured(step)


def _systems(workload: Workload) -> list[System]:
    return [system for system in SYSTEMS if system.generates or not workload.generator]


def _row(case: str, value: float, unit: str, target: Target | None = None) -> Row:
    return Row(bench="nested", case=case, value=value, unit=unit, target=target)


# ---- simulated -------------------------------------------------------------------------------------------------------


def _simulated(result: Outcome) -> Iterator[Row]:
    workload, system = result.workload.name, result.trial.system.name
    case = f"{workload}, batch {result.batch}, {system}"
    yield _row(f"{case}: step, simulated", result.seconds, "s")
    yield _row(f"{case}: memory, simulated", result.memory.total / GB, "GB")
    yield _row(f"{case}: out of memory, simulated", not result.memory.fits, "")
    if (workload, system) in LAST_THAT_FITS:
        out_of_memory = result.batch > LAST_THAT_FITS[workload, system]
        yield _row(f"{case}: out of memory, published", out_of_memory, "")


def _ratios(workload: Workload) -> Iterator[Row]:
    """Yields each system's step over the step of nested interleaved 1F1B. Optimus has unlimited memory here."""
    for system in _systems(workload):
        if system.name == NESTED:
            continue
        name = f"{system.name} / nested"
        for batch in BATCHES:
            yield _row(f"{workload.name}, batch {batch}, {name}: simulated", ratio(system, workload, batch), "ratio")
        even = ratio(system, workload, EVEN_BATCH, even=True)
        target = at_least(LEAST_OF_OPTIMUS) if system.name == OPTIMUS else None
        yield _row(f"{workload.name}, batch {EVEN_BATCH}, {name}: simulated, even rows", even, "ratio", target)
        for end, value in zip(("from", "to"), PUBLISHED.get((workload.name, system.name), ()), strict=False):
            yield _row(f"{workload.name}, {name}: published {end}", value, "ratio")


def ratio(system: System, workload: Workload, batch: int, *, even: bool = False) -> float:
    """A system's simulated step over the simulated step of nested interleaved 1F1B."""
    (nested,) = (candidate for candidate in SYSTEMS if candidate.name == NESTED)
    step, nested_step = (outcome(each, workload, batch, even=even).seconds for each in (system, nested))
    return step / nested_step


MOST_UNITS = {
    (UNDERSTANDING.name, "vision.0"): {NESTED: 3, NESTED_1F1B: 2},
    (GENERATION.name, "vision.0"): {NESTED: 4, NESTED_1F1B: 3},
    (GENERATION.name, "painter.0"): {NESTED: 1, NESTED_1F1B: 1},
}
"""Units in flight of nested schedules for any batch: K for an encoder, one more if a generator makes the LLM run a unit
ahead, and one for a generator."""


def _flat(count: in_flight.Count) -> Target | None:
    units = MOST_UNITS.get(count.panel, {}).get(count.system)
    return at_most(units * DEPTH) if units else None


# ---- measured --------------------------------------------------------------------------------------------------------


def _measured(step: Replayed) -> Iterator[Row]:
    case = f"{step.model}, {step.trial.system.name}"
    yield _row(f"{case}: step, simulated", step.trial.timeline.makespan / MS, "ms")
    yield _row(f"{case}: step, measured", step.measured.makespan / MS, "ms")
    yield _row(f"{case}: measured / simulated", step.ratio, "ratio", at_most(1 + MOST_ERROR / 100))


# ---- tables ----------------------------------------------------------------------------------------------------------


def simulated_table(workload: Workload) -> str:
    """Step and memory of every system and batch, and ratios beside published ones, in Markdown."""
    heads = [f"batch {batch}" for batch in BATCHES]
    lines = [
        f"| system | ranks | {' | '.join(heads)} | over nested | even rows | published |",
        "|---|---|" + "---|" * (len(heads) + 3),
    ]
    for system in _systems(workload):
        results = [outcome(system, workload, batch) for batch in BATCHES]
        ratios = [ratio(system, workload, batch) for batch in BATCHES]
        even = ratio(system, workload, EVEN_BATCH, even=True)
        cells = [system.name, results[-1].trial.layout, *(_cell(result) for result in results)]
        cells += [_range(min(ratios), max(ratios)), f"{even:.2f}"]
        low, high = PUBLISHED.get((workload.name, system.name), (math.nan, math.nan))
        cells.append(_range(low, high))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(result: Outcome) -> str:
    mark = "" if result.memory.fits else ", **out**"
    return f"{result.seconds:.2f} s, {result.memory.total / GB:.0f} GB{mark}"


def _range(low: float, high: float) -> str:
    if math.isnan(low):
        return ""
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}–{high:.2f}"


def measured_table(steps: Sequence[Replayed]) -> str:
    """Steps of real processes beside simulated ones, in Markdown."""
    lines = ["| model | system | ranks | simulated | measured | ratio |", "|---|---|---|---|---|---|"]
    for step in steps:
        spans = [f"{span / MS:.0f} ms" for span in (step.trial.timeline.makespan, step.measured.makespan)]
        cells = [step.model, step.trial.system.name, step.trial.layout, *spans, f"{step.ratio:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
