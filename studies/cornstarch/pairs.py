"""Modality parallelism against colocated and replicated encoders, simulated: Tables 2, 7 and 8 of Cornstarch.

Each way is a placement with 1F1B over 24 microbatches of one sample (§6.1), and a stage has equally many devices in
all of them, so throughput per GPU is that of a step divided by the number of stages. Moves and what happens once a step
are left out: a sample's activations are 25 MB at most, 1 ms of 200 Gb/s, and stages take 50 to 1,000 ms.

Layers are cut evenly, so that the LLM's last stage has its head too, or by seconds of forward and backward with the
head among them (§4.2). The paper does not say which; both are predicted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from mmjax.models.config import LLM
from mmjax.schedule.graph import StageGraph, connected
from mmjax.schedule.partition import cut
from mmjax.schedule.placements import Placement, TimedModule, apart, colocated_stages, replicated
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import CostKey, Costs, simulate
from studies.cornstarch.frozen import MICROBATCHES
from studies.cornstarch.modules import Timed, Times, by_datasheet, by_tables
from studies.cornstarch.tables import AUDIO, PAIRS, VISION, Pair

SOURCES: Mapping[str, Times] = {"datasheet": by_datasheet, "stage times": by_tables}
CUTS = ("even layers", "cut by time")
REPLICATED = 6
"""Stages of the LLM where encoders are replicated, always (appendix B.1)."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A pair, simulated.

    Attributes:
      pair: the model and its stages.
      source: a key of `SOURCES`.
      cut: one of `CUTS`.
    """

    pair: Pair
    source: str
    cut: str

    @cached_property
    def modules(self) -> dict[str, Timed]:
        """The modules by name, encoders first."""
        sizes = {VISION: self.pair.sizes[0], AUDIO: self.pair.sizes[1], LLM: self.pair.llm}
        timed = {name: SOURCES[self.source](name, size) for name, size in sizes.items()}
        llm, cp = timed[LLM], self.pair.cp
        return timed | {LLM: replace(llm, layer=llm.layer / cp, head=llm.head / cp)}

    @cached_property
    def ratio(self) -> float:
        """Throughput per GPU, of modality parallelism over colocated encoders."""
        return self._seconds(self._colocated) / self._seconds(self._apart)

    @cached_property
    def over_replicated(self) -> float:
        """Throughput per GPU, of modality parallelism over replicated encoders."""
        return self._seconds(replicated(*self._timed, REPLICATED)) / self._seconds(self._apart)

    @property
    def error(self) -> float:
        """By how much `ratio` is above the published one, relative."""
        return self.ratio / self.pair.published - 1

    @property
    def agrees(self) -> bool:
        """Whether the same way is faster as is published to be."""
        return (self.ratio > 1) == (self.pair.published > 1)

    @property
    def coupled(self) -> tuple[int, ...]:
        """Stages of the encoders as Algorithm 1 has them: the fewest within the time of an average LLM stage."""
        llm, *_ = self.pair.modality
        seconds = [
            (module.layers * module.layer + module.head) * (1 + module.backward) for module in self.modules.values()
        ]
        return tuple(math.ceil(encoder / (seconds[-1] / llm)) for encoder in seconds[:-1])

    @property
    def _timed(self) -> tuple[tuple[TimedModule, ...], TimedModule]:
        """Encoders and LLM in layers; their seconds are in `modules`."""
        *encoders, llm = (
            TimedModule(name=module.name, layers=module.layers, seconds=1.0) for module in self.modules.values()
        )
        return tuple(encoders), llm

    @cached_property
    def _colocated(self) -> Placement:
        return colocated_stages(*self._timed, sum(self.pair.colocated), self.pair.colocated[1])

    @cached_property
    def _apart(self) -> Placement:
        llm, vision, audio = self.pair.modality
        return apart(*self._timed, {LLM: llm, VISION: vision, AUDIO: audio})

    def _seconds(self, placement: Placement) -> float:
        """Seconds of a step, times the number of stages' devices."""
        graph = with_projectors(placement.graph)
        costs = Costs(seconds=self._costs(placement))
        return simulate(make_schedule("1f1b", graph, MICROBATCHES, costs), costs).makespan * len(graph.ranks)

    def _costs(self, placement: Placement) -> dict[CostKey, float]:
        seconds: dict[CostKey, float] = {}
        for stage, load in self._loads(placement).items():
            forward = {name: layers * self.modules[name].layer for name, layers in load.items()}
            seconds["F", stage, False] = sum(forward.values())
            seconds["B", stage, False] = sum(took * self.modules[name].backward for name, took in forward.items())
        return seconds

    def _loads(self, placement: Placement) -> dict[str, Mapping[str, float]]:
        """Layers by stage and module; the LLM's head is so many layers behind the last."""
        llm = self.modules[LLM]
        head, stages = llm.head / llm.layer, [stage for stage, load in placement.loads.items() if LLM in load]
        row = [1.0] * (llm.layers - 1) + [1.0 + head]
        loads = dict(placement.loads)
        if self.cut == "even layers":
            loads[stages[-1]] = {LLM: loads[stages[-1]][LLM] + head}
        else:
            pieces = cut(row, len(stages))
            loads |= {stage: {LLM: sum(row[at] for at in piece)} for stage, piece in zip(stages, pieces, strict=True)}
        return loads


def with_projectors(graph: StageGraph) -> StageGraph:
    """The graph of frozen modules with a trained projector behind each encoder.

    So encoders have no backward before their last stage, whose takes no time, and the LLM passes gradients on.
    """
    ends = {edge.src for edge in graph.edges if not _in_llm(graph, edge.src) and _in_llm(graph, edge.dst)}
    nodes = [replace(node, trainable=node.name in ends) for node in graph.stages]
    pairs = [(edge.src, edge.dst) for edge in graph.edges]
    return connected(nodes, pairs, lambda *_: "async")


def _in_llm(graph: StageGraph, stage: str) -> bool:
    return graph.stage(stage).module == LLM


@cache
def predictions(source: str, cut: str) -> tuple[Prediction, ...]:
    """Every pair of Tables 2, 7 and 8, with times from `source`."""
    return tuple(Prediction(pair=pair, source=source, cut=cut) for pair in PAIRS)
