"""Learning rates of single parameters: where each stands in its module, and patterns that stand for nothing."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from trial_runs import write_tiny

from mmjax import reference
from mmjax.assembly.assembly import place
from mmjax.assembly.model import build_model, with_fitting_rates
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.tokenizer import make_tokenizer
from mmjax.mesh.layout import Layout
from mmjax.models.graph import MultimodalModel
from mmjax.pipeline.rates import factors_of

RATES = "llm/Optimizer.rates={'layers/*/attn/[qk]': 0.5, 'head': 0.25}"
DECAYS = ("Optimizer.layer_decay=0.5", "llm/Lora.rank=1", "llm/Decoder.layers=3", "llm/Decoder.tied=True")


def factors(model: MultimodalModel, optimizers: dict, layouts: dict[str, Layout]) -> dict[str, float]:
    """Of every leaf that a stage owns."""
    leaves = [
        leaf
        for stage in model.stages(layouts)
        for part in stage.slices
        for leaf in jax.tree.leaves(part.leaves())
        if leaf.tie != "borrowed"
    ]
    return {
        name: factor
        for leaf in leaves
        for name, factor in zip(leaf.names, factors_of(optimizers[leaf.module], leaf), strict=True)
    }


@pytest.mark.parametrize("unroll", [False, True])
def test_factors_do_not_depend_on_the_layout(unroll: bool, tmp_path: Path) -> None:
    rates = RATES.replace(", 'head': 0.25", ", 'embed': 0.25")  # the head is tied
    config = load_config([write_tiny(tmp_path)], [rates, *DECAYS, f"Train.unroll={unroll}", "llm/Layout.tp=1"])
    model, optimizers = build_model(config, make_tokenizer("", ("vision",))), dict(config.model.optimizers)
    alone = factors(model, optimizers, dict.fromkeys(model.nodes, Layout()))
    cut = {"llm": Layout(pp=2, layers=(1, 2)), "vision": Layout()}
    assert factors(model, optimizers, cut) == alone
    assert reference.rate_factors(alone, model, optimizers) == alone
    assert alone["llm/embed"] == 0.25 * 0.5**4 and alone["llm/norm"] == 1
    assert [alone[f"llm/layers/{i:03d}/attn/q"] for i in range(3)] == [0.5 * 0.5 ** (3 - i) for i in range(3)]
    assert [alone[f"llm/layers/{i:03d}/attn/v"] for i in range(3)] == [0.5 ** (3 - i) for i in range(3)]
    assert [alone[f"llm_lora/layers/{i:03d}/attn/q/a"] for i in range(3)] == [0.5 ** (3 - i) for i in range(3)]
    assert (alone["vision/patch/kernel"], alone["vision/layers/000/mlp/up"], alone["vision/norm/scale"]) == (
        0.25,
        0.5,
        1,
    )
    assert {factor for name, factor in alone.items() if name.startswith("vision_projector/")} == {1.0}


def test_a_pattern_that_fits_nothing_is_named_with_near_ones(tmp_path: Path) -> None:
    config = load_config([write_tiny(tmp_path)], [RATES.replace("layers/*", "layer/*")])
    said = (
        r"^llm/Optimizer\.rates=\{.*\}: 'layer/\*/attn/\[qk\]' fits no parameter of llm; "
        r"did you mean 'layers/\*/attn/q'\?$"
    )
    with pytest.raises(ConfigError, match=said):
        place(config)
    left = with_fitting_rates(config)
    assert dict(left.model.optimizers["llm"].rates) == {"head": 0.25} and not left.model.optimizers["vision"].rates
