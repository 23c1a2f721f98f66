"""The rows of `bench nested`, the tables of docs/benchmarks.md, and what the paper publishes.

Nothing about 128 GPUs was measured here: times and bytes are *simulated*, from datasheets and formulas. What is
*published* is copied from "BigMac" (§4.2), whose figures 9 and 10 give ratios and marks in the text alone.
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
"""What Optimus's step with unlimited memory must be of the nested one at least, with even rows."""
GB = 1e9

_DISTTRAIN = (ONE_RANK, ANY_RANKS)
PUBLISHED = {
    (UNDERSTANDING.name, OPTIMUS): (1.08, 1.1),
    **{(UNDERSTANDING.name, system): (1.6, 1.9) for system in _DISTTRAIN},
    **{(GENERATION.name, system): (1.5, 1.9) for system in _DISTTRAIN},
}
"""Published iteration time over BigMac's, from and to, by workload and system."""
LAST_THAT_FITS = {
    **{(workload.name, system): math.inf for workload in WORKLOADS for system in (NESTED, *_DISTTRAIN)},
    (UNDERSTANDING.name, OPTIMUS): 8,
    (GENERATION.name, OPTIMUS): 0,
}
"""Published: the largest batch with which a system does not run out of memory."""


def bench_nested(rounds: int, picture: str = "") -> Iterator[Row]:
    """Simulated steps and memory of both models, microbatches in flight, and steps of real processes.

    picture: path of a picture of the microbatches in flight; none is drawn without one.
    """
    for workload in WORKLOADS:
        for system in _systems(workload):
            for batch in BATCHES:
                yield from _simulated(outcome(system, workload, batch))
        yield from _ratios(workload)
    counted = in_flight.counts()
    for one in counted:
        case = f"in flight, {in_flight.PANELS[one.panel]}, {one.system}: of {one.microbatches}"
        yield _row(case, one.most, "microbatches", _flat(one))
    if picture:
        in_flight.draw(counted, picture)
    for one in replayed(rounds):
        yield from _measured(one)


def _systems(workload: Workload) -> list[System]:
    return [system for system in SYSTEMS if system.generates or not workload.generator]


def _row(case: str, value: float, unit: str, target: Target | None = None) -> Row:
    return Row(bench="nested", case=case, value=value, unit=unit, target=target)


# ---- simulated -------------------------------------------------------------------------------------------------------


def _simulated(one: Outcome) -> Iterator[Row]:
    workload, system = one.workload.name, one.trial.system.name
    case = f"{workload}, batch {one.batch}, {system}"
    yield _row(f"{case}: step, simulated", one.seconds, "s")
    yield _row(f"{case}: memory, simulated", one.memory.total / GB, "GB")
    yield _row(f"{case}: out of memory, simulated", not one.memory.fits, "")
    if (workload, system) in LAST_THAT_FITS:
        out = one.batch > LAST_THAT_FITS[workload, system]
        yield _row(f"{case}: out of memory, published", out, "")


def _ratios(workload: Workload) -> Iterator[Row]:
    """Each system's step over that of nested interleaved 1F1B; steps of Optimus are those with unlimited memory."""
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
    """A system's simulated step over that of nested interleaved 1F1B."""
    (nested,) = (one for one in SYSTEMS if one.name == NESTED)
    steps = [outcome(one, workload, batch, even=even).seconds for one in (system, nested)]
    return steps[0] / steps[1]


MOST_UNITS = {
    (UNDERSTANDING.name, "vision.0"): {NESTED: 3, NESTED_1F1B: 2},
    (GENERATION.name, "vision.0"): {NESTED: 4, NESTED_1F1B: 3},
    (GENERATION.name, "generator.0"): {NESTED: 1, NESTED_1F1B: 1},
}
"""Units in flight of nested schedules, whatever the batch: K of an encoder, which is one more where a generator makes
the LLM run a unit ahead, and one of a generator."""


def _flat(one: in_flight.Count) -> Target | None:
    units = MOST_UNITS.get(one.panel, {}).get(one.system)
    return at_most(units * DEPTH) if units else None


# ---- measured --------------------------------------------------------------------------------------------------------


def _measured(one: Replayed) -> Iterator[Row]:
    case = f"{one.model}, {one.trial.system.name}"
    yield _row(f"{case}: step, simulated", one.trial.timeline.makespan / MS, "ms")
    yield _row(f"{case}: step, measured", one.measured.makespan / MS, "ms")
    yield _row(f"{case}: measured / simulated", one.ratio, "ratio", at_most(1 + MOST_ERROR / 100))


# ---- tables ----------------------------------------------------------------------------------------------------------


def simulated_table(workload: Workload) -> str:
    """Step and memory of every system and batch, and ratios beside published ones, in Markdown."""
    heads = [f"batch {batch}" for batch in BATCHES]
    lines = [
        f"| system | ranks | {' | '.join(heads)} | over nested | even rows | published |",
        "|---|---|" + "---|" * (len(heads) + 3),
    ]
    for system in _systems(workload):
        made = [outcome(system, workload, batch) for batch in BATCHES]
        over = [ratio(system, workload, batch) for batch in BATCHES]
        even = ratio(system, workload, EVEN_BATCH, even=True)
        cells = [system.name, made[-1].trial.layout, *(_cell(one) for one in made)]
        cells += [_range(min(over), max(over)), f"{even:.2f}"]
        cells.append(_range(*PUBLISHED.get((workload.name, system.name), (math.nan, math.nan))))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(one: Outcome) -> str:
    out = "" if one.memory.fits else ", **out**"
    return f"{one.seconds:.2f} s, {one.memory.total / GB:.0f} GB{out}"


def _range(low: float, high: float) -> str:
    if math.isnan(low):
        return ""
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}–{high:.2f}"


def measured_table(found: Sequence[Replayed]) -> str:
    """Steps of real processes beside simulated ones, in Markdown."""
    lines = ["| model | system | ranks | simulated | measured | ratio |", "|---|---|---|---|---|---|"]
    for one in found:
        spans = [f"{span / MS:.0f} ms" for span in (one.trial.timeline.makespan, one.measured.makespan)]
        cells = [one.model, one.trial.system.name, one.trial.layout, *spans, f"{one.ratio:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
