"""The configurations with experts for H100s: published sizes, planned layouts, and dry runs that fit.

Layouts, microbatches and schedules are those of `mmjax.plan` on as many H100s.
"""

from __future__ import annotations

import pytest
from trial_runs import REPOSITORY

from mmjax.assembly.model import build_model
from mmjax.config import load_config
from mmjax.data.loader import tokenizer_of
from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM, projector_name
from mmjax.models.flops import parameter_count
from mmjax.planner.accelerators import H100
from mmjax.recipe import Recipe
from mmjax.recipe.advice import advise
from mmjax.train.dry_run import dry_run

LAYOUTS = {
    "qwen3_moe_vlm": {"vision": Layout(dp=4, tp=2), "llm": Layout(dp=4, pp=2, tp=2, ep=4)},
}
RUNS = {
    "qwen3_moe_vlm": (16, "zb-h1", 0.05),
}
"""Microbatches, schedule, and the most of the devices' time that a step has idle."""
PARAMETERS = {
    "qwen3_moe_vlm": {"vision": 0.41e9, LLM: 30.53e9},
    "bigmac_understanding": {"vision": 1.33e9, LLM: 30.53e9},
    "bigmac_generation": {"vision": 1.33e9, LLM: 30.53e9, "painter": 20.2e9},
}
SHORT = ("llm/Decoder.layers=4", "vision/ViT.layers=2")


def load(name: str, *bindings: str) -> Recipe:
    return load_config([REPOSITORY / "configs" / f"{name}.gin"], bindings)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_the_planned_ones(name: str) -> None:
    recipe = load(name)
    assert recipe.model.layouts == LAYOUTS[name] and advise(recipe) == ()
    assert (recipe.train.microbatches, recipe.train.schedule) == RUNS[name][:2]


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_the_published_sizes(name: str) -> None:
    recipe = load(name)
    counted = parameter_count(build_model(recipe, tokenizer_of(recipe.data.settings, recipe.model.media)))
    for module, size in PARAMETERS[name].items():
        assert counted[module] == pytest.approx(size, rel=0.01), module
    assert counted[projector_name("vision")] > 2048**2, "two layers"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dry_run_of_few_layers_has_every_program(name: str) -> None:
    layers = SHORT + (("painter/DiT.layers=2",) if "painter" in LAYOUTS[name] else ())
    recipe = load(name, *layers)
    forecast = dry_run(recipe)
    stages = {f"{module}.{stage}" for module, layout in LAYOUTS[name].items() for stage in range(layout.stages)}
    assert set(forecast.memory) == stages and forecast.programs["F"] == len(stages)
    assert forecast.parts.planned.bubble < 0.5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dry_run_fits_on_h100s(name: str) -> None:
    forecast = dry_run(load(name))
    assert forecast.peak and forecast.peak.bytes < forecast.most.total < H100.usable
    assert forecast.parts.planned.bubble < RUNS[name][2]
