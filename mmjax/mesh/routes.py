"""Routes: which rank hands which piece to which rank across a boundary. Pure arithmetic, no JAX.

Rows are measured in *units*: a tensor's rows are cut into ``lcm(dp_src, dp_dst)`` equal intervals, so that any two
dp splits, dividing each other or not, are unions of units. A *piece* is what one rank sends to another at once: a unit,
a slice of one, or all rows of a rank. Pieces are numbered on either side; a route joins the two numbers.
Source: heterogeneous parallelism for MLLM training, §3.1 and §3.2 (equal dp, fan-in and fan-out are the special cases).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count


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
class Route:
    """Piece number ``sent`` of rank ``source`` becomes piece number ``kept`` of rank ``target``."""

    source: int
    sent: int
    target: int
    kept: int


def units(source_dp: int, target_dp: int) -> int:
    """Number of equal row intervals that both splits are made of."""
    return math.lcm(source_dp, target_dp)


def peer_routes(source: Placement, target: Placement) -> tuple[Route, ...]:
    """Every rank to its counterpart; for equal dp and equal widths. A piece is all that a rank holds."""
    return tuple(Route(one, 0, other, 0) for one, other in zip(source.ranks, target.ranks, strict=True))


def leader_routes(source: Placement, target: Placement) -> tuple[Route, ...]:
    """Every unit from its leader to its leader, in row order. A piece is a unit, numbered within its interval."""
    total = units(source.dp, target.dp)
    held, wanted = total // source.dp, total // target.dp
    return tuple(
        Route(source.leader(unit // held), unit % held, target.leader(unit // wanted), unit % wanted)
        for unit in range(total)
    )


def slices_kept(source: Placement, target: Placement) -> int:
    """Slices of one unit that every rank of ``target`` receives, so that all of ``source`` have one to send."""
    return -(-source.width // target.width)


def slices_sent(source: Placement, target: Placement) -> int:
    """Most slices of one unit that a rank of ``source`` sends."""
    return -(-slices_kept(source, target) * target.width // source.width)


def sliced_routes(source: Placement, target: Placement) -> tuple[Route, ...]:
    """Slice ``j`` of every unit goes to rank ``j // kept`` of the target group, from ``j mod width`` of the source's.

    So every rank sends and every rank receives. Source rank ``i`` numbers its slices ``i, i + width, ...`` of its first
    unit first, then those of the next; a target rank receives neighbouring slices and numbers them in order.
    """
    total, sent, kept = units(source.dp, target.dp), slices_sent(source, target), slices_kept(source, target)
    held, wanted = total // source.dp, total // target.dp
    return tuple(
        Route(
            source.group(unit // held)[j % source.width],
            unit % held * sent + j // source.width,
            target.group(unit // wanted)[j // kept],
            unit % wanted * kept + j % kept,
        )
        for unit in range(total)
        for j in range(kept * target.width)
    )


def rounds(routes: Iterable[Route]) -> tuple[tuple[Route, ...], ...]:
    """Routes in rounds in which no rank sends twice or receives twice (each round is one ``ppermute``).

    As few rounds as the busiest rank has routes: edge colouring of a bipartite graph by alternating paths (König).
    """
    by_source: dict[int, dict[int, Route]] = defaultdict(dict)
    by_target: dict[int, dict[int, Route]] = defaultdict(dict)
    for route in routes:
        wanted, other = _first_free(by_source[route.source]), _first_free(by_target[route.target])
        # The target may receive in the round that suits the source: exchange both rounds along the path from there.
        path, step = [], by_target[route.target].get(wanted)
        while step:
            path.append(step)
            step = by_source[step.source].get(other) if len(path) % 2 else by_target[step.target].get(wanted)
        for i, moved in enumerate(path):
            old = other if i % 2 else wanted
            del by_source[moved.source][old], by_target[moved.target][old]
        for i, moved in enumerate(path):
            new = wanted if i % 2 else other
            by_source[moved.source][new] = by_target[moved.target][new] = moved
        by_source[route.source][wanted] = by_target[route.target][wanted] = route
    batches: dict[int, list[Route]] = defaultdict(list)
    for used in by_source.values():
        for number, route in used.items():
            batches[number].append(route)
    return tuple(tuple(batches[number]) for number in sorted(batches))


def _first_free(used: Mapping[int, Route]) -> int:
    return next(i for i in count() if i not in used)


def components(routes: Sequence[Route], target: Placement) -> tuple[tuple[Route, ...], ...]:
    """Routes that have to do with each other: they share a rank, or lead to ranks of one target group.

    A group works in step anyway, so joining its ranks makes nobody wait; it makes one program of many. Ranks of it that
    receive nothing join nothing. By lowest rank, so that all processes agree on the order.
    """
    receivers = {route.target for route in routes}
    joined = [{route.source, route.target} for route in routes]
    joined += [receivers & set(group) for group in target.groups if receivers & set(group)]
    parts: list[set[int]] = []
    for ranks in joined:
        touched = [part for part in parts if part & ranks]
        parts = [part for part in parts if not part & ranks] + [ranks.union(*touched)]
    return tuple(tuple(route for route in routes if route.source in part) for part in sorted(parts, key=min))
