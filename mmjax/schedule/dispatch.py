"""How each stage sends and receives, phase by phase: the dispatch table of a schedule.

Karnati et al., "Heterogeneous Parallelism for Multimodal Large Language Model Training", appendix D, figure 14.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mmjax.schedule.graph import EdgeNode, StageGraph, show_ranks
from mmjax.schedule.ops import Op, Schedule

Call = tuple[str, str]
"""(phase, call)."""

CALLS: tuple[Call, ...] = (
    ("warm", "recv_fwd"),
    ("warm", "send_fwd"),
    ("warm end", "recv_fwd"),
    ("steady", "send_fwd recv_bwd"),
    ("steady", "send_bwd recv_fwd"),
    ("cool", "recv_bwd"),
    ("cool", "send_bwd"),
)
"""The rows that a table can have, in order."""


@dataclass(frozen=True, kw_only=True)
class DispatchRow:
    """A call in a phase.

    cells: one for each column. "p2p" stays inside a module, "NC" goes to a module on other ranks, "local" stays on
    shared ranks; "+" joins the cells of several edges, or of a stage's lanes. "" means that the stage makes no such
    call, or has no neighbour for it.
    """

    phase: str
    call: str
    cells: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DispatchTable:
    """The rows of a schedule. Each column is a stage, with its ranks below. `str` makes a table for a terminal."""

    stages: tuple[str, ...]
    ranks: tuple[str, ...]
    rows: tuple[DispatchRow, ...]

    def __str__(self) -> str:
        lines = [("phase", "schedule call", *self.stages), ("", "ranks", *self.ranks)]
        lines += [(row.phase, row.call, *row.cells) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join(row.rstrip() for row in rows)


def dispatch_table(schedule: Schedule) -> DispatchTable:
    """The table of how every stage of `schedule` sends and receives in each phase.

    A stage's warm-up lasts up to the F before its first B; its cooldown is where B follows B. In between, a call sends
    in one direction and receives from the other. A receive also belongs to the phase of its sender: the last stage has
    no warm-up, but it receives during the warm-up of the stage before it.

    schedule: the ops of a step in order, as `make_schedule("1f1b", graph, 8, costs)` makes it. The result has a column
    for each stage, a row for each call in a phase, and `str` makes a text of it.
    """
    graph = schedule.graph
    calls = {
        node.name: _calls([op for op in schedule.for_stage(node.name) if op.kind in "FB"]) for node in graph.stages
    }
    from_ops = {name: frozenset(stage_calls) for name, stage_calls in calls.items()}
    for edge in graph.edges:
        if ("warm", "send_fwd") in from_ops[edge.src]:
            calls[edge.dst].add(("warm", "recv_fwd"))
        if edge.gradient and ("cool", "send_bwd") in from_ops[edge.dst]:
            calls[edge.src].add(("cool", "recv_bwd"))
    rows = []
    for phase, call in CALLS:
        cells = tuple(
            _cell(graph, node.name, call) if (phase, call) in calls[node.name] else "" for node in graph.stages
        )
        if any(cells):
            rows.append(DispatchRow(phase=phase, call=call, cells=cells))
    return DispatchTable(
        stages=tuple(node.name for node in graph.stages),
        ranks=tuple(show_ranks(node.ranks) for node in graph.stages),
        rows=tuple(rows),
    )


def _calls(ops: Sequence[Op]) -> set[Call]:
    """The calls that a stage makes with its ops, in their order."""
    kinds = [op.kind for op in ops if op.kind in ("F", "B")]
    warm = kinds.index("B") if "B" in kinds else len(kinds) + 1
    result: set[Call] = set()
    for place, (before, kind, after) in enumerate(zip(["", *kinds], kinds, [*kinds[1:], ""], strict=False)):
        if place < warm - 1:
            result |= {("warm", "recv_fwd"), ("warm", "send_fwd")}
        elif place == warm - 1:
            result |= {("warm end", "recv_fwd"), ("steady", "send_fwd recv_bwd")}
        elif kind == "F":
            result |= {("steady", "send_bwd recv_fwd"), ("steady", "send_fwd recv_bwd")}
        else:
            result |= {("cool", "recv_bwd")} if before == "B" else set()
            result |= {("cool", "send_bwd")} if after != "F" else set()
    return result


def _cell(graph: StageGraph, stage: str, call: str) -> str:
    """The cell of a call: the transports of the stage's out-edges for send_fwd and recv_bwd, else of its in-edges."""
    forward_side = call in ("send_fwd", "recv_bwd", "send_fwd recv_bwd")
    edges = graph.out_edges(stage) if forward_side else graph.in_edges(stage)
    backward_alone = call in ("recv_bwd", "send_bwd")
    transports = (_transport(graph, edge) for edge in edges if edge.gradient or not backward_alone)
    return "+".join(dict.fromkeys(transports))


def _transport(graph: StageGraph, edge: EdgeNode) -> str:
    """ "local", "p2p" or "NC", as in `DispatchRow.cells`; "local+NC" where only some lanes share ranks."""
    if graph.hop(edge) == 0:
        lanes = math.lcm(graph.stage(edge.src).lanes, graph.stage(edge.dst).lanes)
        moves = lanes > 1 and any(graph.kind_of(edge, m) != "local" for m in range(lanes))
        return "local+NC" if moves else "local"
    return "p2p" if graph.stage(edge.src).module == graph.stage(edge.dst).module else "NC"
