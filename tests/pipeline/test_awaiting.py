"""Ops that await others: they start when those have ended on the devices, and nothing else waits with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import graph_toy
import jax
import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import rescheduled

from mmjax.pipeline import executor as executors
from mmjax.pipeline.awaiting import Awaiting
from mmjax.pipeline.config import OffloadConfig
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.watch import watched
from mmjax.schedule.graph import EdgeNode, StageGraph, StageNode
from mmjax.schedule.ops import Op, Schedule, occupied_resources, participating_ranks, run_in_order
from mmjax.schedule.placements import TimedModule, apart, spanning

MICROBATCHES, TURNS = 6, 100_000
VISION, LLM = (TimedModule(name=name, layers=2, seconds=0.5) for name in ("vision", "llm"))
FROZEN = replace(VISION, trainable=False)


# ---- on devices ------------------------------------------------------------------------------------------------------


def executor(
    graph: StageGraph, schedule: str, window: int = 0, *, offload: bool = False, busy: bool = True
) -> Executor:
    """Of a graph whose LLM takes long."""
    away: dict[str, Any] = {"offloads": {"vision": OffloadConfig(parameters=True)}} if offload else {}
    model = graph_toy.placed(graph, {"llm": TURNS} if busy else {}, **away)
    return graph_toy.executor(model, model.graph, MICROBATCHES, schedule, window)


def step(made: Executor, *, in_order: bool = False) -> tuple[list[Op], dict[Op, bool]]:
    """A step's ops as they were dispatched, and of those that await others whether these had ended by then."""
    ends: dict[Op, Any] = {}
    dispatched: list[Op] = []
    ended: dict[Op, bool] = {}
    awaited = {one for before in made.walker.awaiting.awaits.values() for one in before}

    @contextlib.contextmanager
    def around(op: Op) -> Iterator[None]:
        dispatched.append(op)
        if before := made.walker.awaiting.awaits.get(op):
            ended[op] = all(array.is_deleted() or array.is_ready() for one in before for array in ends[one])
        yield
        if op in awaited:  # what it makes itself: a copy of it may be there later
            with mock.patch.object(executors, "completion_marker", jax.tree.leaves):
                ends[op] = made.walker.end(op)

    with watched(made.walker, around, in_order=in_order):
        graph = made.schedule.graph
        parts = graph_toy.batch(graph, MICROBATCHES)
        made.step(parts, graph_toy.denominators(graph, parts)).fetch()
    return dispatched, ended


CASES = {
    "a frozen encoder": (apart((FROZEN,), LLM, {"vision": 1, "llm": 2}).graph, "1f1b", 0, False),
    "a reload": (spanning((VISION,), LLM, 2).graph, "three-phase", 3, True),
    "phases on ranks of their own": (apart((VISION,), LLM, {"vision": 1, "llm": 2}).graph, "encoders-first", 0, False),
    "a frozen encoder's reload": (spanning((FROZEN,), LLM, 2).graph, "three-phase", 3, True),
}
WAITING = {
    "a frozen encoder": {("F", "vision.0")},
    "a reload": {("reload", "vision.0")},
    "phases on ranks of their own": {("F", "llm.0"), ("F", "llm.1"), ("unpack", "vision.0"), ("B", "vision.0")},
    "a frozen encoder's reload": {("reload", "vision.0")},
}
SLOW = ("phases on ranks of their own", "a frozen encoder's reload")
EACH = pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])


@pytest.mark.long
@EACH
def test_an_op_starts_when_what_it_awaits_has_ended(name: str) -> None:
    graph, schedule, window, offload = CASES[name]
    made = executor(graph, schedule, window, offload=offload)
    assert {(op.kind, op.stage) for op in made.walker.awaiting.awaits} <= WAITING[name]
    step(made)
    dispatched, ended = step(made)
    assert ended.keys() == made.walker.awaiting.awaits.keys() != set()
    assert all(ended.values()), [str(op) for op, there in ended.items() if not there]
    assert sorted(map(str, dispatched)) == sorted(map(str, made.schedule.ops))
    for rank in graph.ranks:  # all ranks keep their order
        own = [op for op in made.schedule.ops if rank in occupied_resources(made.schedule.graph, op)]
        assert [op for op in dispatched if op in set(own)] == own
    assert tuple(dispatched) != made.schedule.ops, "nothing was put off: the LLM is too fast to show it"

    # The same schedule to the letter dispatches earlier, and gives the same bits.
    other = rescheduled(made, made.schedule)
    other.initialise(toy.SEED)
    step(other, in_order=True)
    straight, ended = step(other, in_order=True)
    assert tuple(straight) == other.schedule.ops
    assert not all(ended.values()), "what is awaited is over anyway: the test shows nothing"
    one, two = (toy.logical(e.placed, e.states) for e in (made, other))
    assert all(np.array_equal(one[leaf], two[leaf]) for leaf in two)


