"""The pipeline of one dp rank as in the papers: encoder, LLM and maybe a generator in a row, with a rank per stage.

In a nested schedule, encoder and generator are one stage each, on the ranks of the LLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mmjax.data.reorder.pipeline import Pipeline, rows_of_ranks
from mmjax.data.reorder.search import Effort
from mmjax.schedule.graph import StageGraph, StageNode, connected
from mmjax.schedule.schedules import NESTING, ONE_F_ONE_B, make_schedule
from mmjax.schedule.simulate import Costs

ENCODER, LLM, GENERATOR = "encoder", "llm", "generator"


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Stages in a row.

    Attributes:
      encoder, llm, generator: number of pipeline stages of each; a generator is optional. In a nested schedule encoder
        and generator have one stage, with a lane on each rank of the LLM.
      chunks: stages on each rank of every module with more than one stage, for the interleaved schedule.
      schedule: one of `SCHEDULES` that a chain can have.
      inner: the LLM's schedule inside a nested schedule.
      forward, backward: seconds of the LLM for a microbatch of a rank, by pipeline stage.
    """

    encoder: int = 1
    llm: int
    generator: int = 0
    chunks: int = 1
    schedule: str = ONE_F_ONE_B
    inner: str = ONE_F_ONE_B
    forward: float = 1.0
    backward: float = 2.0

    def pipeline(
        self, *, samples: int, microbatches: int, dp: int, together: bool = False, effort: Effort | None = None
    ) -> Pipeline:
        """The pipeline of these stages, for steps of `samples` samples.

        The modules whose samples differ are "encoder", and "generator" if there is one: the keys of `Seconds`.

        Args:
          samples: samples of a step, a multiple of `microbatches`.
          microbatches: microbatches of a step.
          dp: number of dp ranks, among which the samples of a microbatch are shared.
          together, effort: see `Pipeline`.

        Raises:
          ScheduleError: the schedule does not fit.
        """
        graph = _graph(self._stages())
        scale = 1.0 / self._chunks(LLM)
        seconds = {
            (kind, node.name, False): cost * scale
            for node in graph.stages
            for kind, cost in (("F", self.forward), ("B", self.backward))
        }
        costs = Costs(seconds=seconds)
        schedule = make_schedule(self.schedule, graph, microbatches, costs, inner=self.inner)
        shares = {
            module: {name: (1.0 / len(names), 1.0 / len(names)) for name in names}
            for module in (ENCODER, GENERATOR)
            if (names := [node.name for node in graph.stages if node.module == module])
        }
        rows = rows_of_ranks(samples // microbatches, dp)
        return Pipeline(schedule, costs, shares, rows, together=together, effort=effort)

    def _chunks(self, module: str) -> int:
        return self.chunks if getattr(self, module) > 1 else 1

    def _stages(self) -> list[StageNode]:
        """The stages in a row; nested modules have the ranks of the LLM."""
        nodes, first, nested = [], 0, self.schedule in NESTING
        for module in (ENCODER, LLM, GENERATOR):
            depth, spread = getattr(self, module), nested and module != LLM
            for index in range(depth * self._chunks(module)):
                ranks = tuple(range(self.llm)) if spread else (first + index % depth,)
                lanes = len(ranks)
                nodes.append(StageNode(name=f"{module}.{index}", module=module, index=index, ranks=ranks, lanes=lanes))
            first += 0 if spread else depth
        return nodes


def _graph(nodes: Sequence[StageNode]) -> StageGraph:
    return connected(nodes, list(pairwise(node.name for node in nodes)), lambda *_: "async")
