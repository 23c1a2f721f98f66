"""Ops and schedules: a training step as one totally ordered list of small programs.

`dependencies` is the only definition of the results that an op reads; making, checking, timing and running a schedule
all use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mmjax.schedule.graph import WORLD, EdgeNode, StageGraph, StageNode, show_ranks

ONCE = -1
"""The microbatch of an op that runs once a step."""

EDGE_KINDS = ("pack", "move", "unpack")
PARAMETER_COPIES = ("offload", "reload")
STASH_COPIES = ("stash", "unstash")
MOST_UNSTASHED = 2
"""The most microbatches of a stashing stage's lane between F and B that are on its devices at once."""
COPY_KINDS = (*PARAMETER_COPIES, *STASH_COPIES)
KINDS = ("F", "B", "W", *EDGE_KINDS, *COPY_KINDS, "gather", "prepare", "reduce", "norm", "update")


@dataclass(frozen=True, slots=True)
class Op:
    """One run of a program: its `kind`, the name of its `stage` and its `microbatch` (`ONCE`: once a step).

    Raises ValueError for an unknown kind.

    Kinds:
      F, B, W: forward and backward. B of a split stage computes the gradient of its inputs, W that of its weights. An
        op that takes several microbatches (`StageNode.microbatches`) is named after the first, and so are the ops of
        edges that leave its stage.
      pack, move, unpack: carry the activation of the edge named `edge`, such as "vision.0->llm.0", or its gradient if
        `backward`. `stage` is the sender for a pack, the receiver for move and unpack. A local edge has only an unpack,
        which is the whole colocated transform. The ops of a tie carry its weight to the stage that borrows it, and the
        reduced gradient back, once a step.
      offload, reload: copy a stage's compute parameters to the host and back, between a window's last F and its first
        B. `microbatch` is the window's first.
      stash, unstash: copy the residuals that a microbatch's F keeps for its B to the host and back, on its lane.
      gather: makes a lane's parameters whole for the F of a microbatch, or for its B if `backward`; a collective one
        those of all lanes, for the microbatches that they run together, of which `microbatch` is the first.
      prepare, reduce, norm, update, once a step: make the weights ready, sum gradients over dp, compute squared
        gradient norms (on all ranks; the stage is "world"), and update.
    """

    kind: str
    stage: str
    microbatch: int = ONCE
    edge: str = ""
    backward: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"op kind {self.kind!r}: use one of {', '.join(KINDS)}")

    def __str__(self) -> str:
        where = f"{self.edge}{' backward' if self.backward else ''}" if self.edge else self.stage
        return f"{self.kind} {where}" + (f" microbatch {self.microbatch}" if self.microbatch >= 0 else "")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A step of `microbatches` microbatches over `graph` as one total order of `ops`.

    Raises ValueError for less than 1 microbatch or a negative window, GraphError for a stage of `in_flight` that the
    graph lacks. `validate` checks the ops.

    Attributes:
      name: name in messages and pictures, such as "1f1b".
      in_flight: the promised bound on microbatches in flight, by stage; stages that are not named have no bound. A
        microbatch is in flight from the start of its F to the end of its B. In a split stage it is to the end of its
        W, and in a stage without backward to the end of its consumers' F.
      window: microbatches of a window, for offload and reload. 0 is all; the last window may be smaller.
      waits: for an op, further ops that must end first, beside its dependencies. Named only where the order of ops on
        ranks does not ensure it.
      skipped_gathers: gathers that are left out, since the parameters are still there from the op before.
    """

    graph: StageGraph
    microbatches: int
    ops: tuple[Op, ...]
    name: str
    in_flight: Mapping[str, int] = field(default_factory=dict, hash=False)
    window: int = 0
    waits: Mapping[Op, tuple[Op, ...]] = field(default_factory=dict, hash=False)
    skipped_gathers: frozenset[Op] = frozenset()

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches is {self.microbatches}: a schedule needs at least 1")
        if self.window < 0:
            raise ValueError(f"window is {self.window}: give microbatches, or 0 for all")
        for stage in self.in_flight:
            self.graph.stage(stage)

    def for_rank(self, rank: int) -> tuple[Op, ...]:
        """The ops that `rank` takes part in, in order; a move belongs to both of its sides. () for an unused rank."""
        return self._by_rank.get(rank, ())

    def for_stage(self, stage: str) -> tuple[Op, ...]:
        """The ops whose stage is `stage`, such as "llm.0" or `WORLD`, in order; GraphError for an unknown one."""
        if stage != WORLD:
            self.graph.stage(stage)
        return tuple(op for op in self.ops if op.stage == stage)

    def dependencies(self, op: Op) -> tuple[Op, ...]:
        """The ops whose results `op` reads."""
        needed = dependencies(self.graph, self.microbatches, op, self.window)
        return (
            tuple(before for before in needed if before not in self.skipped_gathers) if self.skipped_gathers else needed
        )

    def awaits(self, op: Op) -> tuple[Op, ...]:
        """Ops that must end before `op` starts although it does not read their results: for `in_flight`, and `waits`.

        No gradient comes back to a stage without backward, so only these ops keep it from running arbitrarily far
        ahead; for other stages the order of F and B is enough. They shape the order and the simulation, and the
        executor delays an op until they have ended (`pipeline.awaiting`).
        """
        return (*awaits(self.graph, self.in_flight, op), *self.waits.get(op, ()))

    def bound(self, stage: str) -> int:
        """The most microbatches of `stage` that may be in flight: its bound in `in_flight`, or else all."""
        return min(self.microbatches, self.in_flight.get(self.graph.stage(stage).name, self.microbatches))

    def describe(self) -> str:
        """A line for the schedule, and one for each stage (ranks, distance, in-flight bound, order of FBW) and tie."""
        lines = [f"{self.name}: {len(self.graph.stages)} stages, {self.microbatches} microbatches, {len(self.ops)} ops"]
        width = max(len(node.name) for node in (*self.graph.stages, *self.graph.ties))
        for stage in self.graph.stages:
            order = " ".join(f"{op.kind}{op.microbatch}" for op in self.for_stage(stage.name) if op.kind in "FBW")
            per_lane = f", {-(-self.bound(stage.name) // stage.lanes)} a lane" if stage.lanes > 1 else ""
            lines.append(
                f"  {stage.name:{width}}  ranks {_show_lanes(stage)}, distance {self.graph.distance(stage.name)},"
                f" in flight ≤ {self.bound(stage.name)}{per_lane}: {order}"
            )
        for tie in self.graph.ties:
            lines.append(f"  {tie.name:{width}}  tied: {tie.src} owns it, {tie.dst} uses a copy")
        return "\n".join(lines)

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Op, ...]]:
        table: dict[int, list[Op]] = {rank: [] for rank in self.graph.ranks}
        for op in self.ops:
            for rank in participating_ranks(self.graph, op):
                table[rank].append(op)
        return {rank: tuple(ops) for rank, ops in table.items()}


def _show_lanes(stage: StageNode) -> str:
    lanes = f" in {stage.lanes} lanes" if stage.lanes > 1 else ""
    return f"{show_ranks(stage.ranks)}{lanes}"


# ---- the ops of a step -----------------------------------------------------------------------------------------------


def windows(microbatches: int, window: int = 0) -> tuple[range, ...]:
    """The microbatches of a step in windows of `window`: `windows(5, 2)` is (range(0, 2), range(2, 4), range(4, 5)).

    The last one may be smaller. A `window` of 0 is one window of all.
    """
    size = window or microbatches
    return tuple(range(first, min(first + size, microbatches)) for first in range(0, microbatches, size))


def step_ops(graph: StageGraph, microbatches: int, window: int = 0) -> Iterator[Op]:
    """Every op of a step, each once, in an order that respects dependencies but does not aim at overlap.

    A stage without backward has no B, an edge without gradient no backward ops, and a stage that is not trainable no
    reduce and no update; where nothing is trained there is no norm either. An op is such as `Op("F", "llm.0", 0)`.

    Args:
      graph: the stages and edges, such as `apart([vision], llm, {"vision": 1, "llm": 2}).graph`.
      microbatches: microbatches of a step; the first is 0.
      window: microbatches of a window, 0 for the whole step. It matters only with offload and reload, which force all F
        of a window before its first B.
    """
    trainable = [stage.name for stage in graph.topological if stage.trainable]
    for tie in graph.ties:
        yield from edge_ops(graph, tie, ONCE, backward=False)
    yield from (Op("prepare", stage.name) for stage in graph.topological)
    apart = not any(stage.offload or stage.microbatches > 1 for stage in graph.stages)
    for span in windows(microbatches, 1 if apart else window):
        for microbatch in span:
            for stage in graph.topological:
                if microbatch != stage.first_of(microbatch):
                    continue
                if gathers(stage, microbatch):
                    yield Op("gather", stage.name, microbatch)
                yield Op("F", stage.name, microbatch)
                for edge in graph.out_edges(stage.name):
                    yield from edge_ops(graph, edge, microbatch, backward=False)
                if stage.stashes:
                    yield Op("stash", stage.name, microbatch)
        yield from (Op(kind, node.name, span[0]) for node in graph.stages if node.offload for kind in PARAMETER_COPIES)
        for microbatch in span:
            for stage in reversed(graph.topological):
                *_, last = stage.together(microbatch, microbatches)
                if microbatch == last:  # all gradients of its microbatches are back
                    yield from _backward_ops(graph, stage, microbatch, microbatches)
    for stage in reversed(trainable):  # the owner of a tied weight after the borrower
        yield Op("reduce", stage)
        for tie in graph.in_ties(stage):
            if tie.gradient:
                yield from edge_ops(graph, tie, ONCE, backward=True)
    if trainable:
        yield Op("norm", WORLD)
    yield from (Op("update", stage) for stage in trainable)


def _backward_ops(graph: StageGraph, stage: StageNode, microbatch: int, microbatches: int) -> Iterator[Op]:
    """The ops of a stage's backward that ends with `microbatch`, and of edges that then have all gradients."""
    first = stage.first_of(microbatch)
    if stage.stashes:
        yield Op("unstash", stage.name, first)
    if stage.backward and gathers(stage, first):
        yield Op("gather", stage.name, first, backward=True)
    if stage.backward:
        yield Op("B", stage.name, first)
    for edge in graph.in_edges(stage.name):
        *_, last = graph.stage(edge.src).together(microbatch, microbatches)
        if edge.gradient and microbatch == last:
            yield from edge_ops(graph, edge, graph.first_of(edge, microbatch), backward=True)
    if stage.split:
        yield Op("W", stage.name, first)


