"""Layouts of several modules on eight ranks, drawn at random: every one that is legal can be drawn, and no other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from mmjax.mesh.layout import Layout

RANKS = 8
LLM = "llm"
Limits = Mapping[str, int]
"""By module, most stages that it may have."""


@st.composite
def layouts(draw: st.DrawFn, most: Limits, *, dp: tuple[int, ...], tp: tuple[int, ...]) -> dict[str, Layout]:
    """A layout for each module, the LLM's first: it lies anywhere, and the others with it, behind it or before it.

    most: of the LLM and the encoders. dp, tp: degrees to choose from.
    """
    made: dict[str, Layout] = {}
    for module in (LLM, *(name for name in most if name != LLM)):
        legal = [one for one in everywhere(most[module], dp, tp) if all(compatible(one, o) for o in made.values())]
        kinds = {kind: [one for one in legal if _kind(one, made) == kind] for kind in KINDS}
        chosen = draw(st.sampled_from(kinds[draw(st.sampled_from([kind for kind in KINDS if kinds[kind]]))]))
        groups = [n for n in range(1, chosen.dp + 1) if chosen.dp % n == 0]
        made[module] = replace(chosen, optimizer_instances=draw(st.sampled_from(groups)))
    return made


KINDS = ("same ranks", "shared", "apart")


def _kind(layout: Layout, others: Mapping[str, Layout]) -> str:
    """How it lies to the LLM; what is first of all is apart."""
    if LLM not in others or not set(layout.ranks) & set(others[LLM].ranks):
        return "apart"
    return "same ranks" if layout.ranks == others[LLM].ranks else "shared"


@cache
def everywhere(most: int, dp: tuple[int, ...], tp: tuple[int, ...]) -> tuple[Layout, ...]:
    """Every layout of at most so many stages, on all ranks that it may be on."""
    degrees = [
        Layout(tp=t, pp=p, dp=d, chunks=c)
        for t in tp
        for d in dp
        for p in range(1, most + 1)
        for c in range(1, most + 1)
        if t * d * p <= RANKS and p * c <= most and (c == 1 or p > 1)
    ]
    return tuple(replace(one, rank_offset=at) for one in degrees for at in range(RANKS - one.size + 1))


def compatible(one: Layout, other: Layout) -> bool:
    """Rank sets are equal, disjoint, or one is whole stages of the other."""
    mine, theirs = set(one.ranks), set(other.ranks)
    return mine == theirs or not mine & theirs or _whole_stages(mine, other) or _whole_stages(theirs, one)


def _whole_stages(ranks: set[int], layout: Layout) -> bool:
    stages = [set(layout.stage_ranks(stage)) for stage in range(layout.pp)]
    return ranks <= set(layout.ranks) and all(stage <= ranks or not stage & ranks for stage in stages)
