"""The stage graph: the stages and edges that a pipeline schedule runs.

A module graph (encoders, LLM, generators) is expanded into its pipeline stages; an edge carries an activation from one
stage to another, inside a module or across a boundary. It is the PP-stage graph of Karnati et al., "Heterogeneous
Parallelism for Multimodal Large Language Model Training", §3.3 and figure 4(a). Nothing here knows a device or array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

EdgeKind = Literal["local", "async", "rendezvous"]
GatherKind = Literal["", "pull", "collective"]

WORLD = "world"
"""The stage name of ops that involve every rank; no stage may be called so."""


class GraphError(ValueError):
    """A stage graph that is not well formed, or a name that it does not have."""


@dataclass(frozen=True, kw_only=True)
class StageNode:
    """A contiguous run of a module's layers on one stage submesh.

    name: "module.index", e.g. "llm.0". ranks: world ranks of the submesh; several stages of a module with equal ranks
    are its chunks. backward: a backward program exists, that is, the stage or something upstream of it is trained.
    trainable: the stage itself has trained parameters. loss: it gives a loss, beside its activation if it has
    out-edges; a stage without any gives one in any case. split: its backward is two programs, B for the gradients of
    its inputs and W for those of its weights. offload: its compute parameters leave the devices between a window's last
    F and first B. stash: the residuals of a microbatch leave the devices between its F and its B.
    microbatches: microbatches that an op of the stage takes together; the op is named after the first of them. More
    than one is for encoders with phases of their own, which run once for a whole window or a part of it.
    lanes: equal runs of `ranks` that take microbatches in turn, microbatch m on lane m mod lanes; several where a
    module is spread over the ranks of another module's pipeline (nested schedules). Ops that run once a step, such as
    the update, run on all ranks.
    gather: how a lane gets the parameters that lie in shards on all lanes, before an F or B: "pull" (it copies them
    from the other lanes, which take no part), "collective" (all lanes gather them together, so that each waits for the
    last) or "" (they are whole).
    """

    name: str
    module: str
    index: int
    ranks: tuple[int, ...]
    backward: bool = True
    trainable: bool = True
    loss: bool = False
    split: bool = False
    offload: bool = False
    stash: bool = False
    microbatches: int = 1
    lanes: int = 1
    gather: GatherKind = ""

    def first_of(self, microbatch: int) -> int:
        """The first of the microbatches that an op takes together with `microbatch`: the op is named after it."""
        return microbatch - microbatch % self.microbatches if microbatch > 0 else microbatch

    def together(self, microbatch: int, microbatches: int) -> range:
        """The microbatches of the op that has `microbatch`, in a step of `microbatches`; the last op may have fewer."""
        first = self.first_of(microbatch)
        return range(first, min(first + self.microbatches, microbatches))

    def lane(self, microbatch: int) -> int:
        """The lane that `microbatch` runs on."""
        return microbatch % self.lanes

    def ranks_of(self, microbatch: int) -> tuple[int, ...]:
        """The ranks that run an op of `microbatch`: its lane's, or all for an op that runs once a step."""
        if self.lanes == 1 or microbatch < 0:
            return self.ranks
        width, lane = len(self.ranks) // self.lanes, self.lane(microbatch)
        return self.ranks[lane * width : (lane + 1) * width]

    def lane_name(self, microbatch: int) -> str:
        """The name of the lane that runs `microbatch`: the stage's name for the first, "vision.0/1" for the second."""
        return lane_name(self.name, self.lane(microbatch))

    @property
    def stashes(self) -> bool:
        """Whether it has residuals between F and B and they leave the devices."""
        return self.stash and self.backward

    @property
    def lane_names(self) -> tuple[str, ...]:
        """The names of all lanes, such as ("vision.0", "vision.0/1"); a stage without lanes has one, its own name."""
        return tuple(self.lane_name(lane) for lane in range(self.lanes))

    def gathered_for(self, microbatch: int) -> int:
        """The microbatch of the gather that `microbatch` uses: its own if its lane pulls, or else the first of those
        that all lanes run together.
        """
        return microbatch if self.gather == "pull" else microbatch - self.lane(microbatch)

    def last_of_lanes(self, span: range) -> range:
        """The microbatches after which the last ops of a stage in `span` are named, one for each lane.

        Lanes without a microbatch in `span` have none.
        """
        return span[-self.lanes :] if self.microbatches == 1 else range(last := self.first_of(span[-1]), last + 1)


