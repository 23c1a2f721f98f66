"""The gain of frozen-aware stages: predicted from the stage times that Cornstarch publishes, beside its measurements.

Jang et al., "Cornstarch", Tables 3, 10 and 11: an encoder and an LLM, both frozen, with a trained projector between
them, once cut by forward and backward and once by forward alone; 24 microbatches of one sample (§6.1). A prediction is
a simulated 1F1B step of that many stages of these times. Throughput is per GPU, so the steps' ratio is multiplied by
that of the stages, whose tp is the same.

Numbers of stages are given twice, and they differ. §6.4 says that they are the same in both cases. Table 9 says
otherwise for most models, and its stages do not hold the same layers: of VLM-S with the medium LLM the aware cut's LLM
takes 6 · 27.46 ms forward, the unaware one's 3 · 28.13 ms. So both are predicted: with the aware numbers in both cases,
and with those of Table 9.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mmjax.bench.rows import Row
from mmjax.schedule.placements import TimedModule, apart
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs, simulate

MICROBATCHES = 24
MS = 1e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to cut one model, as published.

    Attributes:
      stages: numbers of stages of (LLM, encoder), from Table 9.
      forward, backward: milliseconds of a stage of (encoder, LLM).
      throughput: measured inputs per second and GPU.
    """

    stages: tuple[int, int]
    forward: tuple[float, float]
    backward: tuple[float, float]
    throughput: float

    def step(self, stages: tuple[int, int]) -> float:
        """Seconds of a simulated step with so many stages of (LLM, encoder)."""
        count = {"encoder": stages[1], "llm": stages[0]}
        encoder, llm = (TimedModule(name=name, layers=depth, seconds=1.0) for name, depth in count.items())
        graph = apart((encoder,), llm, count).graph
        seconds = {
            (kind, stage.name, False): times[stage.module == "llm"] * MS
            for stage in graph.stages
            for kind, times in (("F", self.forward), ("B", self.backward))
        }
        costs = Costs(seconds=seconds)
        return simulate(make_schedule("1f1b", graph, MICROBATCHES, costs), costs).makespan


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, cut with and without regard to frozen modules."""

    name: str
    aware: Case
    unaware: Case

    @property
    def published(self) -> float:
        """Measured throughput of the aware cut over the other cut's."""
        return self.aware.throughput / self.unaware.throughput

    @cached_property
    def same_stages(self) -> float:
        """The same ratio, predicted with as many stages in both."""
        return self.unaware.step(self.aware.stages) / self.aware.step(self.aware.stages)

    @cached_property
    def table_9(self) -> float:
        """The same ratio, predicted with the stages of Table 9, per GPU."""
        ratio = self.unaware.step(self.unaware.stages) / self.aware.step(self.aware.stages)
        return ratio * sum(self.unaware.stages) / sum(self.aware.stages)


def _model(name: str, aware: tuple[float, ...], unaware: tuple[float, ...]) -> Model:
    cases = []
    for llm, encoder, f_encoder, f_llm, b_encoder, b_llm, throughput in (aware, unaware):
        stages, forward, backward = (int(llm), int(encoder)), (f_encoder, f_llm), (b_encoder, b_llm)
        cases.append(Case(stages=stages, forward=forward, backward=backward, throughput=throughput))
    return Model(name=name, aware=cases[0], unaware=cases[1])


