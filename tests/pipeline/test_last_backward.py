"""A step's last backward that reduces gradients layer by layer: equal results, and which stages have one."""

from __future__ import annotations

from dataclasses import replace

import parity
import pytest
from parity import Case
from test_parity import COLOCATED, assert_equal_to_reference

from mmjax.mesh.layout import Layout
from mmjax.mesh.world import World
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.link_trials import link_trials
from mmjax.pipeline.place import PlacedModel, Settings

APART = Case(
    vision=Layout(dp=4, rank_offset=4), llm=Layout(tp=2, dp=2), unroll=True, overlap=True, remat="dots", clip_norm=0.7
)
PIPELINE = replace(APART, llm=Layout(dp=2, pp=2))
INSTANCES = replace(
    APART,
    vision=Layout(dp=4, optimizer_instances=2, rank_offset=4),
    llm=Layout(tp=2, dp=2, optimizer_instances=2),
    weight_decay=0.1,
)
CASES: dict[str, tuple[Case, dict[str, str]]] = {
    "an encoder apart": (APART, {"vision.0": "B", "llm.0": "B"}),
    "a microbatch, no media in it": (
        replace(APART, microbatches=1, samples=7, text_only=7),
        {"vision.0": "B", "llm.0": "B"},
    ),
    "no media in the last microbatch": (replace(APART, text_only=7), {"vision.0": "B", "llm.0": "B"}),
    "optimizer instances": (INSTANCES, {"vision.0": "B", "llm.0": "B"}),
    "the first stage alone": (PIPELINE, {"vision.0": "B", "llm.0": "B"}),
    "interleaved": (
        replace(
            PIPELINE,
            model="chunked",
            llm=Layout(dp=2, pp=2, chunks=2),
            vision=Layout(dp=4, rank_offset=4),
            microbatches=4,
            samples=25,
        ),
        {"vision.0": "B", "llm.0": "B"},
    ),
    "zb-h1": (
        replace(PIPELINE, schedule="zb-h1", microbatches=3, samples=17),
        {"vision.0": "W", "llm.0": "W", "llm.1": "W"},
    ),
    "tied on two stages": (replace(PIPELINE, model="tied"), {"vision.0": "B"}),
    "tied on one stage": (replace(APART, model="tied", remat="full"), {"vision.0": "B", "llm.0": "B"}),
    "lanes": (replace(APART, vision=Layout(dp=2, lanes=2, rank_offset=4), schedule="gpipe"), {"llm.0": "B"}),
    "whole sums are kept where they are shards": (
        replace(APART, llm=Layout(tp=2, dp=2, shard="gradients")),
        {"vision.0": "B"},
    ),
    "cp": (replace(APART, llm=Layout(cp=2, dp=2)), {"vision.0": "B", "llm.0": "B"}),
    "one rank": (replace(APART, llm=Layout(tp=2, sp=False)), {"vision.0": "B"}),
    "frozen and adapted": (
        replace(APART, model="adapted", frozen=("vision", "llm")),
        {"vision.0": "B", "llm.0": "B"},
    ),
    "stacked layers": (replace(APART, unroll=False), {}),
    "one program": (replace(COLOCATED, unroll=True, overlap=True, microbatches=3, samples=17, clip_norm=0.7), {}),
    "one program, a microbatch": (replace(COLOCATED, unroll=True, overlap=True, microbatches=1, samples=7), {}),
    "one program, instances": (
        replace(
            COLOCATED,
            unroll=True,
            overlap=True,
            vision=Layout(dp=8, optimizer_instances=8),
            llm=Layout(tp=2, dp=4, optimizer_instances=2),
        ),
        {},
    ),
}
SHORT = ("optimizer instances",)


@pytest.mark.parametrize(
    ("case", "kinds"),
    [pytest.param(*value, id=name, marks=() if name in SHORT else pytest.mark.long) for name, value in CASES.items()],
)
def test_training_equals_the_dense_reference(case: Case, kinds: dict[str, str]) -> None:
    executor = parity._parts(case).executor
    if isinstance(executor, Executor):
        assert {stage: op.kind for stage, op in executor.walker.last_ops.items()} == kinds
        assert executor.reduce_programs.keys().isdisjoint(kinds)
        tried = {trial.name.removesuffix(" reduce") for trial in link_trials(executor) if trial.kind == "reduce"}
        assert tried.isdisjoint(kinds), "before step 1 these ranks try a sum in place of a reduce"
    assert_equal_to_reference(parity.run(case), parity.expected(case), case)


def test_a_unet_has_a_reduce_of_its_own() -> None:
    """Its kernels' sums would be copied in the last backward; the LLM beside it has none."""
    case = Case(model="drawing, unet")
    model = replace(parity.MODELS[case.model], unroll=True)
    layouts = {name: Layout(dp=2, rank_offset=2 * place) for place, name in enumerate(model.nodes)}
    settings = Settings(optimizers=parity.optimizers(case), total_steps=1, overlap_grad_reduce=True)
    placed = PlacedModel(model, layouts, World.planned(2 * len(layouts)), settings)
    reduces = {name: stage.state.reduces_in_backward for name, stage in placed.stages.items()}
    assert reduces == {"vision.0": True, "llm.0": True, "painter.0": False}
