"""Timing a schedule without running it: costs in; timeline, bubbles and peak in-flight out.

The simulator walks the total order, as the executor does. An op starts when the ranks that it occupies are free (or its
wire or copy engines instead) and the ops that it reads or awaits have ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import Op, Resource, Schedule, occupied_ranks, occupied_resources

CostKey = tuple[str, str, bool]
"""(kind, stage or, for pack/move/unpack, edge, backward direction)."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of each op.

    seconds: by (kind, stage or edge name, backward); `backward` is the direction of an edge's op and False elsewhere.
    overrides: by (kind, name, backward, microbatch), for microbatches with a different cost. Every F, B and W needs a
    cost; other ops without one are free. Raises ValueError for a cost that is negative, infinite or absent.
    """

    seconds: Mapping[CostKey, float] = field(hash=False)
    overrides: Mapping[tuple[str, str, bool, int], float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for key, seconds in (*self.seconds.items(), *self.overrides.items()):
            if not (seconds >= 0 and math.isfinite(seconds)):
                raise ValueError(f"cost of {key} is {seconds}: give finite seconds, 0 or more")

    def of(self, op: Op) -> float:
        """Seconds that `op` takes: 0 for an op without a cost, but a ValueError for F, B and W."""
        key = (op.kind, op.edge or op.stage, op.backward)
        seconds = self.overrides.get((*key, op.microbatch))
        if seconds is None:
            seconds = self.seconds.get(key)
        if seconds is None:
            if op.kind in "FBW":
                raise ValueError(f"no cost for {op}: give seconds[{key}]")
            return 0.0
        return seconds

    def split_as(self, graph: StageGraph) -> Costs:
        """The same costs, with a W for each split stage of `graph` that has none: B and W get half of B's seconds each.

        The gradients of the two factors of a matrix product cost the same.
        """
        missing = {node.name for node in graph.stages if node.split and ("W", node.name, False) not in self.seconds}
        if not missing:
            return self
        seconds: dict[CostKey, float] = dict(self.seconds)
        overrides: dict[tuple[str, str, bool, int], float] = dict(self.overrides)
        for (kind, name, backward), cost in self.seconds.items():
            if kind == "B" and name in missing:
                seconds["B", name, backward] = seconds["W", name, backward] = cost / 2
        for (kind, name, backward, microbatch), cost in self.overrides.items():
            if kind == "B" and name in missing:
                overrides["B", name, backward, microbatch] = overrides["W", name, backward, microbatch] = cost / 2
        return Costs(seconds=seconds, overrides=overrides)

    @classmethod
    def nominal(
        cls,
        graph: StageGraph,
        *,
        forward: float | Mapping[str, float] = 1.0,
        backward: float = 2.0,
        backward_frozen: float = 1.0,
        move: float = 0.0,
        once: float = 0.0,
    ) -> Costs:
        """Costs for making an order before anything was measured.

        Args:
          forward: seconds of F, one number for all stages or one by stage name.
          backward: seconds of a trainable stage's B, as a multiple of its F.
          backward_frozen: seconds of the B of a stage that only passes gradients on, as a multiple of its F.
          move: seconds of each move, over edges and ties, and of each gather.
          once: seconds of each prepare, reduce and update.
        """
        seconds: dict[CostKey, float] = {}
        for stage in graph.stages:
            cost = forward[stage.name] if isinstance(forward, Mapping) else forward
            seconds["F", stage.name, False] = cost
            seconds["B", stage.name, False] = cost * (backward if stage.trainable else backward_frozen)
            seconds |= {(kind, stage.name, False): once for kind in ("prepare", "reduce", "update")}
            if stage.gather:
                seconds |= {("gather", stage.name, backwards): move for backwards in (False, True)}
        for edge in (*graph.edges, *graph.ties):
            seconds |= {("move", edge.name, direction): move for direction in (False, True)}
        return cls(seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A schedule with times: `starts[i]` and `ends[i]` in seconds belong to `schedule.ops[i]`; the step starts at 0."""

    schedule: Schedule
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    def span(self, op: Op) -> tuple[float, float]:
        """(start, end) of `op`; KeyError if the schedule does not have it."""
        return self.spans[op]

    def for_rank(self, rank: int) -> tuple[tuple[Op, float, float], ...]:
        """(op, start, end) of every op that occupies `rank`, in order."""
        return self._by_rank.get(rank, ())

    @cached_property
    def spans(self) -> dict[Op, tuple[float, float]]:
        """(start, end) by op, in order."""
        return dict(zip(self.schedule.ops, zip(self.starts, self.ends, strict=True), strict=True))

    @cached_property
    def makespan(self) -> float:
        """Seconds from the start of the step to the end of its last op."""
        return max(self.ends, default=0.0)

    @cached_property
    def bubbles(self) -> dict[int, float]:
        """For each rank, the fraction of the makespan in which no op occupies it."""
        busy = {rank: sum(end - start for _, start, end in self.for_rank(rank)) for rank in self.schedule.graph.ranks}
        return {rank: 1 - seconds / self.makespan if self.makespan else 0.0 for rank, seconds in busy.items()}

    @property
    def bubble(self) -> float:
        """1 - busy / (makespan · ranks), where communication that occupies a rank counts as busy."""
        return sum(self.bubbles.values()) / len(self.bubbles)

    @cached_property
    def in_flight(self) -> dict[str, int]:
        """For each stage, the most microbatches in flight at any time (see `Schedule.in_flight`)."""
        return {stage.name: self._peak(stage.name) for stage in self.schedule.graph.stages}

    def _peak(self, stage: str) -> int:
        graph, spans, changes = self.schedule.graph, self.spans, []
        node = graph.stage(stage)
        consumers = [edge.dst for edge in graph.out_edges(stage)] or [stage]
        for microbatch in range(self.schedule.microbatches):
            start, done = spans[Op("F", stage, node.first_of(microbatch))]
            if node.backward:
                done = spans[Op("W" if node.split else "B", stage, node.first_of(microbatch))][1]
            else:
                ends = (Op("F", name, graph.stage(name).first_of(microbatch)) for name in consumers)
                done = max(done, *(spans[op][1] for op in ends))
            changes += [(start, 1), (done, -1)] if done > start else []
        live = peak = 0
        for _, change in sorted(changes):  # at one time, ends come before starts
            live += change
            peak = max(peak, live)
        return peak

    @cached_property
    def _by_rank(self) -> dict[int, tuple[tuple[Op, float, float], ...]]:
        table: dict[int, list[tuple[Op, float, float]]] = {rank: [] for rank in self.schedule.graph.ranks}
        for op, (start, end) in self.spans.items():
            for rank in occupied_ranks(self.schedule.graph, op):
                table[rank].append((op, start, end))
        return {rank: tuple(ops) for rank, ops in table.items()}


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Time `schedule`: each op in its order, as early as its ranks and its dependencies allow.

    An asynchronous move occupies no rank: it starts when its pack has ended and the move before it over the same edge
    in the same direction. A rendezvous occupies both sides. Copies to and from the host run beside the ranks' ops, one
    after another on each rank, and so do pulls of parameters; a collective gather occupies all lanes. Costs are taken
    by `Costs.split_as`. The result has the `starts` and `ends` of the ops,
    in seconds and in their order, and the `makespan`.

    Args:
      schedule: the ops of a step in order, as `make_schedule("1f1b", graph, 8, costs)` makes it.
      costs: seconds of each op, such as `Costs.nominal(graph)`.

    Raises:
      ValueError: an op precedes one that it depends on, or F, B or W of a stage has no cost.
    """
    costs = costs.split_as(schedule.graph)
    free: dict[Resource, float] = {}
    ended: dict[Op, float] = {}
    starts: list[float] = []
    for op in schedule.ops:
        start, resources = 0.0, occupied_resources(schedule.graph, op)
        for before in (*schedule.dependencies(op), *schedule.awaits(op)):
            if before not in ended:
                raise ValueError(f"{op} precedes {before}, which it needs: validate the schedule first")
            start = max(start, ended[before])
        for resource in resources:
            start = max(start, free.get(resource, 0.0))
        end = ended[op] = start + costs.of(op)
        for resource in resources:
            free[resource] = end
        starts.append(start)
    return Timeline(schedule=schedule, starts=tuple(starts), ends=tuple(ended[op] for op in schedule.ops))
