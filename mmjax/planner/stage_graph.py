"""The stage graph that a run of a candidate layout has, made from what the planner knows of the modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mmjax.planner.candidates import Candidate
from mmjax.planner.clock import Clock, Clocks
from mmjax.planner.work import ModuleWork, Part, Work
from mmjax.schedule.graph import EdgeNode, StageGraph, StageNode, Transport


def stage_parts(work: Work, candidate: Candidate) -> dict[str, Part]:
    """What each stage has of its module, by stage name."""
    return {
        f"{name}.{index}": part
        for name, module in work.modules.items()
        for index, part in enumerate(module.parts(candidate.layouts[name]))
    }


def stage_graph(work: Work, candidate: Candidate, clock: Clocks) -> StageGraph:
    """Stages and edges in the order of a run's; `clock` says how many devices a process has."""
    nodes: dict[str, StageNode] = {}
    edges: list[EdgeNode] = []
    parts = stage_parts(work, candidate)
    for stage, part in parts.items():
        name, _, index = stage.rpartition(".")
        module, layout = work.modules[name], candidate.layouts[name]
        before = _sources(work, candidate, parts, module, int(index))
        trained = module.trained.of(part) > 0
        nodes[stage] = StageNode(
            name=stage,
            module=name,
            index=int(index),
            ranks=layout.stage_ranks(int(index)),
            backward=trained or any(nodes[source].backward for source in before),
            trainable=trained,
            loss=part.last and name not in work.encoders,
            offload=candidate.offload(name).parameters,
        )
        for source in before:
            transport = _transport(candidate, clock, nodes[source], nodes[stage])
            gradient = nodes[source].backward
            edge = f"{source}->{stage}"
            edges.append(EdgeNode(name=edge, src=source, dst=stage, transport=transport, gradient=gradient))
    return StageGraph(stages=tuple(nodes.values()), edges=tuple(edges))


def are_apart(candidate: Candidate, clock: Clocks, size_of: Callable[[Clock], int], *stages: StageNode) -> bool:
    """Whether stages are in several groups of so many neighbours, of which each kind has its own; 0: one group."""
    groups: set[tuple[int, int]] = set()
    for stage in stages:
        start, size = candidate.block(stage.module), size_of(clock.of(stage.module))
        groups |= {(start, (rank - start) // size) if size else (0, 0) for rank in (stage.ranks[0], stage.ranks[-1])}
    return len(groups) > 1


def _transport(candidate: Candidate, clock: Clocks, source: StageNode, target: StageNode) -> Transport:
    """How an activation crosses, as boundaries of a run have it."""
    if source.ranks == target.ranks:
        return "local"
    return "rendezvous" if are_apart(candidate, clock, lambda clock: clock.process, source, target) else "async"


def _sources(work: Work, candidate: Candidate, parts: Mapping[str, Part], module: ModuleWork, index: int) -> list[str]:
    """The stages whose activations a stage takes: the one before it, and where they enter, those of others."""
    sources = [f"{module.name}.{index - 1}"] if index else []
    start = sum(parts[f"{module.name}.{at}"].layers for at in range(index))
    held = range(start, start + parts[f"{module.name}.{index}"].layers)
    for name in module.after:
        if index == 0 or any(layer in held for layer in work.modules[name].enters):
            sources.append(f"{name}.{candidate.layouts[name].stages - 1}")
    return sources
