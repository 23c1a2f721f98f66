"""Stage graphs that the tests of this folder share: by hand, and at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mmjax.schedule.graph import EdgeKind, EdgeNode, StageGraph, StageNode, connected
from mmjax.schedule.simulate import Costs

steady = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""For every property test: the same examples in every run, however busy the machine is."""

PLACEMENTS = ("disjoint", "equal", "first", "union")
EDGE_KINDS: tuple[EdgeKind, ...] = ("async", "rendezvous")
WIDTH = 2
"""Ranks of a stage submesh in random graphs."""
TIE = "llm/embed"


def stage(name: str, ranks: Sequence[int], *, backward: bool = True, trainable: bool | None = None) -> StageNode:
    """A stage from its name; trainable if it has a backward, unless said otherwise."""
    module, index = name.rsplit(".", 1)
    train = backward if trainable is None else trainable
    return StageNode(name=name, module=module, index=int(index), ranks=tuple(ranks), backward=backward, trainable=train)


def connect(
    stages: Sequence[StageNode], pairs: Sequence[tuple[str, str]], kind: EdgeKind, tied: Sequence[str] = ()
) -> StageGraph:
    """The graph with an edge for each pair: local between equal ranks, a gradient where the source has a backward.

    tied: the stages that share a weight, if any, the owner first; its gradient comes back where both are trained.
    """
    nodes = {node.name: node for node in stages}
    edges = tuple(
        EdgeNode(
            name=f"{src}->{dst}",
            src=src,
            dst=dst,
            kind="local" if _equal(nodes[src], nodes[dst]) else kind,
            gradient=nodes[src].backward,
        )
        for src, dst in pairs
    )
    ties: tuple[EdgeNode, ...] = ()
    if tied:
        src, dst = (nodes[name] for name in tied)
        gradient = src.trainable and dst.trainable
        ties = (EdgeNode(name=TIE, src=src.name, dst=dst.name, kind=kind, gradient=gradient),)
    return StageGraph(stages=tuple(stages), edges=edges, ties=ties)


def _equal(src: StageNode, dst: StageNode) -> bool:
    return set(src.ranks) == set(dst.ranks) and src.lanes == dst.lanes


def chain(depth: int, kind: EdgeKind = "async", *, tied: bool = False) -> StageGraph:
    """A linear pipeline of `depth` LLM stages with a rank each; the first and the last may share a weight."""
    names = [f"llm.{i}" for i in range(depth)]
    ends = (names[0], names[-1]) if tied else ()
    return connect([stage(name, (i,)) for i, name in enumerate(names)], list(pairwise(names)), kind, ends)


def two_encoders() -> StageGraph:
    """Figure 4(a): encoder 1 with two stages, encoder 2 with one, an LLM with three, a rank each."""
    names = ["one.0", "one.1", "two.0", "llm.0", "llm.1", "llm.2"]
    pairs = [("one.0", "one.1"), ("one.1", "llm.0"), ("two.0", "llm.0"), ("llm.0", "llm.1"), ("llm.1", "llm.2")]
    return connect([stage(name, (i,)) for i, name in enumerate(names)], pairs, "async")


def frozen_encoder(depth: int = 2) -> StageGraph:
    """A frozen encoder without backward, on its own ranks, before an LLM of `depth` stages."""
    llm = [f"llm.{i}" for i in range(depth)]
    stages = [stage("vision.0", (8, 9), backward=False), *(stage(name, (i,)) for i, name in enumerate(llm))]
    return connect(stages, [("vision.0", "llm.0"), *pairwise(llm)], "async")


