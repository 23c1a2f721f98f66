"""Finds the lanes of layouts, and the lane of a stage, and checks that one program can run them.

Imports no JAX, so that errors are reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from mmjax.configurable import ConfigError, require
from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM
from mmjax.pipeline.config import OFFLOAD_KINDS, OffloadConfig

SHARED = ("dp", "cp", "tp", "optimizer_instances")
"""Degrees that are the same on all lanes."""


def check_one_program(layouts: Mapping[str, Layout], offloads: Mapping[str, OffloadConfig]) -> None:
    """Requires that one program can run modules with these layouts and offloads, both by module.

    Raises:
      ConfigError: it cannot; one line that names the setting, its value and a legal one.
    """
    for module, layout in layouts.items():
        for name in ("lanes", "copies"):
            degree = getattr(layout, name)
            fix = f"Train.lowering='single' has no {name}; set it to 1, or Train.lowering to 'auto'"
            require(degree == 1, f"{module}/Layout.{name}", degree, fix)
    lane_layout(layouts)
    for module, layout in layouts.items():
        # XLA's permutations need all devices of a program; its branches run on some of them.
        fix = "Train.lowering='single' has no rings; set it to False, or Train.lowering to 'auto'"
        require(not layout.overlap, f"{module}/Layout.overlap", layout.overlap, fix)
        fix = "under Train.lowering='single' ranks cannot send to one another; use 'gather', or Train.lowering='auto'"
        sends = layout.cp > 1 and layout.cp_way in ("need", "ring")
        require(not sends, f"{module}/Layout.cp_way", layout.cp_way, fix)
    fix = "Train.lowering='single' keeps everything on its devices; set it to False, or Train.lowering to 'ops'"
    for module, offload in offloads.items():
        for name in OFFLOAD_KINDS:
            require(not getattr(offload, name), f"{module}/Offload.{name}", value=True, fix=fix)


def lane_layout(layouts: Mapping[str, Layout]) -> Layout:
    """The layout whose stage submeshes are the lanes: the pipelined module's, or the LLM's if there are several.

    ``layouts`` is by module: {"vision": Layout(), "llm": Layout(pp=2)}. Every module must be on all ranks of this
    layout with ``pp=1`` and any degrees, or on its lanes in their degrees.

    Raises:
      ConfigError: a module is on neither; the message is one line with the field and a legal value.
    """
    order = [LLM, *(name for name in layouts if name != LLM)]
    owner = next((name for name in order if name in layouts and layouts[name].pp > 1), LLM)
    lanes = layouts[owner] if owner in layouts else next(iter(layouts.values()))
    for name, layout in layouts.items():
        stages = [layout.stage_ranks(stage) for stage in range(layout.pp)]
        if all(_fits(lanes, layout, ranks) for ranks in stages):
            continue
        field, value, legal = _misfit(lanes, layout)
        degrees = " ".join(f"{name}={getattr(lanes, name)}" for name in SHARED[: 3 + (lanes.optimizer_instances > 1)])
        raise ConfigError(
            f"{name}/Layout.{field}={value}: under Train.lowering='single' a module is on ranks "
            f"{lanes.ranks[0]}-{lanes.ranks[-1]} with pp=1, or on stages of {owner} with {degrees}; "
            f"set it to {legal}, or Train.lowering to 'ops'"
        )
    return lanes


def _fits(lanes: Layout, layout: Layout, ranks: tuple[int, ...]) -> bool:
    return ranks == lanes.ranks or lane_of(lanes, layout, ranks) is not None


def lane_of(lanes: Layout, layout: Layout, ranks: tuple[int, ...]) -> int | None:
    """The lane, from 0, of a stage on these ranks; ``None`` if its ranks or degrees are not those of a lane.

    ``lanes`` is the result of ``lane_layout``, ``layout`` that of the stage's module, and ``ranks`` are such as (2, 3).
    """
    if any(getattr(layout, field) != getattr(lanes, field) for field in SHARED):
        return None
    return next((lane for lane in range(lanes.pp) if lanes.stage_ranks(lane) == ranks), None)


def _misfit(lanes: Layout, layout: Layout) -> tuple[str, int, int]:
    """The field that does not fit the lanes, its value and a legal value."""
    if not set(layout.ranks) <= set(lanes.ranks):
        return "rank_offset", layout.rank_offset, lanes.rank_offset
    for field in SHARED:
        if getattr(layout, field) != getattr(lanes, field):
            return field, getattr(layout, field), getattr(lanes, field)
    return "rank_offset", layout.rank_offset, lanes.rank_offset
