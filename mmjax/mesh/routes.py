"""Routes: which rank hands which piece to which rank across a boundary. Pure arithmetic, no JAX.

Rows are measured in *units*: a tensor's rows are cut into ``lcm(dp_src, dp_dst)`` equal intervals, so that the
intervals of both dp splits, dividing each other or not, are unions of units. Where the ranks of one end have parts of
what stands in a row, a unit is one part of such an interval. A *piece* is what one rank sends another at once: a unit,
a slice of one, or all rows of a rank. Both sides number their pieces; a route joins two numbers.
Source: heterogeneous parallelism for MLLM training, §3.1 and §3.2 (equal dp, fan-in and fan-out are the special cases).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count


@dataclass(frozen=True)
class RowSharding:
    """How rows lie on the ranks of one stage: ``dp`` equal intervals, each held by copies·cp·tp ranks.

    Each part of an interval counts as an interval of its own, those of the first interval first; ``width`` ranks hold
    the same.

    Attributes:
      ranks: the stage's ranks in (copy, dp, cp, tp) order.
      dp: number of intervals of rows.
      copies: equal runs of ranks that each hold all intervals.
      parts: equal parts of what stands in each row, which the ranks of cp have one each; 1 where all have everything.
    """

    ranks: tuple[int, ...]
    dp: int
    copies: int = 1
    parts: int = 1

    @property
    def intervals(self) -> int:
        """Number of intervals, parts of rows counted apart."""
        return self.dp * self.parts

    @property
    def width(self) -> int:
        """Ranks that hold the same interval."""
        return len(self.ranks) // self.intervals

    def held(self, rows: int, parts: int) -> int:
        """Number of units that a rank holds, of a tensor in so many intervals of rows and parts of each."""
        return rows // self.dp * (parts // self.parts)

    def place(self, row: int, part: int, rows: int, parts: int) -> tuple[int, int]:
        """The interval that a unit lies in, and its number there: by rows, then by parts."""
        interval, number = divmod(row, rows // self.dp)
        shared = parts // self.parts  # 1 where ranks have parts of their own
        return interval * self.parts + part // shared, number * shared + part % shared

    def group(self, interval: int) -> tuple[int, ...]:
        """Ranks that hold interval number ``interval``, copy by copy; the first is its leader."""
        copy, width = len(self.ranks) // self.copies, self.width // self.copies
        starts = range(interval * width, len(self.ranks), copy)
        return tuple(rank for start in starts for rank in self.ranks[start : start + width])

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of all intervals, in row order."""
        return tuple(self.group(interval) for interval in range(self.intervals))

    def leader(self, interval: int, copy: int = 0) -> int:
        """The rank that sends and receives for an interval: canonical (first) cp and tp coordinates, in one copy."""
        return self.group(interval)[copy * self.width // self.copies]

    def copy_of(self, rank: int) -> int:
        """The copy that a rank is in; the first for one that is in none."""
        return self.ranks.index(rank) * self.copies // len(self.ranks) if rank in self.ranks else 0


@dataclass(frozen=True)
class Route:
    """Piece number ``sent`` of rank ``source`` becomes piece number ``kept`` of rank ``target``."""

    source: int
    sent: int
    target: int
    kept: int


@dataclass(frozen=True)
class Units:
    """The units of a tensor between two stages.

    Attributes:
      rows: intervals that its rows are cut into.
      parts: parts of each.
    """

    rows: int
    parts: int

    @classmethod
    def between(cls, source: RowSharding, target: RowSharding) -> Units:
        """The fewest units that both ends hold whole ones of."""
        return cls(math.lcm(source.dp, target.dp), math.lcm(source.parts, target.parts))

    def places(self, end: RowSharding) -> list[tuple[int, int]]:
        """For each unit, its interval at one end and its number there."""
        numbered = ((row, part) for row in range(self.rows) for part in range(self.parts))
        return [end.place(row, part, self.rows, self.parts) for row, part in numbered]


def peer_routes(source: RowSharding, target: RowSharding) -> tuple[Route, ...]:
    """Routes from every rank to its counterpart, for equal dp and equal widths. A piece is all that a rank holds."""
    pairs = zip(chain(*source.groups), chain(*target.groups), strict=True)
    return tuple(Route(one, 0, other, 0) for one, other in pairs)


def leader_routes(source: RowSharding, target: RowSharding) -> tuple[Route, ...]:
    """Routes of units, in row order, to target leaders. A unit is numbered within its interval.

    They come from the source's leaders; where the target's leader is itself in a copy of the source, from that copy's.
    """
    units, routes = Units.between(source, target), []
    for (held_in, sent), (wanted_in, kept) in zip(units.places(source), units.places(target), strict=True):
        receiver = target.leader(wanted_in)
        routes.append(Route(source.leader(held_in, source.copy_of(receiver)), sent, receiver, kept))
    return tuple(routes)


def slices_kept(source: RowSharding, target: RowSharding) -> int:
    """Slices of one unit that every rank of ``target`` receives, so that all of ``source`` have one to send."""
    return -(-source.width // target.width)


def slices_sent(source: RowSharding, target: RowSharding) -> int:
    """Most slices of one unit that a rank of ``source`` sends."""
    return -(-slices_kept(source, target) * target.width // source.width)


def sliced_routes(source: RowSharding, target: RowSharding) -> tuple[Route, ...]:
    """Routes of slices: slice ``j`` of a unit goes from rank ``j mod width`` of the source group to rank ``j // kept``
    of the target's.

    So every rank sends and every rank receives. Source rank ``i`` numbers its slices ``i, i + width, ...`` of its first
    unit first, then those of the next; a target rank receives neighbouring slices and numbers them in order.
    """
    units, sent, kept = Units.between(source, target), slices_sent(source, target), slices_kept(source, target)
    return tuple(
        Route(
            source.group(held_in)[j % source.width],
            held * sent + j // source.width,
            target.group(wanted_in)[j // kept],
            wanted * kept + j % kept,
        )
        for (held_in, held), (wanted_in, wanted) in zip(units.places(source), units.places(target), strict=True)
        for j in range(kept * target.width)
    )


def rounds(routes: Iterable[Route]) -> tuple[tuple[Route, ...], ...]:
    """Splits routes into rounds in which no rank sends twice or receives twice (each round is one ``ppermute``).

    There are as few rounds as the busiest rank sends or receives pieces: edge colouring of a bipartite graph by
    alternating paths (König).
    """
    by_source: dict[int, dict[int, Route]] = defaultdict(dict)
    by_target: dict[int, dict[int, Route]] = defaultdict(dict)
    for route in routes:
        wanted, other = _first_free(by_source[route.source]), _first_free(by_target[route.target])
        # Where the target already receives in the source's free round, both rounds are swapped along the path from it.
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


def components(routes: Sequence[Route], target: RowSharding) -> tuple[tuple[Route, ...], ...]:
    """Connected components of the routes: routes are connected that share a rank or lead to ranks of one target group.

    The ranks of a group work in step anyway, so joining them makes none wait; it makes one program of many. Ranks that
    receive nothing join nothing. Components are in the order of their lowest ranks, the same in all processes.
    """
    receivers = {route.target for route in routes}
    joined = [{route.source, route.target} for route in routes]
    joined += [receivers & set(group) for group in target.groups if receivers & set(group)]
    parts: list[set[int]] = []
    for ranks in joined:
        touched = [part for part in parts if part & ranks]
        parts = [part for part in parts if not part & ranks] + [ranks.union(*touched)]
    return tuple(tuple(route for route in routes if route.source in part) for part in sorted(parts, key=min))