def colocated(encoders: int = 2, *, frozen: int = 0, llm: int = 1) -> StageGraph:
    """Encoders (the first `frozen` of them without backward) and LLM stages, all on the same ranks."""
    names = [f"encoder{i}.0" for i in range(encoders)]
    stages = [stage(name, range(4), backward=i >= frozen) for i, name in enumerate(names)]
    stages += [stage(f"llm.{i}", range(4)) for i in range(llm)]
    pairs = [(name, "llm.0") for name in names] + [(f"llm.{i}", f"llm.{i + 1}") for i in range(llm - 1)]
    return connect(stages, pairs, "async")


def offloaded(encoders: int = 1, *, backward: bool = True) -> StageGraph:
    """Encoders whose parameters leave the devices, and an LLM, all on the same ranks."""
    names = [f"e{i}.0" for i in range(encoders)]
    stages = [replace(stage(name, range(2), backward=backward), offload=True) for name in names]
    return connect([*stages, stage("llm.0", range(2))], [(name, "llm.0") for name in names], "async")


def with_generators() -> StageGraph:
    """An encoder of two stages, an LLM of two that gives a loss, and behind it two generators, of one stage and two."""
    names = ["eye.0", "eye.1", "llm.0", "llm.1", "one.0", "two.0", "two.1"]
    nodes = [replace(stage(name, (i,)), loss=name in ("llm.1", "one.0", "two.1")) for i, name in enumerate(names)]
    pairs = [*pairwise(names[:5]), ("llm.1", "two.0"), ("two.0", "two.1")]
    return connect(nodes, pairs, "async")


def spread(
    depth: int = 2, *, width: int = 1, chunks: int = 1, encoders: int = 1, generators: int = 0, frozen: bool = False
) -> StageGraph:
    """Encoders and generators spread in lanes over the ranks of an LLM of `depth` submeshes of `width` ranks each.

    frozen: the encoders have no backward.
    """
    everywhere = range(depth * width)
    nodes = [replace(stage(f"e{i}.0", everywhere, backward=not frozen), lanes=depth) for i in range(encoders)]
    names = [f"llm.{k}" for k in range(depth * chunks)]
    nodes += [stage(name, everywhere[k % depth * width :][:width]) for k, name in enumerate(names)]
    nodes[-1] = replace(nodes[-1], loss=True)
    nodes += [replace(stage(f"g{i}.0", everywhere), lanes=depth, loss=True) for i in range(generators)]
    pairs = [(f"e{i}.0", "llm.0") for i in range(encoders)] + list(pairwise(names))
    return connect(nodes, pairs + [(names[-1], f"g{i}.0") for i in range(generators)], "async")


@st.composite
def stage_graphs(draw: st.DrawFn) -> StageGraph:
    """One to three encoders of depth 1–3 before an LLM of depth 1–4, tied or not, placed and frozen in every way.

    Behind it may be a generator of depth 1–2, and a loss before that. The LLM may have two chunks on each submesh, and
    an encoder that is placed like it some, too.
    """
    depth = draw(st.integers(1, 4))
    chunks = draw(st.sampled_from([1, 1, 2]))
    submeshes = [tuple(range(WIDTH * i, WIDTH * (i + 1))) for i in range(depth)]
    kind: EdgeKind = draw(st.sampled_from(EDGE_KINDS))
    stages: list[StageNode] = []
    pairs: list[tuple[str, str]] = []
    free = WIDTH * depth
    for encoder in range(draw(st.integers(1, 3))):
        placement = draw(st.sampled_from(PLACEMENTS))
        length, joint = draw(st.integers(1, 3)), draw(st.integers(1, depth))
        frozen = draw(st.integers(0, length))
        for index in range(length):
            ranks = {
                "disjoint": tuple(range(free, free + WIDTH)),
                "equal": submeshes[index % depth],
                "first": submeshes[0],
                "union": tuple(rank for submesh in submeshes[:joint] for rank in submesh),
            }[placement]
            free += WIDTH * (placement == "disjoint")
            stages.append(stage(f"encoder{encoder}.{index}", ranks, backward=index >= frozen))
            joins = (
                f"encoder{encoder}.{index + 1}"
                if index + 1 < length
                else f"llm.{draw(st.integers(0, depth * chunks - 1))}"
            )
            pairs.append((stages[-1].name, joins))
    frozen_llm = draw(st.integers(0, depth * chunks))
    reached = {dst for src, dst in pairs if next(s for s in stages if s.name == src).backward}
    backward = False
    for index in range(depth * chunks):
        name, trainable = f"llm.{index}", index >= frozen_llm
        backward = backward or trainable or name in reached
        stages.append(stage(name, submeshes[index % depth], backward=backward, trainable=trainable))
        pairs += [(name, f"llm.{index + 1}")] if index + 1 < depth * chunks else []
    source = f"llm.{depth * chunks - 1}"
    for index in range(length := draw(st.integers(0, 2))):
        name, trainable = f"painter.{index}", draw(st.booleans())
        ranks = draw(st.sampled_from([submeshes[index % depth], tuple(range(free, free + WIDTH))]))
        free += WIDTH
        backward = backward or trainable
        last = index + 1 == length
        stages.append(replace(stage(name, ranks, backward=backward, trainable=trainable), loss=last))
        pairs.append((source, name))
        source = name
    if length:
        at = next(i for i, node in enumerate(stages) if node.name == f"llm.{depth * chunks - 1}")
        stages[at] = replace(stages[at], loss=draw(st.booleans()))
    tied = ("llm.0", f"llm.{depth * chunks - 1}") if depth > 1 and draw(st.booleans()) else ()
    return connect(stages, pairs, kind, tied)