def gathers(stage: StageNode, microbatch: int) -> bool:
    """Whether a stage has a gather that is named after this microbatch."""
    return bool(stage.gather) and stage.gathered_for(microbatch) == microbatch


def gather_of(graph: StageGraph, op: Op) -> Op | None:
    """The gather of the parameters that an F or B reads; None where its stage has whole parameters.

    Args:
      graph: the graph that has the stage of the op.
      op: an op of the step, such as `Op("F", "vision.0", 0)`.
    """
    node = graph.stage(op.stage)
    if not node.gather:
        return None
    return Op("gather", op.stage, node.gathered_for(op.microbatch), backward=op.kind == "B")


def edge_ops(graph: StageGraph, edge: EdgeNode, microbatch: int, *, backward: bool) -> tuple[Op, ...]:
    """The ops that carry one microbatch over `edge` in one direction: pack, move, unpack, or unpack alone if local.

    Args:
      graph: the graph that has the edge.
      edge: the edge, such as `graph.edges[0]`, or a tie.
      microbatch: the microbatch's number, from 0; `ONCE` for a tie.
      backward: whether they carry the gradient to `edge.src`, not the activation to `edge.dst`.
    """
    sender, receiver = (edge.dst, edge.src) if backward else (edge.src, edge.dst)
    unpack = arrival(edge, microbatch, backward=backward)
    if graph.kind_of(edge, microbatch) == "local":
        return (unpack,)
    return (
        Op("pack", sender, microbatch, edge=edge.name, backward=backward),
        Op("move", receiver, microbatch, edge=edge.name, backward=backward),
        unpack,
    )


