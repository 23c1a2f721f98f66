"""Drawn graphs of up to three modules in drawn layouts, under every schedule: values are those of one device.

The model is ``graph_toy``'s. What is drawn: encoders of any depth that feed the LLM, at one or several of its stages,
and each other; layouts of all sorts (see ``drawing``); frozen modules, a tie, transports, offloading, microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import drawing
import graph_toy
import numpy as np
import parity
import pytest
import toy
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mmjax import reference
from mmjax.configurable import ConfigError
from mmjax.mesh.layout import Layout
from mmjax.pipeline.config import OffloadConfig
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.place import PlacedModel
from mmjax.pipeline.single.executor import SingleExecutor
from mmjax.pipeline.single.lane_layout import lane_layout
from mmjax.pipeline.straight import StraightExecutor
from mmjax.schedule.graph import EdgeNode, StageGraph, StageNode
from mmjax.schedule.schedules import OFFLOADING, SCHEDULES, WINDOWED
from mmjax.schedule.validate import validate

STEPS = 2
STAGES = {"llm": 4, "vision": 2, "audio": 2}
DP, TP = (1, 2, 3, 4, 6), (1, 2)  # they divide rows and hidden units


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A model in its layouts.

    frozen: modules. joins: by encoder, the LLM stages that it feeds. chained: the vision encoder feeds the audio
    encoder too. tied: the LLM's ends share a weight, if there are two. offloaded: encoders whose parameters leave the
    devices.
    """

    layouts: Mapping[str, Layout]
    frozen: frozenset[str]
    joins: Mapping[str, tuple[int, ...]]
    chained: bool
    tied: bool
    offloaded: frozenset[str]
    microbatches: int
    window: int
    transport: str
    route: str
    clip_norm: float

    @property
    def graph(self) -> StageGraph:
        """The stages that a placed model will have."""
        names = [(module, k) for module in ("vision", "audio", "llm") for k in range(self.stages(module))]
        pairs = [(f"{m}.{k}", f"{m}.{j}") for (m, k), (n, j) in pairwise(names) if m == n]
        last = {encoder: f"{encoder}.{self.stages(encoder) - 1}" for encoder in self.joins}
        pairs += [(last[encoder], f"llm.{k}") for encoder, joins in self.joins.items() for k in joins]
        pairs += [(last["vision"], "audio.0")] if self.chained else []
        wanted: dict[str, bool] = {}
        for module, k in names:  # sources come before users
            name = f"{module}.{k}"
            wanted[name] = module not in self.frozen or any(wanted[src] for src, dst in pairs if dst == name)
        nodes = [
            StageNode(
                name=f"{module}.{k}",
                module=module,
                index=k,
                ranks=self.layouts[module].stage_ranks(k),
                backward=wanted[f"{module}.{k}"],
                trainable=module not in self.frozen,
                offload=module in self.offloaded,
            )
            for module, k in names
        ]
        edges = [
            EdgeNode(name=f"{src}->{dst}", src=src, dst=dst, kind="async", gradient=wanted[src]) for src, dst in pairs
        ]
        end = f"llm.{self.stages('llm') - 1}"
        tie = EdgeNode(name="ends", src="llm.0", dst=end, kind="async", gradient="llm" not in self.frozen)
        return StageGraph(stages=tuple(nodes), edges=tuple(edges), ties=(tie,) if self.tied and end != "llm.0" else ())

    def stages(self, module: str) -> int:
        """How many; none of a module that is not there."""
        return self.layouts[module].stages if module in self.layouts else 0

    @property
    def lowerings(self) -> Iterable[type[toy.Run]]:
        """Executors of one program that can run it."""
        if self.offloaded:
            return
        if len({layout.ranks for layout in self.layouts.values()}) == 1 and not any(
            layout.pp > 1 for layout in self.layouts.values()
        ):
            yield StraightExecutor
        try:
            lane_layout(self.layouts)
        except ConfigError:
            return
        yield SingleExecutor


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """A model of two or three modules."""
    encoders = draw(st.sampled_from((("vision",), ("vision", "audio"), ("vision", "audio"))))
    layouts = draw(drawing.layouts({name: STAGES[name] for name in ("llm", *encoders)}, dp=DP, tp=TP))
    depth = layouts["llm"].stages
    joins = {e: tuple(sorted(draw(st.sets(st.integers(0, depth - 1), min_size=1, max_size=2)))) for e in encoders}
    frozen = draw(st.sets(st.sampled_from(("llm", *encoders)), max_size=len(encoders)))
    chained = len(encoders) == 2 and draw(st.booleans())
    llm, fed = set(layouts["llm"].ranks), {"audio"} if chained else set()  # which has no phases of its own then
    away = [e for e in encoders if llm & set(layouts[e].ranks) and e not in fed]
    return Drawn(
        layouts=layouts,
        frozen=frozenset(frozen),
        joins=joins,
        chained=chained,
        tied=draw(st.booleans()),
        offloaded=frozenset(draw(st.sampled_from(((), (), away)))),
        microbatches=draw(st.integers(1, 5)),
        window=draw(st.integers(0, 3)),
        transport=draw(st.sampled_from(("auto", "collective"))),
        route=draw(st.sampled_from(("leader", "sliced"))),
        clip_norm=draw(st.sampled_from((0.0, 0.4))),
    )


