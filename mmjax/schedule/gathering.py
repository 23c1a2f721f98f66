"""Gathers of parameters that lie in shards on all lanes of a stage, put into a schedule that has none.

A lane needs whole parameters while it runs an F or B of such a stage, and no longer ("BigMac", §3.3). The order of a
schedule's ops on each rank stays as it is.

* A *pull* copies one lane's parameters from the other lanes, which go on with their own ops. It starts when the op
  before the last one has ended on the lane's ranks, so it lies beside one op, and a lane never has the parameters
  twice.
* A *collective* gather runs on all lanes at once, before the microbatches that they run together: a barrier. It comes
  right before these on each rank, or, where that is shorter or the only way, before the first of them.

Where an F or B follows another one of its stage on its lane, the parameters are still there, and its gather is skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from mmjax.schedule.graph import GatherKind, StageGraph, StageNode
from mmjax.schedule.list_scheduler import list_schedule
from mmjax.schedule.ops import Op, Schedule, gather_of, occupied_ranks
from mmjax.schedule.simulate import Costs, Timeline
from mmjax.schedule.validate import ScheduleError

Waits = dict[Op, tuple[Op, ...]]
RankOrders = Mapping[int, list[Op]]
"""The F, B and W of each rank, in order."""


def with_gathers(schedule: Schedule, gathers: Mapping[str, GatherKind], costs: Costs) -> Schedule:
    """The schedule with the gathers of some stages; without any it is the schedule itself.

    Args:
      schedule: a schedule whose stages have whole parameters, as `make_schedule("nested", graph, 8, costs)` makes it.
      gathers: by the name of a stage with lanes, how it gathers: {"vision.0": "pull"}.
      costs: seconds of each op, such as `Costs.nominal(graph)`; of gathers too.

    Returns:
      The schedule: `.graph` with the stages' `gather`, `.ops` with the gathers, and `.skipped_gathers`, left out of it.

    Raises:
      ScheduleError: a collective gather can come nowhere.
    """
    if not gathers:
        return schedule
    graph = schedule.graph.with_gathers(gathers)
    ranks = _rank_orders(schedule)
    skipped_gathers = frozenset(_skipped(graph, schedule, ranks))
    pulls = dict(_pull_waits(graph, ranks, skipped_gathers))
    timelines, stuck, choices = [], None, [_joint_waits(graph, schedule, ranks)]
    if choices[0]:  # there are collective gathers
        choices.append(_first_waits(graph, schedule, ranks))
    for waits in choices:
        try:
            timelines.append(_timeline(schedule, graph, costs, pulls | waits, skipped_gathers))
        except ScheduleError as error:  # lanes would wait for each other in a circle
            stuck = error
    if not timelines:
        raise stuck or ScheduleError(f"{schedule.name}: no order of its gathers")
    return min(timelines, key=lambda timeline: timeline.makespan).schedule


def gathers_of_readers(schedule: Schedule) -> dict[Op, Op]:
    """For each F and B that reads gathered parameters, the gather that made them: not a skipped one, but one before it.

    The parameters of a lane are dropped behind the last op with the same gather.

    schedule: the ops of a step in order, as `make_schedule("nested", graph, 8, costs)` makes it.
    """
    graph, sources = schedule.graph, dict[Op, Op]()
    for node in (node for node in graph.stages if node.gather):
        latest: dict[int, Op] = {}
        for op in schedule.for_stage(node.name):
            if op.kind in ("F", "B"):
                lane, gather = node.lane(op.microbatch), _gather(graph, op)
                if gather not in schedule.skipped_gathers:
                    latest[lane] = gather
                sources[op] = latest[lane]
    return sources


def last_readers(schedule: Schedule) -> dict[tuple[str, Op], Op]:
    """The last F or B that reads a lane's gathered parameters, by (lane, gather); a lane may have no microbatch.

    schedule: as for `gathers_of_readers`.
    """
    graph = schedule.graph
    return {
        (graph.stage(op.stage).lane_name(op.microbatch), gather): op
        for op, gather in gathers_of_readers(schedule).items()
    }


def _gather(graph: StageGraph, op: Op) -> Op:
    gather = gather_of(graph, op)
    assert gather, "its stage gathers"
    return gather


def _timeline(
    schedule: Schedule, graph: StageGraph, costs: Costs, waits: Waits, skipped_gathers: frozenset[Op]
) -> Timeline:
    """The schedule's order on each rank, with gathers that wait for some ops."""
    orders: dict[str, list[Op]] = {f"rank {rank}": [] for rank in schedule.graph.ranks}
    for op in schedule.ops:
        for rank in occupied_ranks(schedule.graph, op):
            orders[f"rank {rank}"].append(op)
    merged = dict(schedule.waits)
    for op, before in waits.items():
        if op not in skipped_gathers:
            merged[op] = (*merged.get(op, ()), *before)
    return list_schedule(
        graph,
        schedule.microbatches,
        costs,
        orders=orders,
        in_flight=schedule.in_flight,
        name=schedule.name,
        window=schedule.window,
        waits=merged,
        skipped_gathers=skipped_gathers,
    )


