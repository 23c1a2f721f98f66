"""Which ranks modules may share: none, all, or whole stages of one another. Imports no JAX."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mmjax.configurable import ConfigError
from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM


def check_ranks(layouts: Mapping[str, Layout]) -> None:
    """Checks that any two modules share no ranks, all of them, or whole stages of one.

    ``layouts`` are by module: {"vision": Layout(), "llm": Layout(tp=2, rank_offset=1)}; "llm" is needed.

    Raises:
      ConfigError: they share others; the message has an offset that fits.
    """
    modules = [*(name for name in layouts if name != LLM), LLM]
    for first, second in itertools.combinations(modules, 2):
        a, b = layouts[first], layouts[second]
        if not compatible(a, b):
            remaining = [layout for name, layout in layouts.items() if name != first]
            shared = range(max(a.rank_offset, b.rank_offset), min(a.end, b.end))
            raise ConfigError(
                f"{first}/Layout.rank_offset={a.rank_offset}: its {show_ranks(a.ranks)} and "
                f"{second}'s {show_ranks(b.ranks)} share {show_ranks(shared)}; rank sets are equal, disjoint, "
                f"or one is whole stages of the other: use {free_offset(a, remaining)}"
            )


def compatible(a: Layout, b: Layout) -> bool:
    """Whether the rank sets are equal or disjoint, or one is a union of whole stages of the other."""
    disjoint = a.end <= b.rank_offset or b.end <= a.rank_offset
    return disjoint or _is_stages(a, b) or _is_stages(b, a)


def _is_stages(inner: Layout, outer: Layout) -> bool:
    """Whether the ranks of the first layout are whole stages of the second."""
    inside = outer.rank_offset <= inner.rank_offset and inner.end <= outer.end
    return inside and (inner.rank_offset - outer.rank_offset) % outer.stage_size == 0 == inner.size % outer.stage_size


def free_offset(layout: Layout, fixed: Sequence[Layout]) -> int:
    """The `rank_offset` with which `layout` is `compatible` with each of the `fixed` layouts, one or more.

    Of several it is the one with which all layouts need the fewest devices, then the nearest to the offset that the
    layout has. There is always one: behind all others. It is a rank, counted from 0.
    """
    end = max(neighbour.end for neighbour in fixed)
    edges = {rank for neighbour in fixed for rank in (*map(neighbour.first_rank, range(neighbour.pp)), neighbour.end)}
    # An edge between stages of the fixed layouts is the layout's start, its end, or the start of one of its stages.
    back = {0, layout.size, *(stage * layout.stage_size for stage in range(layout.pp))}
    moved = (replace(layout, rank_offset=edge - size) for edge in {0, *edges} for size in back if edge >= size)
    legal = {m.rank_offset for m in moved if all(compatible(m, neighbour) for neighbour in fixed)}
    return min(legal, key=lambda at: (max(end, at + layout.size), abs(at - layout.rank_offset), at))


def show_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0-3", "ranks 0, 2"; ``ranks`` rise, one or more."""
    first, last = ranks[0], ranks[-1]
    if first == last:
        return f"rank {first}"
    contiguous = len(ranks) == last - first + 1
    return f"ranks {first}-{last}" if contiguous else "ranks " + ", ".join(map(str, ranks))
