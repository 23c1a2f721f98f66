"""The LLaVA-1.5 shapes: the published ones, and trained as one device trains them."""

from __future__ import annotations

import dataclasses

import pytest
from runs import REPOSITORY

from mmjax.config import Config, load_config
from mmjax.mesh.layout import Layout
from mmjax.models.flops import decoder_parameters, vit_parameters
from mmjax.parity import check

LAYOUTS = {
    "llava15": {"vision": Layout(tp=2, dp=2, rank_offset=4), "llm": Layout(tp=2, pp=2)},
    "llava15_homogeneous": {"vision": Layout(tp=2, dp=2), "llm": Layout(tp=2, pp=2, dp=2)},
    "llava15_colocated": {"vision": Layout(tp=2, dp=4), "llm": Layout(tp=2, pp=2, dp=2)},
}


def load(name: str) -> Config:
    return load_config([REPOSITORY / "configs" / f"{name}.gin"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_variants_differ_in_their_layouts_alone(name: str) -> None:
    config, first = load(name), load("llava15")
    assert config.layouts == LAYOUTS[name] and config.devices == 8
    assert dataclasses.replace(config, layouts=first.layouts) == first


def test_the_shape_and_the_hyperparameters_are_the_published_ones() -> None:
    config = load("llava15")
    vision, llm = config.encoders["vision"], config.llm
    assert decoder_parameters(llm) == 6_738_415_616  # Vicuna-7B
    # CLIP ViT-L/14 without its last layer, class token and first norm.
    assert (vision.layers, vision.width, vision.patch, vision.grid**2) == (23, 1024, 14, 576)
    assert 285e6 < vit_parameters(vision) < 295e6
    for optimizer in (config.optimizers["llm"], config.optimizers["vision_projector"]):
        assert (optimizer.learning_rate, optimizer.final_learning_rate, optimizer.warmup) == (1e-4, 1e-5, 60)
        assert (optimizer.b1, optimizer.b2, optimizer.weight_decay, optimizer.frozen) == (0.9, 0.95, 0.0, False)
    assert config.optimizers["vision"].frozen
    assert (config.train.global_batch, config.train.dtype, config.train.clip_norm) == (96, "bfloat16", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_as_one_device_does(name: str) -> None:
    report = check(load(name), style="silent")
    assert report
    assert report.ok, report.numbers()
    assert report.shrunk.config.layouts == LAYOUTS[name]
