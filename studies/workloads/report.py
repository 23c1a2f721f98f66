"""Rows and tables of the study `workloads`."""

from __future__ import annotations

from collections.abc import Iterator

from mmjax.bench.rows import Row
from mmjax.mesh.layout import Layout
from studies.workloads import bridge
from studies.workloads.cases import Quantity, chosen
from studies.workloads.predicted import Prediction, predictions

GIGA = 1e9
NO_NUMBER = "figure only"


def rows(only: str = "", dry_run: bool = False, plan: bool = False) -> Iterator[Row]:
    """Step, MFU and memory of each workload, its paper's figures beside predictions, and Figure 8.

    Args:
      only: names of papers or configurations, with commas; "" for all, and Figure 8.
      dry_run: whether the memory of a dry run is added.
      plan: whether the step of the best plan is added, which is searched.
    """
    for prediction in predictions(chosen(only)):
        estimate, published = prediction.estimate, prediction.workload.published
        yield _row(prediction, "devices", estimate.candidate.devices, "devices")
        yield _row(prediction, "step, predicted", estimate.seconds, "s")
        yield _row(prediction, "MFU, predicted", 100 * (estimate.mfu or 0.0), "%")
        yield _row(prediction, "memory, predicted", estimate.most / GIGA, "GB")
        if dry_run:
            yield _row(prediction, "memory, dry run", prediction.dry_run / GIGA, "GB")
        if published.memory:
            yield _row(prediction, f"memory, {published.where}", published.memory, "GB")
        yield from _rows_of_quantity(prediction)
        if plan:
            words = prediction.planned.candidate.describe()
            yield _row(
                prediction,
                f"step, planned: {prediction.planned.candidate.mode}, {words}",
                prediction.planned.seconds,
                "s",
            )
    if not only:
        yield from bridge.rows(_bridged())


def _bridged() -> dict[str, float]:
    """Seconds of a step of Figure 8's model, as estimated, by mode."""
    return {
        prediction.workload.kind: prediction.estimate.seconds for prediction in predictions(chosen("nvidia_3b_70b"))
    }


def _rows_of_quantity(prediction: Prediction) -> Iterator[Row]:
    published, quantity = prediction.workload.published, _quantity(prediction)
    if prediction.value is None or prediction.ratio is None:
        return
    yield _row(prediction, f"{quantity}, predicted", prediction.value, "")
    for value in dict.fromkeys((published.low, published.high)):
        yield _row(prediction, f"{quantity}, {published.where}", value, "")
    yield _row(prediction, f"{quantity}, predicted over published", prediction.ratio, "ratio")


def _row(prediction: Prediction, case: str, value: float, unit: str) -> Row:
    return Row(bench="workloads", case=f"{prediction.workload.name}: {case}", value=float(value), unit=unit)


def _quantity(prediction: Prediction) -> str:
    base, quantity = prediction.by_config.get(prediction.workload.base), prediction.workload.published.quantity
    return (quantity or "").format(base=base.workload.kind if base else "")


def tables(only: str = "", dry_run: bool = False, plan: bool = False) -> dict[str, str]:
    """The tables of docs/workloads.md in Markdown, by name; arguments as for `rows`."""
    texts = {"workloads": "\n".join(_lines(only, dry_run=dry_run, plan=plan))}
    return texts if only else {**texts, "Figure 8": "\n".join(bridge.table(_bridged()))}


def _lines(only: str, *, dry_run: bool, plan: bool) -> Iterator[str]:
    heads = ["paper", "workload", "devices", "layouts", "step, s", "MFU", "GB", *["dry run, GB"][: int(dry_run)]]
    heads += ["published", "predicted", "ratio", *["best plan"][: int(plan)]]
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for prediction in predictions(chosen(only)):
        yield f"| {' | '.join(_cells(prediction, dry_run=dry_run, plan=plan))} |"


def _cells(prediction: Prediction, *, dry_run: bool, plan: bool) -> Iterator[str]:
    workload, estimate = prediction.workload, prediction.estimate
    yield workload.paper
    yield f"{workload.name} (`{workload.config.removeprefix('paper/')}`)"
    yield f"{estimate.candidate.devices} {workload.chip.upper()}s"
    yield "; ".join(f"{name} {_degrees(layout)}" for name, layout in estimate.candidate.layouts.items())
    yield f"{estimate.seconds:.3g}"
    yield f"{estimate.mfu or 0.0:.0%}"
    memory = f"{estimate.most / GIGA:.0f}{'' if prediction.fits else ' ✗'}"
    yield f"{memory} ({workload.published.memory:g})" if workload.published.memory else memory
    if dry_run:
        yield f"{prediction.dry_run / GIGA:.0f}"
    yield _published(prediction)
    yield "" if prediction.value is None else _number(prediction, prediction.value)
    yield "" if prediction.ratio is None else f"{prediction.ratio:.2f}"
    if plan:
        yield f"{prediction.planned.seconds:.3g} s, {prediction.planned.candidate.describe()}"


def _degrees(layout: Layout) -> str:
    """A layout in words, without its ranks."""
    return layout.describe().rpartition(" on rank")[0]


def _published(prediction: Prediction) -> str:
    published = prediction.workload.published
    if not published.quantity:
        return f"{NO_NUMBER}, {published.where}"
    ends = "–".join(_number(prediction, value) for value in dict.fromkeys((published.low, published.high)))
    return f"{_quantity(prediction)}: {ends} ({published.where})"


def _number(prediction: Prediction, value: float) -> str:
    return f"{value:.1%}" if prediction.workload.published.quantity is Quantity.MFU else f"{value:.3g}"