@st.composite
def spread_graphs(draw: st.DrawFn, inner: str) -> StageGraph:
    """Encoders and generators spread over an LLM of 2–4 submeshes; chunks where `inner` is interleaved.

    There may be two lanes or one for a submesh, edges into later stages of the LLM, an encoder on a rank of its own, a
    tied weight, and stages that are not trained.
    """
    depth, width = draw(st.integers(2, 4)), draw(st.sampled_from([1, 1, 2]))
    chunks = draw(st.integers(1, 3)) if inner == "interleaved" else 1
    plain = spread(
        depth, width=width, chunks=chunks, encoders=draw(st.integers(0, 2)), generators=draw(st.integers(0, 2))
    )
    lanes = depth * draw(st.sampled_from([1, width]))
    nodes = [replace(node, lanes=lanes) if node.lanes > 1 else node for node in plain.stages]
    pairs = [(edge.src, edge.dst) for edge in plain.edges]
    llm = [node.name for node in nodes if node.module == "llm"]
    if draw(st.booleans()):
        nodes.insert(0, stage("x.0", (depth * width,)))
        pairs.append(("x.0", draw(st.sampled_from(llm))))
    if nodes[0].module == "e0" and draw(st.booleans()):
        pairs.append(("e0.0", draw(st.sampled_from(llm[1:]))))
    kind: EdgeKind = draw(st.sampled_from(EDGE_KINDS))
    frozen = draw(st.sets(st.sampled_from([node.name for node in nodes])))
    ties: tuple[EdgeNode, ...] = ()
    if draw(st.booleans()):
        ties = (EdgeNode(name=TIE, src=llm[0], dst=llm[-1], kind=kind, gradient=frozen.isdisjoint((llm[0], llm[-1]))),)
    return connected([replace(node, trainable=node.name not in frozen) for node in nodes], pairs, lambda *_: kind, ties)


@st.composite
def costs_of(draw: st.DrawFn, graph: StageGraph) -> Costs:
    """Nominal costs with a forward of its own for every stage; some ops take no time."""
    seconds = st.sampled_from([0.0, 0.3, 1.0, 1.7])
    return Costs.nominal(
        graph,
        forward={node.name: draw(seconds) for node in graph.stages},
        move=draw(st.sampled_from([0.0, 0.1])),
        once=draw(st.sampled_from([0.0, 0.4])),
    )
