"""Stage graphs: lookup, distances, and errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from stage_graphs import (
    TIE,
    chain,
    colocated,
    connect,
    frozen_encoder,
    stage,
    stage_graphs,
    steady,
    two_encoders,
    with_generators,
)

from mmjax.schedule.graph import EdgeNode, GraphError, StageGraph, connected


def test_lookup_gives_nodes_and_neighbours():
    graph = two_encoders()
    assert graph.stage("llm.1").ranks == (4,)
    assert graph.edge("two.0->llm.0").src == "two.0"
    assert [edge.src for edge in graph.in_edges("llm.0")] == ["one.1", "two.0"]
    assert [edge.dst for edge in graph.out_edges("one.0")] == ["one.1"]
    assert [stage.name for stage in graph.losses] == ["llm.2"]
    assert graph.modules == ("one", "two", "llm")
    assert graph.ranks == (0, 1, 2, 3, 4, 5)


def test_unknown_names_are_refused_with_the_known_ones():
    graph = chain(2)
    with pytest.raises(GraphError, match=r"unknown stage 'llm.2': the graph has llm.0, llm.1"):
        graph.stage("llm.2")
    with pytest.raises(GraphError, match=r"unknown edge 'x': the graph has llm.0->llm.1"):
        graph.edge("x")
    for ask in (graph.in_edges, graph.out_edges, graph.distance):
        with pytest.raises(GraphError, match=r"unknown stage 'vision.0'"):
            ask("vision.0")


def test_distance_in_a_chain_is_the_number_of_stages_behind():
    assert [chain(4).distance(f"llm.{i}") for i in range(4)] == [3, 2, 1, 0]


def test_distance_of_unequal_encoders_is_their_own():
    graph = two_encoders()
    distances = {node.name: graph.distance(node.name) for node in graph.stages}
    assert distances == {"one.0": 4, "one.1": 3, "two.0": 3, "llm.0": 2, "llm.1": 1, "llm.2": 0}


def test_hops_between_stages_that_share_ranks_do_not_count():
    assert {colocated(2, llm=3).distance(node.name) for node in colocated(2, llm=3).stages} == {0}
    llm = [stage("llm.0", (0, 1)), stage("llm.1", (2, 3))]
    for ranks, distance in (((0, 1), 1), ((0, 1, 2, 3), 1), ((4, 5), 2), ((1, 4), 1)):
        graph = connect([stage("vision.0", ranks), *llm], [("vision.0", "llm.0"), ("llm.0", "llm.1")], "async")
        assert graph.distance("vision.0") == distance


def test_the_longest_way_to_the_sink_counts():
    nodes = [stage("vision.0", (9,)), *(stage(f"llm.{i}", (i,)) for i in range(3))]
    pairs = [("vision.0", "llm.2"), ("vision.0", "llm.0"), ("llm.0", "llm.1"), ("llm.1", "llm.2")]
    assert connect(nodes, pairs, "async").distance("vision.0") == 3
    assert connect(nodes, [pairs[0], *pairs[2:]], "async").distance("vision.0") == 1


def test_generators_are_sinks_and_the_furthest_counts():
    graph = with_generators()
    assert [node.name for node in graph.losses] == ["llm.1", "one.0", "two.1"]
    wanted = {"eye.0": 5, "eye.1": 4, "llm.0": 3, "llm.1": 2, "one.0": 0, "two.0": 1, "two.1": 0}
    assert {node.name: graph.distance(node.name) for node in graph.stages} == wanted
    assert graph.gives_loss("llm.1") and not graph.gives_loss("two.0")
    without = tuple(replace(node, loss=node.loss and node.name != "one.0") for node in graph.stages)
    with pytest.raises(GraphError, match=r"'one\.0' leads nowhere and gives no loss: add an edge, or set loss=True"):
        replace(graph, stages=without)


def test_a_stage_with_a_loss_has_a_backward_though_nothing_comes_back():
    nodes = (replace(A, loss=True), stage("b.0", (1,)))
    edge = _edge("a.0", "b.0", gradient=False)
    assert not StageGraph(stages=nodes, edges=(edge,)).edges[0].gradient


def test_topological_order_is_that_of_the_stages_where_edges_allow():
    graph = chain(3)
    backwards = StageGraph(stages=graph.stages[::-1], edges=graph.edges)
    assert [node.name for node in backwards.topological] == ["llm.0", "llm.1", "llm.2"]
    assert [node.name for node in two_encoders().topological] == ["one.0", "one.1", "two.0", "llm.0", "llm.1", "llm.2"]


def test_moves_within_a_process_do_not_wait():
    pairs = [("eye.0", "llm.0"), ("llm.0", "llm.1"), ("llm.1", "llm.2")]
    ranks = {"eye.0": (3,), "llm.0": (0, 1), "llm.1": (2,), "llm.2": (2,)}
    nodes = [stage(name, stage_ranks) for name, stage_ranks in ranks.items()]
    graph = connected(nodes, pairs, lambda src, dst: "async")

    def kinds(within: int) -> list[str]:
        return [edge.kind for edge in graph.with_moves("rendezvous", within=within).edges]

    assert kinds(0) == kinds(1) == kinds(2) == ["rendezvous", "rendezvous", "local"]
    assert kinds(3) == ["rendezvous", "async", "local"]
    assert kinds(4) == ["async", "async", "local"] and not graph.with_moves("rendezvous", within=4).waits
    assert graph.with_moves("rendezvous", within=3).waits and not graph.waits


def test_moves_of_lanes_wait_where_two_lanes_are_in_several_processes():
    nodes = [replace(stage("eye.0", (0, 1, 2, 3)), lanes=4), replace(stage("llm.0", (4, 5)), lanes=2)]
    graph = connected(nodes, [("eye.0", "llm.0")], lambda src, dst: "async")
    assert graph.with_moves("rendezvous", within=3).waits, "ranks 0 and 4"
    beside = [nodes[0], replace(stage("llm.0", (0, 1, 2, 3)), lanes=2)]
    graph = connected(beside, [("eye.0", "llm.0")], lambda src, dst: "async")
    assert graph.with_moves("rendezvous", within=2).waits, "lane 2 sends from rank 2 to ranks 0 and 1"
    assert not graph.with_moves("rendezvous", within=4).waits


def test_gradients_come_back_to_what_is_trained_and_to_all_behind_it():
    ranks = {"frozen.0": (0,), "eye.0": (1, 2), "eye.1": (2, 1), "llm.0": (0,), "llm.1": (3,)}
    trained = {"eye.0"}
    nodes = [replace(stage(name, stage_ranks), trainable=name in trained) for name, stage_ranks in ranks.items()]
    pairs = [("eye.0", "eye.1"), ("frozen.0", "llm.0"), ("eye.1", "llm.0"), ("llm.0", "llm.1")]
    across: list[tuple[str, str]] = []
    graph = connected(nodes, pairs, lambda src, dst: across.append((src.name, dst.name)) or "rendezvous")
    assert [node.name for node in graph.stages] == list(ranks)
    assert [node.backward for node in graph.stages] == [False, True, True, True, True]
    assert [(edge.src, edge.dst) for edge in graph.edges] == pairs and graph.edges[1].name == "frozen.0->llm.0"
    assert [edge.gradient for edge in graph.edges] == [True, False, True, True]
    assert [edge.kind for edge in graph.edges] == ["local", "local", "rendezvous", "rendezvous"]
    assert across == pairs[2:], "equal ranks are local"


def test_a_tie_is_found_by_name_and_is_no_way_to_the_sink():
    graph = chain(3, tied=True)
    (tie,) = graph.ties
    assert graph.edge(TIE) is tie and (tie.src, tie.dst) == ("llm.0", "llm.2")
    assert graph.out_ties("llm.0") == graph.in_ties("llm.2") == (tie,)
    assert not (graph.in_ties("llm.0") or graph.out_ties("llm.2") or graph.in_ties("llm.1"))
    assert [edge.name for edge in graph.out_edges("llm.0")] == ["llm.0->llm.1"] and len(graph.in_edges("llm.2")) == 1
    assert [graph.distance(f"llm.{i}") for i in range(3)] == [2, 1, 0]
    (forward,) = graph.forward_only().ties
    assert forward == replace(tie, gradient=False)


@pytest.mark.parametrize(
    ("tie", "message"),
    [
        ({"name": "llm.0->llm.1"}, "two edges are called 'llm.0->llm.1'"),
        ({"dst": "llm.7"}, "unknown stage 'llm.7'"),
        ({"kind": "local"}, "is local between ranks"),
        ({"src": "llm.1", "dst": "llm.0"}, "goes from 'llm.1' up to 'llm.0': the first stage owns"),
        ({"dst": "llm.0", "kind": "local"}, "goes from 'llm.0' up to 'llm.0'"),
        ({"src": "vision.0"}, "joins 'vision.0' and 'llm.1': tie stages of one module"),
        ({"dst": "llm.2"}, "joins 'llm.0' and 'llm.2': tie stages of one module and layout"),
        ({"dst": "llm.3"}, "carries a gradient but stage 'llm.3' is not trained"),
    ],
)
def test_ties_that_cannot_be_are_refused(tie, message):
    llm = [stage("llm.0", (0,)), stage("llm.1", (1,)), stage("llm.2", (2, 3)), stage("llm.3", (4,), trainable=False)]
    pairs = [("vision.0", "llm.0"), *((f"llm.{i}", f"llm.{i + 1}") for i in range(3))]
    graph = connect([stage("vision.0", (9,)), *llm], pairs, "async", ("llm.0", "llm.1"))
    with pytest.raises(GraphError, match=message):
        replace(graph, ties=tuple(replace(legal, **tie) for legal in graph.ties))


def test_forward_only_trains_nothing():
    graph = two_encoders().forward_only()
    assert not any(node.backward or node.trainable for node in graph.stages)
    assert not any(edge.gradient for edge in graph.edges)
    assert [node.ranks for node in graph.stages] == [node.ranks for node in two_encoders().stages]


def _edge(src: str, dst: str, **fields) -> EdgeNode:
    return replace(EdgeNode(name=f"{src}->{dst}", src=src, dst=dst, kind="async"), **fields)


A, B, C = stage("a.0", (0,)), stage("b.0", (1,)), stage("c.0", (2,))


@pytest.mark.parametrize(
    ("stages", "edges", "message"),
    [
        ((), (), "at least one stage"),
        ((A, A), (), "two stages are called 'a.0'"),
        ((A, B), (_edge("a.0", "b.0"), _edge("a.0", "b.0")), "two edges are called 'a.0->b.0'"),
        ((replace(A, name="world"),), (), "stands for all ranks"),
        ((replace(A, ranks=()),), (), r"stage 'a.0' has ranks \(\)"),
        ((replace(A, ranks=(1, 1)),), (), "each once"),
        ((replace(A, backward=False),), (), "trainable without a backward"),
        ((replace(A, trainable=False, split=True),), (), "split but has no weights to train"),
        ((A, B), (_edge("a.0", "d.0"),), "unknown stage 'd.0'"),
        ((A, B), (_edge("a.0", "b.0", kind="pigeon"),), "'pigeon': use local, async, rendezvous"),
        ((A, B), (_edge("a.0", "b.0", kind="local"),), r"local between ranks \(0,\) and \(1,\)"),
        ((stage("a.0", (0,), backward=False), B), (_edge("a.0", "b.0"),), "'a.0' has no backward"),
        ((A, stage("b.0", (1,), backward=False)), (_edge("a.0", "b.0"),), "'b.0' has no backward"),
        ((A, B), (_edge("a.0", "b.0", gradient=False),), "no out-edge with a gradient"),
        ((A, B), (), "stage 'a.0' leads nowhere and gives no loss: add an edge, or set loss=True"),
        ((A, B, C), (_edge("a.0", "b.0"), _edge("b.0", "a.0"), _edge("a.0", "c.0")), "a.0, b.0, c.0 lie on or behind"),
        ((A, B), (_edge("a.0", "b.0"), _edge("b.0", "a.0")), "cycle"),
    ],
)
def test_ill_formed_graphs_are_refused(stages, edges, message):
    with pytest.raises(GraphError, match=message):
        StageGraph(stages=stages, edges=edges)


def test_a_stage_without_gradient_to_carry_is_fine_when_frozen():
    assert not frozen_encoder().edge("vision.0->llm.0").gradient


@steady
@given(stage_graphs())
def test_distance_never_grows_downstream(graph):
    for edge in graph.edges:
        assert graph.distance(edge.src) >= graph.distance(edge.dst) + graph.hop(edge)
    assert {graph.distance(stage.name) for stage in graph.stages if not graph.out_edges(stage.name)} == {0}
