"""Rows and tables of the study `workloads`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from mmjax.bench.rows import Row
from studies.workloads.cases import chosen
from studies.workloads.predicted import Prediction, predictions

GIGA = 1e9
NO_NUMBER = "figure only"


def rows(only: str = "") -> Iterator[Row]:
    """Step, MFU and memory of each workload, and what its paper prints beside the same predicted.

    only: names of papers or configurations, with commas; "" for all.
    """
    for made in predictions(chosen(only)):
        estimate, published = made.estimate, made.workload.published
        yield _row(made, "devices", estimate.candidate.devices, "devices")
        yield _row(made, "step, predicted", estimate.seconds, "s")
        yield _row(made, "MFU, predicted", 100 * (estimate.mfu or 0.0), "%")
        yield _row(made, "memory, predicted", estimate.most / GIGA, "GB")
        if published.memory:
            yield _row(made, f"memory, {published.where}", published.memory, "GB")
        if made.value is None or made.ratio is None:
            continue
        what = _quantity(made)
        yield _row(made, f"{what}, predicted", made.value, "")
        for value in dict.fromkeys((published.low, published.high)):
            yield _row(made, f"{what}, {published.where}", value, "")
        yield _row(made, f"{what}, predicted over published", made.ratio, "ratio")


def _row(made: Prediction, case: str, value: float, unit: str) -> Row:
    return Row(bench="workloads", case=f"{made.workload.name}: {case}", value=float(value), unit=unit)


def _quantity(made: Prediction) -> str:
    base = made.others.get(made.workload.base)
    return made.workload.published.quantity.format(base=base.workload.kind if base else "")


def tables(only: str = "") -> dict[str, str]:
    """The table of docs/workloads.md in Markdown. only: as for `rows`."""
    return {"workloads": "\n".join(_lines(only))}


def _lines(only: str) -> Iterator[str]:
    yield "| paper | workload | devices | layouts | step, s | MFU | GB | published | predicted | ratio |"
    yield "|" + "---|" * 10
    for made in predictions(chosen(only)):
        print(f"{made.workload.name} …", file=sys.stderr, flush=True)
        yield f"| {' | '.join(_cells(made))} |"


def _cells(made: Prediction) -> Iterator[str]:
    workload, estimate = made.workload, made.estimate
    yield workload.paper
    yield f"{workload.name} (`{workload.config}`)"
    yield f"{estimate.candidate.devices} {workload.chip.upper()}s"
    yield "; ".join(f"{name} {_degrees(layout.describe())}" for name, layout in estimate.candidate.layouts.items())
    yield f"{estimate.seconds:.3g}"
    yield f"{estimate.mfu or 0.0:.0%}"
    memory = f"{estimate.most / GIGA:.0f}{'' if made.fits else ' ✗'}"
    yield f"{memory} ({workload.published.memory:g})" if workload.published.memory else memory
    yield _published(made)
    yield "" if made.value is None else _number(made, made.value)
    yield "" if made.ratio is None else f"{made.ratio:.2f}"


def _degrees(text: str) -> str:
    """A layout in words, without its ranks."""
    return text.rpartition(" on rank")[0]


def _published(made: Prediction) -> str:
    published = made.workload.published
    if not published.quantity:
        return f"{NO_NUMBER}, {published.where}"
    ends = "–".join(_number(made, value) for value in dict.fromkeys((published.low, published.high)))
    return f"{_quantity(made)}: {ends} ({published.where})"


def _number(made: Prediction, value: float) -> str:
    return f"{value:.1%}" if made.workload.published.quantity == "MFU" else f"{value:.3g}"
