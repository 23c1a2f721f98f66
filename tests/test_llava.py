"""The LLaVA-1.5 shapes: the published ones, and trained as one device trains them."""

from __future__ import annotations

import dataclasses

import pytest
from trial_runs import REPOSITORY

from mmjax.assembly.assembly import plan
from mmjax.assembly.model import build_model, encoder_specs
from mmjax.assembly.samples import open_source
from mmjax.config import load_config
from mmjax.data.tokenizer import make_tokenizer
from mmjax.mesh.layout import Layout
from mmjax.models.families import module_of
from mmjax.models.flops import parameter_count
from mmjax.parity import check
from mmjax.recipe import Recipe

# What mmjax.plan found on eight H100s; and microbatches, schedule, and how much of the devices' time a step has idle.
LAYOUTS = {
    "llava15": {"vision": Layout(rank_offset=7), "llm": Layout(pp=7)},
    "llava15_homogeneous": {"vision": Layout(dp=4), "llm": Layout(dp=4, pp=2, chunks=4)},
    "llava15_colocated": {"vision": Layout(dp=4, lanes=2), "llm": Layout(dp=4, pp=2, chunks=4)},
}
RUNS = {
    "llava15": (48, "zb-h1", 0.25),
    "llava15_homogeneous": (12, "interleaved", 0.12),
    "llava15_colocated": (12, "three-phase", 0.05),
}


def load(name: str) -> Recipe:
    return load_config([REPOSITORY / "configs" / f"{name}.gin"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_variants_differ_in_what_is_planned_alone(name: str) -> None:
    config, first = load(name), load("llava15")
    assert config.model.layouts == LAYOUTS[name] and config.devices == 8
    assert (config.train.microbatches, config.train.schedule) == RUNS[name][:2]
    assert dataclasses.replace(config, model=config.model.with_layouts(first.model.layouts), train=first.train) == first
    planned = {field: getattr(first.train, field) for field in ("microbatches", "schedule", "inner")}
    assert dataclasses.replace(config.train, **planned) == first.train


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_few_devices_are_idle(name: str) -> None:
    assert plan(load(name)).planned.bubble < RUNS[name][2]


def test_the_shape_and_the_hyperparameters_are_the_published_ones() -> None:
    config = load("llava15")
    vision, llm = config.model["vision"].settings, config.model["llm"].settings
    assert module_of(llm).parameters() == 6_738_415_616  # Vicuna-7B
    # CLIP ViT-L/14 at 336 pixels without its last layer and the norm behind that.
    assert (vision.layers, vision.width, vision.patch, vision.grid**2) == (23, 1024, 14, 576)
    assert (vision.class_token, vision.patch_bias, vision.stem_norm, vision.last_norm) == (True, False, True, False)
    assert module_of(vision).parameters() == 303_507_456 - 2 * 1024 - (12 * 1024**2 + 13 * 1024)
    assert config.model.projectors["vision"].settings.activation == "gelu_exact"
    # Every patch is a token, and the projector has two layers with biases, 1024 to 4096 to 4096.
    model, source = build_model(config, make_tokenizer("", ("vision",))), open_source(config, split="train")
    assert parameter_count(model)["vision_projector"] == 20_979_712
    specs = encoder_specs(config)
    assert specs["vision"].tokens(336, 336) == 576 and source.meta(0).patches == {"vision": (576,)}
    sample = source.sample(0)
    assert (
        sample.placeholders("vision").sum() == 576
        and source.worst_case().tokens <= config.data.settings.sequence_length
    )
    for optimizer in (config.model.optimizers["llm"], config.model.optimizers["vision_projector"]):
        assert (optimizer.learning_rate, optimizer.final_learning_rate, optimizer.warmup) == (1e-4, 1e-5, 60)
        assert (optimizer.b1, optimizer.b2, optimizer.weight_decay, optimizer.frozen) == (0.9, 0.95, 0.0, False)
    assert config.model.optimizers["vision"].frozen
    assert (config.train.global_batch, config.train.dtype, config.train.clip_norm) == (96, "bfloat16", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_as_one_device_does(name: str) -> None:
    report = check(load(name), style="silent")
    assert report
    assert report.ok, report.numbers()
    assert report.shrunk.recipe.model.layouts == LAYOUTS[name]