def step_of(made: Executor) -> None:
    graph = made.schedule.graph
    parts = graph_toy.batch(graph, MICROBATCHES)
    made.step(parts, graph_toy.denominators(graph, parts)).fetch()


def check_ends(made: Executor) -> set[str]:
    """The end of an op is that of all that is new after it, or of what an edge carries on as it is; kinds of ops."""
    walker, seen = made.walker, set[str]()

    def held() -> dict[tuple[int, Any, int], Any]:
        places = (walker.in_transit, walker.carry, walker.cotangents, walker.residuals, walker.losses, made.sums)
        keyed = ((i, key, value) for i, place in enumerate(places) for key, value in place.items())
        return {(i, key, id(x)): x for i, key, value in keyed for x in jax.tree.leaves(value)}

    @contextlib.contextmanager
    def around(op: Op) -> Iterator[None]:
        before = held()
        yield
        if op.kind in "FBW" or (op.edge and op.microbatch >= 0):
            carried = walker.in_transit.get((op.edge, op.microbatch, op.backward))
            new = [x for key, x in held().items() if key not in before] or jax.tree.leaves(carried)
            sums = jax.tree.leaves(made.sums) if op.kind in "BW" else []  # those of the other half are as they were
            with mock.patch.object(executors, "completion_marker", jax.tree.leaves):
                found = {id(x) for x in walker.end(op) or ()}
            assert found and found - {id(x) for x in sums} <= {id(x) for x in new} <= found, op
            seen.add(f"{op.kind} back" if op.backward else op.kind)

    with watched(walker, around, in_order=True):
        step_of(made)
    return seen


THERE = {"pack", "move", "unpack"}


@pytest.mark.long
def test_the_end_of_a_split_backward_is_that_of_what_each_half_made() -> None:
    model = graph_toy.placed(apart((FROZEN,), LLM, {"vision": 1, "llm": 2}).graph)
    made = graph_toy.executor(model, model.graph.with_split(), MICROBATCHES, "zb-h1")
    assert check_ends(made) == {*"FBW", *THERE, *(f"{kind} back" for kind in THERE)}


def test_the_end_of_an_op_is_that_of_what_it_made() -> None:
    """And who waits for ends is asked wherever anything awaits, unless the order is to be kept to the letter."""
    graph, schedule, window, _ = CASES["a reload"]
    made = executor(graph, schedule, window, offload=True, busy=False)
    walker = made.walker
    assert check_ends(made) == {*"FB", *THERE, *(f"{kind} back" for kind in THERE)}

    class Asked:
        def __init__(self, awaits: dict[Op, Any]):
            self.awaits, self.ops = awaits, list[Op | None]()

        def __call__(self, op: Op) -> None:
            self.ops.append(op)
            walker.dispatch(op)

        def finish(self) -> None:
            self.ops.append(None)

    for awaits, in_order in ((walker.awaiting.awaits, False), (walker.awaiting.awaits, True), ({}, False)):
        asked: Any = Asked(awaits)
        with mock.patch.object(walker, "awaiting", asked), mock.patch.object(walker, "in_order", in_order):
            step_of(made)
        assert asked.ops == ([*made.schedule.ops, None] if awaits and not in_order else [])


def test_where_nothing_is_awaited_nothing_is_asked() -> None:
    graph = apart((VISION,), LLM, {"vision": 1, "llm": 2}).graph
    made = graph_toy.schedule_of(graph, MICROBATCHES, "1f1b")
    assert not Awaiting(made, lambda op: None, lambda op: None, lambda op: True).awaits
    shared = spanning((FROZEN,), LLM, 2).graph  # the frozen encoder's ranks are the LLM's
    made = graph_toy.schedule_of(shared, MICROBATCHES, "1f1b")
    assert not Awaiting(made, lambda op: None, lambda op: None, lambda op: True).awaits


# ---- any schedule, ends at any time ----------------------------------------------------------------------------------


