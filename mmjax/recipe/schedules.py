"""Schedules of a step as settings: the order of its ops, its microbatches, and the layouts that it is for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from mmjax.configurable import require
from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM
from mmjax.models.edges import EdgeSpec
from mmjax.recipe.ranks import show_ranks
from mmjax.recipe.train_config import TrainConfig
from mmjax.schedule.schedules import LANED, NESTING, OFFLOADING, ONE_F_ONE_B, WINDOWED


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The order of a step's ops.

    Attributes:
      name: one of the schedules of ``Train.schedule``, such as "1f1b".
      microbatches: ops that a step's samples are cut into; divides the batch.
      inner: the LLM's own schedule inside a nested or three-phase one.
      window: microbatches between whose encoder forward and backward the LLM runs, of three-phase; 0 is all.
    """

    name: str = ONE_F_ONE_B
    microbatches: int = 4
    inner: str = ONE_F_ONE_B
    window: int = 0


def one_f_one_b(microbatches: int) -> ScheduleConfig:
    """Each stage alternates forwards and backwards of ``microbatches`` (Narayanan et al., "PipeDream")."""
    return ScheduleConfig(microbatches=microbatches)


def gpipe(microbatches: int) -> ScheduleConfig:
    """All forwards of a step's ``microbatches``, such as 8, then all backwards (Huang et al., "GPipe")."""
    return ScheduleConfig(name="gpipe", microbatches=microbatches)


def interleaved(microbatches: int) -> ScheduleConfig:
    """1F1B of ``microbatches`` over several chunks of layers a rank (Narayanan et al., "Megatron-LM"); set
    ``Layout.chunks``.
    """
    return ScheduleConfig(name="interleaved", microbatches=microbatches)


def zb_h1(microbatches: int) -> ScheduleConfig:
    """1F1B of ``microbatches`` whose weight gradients fill the bubble (Qi et al., "Zero Bubble", H1)."""
    return ScheduleConfig(name="zb-h1", microbatches=microbatches)


def three_phase(microbatches: int, *, window: int = 0, inner: str = ONE_F_ONE_B) -> ScheduleConfig:
    """Encoders' forwards, the LLM's steps, encoders' backwards, over ``window`` microbatches at a time; 0 is all.

    ``microbatches`` is their number in a step, and ``inner`` the LLM's own schedule, such as "zb-h1".
    """
    return ScheduleConfig(name="three-phase", microbatches=microbatches, window=window, inner=inner)


def nested(microbatches: int, *, inner: str = ONE_F_ONE_B) -> ScheduleConfig:
    """Lanes of encoders run in the gaps of the LLM's ``inner`` schedule, such as "1f1b"; set ``Layout.lanes``.

    ``microbatches`` is their number in a step.
    """
    return ScheduleConfig(name="nested", microbatches=microbatches, inner=inner)


def check_schedule(schedule: str, layouts: Mapping[str, Layout], encoders: Collection[str]) -> None:
    """Requires that a schedule has a place for the lanes and copies of all modules, and the lanes that it nests.

    Args:
      schedule: the value of ``Train.schedule``, such as "1f1b".
      layouts: the layout of each module: {"vision": Layout(), "llm": Layout(pp=2)}.
      encoders: names of the encoders, such as ["vision"].

    Raises:
      ConfigError: it has not; one line that names the setting, its value and a legal one.
    """
    for module, layout in layouts.items():
        if layout.lanes > 1:
            _check_lanes(schedule, module, layout)
    if schedule in NESTING:
        _check_nested(schedule, layouts)
    for module, layout in layouts.items():
        if layout.copies > 1:
            _check_copies(module, layout, layouts[LLM], is_encoder=module in encoders)


def check_inner(train: TrainConfig, layouts: Mapping[str, Layout], flows: Iterable[EdgeSpec]) -> None:
    """Requires that modules behind an encoder's phase have no lanes, where another schedule than 1F1B runs them.

    Args:
      train: the run's schedule and inner schedule.
      layouts: the layout of each module: {"vision": Layout(), "llm": Layout(pp=2)}.
      flows: the edges between modules.

    Raises:
      ConfigError: one has; one line that names the setting, its value and a legal one.
    """
    if train.schedule not in OFFLOADING or train.inner == ONE_F_ONE_B:
        return
    for module in dict.fromkeys(flow.target for flow in flows):
        fix = f"Train.inner={train.inner!r} has no place for lanes; set it to 1, or Train.inner to {ONE_F_ONE_B!r}"
        require(layouts[module].lanes == 1, f"{module}/Layout.lanes", layouts[module].lanes, fix)


