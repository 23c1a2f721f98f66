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
    """Step, MFU and memory of each workload, and what its paper prints beside the same predicted; Figure 8.

    Args:
      only: names of papers or configurations, with commas; "" for all, and Figure 8.
      dry_run: whether the memory of a dry run is added.
      plan: whether the step of the best plan is added, which is searched.
    """
    for made in predictions(chosen(only)):
        estimate, published = made.estimate, made.workload.published
        yield _row(made, "devices", estimate.candidate.devices, "devices")
        yield _row(made, "step, predicted", estimate.seconds, "s")
        yield _row(made, "MFU, predicted", 100 * (estimate.mfu or 0.0), "%")
        yield _row(made, "memory, predicted", estimate.most / GIGA, "GB")
        if dry_run:
            yield _row(made, "memory, dry run", made.dry_run / GIGA, "GB")
        if published.memory:
            yield _row(made, f"memory, {published.where}", published.memory, "GB")
        yield from _rows_of_quantity(made)
        if plan:
            words = made.planned.candidate.describe()
            yield _row(made, f"step, planned: {made.planned.candidate.mode}, {words}", made.planned.seconds, "s")
    if not only:
        yield from bridge.rows(_bridged())


def _bridged() -> dict[str, float]:
    """Seconds of a step of Figure 8's model, as estimated, by mode."""
    return {made.workload.kind: made.estimate.seconds for made in predictions(chosen("nvidia_3b_70b"))}


def _rows_of_quantity(made: Prediction) -> Iterator[Row]:
    published, what = made.workload.published, _quantity(made)
    if made.value is None or made.ratio is None:
        return
    yield _row(made, f"{what}, predicted", made.value, "")
    for value in dict.fromkeys((published.low, published.high)):
        yield _row(made, f"{what}, {published.where}", value, "")
    yield _row(made, f"{what}, predicted over published", made.ratio, "ratio")


def _row(made: Prediction, case: str, value: float, unit: str) -> Row:
    return Row(bench="workloads", case=f"{made.workload.name}: {case}", value=float(value), unit=unit)


def _quantity(made: Prediction) -> str:
    base, quantity = made.others.get(made.workload.base), made.workload.published.quantity
    return (quantity or "").format(base=base.workload.kind if base else "")


def tables(only: str = "", dry_run: bool = False, plan: bool = False) -> dict[str, str]:
    """The tables of docs/workloads.md in Markdown, by name; arguments as for `rows`."""
    made = {"workloads": "\n".join(_lines(only, dry_run=dry_run, plan=plan))}
    return made if only else {**made, "Figure 8": "\n".join(bridge.table(_bridged()))}


def _lines(only: str, *, dry_run: bool, plan: bool) -> Iterator[str]:
    heads = ["paper", "workload", "devices", "layouts", "step, s", "MFU", "GB", *["dry run, GB"][: int(dry_run)]]
    heads += ["published", "predicted", "ratio", *["best plan"][: int(plan)]]
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for made in predictions(chosen(only)):
        yield f"| {' | '.join(_cells(made, dry_run=dry_run, plan=plan))} |"


def _cells(made: Prediction, *, dry_run: bool, plan: bool) -> Iterator[str]:
    workload, estimate = made.workload, made.estimate
    yield workload.paper
    yield f"{workload.name} (`{workload.config.removeprefix('paper/')}`)"
    yield f"{estimate.candidate.devices} {workload.chip.upper()}s"
    yield "; ".join(f"{name} {_degrees(layout)}" for name, layout in estimate.candidate.layouts.items())
    yield f"{estimate.seconds:.3g}"
    yield f"{estimate.mfu or 0.0:.0%}"
    memory = f"{estimate.most / GIGA:.0f}{'' if made.fits else ' ✗'}"
    yield f"{memory} ({workload.published.memory:g})" if workload.published.memory else memory
    if dry_run:
        yield f"{made.dry_run / GIGA:.0f}"
    yield _published(made)
    yield "" if made.value is None else _number(made, made.value)
    yield "" if made.ratio is None else f"{made.ratio:.2f}"
    if plan:
        yield f"{made.planned.seconds:.3g} s, {made.planned.candidate.describe()}"


def _degrees(layout: Layout) -> str:
    """A layout in words, without its ranks."""
    return layout.describe().rpartition(" on rank")[0]


def _published(made: Prediction) -> str:
    published = made.workload.published
    if not published.quantity:
        return f"{NO_NUMBER}, {published.where}"
    ends = "–".join(_number(made, value) for value in dict.fromkeys((published.low, published.high)))
    return f"{_quantity(made)}: {ends} ({published.where})"


def _number(made: Prediction, value: float) -> str:
    return f"{value:.1%}" if made.workload.published.quantity is Quantity.MFU else f"{value:.3g}"