class End:
    """What is there after so many looks, or when somebody waits for it."""

    def __init__(self, looks: int):
        self.looks = looks

    def is_ready(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def block_until_ready(self) -> None:
        self.looks = 0


def graph(depth: int, encoders: int, frozen: int, offload: bool, shared: bool, stash: bool = False) -> StageGraph:
    """Encoders, some of them frozen, before an LLM: on ranks of their own, or all on all of the LLM's."""
    llm = [StageNode(name=f"llm.{k}", module="llm", index=k, ranks=(k,)) for k in range(depth)]
    nodes = []
    for k in range(encoders):
        ranks = tuple(range(depth)) if shared else (depth + k,)
        node = StageNode(name=f"e{k}.0", module=f"e{k}", index=0, ranks=ranks, offload=offload, stash=stash)
        nodes.append(replace(node, backward=k >= frozen, trainable=k >= frozen))
    pairs = [*((node, llm[0]) for node in nodes), *pairwise(llm)]
    edges = tuple(
        EdgeNode(
            name=f"{a.name}->{b.name}",
            src=a.name,
            dst=b.name,
            kind="local" if set(a.ranks) == set(b.ranks) else "async",
            gradient=a.backward,
        )
        for a, b in pairs
    )
    return StageGraph(stages=(*nodes, *llm), edges=edges)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A schedule in which something may await."""
    name, depth = (
        draw(st.sampled_from(("1f1b", "eager-1f1b", "three-phase", "encoders-first"))),
        draw(st.integers(1, 3)),
    )
    encoders, shared = draw(st.integers(1, 2)), draw(st.booleans())
    offload = name == "encoders-first" or (name == "three-phase" and shared)
    away, stash = (offload and draw(st.booleans()) for _ in range(2))
    made = graph(depth, encoders, draw(st.integers(0, encoders)), away, shared, stash)
    window = draw(st.integers(0, 3)) if name == "three-phase" else 0
    return graph_toy.schedule_of(made, draw(st.integers(1, 6)), name, window)


@pytest.mark.long
@settings(derandomize=True, deadline=None, max_examples=150)
@given(schedule=schedules(), data=st.data())
def test_any_order_of_ends_keeps_orders_and_loses_nothing(schedule: Schedule, data: st.DataObject) -> None:
    ends: dict[Op, End] = {}
    done: list[Op] = []

    def end(op: Op) -> End:
        ends[op] = End(data.draw(st.integers(0, 30)))
        return ends[op]

    def dispatch(op: Op) -> None:
        assert all(one in set(done) for one in schedule.dependencies(op)), "before what it reads"
        for one in awaiting.awaits.get(op, ()):
            assert ends[one].looks <= 0, f"{op} before the end of {one}"
            assert awaiting._ends[one] is None, "what told of the end is kept"
        done.append(op)

    awaiting = Awaiting(schedule, dispatch, end, lambda op: True)
    for _ in range(2):
        done.clear()
        for op in schedule.ops:
            awaiting(op)
        awaiting.finish()
        assert len(done) == len(schedule.ops) and set(done) == set(schedule.ops)
        held = {resource for op in done for resource in occupied_resources(schedule.graph, op)}
        for resource in held:
            own = [op for op in schedule.ops if resource in occupied_resources(schedule.graph, op)]
            assert [op for op in done if op in set(own)] == own
    for op in schedule.ops:
        for one in schedule.awaits(op):
            in_order = run_in_order(schedule.graph, one, op)
            assert in_order or one in awaiting.awaits[op]


def test_a_copy_awaits_what_runs_before_it_on_its_own_ranks_in_this_process() -> None:
    """The op that a reload awaits is another process's: the last one before it here frees what is to be free."""
    made = graph_toy.schedule_of(graph(3, 1, 0, True, True), 4, "three-phase")
    (reload,) = (op for op in made.ops if op.kind == "reload")
    (awaited,) = made.awaits(reload)
    for rank in range(3):
        here = Awaiting(made, lambda op: None, lambda op: None, lambda op: rank in participating_ranks(made.graph, op))  # noqa: B023
        ((one,),) = here.awaits.values()
        assert rank in participating_ranks(made.graph, one) and one.kind in "FB" and one.stage != "e0.0"
        before = made.ops[: made.ops.index(awaited) + 1]
        assert one == [op for op in before if op.kind in "FB" and rank in participating_ranks(made.graph, op)][-1]