# Stages of the LLM and of the encoder; forward of an encoder's and an LLM's stage; backward of them; throughput.
MODELS = (
    # Table 3: the medium LLM.
    _model("LLM-M VLM-S", (6, 1, 49.06, 27.46, 0.12, 43.03, 6.47), (3, 1, 26.49, 28.13, 0.16, 51.32, 5.30)),
    _model("LLM-M VLM-M", (5, 2, 75.04, 28.15, 0.27, 51.30, 5.15), (4, 3, 45.90, 45.26, 0.16, 84.89, 3.73)),
    _model("LLM-M VLM-L", (5, 4, 101.02, 34.67, 0.20, 63.77, 3.17), (3, 5, 70.42, 67.03, 0.15, 127.34, 2.06)),
    _model("LLM-M ALM-S", (6, 1, 57.25, 81.73, 0.38, 157.12, 1.94), (5, 1, 57.79, 81.94, 0.38, 157.14, 1.94)),
    _model("LLM-M ALM-M", (6, 1, 176.80, 82.19, 0.64, 157.51, 1.96), (4, 4, 93.39, 98.25, 0.34, 189.11, 1.70)),
    _model("LLM-M ALM-L", (4, 2, 308.16, 100.20, 0.73, 188.50, 1.98), (5, 5, 145.97, 121.21, 0.33, 235.23, 1.69)),
    # Table 10: the small LLM.
    _model("LLM-S VLM-S", (4, 2, 25.57, 15.51, 0.05, 15.09, 12.64), (4, 4, 32.80, 18.80, 0.06, 20.09, 13.79)),
    _model("LLM-S VLM-M", (2, 4, 75.67, 17.31, 0.15, 20.08, 7.85), (1, 4, 45.25, 17.61, 0.09, 20.33, 7.63)),
    _model("LLM-S VLM-L", (1, 4, 98.27, 26.22, 0.11, 30.50, 4.81), (1, 5, 122.50, 47.39, 0.13, 60.31, 6.05)),
    _model("LLM-S ALM-S", (5, 1, 57.52, 42.73, 0.20, 70.21, 7.13), (3, 2, 30.14, 42.30, 0.10, 70.22, 5.34)),
    _model("LLM-S ALM-M", (4, 2, 92.19, 32.54, 0.17, 52.63, 4.85), (2, 3, 59.18, 72.90, 0.12, 105.22, 4.09)),
    _model("LLM-S ALM-L", (4, 3, 97.77, 33.27, 0.12, 52.88, 4.29), (2, 4, 76.81, 62.01, 0.09, 105.22, 3.59)),
    # Table 11: the large LLM.
    _model("LLM-L VLM-S", (5, 1, 52.54, 88.58, 0.10, 171.72, 2.39), (3, 5, 85.83, 106.26, 0.10, 171.38, 2.10)),
    _model("LLM-L VLM-M", (5, 1, 249.38, 88.95, 0.49, 171.68, 2.29), (5, 1, 132.16, 113.64, 0.26, 213.58, 1.85)),
    _model("LLM-L VLM-L", (4, 1, 481.44, 106.53, 0.74, 215.06, 1.76), (4, 2, 246.22, 146.62, 0.38, 287.14, 1.81)),
    _model("LLM-L ALM-S", (5, 1, 76.84, 286.16, 0.24, 596.40, 0.72), (5, 1, 78.80, 285.07, 0.24, 594.31, 0.73)),
    _model("LLM-L ALM-M", (5, 1, 197.21, 287.37, 0.45, 597.47, 0.72), (3, 1, 101.97, 359.27, 0.24, 743.91, 0.62)),
    _model("LLM-L ALM-L", (5, 1, 319.31, 286.31, 0.50, 596.50, 0.71), (4, 2, 177.29, 356.06, 0.27, 742.80, 0.61)),
)


def rows() -> Iterator[Row]:
    """Published and predicted ratios of throughput."""
    for model in MODELS:
        named = {
            "published": model.published,
            "predicted, same stages": model.same_stages,
            "predicted, stages of Table 9": model.table_9,
        }
        for quantity, value in named.items():
            case = f"frozen-aware / unaware, {model.name}: {quantity}"
            yield Row(bench="cornstarch", case=case, value=value, unit="ratio")


def tables() -> dict[str, str]:
    """The table of ``docs/planner.md`` in Markdown, by name."""
    lines = ["| | published | same stages | error | stages of Table 9 | error |", "|---|---|---|---|---|---|"]
    for model in MODELS:
        cells = [f"{model.published:.2f}"]
        for predicted in (model.same_stages, model.table_9):
            cells += [f"{predicted:.2f}", f"{predicted / model.published - 1:+.0%}"]
        lines.append(f"| {model.name} | {' | '.join(cells)} |")
    return {"frozen-aware stages": "\n".join(lines)}
