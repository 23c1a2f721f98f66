"""What waits for its backward in host memory, counted from live arrays; and that no bit of a result changes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import graph_toy
import jax
import numpy as np
import parity
import pytest
import toy
from parity import Case

from mmjax.mesh.layout import Layout
from mmjax.pipeline.config import OffloadConfig
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import memory_by_stage, residual_bytes
from mmjax.pipeline.offload import DEVICE, HOST
from mmjax.pipeline.peak import bytes_by_op
from mmjax.pipeline.watch import _live_bytes, measured_in_flight, measured_memory, measured_residuals, watched
from mmjax.schedule.graph import StageGraph, StageNode, connected
from mmjax.schedule.ops import STASH_COPIES, Op, Schedule
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs
from mmjax.schedule.validate import validate

LANES, RANKS = 2, (0, 1)
SPREAD = ("eye.0", "view.0")


def spread() -> StageGraph:
    """Two encoders in lanes, one after the other, and an LLM of two stages."""
    nodes = [StageNode(name=name, module=name[:-2], index=0, ranks=RANKS, lanes=LANES) for name in SPREAD]
    nodes += [StageNode(name=f"llm.{rank}", module="llm", index=rank, ranks=(rank,)) for rank in RANKS]
    return connected(nodes, list(pairwise(node.name for node in nodes)), lambda *_: "async")


@cache
def compiled() -> Executor:
    model = graph_toy.placed(spread())
    return graph_toy.executor(model, model.graph, LANES, "nested")


def executor_of(name: str, microbatches: int, stashing: tuple[str, ...]) -> Executor:
    """The compiled programs under a schedule in which these stages stash."""
    plain = compiled()
    graph = plain.schedule.graph
    graph = replace(graph, stages=tuple(replace(node, stash=node.name in stashing) for node in graph.stages))
    executor = parity.rescheduled(plain, make_schedule(name, graph, microbatches, Costs.nominal(graph)))
    executor.initialise(toy.SEED)
    return executor


def batch(schedule: Schedule) -> tuple[Any, dict[str, float]]:
    parts = graph_toy.batch(schedule.graph, schedule.microbatches)
    return parts, graph_toy.denominators(schedule.graph, parts)


@dataclass(frozen=True)
class Measured:
    """Two steps' losses, norms and leaves; and of the second, bytes on each rank's device and of its host, by op."""

    results: list[Any]
    leaves: toy.Leaves
    device: dict[Op, dict[int, int]]
    host: dict[Op, dict[int, int]]


def run(name: str, microbatches: int, stashing: tuple[str, ...], watch: bool = True) -> Measured:
    """Two steps, the second with every op watched, or both as fast as they go."""
    compiled()  # its own arrays are not to be counted
    gc.collect()
    others = _live_bytes({device: rank for rank, device in enumerate(parity.world().devices)})
    executor = executor_of(name, microbatches, stashing)
    parts, counts = batch(executor.schedule)
    results, seen = [executor.step(parts, counts).fetch()], []
    if watch:
        with measured_memory(executor) as seen:
            results.append(executor.step(parts, counts).fetch())
    else:
        results.append(executor.step(parts, counts).fetch())
    device, host = (
        {op: {rank: held[kind][rank] - others[kind][rank] for rank in RANKS} for op, held in seen}
        for kind in (DEVICE, HOST)
    )
    return Measured(results, toy.logical(executor.placed, executor.states), device, host)


def same(one: Measured, other: Measured) -> None:
    assert one.results == other.results
    for name, leaf in one.leaves.items():
        np.testing.assert_array_equal(other.leaves[name], leaf, err_msg=name)


WAYS = [("nested", SPREAD), ("encoders-first", SPREAD[:1]), ("three-phase", SPREAD[:1])]


@pytest.mark.long
@pytest.mark.parametrize(("name", "stashing"), WAYS[:2], ids=lambda value: value if isinstance(value, str) else "")
def test_only_where_bytes_are_changes(name: str, stashing: tuple[str, ...]) -> None:
    """After every op, what is on the host is what the devices have less; in the end nothing is. Bit for bit the same,
    whether ops are dispatched to the letter of the order or as executors do."""
    run(name, 9, (), watch=False)  # moves keep zeros for ranks that no route leads to, from the first step on
    home, away, free = run(name, 9, ()), run(name, 9, stashing), run(name, 9, stashing, watch=False)
    same(home, away)
    same(home, free)
    assert [op for op in away.device if op.kind not in STASH_COPIES] == list(home.device), "the order is the same"
    assert any(any(held.values()) for held in away.host.values())
    for op, held in home.device.items():
        assert away.device[op] == {rank: size - away.host[op][rank] for rank, size in held.items()}, op
    assert not any(away.host[list(away.host)[-1]].values())


@pytest.mark.long
@pytest.mark.parametrize(("name", "stashing"), WAYS, ids=lambda value: value if isinstance(value, str) else "")
def test_devices_hold_a_unit_however_many_wait(name: str, stashing: tuple[str, ...]) -> None:
    """From live arrays: as ``validate`` says, flat over the batch; without, K units or all. The dry run says so too."""
    for count in (8, 24):
        executor = executor_of(name, count, stashing)
        shapes = list(dict(graph_toy.batch(executor.schedule.graph, 1)).values())
        kept = residual_bytes(executor.placed, shapes, executor.schedule.graph)
        promised = validate(executor.schedule, kept)
        parts, counts = batch(executor.schedule)
        with measured_residuals(executor) as most:
            executor.step(parts, counts)
        with measured_in_flight(executor) as flying:
            executor.step(parts, counts)
        assert flying == promised.in_flight
        waiting = min(count, flying["eye.0"]) // LANES
        memory = memory_by_stage(executor.placed, executor.schedule, shapes)
        for stage in stashing:
            assert max(most[stage].values()) == promised.residual_bytes[stage] and kept[stage]
            assert promised.residual_bytes[stage] <= 2 * kept[stage] < waiting * kept[stage] + kept[stage]
            held = memory[stage].residuals + memory[stage].received
            assert promised.residual_bytes[stage] <= held <= 2 * kept[stage] + memory[stage].boundaries
            assert (waiting - 1) * kept[stage] <= memory[stage].host <= waiting * kept[stage]
        if name != "nested":
            assert waiting == count // LANES


@pytest.mark.long
def test_a_dry_run_counts_what_is_there_and_one_that_is_being_copied() -> None:
    """Op by op as many bytes fewer than without as live arrays are; until the next op ends, a copy's are counted."""
    away, home = run("nested", 9, SPREAD), executor_of("nested", 9, ())
    executor = executor_of("nested", 9, SPREAD)
    shapes = list(dict(graph_toy.batch(executor.schedule.graph, 1)).values())
    counted, plain = (dict(bytes_by_op(one.placed, one.schedule, shapes)) for one in (executor, home))
    kept = residual_bytes(executor.placed, shapes, executor.schedule.graph)
    spared = set()
    for op, ranks in plain.items():
        for rank, size in ranks.items():
            late = counted[op][rank] - (size - away.host[op][rank])
            assert 0 <= late <= sum(kept[stage] for stage in SPREAD), op
            spared.add(late)
    assert spared > {0}, "most are counted exactly, and some copies are under way"


