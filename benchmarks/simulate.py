"""Simulated step times against reality: processes that wait for each other, and ops that sleep for their modelled time.

Each case is a schedule over a layout. It is simulated, and replayed with a process for every block of ranks
(``benchmarks.replay``). Noise only adds time, so the shortest of up to three steps counts, and the case ends with the
first step within the target. The last rows show that the comparison can fail: two wrong simulations must differ by more
than the target. One simulates a rendezvous as an asynchronous move, the other ignores shared ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from benchmarks.replay import replay
from mmjax.bench.rows import Row, at_least, at_most
from mmjax.schedule.graph import EdgeKind, EdgeNode, StageGraph, StageNode, connected
from mmjax.schedule.ops import Schedule
from mmjax.schedule.schedules import gpipe, one_f_one_b
from mmjax.schedule.simulate import Costs, Timeline, simulate

MOST_ERROR = 5.0
"""Percent by which a measured step may differ from the simulated one."""
MOST_REPEATS = 3
MS = 1e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule with costs.

    Attributes:
      name: shown in the row.
      schedule, costs: the schedule and its costs, simulated and replayed.
      replayed: a schedule that is replayed instead of ``schedule``; None for the same one.
    """

    name: str
    schedule: Schedule
    costs: Costs
    replayed: Schedule | None = None


def bench_simulate(rounds: int) -> Iterator[Row]:
    """Yields the percent by which measured steps differ from simulated ones, by case; then for wrong simulators."""
    measured = {}
    for case in cases():
        predicted = simulate(case.schedule, case.costs).makespan
        measured[case.name] = measure(case, predicted, min(rounds, MOST_REPEATS))
        yield _row(case.name, error(measured[case.name], predicted))
    for case, wrong in wrong_cases():
        difference = error(measured[case.name], simulate(wrong, case.costs).makespan)
        yield Row(bench="simulate", case=f"wrong: {case.name}", value=difference, unit="%", target=at_least(MOST_ERROR))


def _row(case: str, value: float) -> Row:
    return Row(bench="simulate", case=case, value=value, unit="%", target=at_most(MOST_ERROR))


def measure(case: Case, predicted: float, repeats: int) -> float:
    """Seconds of the shortest measured step of a case."""
    return shortest(case.replayed or case.schedule, case.costs, predicted, repeats).makespan


def shortest(schedule: Schedule, costs: Costs, predicted: float, repeats: int) -> Timeline:
    """The shortest of up to `repeats` measured steps, since noise only adds time; stops at one that is close enough."""
    best: Timeline | None = None
    for timeline in replay(schedule, costs, repeats):
        best = min(best or timeline, timeline, key=lambda step: step.makespan)
        if error(best.makespan, predicted) <= MOST_ERROR:
            break
    assert best is not None
    return best


def error(measured: float, predicted: float) -> float:
    """The difference of a measured step, in percent of the simulated one."""
    return 100 * abs(measured / predicted - 1)


# ---- the cases -------------------------------------------------------------------------------------------------------


def cases() -> list[Case]:
    """Schedules and layouts of every kind that a step can have."""
    chains = [
        _case("chain of 2, 1f1b", chain(2), 6, one_f_one_b, forward=25, move=8),
        _case("chain of 2, gpipe, rendezvous", chain(2, "rendezvous"), 5, gpipe, forward=25, move=10),
        _case("chain of 4, 1f1b", chain(4), 6, one_f_one_b, forward=20, move=10),
        _case("chain of 4, gpipe", chain(4), 5, gpipe, forward=20, move=10),
        _rendezvous(),
        _tied(),
    ]
    vision = graph({"vision.0": (4, 5), "llm.0": (0, 1), "llm.1": (2, 3)}, [("vision.0", "llm.0"), ("llm.0", "llm.1")])
    forward = {"vision.0": 15.0, "llm.0": 25.0, "llm.1": 35.0}
    many = [
        _case("encoder on its own ranks, unequal costs, 1f1b", vision, 6, one_f_one_b, forward=forward, move=5),
        _case("encoder on its own ranks, unequal costs, gpipe", vision, 5, gpipe, forward=forward, move=5),
        *_frozen(),
        _case("two encoders before one LLM, 1f1b", two_encoders(), 5, one_f_one_b, forward=22, move=6),
        _homogeneous(),
        _spanning(),
        _case("encoder on all LLM stages, rendezvous", spanning("rendezvous"), 5, one_f_one_b, forward=24, move=8),
        _uneven(vision, forward),
        _case("one microbatch", vision, 1, one_f_one_b, forward={k: 2 * v for k, v in forward.items()}, move=20),
    ]
    return [*chains, *many]


def wrong_cases() -> Iterator[tuple[Case, Schedule]]:
    """Yields cases, each with the schedule that a wrong simulator would simulate."""
    case = _rendezvous()
    yield case, replace(case.schedule, graph=chain(4))
    case = _spanning()
    apart = {stage.name: stage.ranks for stage in case.schedule.graph.stages} | {"vision.0": (4, 5, 6, 7)}
    yield case, replace(case.schedule, graph=graph(apart, [(e.src, e.dst) for e in case.schedule.graph.edges]))


