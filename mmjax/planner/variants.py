"""Variants of a candidate: cp, chunks, other schedules, layers cut by time, optimizer instances, offload.

Simulating a variant costs as much as simulating a layout, so a closed form says first which ones could pay.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import isinf

from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM
from mmjax.pipeline.config import OffloadConfig
from mmjax.planner.candidates import Candidate, contexts
from mmjax.planner.clock import Clocks
from mmjax.planner.estimate import Estimate
from mmjax.planner.needs import HOME
from mmjax.planner.problem import divisors
from mmjax.planner.work import ModuleWork, Part, Work
from mmjax.schedule.closed_forms import idle_1f1b, idle_interleaved, idle_zb_h1
from mmjax.schedule.partition import cut
from mmjax.schedule.schedules import SCHEDULES

MORE_CHUNKS = 4
WORTH, INSTANCES_WORTH, WAY_WORTH = 0.02, 0.005, 0.005
"""Least relative gain for which another schedule, optimizer instances, and another way of cp ranks, are simulated."""


# ---- cp --------------------------------------------------------------------------------------------------------------


def split_rows(work: Work, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with cp in place of a part of modules' tp, or dp, in every combination of modules."""
    choices = [_with_context(work.modules[name], layout) for name, layout in candidate.layouts.items()]
    for layouts in itertools.product(*choices):
        if any(layout.cp > 1 for layout in layouts):
            yield replace(candidate, layouts=dict(zip(candidate.layouts, layouts, strict=True)))


