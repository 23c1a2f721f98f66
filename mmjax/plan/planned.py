"""Turns a plan into a configuration, a gin file, tables, JSON and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import Any

from mmjax.assembly.buckets import build_packer
from mmjax.assembly.packers import one_bucket
from mmjax.configurable import ConfigError, setting_name
from mmjax.data.config import PackingConfig
from mmjax.data.loader import tokenizer_of
from mmjax.data.source import RememberedMeta, Source
from mmjax.mesh.layout import Layout, cell_count
from mmjax.plan.work import padded_rows
from mmjax.planner.candidates import Candidate
from mmjax.planner.choose import PlanChoice
from mmjax.planner.estimate import Estimate
from mmjax.planner.finalists import RowShapes, RowsOf
from mmjax.recipe import ModuleSpec, Recipe, validate
from mmjax.recipe.device_defaults import with_remat
from mmjax.schedule.timeline import draw_timeline

GIGA = 1e9


Known = dict[tuple[object, ...], RowShapes | ConfigError]
"""A cache of packing results: rows, or the error, by the settings that determine them (`_packing_settings`)."""


def planned(recipe: Recipe, candidate: Candidate) -> Recipe:
    """`recipe` with the candidate's layouts, microbatches, schedule, remat and offload.

    The rows of given buckets are scaled to the samples of the candidate's microbatches.

    Args:
      recipe: the configuration that is planned for.
      candidate: the layouts and schedule of a plan for it, such as `choose_plan(…).best.candidate`.

    Raises:
      ConfigError: the result is not legal.
    """
    chosen = {name: getattr(candidate, name) for name in ("microbatches", "schedule", "inner", "window")}
    train = replace(recipe.train, **chosen)
    changed = replace(
        recipe,
        train=replace(train, lowering="auto"),
        model=recipe.model.map(
            lambda node: replace(node.at(_layout(node, candidate)), offload=candidate.offload(node.name))
        ),
        world=replace(recipe.world, devices=candidate.world if recipe.world.devices else 0),
    )
    changed = with_remats(changed, candidate.remat)
    # The same samples in more microbatches.
    ratio = recipe.train.microbatches / candidate.microbatches
    given_buckets = {
        name: packing.given for name, packing in recipe.model.packing.items() if packing.given and ratio != 1
    }
    scaled = {
        name: PackingConfig(buckets=tuple(sorted({(ceil(rows * ratio), width) for rows, width in buckets})))
        for name, buckets in given_buckets.items()
    }
    changed = replace(changed, model=changed.model.with_packing(scaled))
    validate(changed)
    return changed


def _layout(node: ModuleSpec, candidate: Candidate) -> Layout:
    """The candidate's layout of a module, with tokens in an order that the module allows."""
    layout = candidate.layouts[node.name]
    if node.settings.needs_all_tokens and layout.tp > 1:
        layout = replace(layout, sp=False)
    return replace(layout, cp_tokens="contiguous") if node.settings.needs_order and layout.cp > 1 else layout


def with_remats(recipe: Recipe, remats: Mapping[str, str]) -> Recipe:
    """`recipe` with these values of `remat` by module: {"llm": "full"}."""
    for name, remat in remats.items():
        recipe = with_remat(recipe, [name], remat)
    return recipe


def exact_rows(recipe: Recipe, source: Source, known: Known | None = None) -> RowShapes:
    """Rows of a microbatch on all ranks and positions of a row, as a run of `recipe` packs them, by module name.

    With the largest buckets: {"vision": (16, 1024), "llm": (8, 4096)}.

    Args:
      recipe: the configuration.
      source: its training samples, as `open_source(recipe, split="train")` opens them.
      known: a cache for several calls with the same model, data and global batch, {} at first; it is added to.

    Raises:
      ConfigError: a bucket is too small for the data.
    """
    known, key = {} if known is None else known, _packing_settings(recipe)
    if key not in known:
        tokenizer = tokenizer_of(recipe.data.settings, recipe.model.media)
        try:
            packer = build_packer(recipe, tokenizer, one_bucket=one_bucket(recipe), source=source)
            known[key] = padded_rows(recipe, packer)
        except ConfigError as error:
            known[key] = error
    rows = known[key]
    if isinstance(rows, ConfigError):
        raise ConfigError(str(rows))
    return rows