Expected = list[tuple[float, dict[str, float], dict[str, toy.Leaves]]]


def expected(case: Drawn, start: toy.Leaves) -> Expected:
    """Loss, norms by module, and parameters with both moments after each step, on one device."""
    graph, configs = case.graph, graph_toy.optimizers(case.graph)
    state, result = reference.TrainState(leaves=dict(start)), []
    rates = {module: config.learning_rate for module, config in configs.items()}
    for _ in range(STEPS):
        parts = graph_toy.batch(graph, case.microbatches)
        made = [graph_toy.dense_gradients(graph, state.leaves, part) for _, part in parts]
        (count,) = graph_toy.denominators(graph, parts).values()
        trained = [name for name in start if parity.module_of(name) not in case.frozen]
        gradients = {name: np.sum([own[name] for _, own in made], 0) / np.float32(count) for name in trained}
        state = reference.adamw_step(state, gradients, configs, rates, clip_norm=case.clip_norm)
        norms = {module: reference.global_norm(gradients, module) for module in configs}
        leaves = {"params": state.leaves, "adam_m": state.first, "adam_v": state.second}
        result.append((sum(loss for loss, _ in made) / count, norms, leaves))
    return result


def assert_equal(executor: toy.Run, model: PlacedModel, case: Drawn, wanted: Expected) -> None:
    """Every step's values are those of one device; ``executor`` has its initial parameters."""
    for step, (loss, norms, leaves) in enumerate(wanted):
        parts = graph_toy.batch(case.graph, case.microbatches)
        got, found = executor.step(parts, graph_toy.denominators(case.graph, parts)).fetch()
        assert got == pytest.approx(loss, rel=1e-5), step
        assert found == pytest.approx(norms, rel=1e-5, abs=1e-30), step
        after = toy.logical(model, executor.states)
        for kind, want in leaves.items():
            parity.assert_close(parity.of_kind(after, kind), want, 1e-5, f"step {step}: {kind}")


def run(case: Drawn, *, lowered: bool) -> None:
    """Under every schedule that fits; with ``lowered`` also split, and in every lowering that there is."""
    graph, away = case.graph, {name: OffloadConfig(parameters=True, optimizer=True) for name in case.offloaded}
    model = graph_toy.placed(
        graph,
        layouts=case.layouts,
        offloads=away,
        transport=case.transport,
        route=case.route,
        clip_norm=case.clip_norm,
    )
    names = [name for name in (OFFLOADING if away else SCHEDULES) if name != "zb-h1"]
    base = graph_toy.executor(model, model.graph, case.microbatches, names[0])
    wanted = expected(case, parity.of_kind(toy.logical(model, base.states), "params"))
    for name in names:
        schedule = graph_toy.schedule_of(model.graph, case.microbatches, name, case.window if name in WINDOWED else 0)
        validate(schedule)
        executor = parity.rescheduled(base, schedule)
        executor.initialise(toy.SEED)
        assert_equal(executor, model, case, wanted)
    if not lowered:
        return
    others = [(Executor, "zb-h1")] if not away else []
    others += [(kind, "1f1b") for kind in case.lowerings]
    for kind, name in others:
        schedule = graph_toy.schedule_of(model.graph, case.microbatches, name)
        made: Any = kind(model, schedule, dict(graph_toy.batch(graph, 1)))
        made.initialise(toy.SEED)
        assert_equal(made, model, case, wanted)


# Of a failing example the first is as good as a smaller one, which takes minutes to find.
DRAWING = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.long
@settings(DRAWING, max_examples=4)
@given(drawn())
def test_drawn_models_train_as_one_device_does(case: Drawn) -> None:
    run(case, lowered=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(DRAWING, max_examples=40)
@given(drawn())
def test_many_drawn_models_in_every_lowering(case: Drawn) -> None:
    run(case, lowered=True)
