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
    texts_by_row = {row.name: tuple(_of_row(row)) for row in ROWS}
    texts_by_row |= {ranking.name: tuple(_of_ranking(ranking)) for ranking in RANKINGS}
    return {name: texts for name, texts in texts_by_row.items() if texts}


def memory_contradictions() -> Mapping[str, str]:
    """Contradictions by name of row: the paper prints the same run of H with two peaks of memory."""
    texts_by_row = {}
    for row, twin in permutations(ROWS, 2):
        same = row.workload == twin.workload and _layouts(row.base) == _layouts(twin.base)
        if same and abs(row.base.memory / twin.base.memory - 1) > 0.01:
            texts_by_row[row.name] = f"H keeps {row.base.memory:g} GB here and {twin.base.memory:g} GB in {twin.table}"
    return texts_by_row


def upside_down() -> tuple[str, ...]:
    """Pairs of runs with the same layouts in which the run with less encoder work takes longer."""
    runs = [(row, run) for row in ROWS for run in (row.base, row.compared)]
    texts = []
    for (lighter, slow), (heavier, fast) in permutations(runs, 2):
        sizes = [float(row.encoder.removesuffix("B")) for row in (lighter, heavier)]
        loads = [(size, row.vision) for size, row in zip(sizes, (lighter, heavier), strict=True)]
        no_more = loads[0] != loads[1] and all(a <= b for a, b in zip(*loads, strict=True))
        if no_more and _setting(lighter, slow) == _setting(heavier, fast) and slow.step > LONGER * fast.step:
            longer = (slow.step / fast.step - 1) * 100
            texts.append(
                f"{slow.mode} of {lighter.name} takes {longer:.0f} % longer than {fast.mode} of {heavier.name}"
            )
    return tuple(texts)


def _setting(row: Row, run: MeasuredRun) -> tuple[object, ...]:
    return row.llm, row.tokens, row.batch, run.mode, _layouts(run)


def _layouts(run: MeasuredRun) -> tuple[object, ...]:
    return run.encoder, run.llm


def _of_row(row: Row) -> Iterator[str]:
    sizes_of_h = (row.base.encoder.size * row.base.llm.pp, row.base.llm.size)
    if sizes_of_h != (row.devices[0], row.devices[0]):
        yield f"H is printed on {row.devices[0]} devices, its layouts have {sizes_of_h[0]} and {sizes_of_h[1]}"
    sizes = (row.compared.encoder.size, row.compared.llm.size)
    apart = row.compared.mode == "NC"
    if (sum(sizes) if apart else sizes[0], sum(sizes) if apart else sizes[1]) != (row.devices[1], row.devices[1]):
        yield f"{row.compared.mode} is printed on {row.devices[1]} devices, its layouts have {sizes[0]} and {sizes[1]}"
    if any(row.batch % run.llm.dp for run in (row.base, row.compared)):
        yield f"dp does not divide the batch of {row.batch}"
    if row.microbatches and row.batch != row.microbatches * row.compared.llm.dp:
        yield f"{row.microbatches} microbatches of {row.compared.llm.dp} samples are not {row.batch}"
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
    for mode, mode_gains, devices in (("C", ranking.c, (h, c)), ("NC", ranking.nc, (h, nc))):
        if mode_gains is None or mode_gains.tokens is None or mode_gains.per_device is None:
            continue
        expected = _per_device(mode_gains.tokens, devices)
        if abs(expected - mode_gains.per_device) > POINT:
            words = f"{mode_gains.tokens:+.1f} % of tokens are {expected:+.1f} % a device"
            yield f"{mode}: {words}, not {mode_gains.per_device:+.1f} %"
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
        gains = ranking.c if row.compared.mode == "C" else ranking.nc
        if gains is None:
            continue
        if gains.per_device is not None and row.gain_per_device is not None:
            if abs(gains.per_device - row.gain_per_device) > POINT:
                there = f"{row.gain_per_device:+.1f} in {row.table}"
                yield f"{row.compared.mode} gains {gains.per_device:+.1f} % a device, {there}"
        elif sign(row.gain_of_steps):
            yield f"{row.compared.mode} is on par, but the steps of {row.table} differ by {row.gain_of_steps:+.1f} %"


def _per_device(gain: float, devices: tuple[int, int]) -> float:
    """Percent that a gain of the whole is per device, from the numbers of devices before and after."""
    return ((1 + gain / 100) * devices[0] / devices[1] - 1) * 100