def _packing_settings(recipe: Recipe) -> tuple[object, ...]:
    """The settings that determine the rows, given the model, the data and the global batch."""
    train, buckets = recipe.train, tuple((name, packing.buckets) for name, packing in recipe.model.packing.items())
    contexts = tuple(
        (name, layout.cp, layout.cp_tokens, layout.row_multiple) for name, layout in recipe.model.layouts.items()
    )
    settings = (train.microbatches, cell_count(recipe.model.layouts.values()), contexts, one_bucket(recipe), buckets)
    chooses_buckets = any(isinstance(packing.buckets, int) for packing in recipe.model.packing.values())
    if recipe.data.settings.reorder == "none" or not chooses_buckets:
        return settings
    # Buckets are chosen from microbatches in the order that suits the schedule.
    return (*settings, tuple(recipe.model.layouts.items()), train.schedule, train.inner, train.window)


def rows_by_candidate(recipe: Recipe, source: Source) -> RowsOf:
    """A function from a candidate to the rows of its run; candidates with the same packing are packed once.

    The function returns (rows of a microbatch on all ranks, positions of a row) by module name, {"llm": (8, 4096)}. It
    raises `ConfigError` if the recipe with the candidate is not legal, or a bucket is too small.

    Args:
      recipe: the configuration that is planned for.
      source: its training samples, as `open_source(recipe, split="train")` opens them.
    """
    known: Known = {}
    source = RememberedMeta(source)
    return lambda candidate: exact_rows(planned(recipe, candidate), source, known)


# ---- gin -------------------------------------------------------------------------------------------------------------


def gin_text(recipe: Recipe, choice: PlanChoice, estimate: Estimate) -> str:
    """The text of a gin file of the plan `estimate`, to load after the files of `recipe`.

    It has the plan's layouts, microbatches, schedule, remat, buckets and offloads: lines such as "llm/Layout.tp = 2".

    Args:
      recipe: the configuration that was planned for.
      choice: the result of `choose_plan`, which has the numbers of devices.
      estimate: the plan, one of the choice's estimates, such as `choice.best`.
    """
    changed = planned(recipe, estimate.candidate)
    lines = [
        f"# {estimate.candidate.mode} on {used(choice, estimate.candidate)}{_where(estimate.candidate)}.",
        f"# A step takes {estimate.seconds:.4g} s, {estimate.most / GIGA:.3g} GB a device; {estimate.clock.source}.",
        f"# {_efficiency(estimate)}.",
    ]
    for name, layout in changed.model.layouts.items():
        lines += [f"{name}/Layout.{field} = {value!r}" for field, value in asdict(layout).items()]
    for name, remat in estimate.candidate.remat.items():
        lines.append(f"{setting_name(name, changed.model[name].settings, 'remat')} = {remat!r}")
    for name, node in changed.model.nodes.items():
        if node.packing != recipe.model[name].packing:
            lines.append(f"{name}/Packing.buckets = {node.packing.buckets!r}")
    for name, node in changed.model.nodes.items():
        if node.offload != recipe.model[name].offload:
            lines += [f"{name}/Offload.{field} = {value!r}" for field, value in asdict(node.offload).items()]
    chosen = ("microbatches", "schedule", "inner", "window", "lowering")
    lines += [f"Train.{field} = {getattr(changed.train, field)!r}" for field in chosen]
    if changed.world.devices:
        lines.append(f"World.devices = {changed.world.devices}")
    return "\n".join(lines) + "\n"


# ---- for people and programs -----------------------------------------------------------------------------------------