def arrival(edge: EdgeNode, microbatch: int, *, backward: bool) -> Op:
    """The unpack after which the receiver has the data of an edge, such as `Op("unpack", "llm.0", 0, edge=edge.name)`.

    Args:
      edge: the edge, such as `graph.edges[0]`, or a tie.
      microbatch: the microbatch's number, from 0; `ONCE` for a tie.
      backward: whether it is the gradient, which `edge.src` receives.
    """
    return Op("unpack", edge.src if backward else edge.dst, microbatch, edge=edge.name, backward=backward)


def dependencies(graph: StageGraph, microbatches: int, op: Op, window: int = 0) -> tuple[Op, ...]:
    """The ops whose results `op` reads, in a step of `microbatches` microbatches and windows of `window`.

    A window of 0 is the whole step. Values cross an edge by ops of their own, from the "pack" behind the source's F to
    the "unpack" that the target's F reads; an F also reads the "prepare" of its stage. The order of the result has no
    meaning.

    A stage's gradients are accumulated in the order of its B, or of its W if it is split, so a reduce reads the last
    one of each lane. The gradient of a weight that is lent to another stage is complete when that stage's part has come
    back. Parameters that are offloaded after a window's F are reloaded before its B and the next window's F. Residuals
    that are stashed after F are copied back before B.

    Args:
      graph: the stages and edges, such as the `graph` of a `Placement` or of a schedule.
      microbatches: microbatches of the step.
      op: an op of the step, such as `Op("F", "llm.0", 0)`.
      window: microbatches of a window.
    """
    if op.kind in EDGE_KINDS:
        return _edge_dependency(graph, microbatches, op)
    match op.kind:
        case "prepare":
            return tuple(arrival(tie, ONCE, backward=False) for tie in graph.in_ties(op.stage))
        case "F":
            edges = ((edge, graph.first_of(edge, op.microbatch)) for edge in graph.in_edges(op.stage))
            unpacks = (arrival(edge, first, backward=False) for edge, first in edges)
            before = _first(microbatches, window, op.microbatch) - 1
            reloads = _reload(graph, microbatches, op.stage, microbatch=before, window=window)
            return (Op("prepare", op.stage), *reloads, *unpacks, *_gathers(graph, op))
        case "B":
            outs = (edge for edge in graph.out_edges(op.stage) if edge.gradient)
            reloads = _reload(graph, microbatches, op.stage, microbatch=op.microbatch, window=window)
            unpacks = (arrival(edge, op.microbatch, backward=True) for edge in outs)
            residuals = Op("unstash" if graph.stage(op.stage).stashes else "F", op.stage, op.microbatch)
            return (residuals, *reloads, *unpacks, *_gathers(graph, op))
        case "gather":
            return (Op("prepare", op.stage),)
        case "W":
            return (Op("B", op.stage, op.microbatch),)
        case "offload":
            span = range(op.microbatch, min(op.microbatch + (window or microbatches), microbatches))
            return tuple(Op("F", op.stage, m) for m in graph.stage(op.stage).last_of_lanes(span))
        case "reload":
            return (Op("offload", op.stage, op.microbatch),)
        case "stash":
            return (Op("F", op.stage, op.microbatch),)
        case "unstash":
            return (Op("stash", op.stage, op.microbatch),)
        case "reduce":
            ties = (tie for tie in graph.out_ties(op.stage) if tie.gradient)
            returned = (arrival(tie, ONCE, backward=True) for tie in ties)
            node = graph.stage(op.stage)
            last = node.last_of_lanes(range(microbatches))
            return (*(Op("W" if node.split else "B", op.stage, m) for m in last), *returned)
        case "norm":
            return tuple(Op("reduce", stage.name) for stage in graph.topological if stage.trainable)
        case "update":
            return (Op("norm", WORLD), Op("reduce", op.stage))
    return ()