def graph(
    stages: Mapping[str, Sequence[int]],
    pairs: Sequence[tuple[str, str]],
    kind: EdgeKind = "async",
    frozen: Sequence[str] = (),
) -> StageGraph:
    """A stage graph from ranks by stage and (source, destination) pairs; ``frozen`` stages are not trained."""
    nodes = [
        StageNode(
            name=name,
            module=name.split(".")[0],
            index=int(name.split(".")[1]),
            ranks=tuple(ranks),
            trainable=name not in frozen,
        )
        for name, ranks in stages.items()
    ]
    return connected(nodes, pairs, lambda *_: kind)


def chain(depth: int, kind: EdgeKind = "async") -> StageGraph:
    """An LLM of ``depth`` stages with a rank each."""
    names = [f"llm.{i}" for i in range(depth)]
    return graph({name: (i,) for i, name in enumerate(names)}, list(pairwise(names)), kind)


def two_encoders() -> StageGraph:
    """An encoder of two stages and one of one stage before an LLM of two, each on ranks of its own."""
    ranks = {"vision.0": (0,), "vision.1": (1,), "audio.0": (2,), "llm.0": (3,), "llm.1": (4,)}
    pairs = [("vision.0", "vision.1"), ("vision.1", "llm.0"), ("audio.0", "llm.0"), ("llm.0", "llm.1")]
    return graph(ranks, pairs)


def spanning(kind: EdgeKind = "async") -> StageGraph:
    """An encoder on the ranks of both LLM stages together."""
    ranks = {"vision.0": (0, 1, 2, 3), "llm.0": (0, 1), "llm.1": (2, 3)}
    return graph(ranks, [("vision.0", "llm.0"), ("llm.0", "llm.1")], kind)


def _rendezvous() -> Case:
    return _case("chain of 4, 1f1b, rendezvous", chain(4, "rendezvous"), 6, one_f_one_b, forward=18, move=22)


def _spanning() -> Case:
    return _case("encoder on all LLM stages, 1f1b", spanning(), 5, one_f_one_b, forward=24, move=6)


def _tied() -> Case:
    """The last stage borrows the first one's embedding, once a step."""
    tie = EdgeNode(name="embedding", src="llm.0", dst="llm.2", kind="async")
    return _case(
        "chain of 3, tied embedding, 1f1b", replace(chain(3), ties=(tie,)), 4, one_f_one_b, forward=20, move=25
    )


def _homogeneous() -> Case:
    ranks = {"vision.0": (0, 1), "llm.0": (0, 1), "llm.1": (2, 3)}
    shared = graph(ranks, [("vision.0", "llm.0"), ("llm.0", "llm.1")])
    forward = {"vision.0": 15.0, "llm.0": 20.0, "llm.1": 30.0}
    return _case("encoder on the first LLM stage, 1f1b", shared, 5, one_f_one_b, forward=forward, move=6)


def _frozen() -> list[Case]:
    """A frozen encoder that waits as ``Schedule.awaits`` promises, and one that runs ahead as the executor may."""
    ranks = {"vision.0": (2, 3), "llm.0": (0,), "llm.1": (1,)}
    pairs = [("vision.0", "llm.0"), ("llm.0", "llm.1")]
    forward = {"vision.0": 40.0, "llm.0": 15.0, "llm.1": 25.0}
    waiting = _case(
        "frozen encoder, 1f1b", graph(ranks, pairs, frozen=["vision.0"]), 6, one_f_one_b, forward=forward, move=6
    )
    without_waits = replace(waiting.schedule, in_flight={})
    return [waiting, replace(waiting, name="frozen encoder that runs ahead, 1f1b", replayed=without_waits)]


def _uneven(vision: StageGraph, forward: Mapping[str, float]) -> Case:
    """Microbatches whose costs differ from the costs that the schedule was made for."""
    case = _case("uneven microbatches, 1f1b", vision, 6, one_f_one_b, forward=forward, move=5)
    factors = {0: 0.6, 2: 2.0, 3: 0.5, 5: 1.6}
    overrides = {
        (kind, name, False, microbatch): case.costs.seconds[kind, name, False] * factor
        for microbatch, factor in factors.items()
        for kind, name in (("F", "vision.0"), ("B", "vision.0"), ("F", "llm.0"))
    }
    return replace(case, costs=Costs(seconds=case.costs.seconds, overrides=overrides))


def _case(
    name: str,
    stages: StageGraph,
    microbatches: int,
    make: Callable[[StageGraph, int, Costs], Schedule],
    *,
    forward: float | Mapping[str, float],
    move: float,
) -> Case:
    """A case from milliseconds. Packing takes 3 and unpacking 2; an op that runs once a step takes 10."""
    seconds = {k: v * MS for k, v in forward.items()} if isinstance(forward, Mapping) else forward * MS
    nominal = Costs.nominal(stages, forward=seconds, backward=1.8, move=move * MS, once=10 * MS)
    edge_ops = {
        (kind, edge.name, way): cost * MS
        for edge in (*stages.edges, *stages.ties)
        for kind, cost in (("pack", 3), ("unpack", 2))
        for way in (False, True)
    }
    costs = Costs(seconds={**nominal.seconds, **edge_ops, ("norm", "world", False): 5 * MS})
    return Case(name=name, schedule=make(stages, microbatches, costs), costs=costs)
