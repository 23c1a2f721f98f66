"""Pulled parameters against gathers of all lanes: a step of eight ranks, simulated, and replayed by real processes.

An LLM has a stage on each of eight ranks, whose microbatches take unequal time, as packed rows and experts' loads make
them. An encoder, and in the second model a generator, is spread over the ranks in eight lanes ("BigMac", §3.3); its
parameters lie in shards. Every process is a rank, and its ops sleep for their modelled time (``benchmarks.replay``): it
says how long ops wait for one another, and nothing about the speed of a device.

A *collective* gather is a barrier: each lane that comes to it waits for the slowest rank, once for every unit of eight
microbatches. A *pull* waits for nobody and lies beside the op before. So the bubble of the one is the spread of the
ranks at each unit, and that of the other is the LLM's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.schedules import LAYER, MOVE, ONCE
from benchmarks.simulate import MOST_ERROR, MOST_REPEATS, MS, error, shortest
from mmjax.bench.rows import Row, at_least, at_most
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import Schedule
from mmjax.schedule.placements import Placement, TimedModule, in_lanes
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs, Timeline, simulate

RANKS, MICROBATCHES = 8, 32
GATHER = 3 * MS
"""Seconds of a gather or pull of all parameters of a module: less than a layer, as in a node."""
FACTORS = (1.0, 0.8, 1.3, 0.9, 1.0, 0.7, 1.6, 0.7) * 4
"""Seconds of each microbatch of the LLM over their mean."""
LEAST_GAIN = 1.03
"""The published gain of pulls in a whole step ("BigMac", §4.3)."""
Way = Literal["pull", "collective"]
WAYS: tuple[Way, ...] = ("pull", "collective")

_VISION = TimedModule(name="vision", layers=8, seconds=LAYER)
_GENERATOR = TimedModule(name="generator", layers=8, seconds=LAYER)
MODELS = {"encoder": (), "encoder and generator": (_GENERATOR,)}
"""Generators of each model."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A schedule with costs, and its simulation."""

    schedule: Schedule
    costs: Costs

    @property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return simulate(self.schedule, self.costs)


def placement(model: str, *, even: bool = False) -> Placement:
    """The modules of a model on eight ranks; ``even`` gives all microbatches of the LLM the mean time."""
    llm = TimedModule(name="llm", layers=4 * RANKS, seconds=LAYER, factors=() if even else FACTORS)
    return in_lanes([_VISION], llm, RANKS, generators=MODELS[model])


def step(model: str, way: Way | None, *, even: bool = False) -> Step:
    """A nested step whose lanes gather in a way; ``None`` is whole parameters on every rank."""
    placed = placement(model, even=even)
    laned = [node.name for node in placed.graph.stages if node.lanes > 1]
    costs = placed.costs(MICROBATCHES, move=MOVE, once=ONCE)
    gathers = {("gather", name, backward): GATHER for name in laned for backward in (False, True)}
    costs = replace(costs, seconds={**costs.seconds, **gathers})
    graph: StageGraph = placed.graph.with_gathers(dict.fromkeys(laned, way or ""))
    return Step(schedule=make_schedule("nested", graph, MICROBATCHES, costs), costs=costs)


def waiting(timeline: Timeline) -> float:
    """Seconds in which ranks are idle before a collective gather, the mean of all ranks."""
    total, graph = 0.0, timeline.schedule.graph
    for rank in graph.ranks:
        free = 0.0
        for op, start, end in timeline.for_rank(rank):
            total += (start - free) * (op.kind == "gather")
            free = end
    return total / len(graph.ranks)


def bench_pull(repeats: int) -> Iterator[Row]:
    """Yields steps and bubbles of both ways, simulated and replayed, and the ratio of the steps."""
    for model in MODELS:
        whole, measured = step(model, None).timeline.makespan, dict[Way, float]()
        for way in WAYS:
            trial = step(model, way)
            timeline, case = trial.timeline, f"{model}, eight processes, {way}"
            replayed = shortest(trial.schedule, trial.costs, timeline.makespan, min(repeats, MOST_REPEATS))
            measured[way] = replayed.makespan
            yield _row(f"{case}: step, simulated", timeline.makespan / MS, "ms")
            yield _row(f"{case}: step, replayed", replayed.makespan / MS, "ms")
            difference = error(replayed.makespan, timeline.makespan)
            yield replace(_row(f"{case}: difference", difference, "%"), target=at_most(MOST_ERROR))
            yield _row(f"{case}: over whole parameters, simulated", timeline.makespan / whole, "ratio")
            yield _row(f"{case}: bubble, replayed", 100 * replayed.bubble, "%")
            yield _row(f"{case}: a rank waits before gathers, replayed", waiting(replayed) / MS, "ms")
        gain = measured["collective"] / measured["pull"]
        yield replace(_row(f"{model}: collective over pull, replayed", gain, "ratio"), target=at_least(LEAST_GAIN))
        even = [step(model, way, even=True).timeline.makespan for way in WAYS]
        yield _row(f"{model}, even microbatches: collective over pull, simulated", even[1] / even[0], "ratio")


def _row(case: str, value: float, unit: str) -> Row:
    return Row(bench="sharding", case=case, value=value, unit=unit)