def _gathers(graph: StageGraph, op: Op) -> tuple[Op, ...]:
    gather = gather_of(graph, op)
    return (gather,) if gather else ()


def _first(microbatches: int, window: int, microbatch: int) -> int:
    """The first microbatch of the window that `microbatch` is in."""
    return microbatch - microbatch % (window or microbatches)


def _reload(graph: StageGraph, microbatches: int, stage: str, *, microbatch: int, window: int) -> tuple[Op, ...]:
    """The reload of the window of `microbatch` if the stage is offloaded; none before the first window."""
    if microbatch < 0 or not graph.stage(stage).offload:
        return ()
    return (Op("reload", stage, _first(microbatches, window, microbatch)),)


def _edge_dependency(graph: StageGraph, microbatches: int, op: Op) -> tuple[Op, ...]:
    """The op before an edge's op: its move, its pack, or the F, B or reduce whose result it carries.

    Where the source takes several microbatches together, those of all of their B are carried. No op comes before the
    forward ops of a tie: the weight exists when the step begins.
    """
    edge = graph.edge(op.edge)
    if op.kind == "unpack" and graph.kind_of(edge, op.microbatch) != "local":
        return (Op("move", op.stage, op.microbatch, edge=op.edge, backward=op.backward),)
    if op.kind == "move":
        return (Op("pack", edge.dst if op.backward else edge.src, op.microbatch, edge=op.edge, backward=op.backward),)
    if op.microbatch == ONCE:
        return (Op("reduce", edge.dst),) if op.backward else ()
    if not op.backward:
        return (Op("F", edge.src, op.microbatch),)
    together, target = graph.stage(edge.src).together(op.microbatch, microbatches), graph.stage(edge.dst)
    return tuple(Op("B", edge.dst, first) for first in dict.fromkeys(map(target.first_of, together)))