@pytest.mark.long
def test_what_was_received_waits_with_the_rest() -> None:
    """An encoder's second stage, whose layers are no loop, computes its forward again from what it received."""
    apart = Case(vision=Layout(pp=2), llm=Layout(rank_offset=2), schedule="encoders-first", microbatches=4)
    session = parity.Session(replace(apart, remat="full", unroll=True, stash=True)).start()
    executor = session.executor
    assert isinstance(executor, Executor)
    (programs,) = (own for (name, _), own in executor.stage_programs.items() if name == "vision.1")
    assert programs.functions.backward_reads_carry
    with measured_residuals(executor) as most:
        session.step(0)
    assert max(most["vision.1"].values()) == session.parts.report.residual_bytes["vision.1"]
    shapes = session.parts.shapes.values()
    memory = memory_by_stage(session.placed, session.schedule, shapes)["vision.1"]
    kept = residual_bytes(session.placed, shapes, session.schedule.graph)["vision.1"]
    assert memory.residuals + memory.received <= 2 * kept + memory.boundaries and memory.received
    assert 3 * kept <= memory.host <= 4 * kept


@pytest.mark.long
def test_a_stash_has_ended_when_every_array_is_there() -> None:
    executor = executor_of("encoders-first", 4, SPREAD[:1])
    walker, seen = executor.walker, set[Op]()

    @contextlib.contextmanager
    def around(op: Op) -> Iterator[None]:
        yield
        if op.kind == "stash":
            made = jax.tree.leaves(
                (walker.residuals[op.stage, op.microbatch], walker.carry.get((op.stage, op.microbatch)))
            )
            assert made and {id(one) for one in jax.tree.leaves(walker.end(op))} == {id(one) for one in made}
            assert {one.sharding.memory_kind for one in made} == {HOST}
            seen.add(op)

    with watched(walker, around, in_order=True):
        executor.step(*batch(executor.schedule))
    assert len(seen) == 4


def test_a_configured_module_stashes() -> None:
    graph = spread()
    own = {"eye": OffloadConfig(activations=True)}
    model = graph_toy.placed(graph, layouts={**graph_toy.layouts_of(graph), "llm": Layout(pp=2)}, offloads=own)
    assert [node.name for node in model.graph.stages if node.stashes] == ["eye.0"] and model.offloads
