"""Variants of a candidate: cp, chunks, other schedules, layers cut by time, optimizer instances, offload.

Simulating a variant costs as much as simulating a layout, so a closed form selects the variants that could be faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from mmjax.planner.work import ModuleWork, StagePart, Work
from mmjax.schedule.closed_forms import idle_1f1b, idle_interleaved, idle_zb_h1
from mmjax.schedule.partition import cut
from mmjax.schedule.schedules import SCHEDULES

MORE_CHUNKS = 4
SCHEDULE_GAIN, INSTANCES_GAIN, CP_METHOD_GAIN = 0.02, 0.005, 0.005
"""Least relative gain for which another schedule, optimizer instances, and another cp method, are simulated."""


# ---- cp --------------------------------------------------------------------------------------------------------------


def split_rows(work: Work, candidate: Candidate) -> Iterator[Candidate]:
    """Yields the candidate with cp in place of a factor of modules' tp, or dp, in every combination of modules.

    Ranks stay the same. It yields nothing where no module may have cp.

    Args:
      work: `Work`, what the modules compute, as `read_work(recipe)` gives it.
      candidate: the layouts and the schedule, such as `estimate.candidate`.
    """
    choices = [_with_context(work.modules[name], layout) for name, layout in candidate.layouts.items()]
    for layouts in itertools.product(*choices):
        if any(layout.cp > 1 for layout in layouts):
            yield replace(candidate, layouts=dict(zip(candidate.layouts, layouts, strict=True)))


def _with_context(module: ModuleWork, layout: Layout) -> list[Layout]:
    """The layout, and the layouts with cp on the same ranks."""
    layouts = [layout]
    for cp in contexts(module, layout.tp * layout.dp)[1:]:
        if layout.tp % cp == 0 and layout.tp // cp in module.memory:
            layouts.append(replace(layout, tp=layout.tp // cp, cp=cp))
        if layout.dp % cp == 0:
            layouts.append(replace(layout, dp=layout.dp // cp, cp=cp))
    return layouts


def exchanged(estimate: Estimate) -> Candidate | None:
    """The candidate with the shortest cp method for each module, of "gather" and "all-to-all".

    The time of a ring depends on the fullest rank of each round, which an estimate does not have. Ranks with whole
    media exchange nothing, so theirs stays. None if another method gains less than `CP_METHOD_GAIN`.

    estimate: a candidate in seconds and bytes, as `finalists.estimated` gives it or `PlanChoice` has it.
    """
    candidate, layouts = estimate.candidate, dict(estimate.candidate.layouts)
    for name, layout in candidate.layouts.items():
        heads = estimate.work.modules[name].heads[0] // layout.tp
        whole_media = estimate.work.modules[name].has_whole_media(layout, estimate.rows[name][1])
        if layout.cp > 1 and heads % layout.cp == 0 and not whole_media:
            options = [replace(layout, cp_way=method) for method in ("gather", "all-to-all")]
            layouts[name] = min(options, key=lambda option, name=name: _quick(estimate, {**layouts, name: option}))
    gain = estimate.quick - _quick(estimate, layouts)
    return replace(candidate, layouts=layouts) if gain >= CP_METHOD_GAIN * estimate.quick else None


def _quick(estimate: Estimate, layouts: Mapping[str, Layout]) -> float:
    return replace(estimate, candidate=replace(estimate.candidate, layouts=layouts)).quick


# ---- schedules -------------------------------------------------------------------------------------------------------


def interleaved(work: Work, candidate: Candidate, chunks: int = 2) -> Iterator[Candidate]:
    """Yields the candidate with an interleaved schedule and `chunks` LLM stages on each submesh, if that is legal.

    It is legal if the LLM runs 1F1B, chunks·pp divides its layers and pp divides the microbatches; otherwise nothing is
    yielded. There is at most one item.

    Args:
      work: `Work`, what the modules compute, as `read_work(recipe)` gives it.
      candidate: the layouts and the schedule, such as `estimate.candidate`.
      chunks: LLM stages on each submesh, 2 or more.
    """
    llm = candidate.layouts[LLM]
    divisible = work.modules[LLM].layers % (chunks * llm.pp) == candidate.span % llm.pp == 0
    if candidate.is_pipelined_1f1b and divisible:
        layouts = {**candidate.layouts, LLM: replace(llm, chunks=chunks, layers=())}
        yield replace(candidate, layouts=layouts).rescheduled("interleaved")


def rescheduled(estimate: Estimate, best: float) -> Iterator[Candidate]:
    """Yields a 1F1B candidate with each other schedule whose step, by a closed form, could be well below `best`.

    The schedules are "zb-h1", "eager-1f1b" and "interleaved"; the least relative gain is `SCHEDULE_GAIN`. It yields
    nothing unless the LLM of the estimate runs 1F1B in several stages.

    Args:
      estimate: the candidate in seconds, as `finalists.estimated` gives it.
      best: seconds of the shortest step so far.
    """
    candidate, limit = estimate.candidate, best * (1 - SCHEDULE_GAIN)
    for schedule, gain in gains(estimate).items() if candidate.is_pipelined_1f1b else ():
        if estimate.seconds - gain < limit:
            if SCHEDULES[schedule].chunks:
                yield from interleaved(estimate.work, candidate, MORE_CHUNKS)
            else:
                yield candidate.rescheduled(schedule)


def gains(estimate: Estimate) -> dict[str, float]:
    """Seconds of a step that each schedule may save over 1F1B if all stages take as long as the longest, by schedule.

    In windows each of them is idle once a window. Encoders with phases of their own are no stages of the pipeline.

    The keys are "zb-h1", "eager-1f1b" and "interleaved", with `MORE_CHUNKS` chunks; a gain may be negative. The
    estimate, as `finalists.estimated` gives it, is of a candidate with 1F1B.

    1F1B keeps only as many microbatches in flight as there are stages, so a move that computation does not hide delays
    every round. Eager 1F1B hides these moves. Modules with lanes are no stages of the pipeline and fill no gaps in it.
    """
    candidate, phased = estimate.candidate, estimate.candidate.phases(estimate.work)
    stages = [node for node in estimate.graph.stages if node.lanes == 1 and node.module not in phased]
    depth, count = 1 + max(estimate.graph.distance(node.name) for node in stages), candidate.span
    windows = -(-candidate.microbatches // candidate.span)
    ranks = max(stages, key=lambda node: (estimate.loads[node.ranks], estimate.stage_seconds(node.name))).ranks
    forward = backward = weight = 0.0
    for node in (node for node in stages if node.ranks == ranks):
        f_seconds, b_seconds = (estimate.costs.seconds[kind, node.name, False] for kind in "FB")
        forward, backward = forward + f_seconds, backward + b_seconds * node.backward
        weight += b_seconds * estimate.w_share(node.module, estimate.parts[node.name]) * node.trainable
    weight = min(weight, backward / 2)
    idle = idle_1f1b(depth, forward=forward, backward=backward)
    split = idle_zb_h1(depth, count, forward=forward, backward=backward - weight, weight=weight)
    chunked = idle_interleaved(depth, count, chunks=MORE_CHUNKS, forward=forward, backward=backward)
    once = {"zb-h1": idle - split, "eager-1f1b": _exposed_moves(estimate) * count, "interleaved": idle - chunked}
    return {schedule: windows * seconds for schedule, seconds in once.items()}


def _exposed_moves(estimate: Estimate) -> float:
    """Seconds for each microbatch by which stages and moves, averaged over the pipeline, exceed the longest stage."""
    stages = {node.name: node.ranks for node in estimate.graph.stages if node.lanes == 1}
    loads, seconds = [estimate.loads[ranks] for ranks in set(stages.values())], estimate.costs.seconds
    moved = [edge for edge in estimate.graph.edges if edge.kind != "local" and {edge.src, edge.dst} <= set(stages)]
    moves = sum(
        seconds["move", edge.name, backward] for edge in moved for backward in (False, True)[: 1 + edge.gradient]
    )
    return max(0.0, (sum(loads) + moves) / len(loads) - max(loads))


# ---- layers ----------------------------------------------------------------------------------------------------------


def balanced(
    work: Work, clock: Clocks, rows: Mapping[str, tuple[float, int]], candidate: Candidate
) -> Candidate | None:
    """The candidate with layers cut by seconds of forward and backward (Jang et al., "Cornstarch", §4.2).

    Ends, and modules that share a stage's ranks, count too. None if layers are cut like this already. See
    `mmjax.schedule.partition`.

    Args:
      work: `Work`, what the modules compute, as `read_work(recipe)` gives it.
      clock: the times of its modules, such as `estimate.clock`.
      rows: by module name, rows of a microbatch on all ranks together and positions of a row, such as `estimate.rows`.
      candidate: the candidate, `estimate.candidate`; modules of one stage stay as they are.
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

    The first and the last layer include their ends, and modules of one stage that share their ranks outside of phases.
    """
    layout = candidate.layouts[name]

    def seconds(module: str, part: StagePart) -> float:
        degrees, (count, width) = candidate.layouts[module], rows[module]
        sharers = degrees.dp * work.modules[module].context(degrees)
        stage = clock.of(module).stage(module, part, rows=count / sharers, width=width, tp=degrees.tp)
        return stage.forward + stage.backward

    layer = seconds(name, StagePart(layers=1))
    result = [layer] * work.modules[name].layers
    first, last = StagePart(layers=1, first=True), StagePart(layers=1, last=True)
    for at, index, part in ((0, 0, first), (-1, layout.stages - 1, last)):
        result[at] += max(0.0, seconds(name, part) - layer)
        for sharing, degrees in candidate.layouts.items():
            phased = sharing in candidate.phases(work)
            on_stage = degrees.stages == 1 and degrees.ranks == layout.stage_ranks(index)
            if sharing != name and on_stage and not phased:
                result[at] += seconds(sharing, work.modules[sharing].whole)
    return result


# ---- optimizer instances ---------------------------------------------------------------------------------------------


def instanced(estimate: Estimate) -> Candidate | None:
    """The candidate with the optimizer instances that make prepare and reduce of each module shortest.

    Only modules whose stages span nodes have several (Karnati et al., "Heterogeneous Parallelism for Multimodal Large
    Language Model Training", appendix A). None if the gain is below the share `INSTANCES_GAIN` of a step.

    estimate: a candidate in seconds and bytes, as `finalists.estimated` gives it or `PlanChoice` has it.
    """
    candidate = estimate.candidate
    layouts = dict(candidate.layouts)
    for name, layout in candidate.layouts.items():
        dp = layout.across_lanes.dp
        if dp > 1 and layout.stage_size > estimate.clock.of(name).node:
            counts = (count for count in divisors(dp, dp) if dp // count % layout.ep_degrees[0] == 0)
            options = (replace(layout, optimizer_instances=count) for count in counts)
            layouts[name] = min(
                options, key=lambda option, name=name: _once_seconds(estimate, {**layouts, name: option}, [name])
            )
    gain = _once_seconds(estimate, candidate.layouts, layouts) - _once_seconds(estimate, layouts, layouts)
    return replace(candidate, layouts=layouts) if gain >= INSTANCES_GAIN * estimate.seconds else None


def _once_seconds(estimate: Estimate, layouts: Mapping[str, Layout], names: Iterable[str]) -> float:
    """Seconds of prepare, reduce and update in the slowest stage of modules `names`, with these layouts."""
    changed = replace(estimate, candidate=replace(estimate.candidate, layouts=layouts))
    return max(changed.once_seconds(name) for name in names)


# ---- offload ---------------------------------------------------------------------------------------------------------


def offloaded(estimate: Estimate, fits: Callable[[Estimate], bool]) -> Candidate | None:
    """The candidate with only as much offload as it needs to fit; the largest copies are dropped first.

    None if no offload makes it fit.

    Args:
      estimate: of the candidate without offload, as `finalists.estimated` gives it.
      fits: whether an estimate, which has some offload, fits into memory: `lambda e: missing(fleet, e) <= 0`.
    """
    most = everything_offloaded(estimate)
    if not fits(most):
        return None
    offloads = most.candidate.offloads
    options = [(name, array) for name, offload in offloads.items() for array, on in vars(offload).items() if on]
    for name, array in sorted(options, key=lambda option: -_host_bytes(estimate, *option)):
        fewer = {**offloads, name: replace(offloads[name], **{array: False})}
        if fits(_with(estimate, fewer)):
            offloads = fewer
    return _with(estimate, {name: offload for name, offload in offloads.items() if offload != HOME}).candidate


def everything_offloaded(estimate: Estimate) -> Estimate:
    """The estimate with the most offload that the schedule allows, for modules whose devices can copy to the host.

    Masters and moments of all are offloaded, and compute parameters of encoders that have phases of their own.

    estimate: of a candidate, as `finalists.estimated` gives it; offload that it has already is replaced.
    """
    candidate = estimate.candidate
    phased = candidate.phases(estimate.work)
    able = [name for name in candidate.layouts if not isinf(estimate.clock.of(name).copy(1.0))]
    return _with(estimate, {name: OffloadConfig(optimizer=True, parameters=name in phased) for name in able})


def _with(estimate: Estimate, offloads: Mapping[str, OffloadConfig]) -> Estimate:
    return replace(estimate, candidate=replace(estimate.candidate, offloads=offloads))


def _host_bytes(estimate: Estimate, name: str, array: str) -> float:
    """The most bytes of host memory, over devices, that offload of `array` (a field of it) takes for module `name`."""
    offloaded_array = _with(estimate, {name: OffloadConfig(**{array: True})})
    return max(stage.host for stage in offloaded_array.device_bytes.values())
