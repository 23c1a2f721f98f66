"""Cells and routes: which rank hands which rows to which rank across a boundary. Pure arithmetic, no JAX.

Rows are measured in *units*: a tensor's rows are cut into ``lcm(dp_src, dp_dst)`` equal intervals, so that any two
dp splits, dividing each other or not, are unions of units. A cell is one interval of the common refinement of both.
Source: heterogeneous parallelism for MLLM training, §3.1 and §3.2 (equal dp, fan-in and fan-out are the special cases).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """How rows lie on the ranks of one stage: ``dp`` equal intervals, each held by ``width`` = cp·tp ranks.

    Attributes:
      ranks: the stage's ranks in (dp, cp, tp) order.
      dp: number of intervals.
    """

    ranks: tuple[int, ...]
    dp: int

    @property
    def width(self) -> int:
        """Ranks that hold the same interval."""
        return len(self.ranks) // self.dp

    def group(self, interval: int) -> tuple[int, ...]:
        """Ranks that hold interval number ``interval``; the first is its leader."""
        return self.ranks[interval * self.width : (interval + 1) * self.width]

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of all intervals, in row order."""
        return tuple(self.group(interval) for interval in range(self.dp))

    def leader(self, interval: int) -> int:
        """The rank that sends and receives for an interval: canonical (first) cp and tp coordinates."""
        return self.group(interval)[0]


@dataclass(frozen=True)
class Cell:
    """Rows ``[start, stop)`` in units, held by interval ``source`` on one side and ``target`` on the other."""

    start: int
    stop: int
    source: int
    target: int


@dataclass(frozen=True)
class Route:
    """Rank ``source`` hands units ``[start, stop)`` to rank ``target``."""

    source: int
    target: int
    start: int
    stop: int

    def reversed(self) -> Route:
        """The way back of the gradient of the same rows."""
        return Route(self.target, self.source, self.start, self.stop)


def units(source_dp: int, target_dp: int) -> int:
    """Number of equal row intervals that both splits are made of."""
    return math.lcm(source_dp, target_dp)


def cells(source_dp: int, target_dp: int) -> tuple[Cell, ...]:
    """The common refinement of two dp splits, in row order.

    ``cells(4, 2)`` pairs source intervals (0, 1) with target 0 and (2, 3) with target 1; ``cells(2, 3)`` cuts the
    rows at 1/3, 1/2 and 2/3.
    """
    total = units(source_dp, target_dp)
    per_source, per_target = total // source_dp, total // target_dp
    edges = sorted({*range(0, total + 1, per_source), *range(0, total + 1, per_target)})
    return tuple(
        Cell(start, stop, start // per_source, start // per_target) for start, stop in itertools.pairwise(edges)
    )


def leader_routes(source: Placement, target: Placement) -> tuple[Route, ...]:
    """One route per cell, from the source interval's leader to the target interval's leader, in row order."""
    return tuple(
        Route(source.leader(cell.source), target.leader(cell.target), cell.start, cell.stop)
        for cell in cells(source.dp, target.dp)
    )


def rounds(routes: tuple[Route, ...]) -> tuple[tuple[Route, ...], ...]:
    """Unit-sized routes in rounds in which no rank sends twice or receives twice (each round is one ``ppermute``).

    Greedy edge colouring in row order; a fan-in of k needs k rounds, equal dp one.
    """
    pending = [
        Route(route.source, route.target, unit, unit + 1) for route in routes for unit in range(route.start, route.stop)
    ]
    result = []
    while pending:
        chosen, sources, targets, rest = [], set(), set(), []
        for route in pending:
            if route.source in sources or route.target in targets:
                rest.append(route)
            else:
                chosen.append(route)
                sources.add(route.source)
                targets.add(route.target)
        result.append(tuple(chosen))
        pending = rest
    return tuple(result)
