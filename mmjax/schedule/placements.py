"""Placements of modules: stage graphs and costs from descriptions of modules, for comparing schedules.

Each function is one way to place encoders, an LLM and, in some, generators on ranks; with a schedule these are the
baselines of papers. A rank stands for a submesh here. Layers are cut as evenly as whole layers allow, by the time of
forward and backward together, which takes frozen modules into account (Jang et al., "Cornstarch", §4.2).

* `apart`: every module on ranks of its own; encoders do not wait for each other. With 1F1B it is DistTrain's placement.
* `spanning`: encoders on all ranks together, which the LLM's stages share. For three phases.
* `in_lanes`: encoders and generators on all ranks, which the LLM's stages share, a microbatch on each rank. With nested
  schedules it is BigMac's placement, with encoders first Optimus's.
* `in_pipeline`: all layers in one sequence, encoders before the LLM and generators behind it, cut into a stage a rank:
  a module shares ranks with its neighbours or has some of its own, as is best. With 1F1B it is Megatron's placement.
* `colocated_stages`: encoders cut into equally many stages and fused, so that the pipeline is a chain. With 1F1B it is
  Cornstarch's baseline "encoders-colocated" (§2.2).
* `replicated`: every LLM stage runs all encoders for itself. With 1F1B it is "encoders-replicated" (§2.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from mmjax.schedule.graph import StageGraph, StageNode, connected
from mmjax.schedule.partition import backward_factor, cut
from mmjax.schedule.simulate import Costs


@dataclass(frozen=True, kw_only=True)
class TimedModule:
    """A module to be placed: its layers and their times.

    Attributes:
      name: name of the module.
      layers: number of layers.
      seconds: seconds of one layer's forward of a microbatch on one rank; n ranks are n times as fast.
      trainable: whether it is trained. Its B then takes twice its F. Otherwise an encoder has no B, and a module behind
        a trained one has one as long as its F.
      factors: factor on F and B by microbatch; empty where all are 1.
      backward: B as a multiple of F; None where it follows from `trainable`, of this module and those before it.
      weights: the part of B that is W in a schedule that splits them, as a multiple of F; None is half of B.
    """

    name: str
    layers: int
    seconds: float
    trainable: bool = True
    factors: tuple[float, ...] = ()
    backward: float | None = None
    weights: float | None = None


Load = Mapping[str, float]
"""Layers that a rank runs for each microbatch, by module."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Stages on ranks and the layers that they run. loads: by stage name."""

    encoders: tuple[TimedModule, ...]
    llm: TimedModule
    graph: StageGraph
    loads: Mapping[str, Load] = field(hash=False)
    generators: tuple[TimedModule, ...] = ()

    @property
    def modules(self) -> tuple[TimedModule, ...]:
        """Encoders, the LLM, generators."""
        return (*self.encoders, self.llm, *self.generators)

    def costs(self, microbatches: int, *, move: float = 0.0, once: float = 0.0, split: bool = False) -> Costs:
        """Seconds of every op in a step of `microbatches` microbatches.

        move, once: seconds of each move over an edge, and of each prepare, reduce and update.
        split: for a schedule that splits the backward of trained stages into B and W.
        """
        nominal = Costs.nominal(self.graph, forward=0.0, move=move, once=once)
        factors = {module.name: self._factors(module, split=split) for module in self.modules}
        split_stages = [node.name for node in self.graph.stages if split and node.trainable]
        seconds = {**nominal.seconds, **{("W", stage, False): 0.0 for stage in split_stages}}
        overrides = {
            (kind, stage, False, m): self._seconds(factors, kind, load, m)
            for stage, load in self.loads.items()
            for kind in ("FBW" if stage in split_stages else "FB")
            for m in range(microbatches)
        }
        return Costs(seconds=seconds, overrides=overrides)

    def work(self, microbatches: int) -> dict[int, float]:
        """Seconds of F, B and W of `microbatches` microbatches on each rank, by rank: no step is shorter."""
        ranks = dict.fromkeys(self.graph.ranks, 0.0)
        for stage, load in self.loads.items():
            node = self.graph.stage(stage)
            for first in range(min(node.lanes, microbatches)):
                of_lane = range(first, microbatches, node.lanes)
                for rank in node.ranks_of(first):
                    ranks[rank] += sum(layers * self._layer_seconds(name, of_lane) for name, layers in load.items())
        return ranks

    def _layer_seconds(self, name: str, microbatches: range) -> float:
        """Seconds of F and backward of a layer of module `name` for these microbatches."""
        (module,) = (module for module in self.modules if module.name == name)
        times = sum(module.factors[m] for m in microbatches) if module.factors else len(microbatches)
        return module.seconds * times * (1 + _backward(module, self.encoders, self.llm))

    def _factors(self, module: TimedModule, *, split: bool) -> dict[str, float]:
        """F, B and W as multiples of F; B without W where they are split."""
        backward = _backward(module, self.encoders, self.llm)
        weights = backward / 2 if module.weights is None else module.weights
        if not (split and module.trainable):
            weights = 0.0
        return {"F": 1.0, "B": backward - weights, "W": weights}

    def _seconds(self, factors: Mapping[str, Mapping[str, float]], kind: str, load: Load, microbatch: int) -> float:
        modules = {module.name: module for module in self.modules}
        return sum(
            layers
            * modules[name].seconds
            * (modules[name].factors[microbatch] if modules[name].factors else 1.0)
            * factors[name][kind]
            for name, layers in load.items()
        )


