"""Microbatches in flight, counted from live arrays during real steps, are what every schedule promises.

On stage graphs of every sort, the baselines' among them: see ``graph_toy``. Schedules that split no backward share a
graph's programs, so that only the first of them compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise

import graph_toy
import jax
import pytest
import toy
from parity import rescheduled

from mmjax.pipeline.executor import Executor
from mmjax.pipeline.watch import measured_in_flight
from mmjax.schedule.graph import EdgeNode, StageGraph, StageNode
from mmjax.schedule.list_scheduler import list_schedule
from mmjax.schedule.ops import Op, Schedule
from mmjax.schedule.orders import one_f_one_b_order
from mmjax.schedule.placements import TimedModule, apart, colocated_stages, in_pipeline, replicated, spanning
from mmjax.schedule.simulate import Costs
from mmjax.schedule.validate import validate

MICROBATCHES = 7
VISION, AUDIO, LLM = (TimedModule(name=n, layers=k, seconds=0.5) for n, k in (("vision", 2), ("audio", 1), ("llm", 4)))
FROZEN_VISION, FROZEN_AUDIO = (replace(module, trainable=False) for module in (VISION, AUDIO))


def mixed() -> StageGraph:
    """A trained encoder on both submeshes of an LLM of two by two chunks, and a frozen one on a rank of its own."""
    ranks = {"vision.0": (0, 1), "audio.0": (2,), **{f"llm.{k}": (k % 2,) for k in range(4)}}
    stages = []
    for name, own in ranks.items():
        module, index = name.split(".")
        trained = module != "audio"
        node = StageNode(name=name, module=module, index=int(index), ranks=own, backward=trained, trainable=trained)
        stages.append(node)
    pairs = [("vision.0", "llm.0"), ("audio.0", "llm.0"), *pairwise(f"llm.{k}" for k in range(4))]
    edges = tuple(
        EdgeNode(name=f"{src}->{dst}", src=src, dst=dst, kind="async", gradient=src != "audio.0") for src, dst in pairs
    )
    return StageGraph(stages=tuple(stages), edges=edges)


GRAPHS = {
    "mixed": mixed(),
    "chain": apart((VISION,), replace(LLM, layers=2), {"vision": 1, "llm": 2}).graph,
    "apart": apart((FROZEN_VISION, AUDIO), LLM, {"vision": 2, "audio": 1, "llm": 2}, chunks=2).graph,
    "apart, llm frozen": apart(
        (VISION, FROZEN_AUDIO), replace(LLM, trainable=False), {"vision": 2, "audio": 1, "llm": 2}
    ).graph,
    "spanning": spanning((VISION, FROZEN_AUDIO), LLM, 3).graph,
    "spanning, frozen": spanning((FROZEN_VISION, FROZEN_AUDIO), LLM, 2).graph,
    "in the pipeline": in_pipeline((VISION, AUDIO), LLM, 4).graph,
    "in the pipeline, frozen": in_pipeline((FROZEN_VISION, FROZEN_AUDIO), LLM, 4).graph,
    "colocated": colocated_stages((VISION, AUDIO), LLM, 4, 2).graph,
    "colocated, frozen": colocated_stages((FROZEN_VISION, FROZEN_AUDIO), LLM, 3, 1).graph,
    "replicated": replicated((VISION, FROZEN_AUDIO), LLM, 3).graph,
}
# Schedules, and windows of them.
WHOLE = (
    ("gpipe", 0),
    ("1f1b", 0),
    ("eager-1f1b", 0),
    ("interleaved", 0),
    ("three-phase", 0),
    ("three-phase", 3),
    ("encoders-first", 0),
)


@cache
def compiled(name: str, split: bool) -> Executor:
    """An executor of a graph, of which others are made."""
    graph = GRAPHS[name]
    model = graph_toy.placed(graph)
    return graph_toy.executor(model, model.graph.with_split() if split else model.graph, MICROBATCHES, "1f1b")


def run_of(name: str, schedule: Schedule, *, split: bool = False) -> Executor:
    """An executor of a graph's programs with initial parameters."""
    made = rescheduled(compiled(name, split), schedule)
    made.initialise(toy.SEED)
    return made


def scheduled(name: str, schedule: str, window: int = 0) -> Executor:
    """The same for a schedule's name."""
    split = schedule == "zb-h1"
    graph = compiled(name, split).schedule.graph
    return run_of(name, graph_toy.schedule_of(graph, MICROBATCHES, schedule, window), split=split)


