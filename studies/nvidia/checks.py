"""Contradictions in the published figures of `tables`, found by arithmetic and not by hand.

`contradictions` names rows that no model can agree with, such as a row that prints two different values of one gain.
`upside_down` names pairs of runs with the same layouts in which less work takes longer. Both runs may be right, but
then they differ in a setting that the tables do not print.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations

from studies.nvidia.tables import RANKINGS, ROWS, MeasuredRun, ModeRanking, Row

POINT = 0.5
"""Percentage points within which gains and times agree: rates and times are separate medians, both rounded."""
DEAD_ZONE = 2.0
"""Percent within which a gain counts as none; a gain that is called on par must lie in it."""
REST = 0.2
"""Share by which the rest of a step may lower a gain where only forward and backward are timed."""
LONGER = 1.05
"""How many times as long a step with less work may take before it is upside down."""


def sign(gain: float) -> int:
    """-1, 0 or 1: 0 for a gain in percent that lies in the dead zone."""
    return 0 if abs(gain) <= DEAD_ZONE else 1 if gain > 0 else -1


def contradictions() -> Mapping[str, tuple[str, ...]]:
    """Contradictions by row of Tables A2 to A5, for rows that have any."""
    found = {row.name: tuple(_of_row(row)) for row in ROWS}
    found |= {ranking.name: tuple(_of_ranking(ranking)) for ranking in RANKINGS}
    return {name: texts for name, texts in found.items() if texts}


def memory_contradictions() -> Mapping[str, str]:
    """Contradictions by name of row: the paper prints the same run of H with two peaks of memory."""
    found = {}
    for one, two in permutations(ROWS, 2):
        same = one.workload == two.workload and _layouts(one.base) == _layouts(two.base)
        if same and abs(one.base.memory / two.base.memory - 1) > 0.01:
            found[one.name] = f"H keeps {one.base.memory:g} GB here and {two.base.memory:g} GB in {two.table}"
    return found


def upside_down() -> tuple[str, ...]:
    """Pairs of runs with the same layouts in which the run with less encoder work takes longer."""
    runs = [(row, run) for row in ROWS for run in (row.base, row.other)]
    found = []
    for (less, slow), (more, fast) in permutations(runs, 2):
        sizes = [float(row.encoder.removesuffix("B")) for row in (less, more)]
        loads = [(size, row.vision) for size, row in zip(sizes, (less, more), strict=True)]
        no_more = loads[0] != loads[1] and all(a <= b for a, b in zip(*loads, strict=True))
        if no_more and _setting(less, slow) == _setting(more, fast) and slow.step > LONGER * fast.step:
            longer = (slow.step / fast.step - 1) * 100
            found.append(f"{slow.mode} of {less.name} takes {longer:.0f} % longer than {fast.mode} of {more.name}")
    return tuple(found)


def _setting(row: Row, run: MeasuredRun) -> tuple[object, ...]:
    return row.llm, row.tokens, row.batch, run.mode, _layouts(run)


def _layouts(run: MeasuredRun) -> tuple[object, ...]:
    return run.encoder, run.llm


def _of_row(row: Row) -> Iterator[str]:
    own = (row.base.encoder.size * row.base.llm.pp, row.base.llm.size)
    if own != (row.devices[0], row.devices[0]):
        yield f"H is printed on {row.devices[0]} devices, its layouts have {own[0]} and {own[1]}"
    sizes = (row.other.encoder.size, row.other.llm.size)
    apart = row.other.mode == "NC"
    if (sum(sizes) if apart else sizes[0], sum(sizes) if apart else sizes[1]) != (row.devices[1], row.devices[1]):
        yield f"{row.other.mode} is printed on {row.devices[1]} devices, its layouts have {sizes[0]} and {sizes[1]}"
    if any(row.batch % run.llm.dp for run in (row.base, row.other)):
        yield f"dp does not divide the batch of {row.batch}"
    if row.microbatches and row.batch != row.microbatches * row.other.llm.dp:
        yield f"{row.microbatches} microbatches of {row.other.llm.dp} samples are not {row.batch}"
    yield from _of_gains(row)


def _of_gains(row: Row) -> Iterator[str]:
    by_steps = row.gain_of_steps
    if row.gain is None:
        if sign(by_steps):
            yield f"called on par, but its steps differ by {by_steps:+.1f} %"
    else:
        # The steps of A3 end with the backward in both modes, so the gain of the whole step is a little smaller.
        low, high = sorted((by_steps * (1 - REST if row.table == "A3" else 1), by_steps))
        if not low - POINT <= row.gain <= high + POINT:
            yield f"a gain of {row.gain:+.1f} %, but its steps make {by_steps:+.1f} %"
    if row.gain is not None and row.gain_per_device is not None:
        expected = _per_device(row.gain, row.devices)
        if abs(expected - row.gain_per_device) > POINT:
            yield f"{row.gain:+.1f} % of tokens are {expected:+.1f} % a device, not {row.gain_per_device:+.1f} %"


def _of_ranking(ranking: ModeRanking) -> Iterator[str]:
    gains = {"C": ranking.c, "NC": ranking.nc}
    h, c, nc = ranking.devices
    for mode, own, devices in (("C", ranking.c, (h, c)), ("NC", ranking.nc, (h, nc))):
        if own is None or own.tokens is None or own.per_device is None:
            continue
        expected = _per_device(own.tokens, devices)
        if abs(expected - own.per_device) > POINT:
            yield f"{mode}: {own.tokens:+.1f} % of tokens are {expected:+.1f} % a device, not {own.per_device:+.1f} %"
    for at, (ahead, behind, printed) in enumerate(
        zip(ranking.c.both if ranking.c else (0.0, 0.0), ranking.nc.both, ranking.c_over_nc.both, strict=True)
    ):
        expected = ((100 + ahead) / (100 + behind) - 1) * 100
        if abs(expected - printed) > POINT:
            yield f"C over NC is {printed:+.1f} %, its gains make {expected:+.1f} % ({('tokens', 'a device')[at]})"
    best = max(gains, key=lambda mode: (gains[mode].both if gains[mode] else (0.0, 0.0))[1])
    if best not in ranking.best:
        yield f"{best} gains most and {ranking.best} is called best"
    yield from _beside_other_tables(ranking)


def _beside_other_tables(ranking: ModeRanking) -> Iterator[str]:
    for row in ranking.rows:
        own = ranking.c if row.other.mode == "C" else ranking.nc
        if own is None:
            continue
        if own.per_device is not None and row.gain_per_device is not None:
            if abs(own.per_device - row.gain_per_device) > POINT:
                there = f"{row.gain_per_device:+.1f} in {row.table}"
                yield f"{row.other.mode} gains {own.per_device:+.1f} % a device, {there}"
        elif sign(row.gain_of_steps):
            yield f"{row.other.mode} is on par, but the steps of {row.table} differ by {row.gain_of_steps:+.1f} %"


def _per_device(gain: float, devices: tuple[int, int]) -> float:
    """Percent that a gain of the whole is per device, from the numbers of devices before and after."""
    return ((1 + gain / 100) * devices[0] / devices[1] - 1) * 100
