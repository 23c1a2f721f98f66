"""Routes: which rank sends which piece to which rank across a boundary. Pure arithmetic, no JAX.

Rows are measured in *units*: a tensor's rows are cut into ``lcm(dp_src, dp_dst)`` equal intervals, so that the
intervals of both dp splits are unions of units, whether or not one dp divides the other. If the ranks of one end have
parts of each row, a unit is one such part of an interval. A *piece* is the data that one rank sends to another at once:
a unit, a slice of a unit, or all rows of a rank. Source and target number their pieces; a route joins two numbers.
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
    """Sharding of rows over the ranks of one stage: ``dp`` equal intervals, each on copies·cp·tp ranks.

    If rows have several parts, each part of an interval counts as an interval, those of the first interval first.
    ``width`` ranks hold the same interval.

    Attributes:
      ranks: the stage's ranks in (copy, dp, cp, tp) order.
      dp: number of intervals of rows.
      copies: equal runs of ranks that each hold all intervals.
      parts: equal parts of each row, one for each rank of cp; 1 if all ranks have whole rows.
    """

    ranks: tuple[int, ...]
    dp: int
    copies: int = 1
    parts: int = 1

    @property
    def intervals(self) -> int:
        """Number of intervals, each part counted: dp·parts."""
        return self.dp * self.parts

    @property
    def width(self) -> int:
        """Number of ranks that hold the same interval."""
        return len(self.ranks) // self.intervals

    def units_per_rank(self, rows: int, parts: int) -> int:
        """Number of units on a rank, for a tensor cut into ``rows`` intervals of ``parts`` parts; see ``UnitGrid``."""
        return rows // self.dp * (parts // self.parts)

    def locate(self, row: int, part: int, rows: int, parts: int) -> tuple[int, int]:
        """The number of the interval that contains a unit, and the unit's number in it: by rows, then by parts.

        ``row`` and ``part`` are the unit's coordinates among ``rows`` · ``parts`` units.
        """
        interval, number = divmod(row, rows // self.dp)
        shared = parts // self.parts  # 1 if ranks have different parts
        return interval * self.parts + part // shared, number * shared + part % shared

    def group(self, interval: int) -> tuple[int, ...]:
        """World ranks that hold interval number ``interval``, from 0, copy by copy; the first is the leader."""
        copy, width = len(self.ranks) // self.copies, self.width // self.copies
        starts = range(interval * width, len(self.ranks), copy)
        return tuple(rank for start in starts for rank in self.ranks[start : start + width])

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each interval, in row order; see ``group``."""
        return tuple(self.group(interval) for interval in range(self.intervals))

    def leader(self, interval: int, copy: int = 0) -> int:
        """The world rank that sends and receives an interval: the first of its ranks in copy number ``copy``."""
        return self.group(interval)[copy * self.width // self.copies]

    def copy_of(self, rank: int) -> int:
        """The number of the copy that contains a world rank; 0 for a rank of another stage."""
        return self.ranks.index(rank) * self.copies // len(self.ranks) if rank in self.ranks else 0


@dataclass(frozen=True)
class Route:
    """Piece number ``source_piece`` of rank ``source`` becomes piece number ``target_piece`` of rank ``target``."""

    source: int
    source_piece: int
    target: int
    target_piece: int


@dataclass(frozen=True)
class UnitGrid:
    """The units of a tensor between two stages.

    Attributes:
      rows: number of intervals that the tensor's rows are cut into.
      parts: number of parts of each interval.
    """

    rows: int
    parts: int

    @classmethod
    def between(cls, source: RowSharding, target: RowSharding) -> UnitGrid:
        """The fewest units such that no unit is divided between ranks of either end.

        ``rows`` is the least common multiple of both ``dp``, and ``parts`` of both ``parts``.
        """
        return cls(math.lcm(source.dp, target.dp), math.lcm(source.parts, target.parts))

    def locate(self, end: RowSharding) -> list[tuple[int, int]]:
        """For each unit, by rows and then by parts: its interval at one end, and its number in that interval."""
        numbered = ((row, part) for row in range(self.rows) for part in range(self.parts))
        return [end.locate(row, part, self.rows, self.parts) for row, part in numbered]


def peer_routes(source: RowSharding, target: RowSharding) -> tuple[Route, ...]:
    """Routes from every rank to its counterpart, for equal numbers of intervals and ranks. A piece is a whole shard.

    ``source`` and ``target`` are the stages' rows, such as ``RowSharding(ranks=(0, 1), dp=2)``; with ranks (2, 3) as
    the target the result is (Route(0, 0, 2, 0), Route(1, 0, 3, 0)), of rank, piece, rank, piece.

    Raises:
      ValueError: the numbers of ranks differ.
    """
    pairs = zip(chain(*source.groups), chain(*target.groups), strict=True)
    return tuple(Route(source_rank, 0, target_rank, 0) for source_rank, target_rank in pairs)


def leader_routes(source: RowSharding, target: RowSharding) -> tuple[Route, ...]:
    """Routes of units, in row order, from source leaders to target leaders. A unit is numbered within its interval.

    ``source`` and ``target`` are the stages' rows, such as ``RowSharding(ranks=(0, 1), dp=2)``. There is one route for
    each unit, of source, source_piece, target and target_piece. If the target's leader is a rank of the source, the
    source's leader is the one of the same copy.
    """
    units, routes = UnitGrid.between(source, target), []
    locations = zip(units.locate(source), units.locate(target), strict=True)
    for (source_interval, source_piece), (target_interval, target_piece) in locations:
        receiver = target.leader(target_interval)
        sender = source.leader(source_interval, source.copy_of(receiver))
        routes.append(Route(sender, source_piece, receiver, target_piece))
    return tuple(routes)


def slices_received(source: RowSharding, target: RowSharding) -> int:
    """Number of slices of one unit that a target rank receives: ``source.width / target.width``, rounded up.

    It is enough that every source rank sends one. ``source`` and ``target`` are the stages' rows, such as
    ``RowSharding(ranks=(0, 1), dp=1)``, of width 2.
    """
    return -(-source.width // target.width)


def slices_sent(source: RowSharding, target: RowSharding) -> int:
    """Largest number of slices of one unit that a source rank sends.

    It is ``slices_received(source, target) * target.width / source.width``, rounded up. ``source`` and ``target`` are
    the stages' rows, such as ``RowSharding(ranks=(0, 1), dp=1)``, of width 2.
    """
    return -(-slices_received(source, target) * target.width // source.width)


def sliced_routes(source: RowSharding, target: RowSharding) -> tuple[Route, ...]:
    """Routes of slices, such that every rank sends and every rank receives, by units and then by slices.

    ``source`` and ``target`` are the stages' rows, such as ``RowSharding(ranks=(0, 1), dp=1)``. A route has source,
    source_piece, target and target_piece: ranks, and numbers of slices from 0.

    Slice ``j`` of a unit goes from rank ``j mod width`` of the source group to rank ``j // slices_received`` of the
    target group. Source rank ``i`` numbers the slices ``i, i + width, ...`` of its first unit, then those of the next
    unit; a target rank receives neighbouring slices and numbers them in order.
    """
    units = UnitGrid.between(source, target)
    slices_per_source, slices_per_target = slices_sent(source, target), slices_received(source, target)
    return tuple(
        Route(
            source.group(source_interval)[j % source.width],
            source_unit * slices_per_source + j // source.width,
            target.group(target_interval)[j // slices_per_target],
            target_unit * slices_per_target + j % slices_per_target,
        )
        for (source_interval, source_unit), (target_interval, target_unit) in zip(
            units.locate(source), units.locate(target), strict=True
        )
        for j in range(slices_per_target * target.width)
    )


def rounds(routes: Iterable[Route]) -> tuple[tuple[Route, ...], ...]:
    """Splits routes into rounds in which no rank sends twice or receives twice; every route is in one round.

    Each round is one ``ppermute``. (Route(0, 0, 1, 0), Route(0, 1, 2, 0)), of rank, piece, rank, piece, needs two.

    There are as few rounds as the busiest rank sends or receives pieces: edge colouring of a bipartite graph by
    alternating paths (König).
    """
    by_source: dict[int, dict[int, Route]] = defaultdict(dict)
    by_target: dict[int, dict[int, Route]] = defaultdict(dict)
    for route in routes:
        source_round, target_round = _first_free(by_source[route.source]), _first_free(by_target[route.target])
        # If the target already receives in the source's free round, both rounds are swapped along the path from it.
        path, step = [], by_target[route.target].get(source_round)
        while step:
            path.append(step)
            step = (
                by_source[step.source].get(target_round) if len(path) % 2 else by_target[step.target].get(source_round)
            )
        for i, recoloured in enumerate(path):
            old = target_round if i % 2 else source_round
            del by_source[recoloured.source][old], by_target[recoloured.target][old]
        for i, recoloured in enumerate(path):
            new = source_round if i % 2 else target_round
            by_source[recoloured.source][new] = by_target[recoloured.target][new] = recoloured
        by_source[route.source][source_round] = by_target[route.target][source_round] = route
    batches: dict[int, list[Route]] = defaultdict(list)
    for used in by_source.values():
        for number, route in used.items():
            batches[number].append(route)
    return tuple(tuple(batches[number]) for number in sorted(batches))


def _first_free(used: Mapping[int, Route]) -> int:
    return next(i for i in count() if i not in used)


def components(routes: Sequence[Route], target: RowSharding) -> tuple[tuple[Route, ...], ...]:
    """Connected components of the routes. Two routes are connected if they share a rank or lead to one target group.

    ``target`` is the receiving stage's rows, such as ``RowSharding(ranks=(2, 3), dp=2)``.

    The ranks of a group work in step anyway, so joining their routes into one program makes no rank wait. Ranks that
    receive nothing connect no routes. Components are ordered by their lowest ranks, the same in all processes.
    """
    receivers = {route.target for route in routes}
    joined = [{route.source, route.target} for route in routes]
    joined += [receivers & set(group) for group in target.groups if receivers & set(group)]
    parts: list[set[int]] = []
    for ranks in joined:
        touched = [part for part in parts if part & ranks]
        parts = [part for part in parts if not part & ranks] + [ranks.union(*touched)]
    return tuple(tuple(route for route in routes if route.source in part) for part in sorted(parts, key=min))
