"""The pipeline of one dp rank as papers draw it: encoder, LLM and maybe a generator in a row, with a rank per stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from mmjax.data.reorder.pipeline import Pipeline, rows_of_ranks
from mmjax.data.reorder.search import Effort
from mmjax.schedule.graph import StageGraph, StageNode, connected
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs

ENCODER, LLM, GENERATOR = "encoder", "llm", "generator"


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Stages in a row.

    Attributes:
      encoder, llm, generator: how many pipeline stages each has; a generator is optional.
      chunks: stages on each rank of every module with more than one stage, for the interleaved schedule.
      schedule: one of `SCHEDULES` that a chain can have.
      forward, backward: seconds of the LLM for a microbatch of a rank, by pipeline stage.
    """

    encoder: int = 1
    llm: int
    generator: int = 0
    chunks: int = 1
    schedule: str = "1f1b"
    forward: float = 1.0
    backward: float = 2.0

    def pipeline(
        self, *, samples: int, microbatches: int, dp: int, together: bool = False, effort: Effort | None = None
    ) -> Pipeline:
        """The pipeline of these stages, for steps of so many samples.

        Raises:
          ScheduleError: the schedule does not fit.
        """
        stages = self._stages()
        graph = _graph(stages)
        own = 1.0 / self._chunks(LLM)
        seconds = {
            (kind, node.name, False): cost * own
            for node in graph.stages
            for kind, cost in (("F", self.forward), ("B", self.backward))
        }
        costs = Costs(seconds=seconds)
        schedule = make_schedule(self.schedule, graph, microbatches, costs)
        shares = {
            module: {name: (1.0 / len(names), 1.0 / len(names)) for name in names}
            for module in (ENCODER, GENERATOR)
            if (names := [node.name for node in graph.stages if node.module == module])
        }
        rows = rows_of_ranks(samples // microbatches, dp)
        return Pipeline(schedule, costs, shares, rows, together=together, effort=effort)

    def _chunks(self, module: str) -> int:
        return self.chunks if getattr(self, module) > 1 else 1

    def _stages(self) -> dict[str, int]:
        """The rank of each stage."""
        ranks, first = {}, 0
        for module in (ENCODER, LLM, GENERATOR):
            depth = getattr(self, module)
            ranks |= {f"{module}.{index}": first + index % depth for index in range(depth * self._chunks(module))}
            first += depth
        return ranks


def _graph(ranks: Mapping[str, int]) -> StageGraph:
    nodes = [
        StageNode(name=name, module=name.split(".")[0], index=int(name.split(".")[1]), ranks=(rank,))
        for name, rank in ranks.items()
    ]
    return connected(nodes, list(pairwise(ranks)), lambda *_: "async")