def measured(executor: Executor) -> dict[str, int]:
    """Most microbatches in flight by stage, in one step."""
    graph = executor.schedule.graph
    with measured_in_flight(executor) as most:
        parts = graph_toy.batch(graph, executor.schedule.microbatches)
        executor.step(parts, graph_toy.denominators(graph, parts))
    return dict(most)


def assert_as_promised(executor: Executor) -> dict[str, int]:
    """What was measured is within the schedule's promise, and what ``validate`` counts."""
    most, schedule = measured(executor), executor.schedule
    for stage, count in most.items():
        assert count <= schedule.bound(stage), f"{schedule.name} promises {schedule.bound(stage)} of {stage}"
    assert most == validate(schedule).in_flight
    return most


# By hand: one more than the hops to the sink under 1F1B, all under GPipe, 2 · hops + 1 under eager 1F1B, a window of
# what has phases. Of what is frozen nothing is kept, so that only its activations on their way count; here the audio
# encoder is as far ahead as it may be where its consumer turns to B before it has read them.
LAST = {"llm.0": 4, "llm.1": 3, "llm.2": 2, "llm.3": 1}
FIGURES: Mapping[tuple[str, int], dict[str, int]] = {
    ("gpipe", 0): {"vision.0": 7, **dict.fromkeys(LAST, 7)},
    ("1f1b", 0): {"vision.0": 4, **LAST},
    ("eager-1f1b", 0): {"vision.0": 7, "llm.0": 7, "llm.1": 5, "llm.2": 3, "llm.3": 1},
    ("three-phase", 0): {"vision.0": 7, **LAST},
    ("three-phase", 3): {"vision.0": 3, "llm.0": 3, "llm.1": 3, "llm.2": 2, "llm.3": 1},
    ("encoders-first", 0): {"vision.0": 7, "audio.0": 7, **LAST},
}


@pytest.mark.parametrize(("schedule", "window"), WHOLE)
def test_what_is_in_flight_is_what_is_promised(schedule: str, window: int) -> None:
    most = assert_as_promised(scheduled("mixed", schedule, window))
    for stage, count in FIGURES.get((schedule, window), {}).items():
        assert most[stage] == count, stage
    assert most["audio.0"] > 1, "the frozen encoder is never ahead"


@pytest.mark.long
def test_a_split_backward_is_in_flight_until_its_w() -> None:
    """Every stage of a module may hold as many as 1F1B lets its first."""
    assert assert_as_promised(scheduled("chain", "zb-h1")) == {"vision.0": 3, "llm.0": 2, "llm.1": 2}


def test_one_more_than_promised_is_seen() -> None:
    """A stage that warms up once more; and an executor that holds on to what a backward has read."""
    honest = scheduled("mixed", "1f1b").schedule
    graph, costs = honest.graph, Costs.nominal(honest.graph, move=0.01, once=0.01)
    orders = {
        n.name: one_f_one_b_order(n, MICROBATCHES, graph.distance(n.name) + 1 + (n.name == "llm.1"))
        for n in graph.stages
    }
    ahead = {name: count + (name == "llm.1") for name, count in honest.in_flight.items()}
    made = list_schedule(graph, MICROBATCHES, costs, orders=orders, in_flight=ahead, name="greedy").schedule
    with pytest.raises(AssertionError, match=r"greedy promises 3 of llm\.1"):
        assert_as_promised(run_of("mixed", replace(made, in_flight=honest.in_flight)))

    executor, held = run_of("mixed", honest), []
    backward = executor.walker.handlers["B"]

    def late(op: Op) -> None:
        if op.stage == "llm.2":
            held[:] = jax.tree.leaves(executor.walker.residuals[op.stage, op.microbatch])
        backward(op)

    executor.walker.handlers["B"] = late
    with pytest.raises(AssertionError, match=r"1f1b promises 2 of llm\.2"):
        assert_as_promised(executor)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GRAPHS if name not in ("mixed", "chain")])
def test_every_schedule_on_every_placement_keeps_its_promise(name: str) -> None:
    for schedule, window in (*WHOLE, ("zb-h1", 0)):
        most = assert_as_promised(scheduled(name, schedule, window))
        assert max(most.values()) > 1
