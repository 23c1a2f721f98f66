"""The configurations of papers' models and of those with experts: published sizes, layouts, and dry runs that fit.

Layouts of `qwen3_moe_vlm` and of both `_plan` are those of `mmjax.plan`, of the others those of the paper.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from trial_runs import REPOSITORY

from mmjax.assembly.buckets import build_packer
from mmjax.assembly.model import build_model
from mmjax.config import load_config
from mmjax.configurable import from_preset
from mmjax.data.loader import tokenizer_of
from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM, projector_name
from mmjax.models.flops import parameter_count
from mmjax.models.unet.config import UNetConfig
from mmjax.planner.accelerators import H100
from mmjax.recipe import Recipe
from mmjax.recipe.advice import advise
from mmjax.train.dry_run import dry_run

PULLED = Layout(lanes=4, shard="parameters", gather="pull")
SEGMENTS = replace(PULLED, cp=4, cp_way="need", cp_tokens="segments")
SPLIT = Layout(dp=2, pp=4, chunks=2, cp=4, ep=8, ep_way="all-to-all")
LAYOUTS = {
    "qwen3_moe_vlm": {"vision": Layout(dp=4, tp=2), "llm": Layout(dp=4, pp=2, tp=2, ep=4, ep_way="all-to-all")},
    "bigmac_understanding": {"vision": replace(SEGMENTS, dp=2), "llm": SPLIT},
    "bigmac_understanding_plan": {
        "vision": replace(SEGMENTS, dp=4, lanes=2, shard="states", gather="layer"),
        "llm": replace(SPLIT, dp=4, pp=2),
    },
    "bigmac_generation": {
        "vision": replace(SEGMENTS, dp=4),
        "llm": replace(SPLIT, dp=4),
        "painter": replace(PULLED, dp=2, tp=8),
    },
    "bigmac_generation_mmdit": {
        "vision": replace(SEGMENTS, dp=4),
        "llm": replace(SPLIT, dp=4),
        "painter": replace(PULLED, dp=2, tp=8),
    },
    "bigmac_generation_plan": {
        "vision": Layout(lanes=2, dp=8, tp=4),
        "llm": replace(SPLIT, dp=16, pp=2, chunks=1, cp=2),
        "painter": Layout(lanes=2, dp=8, tp=4),
    },
    "mllm_9b": {
        "vision": Layout(dp=8, rank_offset=64),
        "llm": Layout(dp=8, tp=8),
        "painter": Layout(dp=8, rank_offset=72),
    },
    "mllm_15b": {
        "vision": Layout(dp=8, rank_offset=64),
        "llm": Layout(dp=8, tp=8),
        "painter": Layout(dp=8, rank_offset=72),
    },
    "mllm_72b": {
        "vision": Layout(dp=7, rank_offset=64),
        "llm": Layout(pp=8, tp=8),
        "painter": Layout(dp=7, rank_offset=71),
    },
}
EXPERTS = [name for name in LAYOUTS if not name.startswith("mllm")]
RUNS = {
    "qwen3_moe_vlm": (32, "1f1b", 0.05),
    "bigmac_understanding": (32, "nested", 0.08),
    "bigmac_understanding_plan": (16, "nested", 0.05),
    "bigmac_generation": (32, "nested", 0.08),
    "bigmac_generation_mmdit": (32, "nested", 0.08),
    "bigmac_generation_plan": (8, "nested", 0.08),
    "mllm_9b": (16, "1f1b", 0.3),
    "mllm_15b": (8, "1f1b", 0.4),
    "mllm_72b": (40, "1f1b", 0.4),
}
"""Microbatches, schedule, and the most of the devices' time that a step has idle."""
PARAMETERS = {
    "qwen3_moe_vlm": {"vision": 0.41e9, LLM: 30.53e9},
    "bigmac_understanding": {"vision": 1.33e9, LLM: 30.53e9},
    "bigmac_understanding_plan": {"vision": 1.33e9, LLM: 30.53e9},
    "bigmac_generation": {"vision": 1.33e9, LLM: 30.53e9, "painter": 20.2e9},
    "bigmac_generation_mmdit": {"vision": 1.33e9, LLM: 30.53e9, "painter": 20.42e9},
    "bigmac_generation_plan": {"vision": 1.33e9, LLM: 30.53e9, "painter": 20.2e9},
    "mllm_9b": {"vision": 0.632e9, LLM: 7.53e9, "painter": 0.866e9},
    "mllm_15b": {"vision": 0.632e9, LLM: 14.0e9, "painter": 0.866e9},
    "mllm_72b": {"vision": 0.632e9, LLM: 70.55e9, "painter": 0.866e9},
}
SHORT = ("llm/Decoder.layers=8", "vision/ViT.layers=2")


def load(name: str, *bindings: str) -> Recipe:
    return load_config([REPOSITORY / "configs" / f"{name}.gin"], bindings)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_and_schedules(name: str) -> None:
    recipe = load(name)
    assert recipe.model.layouts == LAYOUTS[name] and advise(recipe) == ()
    assert (recipe.train.microbatches, recipe.train.schedule) == RUNS[name][:2]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] if name.startswith("mllm") else []) for name in PARAMETERS],
)
def test_models_have_the_published_sizes(name: str) -> None:
    recipe = load(name)
    counted = parameter_count(build_model(recipe, tokenizer_of(recipe.data.settings, recipe.model.media)))
    for module, size in PARAMETERS[name].items():
        assert counted[module] == pytest.approx(size, rel=0.01), module
    assert counted[projector_name("vision")] > 2048**2, "two layers"


@pytest.mark.parametrize(("name", "pixels"), [("mllm_9b", 512), ("mllm_15b", 512), ("mllm_72b", 1024)])
def test_pictures_are_as_large_as_in_the_paper(name: str, pixels: int) -> None:
    recipe = load(name)
    settings = recipe.model["painter"].settings
    assert settings == replace(from_preset(UNetConfig, "sd-2.1"), canvases=settings.canvases, remat="dots")
    assert settings.canvases == ((pixels // 8, pixels // 8),)


@pytest.mark.long
@pytest.mark.parametrize("name", ["bigmac_understanding_plan", "bigmac_understanding", "bigmac_generation"])
def test_each_rank_of_an_encoders_cp_has_a_whole_picture(name: str) -> None:
    recipe = load(name)
    packer = build_packer(recipe, tokenizer_of(recipe.data.settings, recipe.model.media))
    layout, ((_, width),) = recipe.model.layouts["vision"], packer.buckets_of("vision")
    assert packer.worst and width // layout.cp >= packer.worst.patches["vision"] and layout.cp == 4


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXPERTS)
def test_a_dry_run_of_few_layers_has_every_program(name: str) -> None:
    generators = [] if "painter" not in LAYOUTS[name] else ["MMDiT" if name.endswith("mmdit") else "DiT"]
    recipe = load(name, *SHORT, *(f"painter/{generator}.layers=2" for generator in generators))
    forecast = dry_run(recipe)
    stages = {f"{module}.{stage}" for module, layout in LAYOUTS[name].items() for stage in range(layout.stages)}
    programs = sum(layout.stages * layout.lanes for layout in LAYOUTS[name].values())
    assert set(forecast.memory) == stages and forecast.programs["F"] == programs
    assert forecast.parts.planned.bubble < 0.5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dry_run_fits_on_h100s(name: str) -> None:
    forecast = dry_run(load(name))
    assert forecast.peak and forecast.peak.bytes < H100.usable
    assert forecast.parts.planned.bubble < RUNS[name][2]