def awaits(graph: StageGraph, in_flight: Mapping[str, int], op: Op) -> tuple[Op, ...]:
    """The ops that `op` awaits, though it does not read their results, because of bounds on microbatches in flight.

    They are () but for F of microbatch m in a stage without backward that has a bound n: then F of microbatch m - n in
    every stage that it feeds. (`Schedule.awaits` adds those of `Schedule.waits`.)

    Args:
      graph: the stages and edges, such as the `graph` of a `Placement` or of a schedule.
      in_flight: by stage name, the most microbatches in flight: {"vision.0": 2}.
      op: an op of the step, such as `Op("F", "llm.0", 0)`.
    """
    if op.kind != "F" or op.stage not in in_flight or graph.stage(op.stage).backward:
        return ()
    earlier = op.microbatch - in_flight[op.stage]
    if earlier < 0:
        return ()
    return tuple(Op("F", stage, earlier) for stage in dict.fromkeys(e.dst for e in graph.out_edges(op.stage)))


# ---- ranks -----------------------------------------------------------------------------------------------------------


def participating_ranks(graph: StageGraph, op: Op) -> tuple[int, ...]:
    """The ranks that take part in `op`.

    They are the ranks of the microbatch's lane; all of the stage's for an op that runs once a step, an offload, a
    reload or a gather, which copies from all of them; those of both sides for a move; all for a world op.

    Args:
      graph: the graph that has the stage of the op.
      op: an op of the step, such as `Op("F", "llm.0", 0)`.
    """
    if op.kind == "move":
        ends = graph.stage(graph.edge(op.edge).src), graph.stage(graph.edge(op.edge).dst)
        return tuple(sorted({rank for end in ends for rank in end.ranks_of(op.microbatch)}))
    if op.stage == WORLD:
        return graph.ranks
    node = graph.stage(op.stage)
    return node.ranks if op.kind in (*PARAMETER_COPIES, "gather") else node.ranks_of(op.microbatch)


def occupied_ranks(graph: StageGraph, op: Op) -> tuple[int, ...]:
    """The ranks that can run nothing else during `op`: its participating ranks, but () for an asynchronous move, a
    copy or a pull.

    Args:
      graph: the graph that has the stage of the op.
      op: an op of the step, such as `Op("F", "llm.0", 0)`.
    """
    if op.kind in COPY_KINDS or (op.kind == "move" and graph.edge(op.edge).kind == "async") or _is_pull(graph, op):
        return ()
    return participating_ranks(graph, op)


Resource = int | tuple[str, str | int, bool] | tuple[str, str, bool, int]
"""A resource that one op at a time can hold: a rank (its number), an edge's wire in one direction ("wire", edge,
backward), with the number of the pair of lanes where there are several, a rank's copy engine ("copy", rank, False), or
the link by which it pulls ("pull", rank, False).
"""


def occupied_resources(graph: StageGraph, op: Op) -> tuple[Resource, ...]:
    """The resources that no other op can use during `op`: the ranks that it occupies, or its wire or copy engines.

    An asynchronous move holds its edge's wire in its direction, a copy to the host or back the copy engine of each of
    its ranks, a pull the links of the lane that pulls; all leave the ranks free to compute. A rank is its number, a
    wire ("wire", edge, backward), with the number of the pair of lanes where there are several, a copy engine ("copy",
    rank, False), a link ("pull", rank, False).

    Args:
      graph: the graph that has the stage of the op.
      op: an op of the step, such as `Op("F", "llm.0", 0)`.
    """
    if op.kind in COPY_KINDS:
        return tuple(("copy", rank, False) for rank in participating_ranks(graph, op))
    if _is_pull(graph, op):
        return tuple(("pull", rank, False) for rank in graph.stage(op.stage).ranks_of(op.microbatch))
    return occupied_ranks(graph, op) or (_wire(graph, op),)


def run_in_order(graph: StageGraph, before: Op, op: Op) -> bool:
    """Whether devices run two ops one after another because both occupy a rank or a wire.

    They do not so with two copies: a device may copy to the host and back at the same time.

    Args:
      graph: the graph that has the stages of both.
      before: the one op, such as `Op("F", "llm.0", 0)`.
      op: the other.
    """
    copies = before.kind in COPY_KINDS and op.kind in COPY_KINDS
    return not copies and not set(occupied_resources(graph, before)).isdisjoint(occupied_resources(graph, op))


def _is_pull(graph: StageGraph, op: Op) -> bool:
    return op.kind == "gather" and graph.stage(op.stage).gather == "pull"


def _wire(graph: StageGraph, op: Op) -> Resource:
    pairs = len(graph.lane_cycle(graph.edge(op.edge)))
    return ("wire", op.edge, op.backward) if pairs == 1 else ("wire", op.edge, op.backward, op.microbatch % pairs)
