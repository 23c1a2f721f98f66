"""Ops, their dependencies and ranks, and a schedule's views."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_graphs import (
    TIE,
    chain,
    colocated,
    connect,
    frozen_encoder,
    offloaded,
    stage,
    stage_graphs,
    steady,
    two_encoders,
)

from mmjax.schedule.graph import GraphError, show_ranks
from mmjax.schedule.ops import (
    ONCE,
    PARAMETER_COPIES,
    Op,
    Schedule,
    dependencies,
    edge_ops,
    occupied_ranks,
    occupied_resources,
    participating_ranks,
    step_ops,
    windows,
)
from mmjax.schedule.schedules import gpipe, one_f_one_b
from mmjax.schedule.simulate import Costs


def _schedule(graph, microbatches: int = 2) -> Schedule:
    return one_f_one_b(graph, microbatches, Costs.nominal(graph))


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="op kind 'f': use one of F, B, W, pack"):
        Op("f", "llm.0", 0)


def test_ops_read_well():
    assert str(Op("F", "llm.0", 3)) == "F llm.0 microbatch 3"
    assert str(Op("move", "a.0", 1, "a.0->b.0", True)) == "move a.0->b.0 backward microbatch 1"
    assert str(Op("norm", "world")) == "norm world"


def test_an_edge_has_pack_move_unpack_or_one_local_unpack():
    graph, same = chain(2), colocated(1)
    (edge,) = graph.edges
    assert edge_ops(graph, edge, 5, backward=False) == (
        Op("pack", "llm.0", 5, edge.name),
        Op("move", "llm.1", 5, edge.name),
        Op("unpack", "llm.1", 5, edge.name),
    )
    assert edge_ops(graph, edge, 5, backward=True) == (
        Op("pack", "llm.1", 5, edge.name, True),
        Op("move", "llm.0", 5, edge.name, True),
        Op("unpack", "llm.0", 5, edge.name, True),
    )
    (local,) = same.edges
    assert edge_ops(same, local, 0, backward=False) == (Op("unpack", "llm.0", 0, local.name),)
    assert edge_ops(same, local, 0, backward=True) == (Op("unpack", "encoder0.0", 0, local.name, True),)


def test_dependencies_of_every_kind():
    graph, microbatches = two_encoders(), 3
    name = "two.0->llm.0"

    def needs(*op) -> set[Op]:
        return set(dependencies(graph, microbatches, Op(*op)))

    assert needs("prepare", "llm.0") == set()
    assert needs("F", "one.0", 1) == {Op("prepare", "one.0")}
    assert needs("F", "llm.0", 1) == {
        Op("prepare", "llm.0"),
        Op("unpack", "llm.0", 1, "one.1->llm.0"),
        Op("unpack", "llm.0", 1, name),
    }
    assert needs("pack", "two.0", 1, name) == {Op("F", "two.0", 1)}
    assert needs("move", "llm.0", 1, name) == {Op("pack", "two.0", 1, name)}
    assert needs("unpack", "llm.0", 1, name) == {Op("move", "llm.0", 1, name)}
    assert needs("pack", "llm.0", 1, name, True) == {Op("B", "llm.0", 1)}
    assert needs("move", "two.0", 1, name, True) == {Op("pack", "llm.0", 1, name, True)}
    assert needs("unpack", "two.0", 1, name, True) == {Op("move", "two.0", 1, name, True)}
    assert needs("B", "two.0", 1) == {Op("F", "two.0", 1), Op("unpack", "two.0", 1, name, True)}
    assert needs("B", "llm.2", 1) == {Op("F", "llm.2", 1)}
    assert needs("W", "llm.2", 1) == {Op("B", "llm.2", 1)}
    assert needs("reduce", "one.0") == {Op("B", "one.0", 2)}
    assert needs("norm", "world") == {Op("reduce", node.name) for node in graph.stages}
    assert needs("update", "one.0") == {Op("norm", "world"), Op("reduce", "one.0")}


def test_a_local_transform_follows_its_forward_or_backward():
    graph = colocated(1)
    (edge,) = graph.edges
    assert dependencies(graph, 1, Op("unpack", "llm.0", 0, edge.name)) == (Op("F", "encoder0.0", 0),)
    assert dependencies(graph, 1, Op("unpack", "encoder0.0", 0, edge.name, True)) == (Op("B", "llm.0", 0),)


def test_a_tie_lends_before_prepare_and_returns_before_the_owner_reduces():
    graph = chain(3, tied=True)
    lend = [Op(kind, at, ONCE, TIE) for kind, at in (("pack", "llm.0"), ("move", "llm.2"), ("unpack", "llm.2"))]
    back = [Op(kind, at, ONCE, TIE, True) for kind, at in (("pack", "llm.2"), ("move", "llm.0"), ("unpack", "llm.0"))]
    needs = {op: set(dependencies(graph, 2, op)) for op in step_ops(graph, 2)}
    assert [op for op in needs if op.edge == TIE] == [*lend, *back]
    assert [needs[op] for op in lend] == [set(), {lend[0]}, {lend[1]}]
    assert needs[Op("prepare", "llm.2")] == {lend[2]}
    assert needs[Op("prepare", "llm.0")] == needs[Op("prepare", "llm.1")] == set()
    assert [needs[op] for op in back] == [{Op("reduce", "llm.2")}, {back[0]}, {back[1]}]
    assert needs[Op("reduce", "llm.0")] == {Op("B", "llm.0", 1), back[2]}
    assert needs[Op("reduce", "llm.2")] == {Op("B", "llm.2", 1)}
    assert str(lend[1]) == "move llm/embed" and str(back[1]) == "move llm/embed backward"
    for graph, occupied in ((chain(3, "async", tied=True), ()), (chain(3, "rendezvous", tied=True), (0, 2))):
        assert participating_ranks(graph, lend[1]) == participating_ranks(graph, back[1]) == (0, 2)
        assert occupied_ranks(graph, lend[1]) == occupied_ranks(graph, back[1]) == occupied


def test_a_frozen_tie_lends_and_returns_nothing():
    llm = [stage("llm.0", (1,), trainable=False), stage("llm.1", (2,), trainable=False)]
    pairs = [("vision.0", "llm.0"), ("llm.0", "llm.1")]
    graph = connect([stage("vision.0", (0,)), *llm], pairs, "async", ("llm.0", "llm.1"))
    assert [op.backward for op in step_ops(graph, 1) if op.edge == TIE] == [False] * 3
    assert [op.backward for op in step_ops(chain(2, tied=True).forward_only(), 1) if op.edge == TIE] == [False] * 3


def test_a_frozen_encoder_has_no_backward_ops():
    ops = list(step_ops(frozen_encoder(), 2))
    vision = {op.kind for op in ops if op.stage == "vision.0"}
    assert vision == {"prepare", "F", "pack"}
    assert not any(op.backward and op.edge == "vision.0->llm.0" for op in ops)
    assert dependencies(frozen_encoder(), 2, Op("norm", "world")) == (Op("reduce", "llm.0"), Op("reduce", "llm.1"))


def test_a_frozen_stage_behind_a_trainable_one_passes_gradients_on():
    nodes = [stage("vision.0", (0,)), stage("llm.0", (1,), trainable=False)]
    graph = connect(nodes, [("vision.0", "llm.0")], "async")
    kinds = {op.kind for op in step_ops(graph, 1) if op.stage == "llm.0"}
    assert {"F", "B"} <= kinds and not {"reduce", "update"} & kinds


def test_nothing_trained_means_no_norm():
    assert {op.kind for op in step_ops(chain(2).forward_only(), 1)} == {"prepare", "F", "pack", "move", "unpack"}


def test_a_split_stage_adds_its_weight_gradients_in_an_op_of_its_own():
    graph = connect([stage("a.0", (0,)), stage("b.0", (1,), trainable=False)], [("a.0", "b.0")], "async").with_split()
    assert [node.split for node in graph.stages] == [True, False]
    assert [str(op) for op in step_ops(graph, 2) if op.kind == "W"] == ["W a.0 microbatch 0", "W a.0 microbatch 1"]
    assert dependencies(graph, 2, Op("W", "a.0", 1)) == (Op("B", "a.0", 1),)
    assert dependencies(graph, 2, Op("reduce", "a.0")) == (Op("W", "a.0", 1),)
    assert not any(node.split or node.offload for node in graph.forward_only().stages)


@pytest.mark.parametrize("backward", [True, False])
def test_parameters_that_left_are_back_for_the_windows_backward_and_the_next_forward(backward):
    graph = offloaded(backward=backward)
    ops = list(step_ops(graph, 5, 2))
    assert [str(op) for op in ops if op.kind in PARAMETER_COPIES] == [
        f"{kind} e0.0 microbatch {first}" for first in (0, 2, 4) for kind in PARAMETER_COPIES
    ]

    def copies(kind: str, microbatch: int) -> list[str]:
        before = dependencies(graph, 5, Op(kind, "e0.0", microbatch), 2)
        return [str(op).removesuffix(" e0.0 microbatch 2") for op in before if op.kind in ("F", *PARAMETER_COPIES)]

    assert [copies("F", m) for m in (0, 1)] == [[], []]
    assert copies("F", 4) == ["reload"]
    assert dependencies(graph, 5, Op("offload", "e0.0", 2), 2) == (Op("F", "e0.0", 3),)
    assert dependencies(graph, 5, Op("offload", "e0.0", 4), 2) == (Op("F", "e0.0", 4),)
    assert dependencies(graph, 5, Op("offload", "e0.0", 0)) == (Op("F", "e0.0", 4),)
    assert copies("reload", 2) == ["offload"]
    assert not backward or copies("B", 3)[1:] == ["reload"]
    assert windows(5, 2) == (range(0, 2), range(2, 4), range(4, 5)) and windows(5) == (range(5),) == windows(5, 9)


def test_what_works_beside_the_ranks_is_held_too():
    graph = chain(2)
    moves = [Op("move", "llm.1", m, "llm.0->llm.1") for m in (0, 1)]
    assert (
        occupied_resources(graph, moves[0]) == occupied_resources(graph, moves[1]) == (("wire", "llm.0->llm.1", False),)
    )
    assert occupied_resources(graph, Op("move", "llm.0", 0, "llm.0->llm.1", True)) == (("wire", "llm.0->llm.1", True),)
    assert occupied_resources(chain(2, "rendezvous"), moves[0]) == (0, 1) and occupied_resources(
        graph, Op("F", "llm.1", 0)
    ) == (1,)
    copy = Op("reload", "e0.0", 0)
    assert occupied_resources(offloaded(), copy) == (("copy", 0, False), ("copy", 1, False))
    assert occupied_ranks(offloaded(), copy) == () and participating_ranks(offloaded(), copy) == (0, 1)


@steady
@given(stage_graphs(), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_step_ops_are_unique_and_in_an_order_that_works(graph, microbatches, window, split):
    graph = graph.with_split() if split else graph
    graph = replace(graph, stages=tuple(replace(node, offload=node.module != "llm") for node in graph.stages))
    earlier: set[Op] = set()
    for op in step_ops(graph, microbatches, window):
        assert op not in earlier
        assert earlier.issuperset(dependencies(graph, microbatches, op, window))
        earlier.add(op)
    assert len([op for op in earlier if op.kind == "F"]) == len(graph.stages) * microbatches


def test_ranks_of_moves_follow_the_kind_of_edge():
    for graph, occupied in ((chain(2, "async"), ()), (chain(2, "rendezvous"), (0, 1))):
        move = Op("move", "llm.1", 0, "llm.0->llm.1")
        assert participating_ranks(graph, move) == (0, 1)
        assert occupied_ranks(graph, move) == occupied
    assert occupied_ranks(chain(2), Op("pack", "llm.0", 0, "llm.0->llm.1")) == (0,)
    assert occupied_ranks(chain(2), Op("norm", "world")) == (0, 1)


def test_views_keep_the_order():
    schedule = _schedule(two_encoders())
    assert schedule.for_stage("world") == (Op("norm", "world"),)
    for rank in schedule.graph.ranks:
        mine = schedule.for_rank(rank)
        assert mine == tuple(op for op in schedule.ops if rank in participating_ranks(schedule.graph, op))
        assert Op("norm", "world") in mine
    assert Op("move", "llm.0", 0, "two.0->llm.0") in schedule.for_rank(2)
    assert schedule.for_rank(99) == ()
    assert [op.kind for op in schedule.for_stage("llm.2") if op.kind in "FB"] == ["F", "B", "F", "B"]
    with pytest.raises(GraphError, match=r"unknown stage 'llm.9'"):
        schedule.for_stage("llm.9")


def test_only_a_stage_without_backward_awaits_its_consumers():
    graph = frozen_encoder()
    schedule = _schedule(graph, 9)
    assert graph.distance("vision.0") == 2
    assert schedule.awaits(Op("F", "vision.0", 2)) == ()
    assert schedule.awaits(Op("F", "vision.0", 3)) == (Op("F", "llm.0", 0),)
    assert schedule.awaits(Op("F", "llm.0", 5)) == ()
    assert gpipe(graph, 9, Costs.nominal(graph)).awaits(Op("F", "vision.0", 8)) == ()


def test_bound_is_the_promise_but_no_more_than_there_is():
    schedule = _schedule(chain(4), 3)
    assert [schedule.bound(f"llm.{i}") for i in range(4)] == [3, 3, 2, 1]
    assert Schedule(graph=chain(1), microbatches=7, ops=(), name="none").bound("llm.0") == 7


def test_a_schedule_refuses_no_microbatches_and_promises_for_nobody():
    with pytest.raises(ValueError, match="microbatches is 0"):
        Schedule(graph=chain(1), microbatches=0, ops=(), name="none")
    with pytest.raises(GraphError, match=r"unknown stage 'vision.0'"):
        Schedule(graph=chain(1), microbatches=1, ops=(), name="none", in_flight={"vision.0": 1})


def test_describe_tells_the_order():
    lines = _schedule(chain(2), 3).describe().splitlines()
    assert lines[0] == "1f1b: 2 stages, 3 microbatches, 37 ops"
    assert lines[1] == "  llm.0  ranks 0, distance 1, in flight ≤ 2: F0 F1 B0 F2 B1 B2"
    assert lines[2] == "  llm.1  ranks 1, distance 0, in flight ≤ 1: F0 B0 F1 B1 F2 B2"


def test_describe_tells_what_is_tied():
    lines = _schedule(chain(2, tied=True), 3).describe().splitlines()
    assert lines[0] == "1f1b: 2 stages, 3 microbatches, 43 ops"
    assert lines[1].startswith("  llm.0      ranks 0, distance 1")
    assert lines[3:] == ["  llm/embed  tied: llm.0 owns it, llm.1 uses a copy"]


@pytest.mark.parametrize(("ranks", "shown"), [((3,), "3"), ((0, 1, 2), "0–2"), ((7, 0, 1, 5), "0–1,5,7")])
def test_ranks_are_shown_as_ranges(ranks, shown):
    assert show_ranks(ranks) == shown