def _backward(module: TimedModule, encoders: Sequence[TimedModule], llm: TimedModule) -> float:
    """B as a multiple of F."""
    if module.backward is not None:
        return module.backward
    before = () if module in encoders else encoders if module == llm else (*encoders, llm)
    return backward_factor(trained=module.trainable, trained_before=any(m.trainable for m in before))


@dataclass(frozen=True, kw_only=True)
class _Stage:
    name: str
    ranks: tuple[int, ...]
    load: Load
    lanes: int = 1


def apart(
    encoders: Sequence[TimedModule],
    llm: TimedModule,
    stages: Mapping[str, int],
    *,
    chunks: int = 1,
    generators: Sequence[TimedModule] = (),
) -> Placement:
    """Every module on ranks of its own, a stage on each rank. The result has the stage graph as `graph`.

    Ranks are numbered from 0 in the order of encoders, LLM and generators.

    Args:
      encoders: such as [TimedModule(name="vision", layers=24, seconds=1.0)]; [] for none.
      llm: such as TimedModule(name="llm", layers=32, seconds=2.0).
      stages: number of ranks of every module, by name: {"vision": 1, "llm": 2}.
      chunks: the LLM's stages on each of its ranks.
      generators: modules behind the LLM, as the encoders.
    """
    rank, placed, pairs = 0, [], []
    for module in (*encoders, llm, *generators):
        depth = stages[module.name]
        count = depth * (chunks if module == llm else 1)
        for index, layers in enumerate(_even(module.layers, count)):
            placed.append(
                _Stage(name=f"{module.name}.{index}", ranks=(rank + index % depth,), load={module.name: layers})
            )
        pairs += _chain(module.name, count)
        rank += depth
    pairs += [(f"{module.name}.{stages[module.name] - 1}", f"{llm.name}.0") for module in encoders]
    pairs += [(f"{llm.name}.{stages[llm.name] * chunks - 1}", f"{module.name}.0") for module in generators]
    return _placement(encoders, llm, placed, pairs, generators=generators)


