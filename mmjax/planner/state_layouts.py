"""Variants of a candidate by the states of ranks with different data: different experts, shards of sums and parameters.

Expert parallelism may make a step shorter or longer, so every degree is tried. Shards of sums or of parameters only add
collectives to each microbatch, so they are for memory: a candidate that does not fit is tried with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mmjax.mesh.layout import EP_WAYS, SHARDS, Layout
from mmjax.planner.candidates import Candidate
from mmjax.planner.estimate import Estimate
from mmjax.planner.problem import divisors
from mmjax.planner.work import ModuleWork, Work


def expert_parallel(work: Work, candidate: Candidate) -> Iterator[Candidate]:
    """Yields the candidate with every ep, and each way of its exchange, of modules with experts.

    ep divides dp·cp and the experts, so that ranks stay the same. The first is the candidate itself, the only one of a
    model without experts. Ranks of tp have whole experts (``Layout.expert_tp = 1``) too where they then receive fewer
    tokens: in an all-to-all with smaller buffers than the worst case. Elsewhere they receive and compute as much.

    Args:
      work: `Work`, what the modules compute, as `read_work(recipe)` gives it.
      candidate: the layouts and the schedule.
    """
    names = [name for name, module in work.modules.items() if module.experts]
    choices = [_expert_layouts(work.modules[name], candidate.layouts[name]) for name in names]
    for layouts in itertools.product(*choices):
        changed = dict(zip(names, layouts, strict=True))
        yield replace(candidate, layouts={**candidate.layouts, **changed}) if changed else candidate


def _expert_layouts(module: ModuleWork, layout: Layout) -> list[Layout]:
    """The layout, and the layouts with expert parallelism on the same ranks."""
    layouts, experts = [layout], module.experts
    if experts and layout.lanes == 1:
        ranks = layout.dp * layout.cp
        degrees = divisors(math.gcd(ranks, experts.count), ranks)[1:]
        layouts += [replace(layout, ep=ep, ep_way=way) for ep in degrees for way in EP_WAYS]
        if experts.buffer and layout.tp in experts.whole:
            whole = (ep for ep in degrees if experts.count % (ep * layout.tp) == 0)
            layouts += [replace(layout, ep=ep, ep_way="all-to-all", expert_tp=1) for ep in whole]
    return layouts


def shard_values(module: ModuleWork, layout: Layout) -> tuple[str, ...]:
    """The values of `Layout.shard` that a module may have in a layout, those that take less memory last.

    Lanes have no shards: pulled parameters are whole at the fullest moment (``Layout.gather = 'pull'``). A module
    without gradients has none of them to share.

    Args:
      module: what it computes, such as `read_work(recipe).modules["llm"]`.
      layout: its layout, such as `Layout(dp=4)`.
    """
    if layout.lanes > 1 or layout.optimizer_shards == 1:
        return SHARDS[:1]
    return SHARDS if module.trained.of(module.whole) else (SHARDS[0], SHARDS[-1])


def with_shards(candidate: Candidate, shards: Mapping[str, str]) -> Candidate:
    """The candidate with these values of `Layout.shard`, by module: {"llm": "parameters"}."""
    layouts = {
        name: replace(layout, shard=shards.get(name, layout.shard)) for name, layout in candidate.layouts.items()
    }
    return replace(candidate, layouts=layouts)


def fully_sharded(work: Work, candidate: Candidate) -> Iterator[Candidate]:
    """Yields the candidate with sums as shards, and with parameters too, in every module that may have them.

    It yields nothing where no module may have any.

    Args:
      work: `Work`, what the modules compute, as `read_work(recipe)` gives it.
      candidate: the layouts and the schedule, without shards.
    """
    values = {name: shard_values(work.modules[name], layout) for name, layout in candidate.layouts.items()}
    for shard in SHARDS[1:]:
        chosen = {name: shard for name, of_module in values.items() if shard in of_module}
        if chosen:
            yield with_shards(candidate, chosen)


def more_shards(estimate: Estimate) -> Iterator[Candidate]:
    """Yields the candidate with the next value of `Layout.shard` for one module, which takes less memory.

    From a candidate without shards, repeated, it reaches every combination of values once.

    estimate: of a candidate that does not fit, as `finalists.estimated` gives it.
    """
    candidate, modules = estimate.candidate, estimate.work.modules
    values = {name: shard_values(modules[name], layout) for name, layout in candidate.layouts.items()}
    places = [values[name].index(layout.shard) for name, layout in candidate.layouts.items()]
    last_changed = max((number for number, place in enumerate(places) if place), default=0)
    for (name, options), place in list(zip(values.items(), places, strict=True))[last_changed:]:
        if place + 1 < len(options):
            yield with_shards(candidate, {name: options[place + 1]})


def most_shards(estimate: Estimate) -> Candidate:
    """The candidate whose modules share all that they can, and recompute all where the plan chooses that.

    estimate: of any candidate, as `finalists.estimated` gives it.
    """
    work, candidate = estimate.work, estimate.candidate
    last = {name: shard_values(work.modules[name], layout)[-1] for name, layout in candidate.layouts.items()}
    remat = {name: list(options)[-1] for name, options in work.options.items()}
    return with_shards(replace(candidate, remat={**candidate.remat, **remat}), last)