def _with_context(module: ModuleWork, layout: Layout) -> list[Layout]:
    """The layout, and each with a cp on the same ranks."""
    found = [layout]
    for cp in contexts(module, layout.tp * layout.dp)[1:]:
        if layout.tp % cp == 0 and layout.tp // cp in module.held:
            found.append(replace(layout, tp=layout.tp // cp, cp=cp))
        if layout.dp % cp == 0:
            found.append(replace(layout, dp=layout.dp // cp, cp=cp))
    return found


def exchanged(estimate: Estimate) -> Candidate | None:
    """The candidate with the way for each module's cp ranks that is the shortest, of those whose time is known.

    In a ring the fullest rank of each round counts, which an estimate does not know. None where no other way gains
    `WAY_WORTH`.
    """
    candidate, layouts = estimate.candidate, dict(estimate.candidate.layouts)
    for name, layout in candidate.layouts.items():
        heads = estimate.work.modules[name].heads[0] // layout.tp
        if layout.cp > 1 and heads % layout.cp == 0:
            ways = [replace(layout, cp_way=way) for way in ("gather", "all-to-all")]
            layouts[name] = min(ways, key=lambda own, name=name: _quick(estimate, {**layouts, name: own}))
    gain = estimate.quick - _quick(estimate, layouts)
    return replace(candidate, layouts=layouts) if gain >= WAY_WORTH * estimate.quick else None


def _quick(estimate: Estimate, layouts: Mapping[str, Layout]) -> float:
    return replace(estimate, candidate=replace(estimate.candidate, layouts=layouts)).quick


# ---- schedules -------------------------------------------------------------------------------------------------------


def interleaved(work: Work, candidate: Candidate, chunks: int = 2) -> Iterator[Candidate]:
    """The candidate with an interleaved schedule and `chunks` LLM stages on each submesh, where that is legal."""
    llm = candidate.layouts[LLM]
    if candidate.plain and work.modules[LLM].layers % (chunks * llm.pp) == candidate.microbatches % llm.pp == 0:
        layouts = {**candidate.layouts, LLM: replace(llm, chunks=chunks, layers=())}
        yield replace(candidate, layouts=layouts).rescheduled("interleaved")


def rescheduled(estimate: Estimate, best: float) -> Iterator[Candidate]:
    """A 1F1B candidate with each other schedule that, by a closed form, could bring a step well below `best`."""
    candidate, limit = estimate.candidate, best * (1 - WORTH)
    for schedule, gain in gained(estimate).items() if candidate.plain else ():
        if estimate.seconds - gain < limit:
            chunked = SCHEDULES[schedule].chunks
            other = candidate.rescheduled(schedule)
            yield from interleaved(estimate.work, candidate, MORE_CHUNKS) if chunked else (other,)


def gained(estimate: Estimate) -> dict[str, float]:
    """For each schedule, the seconds it might save over 1F1B in a step, if all stages were as long as the longest.

    1F1B keeps only as many microbatches in flight as there are stages, so a move that computation does not hide delays
    every round. Eager 1F1B hides these moves. Modules with lanes are no stages of the pipeline and fill no gaps in it.
    """
    depth, count = estimate.depth, estimate.candidate.microbatches
    stages = [node for node in estimate.graph.stages if node.lanes == 1]
    ranks = max(stages, key=lambda node: (estimate.loads[node.ranks], estimate.stage_seconds(node.name))).ranks
    forward = backward = weight = 0.0
    for node in (node for node in stages if node.ranks == ranks):
        ahead, back = (estimate.costs.seconds[kind, node.name, False] for kind in "FB")
        forward, backward = forward + ahead, backward + back * node.backward
        weight += back * estimate.later(node.module, estimate.parts[node.name]) * node.trainable
    weight = min(weight, backward / 2)
    idle = idle_1f1b(depth, forward=forward, backward=backward)
    split = idle_zb_h1(depth, count, forward=forward, backward=backward - weight, weight=weight)
    chunked = idle_interleaved(depth, count, chunks=MORE_CHUNKS, forward=forward, backward=backward)
    return {"zb-h1": idle - split, "eager-1f1b": _hidden(estimate) * count, "interleaved": idle - chunked}


def _hidden(estimate: Estimate) -> float:
    """Seconds for each microbatch by which stages and moves, averaged over the pipeline, exceed the longest stage."""
    stages = {node.name: node.ranks for node in estimate.graph.stages if node.lanes == 1}
    loads, seconds = [estimate.loads[ranks] for ranks in set(stages.values())], estimate.costs.seconds
    moved = [edge for edge in estimate.graph.edges if edge.kind != "local" and {edge.src, edge.dst} <= set(stages)]
    moves = sum(seconds["move", edge.name, way] for edge in moved for way in (False, True)[: 1 + edge.gradient])
    return max(0.0, (sum(loads) + moves) / len(loads) - max(loads))


# ---- layers ----------------------------------------------------------------------------------------------------------


def balanced(
    work: Work, clock: Clocks, rows: Mapping[str, tuple[float, int]], candidate: Candidate
) -> Candidate | None:
    """The candidate with layers cut by seconds of forward and backward (Jang et al., "Cornstarch", §4.2).

    Ends, and modules that share a stage's ranks, count too. None where layers are cut like this already. See
    `mmjax.schedule.partition`.
    """
    layouts = dict(candidate.layouts)
    for name, layout in candidate.layouts.items():
        if layout.stages == 1:
            continue
        module = work.modules[name]
        seconds = _layer_seconds(work, clock, rows, candidate, name)
        counts = tuple(len(run) for run in cut(seconds, layout.pp, chunks=layout.chunks))
        if counts != tuple(len(run) for run in layout.runs(module.layers)):
            layouts[name] = replace(layout, layers=counts)
    return None if layouts == candidate.layouts else replace(candidate, layouts=layouts)


def _layer_seconds(
    work: Work, clock: Clocks, rows: Mapping[str, tuple[float, int]], candidate: Candidate, name: str
) -> list[float]:
    """Seconds of forward and backward of each layer of a module.

    The first and the last include their ends, and modules of one stage that share their ranks outside of phases.
    """
    layout = candidate.layouts[name]

    def seconds(module: str, part: Part) -> float:
        own, (count, width) = candidate.layouts[module], rows[module]
        sharers = own.dp * work.modules[module].context(own)
        took = clock.of(module).stage(module, part, rows=count / sharers, width=width, tp=own.tp)
        return took.forward + took.backward

    layer = seconds(name, Part(layers=1))
    result = [layer] * work.modules[name].layers
    for at, index, part in ((0, 0, Part(layers=1, first=True)), (-1, layout.stages - 1, Part(layers=1, last=True))):
        result[at] += max(0.0, seconds(name, part) - layer)
        for other, own in candidate.layouts.items():
            phased = other in candidate.phases(work)
            if other != name and own.stages == 1 and own.ranks == layout.stage_ranks(index) and not phased:
                result[at] += seconds(other, work.modules[other].whole)
    return result


# ---- optimizer instances ---------------------------------------------------------------------------------------------


def instanced(estimate: Estimate) -> Candidate | None:
    """The candidate with the optimizer instances that make prepare and reduce of each module shortest.

    Only modules whose stages span nodes have several (Karnati et al., "Heterogeneous Parallelism for Multimodal Large
    Language Model Training", appendix A). None where the gain is below `INSTANCES_WORTH`.
    """
    candidate = estimate.candidate
    layouts = dict(candidate.layouts)
    for name, layout in candidate.layouts.items():
        dp = layout.spanned.dp
        if dp > 1 and layout.stage_size > estimate.clock.of(name).node:
            several = (replace(layout, optimizer_instances=count) for count in divisors(dp, dp))
            layouts[name] = min(several, key=lambda own, name=name: _ends(estimate, {**layouts, name: own}, name))
    gain = _ends(estimate, candidate.layouts, *layouts) - _ends(estimate, layouts, *layouts)
    made = replace(candidate, layouts=layouts)
    return made if gain >= INSTANCES_WORTH * estimate.seconds else None


def _ends(estimate: Estimate, layouts: Mapping[str, Layout], *names: str) -> float:
    """Seconds of prepare, reduce and update in the slowest stage of these modules, with these layouts."""
    other = replace(estimate, candidate=replace(estimate.candidate, layouts=layouts))
    return max(other.ends(name) for name in names)


# ---- offload ---------------------------------------------------------------------------------------------------------


def offloaded(estimate: Estimate, fits: Callable[[Estimate], bool]) -> Candidate | None:
    """The candidate with only as much offload as it needs to fit; the largest copies are dropped first.

    None where no offload makes it fit.
    """
    most = everything_offloaded(estimate)
    if not fits(most):
        return None
    wanted = most.candidate.offloads
    options = [(name, kind) for name, own in wanted.items() for kind, on in vars(own).items() if on]
    for name, kind in sorted(options, key=lambda option: -_host(estimate, *option)):
        less = {**wanted, name: replace(wanted[name], **{kind: False})}
        if fits(_with(estimate, less)):
            wanted = less
    return _with(estimate, {name: own for name, own in wanted.items() if own != HOME}).candidate


def everything_offloaded(estimate: Estimate) -> Estimate:
    """With the largest offload that the candidate's schedule allows, of modules whose devices can copy to the host."""
    candidate = estimate.candidate
    phased = candidate.phases(estimate.work)
    able = [name for name in candidate.layouts if not isinf(estimate.clock.of(name).copy(1.0))]
    return _with(estimate, {name: OffloadConfig(optimizer=True, parameters=name in phased) for name in able})


def _with(estimate: Estimate, offloads: Mapping[str, OffloadConfig]) -> Estimate:
    return replace(estimate, candidate=replace(estimate.candidate, offloads=offloads))


def _host(estimate: Estimate, name: str, kind: str) -> float:
    """The most bytes of host memory, over devices, that offload of one kind takes for module `name`."""
    one = _with(estimate, {name: OffloadConfig(**{kind: True})})
    return max(need.host for need in one.needs.values())