def used(choice: PlanChoice, candidate: Candidate) -> str:
    """The devices that a candidate uses: "8 of 16 devices", or by kind "64 of 64 h100 and 16 of 32 l20".

    Args:
      choice: the result of `choose_plan`, which has the numbers of all devices.
      candidate: the layouts of one of its estimates, such as `choice.best.candidate`.
    """
    if not choice.kinds:
        return f"{candidate.devices} of {choice.devices} devices"
    counts = {kind: len(candidate.ranks(kind)) for kind in choice.kinds}
    return " and ".join(f"{counts[kind]} of {there} {kind}" for kind, there in choice.kinds.items())


def _efficiency(estimate: Estimate) -> str:
    """MFU as in the metrics, and the shares of padding and recompute, which it leaves out."""
    mfu = "" if estimate.mfu is None else f"MFU {estimate.mfu:.1%}, of real tokens and without recompute; "
    wasted = f"{estimate.padding:.1%} of the positions are padding, {estimate.recompute:.1%} of the FLOPs recompute"
    return mfu + wasted


def _where(candidate: Candidate) -> str:
    """The ranks of each kind of device, such as ": ranks 0-63 are h100, ranks 64-79 are l20"; "" without kinds."""
    spans = {
        kind: (min(ranks), max(ranks)) for kind in candidate.used_kinds if kind and (ranks := candidate.ranks(kind))
    }
    parts = [f"ranks {first}-{last} are {kind}" for kind, (first, last) in spans.items()]
    return f": {', '.join(parts)}" if parts else ""


def blocks(estimate: Estimate) -> list[tuple[str, int, int]]:
    """(name, number of ranks, devices of a node) for each kind of device in use, in the order of ranks.

    Such as [("h100", 16, 8), ("l20", 4, 8)], or [("", 16, 8)] where there is one kind. A kind's ranks go up to where
    the next kind begins, so a few at the end of its last node may have nothing to do.

    estimate: a plan, such as the `best` of `choose_plan`'s result.
    """
    candidate, result = estimate.candidate, []
    modules = {
        kind: next(name for name in candidate.layouts if candidate.kinds.get(name, "") == kind)
        for kind in candidate.used_kinds
    }
    starts = [candidate.kind_start(module) for module in modules.values()]
    for (kind, module), start, end in zip(modules.items(), starts, [*starts[1:], candidate.world], strict=True):
        result.append((kind, end - start, estimate.clock.of(module).node))
    return result


def as_json(choice: PlanChoice) -> dict[str, Any]:
    """The result of `choose_plan` as an object for `json.dumps`.

    "plan" is the best estimate, "modes" the best by mode, "simulated" a list of all: each with "step_seconds", "mfu",
    "bytes_a_device", "layouts", "stages" and further figures. Beside them are "devices", "source", "why" and
    "without_a_plan", the reasons by mode; with several kinds of device also "kinds".
    """
    return {
        "devices": choice.devices,
        **({"kinds": dict(choice.kinds)} if choice.kinds else {}),
        "source": choice.best.clock.source,
        "plan": _figures(choice.best),
        "modes": {mode: _figures(estimate) for mode, estimate in choice.by_mode.items()},
        "simulated": [_figures(estimate) for estimate in choice.estimates],
        "without_a_plan": dict(choice.misses),
        "why": choice.why(),
    }


def _figures(estimate: Estimate) -> dict[str, Any]:
    candidate = estimate.candidate
    return {
        "mode": candidate.mode,
        "step_seconds": estimate.seconds,
        "mfu": estimate.mfu,
        "padding": estimate.padding,
        "recompute": estimate.recompute,
        "bubble": estimate.bubble,
        "bottleneck": estimate.bottleneck,
        "bytes_a_device": estimate.most,
        "devices": candidate.devices,
        "microbatches": candidate.microbatches,
        "schedule": candidate.schedule,
        "inner": candidate.inner,
        "window": candidate.window,
        "layouts": {name: asdict(layout) for name, layout in candidate.layouts.items()},
        "remat": dict(candidate.remat),
        "offloads": {name: asdict(offload) for name, offload in candidate.offloads.items()},
        **({"kinds": _kinds(candidate)} if candidate.kinds else {}),
        "stages": {
            name: {"seconds": estimate.stage_seconds(name), "bytes": asdict(need)}
            for name, need in estimate.device_bytes.items()
        },
    }