def spanning(encoders: Sequence[TimedModule], llm: TimedModule, ranks: int) -> Placement:
    """Encoders of one stage on all `ranks` ranks, which run a microbatch together; an LLM stage on each rank.

    Args:
      encoders: such as [TimedModule(name="vision", layers=24, seconds=1.0)]; [] for none.
      llm: such as TimedModule(name="llm", layers=32, seconds=2.0).
      ranks: number of ranks.
    """
    everywhere = tuple(range(ranks))
    placed = [_Stage(name=f"{e.name}.0", ranks=everywhere, load={e.name: e.layers / ranks}) for e in encoders]
    placed += _llm(llm, range(ranks))
    pairs = [(f"{e.name}.0", f"{llm.name}.0") for e in encoders] + _chain(llm.name, ranks)
    return _placement(encoders, llm, placed, pairs)


def in_lanes(
    encoders: Sequence[TimedModule],
    llm: TimedModule,
    ranks: int,
    *,
    chunks: int = 1,
    generators: Sequence[TimedModule] = (),
) -> Placement:
    """An LLM of `chunks` stages on each of `ranks` ranks; encoders and generators of one stage, a lane on each rank.

    Args:
      encoders: such as [TimedModule(name="vision", layers=24, seconds=1.0)]; [] for none.
      llm: such as TimedModule(name="llm", layers=32, seconds=2.0).
      ranks: number of ranks.
      chunks: the LLM's stages on each rank.
      generators: modules behind the LLM, as the encoders.
    """
    everywhere = tuple(range(ranks))
    laned = {
        module.name: _Stage(name=f"{module.name}.0", ranks=everywhere, load={module.name: module.layers}, lanes=ranks)
        for module in (*encoders, *generators)
    }
    stages = ranks * chunks
    placed = [laned[e.name] for e in encoders]
    placed += _llm(llm, [k % ranks for k in range(stages)])
    placed += [laned[g.name] for g in generators]
    pairs = [(f"{e.name}.0", f"{llm.name}.0") for e in encoders] + _chain(llm.name, stages)
    pairs += [(f"{llm.name}.{stages - 1}", f"{g.name}.0") for g in generators]
    return _placement(encoders, llm, placed, pairs, generators=generators)


def in_pipeline(
    encoders: Sequence[TimedModule], llm: TimedModule, ranks: int, *, generators: Sequence[TimedModule] = ()
) -> Placement:
    """The layers of encoders, one encoder after another, of the LLM and of generators in one sequence, cut into `ranks`
    pieces as evenly as possible, by time.

    Args:
      encoders: such as [TimedModule(name="vision", layers=24, seconds=1.0)]; [] for none.
      llm: such as TimedModule(name="llm", layers=32, seconds=2.0).
      ranks: number of ranks, each with a piece, which may have layers of several modules.
      generators: modules behind the LLM, as the encoders.

    Raises:
      ValueError: there are fewer layers than ranks.
    """
    owners = [module for module in (*encoders, llm, *generators) for _ in range(module.layers)]
    pieces = cut([module.seconds * (1.0 + _backward(module, encoders, llm)) for module in owners], ranks)
    placed: list[_Stage] = []
    for rank, layers in enumerate(pieces):
        on_rank = [owners[layer] for layer in layers]
        for module in dict.fromkeys(on_rank):
            index = sum(stage.name.startswith(f"{module.name}.") for stage in placed)
            load = {module.name: float(on_rank.count(module))}
            placed.append(_Stage(name=f"{module.name}.{index}", ranks=(rank,), load=load))
    modules = (*encoders, llm, *generators)
    count = {p.name: sum(stage.name.startswith(f"{p.name}.") for stage in placed) for p in modules}
    pairs = [pair for name in count for pair in _chain(name, count[name])]
    pairs += [(f"{e.name}.{count[e.name] - 1}", f"{llm.name}.0") for e in encoders]
    pairs += [(f"{llm.name}.{count[llm.name] - 1}", f"{g.name}.0") for g in generators]
    return _placement(encoders, llm, placed, pairs, generators=generators)