def _rank_orders(schedule: Schedule) -> RankOrders:
    orders: dict[int, list[Op]] = {rank: [] for rank in schedule.graph.ranks}
    for op in schedule.ops:
        if op.kind in ("F", "B", "W"):
            for rank in schedule.graph.stage(op.stage).ranks_of(op.microbatch):
                orders[rank].append(op)
    return orders


def _readers(graph: StageGraph, schedule: Schedule) -> Iterator[tuple[StageNode, Op]]:
    """The F and B of stages that gather, in order."""
    for op in schedule.ops:
        if op.kind in ("F", "B") and graph.stage(op.stage).gather:
            yield graph.stage(op.stage), op


def _skipped(graph: StageGraph, schedule: Schedule, ranks: RankOrders) -> Iterator[Op]:
    """The gathers whose parameters are there: on all lanes that take part, the op before is one of the stage's.

    A W of the stage may come between, which reads no parameters.
    """
    follows = {rank: set(_following(order)) for rank, order in ranks.items()}
    missing = {
        _gather(graph, op)
        for node, op in _readers(graph, schedule)
        if any(op not in follows[rank] for rank in node.ranks_of(op.microbatch))
    }
    gathers = dict.fromkeys(_gather(graph, op) for _, op in _readers(graph, schedule))
    yield from (gather for gather in gathers if gather not in missing)


def _following(order: list[Op]) -> Iterator[Op]:
    """The F and B of a rank whose stage ran the F or B before, with no op of another stage between."""
    latest = ""
    for op in order:
        if op.kind == "W" and op.stage == latest:
            continue
        if op.kind != "W" and op.stage == latest:
            yield op
        latest = op.stage if op.kind != "W" else ""


def _pull_waits(
    graph: StageGraph, ranks: RankOrders, skipped_gathers: Collection[Op]
) -> Iterator[tuple[Op, tuple[Op, ...]]]:
    """Pairs of a pull and the ops before the last op on its lane's ranks: it starts when they have ended."""
    waits: dict[Op, dict[Op, None]] = {}
    for order in ranks.values():
        for i, op in enumerate(order):
            if op.kind in ("F", "B") and graph.stage(op.stage).gather == "pull":
                gather = _gather(graph, op)
                if i >= 2 and gather not in skipped_gathers:
                    waits.setdefault(gather, {})[order[i - 2]] = None
    yield from ((gather, tuple(before)) for gather, before in waits.items())


def _joint_waits(graph: StageGraph, schedule: Schedule, ranks: RankOrders) -> Waits:
    """A collective gather waits for the op before each of its readers."""
    waits: dict[Op, dict[Op, None]] = {}
    for gather, before in _ops_before(graph, schedule, ranks):
        waits.setdefault(gather, {}).update(dict.fromkeys(before))
    return {gather: tuple(before) for gather, before in waits.items()}


def _first_waits(graph: StageGraph, schedule: Schedule, ranks: RankOrders) -> Waits:
    """A collective gather waits for the op before its first reader."""
    waits: Waits = {}
    for gather, before in _ops_before(graph, schedule, ranks):
        waits.setdefault(gather, before)
    return waits


def _ops_before(graph: StageGraph, schedule: Schedule, ranks: RankOrders) -> Iterator[tuple[Op, tuple[Op, ...]]]:
    """Pairs of a collective gather and the ops right before a reader of it, on the reader's ranks."""
    place = {rank: {op: i for i, op in enumerate(order)} for rank, order in ranks.items()}
    for node, op in _readers(graph, schedule):
        if node.gather == "collective":
            at = [(rank, place[rank][op]) for rank in node.ranks_of(op.microbatch)]
            yield _gather(graph, op), tuple(dict.fromkeys(ranks[rank][i - 1] for rank, i in at if i))
