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
            for prediction in (*predictions(source, cut), Prediction(pair=END_TO_END, source=source, cut=cut)):
                yield _row(prediction, f"simulated, {source}, {cut}", prediction.ratio)
                if cut == EVEN and prediction.pair in PAIRS:
                    yield Row(
                        bench="cornstarch",
                        case=f"modality / replicated, {prediction.pair.name}: simulated, {source}, {cut}",
                        value=prediction.over_replicated,
                        unit="ratio",
                    )
    for prediction in predictions("datasheet", EVEN):
        yield _row(prediction, "published", prediction.pair.published)


def _row(prediction: Prediction, quantity: str, value: float) -> Row:
    case = f"modality / colocated, Table {prediction.pair.table}, {prediction.pair.name}: {quantity}"
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
            predicted = predictions(source, cut)
            groups = [[prediction for prediction in predicted if prediction.pair.table == table] for table in TABLES]
            far = [prediction for prediction in predicted if abs(prediction.pair.published - 1) > SAME]
            counts = [
                f"{sum(prediction.agrees for prediction in group)} of {len(group)}"
                for group in (*groups, predicted, far)
            ]
            error = sum(abs(prediction.error) for prediction in predicted) / len(predicted)
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
        cells = [
            str(pair.table),
            pair.name,
            *("+".join(map(str, stages)) for stages in (pair.colocated, pair.modality)),
        ]
        cells.append(f"{pair.published:.3f}")
        for prediction in (sheet, timed):
            cells += [f"{prediction.ratio:.3f}{'' if prediction.agrees else ' ✗'}", f"{prediction.error:+.0%}"]
        lines.append(f"| {' | '.join(cells)} | {timed.over_replicated:.2f} |")
    return "\n".join(lines)