def colocated_stages(encoders: Sequence[TimedModule], llm: TimedModule, ranks: int, stages: int) -> Placement:
    """All encoders in `stages` stages on the first ranks, each with a piece of every encoder; the LLM behind.

    The LLM has a stage on each of its `ranks - stages` ranks. The encoders are one module of the graph, whose name
    joins theirs: "vision+audio".

    Args:
      encoders: such as [TimedModule(name="vision", layers=24, seconds=1.0)].
      llm: such as TimedModule(name="llm", layers=32, seconds=2.0).
      ranks: number of all ranks.
      stages: stages, and so ranks, of the encoders; fewer than `ranks`.
    """
    name = "+".join(encoder.name for encoder in encoders)
    pieces = [_even(encoder.layers, stages) for encoder in encoders]
    placed = [
        _Stage(name=f"{name}.{k}", ranks=(k,), load={e.name: p[k] for e, p in zip(encoders, pieces, strict=True)})
        for k in range(stages)
    ]
    placed += _llm(llm, range(stages, ranks))
    pairs = [*_chain(name, stages), (f"{name}.{stages - 1}", f"{llm.name}.0"), *_chain(llm.name, ranks - stages)]
    return _placement(encoders, llm, placed, pairs)


def replicated(encoders: Sequence[TimedModule], llm: TimedModule, ranks: int) -> Placement:
    """All layers of all encoders on each of `ranks` ranks, for the LLM stage there: each rank runs their F and B.

    Args:
      encoders: such as [TimedModule(name="vision", layers=24, seconds=1.0)]; [] for none.
      llm: such as TimedModule(name="llm", layers=32, seconds=2.0).
      ranks: number of ranks, each with one LLM stage.
    """
    placed = [_Stage(name=f"{e.name}.{k}", ranks=(k,), load={e.name: e.layers}) for k in range(ranks) for e in encoders]
    placed += _llm(llm, range(ranks))
    pairs = [(f"{e.name}.{k}", f"{llm.name}.{k}") for k in range(ranks) for e in encoders]
    return _placement(encoders, llm, placed, pairs + _chain(llm.name, ranks))


# ---- parts of the above ----------------------------------------------------------------------------------------------


def _llm(llm: TimedModule, ranks: Sequence[int]) -> list[_Stage]:
    pieces = zip(ranks, _even(llm.layers, len(ranks)), strict=True)
    return [
        _Stage(name=f"{llm.name}.{k}", ranks=(rank,), load={llm.name: layers})
        for k, (rank, layers) in enumerate(pieces)
    ]


def _chain(module: str, stages: int) -> list[tuple[str, str]]:
    return list(pairwise(f"{module}.{k}" for k in range(stages)))


def _even(layers: int, stages: int) -> list[int]:
    """Number of layers of each stage; the last stages have one more where stages do not divide layers."""
    return [(layers + k) // stages for k in range(stages)]


def _placement(
    encoders: Sequence[TimedModule],
    llm: TimedModule,
    stages: Sequence[_Stage],
    pairs: Sequence[tuple[str, str]],
    *,
    generators: Sequence[TimedModule] = (),
) -> Placement:
    """The placement of `stages`, joined by `pairs`; a stage is trained if one of its modules is."""
    trained = {module.name for module in (*encoders, llm, *generators) if module.trainable}
    nodes = [
        StageNode(
            name=stage.name,
            module=stage.name.rpartition(".")[0],
            index=int(stage.name.rpartition(".")[2]),
            ranks=stage.ranks,
            trainable=not trained.isdisjoint(stage.load),
            loss=stage.name not in {source for source, _ in pairs},
            lanes=stage.lanes,
        )
        for stage in stages
    ]
    graph = connected(nodes, pairs, lambda *_: "async")
    loads = {stage.name: stage.load for stage in stages}
    return Placement(encoders=tuple(encoders), llm=llm, graph=graph, loads=loads, generators=tuple(generators))