@dataclass(frozen=True, kw_only=True)
class EdgeNode:
    """Data that stage `src` sends to stage `dst`; `gradient` says whether its gradient comes back.

    An edge carries an activation for each microbatch. A tie carries a weight of `src` that `dst` uses too, once a step.
    name: such as "vision.0->llm.0"; a tie has the name of its weight.
    kind: "local" (equal rank sets, no move), "async" (the sender does not wait for its receiver) or "rendezvous"
    (both sides take part in the move). If a stage of the edge has lanes, `kind` applies to the microbatches whose two
    lanes have different ranks; all other microbatches are local (see `StageGraph.kind_of`).
    """

    name: str
    src: str
    dst: str
    kind: EdgeKind
    gradient: bool = True


@dataclass(frozen=True, kw_only=True)
class StageGraph:
    """Stages and the edges between them: acyclic, every stage leads to a loss.

    A stage without out-edges is a sink. There may be several, such as an LLM's generators. Each sink must be marked as
    giving a loss, so a forgotten edge is an error.

    ties: edges for weights that two stages of one module share, such as a tied embedding; the owner comes first.

    Raises GraphError, naming what is wrong, when it is built. Its methods raise GraphError for the name of a stage that
    it lacks, but `in_ties` and `out_ties` return ().
    """

    stages: tuple[StageNode, ...]
    edges: tuple[EdgeNode, ...] = ()
    ties: tuple[EdgeNode, ...] = ()

    def __post_init__(self) -> None:
        _check_names(self)
        for stage in self.stages:
            _check_stage(stage)
        for edge in (*self.edges, *self.ties):
            _check_edge(self, edge)
        for tie in self.ties:
            _check_tie(self, tie)
        _check_sinks(self)
        _check_gradients(self)

    # ---- lookup ------------------------------------------------------------------------------------------------------

    def stage(self, name: str) -> StageNode:
        """The stage called `name`; GraphError if there is none."""
        return self._by_name(self._stages, "stage", name)

    def edge(self, name: str) -> EdgeNode:
        """The edge or tie called `name`; GraphError if there is none."""
        return self._by_name(self._edges, "edge", name)

    def in_edges(self, stage: str) -> tuple[EdgeNode, ...]:
        """Edges that end in `stage`, in the order of `edges`; GraphError for an unknown name."""
        return self._in_edges[self.stage(stage).name]

    def out_edges(self, stage: str) -> tuple[EdgeNode, ...]:
        """Edges that start from `stage`, in the order of `edges`; GraphError for an unknown name."""
        return self._out_edges[self.stage(stage).name]

    def in_ties(self, stage: str) -> tuple[EdgeNode, ...]:
        """Ties of the weights that `stage` borrows; () for an unknown name."""
        return tuple(tie for tie in self.ties if tie.dst == stage)

    def out_ties(self, stage: str) -> tuple[EdgeNode, ...]:
        """Ties of the weights that `stage` owns and lends; () for an unknown name."""
        return tuple(tie for tie in self.ties if tie.src == stage)

    @staticmethod
    def _by_name(table: dict, noun: str, name: str):
        if name not in table:
            raise GraphError(f"unknown {noun} {name!r}: the graph has {', '.join(table) or 'none'}")
        return table[name]

    # ---- shape -------------------------------------------------------------------------------------------------------

    @property
    def modules(self) -> tuple[str, ...]:
        """Module names, in the order of their first stage."""
        return tuple(dict.fromkeys(stage.module for stage in self.stages))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that some stage uses, sorted."""
        return tuple(sorted({rank for stage in self.stages for rank in stage.ranks}))

    @cached_property
    def losses(self) -> tuple[StageNode, ...]:
        """The stages that give a loss, in the order of `stages`."""
        return tuple(stage for stage in self.stages if stage.loss or not self._out_edges[stage.name])

    def gives_loss(self, stage: str) -> bool:
        """Whether `stage` gives a loss."""
        return self.stage(stage) in self.losses

    @cached_property
    def topological(self) -> tuple[StageNode, ...]:
        """Stages with every edge's source before its destination, and otherwise in the order of `stages`."""
        missing = {stage.name: len(self._in_edges[stage.name]) for stage in self.stages}
        order: list[StageNode] = []
        while len(order) < len(self.stages):
            ready = next((name for name, count in missing.items() if count == 0), None)
            if ready is None:
                raise GraphError(f"stages {', '.join(missing)} lie on or behind a cycle of edges: a pipeline has none")
            del missing[ready]
            order.append(self._stages[ready])
            for edge in self._out_edges[ready]:
                missing[edge.dst] -= 1
        return tuple(order)

    def stages_on(self, rank: int) -> tuple[tuple[str, int], ...]:
        """(stage name, lane that the rank is in) of the stages on `rank`, sources first; () for an unused rank."""
        indices = ((node, node.ranks.index(rank)) for node in self.topological if rank in node.ranks)
        return tuple((node.name, index * node.lanes // len(node.ranks)) for node, index in indices)

    def kind_of(self, edge: EdgeNode, microbatch: int) -> EdgeKind:
        """The kind of `edge` for `microbatch`: "local" where the lanes of both stages have the same ranks."""
        src, dst = self.stage(edge.src), self.stage(edge.dst)
        if src.lanes == dst.lanes == 1:
            return edge.kind
        return "local" if set(src.ranks_of(microbatch)) == set(dst.ranks_of(microbatch)) else edge.kind

    def ends(self, edge: EdgeNode, microbatch: int) -> tuple[str, str]:
        """The names of the lanes of `src` and `dst` that have `microbatch`, such as ("vision.0/1", "llm.0")."""
        return self.stage(edge.src).lane_name(microbatch), self.stage(edge.dst).lane_name(microbatch)

    def lane_cycle(self, edge: EdgeNode) -> range:
        """The first microbatches, `range(n)` for n pairs of lanes that `edge` joins; later ones repeat these `ends`."""
        return range(math.lcm(self.stage(edge.src).lanes, self.stage(edge.dst).lanes))

    def shares_out(self, edge: EdgeNode) -> bool:
        """Whether one op of the source gives the activations of several microbatches of the target."""
        return self.stage(edge.src).microbatches > self.stage(edge.dst).microbatches

    def first_of(self, edge: EdgeNode, microbatch: int) -> int:
        """The microbatch after which the ops of `edge` that carry `microbatch` are named."""
        return self.stage(edge.src).first_of(microbatch)

    def hop(self, edge: EdgeNode) -> int:
        """0 if the two stages of `edge` share a rank and so cannot run at the same time, else 1."""
        return 0 if set(self.stage(edge.src).ranks) & set(self.stage(edge.dst).ranks) else 1

    def distance(self, stage: str) -> int:
        """The largest number of hops from `stage` to a sink: how many stages can be at work behind it at once."""
        return self._distances[self.stage(stage).name]

    def forward_only(self) -> StageGraph:
        """The same graph for evaluation, with nothing trained and no gradients."""
        nothing = {"backward": False, "trainable": False, "split": False, "offload": False, "stash": False}
        stages = tuple(replace(stage, **nothing, gather="", microbatches=1) for stage in self.stages)
        edges, ties = (tuple(replace(e, gradient=False) for e in edges) for edges in (self.edges, self.ties))
        return StageGraph(stages=stages, edges=edges, ties=ties)

    @property
    def waits(self) -> bool:
        """Whether some sender waits for its receiver."""
        return any(edge.kind == "rendezvous" for edge in self.edges)

    def with_split(self, whole: Collection[str] = ()) -> StageGraph:
        """The same graph with the backward of every trained stage split into B and W; modules `whole` have one op."""
        stages = (replace(node, split=node.trainable and node.module not in whole) for node in self.stages)
        return replace(self, stages=tuple(stages))

    def among(self, names: Collection[str]) -> StageGraph:
        """The graph of the stages `names` alone, with the edges and ties between them."""
        edges, ties = (
            tuple(edge for edge in edges if {edge.src, edge.dst} <= {*names}) for edges in (self.edges, self.ties)
        )
        return StageGraph(stages=tuple(node for node in self.stages if node.name in names), edges=edges, ties=ties)

    def with_gathers(self, gathers: Mapping[str, GatherKind]) -> StageGraph:
        """The same graph, whose stages gather as `gathers` says by name; all others have whole parameters."""
        return replace(self, stages=tuple(replace(node, gather=gathers.get(node.name, "")) for node in self.stages))

    def with_moves(self, kind: Literal["async", "rendezvous"], *, within: int = 0) -> StageGraph:
        """The same graph, all of whose edges and ties between different ranks are of this kind, and gathers likewise.

        Without waiting, lanes pull; else their gathers are collectives.

        Args:
          kind: the kind of the moves.
          within: ranks of a process: what lies in one process stays as it is. 0 leaves nothing as it is.
        """
        way: GatherKind = "pull" if kind == "async" else "collective"

        def is_changed(ranks: Iterable[int]) -> bool:
            return not within or len({rank // within for rank in ranks}) > 1

        def is_moved(source: StageNode, target: StageNode) -> bool:
            lanes = range(math.lcm(source.lanes, target.lanes))
            pairs = ((*source.ranks_of(m % source.lanes), *target.ranks_of(m % target.lanes)) for m in lanes)
            return any(map(is_changed, pairs))

        def moved(edges: tuple[EdgeNode, ...]) -> tuple[EdgeNode, ...]:
            ends = [(self.stage(edge.src), self.stage(edge.dst)) for edge in edges]
            return tuple(
                replace(edge, kind=kind) if edge.kind != "local" and is_moved(*pair) else edge
                for edge, pair in zip(edges, ends, strict=True)
            )

        graph = replace(self, edges=moved(self.edges), ties=moved(self.ties))
        gathers: dict[str, GatherKind] = {
            node.name: way if is_changed(node.ranks) else node.gather for node in self.stages if node.gather
        }
        return graph.with_gathers(gathers)

    def with_few_ranks(self) -> StageGraph:
        """The same graph with one rank in place of each run of ranks that have the same stages.

        Ranks are numbered anew from 0. A step takes as long, and its simulation is faster. If the ranks of other stages
        cut the lanes of a stage into different numbers of runs, the graph stays as it is.
        """
        lanes = [node.ranks_of(lane) for node in self.stages for lane in range(node.lanes)]
        starts = sorted({rank for ranks in lanes for rank in (ranks[0], ranks[-1] + 1)})
        run = {start: index for index, start in enumerate(starts)}
        for node in self.stages:
            lengths = {run[r[-1] + 1] - run[r[0]] for r in map(node.ranks_of, range(node.lanes))}
            if len(lengths) > 1:
                return self
        ranks = {node.name: range(run[node.ranks[0]], run[node.ranks[-1] + 1]) for node in self.stages}
        return replace(self, stages=tuple(replace(node, ranks=tuple(ranks[node.name])) for node in self.stages))

    # ---- tables, made once -------------------------------------------------------------------------------------------

    @cached_property
    def _stages(self) -> dict[str, StageNode]:
        return {stage.name: stage for stage in self.stages}

    @cached_property
    def _edges(self) -> dict[str, EdgeNode]:
        return {edge.name: edge for edge in (*self.edges, *self.ties)}

    @cached_property
    def _in_edges(self) -> dict[str, tuple[EdgeNode, ...]]:
        return {stage.name: tuple(e for e in self.edges if e.dst == stage.name) for stage in self.stages}

    @cached_property
    def _out_edges(self) -> dict[str, tuple[EdgeNode, ...]]:
        return {stage.name: tuple(e for e in self.edges if e.src == stage.name) for stage in self.stages}

    @cached_property
    def _distances(self) -> dict[str, int]:
        distances: dict[str, int] = {}
        for stage in reversed(self.topological):
            hops = (distances[edge.dst] + self.hop(edge) for edge in self._out_edges[stage.name])
            distances[stage.name] = max(hops, default=0)
        return distances


def _check_names(graph: StageGraph) -> None:
    if not graph.stages:
        raise GraphError("a graph has at least one stage, this one has none")
    edges = [edge.name for edge in (*graph.edges, *graph.ties)]
    for noun, names in (("stage", [s.name for s in graph.stages]), ("edge", edges)):
        if repeated := [name for name in names if names.count(name) > 1]:
            raise GraphError(f"two {noun}s are called {repeated[0]!r}: names are unique")


def _check_stage(stage: StageNode) -> None:
    if stage.name == WORLD:
        raise GraphError(f"stage {WORLD!r}: the name stands for all ranks, choose another")
    if not stage.ranks or len(set(stage.ranks)) != len(stage.ranks):
        raise GraphError(f"stage {stage.name!r} has ranks {stage.ranks}: give at least one rank, each once")
    if stage.lanes < 1 or len(stage.ranks) % stage.lanes:
        raise GraphError(f"stage {stage.name!r} has {stage.lanes} lanes on {len(stage.ranks)} ranks: lanes are equal")
    if stage.microbatches < 1 or (stage.microbatches > 1 and stage.lanes > 1):
        raise GraphError(
            f"stage {stage.name!r} has {stage.microbatches} microbatches an op and {stage.lanes} lanes: set one to 1"
        )
    if stage.trainable and not stage.backward:
        raise GraphError(f"stage {stage.name!r} is trainable without a backward: set backward=True")
    if stage.gather not in get_args(GatherKind):
        raise GraphError(f"stage {stage.name!r} gathers by {stage.gather!r}: use {', '.join(get_args(GatherKind))}")
    if stage.gather and stage.lanes == 1:
        raise GraphError(f"stage {stage.name!r} gathers and has one lane: the shards are on several, set gather=''")
    if stage.split and not stage.trainable:
        raise GraphError(f"stage {stage.name!r} is split but has no weights to train: set split=False")


def _check_edge(graph: StageGraph, edge: EdgeNode) -> None:
    src, dst = graph.stage(edge.src), graph.stage(edge.dst)
    if edge.kind not in get_args(EdgeKind):
        raise GraphError(f"edge {edge.name!r} has kind {edge.kind!r}: use {', '.join(get_args(EdgeKind))}")
    if edge.kind == "local" and (set(src.ranks) != set(dst.ranks) or src.lanes != dst.lanes):
        raise GraphError(
            f"edge {edge.name!r} is local between ranks {src.ranks} and {dst.ranks}: use async or rendezvous"
        )
    if dst.microbatches not in (1, src.microbatches):
        raise GraphError(
            f"edge {edge.name!r}: {src.microbatches} microbatches an op to {dst.microbatches}: give the source as many"
        )
    if src.microbatches > dst.microbatches and dst.lanes > 1:
        raise GraphError(f"edge {edge.name!r} shares out microbatches and {dst.name!r} has lanes: set lanes=1")
    if edge.gradient and not (src.backward and dst.backward):
        forward_only = dst if src.backward else src
        raise GraphError(f"edge {edge.name!r} carries a gradient but stage {forward_only.name!r} has no backward")


def _check_tie(graph: StageGraph, tie: EdgeNode) -> None:
    src, dst = graph.stage(tie.src), graph.stage(tie.dst)
    if src.module != dst.module or len(src.ranks) != len(dst.ranks) or src.lanes != dst.lanes:
        raise GraphError(f"tie {tie.name!r} joins {src.name!r} and {dst.name!r}: tie stages of one module and layout")
    if graph.topological.index(src) >= graph.topological.index(dst):
        raise GraphError(f"tie {tie.name!r} goes from {src.name!r} up to {dst.name!r}: the first stage owns the weight")
    if tie.gradient and not (src.trainable and dst.trainable):
        frozen = dst if src.trainable else src
        raise GraphError(f"tie {tie.name!r} carries a gradient but stage {frozen.name!r} is not trained")


def _check_sinks(graph: StageGraph) -> None:
    assert graph.topological, "raises where there is a cycle"
    sinks = [stage for stage in graph.stages if not graph.out_edges(stage.name)]
    if len(sinks) > 1 and (wrong := [stage.name for stage in sinks if not stage.loss]):
        raise GraphError(f"stage {wrong[0]!r} leads nowhere and gives no loss: add an edge, or set loss=True")


def _check_gradients(graph: StageGraph) -> None:
    for stage in graph.stages:
        outs = graph.out_edges(stage.name)
        if stage.backward and outs and not stage.loss and not any(edge.gradient for edge in outs):
            raise GraphError(f"stage {stage.name!r} has a backward but no out-edge with a gradient: set gradient=True")


def connected(
    stages: Iterable[StageNode],
    pairs: Sequence[tuple[str, str]],
    across: Callable[[StageNode, StageNode], EdgeKind],
    ties: tuple[EdgeNode, ...] = (),
) -> StageGraph:
    """The graph of `stages`, sources first, with an edge for each of `pairs`: (name of the source, name of its user).

    The stages' `backward` is not read: a stage has a backward if it is trained or one of its sources has a backward.
    Every source with a backward gets its gradient back. An edge between equal ranks is local.

    Args:
      stages: such as `StageNode(name="llm.0", module="llm", index=0, ranks=(1, 2), loss=True)`.
      pairs: such as ("vision.0", "llm.0").
      across: `across(src, dst)` returns the kind of every other edge: "async" or "rendezvous".
      ties: edges of weights that two stages share.

    Raises:
      GraphError: the graph is not well formed: it has a circle, or a stage that leads to no loss.
    """
    nodes: dict[str, StageNode] = {}
    for stage in stages:
        trained_before = any(nodes[source].backward for source, user in pairs if user == stage.name)
        nodes[stage.name] = replace(stage, backward=stage.trainable or trained_before)
    edges = []
    for source, user in pairs:
        src, dst = nodes[source], nodes[user]
        equal = set(src.ranks) == set(dst.ranks) and src.lanes == dst.lanes
        kind = "local" if equal else across(src, dst)
        name = edge_name(source, user)
        edges.append(EdgeNode(name=name, src=source, dst=user, kind=kind, gradient=src.backward))
    return StageGraph(stages=tuple(nodes.values()), edges=tuple(edges), ties=ties)


def lane_name(stage: str, lane: int) -> str:
    """The name of a lane of a stage: `lane_name("vision.0", 1)` is "vision.0/1", lane 0 is "vision.0"."""
    return f"{stage}/{lane}" if lane else stage


def edge_name(source: str, user: str) -> str:
    """The name of the edge between two stages, or two lanes, by their names: "vision.0->llm.0"."""
    return f"{source}->{user}"


def show_ranks(ranks: tuple[int, ...]) -> str:
    """Ranks as ranges: (0, 1, 2, 5) is "0–2,5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
