"""Checking a schedule before anything runs it, whoever made it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from mmjax.schedule.graph import GraphError, StageGraph
from mmjax.schedule.ops import MOST_UNSTASHED, STASH_COPIES, Op, Schedule, step_ops


class ScheduleError(ValueError):
    """A schedule that must not run; one line that names the op at fault."""


@dataclass(frozen=True, kw_only=True)
class ScheduleReport:
    """Figures of a valid schedule.

    Attributes:
      ops: number of ops.
      in_flight: by stage, the most microbatches in flight at any place of the order.
      residual_bytes: by stage, the most bytes that each of its devices holds for these; empty where `validate` got no
        bytes of a microbatch.
    """

    ops: int
    in_flight: dict[str, int]
    residual_bytes: dict[str, int] = field(default_factory=dict)


def validate(
    schedule: Schedule, residuals: Mapping[str, int] | None = None, deferred: Mapping[str, int] | None = None
) -> ScheduleReport:
    """Refuse a schedule that would give wrong results, deadlock or need more memory than it promises.

    It checks that the schedule has exactly the ops of the step, each once; that dependencies precede users; that F, B
    and W of a stage's lane follow the order of microbatches; that in-flight microbatches stay within
    `schedule.in_flight`; and that at most `MOST_UNSTASHED` microbatches of a stashing lane are on its devices.

    This also rules out deadlocks, even with rendezvous moves. Ranks run their ops in one total order, so any two agree
    on the order of the ops they share, and the first unfinished op in that order can always run. Raises ScheduleError.

    schedule: the ops of a step in order, as `make_schedule("1f1b", graph, 8, costs)` makes it.
    residuals: by stage ("llm.0"), the bytes that a device keeps from a microbatch's F to its B, as `residual_bytes` of
      `mmjax.pipeline.memory` gives them; None gives no bytes in the report.
    deferred: by split stage, the bytes that a device keeps from B to W, as `deferred_bytes` gives them.
    """
    _check_complete(schedule)
    _check_order(schedule)
    _check_microbatches(schedule)
    in_flight = _check_in_flight(schedule)
    _check_stashes(schedule)
    peaks = _peak_bytes(schedule, residuals or {}, deferred or {})
    return ScheduleReport(ops=len(schedule.ops), in_flight=in_flight, residual_bytes=peaks)


def _peak_bytes(schedule: Schedule, residuals: Mapping[str, int], deferred: Mapping[str, int]) -> dict[str, int]:
    """For each stage, the most bytes that it, or the fullest of its lanes, holds on its devices after any op.

    A microbatch holds `residuals` from F to B, but not while they are stashed, and `deferred` from B to W.
    """
    live, peaks = Counter[tuple[str, int]](), dict.fromkeys(residuals, 0)
    for op in schedule.ops:
        if op.stage in residuals and op.kind in ("F", "B", "W", *STASH_COPIES):
            for_b, for_w = residuals[op.stage], deferred.get(op.stage, 0)
            lane = op.stage, schedule.graph.stage(op.stage).lane(op.microbatch)
            live[lane] += {"F": for_b, "stash": -for_b, "unstash": for_b, "B": for_w - for_b, "W": -for_w}[op.kind]
            peaks[op.stage] = max(peaks[op.stage], live[lane])
    return peaks


def _check_complete(schedule: Schedule) -> None:
    ops = step_ops(schedule.graph, schedule.microbatches, schedule.window)
    expected = dict.fromkeys(op for op in ops if op not in schedule.skipped_gathers)
    counts = Counter(schedule.ops)
    for op, count in counts.items():
        if op not in expected:
            raise ScheduleError(f"{op} ({_why_unexpected(schedule, op)}) is no op of this step: remove it")
        if count > 1:
            raise ScheduleError(f"{op} is there {count} times: keep one")
    for op in expected:
        if op not in counts:
            raise ScheduleError(f"{op} is missing: add it after what it depends on")


def _why_unexpected(schedule: Schedule, op: Op) -> str:
    """A reason why an op could be unexpected: a name that the graph lacks, or else its stage."""
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
    ran: Counter[tuple[str, str, int]] = Counter()
    for op in schedule.ops:
        if op.kind in ("F", "B", "W"):
            node = schedule.graph.stage(op.stage)
            lane = node.lane(op.microbatch)
            due = lane + ran[op.kind, op.stage, lane] * node.lanes * node.microbatches
            if op.microbatch != due:
                raise ScheduleError(f"{op} comes where microbatch {due} is due: keep them in order")
            ran[op.kind, op.stage, lane] += 1


def _check_in_flight(schedule: Schedule) -> dict[str, int]:
    graph = schedule.graph
    live: dict[str, set[int]] = {stage.name: set() for stage in graph.stages}
    peaks = dict.fromkeys(live, 0)
    consumers: dict[tuple[str, int], int] = {}  # by stage and microbatch, consumers that have not run
    for op in schedule.ops:
        if op.kind not in ("F", "B", "W"):
            continue
        together = graph.stage(op.stage).together(op.microbatch, schedule.microbatches)
        if op.kind == "F":
            for microbatch in together:
                _start_forward(graph, live, consumers, op.stage, microbatch)
            peaks[op.stage] = max(peaks[op.stage], len(live[op.stage]))
            if len(live[op.stage]) > schedule.bound(op.stage):
                raise ScheduleError(
                    f"{op} is in-flight microbatch number {len(live[op.stage])}: {schedule.name} promises"
                    f" {schedule.bound(op.stage)} of stage {op.stage!r}"
                )
            if not graph.stage(op.stage).backward and not graph.out_edges(op.stage):
                live[op.stage].difference_update(together)  # a sink without backward is done when it has run
        elif op.kind == ("W" if graph.stage(op.stage).split else "B"):
            live[op.stage].difference_update(together)
    return peaks


def _check_stashes(schedule: Schedule) -> None:
    """Refuse a schedule in which a stashing lane has more than `MOST_UNSTASHED` microbatches on its devices."""
    unstashed: Counter[str] = Counter()
    for op in schedule.ops:
        if op.kind in ("F", "B", *STASH_COPIES) and schedule.graph.stage(op.stage).stashes:
            lane = schedule.graph.stage(op.stage).lane_name(op.microbatch)
            unstashed[lane] += 1 if op.kind in ("F", "unstash") else -1
            if unstashed[lane] > MOST_UNSTASHED:
                raise ScheduleError(
                    f"{op} leaves residuals of {unstashed[lane]} microbatches on the devices of {lane!r}: stash to have"
                    f" at most {MOST_UNSTASHED} there"
                )


def _start_forward(
    graph: StageGraph,
    live: dict[str, set[int]],
    consumers: dict[tuple[str, int], int],
    stage: str,
    microbatch: int,
) -> None:
    """Count a microbatch of a forward as in flight in its stage.

    It is no longer in flight in a source without backward if this was the source's last consumer.
    """
    live[stage].add(microbatch)
    consumers[stage, microbatch] = len(graph.out_edges(stage))
    for edge in graph.in_edges(stage):
        key = edge.src, microbatch
        consumers[key] -= 1
        if not consumers[key] and not graph.stage(edge.src).backward:
            live[edge.src].discard(microbatch)
