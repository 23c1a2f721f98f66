"""Rows and tables of the study `cornstarch`."""

from __future__ import annotations

from collections.abc import Iterator

from mmjax.bench.rows import Row
from studies.cornstarch import frozen
from studies.cornstarch.pairs import CUTS, SOURCES, Prediction, predictions
from studies.cornstarch.tables import END_TO_END, PAIRS

SAME = 0.02
"""Published differences up to this are called small: Table 8 has 1.33 to 1.37 where one LLM sets one pace."""
TABLES = (2, 7, 8)
EVEN = CUTS[0]


def rows() -> Iterator[Row]:
    """Published and predicted ratios of throughput."""
    yield from frozen.rows()
    for source in SOURCES:
        for cut in CUTS:
            for one in (*predictions(source, cut), Prediction(pair=END_TO_END, source=source, cut=cut)):
                yield _row(one, f"simulated, {source}, {cut}", one.ratio)
                if cut == EVEN and one.pair in PAIRS:
                    yield Row(
                        bench="cornstarch",
                        case=f"modality / replicated, {one.pair.name}: simulated, {source}, {cut}",
                        value=one.over_replicated,
                        unit="ratio",
                    )
    for one in predictions("datasheet", EVEN):
        yield _row(one, "published", one.pair.published)


def _row(one: Prediction, what: str, value: float) -> Row:
    case = f"modality / colocated, Table {one.pair.table}, {one.pair.name}: {what}"
    return Row(bench="cornstarch", case=case, value=value, unit="ratio")


def tables() -> dict[str, str]:
    """The tables of ``docs/planner.md`` and ``docs/cornstarch.md`` in Markdown, by name."""
    return {**frozen.tables(), "signs": _signs(), "modality parallelism": _pairs()}


def _signs() -> str:
    """How often the faster way is the published one."""
    lines = ["| times, layers | Table 2 | Table 7 | Table 8 | all | further than 2 % apart | mean error |"]
    lines.append("|---" * 7 + "|")
    for source in SOURCES:
        for cut in CUTS:
            found = predictions(source, cut)
            groups = [[one for one in found if one.pair.table == table] for table in TABLES]
            far = [one for one in found if abs(one.pair.published - 1) > SAME]
            counts = [f"{sum(one.agrees for one in group)} of {len(group)}" for group in (*groups, found, far)]
            error = sum(abs(one.error) for one in found) / len(found)
            lines.append(f"| {source}, {cut} | {' | '.join(counts)} | {error:.1%} |")
    return "\n".join(lines)


def _pairs() -> str:
    """Each pair, with even layers."""
    lines = [
        "| Table | | stages: colocated | modality | published | by datasheet | error | by stage times | error | "
        "replicated, by stage times |",
        "|---" * 10 + "|",
    ]
    for sheet, timed in zip(*(predictions(source, EVEN) for source in SOURCES), strict=True):
        pair = sheet.pair
        cells = [str(pair.table), pair.name, *("+".join(map(str, own)) for own in (pair.colocated, pair.modality))]
        cells.append(f"{pair.published:.3f}")
        for one in (sheet, timed):
            cells += [f"{one.ratio:.3f}{'' if one.agrees else ' ✗'}", f"{one.error:+.0%}"]
        lines.append(f"| {' | '.join(cells)} | {timed.over_replicated:.2f} |")
    return "\n".join(lines)