def check_microbatches(train: TrainConfig, layouts: Mapping[str, Layout], flows: Iterable[EdgeSpec]) -> None:
    """Requires that modules whose forward takes several microbatches are encoders with phases of their own.

    Args:
      train: the run's schedule, window and microbatches.
      layouts: the layout of each module: {"vision": Layout(), "llm": Layout(pp=2)}.
      flows: the edges between modules.

    Raises:
      ConfigError: one is not; one line that names the setting, its value and a legal one.
    """
    flows = tuple(flows)
    fed, sources = {flow.target for flow in flows}, {flow.source for flow in flows}
    for module, layout in ((name, layout) for name, layout in layouts.items() if layout.takes_several):
        field, count = f"{module}/Layout.microbatches", layout.microbatches
        fix = f"Train.schedule={train.schedule!r} runs it microbatch by microbatch; set it to 1, or the schedule to"
        require(train.schedule in WINDOWED, field, count, f"{fix} {WINDOWED[0]!r}")
        fix = "only an encoder that reads no other module runs before the LLM's phase; set it to 1"
        require(module in sources - fed, field, count, fix)
        behind = {rank for name in fed for rank in layouts[name].ranks}
        first = layouts[LLM].rank_offset
        fix = (
            f"shares no rank with the {LLM}, so it has no phase; set it to 1, or {module}/Layout.rank_offset to {first}"
        )
        require(not behind.isdisjoint(layout.ranks), field, count, fix)
        readers = [flow.target for flow in flows if flow.source == module]
        for reader, lanes in ((name, layouts[name].lanes) for name in readers):
            fix = f"shares microbatches out to all ranks of a reader, and {reader}/Layout.lanes={lanes}; set it to 1"
            require(lanes == 1, field, count, fix)
        fix = f"must divide Train.window={train.window}; set it to 0 for all of a window"
        require(count == 0 or train.window % count == 0, field, count, fix)
        fix = "takes several microbatches, which one program runs one after another; set it to 'auto' or 'ops'"
        require(train.lowering != "single", "Train.lowering", train.lowering, f"{field}={count} {fix}")


def op_microbatches(train: TrainConfig, layouts: Mapping[str, Layout]) -> dict[str, int]:
    """Microbatches of an op, by module, of the modules whose forward takes several together: {"vision": 4}.

    ``train`` has the window and the microbatches of a step, which are the most; ``layouts`` are by module.
    """
    window = min(train.window or train.microbatches, train.microbatches)
    return {name: layout.op_microbatches(window) for name, layout in layouts.items() if layout.takes_several}


def _check_lanes(schedule: str, module: str, layout: Layout) -> None:
    """Lanes are for encoders and generators, under schedules that know them."""
    fix = f"the {LLM} is a pipeline, and lanes are for encoders and generators; set it to 1"
    require(module != LLM, f"{module}/Layout.lanes", layout.lanes, fix)
    fix = f"Train.schedule={schedule!r} has no place for lanes; set it to 1, or the schedule to {LANED[-1]!r}"
    require(schedule in LANED, f"{module}/Layout.lanes", layout.lanes, fix)


def _check_nested(schedule: str, layouts: Mapping[str, Layout]) -> None:
    """At least one encoder or generator has lanes, and each with lanes has exactly the ranks of the LLM."""
    llm, media_modules = layouts[LLM], {name: layout for name, layout in layouts.items() if name != LLM}
    fix = f"has no module with lanes to nest; set Train.schedule to {ONE_F_ONE_B!r}"
    require(bool(media_modules), "Train.schedule", schedule, fix)
    require(llm.pp > 1, "Train.schedule", schedule, f"has no pipeline to nest in; set {LLM}/Layout.pp above 1")
    has_lanes = any(layout.lanes > 1 for layout in media_modules.values())
    fix = f"Train.schedule={schedule!r} wants a module with lanes; set it to {llm.pp}, {LLM}/Layout.pp"
    require(has_lanes, f"{next(iter(media_modules))}/Layout.lanes", 1, fix)
    for module, layout in media_modules.items():
        ranks = f"its {show_ranks(layout.ranks)} are not the {show_ranks(llm.ranks)} of the {LLM} that it is nested in"
        fix = f"{ranks}; give it the same rank_offset, and lanes·dp·cp·tp = {llm.size}"
        require(layout.lanes == 1 or layout.ranks == llm.ranks, f"{module}/Layout.lanes", layout.lanes, fix)


def _check_copies(module: str, layout: Layout, llm: Layout, *, is_encoder: bool) -> None:
    """Copies are of encoders, one on each stage submesh of the LLM."""
    field = f"{module}/Layout.copies"
    fix = "copies are of encoders, whose features are computed several times and counted once; set it to 1"
    require(is_encoder, field, layout.copies, fix)
    fix = f"every pipeline stage of the {LLM} has a copy; set it to {llm.pp}, {LLM}/Layout.pp"
    require(layout.copies == llm.pp, field, layout.copies, fix)
    ranks = f"its {show_ranks(layout.ranks)} are not the {show_ranks(llm.ranks)} of the {LLM}"
    fix = f"{ranks}; give it the same rank_offset, and copies·dp·cp·tp = {llm.size}"
    require(layout.ranks == llm.ranks, field, layout.copies, fix)