def _kinds(candidate: Candidate) -> dict[str, Any]:
    """Devices, first and last rank, and modules of each kind of device, in the order of ranks."""
    return {
        kind: {
            "devices": len(candidate.ranks(kind)),
            "ranks": [min(candidate.ranks(kind)), max(candidate.ranks(kind))],
            "modules": [name for name, module_kind in candidate.kinds.items() if module_kind == kind],
        }
        for kind in candidate.used_kinds
    }


def table(choice: PlanChoice) -> Iterator[str]:
    """Yields lines of text: the best candidate of each mode, runners-up, and the reason for the choice.

    choice: the result of `choose_plan`. Lines have no newlines.
    """
    sources = dict.fromkeys(e.clock.source for e in choice.estimates if len(e.candidate.used_kinds) == 1)
    yield from (f"times: {source}" for source in sources or (choice.best.clock.source,))
    yield ""
    heads = ("step ms", "MFU", "padding", "recompute", "idle", "GB", "devices", "microbatches", "schedule", "slowest")
    yield _row("", *heads)
    for estimate in choice.by_mode.values():
        yield from _entry(estimate.candidate.mode, estimate, choice)
    for mode, reason in choice.misses.items():
        yield f"{mode}: {reason}"
    runners_up = [estimate for estimate in choice.estimates if estimate not in choice.by_mode.values()]
    if runners_up:
        yield ""
        yield "runners-up"
        for estimate in runners_up[:5]:
            yield from _entry(estimate.candidate.mode, estimate, choice)
    yield ""
    yield f"plan: {choice.why()}"
    if choice.best.candidate.devices < choice.devices:
        yield f"{used(choice, choice.best.candidate)} are used: no layout that fits is faster with more"


def _entry(name: str, estimate: Estimate, choice: PlanChoice) -> Iterator[str]:
    candidate = estimate.candidate
    yield _row(
        f"{'*' if estimate is choice.best else ' '} {name}",
        f"{estimate.seconds * 1e3:.4g}",
        "" if estimate.mfu is None else f"{estimate.mfu:.1%}",
        f"{estimate.padding:.0%}",
        f"{estimate.recompute:.0%}",
        f"{estimate.bubble:.0%}",
        f"{estimate.most / GIGA:.3g}",
        str(candidate.devices),
        str(candidate.microbatches),
        f"{candidate.schedule} {candidate.inner}" if candidate.has_inner else candidate.schedule,
        estimate.bottleneck,
    )
    host = max(need.host for need in estimate.device_bytes.values())
    yield f"    {candidate.describe()}" + (f"; {host / GIGA:.3g} GB of host memory a device" if host else "")


def _row(name: str, *cells: str) -> str:
    widths = (10, 8, 9, 11, 6, 8, 9, 14, 25, 12)
    return f"{name:<17}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def draw(estimate: Estimate, path: str | Path) -> None:
    """Draws the timeline of a step's first microbatches (`StepSeconds.shown`) to a picture.

    Args:
      estimate: a plan, such as the `best` of `choose_plan`'s result.
      path: the picture, such as "plan.png"; its suffix chooses the format (.png, .svg, .pdf).
    """
    timeline, count = estimate.shown, estimate.candidate.microbatches
    shown = timeline.schedule.microbatches
    part = "" if shown == count else f", the first {shown} of {count} microbatches"
    part += f"; a step takes {estimate.seconds * 1e3:.4g} ms"
    draw_timeline(timeline, path, source=f"simulated{part}; {estimate.clock.source}")
