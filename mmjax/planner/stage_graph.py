"""The stage graph of a candidate, as in a run, made from the modules' work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from mmjax.planner.candidates import Candidate
from mmjax.planner.clock import Clock, Clocks
from mmjax.planner.work import ModuleWork, StagePart, Work
from mmjax.schedule.graph import EdgeKind, StageGraph, StageNode, connected


def stage_graph(work: Work, candidate: Candidate, clock: Clocks, parts: Mapping[str, StagePart]) -> StageGraph:
    """The stage graph of a candidate, with stages and edges in the same order as in a run.

    Args:
      work: `Work`, what the modules compute, as `read_work(recipe)` gives it.
      candidate: layouts and offloads of its modules, such as one of those that `homogeneous` yields.
      clock: has the devices among which no sender waits; such as `AnalyticClock`, or `Fleet.clocks(candidate.kinds)`.
      parts: by stage name, in order, the part of its module: {"llm.0": StagePart(layers=16, first=True), …}, as
        `Estimate.parts` has them.
    """
    nodes: list[StageNode] = []
    pairs: list[tuple[str, str]] = []
    for stage, part in parts.items():
        name, _, number = stage.rpartition(".")
        module, index = work.modules[name], int(number)
        node = StageNode(
            name=stage,
            module=name,
            index=index,
            ranks=candidate.layouts[name].stage_ranks(index),
            trainable=module.trained.of(part) > 0,
            loss=(part.last and name not in work.encoders) or module.experts is not None,  # their routers have losses
            offload=candidate.offload(name).parameters,
            stash=candidate.offload(name).activations,
            microbatches=candidate.together(name),
            lanes=candidate.layouts[name].lanes,
        )
        if candidate.layouts[name].pulls:
            together = are_apart(candidate, clock, lambda clock: clock.process, node)
            node = replace(node, gather="collective" if together else "pull")
        nodes.append(node)
        pairs += [(source, stage) for source in _sources(work, candidate, parts, module=module, index=index)]

    def across(source: StageNode, target: StageNode) -> EdgeKind:
        apart = are_apart(candidate, clock, lambda clock: clock.process, source, target)
        return "rendezvous" if apart else "async"

    return connected(nodes, pairs, across)


def are_apart(candidate: Candidate, clock: Clocks, size_of: Callable[[Clock], int], *stages: StageNode) -> bool:
    """Whether the ranks of some stages are in more than one group of devices, such as a node or a process.

    Groups of a kind of device are counted from its first rank.

    Args:
      candidate: the candidate that has the stages, `estimate.candidate`.
      clock: its times, `estimate.clock`.
      size_of: returns the number of devices of a group, such as `lambda clock: clock.node` for nodes; 0 means one
        group of all devices.
      stages: the stages, of which all ranks count, such as two of `estimate.graph.stages`.
    """
    groups: set[tuple[int, int]] = set()
    for stage in stages:
        start, size = candidate.kind_start(stage.module), size_of(clock.of(stage.module))
        groups |= {(start, (rank - start) // size) if size else (0, 0) for rank in (stage.ranks[0], stage.ranks[-1])}
    return len(groups) > 1


def _sources(
    work: Work, candidate: Candidate, parts: Mapping[str, StagePart], *, module: ModuleWork, index: int
) -> list[str]:
    """The stages whose activations a stage takes: the stage before it, and last stages of modules that enter here."""
    sources = [f"{module.name}.{index - 1}"] if index else []
    start = sum(parts[f"{module.name}.{at}"].layers for at in range(index))
    layers = range(start, start + parts[f"{module.name}.{index}"].layers)
    for name in module.after:
        if index == 0 or any(layer in layers for layer in work.modules[name].enters):
            sources.append(f"{name}.{candidate.layouts[name].stages - 1}")
    return sources
