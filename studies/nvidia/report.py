"""The tables of ``docs/nvidia.md``: predicted beside published figures, row by row."""

from __future__ import annotations

from collections.abc import Iterator

from studies.nvidia.checks import memory_contradictions, upside_down
from studies.nvidia.clock import Reached
from studies.nvidia.predictions import (
    PredictedRow,
    above_the_peak,
    chosen,
    fitted,
    fitted_rows,
    kept_rankings,
    left_out,
    right_modes,
    scores,
)
from studies.nvidia.tables import ON_PAR, RANKINGS, ROWS

FITTED, LEFT_OUT = "\\*", "†"


def tables() -> dict[str, str]:
    """Tables in Markdown by name: "scores", "A2" to "A5", "left out", "above the peak", "upside down"."""
    reached = fitted()
    lines_by_table = {"scores": _scores(reached)}
    lines_by_table |= {table: _table(table, reached) for table in ("A2", "A3", "A4")}
    lines_by_table |= {"A5": _rankings(reached), "left out": _left_out(), "upside down": _upside_down()}
    lines_by_table |= {"above the peak": (f"* {name}: {text}." for name, text in above_the_peak().items())}
    return {name: "\n".join(lines) for name, lines in lines_by_table.items()}


def _scores(reached: Reached) -> Iterator[str]:
    yield "| rows | sign of the gain | if all were said to gain | correlation of gains | step | gain | memory |"
    yield "|---|---|---|---|---|---|---|"
    for name, s in scores(reached).items():
        medians = f"{s.step:.0f} % | {s.gain:.1f} points | {s.memory:.0f} %"
        yield f"| {name} | {s.signs} of {s.rows} | {s.always} | {s.correlation:.2f} | {medians} |"
    yield f"| A5, best mode | {right_modes(reached)} of {len(kept_rankings())} | | | | | |"


def _table(table: str, reached: Reached) -> Iterator[str]:
    mode = "NC" if table == "A4" else "C"
    heads = ("step of H, s", f"step of {mode}, s", "gain, %", "sign", "GB of H", f"GB of {mode}")
    yield "| published → predicted | " + " | ".join(heads) + " |"
    yield "|---" * (len(heads) + 1) + "|"
    fitted_names = {row.name for row in fitted_rows()}
    for row in ROWS:
        if row.table != table:
            continue
        predicted_row = PredictedRow(row=row, reached=reached)
        mark = LEFT_OUT if row.name in left_out() else FITTED if row.name in fitted_names else ""
        steps = [
            _cell(run.step, error, 2)
            for (run, _), error in zip(predicted_row.runs, predicted_row.step_errors, strict=True)
        ]
        memory = [
            _cell(run.memory, error, 1)
            for (run, _), error in zip(predicted_row.runs, predicted_row.memory_errors, strict=True)
        ]
        gain = f"{_gain(row.gain)} → {predicted_row.gain:+.1f}"
        cells = (*steps, gain, "right" if predicted_row.same_sign else "wrong", *memory)
        yield f"| {row.name.removeprefix(table + ' ')}{mark} | {' | '.join(cells)} |"


def _gain(percent: float | None) -> str:
    return ON_PAR if percent is None else f"{percent:+.1f}"


def _cell(published: float, error: float, digits: int) -> str:
    """A cell: the published figure, the predicted one, and the error in percent."""
    return f"{published:.{digits}f} → {published * (1 + error / 100):.{digits}f} ({error:+.0f} %)"


def _rankings(reached: Reached) -> Iterator[str]:
    yield "| published → predicted | C, % a device | NC, % a device | NC's LLM | best |"
    yield "|---|---|---|---|---|"
    for ranking in RANKINGS:
        prediction = chosen(ranking, reached)
        mark = LEFT_OUT if ranking.name in left_out() else ""
        was = _gain(ranking.c.per_device) if ranking.c else "C is H"
        best = f"{'/'.join(ranking.best)} → {prediction.best}: {'right' if prediction.right else 'wrong'}"
        gains = f"{was} → {prediction.c:+.1f} | {ranking.nc.both[1]:+.1f} → {prediction.nc:+.1f}"
        layout = f"{prediction.layout.tp}/{prediction.layout.cp}/{prediction.layout.pp}/{prediction.layout.dp}"
        yield f"| {ranking.name.removeprefix('A5 ')}{mark} | {gains} | {layout} | {best} |"


def _left_out() -> Iterator[str]:
    for name, texts in left_out().items():
        yield f"* {name}: {'; '.join(texts)}."
    for name, text in memory_contradictions().items():
        yield f"* {name}, of memory alone: {text}."


def _upside_down() -> Iterator[str]:
    for text in upside_down():
        yield f"* {text}."
