"""Checking a schedule before anything runs it, whoever made it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from mmjax.schedule.graph import GraphError
from mmjax.schedule.ops import Op, Schedule, step_ops


class ScheduleError(ValueError):
    """A schedule that must not run; one line that names the op at fault."""


@dataclass(frozen=True, kw_only=True)
class ScheduleReport:
    """Figures of a valid schedule.

    Attributes:
      ops: number of ops.
      in_flight: by stage, the most microbatches in flight at any place of the order.
      residual_bytes: by stage, the most bytes that each of its devices holds for these; empty where `validate` was not
        told the bytes of a microbatch.
    """

    ops: int
    in_flight: dict[str, int]
    residual_bytes: dict[str, int] = field(default_factory=dict)


def validate(
    schedule: Schedule, residuals: Mapping[str, int] | None = None, deferred: Mapping[str, int] | None = None
) -> ScheduleReport:
    """Refuse a schedule that would give wrong results, deadlock or need more memory than it promises.

    It checks that the schedule has exactly the ops of the step, each once; that dependencies precede users; that F, B
    and W of a stage follow the order of microbatches; and that in-flight microbatches stay within `schedule.in_flight`.

    This also rules out deadlocks, even with rendezvous moves. Ranks run their ops in one total order, so any two agree
    on the order of the ops they share, and the first unfinished op in that order can always run. Raises ScheduleError.

    residuals: by stage, the bytes that a device keeps from a microbatch's F to its B (see `memory.residual_bytes`).
    deferred: the same from B to W, of split stages (see `memory.deferred_bytes`).
    """
    _check_complete(schedule)
    _check_order(schedule)
    _check_microbatches(schedule)
    in_flight = _check_in_flight(schedule)
    held = _held_bytes(schedule, residuals or {}, deferred or {})
    return ScheduleReport(ops=len(schedule.ops), in_flight=in_flight, residual_bytes=held)


def _held_bytes(schedule: Schedule, residuals: Mapping[str, int], deferred: Mapping[str, int]) -> dict[str, int]:
    """For each stage, the most bytes it holds after any op.

    A microbatch holds `residuals` from F to B, and `deferred` from B to W.
    """
    held, most = dict.fromkeys(residuals, 0), dict.fromkeys(residuals, 0)
    for op in schedule.ops:
        if op.stage in residuals and op.kind in ("F", "B", "W"):
            kept, later = residuals[op.stage], deferred.get(op.stage, 0)
            held[op.stage] += {"F": kept, "B": later - kept, "W": -later}[op.kind]
            most[op.stage] = max(most[op.stage], held[op.stage])
    return most


def _check_complete(schedule: Schedule) -> None:
    expected = dict.fromkeys(step_ops(schedule.graph, schedule.microbatches, schedule.window))
    counts = Counter(schedule.ops)
    for op, count in counts.items():
        if op not in expected:
            raise ScheduleError(f"{op} ({_known(schedule, op)}) is no op of this step: remove it")
        if count > 1:
            raise ScheduleError(f"{op} is there {count} times: keep one")
    for op in expected:
        if op not in counts:
            raise ScheduleError(f"{op} is missing: add it after what it depends on")


def _known(schedule: Schedule, op: Op) -> str:
    """Why an op could be unexpected: a name that the graph lacks, else its stage."""
    try:
        schedule.graph.edge(op.edge) if op.edge else schedule.graph.stage(op.stage)
    except GraphError as error:
        return str(error)
    return f"on stage {op.stage!r}, of {schedule.microbatches} microbatches"


def _check_order(schedule: Schedule) -> None:
    place = {op: i for i, op in enumerate(schedule.ops)}
    for op, i in place.items():
        for dependency in schedule.dependencies(op):
            if place[dependency] > i:
                raise ScheduleError(f"{op} (op {i}) precedes {dependency} (op {place[dependency]}), which it needs")
        for awaited in schedule.waits.get(op, ()):
            if place.get(awaited, len(place)) > i:
                raise ScheduleError(f"{op} (op {i}) precedes {awaited}, which {schedule.name} lets it wait for")


def _check_microbatches(schedule: Schedule) -> None:
    due: Counter[tuple[str, str]] = Counter()
    for op in schedule.ops:
        if op.kind in ("F", "B", "W"):
            if op.microbatch != due[op.kind, op.stage]:
                raise ScheduleError(f"{op} comes where microbatch {due[op.kind, op.stage]} is due: keep them in order")
            due[op.kind, op.stage] += 1


def _check_in_flight(schedule: Schedule) -> dict[str, int]:
    graph = schedule.graph
    split = {stage.name for stage in graph.stages if stage.split}
    forward = dict.fromkeys((stage.name for stage in graph.stages), 0)
    backward = dict(forward)
    peaks = dict(forward)
    for op in schedule.ops:
        if op.kind == ("W" if op.stage in split else "B"):
            backward[op.stage] += 1
        if op.kind != "F":
            continue
        forward[op.stage] += 1
        consumers = [edge.dst for edge in graph.out_edges(op.stage)]
        # F and B are in order, so counts are enough; a sink without backward is done when it has run.
        done = min((forward[c] for c in consumers), default=forward[op.stage] - 1)
        live = forward[op.stage] - (backward[op.stage] if graph.stage(op.stage).backward else done)
        peaks[op.stage] = max(peaks[op.stage], live)
        if live > schedule.bound(op.stage):
            raise ScheduleError(f"{op} is in-flight microbatch number {live}: {schedule.name} promises"
                                f" {schedule.bound(op.stage)} of stage {op.stage!r}")  # fmt: skip
    return peaks
